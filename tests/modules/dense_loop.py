"""Policy optimisation as a plain loop over whole sequences: no tree, no chunks, no ranks, one autograd graph a step.

Says step by step what `PolicyModule` and `ActorCriticModule` promise; the functions themselves are tested on their own.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from app.batch import RolloutBatch
from modules.advantages import Estimate
from modules.corrections import CORRECTIONS
from modules.objectives import OBJECTIVES
from modules.ranks import split_minibatches
from tests.helpers.tiny_policy import naive_outputs


@dataclass
class Dense:
    """A training run; fields as the options of the modules.

    `credit(batch, values, token_rewards)`: advantages, or an `Estimate`. `value_coef`: 0 without a critic.
    """

    objective: str = "ppo_clip"
    objective_options: dict[str, Any] = field(default_factory=dict)
    credit: Callable[..., Any] | None = None
    proximal: str = "sampler"
    correction: str | None = None
    correction_options: dict[str, Any] = field(default_factory=dict)
    aggregation: str = "token_mean"
    reward_kl: float = 0.0
    minibatches: int = 1
    epochs: int = 1
    lr: float = 0.2
    value_coef: float = 0.0
    value_clip: float | None = None
    critic_lr: float = 0.2
    warmup: int = 0
    separate: bool = False

    def train(
        self, model: Any, batches: list[RolloutBatch], reference: Any = None, head: Any = None, trunk: Any = None
    ) -> None:
        """`head`: on the hidden states of `trunk`, or of the model."""
        groups = [{"params": list(model.parameters())}]
        if head is not None:
            own = [*head.parameters(), *(trunk.parameters() if trunk is not None else ())]
            groups.append({"params": own, "lr": self.critic_lr})
        optimizer = torch.optim.SGD(groups, lr=self.lr)
        trunk = trunk if trunk is not None else model.model
        for version, batch in enumerate(batches):
            with torch.no_grad():
                start = self._run(model, head, trunk, batch, range(len(batch)))
                if reference is not None:
                    start["reference"] = self._run(reference, None, None, batch, range(len(batch)))["logprobs"]
            self._prepare(batch, start)
            for epoch in range(self.epochs):
                for chosen in split_minibatches(batch, self.minibatches, (0, version, epoch)):
                    optimizer.zero_grad()
                    if chosen:
                        self._loss(model, head, trunk, batch, chosen, start, version).backward()
                    if version < self.warmup:
                        for param in model.parameters():
                            param.grad = None
                    optimizer.step()

    def _run(self, model: Any, head: Any, trunk: Any, batch: RolloutBatch, chosen: Any) -> dict[str, Tensor]:
        pairs = [naive_outputs(model, batch, i) for i in chosen]
        out = {"logprobs": torch.cat([pair[0] for pair in pairs]), "entropy": torch.cat([pair[1] for pair in pairs])}
        if head is not None:
            rows = []
            for i in chosen:
                hidden = trunk(batch.sequences()[i][None]).last_hidden_state[0, :-1]
                rows.append(torch.cat([torch.zeros(1), head(hidden)[:, 0]]))
            out["values"] = torch.cat(rows)
        return out

    def _prepare(self, batch: RolloutBatch, start: dict[str, Tensor]) -> None:
        recorded = batch.versions >= 0
        start["behavior"] = torch.where(recorded, batch.behavior_logprobs, start["logprobs"])
        token_rewards = torch.zeros(batch.num_tokens)
        if self.reward_kl:
            token_rewards = -self.reward_kl * (start["behavior"] - start["reference"]) * batch.loss_mask
        start["token_rewards"] = token_rewards
        if self.credit is not None:
            found = self.credit(batch, start.get("values"), token_rewards)
            if isinstance(found, Estimate):
                start.update(returns=found.returns, value_mask=found.value_mask)
                found = found.advantages
            start["advantages"] = found

    def _loss(
        self,
        model: Any,
        head: Any,
        trunk: Any,
        batch: RolloutBatch,
        chosen: list[int],
        start: dict[str, Tensor],
        v: int,
    ) -> Tensor:
        at, part = batch.flat_index(chosen), batch.select(chosen)
        out = self._run(model, head, trunk, batch, chosen)
        inputs: dict[str, Any] = {name: value[at] for name, value in start.items()}
        now = out["logprobs"].detach()
        recorded, age = part.versions >= 0, (v - part.versions).clamp(min=0)
        share = (age / (age + 1.0)) if self.proximal == "interpolated" else torch.zeros(len(at))
        old = inputs["behavior"] + share * (now - inputs["behavior"])
        old = torch.where(recorded & (self.proximal != "recomputed"), old, inputs["logprobs"])
        behavior = torch.where(recorded, inputs["behavior"], old)
        inputs |= {
            "logprobs": out["logprobs"],
            "old": old,
            "behavior": behavior,
            "mask": part.loss_mask,
            "cu_seqlens": part.cu_seqlens,
            "groups": part.group_ids,
            "episodes": part.episode_ids,
            "rewards": part.rewards,
        }
        losses = _call(OBJECTIVES[self.objective], inputs, self.objective_options)
        if self.correction is not None:
            losses = losses * _call(CORRECTIONS[self.correction], inputs, self.correction_options)
        loss = (losses * self._weights(part))[part.loss_mask].sum()
        if self.value_coef and head is not None:
            targets = inputs["value_mask"]
            error = (out["values"] - inputs["returns"]) ** 2
            if self.value_clip is not None:
                moved = (out["values"] - inputs["values"]).clamp(-self.value_clip, self.value_clip)
                error = torch.maximum(error, (inputs["values"] + moved - inputs["returns"]) ** 2)
            values = self.value_coef * (0.5 * error)[targets].mean()
            loss = values if v < self.warmup else loss + values
        return loss

    def _weights(self, part: RolloutBatch) -> Tensor:
        rows = []
        counts = [int(mask.sum()) for mask in part.split(part.loss_mask)]
        owners = list(zip(part.group_ids.tolist(), part.episode_ids.tolist()))
        for i, length in enumerate(part.lengths().tolist()):
            if self.aggregation == "token_mean":
                weight = 1 / sum(counts)
            elif self.aggregation == "sequence_mean":
                weight = 1 / (len(set(owners)) * owners.count(owners[i]) * counts[i])
            else:
                weight = 1 / (len(set(owners)) * sum(n for n, e in zip(counts, owners) if e == owners[i]))
            rows.append(torch.full((length,), weight))
        return torch.cat(rows)


def _call(function: Callable[..., Any], inputs: dict[str, Any], options: dict[str, Any]) -> Tensor:
    asked = inspect.signature(function).parameters
    found = function(**{name: value for name, value in inputs.items() if name in asked}, **options)
    return found[0] if isinstance(found, tuple) else found
