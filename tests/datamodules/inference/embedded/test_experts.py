"""The experts that the engine says its tokens were sent to: what the untouched model chooses over the whole sequence,
and what the trainer, whose router rounds otherwise, replays."""

from __future__ import annotations

import asyncio
import copy
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, Llama4TextConfig, PreTrainedModel, Qwen3Config, Qwen3MoeConfig

from app.batch import RolloutBatch
from app.tree import PrefixTree, TreeEngine, routed
from datamodules.inference.embedded import EmbeddedEngine
from datamodules.inference.protocol import GenerationError, GenerationRequest, GenerationResponse, WeightUpdate
from datamodules.prompts import Prompt
from datamodules.workflows.base import to_trajectory
from datamodules.workflows.episode_routes import EpisodeRoutes
from tests.app.tree.engine.layers.forced import own_choice, routers
from tests.datamodules.inference import engine_suite
from tests.datamodules.inference.embedded.test_states import CONFIGS as HYBRIDS
from tests.datamodules.inference.embedded.test_states import SHAPE
from tests.datamodules.inference.engine_suite import prompts_of

EXPERTS = dict(num_experts=8, num_experts_per_tok=2, moe_intermediate_size=16)
CONFIGS = {
    "qwen3_moe": Qwen3MoeConfig(**SHAPE, **EXPERTS, head_dim=16, mlp_only_layers=[1]),
    "qwen3_5_moe": HYBRIDS["qwen3_5_moe"],
    "llama4": Llama4TextConfig(
        **SHAPE,
        head_dim=16,
        intermediate_size_mlp=48,
        num_local_experts=8,
        num_experts_per_tok=2,
        attention_chunk_size=8,
    ),
}


def policy_of(name: str, seed: int = 0) -> PreTrainedModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return AutoModelForCausalLM.from_config(CONFIGS[name]).eval()


def started(policy: PreTrainedModel, **settings: Any) -> EmbeddedEngine:
    engine = EmbeddedEngine(record_experts=True, **settings)
    engine.start(policy, version=0, seed=3)
    return engine


def generate_all(engine: EmbeddedEngine, requests: list[GenerationRequest]) -> list[GenerationResponse]:
    return asyncio.run(engine_suite.generate_all(engine, requests))


def whole(request: GenerationRequest, response: GenerationResponse) -> list[int]:
    return [*request.tokens, *response.tokens]


def alike(experts: torch.Tensor, expected: np.ndarray) -> bool:
    """As sets: an order of experts is no part of a choice."""
    return bool(np.array_equal(np.sort(experts.numpy(), -1), np.sort(expected, -1)))


@pytest.mark.parametrize("max_batch_tokens", [4096, 10])
@pytest.mark.parametrize("name", CONFIGS)
def test_they_are_those_of_the_whole_sequence(name: str, max_batch_tokens: int) -> None:
    """Groups that share a prompt, prompts of one token, prompts in chunks, rows that are used again."""
    policy = policy_of(name)
    requests = [
        GenerationRequest(prompt, 12, experts_from=min(k, len(prompt)))
        for prompt in prompts_of([1, 3, 30, 5, 17])
        for k in range(3)
    ]
    engine = started(policy, kv_cache_tokens=300, max_batch_tokens=max_batch_tokens, max_concurrent=4)
    try:
        responses = generate_all(engine, requests)
    finally:
        engine.close()
    for request, response in zip(requests, responses, strict=True):
        tokens, start = whole(request, response), request.experts_from
        assert response.experts is not None and response.experts.dtype == torch.uint8
        assert len(response.experts) == len(tokens) - 1 - start
        assert alike(response.experts, own_choice(policy, [tokens])[start:-1])
    assert not any("forward" in vars(module) for module in policy.modules())


def test_what_was_answered_stays_when_weights_change() -> None:
    """Tokens from before an update keep the experts that answered, though they are read again with new weights."""
    policy, other = policy_of("qwen3_moe"), policy_of("qwen3_moe", seed=1)
    request = GenerationRequest(list(prompts_of([9])[0]), 40, experts_from=0)

    async def run(engine: EmbeddedEngine) -> GenerationResponse:
        seen = asyncio.Event()
        loop = asyncio.get_running_loop()
        request.on_tokens = lambda tokens, logprobs: loop.call_soon_threadsafe(seen.set)
        task = asyncio.create_task(engine.generate(request))
        await asyncio.wait_for(seen.wait(), 60)
        await asyncio.to_thread(engine.update_weights, WeightUpdate(1, state_dict=other.state_dict()))
        return await task

    engine = started(policy)
    try:
        response = asyncio.run(run(engine))
    finally:
        engine.close()
    old = len(request.tokens) + response.versions.count(0) - 1  # read with the weights that drew the next one
    tokens = whole(request, response)
    assert response.experts is not None and len(response.experts) == len(tokens) - 1
    assert alike(response.experts[:old], own_choice(policy, [tokens])[:old])


