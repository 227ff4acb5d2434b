"""Generated sessions on a real SGLang server, with a weight update and a killed server in between."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from pathlib import Path

import pytest

from datamodules.inference.export import checkpoint_weights
from datamodules.inference.protocol import WeightUpdate
from datamodules.inference.sglang import Launch, SGLangEngine
from tests.datamodules.inference.sglang.real_servers.servers import START_S, skip_unless_wanted
from tests.datamodules.workflows.gateway.wild_agents import Books, assert_of_their_versions, model_of_words, play

SESSIONS = 50


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_nothing_is_lost_while_weights_change_and_a_server_is_killed(tmp_path: Path) -> None:
    skip_unless_wanted()
    models = [model_of_words(seed) for seed in range(2)]
    launch = Launch(device="cpu", dtype="float32", kv_cache_tokens=65536, num_threads=1, log_dir=str(tmp_path))
    engine = SGLangEngine(launch=launch, start_timeout_s=START_S)
    engine.start(models[0], version=0, seed=1)
    all_books: list[Books] = []

    def recorded(_: random.Random) -> Books:
        all_books.append(Books(engine))
        return all_books[-1]

    def disturb() -> None:
        wait_for(SESSIONS * 2)
        os.kill(engine._fleet.servers[0].process.pid, signal.SIGKILL)  # type: ignore[union-attr, arg-type]
        wait_for(SESSIONS * 4)
        engine.update_weights(WeightUpdate(1, state_dict=checkpoint_weights(models[1])))

    def wait_for(replies: int) -> None:
        ends = time.monotonic() + START_S
        while (answered := sum(len(one.answered) for one in all_books)) < replies:
            assert time.monotonic() < ends, f"{answered} of {replies} replies within {START_S} s: {engine.health()}"
            time.sleep(0.01)

    async def run() -> dict[str, int]:
        disturbing = asyncio.get_running_loop().run_in_executor(None, disturb)
        found = await play(range(SESSIONS), recorded, most=24, turns=4, impatient_s=0.5)
        await disturbing
        return found

    try:
        found = asyncio.run(run())
        restarts, moved = engine._fleet.servers[0].restarts, engine.health()["moved"]  # type: ignore[union-attr]
    finally:
        engine.close()
    assert restarts == 1 and moved > 0, "the kill met no request"
    assert found["calls"] > 6 * SESSIONS and found["given_up"] > 0 and found["abandoned_calls"] > 0
    assert_of_their_versions(all_books, models, count=30, tolerance=1e-4)
