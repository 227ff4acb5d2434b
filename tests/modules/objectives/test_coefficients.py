"""Coefficients of regularisers that change: their arithmetic, and that training with them equals a plain dense loop."""

from __future__ import annotations

import copy
import dataclasses
import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

from app.batch import LEFT_OUT, RolloutBatch
from modules import PolicyModule, Regulariser
from modules.ranks import split_minibatches
from modules.regularisers import Coef, Coefs, CoefState, LinearCoef, ProportionalCoef, SteppedCoef
from tests.helpers.tiny_policy import (
    Batches,
    fit,
    make_batch,
    naive_grpo,
    naive_model,
    naive_outputs,
    parameters,
    sgd,
    source,
    trainer,
)


def seen(rule: Coef, measured: list[float | None], bonus: bool = False) -> list[float]:
    """What is applied before each step and after the last."""
    coefs = Coefs({"x": rule}, ["x"] if bonus else [])
    found = [coefs["x"]]
    for one in measured:
        coefs.step({"x": one})
        found.append(coefs["x"])
    return found


def test_linear() -> None:
    assert seen(LinearCoef(0.4, 0.0, 4), [0.1, None, 0.1, 9.0, 0.1]) == pytest.approx([0.4, 0.3, 0.2, 0.1, 0.0, 0.0])


def test_proportional_moves_by_a_share_of_how_far_off_it_is() -> None:
    rule = ProportionalCoef(start=1.0, target=0.1, gain=0.5)
    assert seen(rule, [0.11, 5.0, 0.0, 0.1]) == pytest.approx(
        [1.0, 1.05, 1.05 * 1.1, 1.05 * 1.1 * 0.9, 1.05 * 1.1 * 0.9]
    )
    assert seen(rule, [0.11], bonus=True) == pytest.approx([1.0, 0.95])
    assert seen(rule, [None, math.nan, 0.11]) == pytest.approx([1.0, 1.0, 1.0, 1.05])
    assert seen(rule, [0.11, None, math.nan, 0.09]) == pytest.approx([1.0, 1.05, 1.05, 1.05, 1.05 * 0.95])


def test_stepped_is_applied_after_steps_that_missed_the_target() -> None:
    rule = SteppedCoef(target=1.0, delta=0.1, highest=0.2)
    entropies = [0.5, 1.0, 0.9, 1.1, 0.9, 2.0, 2.0, 2.0, 0.1]
    assert seen(rule, list(entropies), bonus=True) == pytest.approx([0, 0.1, 0.2, 0.2, 0, 0.2, 0, 0, 0, 0.1])
    assert seen(rule, [1.5, 0.5]) == pytest.approx([0, 0.1, 0])
    assert seen(rule, [0.5, None, 0.5, 2.0, None, 0.5], bonus=True) == pytest.approx([0, 0.1, 0.1, 0.2, 0, 0, 0.2])


def test_steps_without_sequences_measure_nothing() -> None:
    batch = make_batch()
    for group, about in zip(batch.group_ids.tolist(), batch.metadata, strict=True):
        about.update({LEFT_OUT: "by hand"} if group == 0 else {})
    options: dict[str, Any] = {"minibatches": 3, "reference": "initial"}
    rules = [Regulariser("entropy", SteppedCoef(2.9, delta=0.1)), Regulariser("kl", LinearCoef(0.4, 0.0, 4))]
    steps = fit(PolicyModule(source(), optimizer=sgd, regularisers=rules, **options), [batch])
    idle = next(k for k, step in enumerate(steps) if "entropy" not in step)
    measured = [step["coef/entropy"] for k, step in enumerate(steps) if k != idle]
    assert idle in (0, 1) and measured == pytest.approx([0.0, 0.1])  # one that was measured, and no more
    assert [step["coef/kl"] for step in steps] == pytest.approx([0.4, 0.3, 0.2])  # as schedules of learning rates


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: LinearCoef(0.1, 0.1, 5), "start and end are both 0.1"),
        (lambda: LinearCoef(-0.1, 0.1, 5), "LinearCoef: start: -0.1, must be finite and at least 0"),
        (lambda: LinearCoef(0.1, 0.0, 0), "LinearCoef: steps"),
        (lambda: ProportionalCoef(0.0, 0.1), "ProportionalCoef: start: 0.0, must be above 0"),
        (lambda: ProportionalCoef(0.1, math.nan), "ProportionalCoef: target"),
        (lambda: SteppedCoef(0.1, delta=0.0), "SteppedCoef: delta"),
        (lambda: SteppedCoef(0.1, start=2.0), "start 2.0 must be within lowest 0.0 and highest 1.0"),
        (lambda: SteppedCoef(math.inf), "SteppedCoef: target"),
    ],
)
def test_what_rules_refuse(make: Callable[[], Coef], message: str) -> None:
    with pytest.raises(ValueError, match=f"regularisers: coef: .*{message}"):
        make()


