"""Updates in the middle of generation, many of them, and whose weights every single token came from."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from transformers import PreTrainedModel

from datamodules.inference.protocol import GenerationRequest, GenerationResponse, InferenceEngine, WeightUpdate
from datamodules.inference.weight_files import WeightFiles
from tests.datamodules.inference.engine_suite import prompts_of, reference_logprobs

NEW_TOKENS = 40


def requests_of(count: int) -> list[GenerationRequest]:
    """Groups of four equal prompts, so that cached prefixes are there to go stale; temperatures in turn."""
    lengths = [2 + (7 * i) % 60 for i in range(-(-count // 4))]
    prompts = [prompt for prompt in prompts_of(lengths) for _ in range(4)][:count]
    return [
        GenerationRequest(prompt, NEW_TOKENS, temperature=(1.0, 0.8)[i % 2], request_id=f"r{i}")
        for i, prompt in enumerate(prompts)
    ]


def update_of(
    policy: PreTrainedModel,
    version: int,
    directory: Path | None,
    weights: Callable[[PreTrainedModel], dict[str, torch.Tensor]],
    deadline_s: float = 300.0,
) -> WeightUpdate:
    """From disk through `directory`, or what `weights` takes of the policy."""
    if directory is None:
        return WeightUpdate(version, state_dict=weights(policy), deadline_s=deadline_s)
    return WeightUpdate(version, path=str(WeightFiles(directory).write(policy, version)[0]), deadline_s=deadline_s)


def generate_through_updates(
    engine: InferenceEngine,
    requests: Sequence[GenerationRequest],
    updates: Sequence[Callable[[], WeightUpdate]],
    together: int = 32,
    every: bool = False,
) -> tuple[list[GenerationResponse], list[float]]:
    """Serves all requests, `together` at a time, and sends the updates one after another, spread evenly over them.

    An update starts when its share of the requests has ended, so whatever the machine's speed others are under way;
    with `every`, when one of them has tokens of the version before, too.

    Returns:
        Responses in the requests' order, and each update's seconds of downtime.
    """
    ended = 0
    seen: set[int] = set()

    async def run() -> tuple[list[GenerationResponse], list[float]]:
        places = asyncio.Semaphore(together)

        async def one(request: GenerationRequest) -> GenerationResponse:
            nonlocal ended
            async with places:
                response = await engine.generate(request)
            seen.update(response.versions)
            ended += 1
            return response

        pushing = asyncio.get_running_loop().run_in_executor(None, push)
        return await asyncio.gather(*(one(request) for request in requests)), await pushing

    def push() -> list[float]:
        seconds = []
        served: int | None = None
        for number, make in enumerate(updates, 1):
            due = len(requests) * number // (len(updates) + 1)
            deadline = time.monotonic() + 120
            while ended < due or (every and served is not None and served not in seen):
                said = f"{ended} of {due} requests ended within 120 s, with tokens of {sorted(seen)}"
                assert time.monotonic() < deadline, f"{said}: {engine.health()}"
                time.sleep(0.002)
            update = make()
            seconds.append(engine.update_weights(update))
            served = update.version
        return seconds

    return asyncio.run(run())


def worst_difference(
    models: dict[int, PreTrainedModel], requests: Sequence[GenerationRequest], responses: Sequence[GenerationResponse]
) -> float:
    """Largest distance of any token's log-probability from the one under the weights of its recorded version."""
    worst = 0.0
    for request, response in zip(requests, responses, strict=True):
        assert len(response.tokens) == len(response.logprobs) == len(response.versions) == request.max_new_tokens
        assert response.versions == sorted(response.versions)
        got, versions = torch.tensor(response.logprobs), torch.tensor(response.versions)
        for version in versions.unique().tolist():
            mine = versions == version
            expected = reference_logprobs(models[version], request.tokens, response.tokens, request.temperature)
            worst = max(worst, float((got - expected)[mine].abs().max()))
    return worst


def assert_interrupted(responses: Sequence[GenerationResponse], versions: int, at_least: int) -> None:
    """Every version generated tokens, and `at_least` responses have tokens of more than one."""
    tokens = Counter(version for response in responses for version in response.versions)
    assert set(tokens) == set(range(versions)), f"tokens by version: {dict(tokens)}"
    mixed = sum(len(set(response.versions)) > 1 for response in responses)
    assert mixed >= at_least, f"only {mixed} of {len(responses)} responses saw an update"
