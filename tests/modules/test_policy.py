"""`PolicyModule` under a plain Trainer equals a naive dense loop: same parameters after SGD steps, in float32."""

from __future__ import annotations

import copy
import functools
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor
from transformers.optimization import Adafactor

from app.batch import LEFT_OUT, BatchError, RolloutBatch
from app.strategies import DTAStrategy
from modules import ModelSource, PolicyModule, Regulariser
from modules.ranks import split_minibatches
from tests.helpers.tiny_policy import (
    Batches,
    Metrics,
    fit,
    make_batch,
    naive_model,
    naive_outputs,
    naive_policy_loss,
    naive_training,
    parameters,
    sgd,
    source,
    trainer,
)


def batches() -> list[RolloutBatch]:
    return [make_batch(k, version=max(0, k - 1)) for k in range(3)]


def whole(batch: RolloutBatch, number: int) -> list[list[int]]:
    return [list(range(len(batch)))]


def assert_same(module: torch.nn.Module, model: torch.nn.Module, atol: float = 1e-6) -> None:
    got, expected = parameters(module), parameters(model)
    assert got.keys() == expected.keys()
    for name in expected:
        difference = float((got[name] - expected[name]).abs().max())
        assert difference <= atol, f"{name} differs by {difference}"


CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "grpo": ({}, {}),
    "asymmetric clipping": (
        {"objective_options": {"clip_low": 0.1, "clip_high": 2.0}},
        {"clip_low": 0.1, "clip_high": 2.0},
    ),
    "sequence mean": ({"aggregation": "sequence_mean"}, {"aggregation": "sequence_mean"}),
    "episode mean": ({"aggregation": "episode_mean"}, {"aggregation": "episode_mean"}),
    "constant": (
        {"aggregation": "constant", "aggregation_constant": 2, "advantage": "dr_grpo"},
        {"aggregation": "constant", "constant": 2.0, "normalize_std": False},
    ),
    "entropy bonus": ({"regularisers": [Regulariser("entropy", 0.1)]}, {"entropy_coef": 0.1}),
}


@pytest.mark.parametrize("case", CASES)
def test_three_steps_equal_a_naive_dense_loop(case: str) -> None:
    options, naive = CASES[case]
    module = PolicyModule(source(), optimizer=sgd, **options)
    fit(module, batches())
    model = naive_model()
    before = parameters(model)
    naive_training(model, batches(), whole, functools.partial(naive_policy_loss, **naive))
    assert_same(module.policy, model)
    moved = max(float((p - before[name]).abs().max()) for name, p in parameters(model).items())
    assert moved > 1e-2  # far more than the tolerance, so equality says something
    assert module.policy_version == 3


def test_two_minibatches_two_epochs_equal_a_naive_dense_loop() -> None:
    module = PolicyModule(source(), optimizer=sgd, minibatches=2, epochs=2, seed=5)
    assert module.steps_per_batch == 4
    fit(module, batches())

    def splits(batch: RolloutBatch, number: int) -> list[list[int]]:
        return [part for epoch in range(2) for part in split_minibatches(batch, 2, (5, number, epoch))]

    model = naive_model()
    naive_training(model, batches(), splits, naive_policy_loss)
    assert_same(module.policy, model)
    assert module.policy_version == 3


def test_temperatures_of_the_sampler() -> None:
    data = [make_batch(k, temperatures=(1.0, 0.5, 2.0)) for k in range(2)]
    module = PolicyModule(source(), optimizer=sgd)
    fit(module, data)
    model = naive_model()
    naive_training(model, data, whole, naive_policy_loss)
    assert_same(module.policy, model)


@pytest.mark.parametrize(
    "options",
    [
        {"tree_training_mode": "dta", "chunk_tokens": 5, "live_tokens": 11},
        {"tree_training_mode": "sparse"},
        {"tree_training_mode": "sparse", "live_tokens": 20},
        {"tree_training_mode": "disabled"},
        {"tree_training_mode": "disabled", "live_tokens": 20},
    ],
    ids=str,
)
def test_execution_modes_give_the_same_parameters(options: dict[str, Any]) -> None:
    common = {"optimizer": sgd, "minibatches": 2, "epochs": 2, "regularisers": [Regulariser("entropy", 0.01)]}
    reference, module = PolicyModule(source(), **common), PolicyModule(source(), **common, **options)
    logged = [fit(m, batches()[:2]) for m in (reference, module)]
    assert_same(module.policy, reference.policy)
    for a, b in zip(*logged):
        for name in ("tokens/dense", "tokens/leaf", "tokens/tree"):  # of the data, not of what a mode executes
            assert a[name] == b[name]


