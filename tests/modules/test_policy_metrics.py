"""What a step logs equals numbers computed by hand; the policy checks its input and its options."""

from __future__ import annotations

import csv
import math
import warnings
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import GradientAccumulationScheduler, LearningRateFinder
from lightning.pytorch.loggers import CSVLogger
from torch import nn

from app.batch import BatchError, EvalHandle, RolloutBatch, StepHandle
from app.strategies.ranks.balance import Calibration
from app.strategies.ranks.collectives import Communicator
from app.strategies.ranks.sharing import SharedRanks
from app.tree import PrefixTree
from modules import ActorCriticModule, ModelSource, PolicyModule, Refresh, Regulariser, evaluation
from modules.algorithm import LOGGED
from modules.metrics import NamedMetrics, TokenSums, remembered
from tests.helpers.tiny_policy import (
    VOCABULARY,
    Batches,
    Metrics,
    fit,
    make_batch,
    naive_model,
    naive_outputs,
    sgd,
    source,
    trainer,
)

KL = Regulariser("kl", 0.1)


def trained(batch: RolloutBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """The fresh model's log-probabilities and entropies of the trained tokens, concatenated."""
    model = naive_model()
    with torch.no_grad():
        rows = [naive_outputs(model, batch, i) for i in range(len(batch))]
    return tuple(torch.cat([row[k] for row in rows])[batch.loss_mask].double() for k in range(2))  # type: ignore[return-value]


def test_metrics_of_a_step() -> None:
    batch = make_batch(version=0)
    [step] = fit(PolicyModule(source(), optimizer=sgd), [batch])
    logp, entropy = trained(batch)
    behavior = batch.behavior_logprobs[batch.loss_mask].double()
    advantages = batch.columns["advantages"][batch.loss_mask].double()
    difference = logp - behavior
    ratio = difference.exp()
    rewards = {int(e): float(r) for e, r in zip(batch.episode_ids, batch.rewards)}
    mismatch = (ratio - 1 - difference).mean()
    clipped = ((advantages > 0) & (ratio > 1.2)) | ((advantages < 0) & (ratio < 0.8))
    tree = PrefixTree.build(batch.sequences())
    expected = {
        "reward": sum(rewards.values()) / len(rewards),
        "loss": float(-torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).mean()),
        "entropy": float(entropy.mean()),
        "clip_fraction": float(clipped.double().mean()),
        "approx_kl": float(mismatch),
        "mismatch_kl": float(mismatch),
        "logprob_diff_max": float(difference.abs().max()),
        "staleness": 0.0,
        "staleness_max": 0.0,
        "tokens/dense": batch.num_tokens,
        "tokens/leaf": tree.num_leaf_tokens,
        "tokens/tree": tree.num_tokens,
    }
    assert set(step) == {*expected, "grad_norm", "lr", "tokens/s"}
    assert {name: step[name] for name in expected} == pytest.approx(expected, rel=1e-4, abs=1e-6)
    assert step["tokens/s"] > 0 and step["grad_norm"] > 0


class Waited(Callback):
    """Says, as Throughput does, that a batch was long in coming."""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        pl_module.step_seconds["wait"] = 1e6


def test_tokens_a_second_count_the_wait_for_the_batch() -> None:
    metrics = Metrics()
    trainer(metrics, Waited()).fit(PolicyModule(source(), optimizer=sgd), Batches([make_batch()]))
    [step] = metrics.steps
    assert 0 < step["tokens/s"] <= step["tokens/dense"] / 1e6


def test_a_step_logs_the_norm_of_its_gradient_before_clipping() -> None:
    logged = [
        fit(PolicyModule(source(), optimizer=sgd), [make_batch()], gradient_clip_val=clip)[0]["grad_norm"]
        for clip in (None, 1e-3)
    ]
    assert logged[0] == pytest.approx(logged[1]) and logged[0] > 1e-2


