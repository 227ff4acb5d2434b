"""Recorded batches as episodes for `RecordedDataModule`: what a gateway or a run has recorded, to imitate or compare.

Promises: token ids, trained positions and pictures are the recorded ones, and nothing is tokenized; the episodes of one
prompt are its trials, numbered in the order in which they were recorded.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from app.pictures import Picture
from datamodules.conversations.tokens import Bools, Ints, RecordedDataError, Workload
from datamodules.files.recording import read_batch, versions
from datamodules.groups import earned


@dataclass(frozen=True, eq=False)
class Session:
    """One recorded episode; the attributes are those of a `Conversation`, and

    Attributes:
        is_rewarded: whether anybody said what it was worth; `reward` is 0.0 otherwise.
        calls: (tokens [L], trained [L]) of each of its sequences.
        seen: (images [L] or None, pictures) of each, as in `Trajectory`.
    """

    task: str
    trial: int
    model: str
    reward: float
    source: str
    is_rewarded: bool
    calls: list[tuple[Ints, Bools]]
    seen: list[tuple[Tensor | None, tuple[Picture, ...]]]

    def sequences(self, workload: Workload, think_ids: Sequence[int] = ()) -> list[tuple[Ints, Bools]]:
        """Its training sequences, as recorded."""
        return self.calls


def load_sessions(directory: Path) -> list[Session]:
    """The episodes of the batches in `directory`, in the order of their versions.

    Raises:
        RecordedDataError: there are none. RecordingError: a file that cannot be read.
    """
    found: list[Session] = []
    trials: Counter[str] = Counter()
    for version in versions(directory):
        for group in read_batch(directory, version):
            for episode in dict.fromkeys(one.episode_id for one in group.trajectories):
                mine = [one for one in group.trajectories if one.episode_id == episode]
                found.append(
                    Session(
                        task=group.prompt_id,
                        trial=trials[group.prompt_id],
                        model="",
                        reward=earned(mine),
                        source=f"{directory} batch {version} episode {episode}",
                        is_rewarded=all(one.metadata.get("rewarded", True) for one in mine),
                        calls=[(one.tokens.numpy(), one.loss_mask.numpy()) for one in mine],
                        seen=[(one.images, one.pictures) for one in mine],
                    )
                )
                trials[group.prompt_id] += 1
    if not found:
        raise no_batches(directory)
    return found


def no_batches(directory: Path) -> RecordedDataError:
    """Why nothing in `directory` can be read as recorded batches."""
    if any(directory.glob("conversations_*.jsonl")):
        return RecordedDataError(
            f"{directory}: holds conversations as text (conversations_*.jsonl of a provider's gateway), no recorded"
            " batches: without the token ids that were sampled there is no RL on them. To imitate or compare them, put"
            f" them in one file (cat {directory}/conversations_*.jsonl > all.jsonl) and name that, with a tokenizer"
        )
    return RecordedDataError(f"{directory}: no recorded batches (batch_*.safetensors) in it; name another directory")
