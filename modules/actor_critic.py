"""`ActorCriticModule`: PPO with a critic; everything of `PolicyModule`, and values.

Promises: the critic runs over the same prefix trees as the policy, in the policy's own pass ("shared") or in one of its
own; values are those at the start of the batch for all its optimizer steps; the denominator of the value loss is the
number of value targets of the whole optimizer step over all ranks; during the warm-up the policy does not move at all.
"""

from __future__ import annotations

import copy
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, Literal

from torch import Tensor, nn
from torch.optim import Optimizer
from transformers import PreTrainedModel

from app import checks
from app.batch import RolloutBatch
from app.tree import FlatOutputs, TreeEngine, body_of
from modules.metrics import NamedMetrics, TokenSums
from modules.models import ModelSource, build_model, inner_model
from modules.models.source import FROZEN
from modules.objectives.value_loss import value_loss
from modules.policy import PolicyModule
from modules.refusals.settings import check_same_tokens, refuse_frozen, refuse_quantised
from modules.step import TreeStep

CriticSource = ModelSource | Literal["shared", "initial"]


class Critic(nn.Module):
    """What predicts the return of a state: a value head, which starts at 0 everywhere, and its trunk unless that is the
    policy's.

    Args:
        source: "shared", on the policy's hidden states; "initial", a copy of the policy's trunk as it is now; or the
            trunk of another model.
        policy: the model being trained.

    Attributes:
        trunk: a transformers model without output projection, or None.
        value_head: hidden states [n, H] -> [n, 1].

    Raises:
        ValueError: a source of another kind.
    """

    def __init__(self, source: CriticSource, policy: PreTrainedModel) -> None:
        super().__init__()
        self.trunk: Any = None
        if source == "initial":
            body = body_of(inner_model(policy))
            self.trunk = copy.deepcopy(body)
            for own, copied in zip(body.parameters(), self.trunk.parameters(), strict=True):
                copied.requires_grad_(own.requires_grad or hasattr(own, FROZEN))  # what is frozen is so in the policy
        elif isinstance(source, ModelSource):
            self.trunk = body_of(inner_model(build_model(source, key="critic")))
        elif source != "shared":
            raise ValueError(
                f"critic: '{source}' is not one of shared, initial, nor a model: write critic: {{path: DIR}}"
            )
        model = policy if self.trunk is None else self.trunk
        size = model.config.get_text_config().hidden_size
        self.value_head = nn.Linear(size, 1, dtype=next(model.parameters()).dtype)
        # Zeros draw nothing from the random generator, and advantages begin as rewards.
        nn.init.zeros_(self.value_head.weight)
        nn.init.zeros_(self.value_head.bias)


