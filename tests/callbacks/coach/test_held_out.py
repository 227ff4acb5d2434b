"""Held-out rewards that fall: simulated runs of noise alone, runs that get worse, and what a `fit` hands over."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from lightning.pytorch.callbacks import ModelCheckpoint

from app.batch import EvalHandle
from callbacks import Coach, ValidateEnds
from callbacks.coach.held_out import HeldOut
from tests.helpers.tiny_run import TinyData, TinyModule, make_batch, trainer

Floats = npt.NDArray[np.float64]
VALIDATIONS = 20


def add(held_out: HeldOut, step: int, rewards: Floats) -> None:
    held_out.add(step, {("held-out", str(i)): reward for i, reward in enumerate(rewards.tolist())})


def alike(prompts: int, accuracy: float, random: np.random.Generator) -> Floats:
    """[validations, prompts] of a policy that solves every prompt as often, sampled."""
    return (random.random((VALIDATIONS, prompts)) < accuracy).astype(float)


def uneven(prompts: int, accuracy: float, random: np.random.Generator) -> Floats:
    """Most prompts are nearly always or hardly ever solved."""
    return (random.random((VALIDATIONS, prompts)) < random.beta(accuracy, 1 - accuracy, prompts)).astype(float)


def greedy(prompts: int, accuracy: float, random: np.random.Generator) -> Floats:
    """The same replies, but for one prompt in ten, which training turns over."""
    rows = [random.random(prompts) < accuracy]
    for _ in range(VALIDATIONS - 1):
        anew = random.random(prompts) < 0.1
        rows.append(np.where(anew, random.random(prompts) < accuracy, rows[-1]))
    return np.array(rows, float)


def graded(prompts: int, accuracy: float, random: np.random.Generator) -> Floats:
    """Means of four episodes with rewards of any degree."""
    return random.beta(accuracy, 1 - accuracy, (4, VALIDATIONS, prompts)).mean(0)


def test_noise_alone_is_seldom_taken_for_a_fall() -> None:
    random, alarms, runs = np.random.default_rng(5), 0, 0
    for prompts, times in ((64, 8), (1000, 1)):
        for accuracy in (0.05, 0.3, 0.6, 0.8, 0.95):
            for kind in (alike, uneven, greedy, graded):
                for _ in range(times):
                    held_out, alarm = HeldOut(), False
                    for step, rewards in enumerate(kind(prompts, accuracy, random)):
                        add(held_out, step, rewards)
                        alarm |= held_out.fall is not None
                    alarms, runs = alarms + alarm, runs + 1
    assert alarms <= 0.01 * runs


@pytest.mark.parametrize("before", [1, 2, 18])
@pytest.mark.parametrize("kind", [alike, uneven, greedy, graded])
def test_a_fall_is_found_within_two_validations(kind: Any, before: int) -> None:
    random, found = np.random.default_rng(5), 0
    for _ in range(20):
        held_out = HeldOut()
        rows = [*kind(255, 0.8, random)[:before], *kind(255, 0.5, random)[:2]]
        if kind is uneven or kind is greedy:  # the same prompts, of which some are lost
            lost = random.random(255) < 0.375
            rows[-2:] = [np.where(lost, 0.0, row) for row in kind(255, 0.8, random)[:2]]
        for step, rewards in enumerate(rows):
            add(held_out, step, rewards)
        found += held_out.fall is not None
    assert found >= 19


def test_a_fall_is_told_in_numbers_until_it_is_over() -> None:
    held_out, high, low = HeldOut(), np.ones(40), np.repeat([0.0, 1.0], 20)
    for step, rewards in ((5, low), (10, high), (15, low), (20, high), (25, low)):
        add(held_out, step, rewards)
        assert held_out.fall is None  # it came back
    add(held_out, 30, low)
    fall = held_out.fall
    assert fall is not None and (fall.step, fall.before, fall.now) == (10, 1.0, 0.5)
    assert (fall.prompts, fall.worse, fall.better) == (40, 20, 0) and fall.p == pytest.approx(2**-20, rel=0.01)
    add(held_out, 35, high)
    assert held_out.fall is None


def test_prompts_are_compared_with_themselves() -> None:
    """Harder prompts, or fewer that were answered, are no worse model."""
    held_out = HeldOut()
    for step, names in ((0, range(0, 60)), (1, range(30, 90)), (2, range(30, 90))):
        held_out.add(step, {("held-out", str(i)): float(i < 60) for i in names})
    assert held_out.fall is None
    for step, names in ((3, range(100, 160)), (4, range(100, 160))):
        held_out.add(step, {("held-out", str(i)): 0.0 for i in names})
    assert held_out.fall is None


class Judged(TinyModule):
    def validation_step(self, handle: EvalHandle, batch_idx: int) -> None:
        assert handle.batch is not None
        self.log("val/accuracy", handle.batch.rewards.mean(), batch_size=1)


class Falls(TinyData):
    """Forty held-out prompts in two sets; `rewards` by steps done."""

    def __init__(self, rewards: dict[int, float], batches: int) -> None:
        super().__init__(batches)
        self.rewards = rewards

    def val_dataloader(self) -> Any:
        return self

    def __len__(self) -> int:
        return 2

    def __iter__(self) -> Any:
        assert self.trainer is not None
        rewards = [self.rewards[self.trainer.global_step]] * 20
        yield from (EvalHandle(make_batch(rewards), name, f"{name}/") for name in ("a", "b"))


def coached(run: Path, rewards: dict[int, float], *more: Any) -> list[dict[str, Any]]:
    """Lines of coach.jsonl of a `fit` that is validated before it, every second step, and after it."""
    data = Falls(rewards, max(rewards))
    fit = trainer(run, ValidateEnds(), Coach(window=4), *more, val_check_interval=2, enable_checkpointing=bool(more))
    fit.fit(Judged(), datamodule=data)
    file = run / "coach.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def test_a_fit_says_so_from_its_validations(tmp_path: Path) -> None:
    """The first of them, before the first step, and the last of them, after the last one, count."""
    assert coached(tmp_path / "sound", {0: 0.5, 2: 1.0, 4: 0.5, 5: 1.0}) == []
    (line,) = coached(tmp_path / "falls", {0: 1.0, 2: 0.75, 4: 0.5, 5: 0.25})
    (advice,) = line["advice"]
    assert line["step"] == 4 and advice["rule"] == "held_out_falls"
    assert advice["finding"].startswith("held-out accuracy fell from 1 after step 0 to 0.5, 40 of 40 prompts worse")
    assert {name: advice["evidence"][name] for name in ("val/accuracy", "val/accuracy/best", "prompts")} == {
        "val/accuracy": 0.5,
        "val/accuracy/best": 1.0,
        "prompts": 40,
    }
    (line,) = coached(tmp_path / "ends", {0: 0.5, 2: 1.0, 4: 0.5, 5: 0.25})
    assert line["step"] == 5 and line["advice"][0]["evidence"]["val/accuracy"] == 0.25


def test_it_names_the_checkpoint_with_the_best(tmp_path: Path) -> None:
    best = ModelCheckpoint(tmp_path / "kept", "{step}", monitor="val/accuracy", mode="max")
    (line,) = coached(tmp_path / "run", {0: 0.5, 2: 1.0, 4: 0.5, 5: 0.25}, best)
    assert f"go on from {tmp_path / 'kept' / 'step=2.ckpt'} (val/accuracy 1)" in line["advice"][0]["remedy"]
    assert (tmp_path / "kept" / "step=2.ckpt").exists()
