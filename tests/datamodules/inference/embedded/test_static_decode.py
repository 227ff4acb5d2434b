"""Decode steps of few sizes: on a CPU all but the capture runs, and every step is compared with the one it replaces."""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from datamodules.inference.embedded import EmbeddedEngine
from datamodules.inference.embedded.batcher import Batcher, Sequence
from datamodules.inference.embedded.static_decode import differences, padded, padded_rows
from datamodules.inference.embedded.weights import copy_of
from datamodules.inference.protocol import GenerationError, GenerationRequest, GenerationResponse, WeightUpdate
from tests.app.tree import models
from tests.app.tree.cases import VOCABULARY as SMALL
from tests.app.tree.engine import families
from tests.datamodules.inference.embedded.test_states import policy_of
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


def started(policy: PreTrainedModel, **settings) -> EmbeddedEngine:
    engine = EmbeddedEngine(**{"cuda_graphs": True, "control_timeout_s": 20.0, "request_timeout_s": 60.0} | settings)
    engine.start(policy, version=0, seed=3)
    return engine


class TestStatic(EngineSuite):
    """What every engine must do, interruption and updates in mid-generation among it."""

    @pytest.fixture
    def engine(self, policy):
        engine = started(policy)
        assert engine.health()["decoding"] == "padded"
        yield engine
        engine.close()


@pytest.mark.slow
class TestStaticSqueezed(EngineSuite):
    """The same where sizes end at what the grid holds, which is laid out anew."""

    @pytest.fixture
    def engine(self, policy):
        engine = started(policy, kv_cache_tokens=700, max_batch_tokens=16, max_concurrent=7)
        yield engine
        engine.close()


def batcher_of(model: PreTrainedModel, **settings) -> Batcher:
    """Chunks, waiting and rows that move: 640 tokens of keys, prompts of 8 at a time."""
    options = {"kv_cache_tokens": 640, "max_batch_tokens": 8, "max_concurrent": 9, "static": True} | settings
    return Batcher(copy_of(model, None, None), **options)


def sequences(vocabulary: int) -> list[Sequence]:
    """Prompts of 1 to 19 tokens, some of them twice, for 3 to 18 more: every padded number of rows up to 16 comes."""
    generator = torch.Generator().manual_seed(0)
    found = []
    for k in range(11):
        prompt = torch.randint(vocabulary, (1 + 5 * k % 19,), generator=generator).tolist()
        request = GenerationRequest(prompt, 3 + 7 * k % 16, temperature=k % 3 / 2)
        found += [Sequence(request, 100 * k + j) for j in range(1 + k % 2)]
    return found


class Beside:
    """A decoder beside the steps that it replaces."""

    def __init__(self, batcher: Batcher) -> None:
        assert batcher.static is not None, batcher.dynamic
        self.batcher, self.static = batcher, batcher.static
        self.weights_written = self.static.weights_written
        self.refused, self.spoiled = "", False
        self.worst: list[float] = []

    def __call__(self, starts: list[int], tokens: list[int]) -> Tensor:
        states = self.batcher.states
        before = states.kept(len(starts))
        expected = self.static.eager(starts, tokens)
        states.put(before)
        found = self.static(starts, tokens)
        self.worst.append(float((found - expected).abs().max()))
        return found


def played(batcher: Batcher, vocabulary: int, update: Callable[[], None] | None = None) -> list[Sequence]:
    """All requests, to their ends; `update` after ten steps."""
    ended, everything = [], sequences(vocabulary)
    batcher.waiting.extend(everything)
    step = 0
    while batcher.busy:
        ended += batcher.step(int(update is not None and step >= 10))
        step += 1
        if step == 10 and update is not None:
            update()
            batcher.flush()
    assert len(ended) == len(everything) and step < 500
    return everything


EXPERTS = {"Qwen3-MoE", "Mixtral", "DeepSeek-V3", "GPT-OSS", "Qwen3.5-MoE", "Qwen3-Next", "Nemotron-H", "Granite 4"}
EXPERTS |= {
    "Kimi Linear",
    "Ling 3",
    "Gemma 4, experts",
    "DeepSeek-V3.2",
    "DeepSeek-V4",
    "GLM-5",
    "GLM-5.3",
    "MiniMax-M3",
    "Qwen 4 (experimental)",
    "ZAYA",
}
FLOAT64 = [row for row in families.SUPPORTED if row not in EXPERTS]
IN_FLOAT32 = {"Qwen3.5", "OLMo-Hybrid", "Llama 4"}
"""Layers with delta rules and with rotary in complex numbers, which compute in float32 whatever the model is in."""


