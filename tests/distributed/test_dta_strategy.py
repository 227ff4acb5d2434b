"""DTAStrategy under real Lightning Trainers: against Lightning's own single-device strategy, and across numbers of"
" ranks."""

from __future__ import annotations

import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor

from app.strategies import DTAStrategy
from app.strategies.pieces import load_whole
from app.strategies.trainer_state import put_together
from tests.distributed import toy, toy_module
from tests.distributed.ranks import RankError, RankPool

ROOT = Path(__file__).parents[2]


def _largest_difference(got: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    assert got.keys() == expected.keys()
    return max(float((got[name].double() - expected[name].double()).abs().max()) for name in expected)


@pytest.fixture
def pools(one_rank: RankPool, two_ranks: RankPool) -> dict[int, RankPool]:
    return {1: one_rank, 2: two_ranks}


def _fit(pools: dict[int, RankPool], directory: Path, devices: int, **arguments: Any) -> list[dict[str, Any]]:
    directory.mkdir(exist_ok=True)
    return pools[devices].run(toy_module.fit, directory=directory, devices=devices, **arguments)


@pytest.mark.parametrize("clip", [{}, {"gradient_clip_val": 0.05}])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_same_training_as_lightning_on_one_device(
    pools: dict[int, RankPool], tmp_path: Path, optimizer: str, clip: dict[str, float]
) -> None:
    module = {"optimizer": optimizer}
    [plain] = _fit(pools, tmp_path / "plain", 1, strategy="auto", module=module, **clip)
    [alone] = _fit(pools, tmp_path / "alone", 1, module=module, **clip)
    pair = _fit(pools, tmp_path / "pair", 2, module=module, **clip)
    tolerance = 1e-6 if optimizer == "sgd" else 1e-2 * toy.LEARNING_RATE
    for result in (alone, *pair):
        assert result["wrapped"] == "ToyModule"
        assert _largest_difference(result["parameters"], plain["parameters"]) < tolerance
        assert [(r["global_step"], r["lr"]) for r in result["seen"]] == [
            (r["global_step"], r["lr"]) for r in plain["seen"]
        ]
        assert result["rates"] == plain["rates"] and result["rates"]
        assert all(0 < report["seconds"] < 60 for report in result["seen"])
    if not clip:
        assert _largest_difference(alone["parameters"], plain["parameters"]) == 0.0


def test_clipping_by_value(pools: dict[int, RankPool], tmp_path: Path) -> None:
    clip = {"gradient_clip_val": 0.02, "gradient_clip_algorithm": "value", "module": {"optimizer": "sgd"}}
    [plain] = _fit(pools, tmp_path / "plain", 1, strategy="auto", **clip)
    for result in _fit(pools, tmp_path / "pair", 2, **clip):
        assert _largest_difference(result["parameters"], plain["parameters"]) < 1e-6


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2), (2, 2)])
def test_resume_on_another_number_of_ranks(pools: dict[int, RankPool], tmp_path: Path, before: int, after: int) -> None:
    whole = _fit(pools, tmp_path / "whole", after, steps=5)[0]
    half = _fit(pools, tmp_path / "half", before, steps=2)[0]
    rest = _fit(pools, tmp_path / "rest", after, steps=5, ckpt_path=tmp_path / "half" / "last.ckpt")
    for result in rest:
        difference = _largest_difference(result["parameters"], whole["parameters"])
        assert difference < 1e-2 * toy.LEARNING_RATE
        if before == after:
            assert difference == 0.0
        assert [(r["global_step"], r["lr"]) for r in result["seen"]] == [
            (r["global_step"], r["lr"]) for r in whole["seen"][2:]
        ]
    description = put_together(half["after_fit"])["optimizer_states"][0]["description"]  # saved when fit was over
    assert description["tensors"] and all(keys == ["exp_avg", "exp_avg_sq"] for keys in description["tensors"].values())
    losses = {pools[n].run(toy_module.validate, ckpt_path=half["after_fit"], devices=n)[0] for n in (before, after)}
    assert max(losses) - min(losses) < 1e-6


