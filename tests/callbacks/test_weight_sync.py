"""WeightSync: the engine serves what the trainer has, at every policy version and after a restore."""

from __future__ import annotations

from pathlib import Path

import pytest
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import EMAWeightAveraging, StochasticWeightAveraging

from callbacks import Throughput, ValidateEnds, WeightSync
from callbacks.pictures import read_metrics
from tests.helpers.tiny_run import TinyData, TinyModule, trainer


class NoEngine(TinyData):
    def __init__(self) -> None:
        super().__init__()
        del self.engine


def test_engine_serves_every_version_with_its_weights(tmp_path: Path) -> None:
    data = TinyData(batches=3)
    trainer(tmp_path, WeightSync(), ValidateEnds()).fit(TinyModule(), datamodule=data)
    assert data.engine.served == [(0, 0.0), (1, -1.0), (2, -2.0), (3, -3.0)]
    assert data.published == [1, 2, 3]


def test_one_update_per_rollout_batch(tmp_path: Path) -> None:
    data = TinyData(batches=2, count=3)
    trainer(tmp_path, WeightSync()).fit(TinyModule(3), datamodule=data)
    assert data.engine.served == [(0, 0.0), (1, -3.0), (2, -6.0)]


def test_restored_weights_are_served(tmp_path: Path) -> None:
    first = trainer(tmp_path / "a", WeightSync(), max_steps=2)
    first.fit(TinyModule(), datamodule=TinyData(batches=5))
    first.save_checkpoint(tmp_path / "two.ckpt")
    data, module = TinyData(batches=5), TinyModule()
    module.policy_version = 2  # modules restore it themselves
    trainer(tmp_path / "b", WeightSync(), max_epochs=-1, max_steps=3).fit(
        module, datamodule=data, ckpt_path=tmp_path / "two.ckpt", weights_only=False
    )
    assert data.engine.served == [(2, -2.0), (3, -3.0)]


def test_validation_alone_starts_the_engine(tmp_path: Path) -> None:
    data = TinyData()
    trainer(tmp_path, WeightSync()).validate(TinyModule(), datamodule=data, verbose=False)
    assert data.engine.served == [(0, 0.0)]


def test_engine_that_runs_already_gets_newer_weights_and_refuses_older(tmp_path: Path) -> None:
    data, module = TinyData(batches=1), TinyModule()
    trainer(tmp_path, WeightSync()).validate(module, datamodule=data, verbose=False)
    module.policy_version = 4
    trainer(tmp_path, WeightSync()).fit(module, datamodule=data)
    assert data.engine.served == [(0, 0.0), (4, 0.0), (5, -1.0)] and data.published == [4, 5]
    module.policy_version = 3
    with pytest.raises(RuntimeError, match="serves version 5, the policy is at 3"):
        trainer(tmp_path, WeightSync()).validate(module, datamodule=data, verbose=False)


def test_datamodule_without_engine_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"trainer.callbacks: WeightSync .* NoEngine .*remove WeightSync"):
        trainer(tmp_path, WeightSync()).fit(TinyModule(), datamodule=NoEngine())


@pytest.mark.parametrize("average", [EMAWeightAveraging(), StochasticWeightAveraging(swa_lrs=0.1, swa_epoch_start=1)])
def test_an_average_that_no_engine_samples_with_is_refused(tmp_path: Path, average: Callback) -> None:
    name = type(average).__name__
    with pytest.raises(ValueError, match=rf"trainer.callbacks: {name} .*which no engine samples with"):
        trainer(tmp_path, WeightSync(), average).fit(TinyModule(), datamodule=TinyData())


def test_times_are_logged_each_step_and_add_up(tmp_path: Path) -> None:
    run = tmp_path / "run"
    trainer(run, WeightSync(), Throughput()).fit(TinyModule(), datamodule=TinyData(batches=3))
    series = {name: values for name, (_, values) in read_metrics(run / "metrics.csv").items()}
    assert series["time/prepare"] == pytest.approx([0.001] * 3) and series["time/tree"] == pytest.approx([0.002] * 3)
    assert all(sync > 0.009 for sync in series["time/sync"])  # the engine sleeps for 10 ms
    assert series["rollouts/accepted"] == [0, 3, 6] and series["rollouts/failed"] == [1, 1, 1]  # at arrival
    for step in range(3):
        measured = sum(series[f"time/{name}"][step] for name in ("wait", "optimizer", "sync"))
        assert 0 < measured <= series["time/step"][step]


def test_throughput_before_weight_sync_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="Throughput after WeightSync"):
        trainer(tmp_path, Throughput(), WeightSync()).fit(TinyModule(), datamodule=TinyData())
