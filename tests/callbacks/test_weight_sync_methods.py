"""WeightSync by each method, with a real engine: what is served is the policy, and nothing is published that is not."""

from __future__ import annotations

from pathlib import Path

import pytest

from callbacks import WeightSync
from callbacks.pictures import read_metrics
from datamodules.inference import EmbeddedEngine
from datamodules.inference.export import ExportError
from modules import ModelSource, build_model
from tests.callbacks.engine_run import EngineData, PolicyOnTrial
from tests.datamodules.inference.adapters import with_lora
from tests.datamodules.inference.engine_suite import tiny_policy
from tests.helpers.tiny_run import TinyData, TinyModule, trainer


@pytest.fixture
def data():
    made = EngineData(EmbeddedEngine())
    yield made
    made.engine.close()


@pytest.mark.parametrize("adapters", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("method", ["auto", "memory", "disk"])
def test_the_engine_serves_the_trained_policy(data, tmp_path, method, adapters) -> None:
    policy = with_lora(tiny_policy()) if adapters else tiny_policy()
    run = tmp_path / "run"
    trainer(run, WeightSync(method)).fit(PolicyOnTrial(policy), datamodule=data)
    assert data.published == [1, 2, 3] and data.engine.version == 3
    data.assert_serves(policy.eval(), 3)
    series = {name: values for name, (_, values) in read_metrics(run / "metrics.csv").items()}
    size = sum(parameter.nbytes for parameter in tiny_policy().parameters())
    assert series["sync/bytes"] == [size] * 3
    for seconds, downtime_s in zip(series["sync/seconds"], series["sync/downtime_s"], strict=True):
        assert 0 < downtime_s < seconds
    assert [path.name for path in run.glob("weights/*")] == (["v00000003"] if method == "disk" else [])


@pytest.fixture
def in_4_bit(tmp_path):
    pytest.importorskip("bitsandbytes", reason="4 bit need bitsandbytes: pip install -e '.[qlora]'")
    tiny_policy().save_pretrained(tmp_path / "base")
    adapter = {"r": 4, "target_modules": ["q_proj", "v_proj", "down_proj"], "init_lora_weights": False}
    return build_model(ModelSource(path=str(tmp_path / "base"), adapter=adapter, quantization="nf4"))


@pytest.mark.parametrize("method", ["memory", "disk"])
def test_of_weights_in_4_bit_the_engine_serves_the_same_numbers(data, tmp_path, method, in_4_bit) -> None:
    trainer(tmp_path / "run", WeightSync(method)).fit(PolicyOnTrial(in_4_bit), datamodule=data)
    assert data.published == [1, 2, 3] and data.engine.version == 3
    data.assert_serves(in_4_bit.eval(), 3)
    with pytest.raises(AssertionError):
        data.assert_serves(tiny_policy().eval(), 3)


def test_an_adapter_alone_is_of_weights_that_servers_have_otherwise(tmp_path, in_4_bit) -> None:
    class TakesAdapters(EmbeddedEngine):
        update_methods = ("adapter",)

    made, run = EngineData(TakesAdapters()), trainer(tmp_path / "run", WeightSync())
    with pytest.warns(UserWarning, match="below it are in 4 bit here"), pytest.raises(ExportError, match="is in 4 bit"):
        run.fit(PolicyOnTrial(in_4_bit), datamodule=made)  # this engine has no adapters


def test_restored_weights_start_the_engine_and_go_on(data, tmp_path) -> None:
    module = PolicyOnTrial(tiny_policy(seed=4))
    module.policy_version = 7  # modules restore it themselves
    trainer(tmp_path / "run", WeightSync("disk", directory="elsewhere"), max_steps=1).fit(module, datamodule=data)
    assert data.published == [8]
    assert [path.name for path in (tmp_path / "run" / "elsewhere").iterdir()] == ["v00000008"]
    data.assert_serves(module.policy.eval(), 8)


def test_steps_within_a_batch_log_no_sync(tmp_path) -> None:
    data = TinyData(batches=2, count=3, validate=False)
    trainer(tmp_path / "run", WeightSync()).fit(TinyModule(3), datamodule=data)
    series = {name: values for name, (_, values) in read_metrics(tmp_path / "run" / "metrics.csv").items()}
    assert [size > 0 for size in series["sync/bytes"]] == [False, False, True] * 2
    assert [seconds > 0 for seconds in series["sync/seconds"]] == [False, False, True] * 2


def test_weights_that_cannot_be_written_stop_the_run_and_the_old_ones_serve(data, tmp_path) -> None:
    (tmp_path / "file").write_text("no directory")
    policy, initial = tiny_policy(), tiny_policy()
    where = tmp_path / "file" / "weights"
    with pytest.raises(ExportError, match=rf"version 1 could not be written to {where}/v00000001, which needs [\d,]+"):
        trainer(tmp_path / "run", WeightSync("disk", str(where))).fit(PolicyOnTrial(policy), datamodule=data)
    assert data.published == []
    data.assert_serves(initial, 0)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"method": "carrier pigeon"}, r"WeightSync\.method: 'carrier pigeon' is not one of auto, memory"),
        ({"deadline_s": 0}, r"WeightSync\.deadline_s: 0, must be above 0"),
        (
            {"method": "memory", "directory": "x"},
            r"WeightSync\.directory: x has no effect with WeightSync\.method: memory",
        ),
        (
            {"method": "tensor", "directory": "x"},
            r"WeightSync\.directory: x has no effect with WeightSync\.method: tensor",
        ),
        ({"method": "tensor"}, r"WeightSync\.method: tensor, but data\.engine, EmbeddedEngine, .*memory or disk"),
        (
            {"directory": "x"},
            r"directory: x has no effect with WeightSync\.method: auto, which is memory with this engine",
        ),
        (
            {"method": "distributed"},
            r"WeightSync\.method: distributed, but data\.engine, EmbeddedEngine, .*memory or disk",
        ),
    ],
    ids=lambda value: str(value)[:30],
)
def test_options_without_effect_are_refused_by_key(data, tmp_path, options, match) -> None:
    with pytest.raises(ValueError, match=match):
        trainer(Path(tmp_path) / "run", WeightSync(**options)).fit(PolicyOnTrial(tiny_policy()), datamodule=data)
    assert not data.engine.health()["alive"]
