"""`RewardModule`: reward models, trained on preferences over the same tree engine and strategy.

Promises: the loss is that of Bradley and Terry over all pairs of episodes of a group whose rewards differ, a group
counting once; the episodes of a group share their prompt in one prefix tree, and go through the model once, or where a
group does not fit a chunk forward once more; one optimizer step a batch. What `SavePretrained` writes is what
transformers calls a sequence classifier with one label: `AutoModelForSequenceClassification.from_pretrained` gives the
scores that were trained.

An episode is scored at its last token (of its last sequence, where it has a turn a sequence): the engine's value of
position t is read off the token before, so each sequence is trained with one more token behind its end, which never
runs and which `tokens/*` count.
"""

from __future__ import annotations

import logging
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchmetrics.functional.classification import binary_calibration_error
from transformers import PretrainedConfig

from app import checks
from app.batch import CALL_REWARD, BatchError, EvalHandle, RolloutBatch
from app.tree import FlatOutputs
from modules.algorithm import with_rewards
from modules.episodes import call_rewards, differ, episodes
from modules.metrics import NamedMetrics
from modules.models import ModelSource, build_model
from modules.step import TreeStep
from modules.tree_module import TOKEN_COUNTS, TreeModule, objects_among

_log = logging.getLogger(__name__)
_BINS = 20  # of confidences from 0 to 1; those of the right order are above a half


class RewardModule(TreeModule):
    """Learns a score whose differences say which of two episodes of a prompt is better.

    The loss of a group is the mean over its pairs of -log sigmoid(s_better - s_worse - margin (r_better - r_worse)), r
    being what the episodes earned, with rewards of single calls (Ouyang et al. 2022, eq. 1; the margin: Touvron et al.
    2023, eq. 2), that of a batch the mean over groups. A pair of `PairsDataModule` is such a group, of rewards 1, 0.

    Args:
        model: a language model or a reward model to start from, whose `score` head is kept, or a configuration.
        margin: how much further apart two scores have to be for each unit of reward between them, at least 0.
        centre: weight of the squared sum of a pair's scores, at least 0. The loss above leaves open where 0 is; a small
            one (0.01) puts it in the middle (Eisenstein et al. 2024, eq. 5).
        tree_options: see `TreeModule`.

    Logs: loss (nats a group), accuracy (share of pairs in the right order; equal scores are not), margin (mean
    difference of the scores of a pair), score (their mean), flat (share of groups whose rewards are all equal, which
    teach nothing and do not run), grad_norm, tokens/*; validation and test, of all pairs there: `val/loss`,
    `val/accuracy`, `val/margin`, `val/score` and `val/calibration_error`, by how much sigmoid(difference) is off as the
    chance of the right order (expected calibration error, torchmetrics, 10 bins from 0.5 to 1).

    Raises:
        ValueError: an option out of range, adapters, or weights in 4 bit.
    """

    want = ("values",)
    keeps_groups = True
    may_idle = True
    evaluates_pairs = True

    def __init__(self, model: ModelSource, margin: float = 0.0, centre: float = 0.0, **tree_options: Any) -> None:
        given = {"model.adapter": model.adapter, "model.quantization": model.quantization}
        checks.no_effect("with RewardModule, which trains whole models", given)
        super().__init__(model, **tree_options)
        self.save_hyperparameters()
        self.save_hyperparameters(ignore=objects_among(self.hparams))
        for name, value in {"margin": margin, "centre": centre}.items():
            if not 0 <= value < math.inf:
                raise ValueError(f"{name}: {value}, must be a finite number of at least 0")
        self.margin, self.centre = margin, centre
        self.train_metrics = NamedMetrics(("accuracy", "margin", "score", "flat"), ("loss", *TOKEN_COUNTS))
        self.eval_metrics = PairMetrics()

    def configure_model(self) -> None:
        if self.policy is None:
            self.policy = build_model(self.model_source, scores=True)
            if not hasattr(self.policy, "score"):
                raise ValueError(
                    f"model: {type(self.policy).__name__} has no head called score, as those of decoders have; choose"
                    " another architecture"
                )

    # Rank 0, on the whole batch

    def arrange(self, batch: RolloutBatch) -> RolloutBatch:
        assert self.policy is not None
        _check_room(batch, self.policy.config)
        config, ends = self.policy.config, batch.tokens[batch.cu_seqlens[1:] - 1]
        if config.pad_token_id is not None and bool((ends == config.pad_token_id).any()):
            _log.warning(
                "model: token %d ends sequences and is pad_token_id too: transformers would score the token before."
                " Saved without pad_token_id; whoever scores several sequences at once names another",
                config.pad_token_id,
            )
            config.pad_token_id = None
        return with_scores(batch)

    def step_sequences(self, batch: RolloutBatch, index: int) -> list[int]:
        return informative(batch)

    def step_columns(self, batch: RolloutBatch, indices: list[int]) -> dict[str, Tensor]:
        groups = len(batch.group_ids[indices].unique())
        return {"groups": batch.loss_mask.float() * groups}  # a count, which float32 holds as it is

    def prepare(self, batch: RolloutBatch) -> None:
        groups = len(batch.group_ids.unique())
        flat = groups - len(batch.group_ids[informative(batch)].unique())
        self.train_metrics.update({"flat": (flat, groups)})

    # One step

    @property
    def completes_gradients(self) -> bool:
        return True

    def tree_pass(self, step: TreeStep) -> None:
        batch = step.batch
        if batch is None:
            return
        groups = float(step.columns["groups"].max())  # of all ranks
        total = self.engine.backward_grouped(
            step.tree, lambda out, indices: self._loss_of(out, batch, indices) / groups, batch.group_ids, self.want
        )
        self.train_metrics.update(sums={"loss": total})

    def _loss_of(self, out: FlatOutputs, batch: RolloutBatch, indices: Tensor) -> Tensor:
        """The loss of whole groups, summed over them."""
        assert out.values is not None
        scores = out.values[(out.cu_seqlens[1:] - 1).to(out.values.device)]
        groups, rewards = (x[indices].to(scores.device) for x in (batch.group_ids, batch.rewards))
        losses, gaps = bradley_terry(scores, rewards, groups, self.margin, self.centre)
        found = scores.detach()
        self.train_metrics.update(
            {
                "accuracy": ((gaps > 0).sum(), len(gaps)),
                "margin": (gaps.sum(), len(gaps)),
                "score": (found.sum(), len(found)),
            }
        )
        return losses.sum()

    # Validation

    def evaluate(self, handle: EvalHandle) -> None:
        self.ranks.lead(handle, self._score)

    def _score(self, handle: EvalHandle) -> None:
        """Rank 0."""
        batch = self.checked_batch(handle)
        kept = informative(batch)
        if not kept:
            return
        values = self.ranks.outputs(batch, {"policy": ["values"]}, kept)["policy"]["values"]
        part, scores = batch.select(kept), values[batch.cu_seqlens[1:] - 1][kept].double()
        losses, gaps = bradley_terry(scores, part.rewards, part.group_ids, self.margin, self.centre)
        self.eval_metrics.update(losses, gaps, scores)


