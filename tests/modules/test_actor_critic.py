"""`ActorCriticModule` against a plain dense loop, its warm-up, its parameter groups and its checkpoint."""

from __future__ import annotations

import copy
import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from app.batch import RolloutBatch
from datamodules.recorded import RecordedDataModule
from modules import ActorCriticModule, ModelSource, PolicyModule, Regulariser
from modules.actor_critic import explained_variance
from modules.advantages.gae import gae
from modules.advantages.gae_turn import gae_turn
from modules.objectives.value_loss import value_loss
from tests.helpers.recorded_samples import byte_tokenizer, line, write_jsonl
from tests.helpers.tiny_policy import CONFIG, Batches, fit, make_batch, naive_model, parameters, sgd, source, trainer
from tests.modules.dense_loop import Dense

Options = dict[str, Any]
PLAIN = {"credit": gae, "value_coef": 0.5}
CASES: dict[str, tuple[Options, Dense]] = {
    "shared trunk": ({}, Dense(**PLAIN)),
    "value clip, own rate": (
        {"value_clip": 0.05, "critic_lr": 0.1, "value_coef": 0.2},
        Dense(credit=gae, value_coef=0.2, value_clip=0.05, critic_lr=0.1),
    ),
    "gae by turn": ({"advantage": "gae_turn"}, Dense(credit=gae_turn, value_coef=0.5)),
    "discounted": (
        {"advantage_options": {"gamma": 0.9, "lam": 0.5, "value_lam": 1.0, "whiten": False}},
        Dense(credit=functools.partial(gae, gamma=0.9, lam=0.5, value_lam=1.0, whiten=False), value_coef=0.5),
    ),
    "gspo": ({"objective": "gspo"}, Dense("gspo", aggregation="sequence_mean", **PLAIN)),
    "a model of its own": ({"critic": "initial", "critic_lr": 0.1}, Dense(critic_lr=0.1, **PLAIN)),
    "warm-up of the head": ({"critic_warmup": 1}, Dense(warmup=1, **PLAIN)),
    "warm-up of its own model": ({"critic": "initial", "critic_warmup": 1}, Dense(warmup=1, **PLAIN)),
}


def batches() -> list[RolloutBatch]:
    return [make_batch(k, version=max(0, k - 1)) for k in range(2)]


def test_a_critic_of_another_tokenizer_is_refused(tmp_path: Path) -> None:
    """By the tokenizer of the data, which recorded text has, else by the one beside the policy's weights."""
    mine, other = byte_tokenizer(), byte_tokenizer()
    other.add_tokens(["zebra"])
    for name, tokenizer in (("policy", other), ("critic", mine)):
        naive_model().save_pretrained(tmp_path / name)
        tokenizer.save_pretrained(tmp_path / name)
    policy, critic = (ModelSource(str(tmp_path / name)) for name in ("policy", "critic"))
    module = ActorCriticModule(policy, critic=critic, optimizer=sgd)
    with pytest.raises(ValueError, match=r"critic: .*critic' has another tokenizer than this run: 'zebra' is \d+ here"):
        fit(module, batches())
    text = write_jsonl(tmp_path / "c.jsonl", [line(), line("1")])
    data = RecordedDataModule(str(text), tokenizer=str(tmp_path / "policy"))
    with pytest.raises(ValueError, match=r"critic: .*'zebra' is \d+ here"):
        trainer().fit(ActorCriticModule(source(), critic=critic, optimizer=sgd), data)
    data = RecordedDataModule(str(text), tokenizer=str(tmp_path / "policy"))
    with pytest.raises(ValueError, match=r"reference: .*critic' has another tokenizer .*'zebra' is \d+ here"):
        regularisers = [Regulariser("kl", 0.1)]
        trainer().fit(PolicyModule(source(), reference=critic, regularisers=regularisers, optimizer=sgd), data)


def dense_run(dense: Dense, separate: bool, steps: tuple[int, int]) -> dict[str, torch.Tensor]:
    model = naive_model()
    trunk = copy.deepcopy(model.model) if separate else None
    head = nn.Linear(16, 1)
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    dense = copy.copy(dense)
    dense.minibatches, dense.epochs = steps
    dense.train(model, batches(), head=head, trunk=trunk)
    found = {f"policy.{name}": p for name, p in parameters(model).items()}
    found |= {f"critic.value_head.{name}": p for name, p in parameters(head).items()}
    return found | ({f"critic.trunk.{name}": p for name, p in parameters(trunk).items()} if trunk is not None else {})


