"""What is measured on held-out prompts, set by set, and when.

Promises: right across ranks, whoever holds the episodes (every rank sees the handles of all sets, in one order); a
number over nothing is left out, never reported as 0; a prompt some of whose episodes failed counts where enough are
left.

For each set, with n samples a prompt:

    accuracy   mean reward over episodes, with rewards of single calls
    pass@k     chance that at least one of k samples solves a prompt, mean over prompts: 1 - C(n - c, k) / C(n, k)
               where c of n solved it, which is unbiased (Chen et al. 2021, eq. 1)
    mean@n     mean over prompts of the mean reward of their episodes
    maj@n      share of prompts whose most frequent final answer is right (ties: the mean of those tied)

And over all sets:

    failed     share of the episodes that were asked for, and are in none of these numbers: higher, it flatters them

The last two of a set need n > 1; all but accuracy are reported where `EvalHandle.ks` asks for pass@k.

And over all sets together, on a sample of their tokens, sampler against trainer: how far the log-probabilities an
engine reported are from the policy's own. With the same weights on both sides they should differ by rounding only; more
is another kernel, another precision, another chat template, or a bug. It can be told only on tokens of the version that
the policy is at, which training batches of an asynchronous run hardly have; held-out episodes, played at one pinned
version, always do.

    mismatch_kl       KL(sampler || policy), nats a token
    logprob_diff_max  the largest difference of a token's log-probabilities, nats
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import lightning as L
import torch
from torch import Tensor, nn

from app.batch import FINAL_ANSWER, EvalHandle, RolloutBatch, StepHandle
from app.statistics import ROUNDING, pass_at_k
from modules.episodes import call_rewards, earned
from modules.metrics import NamedMetrics, episode_reward, log_alone
from modules.regularisers import k3

_COMPARED = 16  # sequences of a set of held-out prompts: one forward pass, whatever the size of the set


class EvaluatedModule(L.LightningModule):
    """The part of a module that is evaluated, and rolls out without training.

    Attributes:
        eval_metrics: reset before an evaluation, computed after it; logged as `val/<name>` and `test/<name>`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.eval_metrics: Any = NamedMetrics()
        self._evaluated: set[str] = set()

    def begin_evaluation(self) -> None:
        """Before the first batch of a validation or a test."""
        self.eval_metrics.reset()

    def evaluate(self, handle: EvalHandle) -> None:
        """One validation or test batch, on every rank: adds to `eval_metrics`."""
        raise NotImplementedError

    def on_validation_epoch_start(self) -> None:
        self.begin_evaluation()

    def on_test_epoch_start(self) -> None:
        self.begin_evaluation()

    def validation_step(self, handle: EvalHandle, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.evaluate(handle)

    def test_step(self, handle: EvalHandle, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.evaluate(handle)

    def on_validation_epoch_end(self) -> None:
        self._log_evaluation("val", "on_validation_epoch_end")

    def on_test_epoch_end(self) -> None:
        self._log_evaluation("test", "on_test_epoch_end")

    def _log_evaluation(self, stage: str, hook: str) -> None:
        values = {f"{stage}/{name}": value.float() for name, value in self.eval_metrics.compute().items()}
        # Equal on all ranks already.
        self._evaluated = log_alone(self, hook, values, self._evaluated, values, sync_dist=True)

    def predict_step(self, handle: StepHandle, batch_idx: int, dataloader_idx: int = 0) -> dict[str, float]:
        """What the batch holds, in numbers: prompts, episodes, tokens, reward. Empty on ranks without it."""
        batch = handle.batch
        if batch is None:
            return {}
        total, number = episode_reward(batch)
        prompts = len(set(batch.group_ids.tolist()))
        return {"prompts": prompts, "episodes": number, "tokens": batch.num_tokens, "reward": total / number}


class EvaluationMetrics(nn.Module):
    """Metrics by name: "accuracy" over all sets, and those of each set behind its prefix."""

    def __init__(self) -> None:
        super().__init__()
        self._prefixes: list[str] = [""]
        self._metrics = nn.ModuleList(
            [NamedMetrics(("accuracy", "failed", "mismatch_kl"), maxima=("logprob_diff_max",))]
        )

    def update(self, handle: EvalHandle) -> None:
        """Adds the episodes of a batch; to be called on every rank, with or without one."""
        names = ["accuracy"] if handle.prefix else []
        names += [f"pass@{k}" for k in handle.ks]
        if handle.ks and handle.samples > 1:
            names += [f"mean@{handle.samples}", f"maj@{handle.samples}"]
        totals = {} if handle.batch is None else _measure(handle, handle.batch)
        if names:
            self._of(handle.prefix, names).update({name: totals[name] for name in names if name in totals})
        reward, episodes = totals.get("accuracy", (0.0, 0))
        asked = handle.prompts * handle.samples if handle.batch is not None else 0
        self._all()[0].update({"accuracy": (reward, episodes), "failed": (max(0, asked - episodes), asked)})

    def compared(self, divergence: float, tokens: int, largest: float) -> None:
        """Adds what `compare` found on some episodes; on the rank that has them."""
        self._all()[0].update({"mismatch_kl": (divergence, tokens)}, maxima={"logprob_diff_max": largest})

    def compute(self) -> dict[str, torch.Tensor]:
        """Collective: name -> scalar float64; names without data are left out."""
        pairs = zip(self._prefixes, self._all(), strict=True)
        return {f"{prefix}{name}": value for prefix, one in pairs for name, value in one.compute().items()}

    def reset(self) -> None:
        for one in self._all():
            one.reset()

    def _all(self) -> list[NamedMetrics]:
        return [cast(NamedMetrics, one) for one in self._metrics]

    def _of(self, prefix: str, names: Sequence[str]) -> NamedMetrics:
        for known, one in zip(self._prefixes[1:], self._all()[1:]):
            if known == prefix:
                return one
        first = self._all()[0]
        made = NamedMetrics(means=names).to(first.sums_state.device)
        made.dist_sync_fn = first.dist_sync_fn
        self._prefixes.append(prefix)
        self._metrics.append(made)
        return made


def majority(answers: Sequence[str], solved: Sequence[bool]) -> float:
    """Share of right episodes among those with the most frequent answer; of several such answers, their mean. "" is no
    answer; 0.0 when nobody has one."""
    votes: dict[str, list[bool]] = {}
    for answer, right in zip(answers, solved, strict=True):
        if answer:
            votes.setdefault(answer, []).append(right)
    most = max(map(len, votes.values()), default=0)
    winners = [sum(group) / len(group) for group in votes.values() if len(group) == most]
    return sum(winners) / len(winners) if winners else 0.0


def _measure(handle: EvalHandle, batch: RolloutBatch) -> dict[str, tuple[float, int]]:
    """name -> (total, weight)."""
    rewards, groups, of_sequence = earned(batch, call_rewards(batch))
    totals = {"accuracy": (float(rewards.sum()), len(rewards))}
    if not handle.ks:
        return totals
    answers = [""] * len(rewards)
    for sequence, episode in enumerate(of_sequence.tolist()):
        answers[episode] = batch.metadata[sequence].get(FINAL_ANSWER, "")
    prompts = [(groups == group).nonzero().flatten().tolist() for group in groups.unique()]
    solved = (rewards >= handle.solved_at - ROUNDING).tolist()  # rewards are float32: 0.1 + 0.9 may fall short of 1.0
    for k in handle.ks:
        chances = [pass_at_k(len(own), sum(solved[e] for e in own), k) for own in prompts if len(own) >= k]
        totals[f"pass@{k}"] = (sum(chances), len(chances))
    means = [float(rewards[own].mean()) for own in prompts]
    votes = [majority([answers[e] for e in own], [solved[e] for e in own]) for own in prompts]
    totals[f"mean@{handle.samples}"] = (sum(means), len(means))
    totals[f"maj@{handle.samples}"] = (sum(votes), len(votes))
    return totals


def comparable(batch: RolloutBatch, version: int, most: int = _COMPARED) -> RolloutBatch | None:
    """At most so many sequences with trained tokens that `version` sampled, evenly spaced; None without any."""
    of_token = torch.arange(len(batch)).repeat_interleave(batch.lengths())
    eligible = of_token[_current(batch, version)].unique()
    if not len(eligible):
        return None
    picks = torch.linspace(0, len(eligible) - 1, min(most, len(eligible)), dtype=torch.float64).round().long()
    return batch.select(eligible[picks])


def compare(batch: RolloutBatch, logprobs: Tensor, version: int) -> tuple[float, int, float]:
    """Of the trained tokens that `version` sampled: the sum of KL(sampler || policy) by k3 in nats, their number, and
    the largest |difference| in nats. `logprobs` float32 [T], the policy's."""
    chosen = _current(batch, version)
    behavior, now = batch.behavior_logprobs[chosen].double(), logprobs[chosen].double()
    return float(k3(behavior, now).sum()), int(chosen.sum()), float((now - behavior).abs().max())


def _current(batch: RolloutBatch, version: int) -> Tensor:
    return batch.loss_mask & (batch.versions == version)