def test_staleness_and_mismatch_count_the_right_tokens() -> None:
    """Version 0 sampled group 0, version 1 group 1, version 2 group 2; the policy is at 2 when it sees them."""
    mixed = make_batch(5)
    mixed.versions = torch.where(mixed.loss_mask, mixed.group_ids.repeat_interleave(mixed.lengths()), -1)
    steps = fit(PolicyModule(source(), optimizer=lambda p: torch.optim.SGD(p, lr=0.0)), [make_batch()] * 2 + [mixed])
    ages = 2 - mixed.versions[mixed.loss_mask].double()
    assert steps[2]["staleness"] == pytest.approx(float(ages.mean()))
    assert steps[2]["staleness_max"] == 2
    logp, _ = trained(mixed)
    difference = (logp - mixed.behavior_logprobs[mixed.loss_mask])[ages == 0]
    assert steps[2]["mismatch_kl"] == pytest.approx(float((difference.exp() - 1 - difference).mean()), rel=1e-4)
    assert steps[2]["logprob_diff_max"] == pytest.approx(float(difference.abs().max()), rel=1e-4)


def test_mismatch_is_not_logged_where_it_cannot_be_measured() -> None:
    """Not after the batch's first step, and not on tokens of older versions; above all not as 0, nor as a leftover."""
    module = PolicyModule(source(), optimizer=sgd, epochs=2)
    steps = fit(module, [make_batch(0, version=0), make_batch(1, version=0), make_batch(2, version=2)])
    assert ["mismatch_kl" in step for step in steps] == [True, False, False, False, True, False]
    assert ["logprob_diff_max" in step for step in steps] == [True, False, False, False, True, False]
    assert [step["staleness"] for step in steps] == [0, 0, 1, 1, 0, 0]


