"""DTAStrategy under real Lightning Trainers: against Lightning's own single-device strategy, and across numbers of"
" ranks."""

from __future__ import annotations

import os
import re
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
from app.strategies.checkpoint.trainer_state import put_together
from app.strategies.divergence import describe
from app.strategies.pieces import load_whole
from tests.app.strategies import toy_model as toy
from tests.app.strategies import toy_module
from tests.helpers.rank_pool import RankError, RankPool

ROOT = Path(__file__).parents[3]


def _largest_difference(got: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    assert got.keys() == expected.keys()
    return max(float((got[name].double() - expected[name].double()).abs().max()) for name in expected)


@pytest.mark.parametrize(("name", "offloads"), [("dta", False), ("dta_offload", True)])
def test_known_to_the_trainer_by_name(name: str, offloads: bool) -> None:
    strategy = pl.Trainer(accelerator="cpu", strategy=name, logger=False).strategy
    assert type(strategy) is DTAStrategy and strategy._offload == offloads


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


def test_masters_follow_averaged_weights(pools: dict[int, RankPool], tmp_path: Path) -> None:
    """What Lightning's WeightAveraging writes as fit ends is what a checkpoint of it goes on from."""
    results = _fit(pools, tmp_path / "run", 2, precision="bf16-true", averages=True)
    [plain] = _fit(pools, tmp_path / "plain", 1, precision="bf16-true")
    assert _largest_difference(results[0]["parameters"], plain["parameters"]) > 1e-3
    masters = load_whole(results[0]["after_fit"], lambda name: name.startswith("optimizer/master/"))
    assert masters
    for name, master in masters.items():
        written = results[0]["parameters"][name.removeprefix("optimizer/master/toy.")]
        assert torch.equal(master.view(written.shape).bfloat16(), written), name


def test_bf16_mixed(pools: dict[int, RankPool], tmp_path: Path) -> None:
    [plain] = _fit(pools, tmp_path / "plain", 1, strategy="auto", precision="bf16-mixed", module={"optimizer": "sgd"})
    [alone] = _fit(pools, tmp_path / "alone", 1, precision="bf16-mixed", module={"optimizer": "sgd"})
    assert _largest_difference(alone["parameters"], plain["parameters"]) == 0.0


def test_nonfinite_gradient_costs_one_step(pools: dict[int, RankPool], tmp_path: Path) -> None:
    pair = _fit(pools, tmp_path / "pair", 2, steps=3, module={"poison": (1, (1,))})
    for result in pair:
        assert result["skipped"] == 1
        assert [report["grad_norm"] < float("inf") for report in result["seen"]] == [True, False, True]
        assert all(bool(torch.isfinite(value).all()) for value in result["parameters"].values())
    assert _largest_difference(pair[0]["parameters"], pair[1]["parameters"]) == 0.0
    description = put_together(pair[0]["after_fit"])["optimizer_states"][0]["description"]
    assert {float(entry["step"]) for entry in description["scalars"].values()} == {2.0}


class TestDivergence:
    """No checkpoint after a step without effect, none deleted meanwhile; a bound on such steps in a row."""

    def test_too_many_steps_without_effect_end_the_run(self, pools: dict[int, RankPool], tmp_path: Path) -> None:
        options = {"every_n_train_steps": 1, "save_top_k": 1}
        with pytest.raises(RankError) as caught:
            module = {"poison": (1, range(2, 99))}
            _fit(pools, tmp_path, 2, steps=6, module=module, checkpoint=options, max_skipped_steps=3)
        assert len(caught.value.messages) == 2
        for text in caught.value.messages.values():
            [line] = [line for line in text.splitlines() if "Diverged: " in line]
            assert "3 steps in a row (from step 3 on; max_skipped_steps=3)" in line and "grad_norm=inf" in line
            assert "learning rate=0.0125." in line, line
            assert "In the first of them not finite: falling=-inf" in line, line
            assert re.search(r"Go on from \S+/(last|step=2)\.ckpt with a lower learning rate", line)
        names = {path.name for path in tmp_path.iterdir()} - {"log"}
        assert names == {"step=2.ckpt", "last.ckpt"}
        assert all(put_together(tmp_path / name)["global_step"] == 2 for name in names - {"log"})

    def test_what_waited_is_deleted_after_the_next_good_one(self, pools: dict[int, RankPool], tmp_path: Path) -> None:
        options = {"every_n_train_steps": 1, "save_top_k": 1}
        module = {"poison": (0, (2, 3))}
        result = _fit(pools, tmp_path, 2, steps=5, module=module, checkpoint=options, max_skipped_steps=3)[0]
        assert {path.name for path in tmp_path.iterdir()} == {"log", "after.ckpt", "step=5.ckpt", "last.ckpt"}
        assert put_together(tmp_path / "last.ckpt")["global_step"] == 5
        held = [text for text in result["warned"] if "is not written: the last step had no effect" in text]
        assert len(held) == 4 and all(re.search(r"(last|step=2)\.ckpt stays", text) for text in held)

    def test_metrics_that_show_it_are_named(self) -> None:
        metrics = {"loss": torch.tensor(torch.nan), "reward": 3e38, "entropy": 2.0, "tokens/tree": 1e9}
        assert describe(metrics) == " In the first of them not finite: loss=nan; very large: reward=3e+38."
        assert describe({"loss": 1.0}) == ""
        many = describe({f"m{i}": float("inf") for i in range(9)})
        assert many.endswith("m5=inf and 3 more.") and "m6" not in many

    def test_where_nothing_good_is_nothing_is_held_back(self, pools: dict[int, RankPool], tmp_path: Path) -> None:
        options = {"every_n_train_steps": 1, "save_top_k": 1}
        result = _fit(pools, tmp_path, 2, steps=1, module={"poison": (0, (0,))}, checkpoint=options)[0]
        assert put_together(tmp_path / "last.ckpt")["global_step"] == 1
        assert any("is written, but the last step had no effect" in text for text in result["warned"])

    def test_a_link_never_points_to_nothing(self, pools: dict[int, RankPool], tmp_path: Path) -> None:
        options = {"every_n_train_steps": 1, "save_top_k": 1, "save_last": "link"}
        _fit(pools, tmp_path, 2, steps=4, module={"poison": (0, (2, 3))}, checkpoint=options)
        assert put_together(tmp_path / "last.ckpt")["global_step"] == 2

    @pytest.mark.parametrize("value", [float("nan"), 1e30])
    def test_parameters_are_looked_at(self, pools: dict[int, RankPool], tmp_path: Path, value: float) -> None:
        """Their gradient was finite: only a look at them tells."""
        options = {"every_n_train_steps": 1, "save_top_k": 1}
        module = {"spoil": (3, value)}
        result = _fit(pools, tmp_path, 2, steps=3, module=module, checkpoint=options)[0]
        assert put_together(tmp_path / "last.ckpt")["global_step"] == 2
        assert any(
            "step=3.ckpt is not written: parameter 'toy.hidden.weight' is not finite or beyond 1e+12" in text
            for text in result["warned"]
        )


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


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            {"module": {"optimizer": "sgd", "spare": (2, 3)}},
            r"ckpt_path: the checkpoint holds the state of torch\.optim\.adamw\.AdamW, this run's optimizer is"
            r" torch\.optim\.sgd\.SGD: resume with the optimizer that wrote it \(model\.optimizer\)",
        ),
        (
            {"module": {"spare": (2, 4)}},
            r"CheckpointMismatch: ckpt_path: the checkpoint is of another model: 'spare' has shape \(2, 3\) in the"
            r" checkpoint and \(2, 4\) in this run\. Resume with the model that wrote it \(model\.model\)\n",
        ),
        ({}, r"CheckpointMismatch: .*'spare' is in the checkpoint only"),
        (
            {"steps": 1, "module": {"spare": (2, 3)}},
            r"trainer\.max_steps=1: the checkpoint \S+last\.ckpt is of step 2, so nothing is left to train: .* raise",
        ),
    ],
)
def test_a_checkpoint_of_another_run_is_refused_before_a_step(
    pools: dict[int, RankPool], tmp_path: Path, changed: dict[str, Any], message: str
) -> None:
    _fit(pools, tmp_path, 1, steps=2, module={"spare": (2, 3)})
    with pytest.raises(RankError, match=message):
        _fit(pools, tmp_path, 1, ckpt_path=tmp_path / "last.ckpt", **{"steps": 4, **changed})