class PairMetrics(nn.Module):
    """What is known of held-out pairs, over all of a validation: see `RewardModule`."""

    def __init__(self) -> None:
        super().__init__()
        self._means = NamedMetrics(("loss", "accuracy", "margin", "score", "calibration_error"))
        self._gaps: list[Tensor] = []  # on rank 0, which has all

    def update(self, losses: Tensor, gaps: Tensor, scores: Tensor) -> None:
        """Adds the losses of groups [G], differences [P] of pairs and scores [n] of episodes."""
        right = (gaps > 0).sum()
        means = {"loss": (losses.sum(), len(losses)), "accuracy": (right, len(gaps)), "margin": (gaps.sum(), len(gaps))}
        self._means.update({**means, "score": (scores.sum(), len(scores))})
        self._gaps.append(gaps)

    def compute(self) -> dict[str, Tensor]:
        """Collective: name -> scalar float64; names without data are left out."""
        if self._gaps:
            gaps = torch.cat(self._gaps)
            # Which of a pair comes first says nothing: the order that the model believes in, and whether it is right.
            error = binary_calibration_error(gaps.abs().sigmoid(), (gaps > 0).long(), n_bins=_BINS, norm="l1")
            self._means.update({"calibration_error": (error, 1)})
            self._gaps.clear()
        return self._means.compute()

    def reset(self) -> None:
        self._means.reset()
        self._gaps.clear()