@pytest.mark.parametrize(("every", "steps", "told"), [(1, 2, False), (2, 1, False), (3, 4, False), (6, 4, True)])
def test_numbers_that_no_logger_would_hear_of_are_told(every: int, steps: int, told: bool, tmp_path: Path) -> None:
    """Those of the first step of a batch: it depends on how often steps are logged whether any is."""
    logger = CSVLogger(tmp_path, name="", version="run")
    run = trainer(logger=logger, log_every_n_steps=every, max_epochs=2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run.fit(PolicyModule(source(), optimizer=sgd, minibatches=steps), Batches([make_batch(k) for k in range(3)]))
    [said] = [str(one.message) for one in caught if "log_every_n_steps: " in str(one.message)] or [""]
    assert said.startswith(f"trainer.log_every_n_steps: {every} never falls on the first of the {steps} steps") == told
    with (tmp_path / "run" / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    first = [row for row in rows if int(row["step"]) % steps == 0]
    assert rows and (first == []) == told


class Shown(L.Callback):
    """What callbacks (early stopping, checkpoints, sweeps) are shown after each step and validation."""

    def __init__(self) -> None:
        self.steps: list[set[str]] = []
        self.validations: list[dict[str, float]] = []
        self._seen = 0

    def on_train_batch_start(self, trainer: L.Trainer, *unused: Any) -> None:
        if trainer.global_step > self._seen:
            self._seen = trainer.global_step
            shown = (trainer.callback_metrics, trainer.logged_metrics, trainer.progress_bar_metrics)
            self.steps.append({name for metrics in shown for name in metrics if not name.startswith("val/")})

    on_train_epoch_end = on_train_batch_start

    def on_validation_end(self, trainer: L.Trainer, *unused: Any) -> None:
        found = {name: float(value) for name, value in trainer.callback_metrics.items() if name.startswith("val/")}
        self.validations.append(found)


def test_callbacks_are_not_shown_a_mismatch_of_earlier_steps() -> None:
    shown = Shown()
    module = PolicyModule(source(), optimizer=sgd, epochs=2)
    data = [make_batch(0, version=0), make_batch(1, version=0), make_batch(2, version=2)]
    trainer(shown).fit(module, Batches(data))
    for name in ("mismatch_kl", "logprob_diff_max"):
        assert [name in step for step in shown.steps] == [True, False, False, False, True, False]


def test_validation_compares_sampler_and_trainer() -> None:
    """In a run whose training batches never have tokens of the current version, and only where held-out ones do."""
    held_out = [make_batch(7, groups=2, version=version) for version in (1, 0, 3)]  # the policy is at 1, 2 and 3

    class Served(Batches):
        def val_dataloader(self) -> Any:
            return torch.utils.data.DataLoader(Played(self), batch_size=None)

    class Played(torch.utils.data.Dataset):  # type: ignore[type-arg]
        def __init__(self, data: Served) -> None:
            self.data = data

        def __len__(self) -> int:
            return 2

        def __getitem__(self, index: int) -> EvalHandle:
            return EvalHandle(held_out[self.data.trainer.lightning_module.policy_version - 1], "held-out")

    shown = Shown()
    module = PolicyModule(source(), optimizer=lambda p: torch.optim.SGD(p, lr=0.0))
    torch.manual_seed(0)
    trainer(shown, max_epochs=3).fit(module, Served([make_batch(recorded=False)]))
    for found, batch in zip(shown.validations, held_out):
        if "val/mismatch_kl" not in found:  # asserted below
            continue
        logp, _ = trained(batch)
        difference = logp - batch.behavior_logprobs[batch.loss_mask]
        expected = float((difference.exp() - 1 - difference).mean())
        assert found["val/mismatch_kl"] == pytest.approx(expected, rel=1e-4)
        assert found["val/logprob_diff_max"] == pytest.approx(float(difference.abs().max()), rel=1e-4)
    assert ["val/mismatch_kl" in found for found in shown.validations] == [True, False, True]
    assert ["val/logprob_diff_max" in found for found in shown.validations] == [True, False, True]
    assert all("val/accuracy" in found for found in shown.validations)


def test_a_large_set_is_compared_on_a_sample() -> None:
    batch = make_batch(1, groups=40, version=4)
    part = evaluation.comparable(batch, 4)
    assert part is not None and len(part) == evaluation._COMPARED < len(batch)
    assert part.group_ids[0] == 0 and part.group_ids[-1] == 39
    assert evaluation.comparable(batch, 5) is None
    few = make_batch(1, groups=1, version=4)
    whole = evaluation.comparable(few, 4)
    assert whole is not None and len(whole) == len(few)


def test_validation_and_test_average_over_episodes() -> None:
    """A batch of one episode weighs less than one of many; turns weigh nothing; a handle without batch is skipped."""
    one, many = make_batch(1, groups=1, episodes=1), make_batch(2, groups=2, episodes=4)
    rewards = {(k, int(e)): float(r) for k, b in enumerate((one, many)) for e, r in zip(b.episode_ids, b.rewards)}
    expected = sum(rewards.values()) / 9
    module, data = PolicyModule(source(), optimizer=sgd), Batches([], held_out=[one, None, many])
    for _ in range(2):  # the second must not remember the first
        [metrics] = trainer().validate(module, data, verbose=False)
        assert metrics["val/accuracy"] == pytest.approx(expected)
    [metrics] = trainer().test(module, data, verbose=False)
    assert metrics["test/accuracy"] == pytest.approx(expected)


def test_named_metrics_leave_out_what_has_no_data() -> None:
    metrics = NamedMetrics(means=("a", "b"), sums=("n",), maxima=("top", "none"))
    metrics.update({"a": (3.0, 2)}, sums={"n": 1}, maxima={"top": torch.tensor(-4.0)})
    metrics.update({"a": (torch.tensor(1.0), torch.tensor(2))}, sums={"n": 2}, maxima={"top": -5.0})
    metrics.update({"b": (0.0, 0)})
    assert {name: float(value) for name, value in metrics.compute().items()} == {"a": 1.0, "n": 3.0, "top": -4.0}
    metrics.reset()
    metrics.update()
    assert {name: float(value) for name, value in metrics.compute().items()} == {"n": 0.0}


def test_named_metrics_keep_counts_when_their_module_is_cast() -> None:
    metrics = torch.nn.ModuleList([NamedMetrics(sums=("n",))]).to(torch.bfloat16)[0]
    metrics.update(sums={"n": 1937})
    assert float(metrics.compute()["n"]) == 1937
    metrics.reset()
    metrics.update(sums={"n": 1937})
    assert float(metrics.compute()["n"]) == 1937


def test_step_seconds_and_tree_are_there_for_callbacks() -> None:
    module = PolicyModule(source(), optimizer=sgd)
    fit(module, [make_batch()])
    assert set(module.step_seconds) == {"prepare", "tree"} and min(module.step_seconds.values()) > 0
    assert module.last_tree is not None and module.last_tree.num_dense_tokens == make_batch().num_tokens


def test_sequences_that_train_nothing_are_said_to() -> None:
    batch = make_batch()
    start, stop = batch.cu_seqlens[1:3].tolist()
    batch.loss_mask[start:stop] = False
    with pytest.warns(UserWarning, match="loss_mask: some sequences have no trained token"):
        [step] = fit(PolicyModule(source(), optimizer=sgd), [batch])
    assert math.isfinite(step["loss"])


def broken(name: str) -> RolloutBatch:
    batch = make_batch()
    if name == "vocabulary":
        batch.tokens[5] = VOCABULARY
    elif name == "mask":
        batch.loss_mask[:] = False
    elif name == "first":
        batch.loss_mask[batch.cu_seqlens[1]] = True
    elif name == "future":
        batch.versions[batch.loss_mask] = 3
    elif name == "long":
        many = make_batch()
        many.tokens = torch.ones(70 + len(many) - 1, dtype=torch.int64)
        many.cu_seqlens = torch.tensor([0, 70, *range(71, 70 + len(many))])
        many.loss_mask = torch.ones(many.num_tokens, dtype=torch.bool)
        return many
    elif name == "alone":
        return make_batch(episodes=1)
    return batch


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("vocabulary", r"tokens: id 17 at position 5 of sequence 0 \(prompt 'prompt-0'\) is outside.*tokenizer"),
        ("mask", "loss_mask: no token of the batch is trained"),
        ("first", r"loss_mask: True at position 0 of sequence 1 \(prompt 'prompt-0'\)"),
        ("future", "versions: a trained token was generated by version 3, the policy is at 0"),
        ("long", r"sequence 0 \(prompt 'prompt-0'\) has 70 tokens.*max_position_embeddings of 64"),
        ("alone", "has a single episode.*group_size"),
    ],
)
def test_batches_that_cannot_be_trained_on(name: str, message: str) -> None:
    with pytest.raises(BatchError, match=message):
        fit(PolicyModule(source(), optimizer=sgd), [broken(name)])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"regularisers": [KL]}, "reference is missing: kl compares"),
        ({"reference": "initial"}, "reference has no effect"),
        ({"reference_offload": True}, "reference_offload has no effect without a reference"),
        ({"reference_refresh": Refresh(2)}, "reference_refresh has no effect without a reference"),
        ({"regularisers": [KL], "reference": "first"}, "reference: 'first' is neither"),
        ({"advantage": "gae"}, "advantage=gae needs a critic: set class_path to modules.ActorCriticModule"),
        ({"aggregation": "mean"}, "aggregation: 'mean', must be one of token_mean"),
        ({"aggregation": "constant"}, "aggregation=constant needs aggregation_constant"),
        (
            {"aggregation": "constant", "aggregation_constant": math.inf},
            "aggregation=constant needs aggregation_constant",
        ),
        ({"aggregation_constant": 5}, "aggregation_constant has no effect with aggregation=token_mean"),
        ({"minibatches": 0}, "minibatches: .*, must be at least 1"),
        ({"epochs": 0}, "epochs: .*, must be at least 1"),
        ({"seed": -1}, "seed: -1, must be at least 0"),
        ({"tree_training_mode": "dense"}, "tree_training_mode: 'dense', must be one of disabled, sparse, dta"),
        ({"tree_training_mode": "sparse", "chunk_tokens": 8}, "chunk_tokens=8 has no effect.*set live_tokens"),
    ],
)
def test_options_that_cannot_work(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PolicyModule(source(), **options)


def test_accumulated_batches_are_refused() -> None:
    with pytest.raises(ValueError, match=r"trainer\.accumulate_grad_batches=2"):
        fit(PolicyModule(source(), optimizer=sgd), [make_batch()], accumulate_grad_batches=2)


def test_a_schedule_that_accumulates_batches_is_refused() -> None:
    """Before the first step, and not by what it does in its first epoch."""
    module = PolicyModule(source(), optimizer=sgd)
    later = trainer(GradientAccumulationScheduler({3: 2}))
    with pytest.raises(ValueError, match=r"trainer\.callbacks: GradientAccumulationScheduler.*raise the data's batch"):
        later.fit(module, Batches([make_batch()]))
    assert module.policy_version == 0


def test_a_search_for_a_learning_rate_of_the_modules_own_is_refused() -> None:
    with pytest.raises(ValueError, match=r"trainer\.callbacks: LearningRateFinder .*remove it"):
        trainer(LearningRateFinder()).fit(PolicyModule(source(), optimizer=sgd), Batches([make_batch()]))


def test_schedulers_that_follow_a_metric_are_refused() -> None:
    module = PolicyModule(source(), optimizer=sgd, lr_scheduler=torch.optim.lr_scheduler.ReduceLROnPlateau)
    with pytest.raises(ValueError, match="lr_scheduler: ReduceLROnPlateau"):
        fit(module, [make_batch()])


def test_a_loader_that_ignores_steps_per_batch_is_refused() -> None:
    class Once(Batches):
        def train_dataloader(self) -> Any:
            return torch.utils.data.DataLoader([StepHandle(make_batch(), 0, 1)], batch_size=None)

    with pytest.raises(
        BatchError, match=r"StepHandle.count: the datamodule yields a batch 1 times, the module takes 2"
    ):
        trainer().fit(PolicyModule(source(), optimizer=sgd, epochs=2), Once([]))


@pytest.mark.parametrize("kind", [PolicyModule, ActorCriticModule])
def test_what_a_run_logs_itself_is_no_name_for_functions(kind: type[PolicyModule]) -> None:
    soft = Regulariser("forward_kl", 0.1, options={"k": 3})
    options: dict[str, Any] = {"correction": "truncated", "regularisers": [soft], "reference": "initial"}
    module = kind(source(), optimizer=sgd, **options)
    [step] = fit(module, [make_batch()])
    assert len(step) > 15 and set(step) <= {*LOGGED, *module.algorithm.metrics}


def test_nan_in_logs_never_comes_from_equal_rewards() -> None:
    batch = make_batch()
    batch.rewards[:] = 0.3
    [step] = fit(PolicyModule(source(), optimizer=sgd), [batch])
    assert all(math.isfinite(value) for value in step.values())
    assert step["grad_norm"] == 0.0 or step["grad_norm"] < 1e-6


def test_source_of_reference_may_be_a_model() -> None:
    module = PolicyModule(source(), regularisers=[KL], reference=ModelSource(config=source().config))
    module.configure_model()
    kept = module.reference
    module.configure_model()
    assert module.reference is kept and not any(p.requires_grad for p in kept.parameters())


def test_half_of_dr_grpo_is_said_to_be() -> None:
    with pytest.warns(UserWarning, match=r"advantage=dr_grpo is half of Dr\.GRPO: aggregation is token_mean"):
        PolicyModule(source(), advantage="dr_grpo")
    inside: dict[str, Any] = {"advantage": "high_entropy", "advantage_options": {"estimator": "dr_grpo"}}
    with pytest.warns(UserWarning, match=r"advantage_options: estimator=dr_grpo is half of Dr\.GRPO"):
        PolicyModule(source(), **inside)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        PolicyModule(source(), advantage="dr_grpo", aggregation="token_mean")
        PolicyModule(source(), **inside, aggregation="token_mean")


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.train_metrics = NamedMetrics(("accuracy",), ("loss",), ("peak",))
        self._sums = TokenSums(("cost",), torch.device("cpu"))

    def count(self, value: float) -> None:
        self.train_metrics.update({"accuracy": (value, 2)}, {"loss": value}, {"peak": torch.tensor(value)})
        self._sums.add({"cost": torch.full((3,), value)}, torch.tensor([True, False, True]))

    def found(self) -> tuple[dict[str, float], float]:
        metrics = {name: float(value) for name, value in self.train_metrics.compute().items()}
        return metrics, float(self._sums.means(1.0)["cost"][0])


def test_counts_of_a_failed_pass_are_undone_and_counted_again() -> None:
    module, once = Counting(), Counting()
    for one in (module, once):
        one.count(1.0)
    ranks = Communicator(None, torch.device("cpu"))  # which no copy can be made of
    module.train_metrics.dist_sync_fn = SharedRanks(ranks, Calibration(False), None, float).gather
    undo = remembered(module)
    for _ in range(2):  # two attempts fail
        module.count(5.0)
        undo()
    module.count(2.0)
    once.count(2.0)
    assert module.train_metrics.dist_sync_fn.__self__._ranks is ranks
    assert module.found() == once.found() and once.found()[1] == 6.0
