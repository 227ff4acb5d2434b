"""The embedded engine: the suite every engine passes, and what only this one can break (it lives in the trainer)."""

from __future__ import annotations

import asyncio
import random
import threading
from itertools import product
from typing import ClassVar

import numpy as np
import pytest
import torch
import transformers
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    FalconConfig,
    Gemma2Config,
    Gemma3nTextConfig,
    Gemma3TextConfig,
    Gemma4TextConfig,
    GptOssConfig,
    LlamaConfig,
    Mamba2Config,
    MambaConfig,
    MistralConfig,
    Qwen2Config,
)

from app.tree.attention.chosen import group_indexer
from datamodules.inference.embedded import EmbeddedEngine, batcher, kv_slots
from datamodules.inference.protocol import GenerationError, GenerationRequest, WeightUpdate
from tests.app.tree.engine import families
from tests.datamodules.inference.engine_suite import (
    CONTEXT,
    VOCABULARY,
    EngineSuite,
    assert_parity,
    generate_all,
    prompts_of,
    tiny_policy,
    wait_until_generating,
)
from tests.helpers.selection import some


def started(policy=None, seed=3, **settings) -> EmbeddedEngine:
    engine = EmbeddedEngine(**({"control_timeout_s": 60.0, "request_timeout_s": 60.0} | settings))
    engine.start(policy or tiny_policy(), version=0, seed=seed)
    return engine


def answers(engine: EmbeddedEngine, requests: list[GenerationRequest]):
    try:
        return asyncio.run(generate_all(engine, requests))
    finally:
        engine.close()


class TestEmbedded(EngineSuite):
    @pytest.fixture
    def engine(self, policy):
        engine = started(policy)
        yield engine
        engine.close()


class TestEmbeddedSqueezed(EngineSuite):
    """The same promises when requests wait for room, prompts go in chunks and the grid is laid out anew."""

    @pytest.fixture
    def engine(self, policy):
        engine = started(policy, kv_cache_tokens=700, max_batch_tokens=16, max_concurrent=7)
        yield engine
        engine.close()


SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": CONTEXT,
    "initializer_range": 0.15,
}
WIDTHS = {
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "sliding_window": 8,
    "head_dim": 8,
    "global_head_dim": 16,
}


@pytest.mark.parametrize(
    "config",
    [
        Qwen2Config(**SHAPE),
        Qwen2Config(**SHAPE, use_sliding_window=True, sliding_window=6, max_window_layers=1),
        LlamaConfig(**SHAPE),
        MistralConfig(**SHAPE, sliding_window=8),
        Gemma3nTextConfig(
            **{**SHAPE, "num_hidden_layers": 4},
            num_kv_shared_layers=2,
            layer_types=["sliding_attention", "full_attention"] * 2,
            sliding_window=8,
            head_dim=8,
            activation_sparsity_pattern=[0.5, 0.0, 0.0, 0.0],
            hidden_size_per_layer_input=8,
            vocab_size_per_layer_input=VOCABULARY,
        ),
        Gemma4TextConfig(
            **{**SHAPE, "num_hidden_layers": 4},
            **WIDTHS,
            num_kv_shared_layers=2,
            use_double_wide_mlp=True,
            hidden_size_per_layer_input=8,
            vocab_size_per_layer_input=VOCABULARY,
        ),
        Gemma4TextConfig(
            **{**SHAPE, "num_hidden_layers": 4},
            **WIDTHS,
            attention_k_eq_v=True,
            num_global_key_value_heads=1,
            hidden_size_per_layer_input=0,
            enable_moe_block=True,
            num_experts=4,
            top_k_experts=2,
            moe_intermediate_size=16,
        ),
    ],
    ids=["qwen2", "qwen2-sliding", "llama", "mistral-sliding", "gemma3n", "gemma4-shared", "gemma4-experts"],
)
@pytest.mark.parametrize("max_batch_tokens", [4096, 10])
def test_other_families(config, max_batch_tokens) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    requests = [GenerationRequest(prompt, 20) for prompt in prompts_of([3, 30, 30, 4])]
    for request, response in zip(requests, answers(started(model, max_batch_tokens=max_batch_tokens), requests)):
        assert_parity({0: model}, request, response, 1e-5)


def test_a_state_that_is_not_keys_and_values_is_refused() -> None:
    model = AutoModelForCausalLM.from_config(MambaConfig(vocab_size=16, hidden_size=16, num_hidden_layers=1))
    engine = EmbeddedEngine()
    with pytest.raises((GenerationError, ValueError)):
        engine.start(model, 0, 0)
    assert not engine.health()["alive"]


