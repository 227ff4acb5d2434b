"""Servers that leave the trainer's device while it computes: each token is of the weights that its stamp says.

On a CPU a server frees nothing. It goes through the same calls, and ends where one comes that it does not expect.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from callbacks import WeightSync
from datamodules.inference.export import checkpoint_weights
from datamodules.inference.protocol import WeightUpdate
from datamodules.inference.sglang import Launch, SGLangEngine
from datamodules.inference.weight_files import WeightFiles
from tests.callbacks.engine_run import EngineData, PolicyOnTrial
from tests.datamodules.inference.adapters import with_lora
from tests.datamodules.inference.engine_suite import generate_all, tiny_policy
from tests.datamodules.inference.sglang.real_servers.servers import START_S
from tests.datamodules.inference.weight_updates import (
    assert_interrupted,
    generate_through_updates,
    requests_of,
    update_of,
    worst_difference,
)
from tests.helpers.tiny_run import trainer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
LAUNCH = Launch(device="cpu", dtype="float32", kv_cache_tokens=16384, num_threads=1, in_turns=True)


class InTurns:
    """The engine, whose updates come as a trainer's do that has the device: it computes, and then they return."""

    def __init__(self, engine: SGLangEngine) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def update_weights(self, update: WeightUpdate) -> float:
        self._engine.pause()
        self._engine.pause()  # servers that have left stay away
        time.sleep(0.1)
        downtime_s = self._engine.update_weights(update)
        self._engine.resume()
        return downtime_s


@pytest.fixture
def engine() -> Iterator[SGLangEngine]:
    made = SGLangEngine(launch=LAUNCH, start_timeout_s=START_S, report_tokens=4, silence_s=20.0)
    yield made
    made.close()


def test_requests_under_way_go_on_with_the_weights_that_came_in_between(engine, tmp_path: Path) -> None:
    models = {version: tiny_policy(seed=version) for version in range(6)}

    def update(version: int) -> WeightUpdate:
        directory = tmp_path if version % 3 == 1 else None  # in turn by every way
        made = update_of(models[version], version, directory, checkpoint_weights, 60.0)
        return replace(made, shared=version % 3 == 2)

    engine.start(models[0], version=0, seed=3)
    assert engine.in_turns
    requests = requests_of(192)  # more are left for the last update than are under way: a pause may be slow to come
    updates = [lambda version=version: update(version) for version in range(1, 6)]
    responses, _ = generate_through_updates(InTurns(engine), requests, updates, together=16, every=True)
    assert_interrupted(responses, versions=6, at_least=5)
    assert worst_difference(models, requests, responses) < 1e-5

    engine.pause()
    (server,) = engine._running_fleet().servers
    os.kill(server.process.pid, signal.SIGKILL)  # what it held is gone: it starts anew, in its turn
    while server.state != "lost":
        time.sleep(0.05)
    time.sleep(2.0)
    assert not server.process.running and server.state == "lost"
    engine.resume()
    responses = asyncio.run(generate_all(engine, requests[:8]))
    assert {version for response in responses for version in response.versions} == {5}
    assert worst_difference(models, requests[:8], responses) < 1e-5


@pytest.mark.parametrize("adapters", [None, 3], ids=["merged", "adapters"])
def test_a_fit_leaves_the_device_to_each_in_turn(tmp_path: Path, adapters: int | None) -> None:
    base = str(WeightFiles(tmp_path / "base").write(tiny_policy(), version=0)[0])
    policy = with_lora(tiny_policy())
    policy.peft_config["default"].base_model_name_or_path = base
    data = EngineData(SGLangEngine(launch=LAUNCH, start_timeout_s=START_S, adapters=adapters))
    paused: list[bool] = []

    class Watched(PolicyOnTrial):
        def training_step(self, handle: Any, batch_idx: int) -> Any:
            paused.append(data.engine.health()["paused"])
            return super().training_step(handle, batch_idx)

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            paused.append(data.engine.health()["paused"])  # behind callbacks

    try:
        trainer(tmp_path / "run", WeightSync()).fit(Watched(policy), datamodule=data)
        assert paused == [True, False] * 3
        data.assert_serves(policy.eval(), 3)
    finally:
        data.engine.close()