class Gives(Coef):
    start = 0.1

    def __init__(self, value: Any) -> None:
        self._value = value

    def step(self, state: CoefState, bonus: bool) -> Any:
        return self._value


@pytest.mark.parametrize("value", [math.nan, math.inf, -0.1, None, "much", torch.ones(2)])
def test_a_rule_of_ones_own_that_gives_no_number_is_named(value: Any) -> None:
    with pytest.raises(ValueError, match=r"regularisers\.x: coef: Gives gives .* after 1 steps, must be finite"):
        seen(Gives(value), [0.1])


@pytest.mark.parametrize("start", [None, math.nan, "much"])
def test_so_is_one_without_a_start(start: Any) -> None:
    class Without(Halving):
        def __init__(self) -> None:
            if start is not None:
                self.start = start

    with pytest.raises(ValueError, match=r"regularisers\.x: coef: Without gives .* after 0 steps.*mend its start"):
        Coefs({"x": Without()})


@pytest.mark.parametrize("value", [np.float64(0.25), np.array(0.25), torch.tensor(0.25), 0.25])
def test_checkpoints_hold_plain_numbers(value: Any) -> None:
    coefs = Coefs({"x": Gives(value)})
    coefs.step({"x": 0.1})
    assert coefs["x"] == 0.25 and type(coefs.state_dict()["x"]["value"]) is float


def batches(count: int = 3) -> list[RolloutBatch]:
    return [make_batch(k, version=k) for k in range(count)]


ENTROPY, KL, IN_REWARD = SteppedCoef(2.375, delta=0.05), LinearCoef(0.3, 0.1, 4), ProportionalCoef(0.4, 0.2, gain=1.0)
REGULARISERS = [
    Regulariser("entropy", ENTROPY),
    Regulariser("kl", KL),
    Regulariser("kl", IN_REWARD, "reward", {"estimator": "k2"}),
]


