"""What is told, and refused, where a run goes on with a checkpoint and its settings were changed."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LinearLR, OneCycleLR

from app.strategies import DTAStrategy
from modules import PolicyModule
from modules.refusals.going_on import check_states, tell_changes
from tests.helpers.tiny_policy import Batches, make_batch, sgd, source, trainer


class Halves(LambdaLR):
    def __init__(self, optimizer: Optimizer, every: int = 1) -> None:
        super().__init__(optimizer, lambda step: 0.5 ** (step // every))


def cosine(optimizer: Optimizer, warmup: int) -> LambdaLR:
    return Halves(optimizer, warmup)


def told(call: Any, *given: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call(*given)
    return [str(one.message) for one in caught]


@pytest.mark.parametrize(
    ("path", "option", "applies"),
    [
        ("torch.optim.lr_scheduler.LinearLR", "total_iters", False),
        ("torch.optim.lr_scheduler.LambdaLR", "lr_lambda", True),
        (f"{__name__}.Halves", "every", True),
        (f"{__name__}.cosine", "warmup", True),
    ],
)
def test_what_a_changed_schedule_does_is_told(path: str, option: str, applies: bool) -> None:
    """What its state holds goes on: not plain functions, and what they were made of."""
    then, now = ({"lr_scheduler": {"class_path": path, "init_args": {option: value}}} for value in (3, 7))
    (line,) = told(check_states, {"hyper_parameters": then, "optimizer_states": []}, now, PolicyModule)
    assert line.startswith(f"model.lr_scheduler: {option} was 3 and is 7")
    assert ("applies as far as" in line) is applies and ("has no effect" in line) is not applies
    assert told(check_states, {"hyper_parameters": now, "optimizer_states": []}, now, PolicyModule) == []


SERVER = {"class_path": "modules.TeacherServer", "init_args": {"url": "one"}}
NO_EFFECT = "which has no effect: the reference's weights are in the checkpoint"


@pytest.mark.parametrize(
    ("then", "now", "said"),
    [
        ("initial", {"path": "a"}, f"model.reference was initial and is a, {NO_EFFECT}"),
        ({"path": "m/curl"}, {"init_args": {"path": "a"}}, f"model.reference was m/curl and is a, {NO_EFFECT}"),
        ({"path": "a"}, "initial", f"model.reference was a and is initial, {NO_EFFECT}"),
        ({"path": "a"}, {"path": "a", "dtype": "bfloat16"}, ""),
        ({"path": "a", "dtype": None}, {"path": "a", "dtype": "bfloat16"}, "model.reference.dtype was None and is bf"),
        (SERVER, {**SERVER, "init_args": {"url": "two"}}, "model.reference.init_args.url was one and is two"),
        ("base", SERVER, "model.reference was base and is {'class_path': "),
        ({"path": "a"}, {"path": "a"}, ""),
        (SERVER, {"path": "a"}, "and is {'path': 'a'}"),
    ],
)
def test_another_reference_is_told(then: Any, now: Any, said: str) -> None:
    """One that the checkpoint has a copy of goes on; a server is asked instead of the old one."""
    lines = told(tell_changes, {"hyper_parameters": {"reference": then}}, {"reference": now}, {})
    assert len(lines) == bool(said) and all(said in line for line in lines)


def changes(then: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """What is told of a module's hyper-parameters that were these and are those."""
    lines = told(tell_changes, {"hyper_parameters": then}, now, {})
    return lines[0].partition("other settings: ")[2].split("; ") if lines else []


def test_an_option_that_is_new_or_gone_is_told_where_the_user_wrote_it() -> None:
    def source(**adapter: Any) -> dict[str, Any]:
        return {"model": {"path": "m", "adapter": adapter}}

    assert changes(source(r=4), source(r=4, lora_alpha=64)) == ["model.model.adapter.lora_alpha was not set and is 64"]
    assert changes(source(r=4, lora_alpha=64), source(r=8)) == [
        "model.model.adapter.r was 4 and is 8",
        "model.model.adapter.lora_alpha was 64 and is not set",
    ]
    nested = source(r=4, rank_pattern={}), source(r=4, rank_pattern={"q_proj": 8})
    assert changes(*nested) == ["model.model.adapter.rank_pattern.q_proj was not set and is 8"]
    options = [{"objective_options": one} for one in ({"clip_low": 0.1}, {"clip_low": 0.1, "clip_high": 0.3})]
    assert changes(*options) == ["model.objective_options.clip_high was not set and is 0.3"]
    assert changes(source(r=4), source(r=4)) == []


def test_an_argument_that_another_version_has_is_no_change() -> None:
    then = {"model": {"path": "m", "adapter": None, "dropped": 1}, "removed": 1}
    now = {"model": {"path": "m", "adapter": None, "freeze": []}, "aggregation": "token_mean"}
    assert changes(then, now) == changes(now, then) == []


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Of a run of two steps, under a schedule of three."""
    directory = tmp_path_factory.mktemp("cycle")
    trained = run(directory, OneCycleLR, max_steps=2)
    assert trained.global_step == 2
    yield directory / "last.ckpt"


def run(directory: Path, kind: Any, max_steps: int, strategy: Any = "auto", **options: Any) -> L.Trainer:
    made = {"max_lr": 0.1, "total_steps": 3, "cycle_momentum": False} if kind is OneCycleLR else {}
    schedule = None if kind is None else lambda optimizer: kind(optimizer, **made)
    module = PolicyModule(source(), optimizer=sgd, lr_scheduler=schedule)
    saves = ModelCheckpoint(directory, save_last=True, save_top_k=0, every_n_train_steps=1)
    given = {"max_steps": max_steps, "max_epochs": -1, "enable_checkpointing": True, "default_root_dir": directory}
    given["strategy"] = strategy
    fits = trainer(saves, **given)
    fits.fit(module, Batches([make_batch(k) for k in range(6)]), weights_only=False, **options)
    return fits


def test_a_run_beyond_its_schedule_is_refused_before_a_step(checkpoint: Path, tmp_path: Path) -> None:
    assert run(tmp_path / "on", OneCycleLR, 3, ckpt_path=str(checkpoint)).global_step == 3
    beyond = "total_steps: 3, and the run is of 4 steps, of which it has done 2: .* set trainer.max_steps to 3 at most"
    with pytest.raises(ValueError, match=beyond):
        run(tmp_path / "beyond", OneCycleLR, 4, ckpt_path=str(checkpoint))
    with pytest.raises(ValueError, match=r"done 0: .* set trainer.max_steps to 3 at most"):
        run(tmp_path / "fresh", OneCycleLR, 4)
    assert run(tmp_path / "other", LinearLR, 4).global_step == 4


def test_a_schedule_begins_on_the_way_where_its_start_is_kept(tmp_path: Path) -> None:
    """That is under `DTAStrategy`; torch's own loading would begin it anywhere."""
    for strategy in ("auto", DTAStrategy):
        directory = tmp_path / str(strategy)
        made = strategy if strategy == "auto" else DTAStrategy()
        run(directory, None, 1, made)
        goes_on = {"ckpt_path": str(directory / "last.ckpt")}
        if strategy == "auto":
            with pytest.raises(ValueError, match=r"the checkpoint has none, and under trainer\.strategy SingleDevice"):
                run(directory / "on", LinearLR, 2, **goes_on)
        else:
            fits = run(directory / "on", LinearLR, 3, DTAStrategy(), **goes_on)
            assert fits.global_step == 3
            assert fits.optimizers[0].param_groups[0]["lr"] < sgd([torch.zeros(1)]).defaults["lr"]