def bradley_terry(
    scores: Tensor, rewards: Tensor, groups: Tensor, margin: float = 0.0, centre: float = 0.0
) -> tuple[Tensor, Tensor]:
    """The loss of each group and the difference of each pair; see `RewardModule`.

    Args:
        scores: [n], of episodes. rewards: [n]. groups: int64 [n], each with two different rewards at least.
        margin, centre: as there.

    Returns:
        losses [G], in order of the group ids, and s_better - s_worse [P], detached.

    Raises:
        BatchError: a group whose rewards are all equal.
    """
    names, group = groups.unique(return_inverse=True)
    above = (group[:, None] == group) & (rewards[:, None] > rewards) & differ(rewards[:, None], rewards)
    better, worse = above.nonzero(as_tuple=True)
    gaps = scores[better] - scores[worse]
    demanded = margin * (rewards[better] - rewards[worse]).to(gaps)
    losses = -F.logsigmoid(gaps - demanded) + centre * (scores[better] + scores[worse]).square()
    pairs = torch.bincount(group[better], minlength=len(names))
    if bool((pairs == 0).any()):
        flat = int(names[(pairs == 0).nonzero()[0]])
        raise BatchError(f"RolloutBatch.rewards: those of group {flat} are all equal, so that nothing is preferred")
    return losses.new_zeros(len(names)).index_add(0, group[better], losses) / pairs, gaps.detach()


def informative(batch: RolloutBatch) -> list[int]:
    """The sequences of groups that hold two different rewards, ascending."""
    group = batch.group_ids.unique(return_inverse=True)[1]
    ends = [
        torch.zeros(int(group.max()) + 1).scatter_reduce(0, group, batch.rewards, how, include_self=False)
        for how in ("amin", "amax")
    ]
    return differ(ends[1], ends[0])[group].nonzero().flatten().tolist()


def _check_room(batch: RolloutBatch, config: PretrainedConfig) -> None:
    """The token behind an episode's end, at which scores are learned, has a position too."""
    lengths, limit = batch.lengths(), getattr(config.get_text_config(), "max_position_embeddings", None)
    if limit is not None and int(lengths.max()) >= limit:
        i = int(lengths.argmax())
        raise BatchError(
            f"RolloutBatch.tokens: sequence {i} (prompt '{batch.prompt_ids[i]}') has {int(lengths[i])} tokens, and a"
            f" reward model of max_position_embeddings: {limit} takes {limit - 1}, as its score stands behind them:"
            " leave it out, or raise model.config.max_position_embeddings"
        )


def with_scores(batch: RolloutBatch) -> RolloutBatch:
    """The last sequence of each episode, with one more token behind its end, the only one that is "trained": the value
    there is what the model says at the end; its reward has those of all the episode's calls. Raises BatchError for an
    episode with two rewards."""
    batch = with_rewards(batch, call_rewards(batch))
    of_sequence = episodes(batch)[2]
    order = batch.turn_indices.argsort(stable=True)
    place = torch.empty_like(order).index_copy(0, order, torch.arange(len(order)))
    latest = torch.full((int(of_sequence.max()) + 1,), -1).scatter_reduce(0, of_sequence, place, "amax")
    part = batch.select(order[latest].sort().values)
    count = len(part)
    bounds = part.cu_seqlens + torch.arange(count + 1)
    ends = bounds[1:] - 1
    inside = torch.ones(int(bounds[-1]), dtype=torch.bool).index_fill(0, ends, False)
    tokens = torch.empty(int(bounds[-1]), dtype=torch.int64).masked_scatter(inside, part.tokens)
    tokens[ends] = part.tokens[part.cu_seqlens[1:] - 1]  # any id will do, but a picture's placeholder
    images = None
    if part.images is not None:
        images = torch.full((int(bounds[-1]),), -1, dtype=torch.int32).masked_scatter(inside, part.images)
        tokens[ends[part.images[part.cu_seqlens[1:] - 1] >= 0]] = 0
    return RolloutBatch(
        tokens=tokens,
        loss_mask=~inside,
        behavior_logprobs=torch.zeros(len(tokens), dtype=torch.float32),
        versions=torch.full((len(tokens),), -1),
        cu_seqlens=bounds,
        rewards=part.rewards,
        group_ids=part.group_ids,
        episode_ids=part.episode_ids,
        turn_indices=part.turn_indices,
        temperatures=torch.ones(count),
        prompt_ids=part.prompt_ids,
        finish_reasons=part.finish_reasons,
        metadata=[{key: value for key, value in one.items() if key != CALL_REWARD} for one in part.metadata],
        images=images,
        pictures=part.pictures,
    )