def test_a_plain_trainer_ends_before_the_weights_are_lost() -> None:
    """It cannot leave a step out; `DTAStrategy` does."""

    def exploding(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1e30 if step else 1.0)

    module = PolicyModule(source(), optimizer=sgd, lr_scheduler=exploding)
    with pytest.raises(ValueError, match=r"the gradient norm of step \d is nan: .* trainer\.strategy=app\.strategies"):
        fit(module, batches(), strategy="auto")
    assert all(bool(p.isfinite().all()) for p in module.policy.parameters())


@pytest.mark.parametrize("kind", ["initial", "another model"])
def test_kl_to_a_reference(kind: str, tmp_path: Any) -> None:
    anchor = naive_model(seed=9)
    anchor.save_pretrained(tmp_path)
    given: Any = "initial" if kind == "initial" else ModelSource(path=str(tmp_path))
    module = PolicyModule(
        source(),
        optimizer=sgd,
        regularisers=[Regulariser("kl", 0.05)],
        reference=given,
        minibatches=2,
        chunk_tokens=7,
    )
    steps = fit(module, batches())
    model = naive_model()
    anchor = copy.deepcopy(model) if kind == "initial" else anchor
    frozen = parameters(anchor)

    def splits(batch: RolloutBatch, number: int) -> list[list[int]]:
        return split_minibatches(batch, 2, (0, number, 0))

    naive_training(model, batches(), splits, functools.partial(naive_policy_loss, kl_coef=0.05, reference=anchor))
    assert_same(module.policy, model)
    assert_same(module.reference.model, anchor, atol=0)
    assert all(torch.equal(p, frozen[name]) for name, p in module.reference.model.named_parameters())
    assert (steps[0]["kl"] == pytest.approx(0, abs=1e-6)) == (kind == "initial")
    assert steps[-1]["kl"] > 1e-4


@pytest.mark.parametrize("epochs", [1, 2])
def test_tokens_without_a_recorded_sampler_take_the_policy_at_the_start_of_the_batch(epochs: int) -> None:
    data = [make_batch(k, recorded=False) for k in range(2)]
    module = PolicyModule(source(), optimizer=sgd, epochs=epochs)
    steps = fit(module, data)
    model = naive_model()
    for batch in data:
        with torch.no_grad():
            old: list[Tensor] = [naive_outputs(model, batch, i)[0] for i in range(len(batch))]
        loss = functools.partial(naive_policy_loss, old=old)
        naive_training(model, [batch], lambda batch, number: whole(batch, number) * epochs, loss)
    assert_same(module.policy, model)
    assert steps[0]["approx_kl"] == pytest.approx(0, abs=1e-9)
    assert not {"mismatch_kl", "logprob_diff_max", "staleness", "staleness_max"} & steps[0].keys()


def by_behavior(logprobs: Tensor, behavior: Tensor, advantages: Tensor) -> Tensor:
    return -(logprobs - behavior).exp() * advantages


def by_both(logprobs: Tensor, old: Tensor, behavior: Tensor, advantages: Tensor) -> Tensor:
    return by_behavior(logprobs, behavior, advantages) + 0 * old


def stays(logprobs: Tensor, behavior: Tensor) -> Tensor:
    return 0.5 * (logprobs - behavior) ** 2