class ActorCriticModule(PolicyModule):
    """Trains `policy` and `critic` on the rollout batches of its datamodule.

    The loss is that of `PolicyModule` + value_coef x the mean value loss over the step's value targets.

    Args:
        model: the policy's weights or configuration.
        critic: "shared", a value head on the policy's hidden states; "initial", a copy of the policy's trunk at the
            start of the run; or a model of its own (its trunk).
        value_coef: weight of the value loss.
        value_clip: how far a value may move from the one at the start of the batch, units of reward; None for any far.
        critic_lr: learning rate of the critic's parameters (with "shared", of the head); default: the policy's. LR
            schedulers scale both.
        critic_warmup: rollout batches that train the critic only (with "shared", the head only).
        policy_options: see `PolicyModule`. `advantage` must be an estimator that takes values, by default `gae`.

    Logs also: value_loss, value_clip_fraction; at index 0 explained_variance (of returns by the values at the start).
    loss includes value_coef x value_loss, and is that alone during the warm-up; during that of a critic with a trunk of
    its own the policy does not run, and what is measured of it (entropy, approx_kl, mismatch_kl, what objective,
    correction and costs in the loss report) is left out.

    Raises:
        ValueError: as `PolicyModule`; an advantage that takes no values.
    """

    has_critic = True
    default_advantage = "gae"

    def __init__(
        self,
        model: ModelSource,
        critic: CriticSource = "shared",
        value_coef: float = 0.5,
        value_clip: float | None = None,
        critic_lr: float | None = None,
        critic_warmup: int = 0,
        **policy_options: Any,
    ) -> None:
        super().__init__(model, **policy_options)
        if "values" not in self.algorithm.needs:
            name = self.algorithm.advantage.name if self.algorithm.advantage else "none"
            raise ValueError(
                f"advantage={name} takes no values, so the critic has no effect: use gae or gae_turn, or"
                " modules.PolicyModule as class_path"
            )
        if isinstance(critic, ModelSource):
            refuse_frozen("critic", critic)
        checks.positive({"value_coef": value_coef, "value_clip": value_clip, "critic_lr": critic_lr})
        checks.at_least(0, {"critic_warmup": critic_warmup})
        if self.algorithm.whole_step:
            raise ValueError(
                f"objective={self.algorithm.objective.name} sees a whole step at once, which is not supported with a"
                " critic: choose another"
            )
        self.critic_source, self.critic_lr, self.critic_warmup = critic, critic_lr, critic_warmup
        self.value_coef, self.value_clip = value_coef, value_clip
        self.critic: Critic | None = None
        self._value_sums = TokenSums((), self.device)
        self._explained: float | None = None
        self._value_metrics = ("value_loss", *(["value_clip_fraction"] if value_clip is not None else []))
        metrics = self.train_metrics
        means = (*metrics.means, *self._value_metrics, "explained_variance")
        self.train_metrics = NamedMetrics(means, metrics.sums, metrics.maxima)
        if critic == "shared":
            self.want = (*self.want, "values")

    @property
    def warming_up(self) -> bool:
        """Whether this rollout batch trains the critic only."""
        return self.policy_version < self.critic_warmup

    # Set-up

    def configure_model(self) -> None:
        super().configure_model()
        if self.critic is None:
            assert self.policy is not None
            self.critic = Critic(self.critic_source, self.policy)

    def setup(self, stage: str) -> None:
        super().setup(stage)
        refuse_quantised(self.trainer, "critic", self.critic_source)
        if isinstance(self.critic_source, ModelSource):
            tokenizer = getattr(getattr(self.trainer, "datamodule", None), "tokenizer", None)
            check_same_tokens(tokenizer, self.model_source, self.critic_source.path, "critic")

    def value_head(self) -> Any:
        assert self.critic is not None, "configure_model makes the critic"
        return self.critic.value_head if self.critic.trunk is None else None

    def parameter_groups(self) -> list[Any]:
        assert self.critic is not None, "configure_model makes the critic"
        own: dict[str, Any] = {"params": [p for p in self.critic.parameters() if p.requires_grad]}
        if self.critic_lr is not None:
            own["lr"] = self.critic_lr
        return [{"params": super().parameter_groups()}, own]

    def configure_optimizers(self) -> Any:
        made = super().configure_optimizers()
        if self.critic_lr is not None and isinstance(made, dict):
            policy, critic = (one.get("initial_lr", one["lr"]) for one in made["optimizer"].param_groups)
            if critic == policy != self.critic_lr:
                raise ValueError(
                    f"critic_lr: {self.critic_lr:g} has no effect, because this lr_scheduler sets all rates itself;"
                    " choose one that scales them, such as LinearLR or CosineAnnealingLR"
                )
        return made

    def engine_for(self, name: str) -> AbstractContextManager[TreeEngine]:
        if name == "critic":
            assert self.critic is not None
            return nullcontext(self.engine_over(self.critic.trunk, self.critic.value_head))
        return super().engine_for(name)

    # Rank 0, on the whole batch

    def passes(self, batch: RolloutBatch) -> dict[str, tuple[str, ...]]:
        assert self.critic is not None
        passes, engine = super().passes(batch), "policy" if self.critic.trunk is None else "critic"
        return {**passes, engine: (*passes.get(engine, ()), "values")}

    def prepare(self, batch: RolloutBatch) -> None:
        super().prepare(batch)
        learned = batch.columns["value_mask"].bool()
        self._explained = explained_variance(batch.columns["values"][learned], batch.columns["returns"][learned])

    def step_columns(self, batch: RolloutBatch, indices: list[int]) -> dict[str, Tensor]:
        values, returns, learned = (batch.columns[name] for name in ("values", "returns", "value_mask"))
        count = int(learned[batch.flat_index(indices)].sum())
        weights = learned * (self.value_coef / max(count, 1))
        own = {"values": values, "returns": returns, "value_mask": learned, "value_weights": weights}
        return super().step_columns(batch, indices) | own

    # One step

    def begin_step(self, step: TreeStep, index: int) -> None:
        super().begin_step(step, index)
        self._value_sums = TokenSums(self._value_metrics, self.device)
        if step.batch is not None:
            step.columns["value_mask"] = step.columns["value_mask"].bool()

    def loss(self, out: FlatOutputs, columns: dict[str, Tensor]) -> Tensor:
        policy_loss = super().loss(out, columns)
        if out.values is None:
            return policy_loss
        values = self._value_loss(out, columns)
        return values if self.warming_up else policy_loss + values

    def _value_loss(self, out: FlatOutputs, columns: dict[str, Tensor]) -> Tensor:
        assert out.values is not None
        losses, clipped = value_loss(out.values, columns["values"], columns["returns"], self.value_clip)
        self._value_sums.add({"value_loss": losses.detach(), "value_clip_fraction": clipped}, columns["value_mask"])
        return (losses * columns["value_weights"]).sum()

    @property
    def completes_gradients(self) -> bool:
        return not self.warming_up  # the policy's are zeroed then

    def tree_pass(self, step: TreeStep) -> None:
        assert self.critic is not None and self.policy is not None
        shared = self.critic.trunk is None
        if shared or not self.warming_up:
            super().tree_pass(step)
        else:
            self._sums = TokenSums((), self.device)  # the policy does not run: nothing is known about it
        if self.warming_up:  # the value loss reaches a shared trunk; its norm must not count in clipping
            for param in self.policy.parameters():
                if param.grad is not None:
                    param.grad.zero_()
        if not shared:
            total = self.engine_over(self.critic.trunk, self.critic.value_head).backward(
                replace(step.tree, routes=None),
                lambda out, indices: self._value_loss(out, step.gather(indices)),
                want=("values",),
                batched=True,
                temperatures=step.temperatures,
            )
            self.train_metrics.update(sums={"loss": total})

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        super().on_before_optimizer_step(optimizer)
        if self.warming_up:  # None, not zeros: weight decay and momentum would move the policy
            for param in optimizer.param_groups[0]["params"]:
                param.grad = None

    def end_step(self, step: TreeStep) -> None:
        super().end_step(step)
        assert self._handle is not None
        means: dict[str, tuple[Any, Any]] = {}
        if step.batch is not None:
            means |= self._value_sums.means(step.columns["value_mask"].sum())
        if self._handle.index == 0 and self._explained is not None:  # known to rank 0
            means["explained_variance"] = (self._explained, 1)
        self.train_metrics.update(means)


def explained_variance(values: Tensor, returns: Tensor) -> float | None:
    """1 - var(returns - values) / var(returns): 1 is a perfect critic, 0 one that says the mean; None where all returns
    are equal. Both [M]."""
    if len(returns) < 2 or bool((returns == returns[0]).all()):
        return None
    returns, values = returns.double(), values.double()
    return float(1 - (returns - values).var() / returns.var())
