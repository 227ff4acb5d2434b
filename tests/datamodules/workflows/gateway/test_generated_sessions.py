"""Generated sessions through real HTTP: 0 sampled tokens lost, 0 changed, 0 trained twice, whatever agents do."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from typing import Any

import pytest

from datamodules.inference import EmbeddedEngine
from datamodules.inference.protocol import GenerationRequest, WeightUpdate
from tests.datamodules.workflows.gateway.test_sessions import TOKENIZER, reply
from tests.datamodules.workflows.gateway.wild_agents import Books, assert_of_their_versions, model_of_words, play
from tests.datamodules.workflows.scripted_engine import ScriptedEngine


class Unsteady(ScriptedEngine):
    """Takes its time, now and then."""

    def __init__(self, draw: random.Random) -> None:
        super().__init__(TOKENIZER, lambda request: reply(draw, request), max_context=20_000)
        self._draw = draw

    async def generate(self, request: GenerationRequest) -> Any:
        self.pace_s = self._draw.choice([0.0, 0.0, 0.0, 0.001])
        await asyncio.sleep(self._draw.choice([0.0, 0.0, 0.002, 0.005]))
        return await super().generate(request)


@pytest.mark.timeout(1500)
@pytest.mark.parametrize("count", [30, pytest.param(250, marks=pytest.mark.slow)])
def test_on_a_scripted_engine(count: int) -> None:
    found = asyncio.run(play(range(count), Unsteady, most=400, turns=5, impatient_s=0.02))
    happened = ["abandoned_calls", "tool_calls", "given_up", "drift_thoughts", "drift_arguments", "drift_stops"]
    happened += ["repeated_calls", "drift_edited"] if count > 100 else []  # clients that leave just then are few
    assert not [what for what in happened if not found[what]], found


@pytest.mark.timeout(1500)
@pytest.mark.parametrize("count", [6, pytest.param(200, marks=pytest.mark.slow)])
def test_on_the_embedded_engine_while_its_weights_change(count: int) -> None:
    models = [model_of_words(seed) for seed in range(3)]
    engine = EmbeddedEngine(kv_cache_tokens=1 << 16, num_threads=1)
    engine.start(models[0], version=0, seed=1)
    all_books: list[Books] = []

    def recorded(_: random.Random) -> Books:
        all_books.append(Books(engine))
        return all_books[-1]

    async def run() -> Counter[str]:
        playing = asyncio.create_task(play(range(count), recorded, most=16, turns=3, impatient_s=0.3))
        for version in (1, 2):
            # Early enough that a fast machine has replies left for the last version.
            while sum(len(one.answered) for one in all_books) < version * count and not playing.done():
                await asyncio.sleep(0.005)
            update = WeightUpdate(version, state_dict=models[version].state_dict())
            await asyncio.get_running_loop().run_in_executor(None, engine.update_weights, update)
        return await playing

    try:
        found = asyncio.run(run())
    finally:
        engine.close()
    assert found["calls"] > 3 * count and found["given_up"] > 0
    assert_of_their_versions(all_books, models, count=20, tolerance=1e-4)
