"""Batches in which some sequences have nothing that their teacher could be shown: these are not taught, the others as
ever; everything is a dense loop's."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from app.batch import LEFT_OUT, TEACHER_PROMPT, RolloutBatch
from modules import PolicyModule, Refresh, Regulariser, TeacherServer
from modules.advantages.teacher import TAUGHT, shown, taught
from tests.helpers.tiny_policy import (
    fit,
    naive_model,
    naive_outputs,
    naive_training,
    parameters,
    sgd,
    source,
)
from tests.modules.advantages.test_forward_kl import COEF, K, distributions
from tests.modules.advantages.test_teacher import hinted, scorer, served, teacher
from tests.modules.models.test_reference import TEACHES, assert_same

COSTS = {
    "reward": TEACHES,
    "forward": {
        "advantage": "distill",
        "objective": "reinforce",
        "regularisers": [Regulariser("forward_kl", COEF, options={"k": K})],
    },
    "both": {
        **TEACHES,
        "regularisers": [*TEACHES["regularisers"], Regulariser("kl", COEF, options={"estimator": "k2"})],
    },
}


def batch_of(seed: int, silent: int) -> RolloutBatch:
    """Every second sequence has a hint, and of these every `silent`th none after all."""
    batch = hinted(seed)
    for i in range(0, len(batch), 2 * silent):
        batch.metadata[i] = {TEACHER_PROMPT: []}
    return batch


def module(costs: str, reference: Any = "initial", **options: Any) -> PolicyModule:
    refresh = None if reference != "initial" else Refresh(every=1)
    return PolicyModule(
        source(), optimizer=sgd, reference=reference, reference_refresh=refresh, **COSTS[costs], **options
    )


@pytest.mark.parametrize("mode", ["dta", "disabled"])
@pytest.mark.parametrize("costs", list(COSTS))
def test_training_is_a_dense_loops(costs: str, mode: Any) -> None:
    """Of one batch, before the teacher has moved: it is the model that everything begins with."""
    batch = batch_of(0, silent=2)
    trained = module(costs, tree_training_mode=mode, minibatches=2)  # the second step is away from the teacher
    logged = fit(trained, [batch])
    model, start = naive_model(), naive_model()
    seen = shown(batch)
    assert seen is not None
    there, told = seen.split(seen.loss_mask), batch.split(taught(batch))
    splits = [trained.step_sequences(batch, index) for index in range(2)]

    def loss(model: Any, batch: RolloutBatch, i: int, chosen: list[int]) -> torch.Tensor:
        count = sum(int(batch.split(batch.loss_mask)[j].sum()) for j in chosen)
        logp = naive_outputs(model, batch, i)[0]
        if not bool(told[i].any()):
            return 0.0 * logp.sum()
        with torch.no_grad():
            likely = distributions(start, seen, i).topk(K, -1)
            wanted = naive_outputs(start, seen, i)[0][there[i]]
        if costs != "forward":
            sampled = batch.split(batch.behavior_logprobs)[i][told[i]]
            each = -(wanted - sampled) * logp[told[i]]
            return (each + (COEF * 0.5 * (logp[told[i]] - wanted) ** 2 if costs == "both" else 0.0)).sum() / count
        values, ids = likely.values[there[i][1:]], likely.indices[there[i][1:]]
        chosen_logp = distributions(model, batch, i)[told[i][1:]].gather(-1, ids)
        return COEF * (values.exp() * (values - chosen_logp)).sum() / count

    naive_training(model, [batch], lambda *_: splits, loss)
    assert_same(trained.policy, parameters(model), atol=1e-6)
    share = float(taught(batch).sum() / batch.loss_mask.sum())
    assert 0 < share < 1 and logged[0]["taught"] == pytest.approx(share)
    assert torch.equal(batch.columns[TAUGHT].bool(), taught(batch))


def test_a_batch_in_which_nobody_is_taught_moves_nothing() -> None:
    batch = hinted(0)
    batch.metadata[:] = [{TEACHER_PROMPT: []} for _ in batch.metadata]
    for costs in COSTS:
        trained = module(costs)
        logged = fit(trained, [batch])
        assert_same(trained.policy, parameters(naive_model()), atol=0.0)
        assert logged[0]["taught"] == 0.0 and logged[0].get("penalty/kl", 0.0) == 0.0
        assert "teacher_mass" not in logged[0], "of nobody"
    fit(module("forward"), [batch], precision="64-true")


def test_mass_is_of_those_who_are_taught() -> None:
    """What has no teacher would make its tokens look as if enough of it were compared with."""
    every, some = hinted(0), batch_of(0, silent=2)
    mass = [fit(module("forward"), [batch])[0]["teacher_mass"] for batch in (every, some)]
    assert max(mass) < 0.99 and mass[0] == pytest.approx(mass[1], abs=0.05)


def test_episodes_that_are_left_out_have_no_part_in_the_share() -> None:
    """No step trains their tokens."""
    batch = batch_of(0, silent=2)
    silent = [i for i, about in enumerate(batch.metadata) if about.get(TEACHER_PROMPT) == []]
    out = int(batch.episode_ids[silent[0]])
    for episode, about in zip(batch.episode_ids.tolist(), batch.metadata, strict=True):
        about |= {LEFT_OUT: "truncated"} if episode == out else {}
    own = batch.flat_index((batch.episode_ids != out).nonzero().flatten())
    share = float(taught(batch)[own].sum() / batch.loss_mask[own].sum())
    assert 0 < share < 1 and fit(module("reward"), [batch])[0]["taught"] == pytest.approx(share)


def test_the_task_counts_all_the_same() -> None:
    """An episode that is not taught has its share of the task's reward."""
    options = {**TEACHES, "advantage_options": {"task": 0.5}}
    trained = PolicyModule(source(), optimizer=sgd, reference="initial", reference_refresh=Refresh(every=1), **options)
    batch = batch_of(0, silent=1)
    fit(trained, [batch])
    silent = batch.loss_mask & ~taught(batch)
    assert bool(silent.any()) and bool(batch.columns["advantages"][silent].any())
    assert not batch.columns["token_rewards"][silent].any()


def test_a_server_is_not_asked_about_them() -> None:
    batch = batch_of(0, silent=2)
    batch.temperatures = torch.ones_like(batch.temperatures)
    with served(scorer(teacher())) as (url, asked):
        fit(module("reward", TeacherServer(url, "there")), [batch])
    assert len(asked) == sum(bool(mask.any()) for mask in batch.split(taught(batch))) < len(batch)
