"""Numbers of held-out prompts against enumeration by hand; on two ranks as on one; the best checkpoint is kept."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from app.batch import EvalHandle
from app.statistics import pass_at_k
from modules import PolicyModule
from modules.evaluation import EvaluationMetrics, majority
from tests.helpers.rank_pool import RankPool
from tests.helpers.tiny_policy import Batches, make_batch, sgd, source, trainer
from tests.modules.held_out import COMPARED, NAMED, Sets, held_out
from tests.modules.ranks import training_jobs as jobs


@pytest.mark.parametrize("samples", [1, 2, 5, 8])
def test_pass_at_k_is_the_share_of_draws_with_a_solved_one(samples: int) -> None:
    for solved in range(samples + 1):
        flags = [True] * solved + [False] * (samples - solved)
        for k in range(1, samples + 1):
            draws = [any(draw) for draw in combinations(flags, k)]
            assert pass_at_k(samples, solved, k) == pytest.approx(sum(draws) / len(draws), abs=1e-12)


@pytest.mark.parametrize(
    ("answers", "solved", "expected"),
    [
        (["4", "4", "5"], [True, True, False], 1.0),
        (["4", "5", "5"], [True, False, False], 0.0),
        (["4", "5"], [True, False], 0.5),  # a tie
        (["4", "5", "6", "6", "5"], [True, True, False, False, True], 0.5),
        (["4", "4"], [True, False], 0.5),  # right by the answer, but not in its form, say
        (["", "", "4"], [False, False, True], 1.0),  # who has no answer does not vote
        (["", ""], [False, False], 0.0),
    ],
)
def test_majority(answers: list[str], solved: list[bool], expected: float) -> None:
    assert majority(answers, solved) == expected


def test_metrics_of_named_sets() -> None:
    """Set "sums": prompts with 3 and 1 of 4 episodes solved, one with a single episode left; "games": one sample."""
    first = held_out(
        {"p": [(1.0, "4"), (1.0, "4"), (0.0, "5"), (1.0, "4")], "q": [(0, "7"), (1, "8"), (0, "7"), (0, "")]}
    )
    second = held_out({"r": [(0.25, "1")]})
    metrics = EvaluationMetrics()
    for _ in range(2):  # the second must not remember the first
        metrics.reset()
        metrics.update(EvalHandle(first, "sums", "sums/", 4, (1, 2, 4)))
        metrics.update(EvalHandle(second, "sums", "sums/", 4, (1, 2, 4)))
        metrics.update(EvalHandle(held_out({"s": [(0.8, "x")], "t": [(0.2, "y")]}), "games", "games/", 1, (1,), 0.8))
        found = {name: float(value) for name, value in metrics.compute().items()}
        assert found == pytest.approx(
            {
                "accuracy": (4.25 + 1.0) / 11,
                "sums/accuracy": 4.25 / 9,
                "sums/pass@1": (0.75 + 0.25 + 0.0) / 3,
                "sums/pass@2": (1.0 + 0.5) / 2,
                "sums/pass@4": 1.0,
                "sums/mean@4": (0.75 + 0.25 + 0.25) / 3,
                "sums/maj@4": (1.0 + 0.0 + 0.0) / 3,
                "games/accuracy": 0.5,
                "games/pass@1": 0.5,
            }
        )


def test_a_set_without_a_name_has_metrics_without_one() -> None:
    metrics = EvaluationMetrics()
    metrics.update(EvalHandle(held_out({"p": [(1.0, "4"), (0.0, "5")]}), "arithmetic", "", 2, (1, 2)))
    found = {name: float(value) for name, value in metrics.compute().items()}
    assert found == {"accuracy": 0.5, "pass@1": 0.5, "pass@2": 1.0, "mean@2": 0.5, "maj@2": 0.5}


def test_episodes_that_failed_are_a_share_of_all_that_were_asked_for() -> None:
    """Over all sets and batches; nothing where it is not known, as on ranks without episodes."""
    metrics = EvaluationMetrics()
    metrics.update(EvalHandle(held_out({"p": [(1.0, "4"), (0.0, "5")]}), "sums", "sums/", 2, (1, 2), prompts=2))
    metrics.update(EvalHandle(held_out({"q": [(1.0, "4")]}), "games", "games/", 1, (1,), prompts=1))
    metrics.update(EvalHandle(None, "games", "games/", 1, (1,), prompts=1))
    assert float(metrics.compute()["failed"]) == pytest.approx(2 / 5)
    metrics.reset()
    metrics.update(EvalHandle(held_out({"q": [(1.0, "4")]}), "games", "games/", 1, (1,)))
    assert "failed" not in metrics.compute()


def test_episodes_of_several_turns_count_once() -> None:
    batch = make_batch(3, groups=2, episodes=4)
    metrics = EvaluationMetrics()
    metrics.update(EvalHandle(batch, "agents", "", 4, (1,), solved_at=0.5))
    rewards = {int(e): float(r) for e, r in zip(batch.episode_ids, batch.rewards)}
    assert len(rewards) == 8 and len(batch) > 8
    assert float(metrics.compute()["pass@1"]) == pytest.approx(sum(r >= 0.5 for r in rewards.values()) / 8)


@pytest.mark.parametrize("stage", ["validate", "test"])
def test_validation_and_test_log_sets_by_name(stage: str) -> None:
    module, run = PolicyModule(source(), optimizer=sgd), trainer()
    getattr(run, stage)(module, Sets(), verbose=False)
    prefix = {"validate": "val", "test": "test"}[stage]
    found = {name.removeprefix(f"{prefix}/"): float(value) for name, value in run.callback_metrics.items()}
    assert {name: value for name, value in found.items() if name not in COMPARED} == pytest.approx(NAMED)
    assert all(found[name] > 0 for name in COMPARED)


def test_two_ranks_log_what_one_logs(two_ranks: RankPool) -> None:
    one = jobs.validate(devices=1)
    assert one.keys() == {f"val/{name}" for name in (*NAMED, *COMPARED)}
    for found in two_ranks.run(jobs.validate, devices=2):
        assert found == pytest.approx(one, rel=1e-5)


def test_the_checkpoint_with_the_best_reward_is_kept(tmp_path: Path) -> None:
    """Held-out rewards rise, then fall; what is restored is the model of the best one."""

    class Rewarded(Batches):
        def val_dataloader(self) -> Any:
            batch = held_out({"p": [(rewards.pop(0), "4")]})
            return torch.utils.data.DataLoader([EvalHandle(batch, "sums", "sums/", 1, (1,))], batch_size=None)

    class Weights(ModelCheckpoint):
        def on_validation_end(self, trainer: Any, module: Any) -> None:
            seen.append(module.policy.lm_head.weight.detach().clone())
            super().on_validation_end(trainer, module)

    rewards, seen = [0.2, 0.9, 0.5, 0.1], list[torch.Tensor]()
    best = Weights(
        tmp_path,
        filename="{step}-{val/sums/accuracy:.2f}",
        monitor="val/sums/accuracy",
        mode="max",
        auto_insert_metric_name=False,
    )
    module = PolicyModule(source(), optimizer=sgd)
    run = trainer(
        best,
        enable_checkpointing=True,
        max_epochs=4,
        reload_dataloaders_every_n_epochs=1,
    )
    run.fit(module, Rewarded([make_batch()]))
    assert best.best_model_score == pytest.approx(0.9) and len(seen) == 4
    assert [file.name for file in tmp_path.glob("**/*.ckpt")] == ["2-0.90.ckpt"]
    again = PolicyModule(source(), optimizer=sgd)
    again.configure_model()
    again.load_state_dict(torch.load(best.best_model_path, weights_only=True)["state_dict"])
    assert torch.equal(again.policy.lm_head.weight, seen[1]) and not torch.equal(seen[1], seen[3])


def test_precision_of_the_module_does_not_round_the_metrics() -> None:
    metrics = EvaluationMetrics().to(torch.bfloat16)
    batch = held_out({f"p{i}": [(float(i % 3 == 0), "")] for i in range(1000)})
    metrics.update(EvalHandle(batch, "s", "s/", 1, (1,)))
    assert float(metrics.compute()["s/pass@1"]) == 334 / 1000