@pytest.mark.parametrize("row", some(FLOAT64, [row for row in families.KINDS if row in FLOAT64]))
def test_every_step_is_the_one_it_replaces(row: str) -> None:
    """In float64 to 1e-9: windows, latent attention, states, rows without a request and rows that move."""
    batcher = batcher_of(families.build(families.SUPPORTED[row], torch.float64))
    batcher.static = beside = Beside(batcher)  # type: ignore[assignment]
    played(batcher, SMALL)
    assert len(beside.worst) > 20 and max(beside.worst) < (1e-5 if row in IN_FLOAT32 else 1e-9)


SHAPE = dict(
    vocab_size=VOCABULARY,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    intermediate_size=48,
    max_position_embeddings=CONTEXT,
    initializer_range=0.15,
)


def growing() -> PreTrainedModel:
    """Rotary frequencies that depend on the longest request."""
    scaled = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0, "original_max_position_embeddings": 32}
    return AutoModelForCausalLM.from_config(LlamaConfig(**SHAPE, rope_parameters=scaled)).eval()


def one_by_one() -> PreTrainedModel:
    """Experts that are looped over, those without a token left out."""
    model = families.build(families.SUPPORTED["Qwen3-MoE"])
    model.config._experts_implementation = "eager"
    return model


@pytest.mark.parametrize(
    ("make", "waits"), [(growing, r"LlamaForCausalLM .*aten\.is_nonzero"), (one_by_one, r"Qwen3Moe.* .*aten\.nonzero")]
)
def test_a_forward_that_waits_for_the_device_is_refused_by_name(make, waits: str) -> None:
    """`true` cannot be honoured; otherwise it decodes without, and says why."""
    model = make()
    with pytest.raises(GenerationError, match=rf"EmbeddedEngine.cuda_graphs: true, but the forward of {waits}.*null"):
        started(model)
    batcher = batcher_of(model)
    assert batcher.static is None and "waits for the device" in batcher.decoding
    plain = batcher_of(model, static=False)
    assert [one.tokens for one in played(batcher, 19)] == [one.tokens for one in played(plain, 19)]


@pytest.mark.parametrize("asked", [EmbeddedEngine().cuda_graphs, None], ids=["by default", "null"])
def test_on_a_cpu_nobody_asks_for_it(asked: bool | None) -> None:
    engine = started(tiny_policy(), cuda_graphs=asked)
    assert engine.health()["decoding"] == "as they are: not asked for"
    engine.close()


@pytest.mark.parametrize("name", ["qwen3", "qwen3_5", "lfm2"])
def test_weights_and_pauses_in_mid_generation(name: str) -> None:
    """Each token is of the weights it says, states included, and whoever is held goes on where it was."""
    models = {k: tiny_policy(k) if name == "qwen3" else policy_of(name, k) for k in range(3)}
    engine = started(models[0], kv_cache_tokens=2000, max_concurrent=11, max_batch_tokens=64)
    requests = [GenerationRequest(prompt, 90) for prompt in prompts_of([1 + 11 * k % 50 for k in range(30)])]

    def push() -> None:
        for version in (1, 2):
            wait_until_generating(engine)
            engine.pause()
            engine.update_weights(WeightUpdate(version, state_dict=models[version].state_dict()))
            engine.resume()

    async def run() -> list[GenerationResponse]:
        pushing = asyncio.get_running_loop().run_in_executor(None, push)
        responses = await generate_all(engine, requests)
        await pushing
        return responses

    try:
        responses = asyncio.run(run())
    finally:
        engine.close()
    for request, response in zip(requests, responses, strict=True):
        assert_parity(models, request, response, 1e-5)
    assert any(len(set(response.versions)) > 1 for response in responses), "no request saw an update"


# -------------------------------------------------------------------------------------- what replays, without a GPU