def test_a_model_without_attention_is_refused_at_its_start() -> None:
    shape = dict(num_heads=4, head_dim=8, state_size=8, n_groups=1, expand=2)
    model = AutoModelForCausalLM.from_config(Mamba2Config(vocab_size=16, hidden_size=16, num_hidden_layers=1, **shape))
    engine = EmbeddedEngine()
    with pytest.raises(GenerationError, match=r"Mamba2ForCausalLM has no layer of attention, .*use another model"):
        engine.start(model, 0, 0)
    assert not engine.health()["alive"]


@pytest.mark.parametrize(
    "config",
    [
        Gemma2Config(**SHAPE, head_dim=8, attn_logit_softcapping=1.5, sliding_window=8),
        GptOssConfig(**SHAPE, head_dim=8, num_local_experts=2, num_experts_per_tok=1, sliding_window=8),
    ],
    ids=["gemma2", "gpt-oss"],
)
@pytest.mark.parametrize("max_batch_tokens", [4096, 10])
def test_scores_that_are_capped_and_sinks(config, max_batch_tokens, monkeypatch: pytest.MonkeyPatch) -> None:
    """In blocks of a few queries, too."""
    monkeypatch.setattr(kv_slots, "_SCORES", 2000)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("sinks"):
                parameter.normal_(1.0)
    requests = [GenerationRequest(prompt, 20) for prompt in prompts_of([3, 30, 30, 4])]
    for request, response in zip(requests, answers(started(model, max_batch_tokens=max_batch_tokens), requests)):
        assert_parity({0: model}, request, response, 1e-5)


CHOOSING = {row: {"index_topk": 64} for row in ("DeepSeek-V3.2", "GLM-5", "GLM-5.3", "DeepSeek-V4")}
CHOOSING |= {"MiniMax-M3": {"index_topk_blocks": 64}, "Qwen 4 (experimental)": {"indexer_budget": 64}}


@pytest.mark.parametrize("row", CHOOSING)
@pytest.mark.parametrize(("max_batch_tokens", "block"), some(product((4096, 10), (1, 2**20)), [(4096, 2**20), (10, 1)]))
def test_tokens_that_an_indexer_chose(row: str, max_batch_tokens: int, block: int, monkeypatch) -> None:
    """Prompts shorter and longer than what is chosen, at once and in parts; and that it is chosen: no more is seen."""
    monkeypatch.setattr(group_indexer, "_SCORE_BYTES", block)
    model = families.build(families.SUPPORTED[row])
    prompts = ([token % 31 for token in prompt] for prompt in prompts_of([3, 30, 30, 4]))
    requests = [GenerationRequest(prompt, 20) for prompt in prompts]
    found = answers(started(model, max_batch_tokens=max_batch_tokens), requests)
    for request, response in zip(requests, found):
        assert_parity({0: model}, request, response, 1e-5)
    all_ = families.build(families.SUPPORTED[row], **CHOOSING[row])
    other = answers(started(all_, max_batch_tokens=max_batch_tokens), requests)
    assert [response.tokens for response in found[1:3]] != [response.tokens for response in other[1:3]]


