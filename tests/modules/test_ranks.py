"""Two ranks train the same parameters as one and log the same numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from modules import ActorCriticModule, PolicyModule, Refresh, Regulariser
from tests.distributed.ranks import RankError, RankPool
from tests.modules import jobs
from tests.modules.tiny import Batches, fit, make_batch, parameters, sgd, source, trainer

CASES: dict[str, dict[str, Any]] = {
    "one step a batch": {"kind": "groups"},
    "2 minibatches x 2 epochs": {"kind": "groups", "minibatches": 2, "epochs": 2},
    "kl, entropy, sequence mean": {
        "kind": "groups",
        "minibatches": 2,
        "regularisers": [Regulariser("kl", 0.1), Regulariser("entropy", 0.01)],
        "reference": "initial",
        "aggregation": "sequence_mean",
    },
    "disabled": {"kind": "groups", "tree_training_mode": "disabled"},
    "dpo": {"kind": "pairs", "objective": "dpo", "reference": source(), "minibatches": 2},
    "m2po, reference that follows": {
        "kind": "two",
        "objective": "m2po",
        "regularisers": [Regulariser("kl", 0.1)],
        "reference": "initial",
        "reference_refresh": Refresh(1, 0.5),
        "minibatches": 2,
    },
    "a critic of its own, warm-up": {
        "kind": "two",
        "module": "critic",
        "critic": "initial",
        "critic_warmup": 1,
        "value_clip": 0.1,
        "minibatches": 2,
    },
    "correction, sequences fewer than ranks": {
        "kind": "one",
        "minibatches": 3,
        "correction": "truncated",
        "objective": "gspo",
    },
    "fewer sequences than ranks, empty minibatches": {"kind": "one", "minibatches": 3},
    "sft": {"kind": "groups", "module": "sft"},
}


STEPS = {"kind": "two", "minibatches": 2, "epochs": 2}
ALGORITHMS: dict[str, dict[str, Any]] = {
    "grpo": {},
    "gspo": {"objective": "gspo", "objective_options": {"clip_low": 0.2, "clip_high": 0.2}},
    "ppo with a critic": {"module": "critic"},
}


@pytest.mark.parametrize("name", ALGORITHMS)
def test_execution_modes_on_one_and_two_processes_give_the_same_parameters(name: str, two_ranks: RankPool) -> None:
    """Eight SGD steps: two batches, 2 minibatches x 2 epochs of each."""
    options = {**STEPS, **ALGORITHMS[name]}
    expected, steps, _ = jobs.train(devices=1, tree_training_mode="dta", **options)
    assert len(steps) == 8
    found = {
        "one process, " + mode: jobs.train(1, tree_training_mode=mode, **options) for mode in ("sparse", "disabled")
    }
    for mode in ("dta", "sparse", "disabled"):
        results = two_ranks.run(jobs.train, devices=2, tree_training_mode=mode, **options)
        found |= {f"rank {rank} of 2, {mode}": result for rank, result in enumerate(results)}
    for where, (got, _, _) in found.items():
        for parameter, value in expected.items():
            difference = float((got[parameter] - value).abs().max())
            assert difference <= 1e-6, f"{where}: {parameter} differs by {difference}"


@pytest.mark.parametrize("case", CASES)
def test_two_ranks_equal_one(case: str, two_ranks: RankPool) -> None:
    options = CASES[case]
    expected, steps, validation = jobs.train(devices=1, **options)
    results = two_ranks.run(jobs.train, devices=2, **options)
    for got, got_steps, got_validation in results:
        assert got.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(got[name], value, atol=1e-6, rtol=0)
        assert len(got_steps) == len(steps)
        for mine, theirs in zip(got_steps, steps):
            assert mine.keys() == theirs.keys()
            same = {name: value for name, value in theirs.items() if name != "tokens/s"}
            assert {name: mine[name] for name in same} == pytest.approx(same, rel=1e-4, abs=1e-6)
        assert got_validation == pytest.approx(validation, rel=1e-5) and validation


def test_dta_strategy_on_one_process_equals_a_plain_trainer() -> None:
    with_strategy, steps, _ = jobs.train(devices=1, kind="groups", minibatches=2)
    module = PolicyModule(source(), optimizer=sgd, minibatches=2)
    plain_steps = fit(module, jobs.data("groups"))
    for name, value in parameters(module).items():
        torch.testing.assert_close(with_strategy[name], value, atol=1e-7, rtol=0)
    for mine, theirs in zip(steps, plain_steps):
        assert {k: v for k, v in mine.items() if k != "tokens/s"} == pytest.approx(
            {k: v for k, v in theirs.items() if k != "tokens/s"}, rel=1e-5, abs=1e-7
        )


def test_another_strategy_on_two_processes_is_refused(two_ranks: RankPool) -> None:
    with pytest.raises(RankError, match=r"trainer.strategy: DDPStrategy on 2 processes.*app.strategies.DTAStrategy"):
        two_ranks.run(jobs.plain_ddp)


def test_all_ranks_refuse_a_batch_together(two_ranks: RankPool) -> None:
    with pytest.raises(RankError) as error:
        two_ranks.run(jobs.broken)
    assert len(error.value.messages) == 2
    assert all("no token of the batch is trained" in message for message in error.value.messages.values())


@pytest.mark.parametrize("precision", ["bf16-true", "bf16-mixed", "64-true"])
def test_precisions_train(precision: str) -> None:
    module = PolicyModule(source(), optimizer=sgd, regularisers=[Regulariser("kl", 0.1)], reference="initial", epochs=2)
    torch.manual_seed(0)
    run = trainer(precision=precision)
    run.fit(module, Batches([make_batch()]))
    reference = PolicyModule(
        source(), optimizer=sgd, regularisers=[Regulariser("kl", 0.1)], reference="initial", epochs=2
    )
    fit(reference, [make_batch()])
    rough = 1e-6 if precision == "64-true" else 0.03
    moved = parameters(reference.policy)
    for name, value in parameters(module.policy).items():
        torch.testing.assert_close(value.float(), moved[name], atol=rough, rtol=rough)


@pytest.mark.parametrize("precision", ["bf16-true", "64-true"])
def test_advantages_do_not_depend_on_the_precision(precision: str) -> None:
    """Lightning makes the precision's dtype torch's default, for whatever is computed in a step."""
    for name in ("grpo", "rloo", "tree", "reinforce_pp", "gae", "gae_turn"):
        make = ActorCriticModule if name.startswith("gae") else PolicyModule
        found = []
        for chosen in ("32-true", precision):
            batch = make_batch()
            fit(make(source(), optimizer=sgd, advantage=name), [batch], precision=chosen)
            found.append(batch.columns["advantages"])
        assert torch.equal(*found), name
