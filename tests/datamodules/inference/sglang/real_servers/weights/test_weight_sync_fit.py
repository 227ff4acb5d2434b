"""WeightSync in a Trainer run with a real server: what it serves is the policy."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from callbacks import WeightSync
from callbacks.pictures import read_metrics
from datamodules.inference.sglang import SGLangEngine
from datamodules.inference.sglang.launcher import ServerProcess
from tests.callbacks.engine_run import EngineData, PolicyOnTrial
from tests.datamodules.inference.adapters import with_lora
from tests.datamodules.inference.engine_suite import tiny_policy
from tests.helpers.tiny_run import trainer

pytestmark = pytest.mark.slow


@pytest.fixture
def data(server: ServerProcess) -> Iterator[EngineData]:
    made = EngineData(SGLangEngine(urls=[server.url]))
    yield made
    made.engine.close()


@pytest.mark.parametrize("adapters", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("method", ["auto", "disk", "tensor"])
def test_the_server_serves_the_trained_policy(data, tmp_path, method, adapters) -> None:
    policy = with_lora(tiny_policy()) if adapters else tiny_policy()
    run = tmp_path / "run"
    module = PolicyOnTrial(policy)
    module.policy_version = 5  # restored from a checkpoint; the server holds other weights
    trainer(run, WeightSync(method, deadline_s=60)).fit(module, datamodule=data)
    assert data.published == [5, 6, 7, 8]
    data.assert_serves(policy.eval(), 8)
    series = {name: values for name, (_, values) in read_metrics(run / "metrics.csv").items()}
    assert series["sync/bytes"] == [sum(parameter.nbytes for parameter in tiny_policy().parameters())] * 3
    for seconds, downtime_s in zip(series["sync/seconds"], series["sync/downtime_s"], strict=True):
        assert 0 < downtime_s < seconds
    assert [path.name for path in run.glob("weights/*")] == (["v00000008"] if method == "disk" else [])


def test_memory_is_no_way_to_a_server(data, tmp_path) -> None:
    with pytest.raises(
        ValueError, match=r"WeightSync\.method: memory, but .*SGLangEngine, .* distributed or disk or tensor"
    ):
        trainer(tmp_path / "run", WeightSync("memory")).fit(PolicyOnTrial(tiny_policy()), datamodule=data)