class Recording(TorchDispatchMode):
    """What a CUDA graph holds, of operators: each with the tensors it read and wrote, and with every number that the
    host gave it as it was."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...], dict[str, Any], list[Tensor]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {x.untyped_storage().data_ptr() for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        made = [
            x if isinstance(x, Tensor) and x.untyped_storage().data_ptr() not in given else None
            for x in tree_leaves(out)
        ]
        self.calls.append((func, args, kwargs or {}, made))
        return out

    def replay(self) -> None:
        """Reads and writes where it did; what is a view is where it was."""
        for func, args, kwargs, made in self.calls:
            out = tree_leaves(func(*args, **kwargs))
            for there, value in zip(made, out, strict=True):
                if there is not None:
                    there.copy_(value)


def recorded(function: Callable[[], None]) -> Callable[[], None]:
    with Recording() as recording:
        function()
    return recording.replay


@pytest.mark.parametrize("row", some(families.SUPPORTED, (*families.KINDS, "GLM-5.3")))
def test_a_recording_of_a_step_answers_all_requests_of_its_size(row: str) -> None:
    """In float32: the same tokens, log-probabilities to 1e-5, which are those of the weights of their versions. What
    runs again is operators alone, on the tensors they had: what the host decided in the forward is decided for every
    later step. Weights change on the way, where they are."""
    family = families.SUPPORTED[row]
    replies = []
    for static in (False, True):
        batcher = batcher_of(families.build(family), static=static)
        newer = families.build(family, seed=1).parameters()
        if batcher.static is not None:
            batcher.static.capture = recorded

        def update(batcher: Batcher = batcher, newer: Iterator[Tensor] = newer) -> None:
            for mine, theirs in zip(batcher.model.parameters(), newer, strict=True):
                mine.data.copy_(theirs)

        replies.append(played(batcher, SMALL, update))
    waits = "as they are: the forward of Glm5NextForConditionalGeneration waits for the device (aten.index)"
    assert batcher.decoding.endswith(" CUDA graphs") or (row, batcher.decoding) == ("GLM-5.3", waits), batcher.decoding
    tolerance, truth = max(1e-5, family.tolerances[0]), {k: families.build(family, seed=k) for k in (0, 1)}
    for one, other in zip(*replies, strict=True):
        assert one.tokens == other.tokens and one.versions == other.versions
        assert torch.allclose(torch.tensor(one.logprobs), torch.tensor(other.logprobs), atol=tolerance, rtol=0)
        said = other.tokens[len(other.request.tokens) :]
        assert_parity(truth, other.request, GenerationResponse(said, other.logprobs, other.versions, ""), 1e-4)
    assert {version for one in replies[1] for version in one.versions} == {0, 1}


def test_each_size_is_captured_once_and_again_where_weights_or_states_have_moved() -> None:
    """What replays is a call here: the books are those of a GPU."""
    made: list[int] = []

    def capture(function: Callable[[], None]) -> Callable[[], None]:
        made.append(1)
        return function

    policy, newer = policy_of("qwen3_5"), policy_of("qwen3_5", 1)
    plain = played(batcher_of(policy, static=False), VOCABULARY)
    batcher = batcher_of(policy)
    assert batcher.static is not None
    batcher.static.capture = capture
    assert [one.tokens for one in played(batcher, VOCABULARY)] == [one.tokens for one in plain]
    first = len(made)
    assert batcher.decoding == f"{first} CUDA graphs" and 0 < first < 20

    def copied() -> None:
        for mine, theirs in zip(batcher.model.parameters(), newer.parameters(), strict=True):
            mine.data.copy_(theirs)

    def moved() -> None:
        for mine, theirs in zip(batcher.model.parameters(), newer.parameters(), strict=True):
            mine.data = theirs.detach().clone()

    played(batcher, VOCABULARY, copied)
    assert len(made) == first, "weights that are written where they are need no other graph"
    played(batcher, VOCABULARY, moved)
    again = len(made)
    assert again > first
    batcher.states.reserve(100)
    played(batcher, VOCABULARY)
    assert len(made) > again


def replays_nothing(batcher: Batcher, function: Callable[[], None]) -> Callable[[], None]:
    return lambda: None


def fails(batcher: Batcher, function: Callable[[], None]) -> Callable[[], None]:
    raise RuntimeError("operation not permitted when stream is capturing")


def constant(batcher: Batcher, function: Callable[[], None]) -> Callable[[], None]:
    """It gives what was computed first."""
    static = batcher.static
    assert static is not None
    function()
    first = static._logits.clone()

    def replay() -> None:
        static._logits.copy_(first)

    return replay


def spoils(batcher: Batcher, function: Callable[[], None]) -> Callable[[], None]:
    """It writes where others' keys are."""

    def replay() -> None:
        for buffers in batcher.slots._layers.values():
            for buffer in buffers:
                buffer.zero_()

    return replay


@pytest.mark.parametrize(
    ("capture", "reason"),
    [
        (replays_nothing, "its replay is off by"),
        (fails, "not permitted when"),
        (constant, "its replay is off by"),
        (spoils, "its replay is off by"),
    ],
)
@pytest.mark.parametrize("name", ["qwen3_5", "lfm2"])
def test_wrong_replays_end_them_for_good_and_reach_no_token(capture, reason: str, name: str, caplog) -> None:
    """One line says so, and replies are those without, states included."""
    plain = played(batcher_of(policy_of(name), static=False), VOCABULARY)
    batcher = batcher_of(policy_of(name))
    assert batcher.static is not None
    batcher.static.capture = functools.partial(capture, batcher)
    with caplog.at_level(logging.WARNING):
        found = played(batcher, VOCABULARY)
    assert [one.tokens for one in found] == [one.tokens for one in plain]
    for one, other in zip(found, plain, strict=True):
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-5)
    (line,) = [record.message for record in caplog.records if "cuda_graphs" in record.message]
    assert reason in line and batcher.decoding.startswith("as they are: ") and reason in batcher.decoding