@pytest.mark.parametrize("save_last", [True, "link"])
def test_model_checkpoint_keeps_the_best_and_the_last(
    pools: dict[int, RankPool], tmp_path: Path, save_last: bool | str
) -> None:
    directory = tmp_path / "run"
    options = {"monitor": "rising", "mode": "min", "save_top_k": 2, "every_n_train_steps": 1, "save_last": save_last}
    _fit(pools, directory, 2, steps=5, checkpoint=options)
    names = {path.name for path in directory.iterdir()} - {"log", "after.ckpt"}
    assert names == {"step=1.ckpt", "step=2.ckpt", "last.ckpt"}
    last = directory / "last.ckpt"
    # A link points to the newest of those that are kept, as Lightning makes it.
    assert put_together(last)["global_step"] == (5 if save_last is True else 2)
    assert last.is_symlink() == (save_last == "link")


def test_bf16_true_keeps_float32_masters_through_a_checkpoint(pools: dict[int, RankPool], tmp_path: Path) -> None:
    arguments: dict[str, Any] = {"precision": "bf16-true"}
    whole = _fit(pools, tmp_path / "whole", 2, steps=4, **arguments)[0]
    _fit(pools, tmp_path / "half", 2, steps=2, **arguments)
    rest = _fit(pools, tmp_path / "rest", 2, steps=4, ckpt_path=tmp_path / "half" / "last.ckpt", **arguments)[0]
    assert rest["parameters"]["hidden.weight"].dtype == torch.bfloat16
    assert _largest_difference(rest["parameters"], whole["parameters"]) == 0.0
    masters = load_whole(tmp_path / "half" / "last.ckpt", lambda name: name.startswith("optimizer/master/"))
    assert masters and all(master.dtype == torch.float32 for master in masters.values())


def test_bf16_mixed(pools: dict[int, RankPool], tmp_path: Path) -> None:
    [plain] = _fit(pools, tmp_path / "plain", 1, strategy="auto", precision="bf16-mixed", module={"optimizer": "sgd"})
    [alone] = _fit(pools, tmp_path / "alone", 1, precision="bf16-mixed", module={"optimizer": "sgd"})
    assert _largest_difference(alone["parameters"], plain["parameters"]) == 0.0


def test_nonfinite_gradient_costs_one_step(pools: dict[int, RankPool], tmp_path: Path) -> None:
    pair = _fit(pools, tmp_path / "pair", 2, steps=3, module={"poison": (1, 1)})
    for result in pair:
        assert result["skipped"] == 1
        assert [report["grad_norm"] < float("inf") for report in result["seen"]] == [True, False, True]
        assert all(bool(torch.isfinite(value).all()) for value in result["parameters"].values())
    assert _largest_difference(pair[0]["parameters"], pair[1]["parameters"]) == 0.0
    description = put_together(pair[0]["after_fit"])["optimizer_states"][0]["description"]
    assert {float(entry["step"]) for entry in description["scalars"].values()} == {2.0}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"accumulate_grad_batches": 2}, "trainer.accumulate_grad_batches=2 is not supported by DTAStrategy"),
        ({"precision": "16-true"}, "trainer.precision=16-true is not supported by DTAStrategy"),
    ],
)
def test_refused_by_name(pools: dict[int, RankPool], tmp_path: Path, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(RankError, match=message):
        _fit(pools, tmp_path / "refused", 1, **arguments)


def test_16_mixed_is_refused_by_name() -> None:
    """Lightning itself turns the flag into bf16-mixed on CPUs; with CUDA the plugin below is what it makes of it."""
    strategy = DTAStrategy(precision_plugin=MixedPrecision("16-mixed", "cuda"))
    strategy.connect(toy_module.ToyModule())
    with pytest.raises(Exception, match=r"trainer\.precision=16-mixed.*bf16-mixed"):
        strategy.setup(pl.Trainer(logger=False, enable_checkpointing=False))


@pytest.mark.parametrize("arguments", [{"timeout": None}, {"timeout": timedelta(0)}, {"bucket_cap_mb": 0}])
def test_endless_or_empty_settings_are_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(Exception, match=next(iter(arguments))):
        DTAStrategy(**arguments)


def test_lightning_launches_two_processes_from_a_script(tmp_path: Path) -> None:
    environment = {key: value for key, value in os.environ.items() if key not in ("LOCAL_RANK", "RANK", "WORLD_SIZE")}
    environment |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    script = ROOT / "tests" / "distributed" / "launch_script.py"
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path)], env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
    first, second = (torch.load(tmp_path / f"rank{rank}.pt", weights_only=True) for rank in (0, 1))
    assert _largest_difference(first, second) == 0.0
    assert _largest_difference(first, toy.values(toy.Toy())) > 1e-3
