"""Models whose layers carry a state, in the embedded engine: its promises, and the trainer's own log-probabilities."""

from __future__ import annotations

import asyncio

import pytest
import torch
from transformers import AutoModelForCausalLM, Lfm2Config, PreTrainedModel, Qwen3_5MoeTextConfig, Qwen3_5TextConfig

from app.tree import PrefixTree, TreeEngine
from datamodules.inference.embedded import EmbeddedEngine
from datamodules.inference.protocol import GenerationRequest, WeightUpdate
from tests.app.tree.models import SINCE
from tests.datamodules.inference.engine_suite import CONTEXT, VOCABULARY, EngineSuite, generate_all, prompts_of
from tests.helpers.selection import skip_without

SHAPE = dict(
    vocab_size=VOCABULARY,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=CONTEXT,
    initializer_range=0.06,
    pad_token_id=None,
)
DELTA = dict(
    head_dim=16,
    layer_types=["linear_attention", "full_attention", "linear_attention"],
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=8,
    linear_value_head_dim=8,
)
EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, shared_expert_intermediate_size=16)
CONFIGS = {
    "qwen3_5": Qwen3_5TextConfig(**SHAPE, **DELTA),
    "qwen3_5_moe": Qwen3_5MoeTextConfig(**SHAPE, **DELTA, **EXPERTS),
    "lfm2": Lfm2Config(**SHAPE, full_attn_idxs=[1], bos_token_id=None, eos_token_id=None),
}


def policy_of(name: str, seed: int = 0) -> PreTrainedModel:
    skip_without(SINCE.get(name, "5"))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return AutoModelForCausalLM.from_config(CONFIGS[name]).eval()


def started(policy: PreTrainedModel, **settings) -> EmbeddedEngine:
    engine = EmbeddedEngine(**settings)
    engine.start(policy, version=0, seed=3)
    return engine


class TestHybridSqueezed(EngineSuite):
    """Requests wait for room, prompts go in chunks, rows move and are handed on: states go with them."""

    def make_policy(self, seed: int = 0) -> PreTrainedModel:
        return policy_of("qwen3_5", seed)

    @pytest.mark.slow  # states and updates: `test_an_update_forgets_states`
    def test_updates_in_mid_generation(self, engine, policy) -> None:
        super().test_updates_in_mid_generation(engine, policy)

    @pytest.fixture
    def engine(self, policy):
        engine = started(policy, kv_cache_tokens=700, max_batch_tokens=16, max_concurrent=7)
        yield engine
        engine.close()


@pytest.mark.parametrize("max_batch_tokens", [4096, 10])
@pytest.mark.parametrize("name", CONFIGS)
def test_log_probabilities_are_the_trainers(name: str, max_batch_tokens: int) -> None:
    """Groups that share a prompt, prompts of one token, prompts in chunks, rows that are used again: to 1e-6."""
    policy = policy_of(name)
    requests = [GenerationRequest(prompt, 12) for prompt in prompts_of([1, 3, 30, 5, 17]) for _ in range(3)]
    engine = started(policy, max_batch_tokens=max_batch_tokens, max_concurrent=6)
    try:
        responses = asyncio.run(generate_all(engine, requests))
        held = engine.health()["state_bytes"]
    finally:
        engine.close()
    sequences = [[*request.tokens, *response.tokens] for request, response in zip(requests, responses, strict=True)]
    out = TreeEngine(policy, 16, 24).forward(PrefixTree.build(sequences))
    for request, response, ours in zip(requests, responses, out.logprobs, strict=True):
        got = torch.tensor(response.logprobs)
        torch.testing.assert_close(got, ours[len(request.tokens) :], atol=1e-6, rtol=0)
    layers, channels, scan = 2, *((2 * 32, 0) if name == "lfm2" else (3 * 64, 4 * 8 * 8))
    assert held == 6 * layers * (channels + scan) * 4, "a state a row: six rows"


def test_an_update_forgets_states() -> None:
    """A request that runs while weights change: every token is of the weights it says."""
    policy, newer = policy_of("qwen3_5"), policy_of("qwen3_5", 1)
    engine = started(policy)

    async def run():
        pending = asyncio.create_task(engine.generate(GenerationRequest(prompts_of([9])[0], 100)))
        while not engine.health()["running"]:
            await asyncio.sleep(0.001)
        await asyncio.to_thread(engine.update_weights, WeightUpdate(1, state_dict=newer.state_dict()))
        return await pending

    try:
        response = asyncio.run(run())
    finally:
        engine.close()
    assert response.versions[-1] == 1
    tokens = torch.tensor([[*prompts_of([9])[0], *response.tokens]])
    for version, model in enumerate((policy, newer)):
        with torch.no_grad():
            expected = model(tokens).logits[0, 8:-1].log_softmax(-1).gather(-1, tokens[0, 9:, None])[:, 0]
        mine = torch.tensor(response.versions) == version
        torch.testing.assert_close(torch.tensor(response.logprobs)[mine], expected[mine], atol=1e-5, rtol=0)


def test_rows_that_were_never_computed_move_into_those_that_end_at_once() -> None:
    """More requests than one forward takes, and the first forward ends all of its own."""
    policy = policy_of("qwen3_5")
    engine = started(policy, max_batch_tokens=30, max_concurrent=7)
    prompts = prompts_of([10] * 7)
    try:
        responses = asyncio.run(generate_all(engine, [GenerationRequest(prompt, 1) for prompt in prompts]))
    finally:
        engine.close()
    with torch.no_grad():
        expected = policy(torch.tensor(prompts)).logits[:, -1].log_softmax(-1)
    for row, one in zip(expected, responses, strict=True):
        (token,) = one.tokens
        assert one.logprobs[0] == pytest.approx(float(row[token]), abs=1e-5)
