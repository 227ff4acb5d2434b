"""The data that flows through every room: `Trajectory` (one training sequence), `RolloutBatch` (many, flat), and the
handles on batches that loaders yield.

Promises: a `RolloutBatch` that exists is valid (checked once, at construction, by an error that names the
field and the sequence); its tensors are never cast or moved behind its back (Lightning's device and
precision conversions see an opaque object). Imports nothing of the project.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

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
FINAL_ANSWER = "final_answer"
"""Key of a held-out episode's metadata with the answer it votes for; "" for none."""


class BatchError(ValueError):
    """Data that cannot be trained on; the message names the field, the sequence and the remedy."""


@dataclass(eq=False)
class Trajectory:
    """One training sequence, as the inference engine produced it (nothing is re-tokenized).

    Attributes:
        tokens: int64 [L], prompt and generated tokens in order.
        loss_mask: bool [L], True on tokens that are trained.
        behavior_logprobs: float32 [L], the sampler's log-probability of each generated token, in nats, of
            softmax(logits / temperature); 0.0 where not generated.
        versions: int64 [L], policy version that generated the token; -1 where not generated.
        reward: the episode's scalar reward.
        group_id: samples of one prompt share it; group statistics are taken over its episodes.
        episode_id: sequences (turns) of one episode share it.
        turn_index: position of this sequence in its episode, from 0.
        prompt_id: stable name of the prompt, for logs and errors.
        finish_reason: why generation ended ("stop", "length", ...).
        temperature: sampling temperature, > 0.
        metadata: anything JSON-able a workflow wants to see again in logs.
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

    def __post_init__(self) -> None:
        name = self.prompt_id or f"episode {self.episode_id}"
        for key, dtype in _TOKEN_DTYPES.items():
            value = torch.as_tensor(getattr(self, key))
            if value.dim() != 1:
                raise BatchError(f"Trajectory.{key} of {name}: expected a 1-D tensor, got shape {tuple(value.shape)}")
            if key in ("tokens", "versions") and value.is_floating_point():
                raise BatchError(f"Trajectory.{key} of {name}: expected integers, got {value.dtype}")
            setattr(self, key, value.to(dtype))
        length = self.tokens.numel()
        if length == 0:
            raise BatchError(f"Trajectory.tokens of {name} is empty: a training sequence needs at least one token")
        for key in _TOKEN_DTYPES:
            got = getattr(self, key).numel()
            if got != length:
                raise BatchError(f"Trajectory.{key} of {name} has {got} entries but tokens has {length}: align them")


class RolloutBatch:
    """Many trajectories as flat tensors; sequence i is `tokens[cu_seqlens[i]:cu_seqlens[i + 1]]`.

    Not a dataclass and without a `.to` method on purpose: Lightning moves and casts what it can look into,
    and `bf16-true` would round log-probabilities.

    Attributes (T = total tokens, N = sequences):
        tokens, loss_mask, behavior_logprobs, versions: [T], as in `Trajectory`.
        cu_seqlens: int64 [N + 1], from 0 to T.
        rewards, temperatures: float32 [N]; group_ids, episode_ids, turn_indices: int64 [N].
        prompt_ids, finish_reasons: N strings. metadata: N dicts.
        columns: named float32 [T] tensors added on the way (reference, proximal, values, advantages).

    Raises:
        BatchError: empty batch, field of another length or dtype, negative token id, non-finite reward or
            log-probability on a trained token, temperature not above 0.
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
        return cls(
            tokens=torch.cat([t.tokens for t in items]),
            loss_mask=torch.cat([t.loss_mask for t in items]),
            behavior_logprobs=torch.cat([t.behavior_logprobs for t in items]),
            versions=torch.cat([t.versions for t in items]),
            cu_seqlens=lengths.cumsum(0),
            rewards=torch.tensor([t.reward for t in items], dtype=torch.float32),
            group_ids=torch.tensor([t.group_id for t in items], dtype=torch.int64),
            episode_ids=torch.tensor([t.episode_id for t in items], dtype=torch.int64),
            turn_indices=torch.tensor([t.turn_index for t in items], dtype=torch.int64),
            temperatures=torch.tensor([t.temperature for t in items], dtype=torch.float32),
            prompt_ids=[t.prompt_id for t in items],
            finish_reasons=[t.finish_reason for t in items],
            metadata=[t.metadata for t in items],
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
        chosen = torch.as_tensor(indices, dtype=torch.int64)
        lengths = self.lengths()[chosen]
        starts = self.cu_seqlens[:-1][chosen]
        ends = lengths.cumsum(0)
        total = int(lengths.sum())
        return torch.arange(total) + (starts - (ends - lengths)).repeat_interleave(lengths)

    def select(self, indices: Sequence[int] | Tensor) -> RolloutBatch:
        """A new batch of the sequences `indices`, in that order (columns included)."""
        chosen = torch.as_tensor(indices, dtype=torch.int64)
        flat = self.flat_index(chosen)
        picks = chosen.tolist()
        return RolloutBatch(
            **{name: getattr(self, name)[flat] for name in _TOKEN_DTYPES},
            **{name: getattr(self, name)[chosen] for name in _SEQUENCE_DTYPES},
            cu_seqlens=torch.cat([torch.zeros(1, dtype=torch.int64), self.lengths()[chosen].cumsum(0)]),
            prompt_ids=[self.prompt_ids[i] for i in picks],
            finish_reasons=[self.finish_reasons[i] for i in picks],
            metadata=[self.metadata[i] for i in picks],
            columns={name: value[flat] for name, value in self.columns.items()},
        )

    def add_column(self, name: str, values: Tensor) -> None:
        """Attaches a per-token float32 [T] tensor under `name` (replaces one of the same name)."""
        if values.shape != self.tokens.shape:
            raise BatchError(
                f"RolloutBatch column '{name}' has shape {tuple(values.shape)}, tokens {tuple(self.tokens.shape)}"
            )
        self.columns[name] = values.float()

    def tensors(self) -> dict[str, Tensor]:
        """All tensors by name, for shipping between ranks; columns are prefixed with `columns.`."""
        named = {name: getattr(self, name) for name in (*_TOKEN_DTYPES, *_SEQUENCE_DTYPES, "cu_seqlens")}
        named.update({f"columns.{name}": value for name, value in self.columns.items()})
        return named

    @classmethod
    def from_tensors(
        cls,
        tensors: dict[str, Tensor],
        prompt_ids: Sequence[str],
        finish_reasons: Sequence[str],
        metadata: Sequence[dict[str, Any]] | None = None,
    ) -> RolloutBatch:
        """The inverse of `tensors()`."""
        prefix = "columns."
        columns = {name[len(prefix) :]: value for name, value in tensors.items() if name.startswith(prefix)}
        fields = {name: value for name, value in tensors.items() if not name.startswith(prefix)}
        return cls(**fields, prompt_ids=prompt_ids, finish_reasons=finish_reasons, metadata=metadata, columns=columns)

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
        checks = (
            ("tokens", self.tokens < 0, "token ids are never negative"),
            (
                "behavior_logprobs",
                self.loss_mask & ~torch.isfinite(self.behavior_logprobs),
                "a trained token needs a finite log-probability from its sampler",
            ),
        )
        for name, bad, remedy in checks:
            if bool(bad.any()):
                at = int(bad.nonzero()[0])
                raise BatchError(f"RolloutBatch.{name}: {getattr(self, name)[at]} at {self._where(at)}: {remedy}")
        for name, bad, remedy in (
            ("rewards", ~torch.isfinite(self.rewards), "drop the group whose reward failed"),
            ("temperatures", ~(self.temperatures > 0), "sampling temperature must be above 0"),
        ):
            if bool(bad.any()):
                i = int(bad.nonzero()[0])
                raise BatchError(
                    f"RolloutBatch.{name}: {getattr(self, name)[i]} for sequence {i}"
                    f" (prompt '{self.prompt_ids[i]}'): {remedy}"
                )


class StepHandle:
    """One optimizer step of a training batch: a loader yields a batch `count` times (minibatches x epochs), with rising
    `index`. Opaque to Lightning, as the batch.

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
    """

    __slots__ = ("batch", "ks", "name", "prefix", "samples", "solved_at")

    def __init__(
        self,
        batch: RolloutBatch | None,
        name: str,
        prefix: str = "",
        samples: int = 1,
        ks: Sequence[int] = (),
        solved_at: float = 1.0,
    ) -> None:
        self.batch = batch
        self.name = name
        self.prefix = prefix
        self.samples = samples
        self.ks = tuple(ks)
        self.solved_at = solved_at

    def __repr__(self) -> str:
        held = "no batch" if self.batch is None else f"{len(self.batch)} sequences"
        return f"EvalHandle({held} of '{self.name}')"
