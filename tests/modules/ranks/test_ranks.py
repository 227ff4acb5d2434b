"""Two ranks train the same parameters as one and log the same numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from modules import PolicyModule, Refresh, Regulariser
from modules.regularisers import LinearCoef, ProportionalCoef, SteppedCoef
from tests.helpers.rank_pool import RankError, RankPool
from tests.helpers.selection import some
from tests.helpers.tiny_policy import fit, make_batch, parameters, sgd, source
from tests.modules.ranks import training_jobs as jobs

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
    "coefficients that change, tokens of high entropy": {
        "kind": "groups",
        "minibatches": 2,
        "advantage": "high_entropy",
        "advantage_options": {"share": 0.4},
        "regularisers": [
            Regulariser("entropy", SteppedCoef(2.4, delta=0.05)),
            Regulariser("kl", ProportionalCoef(0.1, 0.01)),
            Regulariser("kl", LinearCoef(0.3, 0.1, 4), "reward", {"estimator": "k1"}),
        ],
        "reference": "initial",
    },
    "teachers that see other prompts": {
        "kind": "twins",
        "minibatches": 2,
        "advantage": "distill",
        "objective": "reinforce",
        "regularisers": [Regulariser("forward_kl", 0.7, options={"k": 4})],
        "reference": source(),
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
    "penalties in the reward, interpolated": {
        "kind": "groups",
        "objective": "decoupled_ppo",
        "proximal": "interpolated",
        "regularisers": [Regulariser("kl", 0.5, "reward", {"estimator": "k1"})],
        "reference": "initial",
        "epochs": 2,
    },
    "tba": {"kind": "one", "objective": "tba", "objective_options": {"beta": 20.0}, "reference": "initial"},
    "a critic of its own, warm-up": {
        "kind": "two",
        "module": "critic",
        "critic": "initial",
        "critic_warmup": 1,
        "value_clip": 0.1,
        "minibatches": 2,
    },
    "correction, fewer sequences than ranks, empty minibatches": {
        "kind": "one",
        "minibatches": 3,
        "correction": "truncated",
        "objective": "gspo",
    },
    "experts on record": {
        "kind": "experts",
        "model": jobs.EXPERTS,
        "minibatches": 2,
        "epochs": 2,
        "proximal": "recomputed",
        "regularisers": [Regulariser("kl", 0.1)],
        "reference": "initial",
    },
    "experts on record, a critic of its own": {
        "kind": "experts",
        "model": jobs.EXPERTS,
        "module": "critic",
        "critic": "initial",
        "minibatches": 2,
    },
    "sft": {"kind": "groups", "module": "sft"},
    "a reward model": {"kind": "groups", "module": "reward"},
}


STEPS = {"kind": "two", "minibatches": 2, "epochs": 2}
ALGORITHMS: dict[str, dict[str, Any]] = {
    "grpo": {},
    "gspo": {"objective": "gspo", "objective_options": {"clip_low": 0.2, "clip_high": 0.2}},
    "ppo with a critic": {"module": "critic"},
    "experts on record": {"kind": "experts", "model": jobs.EXPERTS},
}


@pytest.mark.parametrize("name", some(ALGORITHMS, ["grpo"]))
def test_execution_modes_on_one_and_two_processes_give_the_same_parameters(name: str, two_ranks: RankPool) -> None:
    """Eight SGD steps: two batches, 2 minibatches x 2 epochs of each. On two processes in all modes with GRPO."""
    options = {**STEPS, **ALGORITHMS[name]}
    expected, steps, _ = jobs.train(devices=1, tree_training_mode="dta", **options)
    assert len(steps) == 8
    found = {
        "one process, " + mode: jobs.train(1, tree_training_mode=mode, **options) for mode in ("sparse", "disabled")
    }
    for mode in ("dta", "sparse", "disabled") if name == "grpo" else ("sparse",):
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
            apart = ("tokens/s", "routing/changed")  # of tokens of the tree, of which ranks share some
            same = {name: value for name, value in theirs.items() if name not in apart}
            assert abs(mine.get(apart[1], 0.0) - theirs.get(apart[1], 0.0)) < 0.05
            assert {name: mine[name] for name in same} == pytest.approx(same, rel=1e-4, abs=1e-6)
        assert got_validation == pytest.approx(validation, rel=1e-5) and validation


def test_two_ranks_go_on_in_the_middle_of_a_batch(two_ranks: RankPool, tmp_path: Path) -> None:
    """Rank 0 alone holds the batch and what was prepared of it; all ranks are at the same step of it."""
    for (whole, steps, _), (again, rest, _) in two_ranks.run(jobs.resumed, devices=2, directory=str(tmp_path)):
        rest = [one for one in rest if one]  # at its start nothing is logged
        for mine, theirs in zip(rest, steps[1:], strict=True):
            assert mine["loss"] == theirs["loss"] and mine["reward"] == theirs["reward"]
        for name, value in whole.items():
            assert torch.equal(again[name], value), name


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


def test_other_ranks_hear_of_a_batch_once_and_run_their_share(two_ranks: RankPool) -> None:
    """Of a batch in 2 minibatches x 2 epochs: its sequences once, and what each piece of work takes of them."""
    batch = make_batch(groups=6, episodes=4)
    everything = [tuple(tokens.tolist()) for tokens in batch.sequences()]
    results = two_ranks.run(jobs.what_a_rank_sees, devices=2, minibatches=2, epochs=2)
    held, run, _ = results[1]
    assert held == run and len(run) == 1 + 4  # what it unpacks is what it runs
    for sequences in run:
        assert 0 < sum(map(len, sequences)) < 0.65 * batch.num_tokens
    first = results[0][1][0] + run[0]
    assert sorted(first) == sorted(everything)
    for one, two in (run[1:3], run[3:5]):  # an epoch: never what its other steps or the other rank run
        assert set(one) & set(two) == set() and len(one) + len(two) < len(everything)
    flat = sum(tensor.nbytes for tensor in batch.tensors().values())
    sent = results[0][2]
    assert len(sent) == 4 and 0 < sent[0] < flat / 1e6 and all(0 < mb < 0.5 * sent[0] for mb in sent[1:])
    assert results[1][2] == [0.0] * 4


def test_an_error_of_rank_zero_in_prepare_reaches_all_ranks(two_ranks: RankPool) -> None:
    with pytest.raises(RankError) as error:
        two_ranks.run(jobs.fail_in_prepare)
    assert len(error.value.messages) == 2
    assert all("ValueError: no credit for prompt-0" in message for message in error.value.messages.values())


@pytest.mark.parametrize("rank", [0, 1])
def test_an_error_in_a_forward_pass_ends_all_ranks(rank: int, two_ranks: RankPool) -> None:
    with pytest.raises(RankError) as error:
        two_ranks.run(jobs.fail_in_a_forward_pass, rank=rank)
    assert len(error.value.messages) == 2
    assert all("MemoryError: no memory for the reference" in message for message in error.value.messages.values())


def test_all_ranks_refuse_a_batch_together(two_ranks: RankPool) -> None:
    with pytest.raises(RankError) as error:
        two_ranks.run(jobs.broken)
    assert len(error.value.messages) == 2
    assert all("no token of the batch is trained" in message for message in error.value.messages.values())
