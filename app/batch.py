"""The data that flows through every room: `Trajectory` (one training sequence), `RolloutBatch` (many, flat), and the
handles on batches that loaders yield.

Promises: a `RolloutBatch` that exists is valid (checked once, at construction, by an error that names the
field and the sequence); its tensors are never cast or moved behind its back (Lightning's device and
precision conversions see an opaque object). Imports of the project what lies below it: `app.fields`, `app.pictures`,
`app.routes`.
"""

from __future__ import annotations

import copy
import numbers
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from app.fields import BatchError as BatchError
from app.fields import as_number, as_tensor
from app.pictures import Picture, batch_fault, checked, merged, used
from app.routes import BatchRoutes, Routes

_TOKEN_DTYPES = {
    "tokens": torch.int64,
    "loss_mask": torch.bool,
    "behavior_logprobs": torch.float32,
    "versions": torch.int64,
}
_SEQUENCE_DTYPES = {
    "rewards": torch.float32,
    "group_ids": torch.int64,
    "episode_ids": torch.int64,
    "turn_indices": torch.int64,
    "temperatures": torch.float32,
}
_IDS = ("group_id", "episode_id", "turn_index")
_HIGHEST_LOGPROB, _LOWEST_LOGPROB = 1e-3, -1e3  # rounding above 0; nothing that unlikely was ever drawn
LARGEST_REWARD = 1e9
"""Beyond it squares of rewards come near the end of float32."""
TEMPERATURES = (1e-3, 1e3)
"""Range of sampling temperatures. Beyond it sampling is greedy or uniform, and logits / temperature overflow."""
CALL_REWARD = "call_reward"
"""Key of a training sequence's metadata with a reward of its own, which is earned at its last trained token and comes
on top of the episode's."""
TEACHER_PROMPT = "teacher_prompt"
"""Key of a training sequence's metadata with token ids that a teacher is shown in place of what stands before the first
trained token: a richer prompt, for a policy that teaches itself. An empty list where there is nothing to show: the
sequence is not taught."""
LEFT_OUT = "left_out_of_training"
"""Key of a training sequence's metadata with why its episode teaches nothing, in a few words, though it counts where
its group is compared: its sequences are in no step."""
UNTRAINABLE_CALLS = "untrainable_calls"
"""Key of an episode's metadata with the number of its replies that were sampled so that they cannot be trained on."""
FINAL_ANSWER = "final_answer"
"""Key of a held-out episode's metadata with the answer it votes for; "" for none."""


@dataclass(eq=False)
class Trajectory:
    """One training sequence, as the inference engine produced it (nothing is re-tokenized).

    Attributes:
        tokens: int64 [L], prompt and generated tokens in order.
        loss_mask: bool [L], True on tokens that are trained.
        behavior_logprobs: float32 [L], the sampler's log-probability of each generated token, in nats, of
            softmax(logits / temperature); 0.0 where not generated. Narrower floats are refused.
        versions: int64 [L], policy version that generated the token; -1 where not generated.
        reward: the episode's scalar reward.
        group_id: samples of one prompt share it; group statistics are taken over its episodes.
        episode_id: sequences (turns) of one episode share it.
        turn_index: position of this sequence in its episode, from 0.
        prompt_id: stable name of the prompt, for logs and errors.
        finish_reason: why generation ended ("stop", "length", ...).
        temperature: sampling temperature, > 0.
        metadata: anything JSON-able a workflow wants to see again in logs.
        images: int32 [L], -1 or an index into `pictures` for each token; None without pictures. A picture's tokens are
            all there, untrained, with text between it and the next (`app/pictures.py`).
        pictures: what they show, each once.
        routes: the experts that the engine sent tokens to; None where it did not say.

    Per-token fields may be given as lists or arrays.

    Raises:
        BatchError: a field that is no such number, or of another length, naming it.
    """

    tokens: Tensor
    loss_mask: Tensor
    behavior_logprobs: Tensor
    versions: Tensor
    reward: float
    group_id: int
    episode_id: int
    turn_index: int = 0
    prompt_id: str = ""
    finish_reason: str = "stop"
    temperature: float = 1.0
    metadata: dict[str, Any] = field(default_factory=dict)
    images: Tensor | None = None
    pictures: tuple[Picture, ...] = ()
    routes: Routes | None = None

    def __post_init__(self) -> None:
        name = self.name
        for key, dtype in _TOKEN_DTYPES.items():
            setattr(self, key, as_tensor(getattr(self, key), dtype, f"Trajectory.{key} of {name}"))
        for key in ("reward", "temperature"):
            setattr(self, key, as_number(getattr(self, key), f"Trajectory.{key} of {name}"))
        for key in _IDS:
            setattr(self, key, as_number(getattr(self, key), f"Trajectory.{key} of {name}", numbers.Integral))
        length = self.tokens.numel()
        if length == 0:
            raise BatchError(f"Trajectory.tokens of {name} is empty: a training sequence needs at least one token")
        for key in _TOKEN_DTYPES:
            got = getattr(self, key).numel()
            if got != length:
                raise BatchError(f"Trajectory.{key} of {name} has {got} entries but tokens has {length}: align them")
        self.pictures = tuple(self.pictures)
        self.images = checked(self.images, self.pictures, self.loss_mask, f"Trajectory.images of {name}")
        if self.routes is not None and self.routes.index.numel() != length:
            got = self.routes.index.numel()
            raise BatchError(f"Trajectory.routes of {name} has {got} entries but tokens has {length}: align them")

    @property
    def name(self) -> str:
        """What errors call it."""
        return self.prompt_id or f"episode {self.episode_id}"