def test_sizes_are_few_and_hold_what_they_are_for() -> None:
    counts = [padded_rows(n) for n in range(1, 257)]
    assert sorted(set(counts)) == [1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256]
    lengths = [padded(n, 64) for n in range(1, 8193)]
    assert len(set(lengths)) == 24 and all(n <= size < 1.25 * n + 64 for n, size in zip(range(1, 8193), lengths))
    assert counts == sorted(counts) and lengths == sorted(lengths)


@pytest.mark.parametrize(("requests", "prompt", "mean", "most"), [(64, 150, 120, 256), (128, 200, 600, 2048)])
def test_padding_costs_what_it_is_said_to(requests: int, prompt: int, mean: int, most: int) -> None:
    """Over five batches of replies of geometric lengths: sizes met, rows and keys computed over those asked for."""
    random = np.random.default_rng(0)
    sizes, work = set(), np.zeros(4)
    for _ in range(5):
        prompts = random.integers(prompt // 2, prompt * 3 // 2, requests)
        replies = np.minimum(random.geometric(1 / mean, requests), most)
        for step in range(replies.max()):
            running = replies > step
            count, keys = int(running.sum()), int(prompts[running].max()) + step + 1
            rows, wide = padded_rows(count), min(padded(keys, 64), int(prompts.max()) + most)
            sizes.add((rows, wide))
            work += count, rows, count * keys, rows * wide
    assert 19 <= len(sizes) <= 44
    assert 1.09 < work[1] / work[0] < 1.115 and 1.19 < work[3] / work[2] < 1.26


def test_differences_see_a_row_of_another_request() -> None:
    logits = torch.randn(4, 100, generator=torch.Generator().manual_seed(0))
    assert float(differences(logits + 3.0, logits).max()) < 1e-6, "a constant says nothing of a token"
    assert float(differences(logits[[0, 2, 1, 3]], logits).max()) > 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="captures need a CUDA device")
@pytest.mark.parametrize("name", ["qwen3", "qwen3_5", "lfm2"])
def test_replays_on_a_gpu_are_the_steps_they_replace(name: str) -> None:
    policy = tiny_policy() if name == "qwen3" else policy_of(name)
    batchers = [Batcher(copy_of(policy, None, "cuda"), 640, 8, 9, static=static) for static in (False, True)]
    eager, static = (played(batcher, VOCABULARY) for batcher in batchers)
    for one, other in zip(eager, static, strict=True):
        assert one.tokens == other.tokens
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)
    assert batchers[1].decoding.endswith("CUDA graphs"), batchers[1].decoding


def test_no_request_is_longer_than_what_rotates_as_training_does() -> None:
    """LongRoPE: beyond its original length it and all that decode beside it would be rotated otherwise."""
    rope = dict(rope_type="longrope", rope_theta=100.0, original_max_position_embeddings=12)
    rope |= dict(short_factor=[1.0, 1.1], long_factor=[4.0, 8.0])
    policy = models.make("phi3", original_max_position_embeddings=12, rope_parameters=rope).eval()
    engine = started(policy)
    try:
        assert engine.max_context == 12
        with pytest.raises(GenerationError, match=r"max_new_tokens.*context of 12"):
            asyncio.run(engine.generate(GenerationRequest([1, 2], 11)))
        (longest,) = requests = [GenerationRequest([1, 2], 10)]
        assert_parity({0: policy}, longest, asyncio.run(generate_all(engine, requests))[0], 1e-5)
    finally:
        engine.close()


def test_no_request_goes_beyond_a_window_that_only_the_mask_has() -> None:
    policy = models.make("phimoe", sliding_window=7, num_local_experts=4).eval()
    engine = started(policy, cuda_graphs=False)
    try:
        with pytest.raises(GenerationError, match=r"max_new_tokens.*context of 8"):
            asyncio.run(engine.generate(GenerationRequest([1, 2], 7)))
        (longest,) = requests = [GenerationRequest([1, 2], 6)]
        assert_parity({0: policy}, longest, asyncio.run(generate_all(engine, requests))[0], 1e-5)
    finally:
        engine.close()