@pytest.mark.parametrize("asks", ["objective", "regulariser"])
def test_a_sampler_without_a_record_is_the_policy_at_the_start_of_the_batch(asks: str) -> None:
    """For functions too that ask for the sampler alone."""
    both: list[dict[str, Any]] = [{"objective": by_behavior}, {"objective": by_both}]
    if asks == "regulariser":
        both = [{"objective": name, "regularisers": [Regulariser(stays, 1.0)]} for name in ("reinforce", "ppo_clip")]
    for options in both:
        module = PolicyModule(source(), optimizer=sgd, epochs=3, **options)
        steps = fit(module, [make_batch(recorded=False)])
        options["trained"] = module.policy if asks == "objective" else [step["stays"] > 0 for step in steps]
    if asks == "objective":
        assert_same(both[0]["trained"], both[1]["trained"], atol=0)
    assert asks == "objective" or [one["trained"] for one in both] == [[False, True, True]] * 2


def test_generated_but_untrained_tokens_change_nothing() -> None:
    """Whatever the sampler says about tokens that are not trained, infinities included."""
    batch = make_batch()
    hidden = make_batch()
    hidden.behavior_logprobs[~hidden.loss_mask] = -torch.inf
    modules = [PolicyModule(source(), optimizer=sgd) for _ in range(2)]
    for module, data in zip(modules, (batch, hidden)):
        fit(module, [data])
    assert_same(modules[0].policy, modules[1].policy, atol=0)


@pytest.mark.parametrize("minibatches", [1, 2])
def test_episodes_that_are_left_out_count_in_their_group(minibatches: int) -> None:
    """One of a single turn and one of three; nothing of theirs is in the steps."""
    batch, plain = make_batch(), make_batch()
    chosen = {1, 8}
    for about, episode in zip(batch.metadata, batch.episode_ids.tolist(), strict=True):
        about |= {LEFT_OUT: "truncated"} if episode in chosen else {}
    module, model = PolicyModule(source(), optimizer=sgd, minibatches=minibatches), naive_model()
    steps = fit(module, [batch])

    def splits(plain: RolloutBatch, number: int) -> list[list[int]]:
        parts = split_minibatches(plain, minibatches, (0, number, 0))
        return [[i for i in part if int(plain.episode_ids[i]) not in chosen] for part in parts]

    naive_training(model, [plain], splits, naive_policy_loss)
    assert_same(module.policy, model)
    of_each = [int(plain.lengths()[i]) for i in range(len(plain)) if int(plain.episode_ids[i]) not in chosen]
    assert sum(step["tokens/dense"] for step in steps) == sum(of_each)
    rewards = dict(zip(plain.episode_ids.tolist(), plain.rewards.tolist()))
    assert all(step["reward"] == pytest.approx(sum(rewards.values()) / 9) for step in steps)


@pytest.mark.parametrize("strategy", ["auto", "dta"])
def test_a_batch_that_is_left_out_moves_nothing(strategy: str) -> None:
    """Not even momentum; the one step that it is."""
    batches = [make_batch(0), make_batch(1)]
    batches[1].metadata[:] = [{LEFT_OUT: "truncated"} for _ in batches[1].metadata]
    module = PolicyModule(source(), optimizer=lambda params: torch.optim.AdamW(params, lr=0.01))
    alone = PolicyModule(source(), optimizer=lambda params: torch.optim.AdamW(params, lr=0.01))
    made = (lambda: {"strategy": DTAStrategy()}) if strategy == "dta" else dict
    steps = fit(module, batches, **made())
    fit(alone, batches[:1], **made())
    assert_same(module.policy, alone.policy, atol=0)
    assert steps[1]["grad_norm"] == steps[1]["tokens/dense"] == 0


def test_objectives_that_compare_episodes_take_all() -> None:
    batch = make_batch()
    batch.metadata[0][LEFT_OUT] = "truncated"
    module = PolicyModule(source(), optimizer=sgd, objective="dpo", reference="initial")
    with pytest.raises(BatchError, match=r"prompt 'prompt-0' is left out of training \(truncated\), and objective=dpo"):
        fit(module, [batch])