ONCE = ["gae by turn", "discounted", "gspo"]
"""What is particular happens once a batch, or in every step alike."""
STEPS = [
    *[pytest.param(case, (1, 1), id=f"{case}-one step a batch") for case in CASES],
    *[
        pytest.param(case, (2, 2), id=f"{case}-2 minibatches x 2 epochs", marks=pytest.mark.slow)
        for case in CASES
        if case not in ONCE
    ],
]


@pytest.mark.parametrize(("case", "steps"), STEPS)
def test_equals_a_plain_dense_loop(case: str, steps: tuple[int, int]) -> None:
    options, dense = CASES[case]
    module = ActorCriticModule(
        source(), optimizer=sgd, minibatches=steps[0], epochs=steps[1], chunk_tokens=7, live_tokens=20, **options
    )
    logged = fit(module, batches())
    expected = dense_run(dense, options.get("critic") == "initial", steps)
    got = parameters(module)
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(got[name], value, atol=2e-6, rtol=0)
    assert float(got["critic.value_head.weight"].abs().max()) > 1e-3
    assert all(step["value_loss"] > 0 for step in logged)
    assert ["explained_variance" in step for step in logged] == ([True] + [False] * (len(logged) // 2 - 1)) * 2


@pytest.mark.parametrize("critic", ["shared", "initial"])
@pytest.mark.parametrize("clip", [None, 0.01])
def test_the_warm_up_moves_the_critic_only(critic: Any, clip: float | None) -> None:
    """With weight decay, momentum and clipping, under both kinds of strategy: not a bit of the policy."""
    from app.strategies import DTAStrategy

    for strategy in ("auto", DTAStrategy()):
        module = ActorCriticModule(
            source(),
            optimizer=lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1),
            critic=critic,
            critic_warmup=2,
        )
        steps = fit(module, batches(), strategy=strategy, gradient_clip_val=clip)
        start = parameters(naive_model())
        assert all(torch.equal(p, start[name]) for name, p in parameters(module.policy).items())
        assert bool(module.critic.value_head.weight.any())
        # A model of its own runs alone; what is not known of the policy is not logged as 0.
        assert ("entropy" in steps[0]) == (critic == "shared")
        more = fit(module, batches(), strategy="auto")
        assert "entropy" in more[0] and any(
            not torch.equal(p, start[name]) for name, p in parameters(module.policy).items()
        )


def test_the_critic_learns_to_predict() -> None:
    module = ActorCriticModule(
        source(),
        optimizer=lambda p: torch.optim.AdamW(p, lr=0.01),
        critic="initial",
        critic_warmup=60,
        advantage_options={"lam": 1.0},
    )
    data = make_batch()
    steps = fit(module, [data] * 60)
    assert steps[0]["explained_variance"] == pytest.approx(0, abs=1e-6) and steps[-1]["explained_variance"] > 0.8


def test_checkpoint_keeps_the_critic(tmp_path: Any) -> None:
    make = functools.partial(
        ActorCriticModule, source(), optimizer=lambda p: torch.optim.AdamW(p, lr=0.01), critic_warmup=1
    )
    data = [make_batch(k, version=max(0, k - 1)) for k in range(3)]
    whole, first, second = make(), make(), make()
    fit(whole, data)
    torch.manual_seed(0)
    half = trainer()
    half.fit(first, Batches(data[:1]))  # in the warm-up: the optimizer has no state for the policy yet
    half.save_checkpoint(tmp_path / "half.ckpt")
    torch.manual_seed(123)
    rest = Batches([data[2], data[1]])  # it goes on at its second batch
    trainer(max_epochs=2).fit(second, rest, ckpt_path=tmp_path / "half.ckpt", weights_only=True)
    for name, value in parameters(whole).items():
        torch.testing.assert_close(parameters(second)[name], value, atol=1e-6, rtol=0)


def test_value_loss_and_explained_variance() -> None:
    values = torch.tensor([1.0, 1.0, -1.0], dtype=torch.float64, requires_grad=True)
    old, returns = torch.tensor([0.0, 2.0, 0.0]).double(), torch.tensor([2.0, 0.0, -0.2]).double()
    losses, clipped = value_loss(values, old, returns, clip=0.5)
    # kept within 0.5 of the old value they are 0.5, 1.5 and -0.5
    torch.testing.assert_close(losses.detach(), torch.tensor([1.125, 1.125, 0.32]).double())
    assert clipped.tolist() == [True, True, False]
    torch.autograd.gradcheck(lambda v: value_loss(v, old, returns, 0.5)[0], (values,))
    assert explained_variance(returns, returns) == 1 and explained_variance(old * 0, returns) == pytest.approx(0)
    assert explained_variance(old, old * 0 + 1) is None


def test_a_value_that_moved_less_than_the_clip_is_never_counted_as_clipped() -> None:
    """Rounding included: near 0, where critics begin, V_old + (V - V_old) is not V for one in twenty."""
    torch.manual_seed(0)
    old, values, returns = (scale * torch.randn(10_000) for scale in (0.01, 0.03, 0.02))
    losses, clipped = value_loss(values, old, returns, clip=0.5)
    assert not bool(clipped.any()) and torch.equal(losses, value_loss(values, old, returns)[0])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"advantage": "grpo"}, "advantage=grpo takes no values, so the critic has no effect"),
        ({"objective": "sft"}, "advantage=none takes no values"),
        ({"objective": "m2po"}, "objective=m2po sees a whole step at once"),
        ({"value_coef": 0.0}, "value_coef: .*, must be above 0"),
        ({"value_coef": float("inf")}, "value_coef: .*, must be above 0 and finite"),
        ({"value_clip": -1.0}, "value_clip: .*, must be above 0"),
        ({"critic_lr": 0.0}, "critic_lr: .*, must be above 0"),
        ({"critic_warmup": -1}, "critic_warmup: .*, must be at least 0"),
        ({"minibatches": 0}, "minibatches: .*, must be at least 1"),
    ],
)
def test_options_that_cannot_work(options: Options, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ActorCriticModule(source(), **options)


def test_sources_of_the_critic() -> None:
    other = ModelSource(config={**CONFIG, "hidden_size": 24, "num_hidden_layers": 1})
    module = ActorCriticModule(source(), critic=other, optimizer=sgd)
    fit(module, [make_batch()])
    assert module.critic.value_head.in_features == 24
    with pytest.raises(ValueError, match="critic: 'mine' is not one of shared, initial"):
        ActorCriticModule(source(), critic="mine").configure_model()  # type: ignore[arg-type]


def test_a_schedule_that_sets_all_rates_leaves_none_to_the_critic() -> None:
    def made(kind: Any, **schedule: Any) -> Any:
        module = ActorCriticModule(
            source(), optimizer=sgd, lr_scheduler=functools.partial(kind, **schedule), critic_lr=1e-3
        )
        module.configure_model()
        return module.configure_optimizers()

    schedules = torch.optim.lr_scheduler
    with pytest.raises(ValueError, match=r"critic_lr: 0\.001 has no effect, because this lr_scheduler sets all rates"):
        made(schedules.OneCycleLR, total_steps=10, max_lr=1e-5)
    groups = made(schedules.LinearLR, total_iters=10)["optimizer"].param_groups
    assert [group["initial_lr"] for group in groups][1] == 1e-3


def test_what_is_frozen_is_so_in_the_policy() -> None:
    """`model.freeze` says nothing of a critic that begins as its copy; `critic.freeze` does of another one."""
    frozen = ModelSource(config=CONFIG, freeze=["model.layers.0"])
    module = ActorCriticModule(frozen, critic="initial", optimizer=sgd)
    fit(module, batches())
    assert module.critic is not None and module.policy is not None
    still = [name for name, one in module.policy.named_parameters() if not one.requires_grad]
    assert still and all(one.requires_grad for one in module.critic.parameters())
    before = dict(naive_model().model.named_parameters())
    moved = [name for name, one in module.critic.trunk.named_parameters() if not torch.equal(one, before[name])]
    assert len(moved) == len(before)
