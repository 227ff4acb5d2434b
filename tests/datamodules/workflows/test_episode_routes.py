"""Whatever an agent or a workflow does with its history, every token of its sequences has the experts that an engine
would say of it, and is asked for once."""

from __future__ import annotations

import asyncio
import hashlib
import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from app.batch import RolloutBatch, Trajectory
from app.pictures import Picture
from datamodules.inference.protocol import GenerationError, GenerationRequest, GenerationResponse
from datamodules.pipeline.player import EpisodeError
from datamodules.prompts.base import Prompt
from datamodules.workflows import MultiTurnWorkflow, RLVRWorkflow
from datamodules.workflows.base import EpisodeEngine
from datamodules.workflows.episode_routes import EpisodeRoutes
from datamodules.workflows.gateway import Budget, Session
from datamodules.workflows.gateway.protocols.servable import Sampling
from datamodules.workflows.tool_calls import hermes_calls
from tests.datamodules.workflows.gateway.test_sessions import CHAT, TOKENIZER, converse, reply
from tests.datamodules.workflows.scripted_engine import ScriptedEngine, play
from tests.datamodules.workflows.test_multi_turn import CHARACTERS, SUM, right
from tests.helpers.pictured import picture


def expert(tokens: list[int]) -> list[int]:
    """Of the last of these tokens: what depends on all of them."""
    return list(hashlib.blake2b(repr(tokens).encode(), digest_size=4).digest())


class RecordingEngine(ScriptedEngine):
    """Says which experts its tokens were sent to, 2 of each of 2 layers, from where it is asked to."""

    record_experts = True
    asked = 0
    missing = False

    async def generate(self, request: GenerationRequest) -> GenerationResponse:
        response = await super().generate(request)
        tokens, start = [*request.tokens, *response.tokens], request.experts_from
        assert start is not None
        rows = [expert(tokens[: t + 1]) for t in range(start, len(tokens) - 1)]
        self.asked += len(rows)
        if not self.missing:
            response.experts = torch.tensor(rows, dtype=torch.uint8).view(-1, 2, 2)
        return response


def check(trajectories: list[Trajectory], engine: RecordingEngine) -> None:
    batch = RolloutBatch.from_trajectories(trajectories)
    assert batch.routes is not None
    for sequence, index in zip(batch.sequences(), batch.split(batch.routes.index), strict=True):
        tokens = sequence.tolist()
        assert index[-1] == -1 and bool((index[:-1] >= 0).all())
        assert batch.routes.table[index[:-1].long()].flatten(1).tolist() == [
            expert(tokens[: t + 1]) for t in range(len(tokens) - 1)
        ]
    assert len(batch.routes.table) <= engine.asked


@pytest.mark.parametrize("seed", range(12))
def test_sessions_of_agents(seed: int) -> None:
    draw = random.Random(seed)
    server = RecordingEngine(TOKENIZER, lambda request: reply(draw, request), max_context=20_000)
    engine = EpisodeEngine(server, TOKENIZER, None, name="e", seed="s")  # type: ignore[arg-type]
    session = Session(engine, CHAT, Sampling(400), Budget(max_calls=999), hermes_calls)
    asyncio.run(converse(session, draw, turns=8))
    trajectories = session.trajectories(Prompt("p"), 1.0)
    check(trajectories, server)
    distinct = {tuple(one.tokens[: t + 1].tolist()) for one in trajectories for t in range(len(one.tokens))}
    assert server.asked < 1.5 * len(distinct)  # calls that are under way together know nothing of one another


@pytest.mark.parametrize("sequences", ["whole", "turns"])
def test_workflows(sequences: Any) -> None:
    engine = RecordingEngine(CHARACTERS, ["41", "40", "42"])
    workflow = MultiTurnWorkflow(max_turns=5, max_new_tokens=4, retry_message="?", sequences=sequences)
    check(play(workflow, engine, CHARACTERS, SUM, right), engine)
    engine = RecordingEngine(CHARACTERS, ["42"])
    check(play(RLVRWorkflow(max_new_tokens=4), engine, CHARACTERS, SUM, right), engine)


def test_prompts_with_pictures() -> None:
    """What follows another picture under the same ids is another prompt."""
    routes, one, other = EpisodeRoutes(), picture(0, tokens=2), picture(1, tokens=2)

    def ask(tokens: list[int], images: list[int], *pictures: Picture) -> int:
        request = GenerationRequest(tokens, 2, images=images if pictures else None, pictures=pictures)
        known = routes.begin(request)
        rows = torch.zeros(len(tokens) + 1 - len(known), 2, 2, dtype=torch.uint8)
        routes.end(request, GenerationResponse([7, 7], [0.0] * 2, [0] * 2, "stop", rows), known)
        return len(known)

    assert ask([1, 9, 9, 2], [-1, 0, 0, -1], one) == 0
    assert ask([1, 9, 9, 2, 7, 7, 9, 9, 3], [-1, 0, 0, -1, -1, -1, 1, 1, -1], one, other) == 5
    assert ask([1, 9, 9, 2], [-1, 0, 0, -1], other) == 1
    assert ask([1, 9, 9, 2], [-1, 0, 0, -1], one) == 4
    assert ask([1, 9, 9, 2], [-1] * 4) == 1


def test_an_engine_that_does_not_say_what_it_records_fails_its_episode() -> None:
    engine = RecordingEngine(CHARACTERS, ["42"])
    engine.missing = True
    with pytest.raises(GenerationError, match="the engine told no experts, where 8 were asked for"):
        play(RLVRWorkflow(max_new_tokens=4), engine, CHARACTERS, SUM, right)


def test_a_workflow_that_drops_them_fails_its_episode() -> None:
    class Forgetful(RLVRWorkflow):
        async def run(self, engine: EpisodeEngine, prompt: Prompt) -> list[Trajectory]:
            return [replace(one, routes=None) for one in await super().run(engine, prompt)]

    engine = RecordingEngine(CHARACTERS, ["42"])
    with pytest.raises(EpisodeError, match=r"Forgetful.run returned a trajectory without the experts.*routes=response"):
        play(Forgetful(max_new_tokens=4), engine, CHARACTERS, SUM, right)