@pytest.mark.parametrize("max_batch_tokens", [4096, 10])
def test_sections_and_scales_of_positions(max_batch_tokens: int) -> None:
    """Prompts at once and in parts, shorter than a section and longer; queries scaled by steps of the position. Without
    either the dense model says something else."""
    row = families.SUPPORTED["Llama 4"]
    model = families.build(row)
    prompts = ([token % 31 for token in prompt] for prompt in prompts_of([3, 30, 30, 4]))
    requests = [GenerationRequest(prompt, 20) for prompt in prompts]
    found = answers(started(model, max_batch_tokens=max_batch_tokens), requests)
    for request, response in zip(requests, found):
        assert_parity({0: model}, request, response, 1e-5)
    for other in ({"attention_chunk_size": 64}, {"attn_temperature_tuning": False}):
        with pytest.raises(AssertionError):
            assert_parity({0: families.build(row, **other)}, requests[1], found[1], 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("kind", families.OTHERS)
def test_what_a_tree_takes_is_served(kind: str) -> None:
    """Families of which nothing else is looked at."""
    if kind not in CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no {kind}")
    model = families.build(families.other(kind))
    requests = [GenerationRequest([3, 10, 17, *range(more)], 12) for more in (0, 9, 9, 14)]
    for request, response in zip(requests, answers(started(model, max_batch_tokens=10), requests)):
        assert_parity({0: model}, request, response, 1e-5)


def test_what_attends_otherwise_is_refused_at_its_start() -> None:
    """By code of its own, which says what it likes, or with an argument that changes the result."""
    config = FalconConfig(vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=1, num_attention_heads=4)
    model, engine = AutoModelForCausalLM.from_config(config), EmbeddedEngine()
    remedy = r"generate with SGLang servers instead \(data\.engine: SGLangEngine\)"
    with pytest.raises(GenerationError, match=rf"{type(model).__name__} cannot run in it: .*; {remedy}"):
        engine.start(model, 0, 0)
    assert not engine.health()["alive"]
    with pytest.raises(NotImplementedError, match="does not honour position_bias of Linear"):
        q = k = v = torch.zeros(1, 1, 1, 4)
        kv_slots.attend(torch.nn.Linear(1, 1), q, k, v, None, slots=kv_slots.KVSlots(8), position_bias=v)
    ahead = Gemma3TextConfig(**SHAPE, head_dim=8, use_bidirectional_attention=True)
    with pytest.raises(GenerationError, match="does not honour is_causal=False of Gemma3Attention"):
        engine.start(AutoModelForCausalLM.from_config(ahead), 0, 0)


class TestReproducible:
    requests: ClassVar = [GenerationRequest(prompt, 15) for prompt in prompts_of([8] * 6 + [3] * 6) for _ in range(4)]

    def test_same_seed_same_everything(self) -> None:
        first, second = (answers(started(seed=3), self.requests) for _ in range(2))
        assert [r.tokens for r in first] == [r.tokens for r in second]
        assert [r.logprobs for r in first] == [r.logprobs for r in second]  # to the bit: the same batches
        other = answers(started(seed=4), self.requests)
        assert [r.tokens for r in first] != [r.tokens for r in other]
        assert len({tuple(r.tokens) for r in first[:4]}) == 4  # samples of one prompt differ

    def test_requests_of_one_turn_of_the_loop_run_together(self, monkeypatch) -> None:
        """Otherwise batches, and with them the last bits of log-probabilities, would depend on timing."""
        engine = started()
        step, running = engine._batcher.step, []

        def spy(version):
            ended = step(version)
            running.append(len(engine._batcher.running) + len(ended))
            return ended

        monkeypatch.setattr(engine._batcher, "step", spy)
        answers(engine, self.requests)
        assert running == [len(self.requests)] * 15

    def test_draws_do_not_depend_on_the_company(self) -> None:
        together = answers(started(), self.requests)
        squeezed = answers(started(kv_cache_tokens=160, max_concurrent=3, max_batch_tokens=5), self.requests)
        assert [r.tokens for r in together] == [r.tokens for r in squeezed]

    def test_a_request_seed_fixes_it_whatever_came_before(self) -> None:
        fixed = GenerationRequest(prompts_of([8])[0], 15, seed=11)
        alone = answers(started(seed=3), [fixed])[0]
        late = answers(started(seed=9), [*self.requests, fixed])[-1]
        assert alone.tokens == late.tokens

    def test_the_same_after_an_interruption_by_equal_weights(self) -> None:
        policy = tiny_policy()
        requests = [GenerationRequest(prompt, 100) for prompt in prompts_of([8] * 8)]
        undisturbed = answers(started(policy), requests)
        engine = started(policy)

        async def run():
            loop = asyncio.get_running_loop()
            tasks = [asyncio.create_task(engine.generate(request)) for request in requests]
            await loop.run_in_executor(None, wait_until_generating, engine)
            update = WeightUpdate(1, state_dict=policy.state_dict())
            await loop.run_in_executor(None, engine.update_weights, update)
            return await asyncio.gather(*tasks)

        disturbed = asyncio.run(run())
        engine.close()
        assert [r.tokens for r in disturbed] == [r.tokens for r in undisturbed]
        assert any(set(r.versions) == {0, 1} for r in disturbed)


def test_the_trainer_notices_nothing() -> None:
    policy = tiny_policy().train()
    before = {name: tensor.clone() for name, tensor in policy.state_dict().items()}
    attention, threads = policy.config._attn_implementation, torch.get_num_threads()
    torch.manual_seed(5), random.seed(5), np.random.seed(5)
    expected = torch.rand(3), random.random(), np.random.rand()
    torch.manual_seed(5), random.seed(5), np.random.seed(5)
    engine = started(policy, num_threads=1)
    asyncio.run(generate_all(engine, [GenerationRequest([1, 2], 8)]))
    engine.update_weights(WeightUpdate(1, state_dict=tiny_policy(seed=1).state_dict()))
    answers(engine, [GenerationRequest([1, 2], 8)])
    assert torch.equal(torch.rand(3), expected[0])
    assert (random.random(), np.random.rand()) == expected[1:]
    assert policy.training and policy.config._attn_implementation == attention and torch.get_num_threads() == threads
    assert all(parameter.requires_grad for parameter in policy.parameters()) and torch.is_grad_enabled()
    assert all(torch.equal(tensor, before[name]) for name, tensor in policy.state_dict().items())
    assert not any(thread.name == "embedded-engine" for thread in threading.enumerate())


def test_training_the_policy_does_not_reach_the_engine_before_an_update() -> None:
    policy, frozen = tiny_policy(), tiny_policy()
    engine = started(policy)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.mul_(1.5)
    request = GenerationRequest(prompts_of([5])[0], 10)
    assert_parity({0: frozen}, request, asyncio.run(engine.generate(request)), 1e-5)
    engine.update_weights(WeightUpdate(1, state_dict=policy.state_dict()))
    assert_parity({1: policy}, request, answers(engine, [request])[0], 1e-5)


def test_weights_from_a_directory(tmp_path) -> None:
    newer = tiny_policy(seed=2)
    newer.save_pretrained(tmp_path / "weights")
    engine = started()
    with pytest.raises(GenerationError, match=r"WeightUpdate\.path.*nowhere"):
        engine.update_weights(WeightUpdate(1, path=str(tmp_path / "nowhere")))
    assert engine.version == 0
    assert engine.update_weights(WeightUpdate(1, path=str(tmp_path / "weights"))) > 0
    request = GenerationRequest(prompts_of([5])[0], 10)
    assert_parity({1: newer}, request, answers(engine, [request])[0], 1e-5)


def test_weights_that_do_not_fit_change_nothing() -> None:
    policy = tiny_policy()
    engine = started(policy)
    good = tiny_policy(seed=1).state_dict()
    name = "model.layers.1.mlp.up_proj.weight"
    for bad, match in (
        ({k: v for k, v in good.items() if k != name}, f"missing.*{name}"),
        (good | {"extra": torch.zeros(1)}, "unknown.*extra"),
        (good | {name: torch.zeros(2, 2)}, rf"{name}.*\(2, 2\)"),
    ):
        with pytest.raises(GenerationError, match=match):
            engine.update_weights(WeightUpdate(1, state_dict=bad))
    with pytest.raises(ValueError, match="exactly one of state_dict, parts and path"):
        WeightUpdate(1)
    request = GenerationRequest(prompts_of([5])[0], 10)
    assert_parity({0: policy}, request, answers(engine, [request])[0], 1e-5)


def test_an_update_that_breaks_off_ends_the_engine(monkeypatch) -> None:
    """Weights of two versions mixed must never generate."""
    engine = started()
    monkeypatch.setattr(
        "datamodules.inference.embedded.engine.matched", lambda model, weights: [(torch.zeros(2), torch.zeros(3))]
    )
    with pytest.raises(RuntimeError, match="size"):
        engine.update_weights(WeightUpdate(1, state_dict={}))
    with pytest.raises(GenerationError, match="size"):
        answers(engine, [GenerationRequest([1, 2], 4)])
    assert engine.version == 0 and not engine.health()["alive"]


def test_memory_is_what_the_configuration_says() -> None:
    engine = started(kv_cache_tokens=320, max_concurrent=4)
    requests = [GenerationRequest(prompt, 30) for prompt in prompts_of([40] * 30)]
    asyncio.run(generate_all(engine, requests))
    # keys and values x 2 layers x 320 tokens x 2 heads x 16 numbers x 4 bytes
    assert engine.health()["kv_cache_bytes"] == 2 * 2 * 320 * 2 * 16 * 4
    engine.close()
    small = started(kv_cache_tokens=32)
    assert small.max_context == 32
    with pytest.raises(GenerationError, match=r"max_new_tokens.*context of 32"):
        answers(small, [GenerationRequest([1] * 20, 13)])


def test_forwards_on_a_gpu_leave_out_kernels_that_plan_for_a_length(monkeypatch) -> None:
    """cuDNN's: on Hopper every decoded token would build another plan. Afterwards torch chooses as before."""
    seen, real = [], batcher.any_length
    monkeypatch.setattr(batcher, "any_length", lambda device: real(torch.device("cuda")))
    attend = torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(
        torch.nn.functional,
        "scaled_dot_product_attention",
        lambda *args, **given: seen.append(torch.backends.cuda.cudnn_sdp_enabled()) or attend(*args, **given),
    )
    with real(torch.device("cpu")):
        assert torch.backends.cuda.cudnn_sdp_enabled()
    answers(started(), [GenerationRequest([1, 2, 3], 4)])
    assert len(seen) > 4 and not any(seen) and torch.backends.cuda.cudnn_sdp_enabled()


def test_a_failure_in_the_thread_reaches_everyone() -> None:
    engine = started()
    poison = {name: torch.full_like(tensor, torch.nan) for name, tensor in tiny_policy().state_dict().items()}

    async def run():
        engine.pause()
        engine.update_weights(WeightUpdate(1, state_dict=poison))
        tasks = [
            asyncio.create_task(engine.generate(GenerationRequest([1, 2], 8, request_id=f"r{i}"))) for i in range(9)
        ]
        await asyncio.sleep(0.05)
        engine.resume()
        return await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 60)

    errors = asyncio.run(run())
    assert len(errors) == 9 and all(isinstance(error, GenerationError) for error in errors)
    assert "'r4'" in str(errors[4]) and "version 1" in str(errors[4]) and "not finite" in str(errors[4])
    assert not engine.health()["alive"] and "not finite" in engine.health()["error"]
    with pytest.raises(GenerationError, match="not finite"):
        asyncio.run(engine.generate(GenerationRequest([1, 2], 8)))
    engine.close()
    engine.start(tiny_policy(), version=2, seed=0)  # closed engines can start again
    assert answers(engine, [GenerationRequest([1, 2], 8)])[0].versions == [2] * 8