def ranges(bounds: Tensor, chosen: Sequence[int] | Tensor) -> Tensor:
    """int64: the ranges [bounds[i], bounds[i + 1]) of `chosen`, one after another. `bounds`: int64 [N + 1], rising."""
    picked = torch.as_tensor(chosen, dtype=torch.int64)
    starts, lengths = bounds[:-1][picked], bounds.diff()[picked]
    ends = lengths.cumsum(0)
    return torch.arange(int(lengths.sum())) + (starts - (ends - lengths)).repeat_interleave(lengths)


class RolloutBatch:
    """Many trajectories as flat tensors; sequence i is `tokens[cu_seqlens[i]:cu_seqlens[i + 1]]`.

    Not a dataclass and without a `.to` method on purpose: Lightning moves and casts what it can look into,
    and `bf16-true` would round log-probabilities.

    Attributes (T = total tokens, N = sequences):
        tokens, loss_mask, behavior_logprobs, versions: [T], as in `Trajectory`.
        cu_seqlens: int64 [N + 1], from 0 to T.
        rewards, temperatures: float32 [N]; group_ids, episode_ids, turn_indices: int64 [N].
        prompt_ids, finish_reasons: N strings. metadata: N dicts.
        images: int32 [T], -1 or an index into `pictures` (distinct by key), as in `Trajectory`; None without pictures.
        routes: the experts that tokens were sent to when they were sampled; None where nothing is known of any.
        columns: named float32 [T] tensors added on the way, 0 on tokens that are not trained. Those of this project:

            name          what                                       written by (rank 0)   read by
            proximal      log-probability, nats, of the policy at    PolicyModule          objectives (as `old`), costs
                          the start of the batch                                           in the reward
            reference     that of the reference policy               PolicyModule          objectives, regularisers
            likely_id_k,  the reference's likeliest tokens, k from 0,  PolicyModule       losses, as `soft`
            likely_p_k    and their probabilities
            token_rewards costs in the reward, rewards of calls      PolicyModule          advantages, objectives of
                                                                                           whole steps
            advantages    units of (normalised) reward               PolicyModule          objectives
            values        the critic's at the start of the batch     ActorCriticModule     advantages, value loss
            returns       what values are to become, of reward       PolicyModule          value loss
            value_mask    1 where values are trained                 PolicyModule          value loss

        A rank's part of a step has of these what its loss reads, and what belongs to the step alone (`step_columns`):

            weights       what a token's loss counts                 TreeModule            every loss
            value_weights what its value loss counts                 ActorCriticModule     value loss
            gradient      of the objective of a whole step, by       PolicyModule          the policy's loss
                          the token's log-probability
            groups        how many of the step are compared          RewardModule          its loss

    Raises:
        BatchError: empty batch, field of another length or dtype, negative token id; a reward beyond 1e9, a temperature
    """

    def __init__(
        self,
        *,
        tokens: Tensor,
        loss_mask: Tensor,
        behavior_logprobs: Tensor,
        versions: Tensor,
        cu_seqlens: Tensor,
        rewards: Tensor,
        group_ids: Tensor,
        episode_ids: Tensor,
        turn_indices: Tensor,
        temperatures: Tensor,
        prompt_ids: Sequence[str],
        finish_reasons: Sequence[str],
        metadata: Sequence[dict[str, Any]] | None = None,
        columns: dict[str, Tensor] | None = None,
        images: Tensor | None = None,
        pictures: Sequence[Picture] = (),
        routes: BatchRoutes | None = None,
    ) -> None:
        self.tokens = tokens
        self.loss_mask = loss_mask
        self.behavior_logprobs = behavior_logprobs
        self.versions = versions
        self.cu_seqlens = cu_seqlens
        self.rewards = rewards
        self.group_ids = group_ids
        self.episode_ids = episode_ids
        self.turn_indices = turn_indices
        self.temperatures = temperatures
        self.prompt_ids = list(prompt_ids)
        self.finish_reasons = list(finish_reasons)
        self.metadata = list(metadata) if metadata is not None else [{} for _ in self.prompt_ids]
        self.images, self.pictures, self.routes = images, tuple(pictures), routes
        self.columns: dict[str, Tensor] = {}
        self._validate()
        for name, value in (columns or {}).items():
            self.add_column(name, value)

    @classmethod
    def from_trajectories(cls, trajectories: Iterable[Trajectory]) -> RolloutBatch:
        """Concatenates trajectories in the order given. Raises BatchError when there are none."""
        items = list(trajectories)
        if not items:
            raise BatchError("RolloutBatch: empty batch, there is no trajectory in it; wait for at least one group")
        lengths = torch.tensor([0] + [t.tokens.numel() for t in items])
        images, pictures = merged((t.images, t.pictures, t.tokens.numel()) for t in items)
        return cls(
            tokens=torch.cat([t.tokens for t in items]),
            loss_mask=torch.cat([t.loss_mask for t in items]),
            behavior_logprobs=torch.cat([t.behavior_logprobs for t in items]),
            versions=torch.cat([t.versions for t in items]),
            cu_seqlens=lengths.cumsum(0),
            # Workflows set rewards late, after a trajectory has checked its own.
            rewards=torch.tensor(
                [as_number(t.reward, f"Trajectory.reward of {t.name}") for t in items], dtype=torch.float32
            ),
            group_ids=torch.tensor([t.group_id for t in items], dtype=torch.int64),
            episode_ids=torch.tensor([t.episode_id for t in items], dtype=torch.int64),
            turn_indices=torch.tensor([t.turn_index for t in items], dtype=torch.int64),
            temperatures=torch.tensor([t.temperature for t in items], dtype=torch.float32),
            prompt_ids=[t.prompt_id for t in items],
            finish_reasons=[t.finish_reason for t in items],
            metadata=[t.metadata for t in items],
            images=images,
            pictures=pictures,
            routes=BatchRoutes.merged((t.routes, t.tokens.numel()) for t in items),
        )

    @property
    def num_sequences(self) -> int:
        return len(self.prompt_ids)

    @property
    def num_tokens(self) -> int:
        """Dense tokens: every sequence counted alone."""
        return self.tokens.numel()

    def __len__(self) -> int:
        return self.num_sequences

    def lengths(self) -> Tensor:
        """int64 [N], tokens of each sequence."""
        return self.cu_seqlens.diff()

    def split(self, values: Tensor) -> list[Tensor]:
        """Views of a flat [T] tensor, one [L_i] a sequence."""
        return list(values.split(self.lengths().tolist()))

    def sequences(self) -> list[Tensor]:
        """Token ids of each sequence: int64 [L_i] views."""
        return self.split(self.tokens)

    def flat_index(self, indices: Sequence[int] | Tensor) -> Tensor:
        """int64 positions in the flat tensors of the sequences `indices`, in that order, without a loop over tokens."""
        return ranges(self.cu_seqlens, indices)

    def select(self, indices: Sequence[int] | Tensor) -> RolloutBatch:
        """A new batch of the sequences `indices`, in that order (columns included; of pictures and routes theirs)."""
        chosen = torch.as_tensor(indices, dtype=torch.int64)
        flat = self.flat_index(chosen)
        picks = chosen.tolist()
        images, pictures = used(None if self.images is None else self.images[flat], self.pictures)
        return RolloutBatch(
            **{name: getattr(self, name)[flat] for name in _TOKEN_DTYPES},
            **{name: getattr(self, name)[chosen] for name in _SEQUENCE_DTYPES},
            cu_seqlens=torch.cat([torch.zeros(1, dtype=torch.int64), self.lengths()[chosen].cumsum(0)]),
            prompt_ids=[self.prompt_ids[i] for i in picks],
            finish_reasons=[self.finish_reasons[i] for i in picks],
            metadata=[self.metadata[i] for i in picks],
            columns={name: value[flat] for name, value in self.columns.items()},
            images=images,
            pictures=pictures,
            routes=None if self.routes is None else self.routes.pointing(self.routes.index[flat]),
        )

    def without(self, *names: Literal["columns", "metadata"]) -> RolloutBatch:
        """A view of the same sequences without their columns, their metadata (each an empty dict), or both."""
        for name in names:
            if name not in ("columns", "metadata"):
                raise ValueError(f"RolloutBatch.without: '{name}' is not one of columns, metadata")
        view = copy.copy(self)
        view.columns = {} if "columns" in names else dict(self.columns)
        view.metadata = [{} for _ in self.prompt_ids] if "metadata" in names else self.metadata
        return view

    def with_columns(self, columns: Mapping[str, Tensor]) -> RolloutBatch:
        """A view of the same sequences with these columns and no others: float32 [T], checked as by `add_column`."""
        view = self.without("columns")
        for name, values in columns.items():
            view.add_column(name, values)
        return view

    def with_rewards(self, rewards: Tensor) -> RolloutBatch:
        """A view of the same sequences with other rewards: float32 [N], checked as those of any batch."""
        view = self.without()
        view.rewards = rewards
        view._validate()
        return view

    def add_column(self, name: str, values: Tensor) -> None:
        """Attaches a per-token float32 [T] tensor under `name` (replaces one of the same name)."""
        if values.shape != self.tokens.shape:
            raise BatchError(
                f"RolloutBatch column '{name}' has shape {tuple(values.shape)}, tokens {tuple(self.tokens.shape)}"
            )
        self.columns[name] = values.float()

    def tensors(self) -> dict[str, Tensor]:
        """All tensors but pictures by name, for shipping between ranks; columns are prefixed with `columns.`."""
        named = {name: getattr(self, name) for name in (*_TOKEN_DTYPES, *_SEQUENCE_DTYPES, "cu_seqlens")}
        if self.images is not None:
            named["images"] = self.images
        if self.routes is not None:
            named |= {"routes": self.routes.index, "route_table": self.routes.table}
        named.update({f"columns.{name}": value for name, value in self.columns.items()})
        return named

    @classmethod
    def from_tensors(
        cls,
        tensors: dict[str, Tensor],
        prompt_ids: Sequence[str],
        finish_reasons: Sequence[str],
        metadata: Sequence[dict[str, Any]] | None = None,
        pictures: Sequence[Picture] = (),
    ) -> RolloutBatch:
        """The inverse of `tensors()`."""
        prefix = "columns."
        columns = {name[len(prefix) :]: value for name, value in tensors.items() if name.startswith(prefix)}
        fields: dict[str, Any] = {name: value for name, value in tensors.items() if not name.startswith(prefix)}
        routes = BatchRoutes(fields.pop("routes"), fields.pop("route_table")) if "routes" in fields else None
        texts: dict[str, Any] = {"prompt_ids": prompt_ids, "finish_reasons": finish_reasons, "metadata": metadata}
        return cls(**fields, **texts, columns=columns, pictures=pictures, routes=routes)

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raises BatchError, naming sequence and position, when a token id is outside `[0, vocab_size)`."""
        bad = (self.tokens >= vocab_size).nonzero()
        if bad.numel():
            at = int(bad[0])
            raise BatchError(
                f"RolloutBatch.tokens: id {int(self.tokens[at])} at {self._where(at)} is outside the model's vocabulary"
                f" of {vocab_size}; use the tokenizer that belongs to the model"
            )

    def _where(self, flat_position: int) -> str:
        sequence = int(torch.searchsorted(self.cu_seqlens, flat_position, right=True)) - 1
        position = flat_position - int(self.cu_seqlens[sequence])
        return f"position {position} of sequence {sequence} (prompt '{self.prompt_ids[sequence]}')"

    def _validate(self) -> None:
        count = len(self.prompt_ids)
        if count == 0:
            raise BatchError("RolloutBatch: empty batch, there is no trajectory in it; wait for at least one group")
        total = self.tokens.numel()
        for names, size in ((_TOKEN_DTYPES, total), (_SEQUENCE_DTYPES, count)):
            for name, dtype in names.items():
                value = getattr(self, name)
                if value.shape != (size,) or value.dtype != dtype:
                    raise BatchError(
                        f"RolloutBatch.{name}: expected {dtype} of shape ({size},),"
                        f" got {value.dtype} of shape {tuple(value.shape)}"
                    )
        for name in ("finish_reasons", "metadata"):
            if len(getattr(self, name)) != count:
                raise BatchError(f"RolloutBatch.{name}: expected {count} entries, got {len(getattr(self, name))}")
        bounds = self.cu_seqlens
        if bounds.shape != (count + 1,) or bounds.dtype != torch.int64:
            raise BatchError(
                f"RolloutBatch.cu_seqlens: expected int64 of shape ({count + 1},), got {tuple(bounds.shape)}"
            )
        if int(bounds[0]) != 0 or int(bounds[-1]) != total or bool((bounds.diff() < 1).any()):
            raise BatchError(f"RolloutBatch.cu_seqlens: must rise strictly from 0 to {total} (no empty sequence)")
        shown = batch_fault(self.images, self.pictures, self.cu_seqlens, self.loss_mask)
        wrong = {"images": shown, "routes": None if self.routes is None else self.routes.fault(total)}
        for name, (at, why) in ((name, found) for name, found in wrong.items() if found is not None):
            raise BatchError(f"RolloutBatch.{name}{'' if at is None else f' at {self._where(at)}'}: {why}")
        logprobs, mask = self.behavior_logprobs, self.loss_mask
        checks = (
            ("tokens", self.tokens < 0, "token ids are never negative"),
            (
                "behavior_logprobs",
                mask & ~torch.isfinite(logprobs),
                "a trained token needs a finite log-probability from its sampler",
            ),
            (
                "behavior_logprobs",
                mask & (logprobs > _HIGHEST_LOGPROB),
                "log-probabilities are never above 0; give natural logarithms, not probabilities",
            ),
            (
                "behavior_logprobs",
                mask & (logprobs < _LOWEST_LOGPROB),
                "no sampler draws a token so unlikely; do not train tokens whose log-probability is a placeholder",
            ),
        )
        for name, bad, remedy in checks:
            if bool(bad.any()):
                at = int(bad.nonzero()[0])
                raise BatchError(f"RolloutBatch.{name}: {getattr(self, name)[at]} at {self._where(at)}: {remedy}")
        coldest, hottest = TEMPERATURES
        extreme = ~((self.temperatures >= coldest * (1 - 1e-6)) & (self.temperatures <= hottest))  # nan too
        for name, bad, remedy in (
            ("rewards", ~torch.isfinite(self.rewards), "drop the group whose reward failed"),
            ("rewards", self.rewards.abs() > LARGEST_REWARD, f"must lie within {LARGEST_REWARD:g}: scale it down"),
            ("temperatures", extreme, f"sampling temperature must be between {coldest:g} and {hottest:g}"),
        ):
            if bool(bad.any()):
                i = int(bad.nonzero()[0])
                raise BatchError(
                    f"RolloutBatch.{name}: {getattr(self, name)[i]} for sequence {i}"
                    f" (prompt '{self.prompt_ids[i]}'): {remedy}"
                )


class StepHandle:
    """One optimizer step of a training batch: a loader yields a batch `count` times (minibatches x epochs), with rising
    `index`; one that was left in the middle is taken up at the step after the last that was done. Opaque to Lightning,
    as the batch.

    Attributes:
        batch: the whole rollout batch, or None on ranks that do not own the stream.
        index: which of the batch's steps this is, from 0; at 0 the module prepares the batch.
        count: optimizer steps the batch takes.
    """

    __slots__ = ("batch", "count", "index")

    def __init__(self, batch: RolloutBatch | None, index: int, count: int) -> None:
        if not 0 <= index < count:
            raise ValueError(f"StepHandle.index {index}: must be in [0, count) with count {count}")
        self.batch = batch
        self.index = index
        self.count = count

    def __repr__(self) -> str:
        held = "no batch" if self.batch is None else f"{len(self.batch)} sequences"
        return f"StepHandle({held}, step {self.index + 1} of {self.count})"


class EvalHandle:
    """One batch of held-out episodes, rolled out at one policy version.

    Attributes:
        batch: the episodes, whole groups of them, or None on ranks that do not own the stream.
        name: name of the prompt set, for logs.
        prefix: of the set's metrics, "" or "<name>/".
        samples: episodes that were asked for of each prompt.
        ks: of pass@k; none for the mean reward alone.
        solved_at: an episode with at least this reward has solved its prompt.
        prompts: how many were played, 0 where that is not known; those without an episode are not in the batch.
    """

    __slots__ = ("batch", "ks", "name", "prefix", "prompts", "samples", "solved_at")

    def __init__(
        self,
        batch: RolloutBatch | None,
        name: str,
        prefix: str = "",
        samples: int = 1,
        ks: Sequence[int] = (),
        solved_at: float = 1.0,
        prompts: int = 0,
    ) -> None:
        self.batch, self.name, self.prefix = batch, name, prefix
        self.prompts, self.samples, self.ks, self.solved_at = prompts, samples, tuple(ks), solved_at

    def __repr__(self) -> str:
        held = "no batch" if self.batch is None else f"{len(self.batch)} sequences"
        return f"EvalHandle({held} of '{self.name}')"