def dense(steps: int = 6) -> tuple[dict[str, Tensor], list[dict[str, float]]]:
    """Two minibatches a batch, token by token; the coefficients by arithmetic of their own."""
    model = naive_model()
    frozen, optimizer = copy.deepcopy(model), sgd(model.parameters())
    entropy_coef, in_reward, applied, logged = 0.0, 0.4, 0.0, list[dict[str, float]]()
    for number, batch in enumerate(batches(steps // 2)):
        masks = batch.split(batch.loss_mask)
        with torch.no_grad():
            anchors = [naive_outputs(frozen, batch, i)[0] for i in range(len(batch))]
        apart = [(b - a) ** 2 / 2 * m for b, a, m in zip(batch.split(batch.behavior_logprobs), anchors, masks)]
        cost = {int(e): 0.0 for e in batch.episode_ids}
        for episode, one in zip(batch.episode_ids.tolist(), apart):
            cost[episode] += float(one.sum())
        earned = torch.tensor([float(r) - in_reward * cost[int(e)] for r, e in zip(batch.rewards, batch.episode_ids)])
        advantages = naive_grpo(batch.with_rewards(earned))
        for part, chosen in enumerate(split_minibatches(batch, 2, (0, number, 0))):
            step = 2 * number + part
            kl_coef = 0.3 + (0.1 - 0.3) * min(1.0, step / 4)
            logged.append({"coef/entropy": applied, "coef/kl": kl_coef})
            logged[-1] |= {} if part else {"coef/penalty/kl": in_reward}
            optimizer.zero_grad()
            count, entropies, total = sum(int(masks[i].sum()) for i in chosen), 0.0, torch.zeros(())
            for i in chosen:
                logp, entropy = naive_outputs(model, batch, i)
                before = batch.split(batch.behavior_logprobs)[i]
                for t in masks[i].nonzero()[:, 0].tolist():
                    ratio, away = (logp[t] - before[t]).exp(), anchors[i][t] - logp[t]
                    loss = -min(ratio * advantages[i], ratio.clamp(0.8, 1.2) * advantages[i])
                    total = total + loss + kl_coef * (away.exp() - 1 - away) - applied * entropy[t]
                    entropies += float(entropy[t].detach())
            (total / count).backward()
            optimizer.step()
            missed = entropies / count <= 2.375
            entropy_coef = max(0.0, min(1.0, entropy_coef + (0.05 if missed else -0.05)))
            applied = entropy_coef if missed else 0.0
            if part == 0:
                off = sum(float(one.sum()) for one in apart) / int(batch.loss_mask.sum()) / 0.2 - 1
                in_reward *= 1 + max(-0.2, min(0.2, off))
    return parameters(model), logged


def module() -> PolicyModule:
    return PolicyModule(source(), optimizer=sgd, minibatches=2, regularisers=REGULARISERS, reference="initial")


def assert_equal(got: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for name in expected:
        torch.testing.assert_close(got[name], expected[name], atol=2e-6, rtol=0)


def test_training_equals_a_plain_dense_loop() -> None:
    made = module()
    steps = fit(made, batches())
    expected, logged = dense()
    for step, one in zip(steps, logged, strict=True):
        assert {name: step[name] for name in step if name.startswith("coef/")} == pytest.approx(one, rel=1e-5)
    assert len({step["coef/entropy"] for step in steps}) > 2  # it was applied, and was not
    assert_equal(parameters(made.policy), expected)


def trained(directory: Path, made: PolicyModule) -> None:
    """With a checkpoint after every step."""
    every = ModelCheckpoint(directory, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    torch.manual_seed(0)
    trainer(every, enable_checkpointing=True).fit(made, Batches(batches()))


def test_a_run_goes_on_with_them_in_the_middle_of_a_batch(tmp_path: Path) -> None:
    trained(tmp_path, module())
    expected = dense()[0]
    for step in (1, 2, 3):
        made = module()
        trainer().fit(made, Batches(batches()), ckpt_path=tmp_path / f"step={step}.ckpt", weights_only=True)
        assert_equal(parameters(made.policy), expected)


@pytest.mark.parametrize("kept", [3, 2, 0])
def test_costs_in_the_reward_are_measured_on_what_is_trained(kept: int) -> None:
    """Of `kept` groups; the others are left out, and count in the reward of their group alone."""
    batch, rule = make_batch(), ProportionalCoef(0.5, 0.1, gain=1.0)
    for group, about in zip(batch.group_ids.tolist(), batch.metadata, strict=True):
        about.update({LEFT_OUT: "by hand"} if group >= kept else {})
    cost = Regulariser("overlong", rule, "reward", {"max_tokens": 4, "buffer_tokens": 2})
    made = PolicyModule(source(), optimizer=sgd, regularisers=[cost])
    fit(made, [batch])
    spent, tokens, masks = 0.0, 0, batch.split(batch.loss_mask)
    for episode in range(3 * kept):
        generated = sum(int(mask.sum()) for e, mask in zip(batch.episode_ids.tolist(), masks) if e == episode)
        spent, tokens = spent + min(1.0, max(0.0, (generated - 2) / 2)), tokens + generated
    state = made.algorithm.coefs.state_dict()["penalty/overlong"]
    assert state["measured"] == (pytest.approx(spent / tokens) if kept else None)
    assert state["steps"] == 1 and (state["value"] == 0.5) == (not kept)


def test_other_options_on_going_on_are_told(tmp_path: Path) -> None:
    trained(tmp_path, module())
    changed = [dataclasses.replace(REGULARISERS[0], coef=SteppedCoef(2.375, delta=0.01)), *REGULARISERS[1:2]]
    made = PolicyModule(source(), optimizer=sgd, minibatches=2, regularisers=changed, reference="initial")
    with pytest.warns(
        UserWarning, match=r"regularisers\.entropy\.coef was SteppedCoef\(.*0\.05.* and is .*0\.01.*from"
    ):
        trainer().fit(made, Batches(batches()), ckpt_path=tmp_path / "step=2.ckpt", weights_only=True)


class Halving(Coef):
    """As docs/extending.md has it: no dataclass, and no repr of its own."""

    def __init__(self, start: float) -> None:
        self.start, self._calls = start, 0

    def step(self, state: CoefState, bonus: bool) -> float:
        self._calls += 1  # what begins with _ is none of its options
        return state.value / 2


def test_a_rule_of_ones_own_goes_on() -> None:
    first, second = (Coefs({"x": Halving(0.8)}) for _ in range(2))
    first.step({"x": 1.0})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        second.load_state_dict(first.state_dict())
    assert second["x"] == pytest.approx(0.4)
    assert second.state_dict() == first.state_dict()
    changed = Coefs({"x": Halving(0.5)})
    with pytest.warns(
        UserWarning, match=r"x\.coef was Halving\(start=0\.8\) and is Halving\(start=0\.5\), which goes on"
    ):
        changed.load_state_dict(first.state_dict())


@pytest.mark.parametrize(("bounds", "expected"), [((0.0, 0.2), 0.2), ((0.7, 0.9), 0.7), ((0.0, 1.0), 0.5)])
def test_bounds_hold_from_the_first_step_of_going_on(bounds: tuple[float, float], expected: float) -> None:
    first = Coefs({"x": SteppedCoef(1.0, start=0.4, delta=0.1)})
    first.step({"x": 2.0})
    assert first["x"] == pytest.approx(0.5)
    lowest, highest = bounds
    second = Coefs({"x": SteppedCoef(1.0, start=lowest, delta=0.1, lowest=lowest, highest=highest)})
    with pytest.warns(UserWarning, match=rf"which goes on from {expected:g};"):
        second.load_state_dict(first.state_dict())
    assert second["x"] == pytest.approx(expected)


def test_another_rule_begins_which_is_told() -> None:
    first, other = Coefs({"x": Halving(0.8)}), Coefs({"x": LinearCoef(0.3, 0.1, 4)})
    first.step({"x": 1.0})
    with pytest.warns(UserWarning, match=r"x\.coef was Halving\(.* and is LinearCoef\(.*, which begins at 0\.3"):
        other.load_state_dict(first.state_dict())
    assert other["x"] == pytest.approx(0.3)


def test_early_checkpoints_begin_at_the_start(tmp_path: Path) -> None:
    plain: dict[str, Any] = {"optimizer": sgd, "minibatches": 2, "reference": "initial"}
    trained(tmp_path, PolicyModule(source(), regularisers=[Regulariser("kl", 0.1)], **plain))
    contents = torch.load(tmp_path / "step=2.ckpt", weights_only=True)
    del contents["coefs"]
    torch.save(contents, tmp_path / "early.ckpt")
    made = PolicyModule(source(), regularisers=[Regulariser("kl", LinearCoef(0.3, 0.0, 6))], **plain)
    trainer().fit(made, Batches(batches()), ckpt_path=tmp_path / "early.ckpt", weights_only=True)
    assert made.algorithm.coefs["kl"] == pytest.approx(0.1)  # after four steps of its own