@pytest.mark.parametrize("strategy", ["auto", "dta"])
@pytest.mark.parametrize("untrained", [False, True])
def test_a_step_without_sequences_moves_nothing(strategy: str, untrained: bool) -> None:
    """Three episodes in six minibatches: momentum and weight decay would go on without gradients. An episode without a
    trained token is none."""
    data = make_batch(groups=1)
    if untrained:
        data.loss_mask[data.cu_seqlens[0] : data.cu_seqlens[1]] = False
    moved: list[tuple[bool, bool]] = []

    class Watch(L.Callback):
        def on_train_batch_start(self, trainer: Any, module: Any, *unused: Any) -> None:
            self.before = parameters(module)

        def on_train_batch_end(self, trainer: Any, module: Any, *unused: Any) -> None:
            now = parameters(module)
            trained = module.last_tree.num_sequences > 0
            moved.append((trained, any(not torch.equal(now[name], value) for name, value in self.before.items())))

    torch.manual_seed(0)
    module = PolicyModule(source(), optimizer=lambda params: torch.optim.AdamW(params, lr=0.01), minibatches=6)
    options = {"strategy": DTAStrategy()} if strategy == "dta" else {}
    metrics = Metrics()
    trainer(Watch(), metrics, **options).fit(module, Batches([data]))
    assert sorted(moved, reverse=True) == [(True, True)] * (3 - untrained) + [(False, False)] * (3 + untrained)
    assert [step["grad_norm"] > 0 for step in metrics.steps] == [trained for trained, _ in moved]


def test_more_minibatches_than_episodes() -> None:
    """Empty minibatches are ordinary: their step has no gradient."""
    data = make_batch(groups=1, episodes=2)
    module = PolicyModule(source(), optimizer=sgd, minibatches=4)
    steps = fit(module, [data])
    model = naive_model()
    naive_training(model, [data], lambda batch, number: split_minibatches(batch, 4, (0, number, 0)), naive_policy_loss)
    assert_same(module.policy, model)
    assert sorted(step["tokens/dense"] > 0 for step in steps) == [False, False, True, True]
    assert module.policy_version == 1


def test_an_advantage_of_ones_own(monkeypatch: pytest.MonkeyPatch) -> None:
    module = PolicyModule(
        source(), optimizer=sgd, advantage="tests.modules.test_policy.same_for_all", advantage_options={"value": 0.0}
    )
    fit(module, [make_batch()])
    assert_same(module.policy, naive_model(), atol=0)


def same_for_all(batch: RolloutBatch, value: float) -> Tensor:
    return torch.full((batch.num_tokens,), value)


def test_checkpoint_keeps_version_and_reference(tmp_path: Any) -> None:
    make = functools.partial(
        PolicyModule, source(), optimizer=sgd, regularisers=[Regulariser("kl", 0.1)], reference="initial"
    )
    whole_run, first, second = make(), make(), make()
    fit(whole_run, batches())
    torch.manual_seed(0)
    half = trainer()
    half.fit(first, Batches(batches()[:2]))
    half.save_checkpoint(tmp_path / "half.ckpt")
    torch.manual_seed(123)  # another start: everything has to come from the checkpoint
    trainer(max_epochs=2).fit(second, Batches(batches()[2:]), ckpt_path=tmp_path / "half.ckpt", weights_only=True)
    assert second.policy_version == 3
    assert_same(second.policy, whole_run.policy, atol=1e-7)
    assert_same(second.reference, whole_run.reference, atol=0)


def test_a_checkpoint_of_weights_alone_is_no_run_to_go_on_with(tmp_path: Any) -> None:
    run = trainer(strategy=DTAStrategy())
    run.fit(PolicyModule(source(), optimizer=sgd), Batches([make_batch()]))
    run.save_checkpoint(tmp_path / "alone.ckpt", weights_only=True)
    with pytest.raises(ValueError, match=r"ckpt_path: the checkpoint holds weights alone .*arborist export"):
        trainer(strategy=DTAStrategy(), max_epochs=2).fit(
            PolicyModule(source(), optimizer=sgd), Batches([make_batch()]), ckpt_path=tmp_path / "alone.ckpt"
        )


def test_an_optimizer_may_find_its_own_learning_rate() -> None:
    module = PolicyModule(source(), optimizer=Adafactor)  # lr=None
    fit(module, [make_batch()])
    assert module.trainer.optimizers[0].defaults["lr"] is None


def test_learning_rate_schedule_follows_optimizer_steps() -> None:
    module = PolicyModule(
        source(),
        optimizer=sgd,
        lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.1),
        minibatches=2,
    )
    fit(module, batches()[:2])
    assert module.trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.2 * 0.01)
