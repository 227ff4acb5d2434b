"""SGLangEngine with a real server: the suite every engine passes, with both of its ways to take weights."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedModel

from datamodules.inference.export import checkpoint_weights
from datamodules.inference.protocol import WeightUpdate
from datamodules.inference.sglang import SGLangEngine
from datamodules.inference.sglang.launcher import ServerProcess
from datamodules.inference.weight_files import WeightFiles
from tests.datamodules.inference.engine_suite import EngineSuite


def started(update: WeightUpdate, policy: PreTrainedModel, url: str, **settings: Any) -> SGLangEngine:
    """An engine on one running server, which has the weights of `update`."""
    engine = SGLangEngine(**({"urls": [url], "request_timeout_s": 90.0, "start_timeout_s": 60.0} | settings))
    engine.start(policy, version=update.version, seed=3)
    engine.update_weights(update)
    return engine


@pytest.mark.slow
class TestByDisk(EngineSuite):
    penalties_lag = 1  # it draws ahead

    @pytest.fixture
    def engine(self, policy: PreTrainedModel, server: ServerProcess, tmp_path: Path) -> Iterator[SGLangEngine]:
        self.files = WeightFiles(tmp_path)
        engine = started(self.make_update(0, policy), policy, server.url)
        yield engine
        engine.close()

    def make_update(self, version: int, model: PreTrainedModel) -> WeightUpdate:
        return WeightUpdate(version, path=str(self.files.write(model, version)[0]))


class TestByBroadcast(EngineSuite):
    samples, distance = 500, 0.24
    penalties_lag = 1

    @pytest.fixture
    def engine(self, policy: PreTrainedModel, server: ServerProcess) -> Iterator[SGLangEngine]:
        engine = started(self.make_update(0, policy), policy, server.url)
        yield engine
        engine.close()

    def make_update(self, version: int, model: PreTrainedModel) -> WeightUpdate:
        return WeightUpdate(version, state_dict=checkpoint_weights(model))