def test_a_request_has_a_deadline_and_pauses_do_not_count() -> None:
    engine = started(request_timeout_s=1.0)

    async def run():
        engine.pause()
        pending = asyncio.create_task(engine.generate(GenerationRequest([1, 2], 4)))
        await asyncio.sleep(1.2)
        engine.resume()
        return await pending

    assert len(asyncio.run(run()).tokens) == 4
    engine.request_timeout_s = 1e-9
    with pytest.raises(GenerationError, match=r"'late'.*request_timeout_s"):
        answers(engine, [GenerationRequest(prompts_of([90])[0], 70, request_id="late")])


def test_a_stuck_forward_pass_is_named(monkeypatch) -> None:
    engine = started(control_timeout_s=0.2)
    entered, release = threading.Event(), threading.Event()
    step = engine._batcher.step

    def slow(version):
        entered.set()
        release.wait(60)
        return step(version)

    monkeypatch.setattr(engine._batcher, "step", slow)

    async def run():
        task = asyncio.create_task(engine.generate(GenerationRequest([1, 2], 2)))
        await asyncio.get_running_loop().run_in_executor(None, entered.wait, 60)
        for control in (
            engine.pause,
            lambda: engine.update_weights(WeightUpdate(1, state_dict=tiny_policy().state_dict())),
        ):
            with pytest.raises(GenerationError, match=r"forward pass in progress.*control_timeout_s"):
                control()
        with pytest.raises(GenerationError, match=r"forward pass in progress.*left of WeightUpdate\.deadline_s"):
            engine.update_weights(WeightUpdate(1, state_dict=tiny_policy().state_dict(), deadline_s=0.05))
        release.set()
        return await task  # not paused: a control that failed leaves no trace

    assert len(asyncio.run(run()).tokens) == 2
    assert engine.version == 0
    engine.close()


@pytest.mark.parametrize(
    "setting", [{"kv_cache_tokens": 0}, {"max_concurrent": -1}, {"dtype": "fp8"}, {"num_threads": 0}], ids=str
)
def test_a_bad_setting_is_named(setting) -> None:
    with pytest.raises(ValueError, match=rf"EmbeddedEngine\.{next(iter(setting))}"):
        EmbeddedEngine(**setting)


def test_lifecycle_errors() -> None:
    engine = EmbeddedEngine()
    with pytest.raises(GenerationError, match="not running"):
        asyncio.run(engine.generate(GenerationRequest([1], 1)))
    with pytest.raises(GenerationError, match="not running"):
        _ = engine.vocab_size
    engine.close()
    engine.start(tiny_policy(), 0, 0)
    with pytest.raises(GenerationError, match="already runs"):
        engine.start(tiny_policy(), 0, 0)
    engine.close()