def test_what_cannot_record_says_so() -> None:
    dense = AutoModelForCausalLM.from_config(Qwen3Config(**SHAPE, head_dim=16))
    with pytest.raises(GenerationError, match=r"EmbeddedEngine.record_experts: Qwen3ForCausalLM has no router"):
        started(dense)
    with pytest.raises(ValueError, match="cuda_graphs: true"):
        EmbeddedEngine(record_experts=True, cuda_graphs=True)
    engine = EmbeddedEngine()
    engine.start(policy_of("qwen3_moe"), version=0, seed=0)
    try:
        with pytest.raises(GenerationError, match=r"experts_from.*set its record_experts"):
            generate_all(engine, [GenerationRequest([1], 1, experts_from=0)])
        with pytest.raises(GenerationError, match="experts_from: 2"):
            generate_all(engine, [GenerationRequest([1], 1, experts_from=2)])
    finally:
        engine.close()


def test_turns_of_an_episode_hold_what_they_share_once() -> None:
    """Each of ten turns asks for the experts of new tokens alone, and its sequence has those of all."""
    policy = policy_of("qwen3_moe")
    engine, routes, trajectories = started(policy), EpisodeRoutes(), []
    try:
        tokens, asked = list(prompts_of([9])[0]), 0
        for turn in range(10):
            request = GenerationRequest(tokens, 4)
            known = routes.begin(request)
            (response,) = generate_all(engine, [request])
            assert response.experts is not None
            asked += len(response.experts)
            routes.end(request, response, known)
            trajectories.append(to_trajectory(Prompt("p"), request, response, turn))
            tokens = [*whole(request, response), 7, 8]
        edited = GenerationRequest([*tokens[:5], 3, *tokens[6:]], 4)  # a conversation that was rewritten
        assert len(routes.begin(edited)) == edited.experts_from == 5
    finally:
        engine.close()
    assert asked == len(tokens) - 3  # but for what follows the last reply, and its last token
    batch = RolloutBatch.from_trajectories(trajectories)
    assert batch.routes is not None and len(batch.routes.table) == asked
    for sequence, index in zip(batch.sequences(), batch.split(batch.routes.index), strict=True):
        assert index[-1] == -1 and bool((index[:-1] >= 0).all())
        assert alike(batch.routes.table[index[:-1].long()], own_choice(policy, [sequence])[:-1])


@pytest.mark.parametrize("sampler", ["bfloat16", "other routers"])
def test_a_trainer_is_nearer_to_the_sampler_with_replay(sampler: str) -> None:
    """A sampler in bf16 beside a trainer in float32; and one whose routers weigh otherwise by a hundredth. Either way
    some tokens go to other experts, each of which is worth more than all rounding."""
    config = copy.deepcopy(CONFIGS["qwen3_moe"])
    config.update({"initializer_range": 0.3, "num_hidden_layers": 6, "num_experts": 64, "num_experts_per_tok": 4})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        policy = AutoModelForCausalLM.from_config(config).eval()
    other = copy.deepcopy(policy)
    if sampler == "other routers":
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for router in routers(other):
                router.weight += 0.01 * router.weight.std() * torch.randn(router.weight.shape, generator=generator)
    engine = started(other, dtype="bfloat16" if sampler == "bfloat16" else None)
    requests = [GenerationRequest(prompt, 60, experts_from=0) for prompt in prompts_of([30, 17, 22, 9])]
    try:
        responses = generate_all(engine, requests)
    finally:
        engine.close()
    sequences = [whole(*pair) for pair in zip(requests, responses, strict=True)]
    tree, trainer, off = PrefixTree.build(sequences), TreeEngine(policy), []
    table = torch.cat([response.experts for response in responses if response.experts is not None])
    rows = np.concatenate([np.append(np.ones(len(s) - 1, bool), False) for s in sequences])
    replayed = routed(tree, np.where(rows, rows.cumsum() - 1, -1), table.numpy())
    for one in (tree, replayed):
        logprobs = trainer.forward(one).logprobs
        errors = [own[-len(r.tokens) :] - torch.tensor(r.logprobs) for own, r in zip(logprobs, responses, strict=True)]
        off.append(torch.cat(errors).square().mean().sqrt())
    trainer.backward(replayed, lambda out, i: out.logprobs.sum())
    assert trainer.replay is not None
    known, changed = trainer.replay.take_counts().tolist()
    print(f"{sampler}: {changed / known:.2%} of experts differ; log-probabilities by {off[0]:.4f}, {off[1]:.4f} (rms)")
    assert 0 < changed < known / 10
    assert off[1] < off[0] / (1.4 if sampler == "bfloat16" else 2.5)