def test_a_run_that_was_finished_says_that_nothing_is_left(pools: dict[int, RankPool], tmp_path: Path) -> None:
    _fit(pools, tmp_path, 1, steps=2)
    [again] = _fit(pools, tmp_path, 1, steps=2, ckpt_path=tmp_path / "last.ckpt")
    assert again["seen"] == [] and any(
        "nothing is left to train; raise max_steps" in text and "arborist export --ckpt" in text
        for text in again["warned"]
    )


def test_a_file_of_another_strategy_unpickles_no_code(pools: dict[int, RankPool], tmp_path: Path) -> None:
    torch.save({"state_dict": os.system}, tmp_path / "some.ckpt")
    with pytest.raises(RankError) as caught:
        _fit(pools, tmp_path / "run", 1, ckpt_path=tmp_path / "some.ckpt")
    last = caught.value.messages[0].splitlines()[-1]
    assert re.search(r"CheckpointError: ckpt_path: \S+some\.ckpt cannot be read \(UnpicklingError: Weights only", last)


def test_a_damaged_checkpoint_ends_all_ranks(pools: dict[int, RankPool], tmp_path: Path) -> None:
    """Each rank checks a part of the files; the damage is in what rank 0 checks."""
    _fit(pools, tmp_path, 2, steps=2)
    file = sorted((tmp_path / "last.ckpt").glob("*.safetensors"))[0]
    file.write_bytes(bytes(file.stat().st_size))
    with pytest.raises(RankError) as caught:
        _fit(pools, tmp_path, 2, steps=4, ckpt_path=tmp_path / "last.ckpt")
    assert len(caught.value.messages) == 2
    for text in caught.value.messages.values():
        assert re.search(rf"CheckpointError: .*{file.name} does not hold the bytes that were written", text)


@pytest.mark.parametrize(
    "arguments", [{"timeout": None}, {"timeout": timedelta(0)}, {"bucket_cap_mb": 0}, {"max_skipped_steps": 0}]
)
def test_endless_or_empty_settings_are_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(Exception, match=next(iter(arguments))):
        DTAStrategy(**arguments)


@pytest.mark.slow  # test_end_to_end.py trains on two processes that the command line starts
def test_lightning_launches_two_processes_from_a_script(tmp_path: Path) -> None:
    environment = {key: value for key, value in os.environ.items() if key not in ("LOCAL_RANK", "RANK", "WORLD_SIZE")}
    environment |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    script = Path(__file__).parent / "ranks" / "launch_script.py"
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path)], env=environment, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stdout + done.stderr
    first, second = (torch.load(tmp_path / f"rank{rank}.pt", weights_only=True) for rank in (0, 1))
    for rank in (first, second):  # stores of the ranks and of their watch on rank 0, gloo's on both
        assert set(rank.pop("listening")) == {"127.0.0.1"}
    assert _largest_difference(first, second) == 0.0
    assert _largest_difference(first, toy.values(toy.Toy())) > 1e-3
