"""A group: all episodes of one prompt, the unit that is admitted, dropped, trained on and saved.

Promises: saved and loaded groups are equal in every field; what is saved are tensors and primitives.
"""

from __future__ import annotations

import json
import numbers
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from app.batch import CALL_REWARD, LARGEST_REWARD, UNTRAINABLE_CALLS, BatchError, RolloutBatch, Trajectory
from app.fields import as_number
from app.pictures import Picture, used

_NUMBERS = {CALL_REWARD: numbers.Real, UNTRAINABLE_CALLS: numbers.Integral}  # of an episode's metadata


@dataclass(frozen=True)
class Group:
    """All episodes of one prompt.

    Attributes:
        index: position of the prompt in the stream; also the group id of its trajectories.
        prompt_id: name of the prompt.
        admitted_at: policy version when the group was admitted.
        trajectories: of all samples, in order of samples and turns.
    """

    index: int
    prompt_id: str
    admitted_at: int
    trajectories: list[Trajectory]


def earned(turns: Sequence[Trajectory]) -> float:
    """What the episode of these training sequences earned: its reward, and what single calls were given on top.

    Raises:
        BatchError: such a reward that is no number within the range of rewards.
    """
    total = turns[0].reward
    for one in turns:
        value = one.metadata.get(CALL_REWARD, 0.0)
        if type(value) not in (int, float) or not abs(value) <= LARGEST_REWARD:
            raise BatchError(
                f"Trajectory.metadata of {one.name}: {CALL_REWARD} is {str(value)[:40]}; it must be a finite number"
                f" within {LARGEST_REWARD:g}"
            )
        total += value
    return total


def check_credit(turns: Sequence[Trajectory]) -> None:
    """That the training sequences of an episode can be credited with what it earned. Numbers of ours in their metadata
    become plain ones, whatever library they are of: files have no others.

    Raises:
        BatchError: they have different rewards, a call has a reward and no trained token, or a sequence's first token,
            which nothing precedes, is trained; a number of calls that is none; or as `earned`.
    """
    given = [as_number(one.reward, f"Trajectory.reward of {one.name}") for one in turns]  # set late, by a workflow
    rewards = torch.tensor(given, dtype=torch.float32)
    least, most = float(rewards.min()), float(rewards.max())
    if least < most:  # what is no number is refused by that name elsewhere
        raise BatchError(
            f"Trajectory.reward: an episode has one, not {least:g} and {most:g}; give all its sequences the same, and"
            f" single calls theirs by the metadata {CALL_REWARD}"
        )
    for one in turns:
        if bool(one.loss_mask[:1].any()):
            raise BatchError(
                f"Trajectory.loss_mask of {one.name}: True at position 0, which nothing precedes; begin with a prompt"
                " or a start token"
            )
        for key, kind in _NUMBERS.items():
            if key in one.metadata:
                where = f"Trajectory.metadata of {one.name}: {key}"
                one.metadata[key] = value = as_number(one.metadata[key], where, kind)
                if not abs(value) <= LARGEST_REWARD:  # nor NaN
                    said = str(value)[:40]
                    raise BatchError(f"{where} is {said}; it must be a finite number within {LARGEST_REWARD:g}")
        if CALL_REWARD in one.metadata and not bool(one.loss_mask.any()):
            raise BatchError(
                f"Trajectory.metadata of {one.name}: {CALL_REWARD}, and none of its tokens is trained; add it to the"
                " episode's reward"
            )
    earned(turns)


def label(trajectories: list[Trajectory], index: int, sample: int, group_size: int) -> list[Trajectory]:
    """Gives the trajectories of one episode their group and episode ids, unique in the stream."""
    return [replace(one, group_id=index, episode_id=index * group_size + sample) for one in trajectories]


def to_batch(groups: Iterable[Group]) -> RolloutBatch:
    """One batch of all trajectories, groups in the order given."""
    return RolloutBatch.from_trajectories(one for group in groups for one in group.trajectories)


def pack(groups: list[Group]) -> dict[str, Any]:
    """Groups as tensors and primitives, for a checkpoint; with pictures, each distinct one once."""
    if not groups:
        return {}
    batch = to_batch(groups)
    shown = [(one.key.hex(), one.tokens, torch.from_numpy(one.pixels.copy())) for one in batch.pictures]
    return {
        **({"pictures": shown} if shown else {}),
        "groups": [(group.index, group.prompt_id, group.admitted_at, len(group.trajectories)) for group in groups],
        "tensors": batch.tensors(),
        "prompt_ids": batch.prompt_ids,
        "finish_reasons": batch.finish_reasons,
        "metadata": json.dumps(batch.metadata, default=str),
    }


def unpack(packed: dict[str, Any]) -> list[Group]:
    """The inverse of `pack`. Raises ValueError for groups that do not hold every trajectory once."""
    if not packed:
        return []
    pictures = [
        Picture(bytes.fromhex(key), pixels.numpy(), tokens) for key, tokens, pixels in packed.get("pictures", ())
    ]
    batch = RolloutBatch.from_tensors(
        packed["tensors"], packed["prompt_ids"], packed["finish_reasons"], json.loads(packed["metadata"]), pictures
    )
    trajectories = _trajectories(batch)
    counts = [count for *_, count in packed["groups"]]
    if any(count < 1 for count in counts) or sum(counts) != len(trajectories):
        raise ValueError(f"groups: of {counts} trajectories, but there are {len(trajectories)}")
    groups = []
    for index, prompt_id, admitted_at, count in packed["groups"]:
        groups.append(Group(index, prompt_id, admitted_at, trajectories[:count]))
        trajectories = trajectories[count:]
    return groups


def _trajectories(batch: RolloutBatch) -> list[Trajectory]:
    fields = {
        name: batch.split(getattr(batch, name)) for name in ("tokens", "loss_mask", "behavior_logprobs", "versions")
    }
    images = [None] * len(batch) if batch.images is None else batch.split(batch.images)
    shown = [used(own, batch.pictures) for own in images]
    routes = [None] * len(batch) if batch.routes is None else batch.routes.split(batch.cu_seqlens.tolist())
    return [
        Trajectory(
            **{name: values[i].clone() for name, values in fields.items()},
            reward=float(batch.rewards[i]),
            group_id=int(batch.group_ids[i]),
            episode_id=int(batch.episode_ids[i]),
            turn_index=int(batch.turn_indices[i]),
            prompt_id=batch.prompt_ids[i],
            finish_reason=batch.finish_reasons[i],
            temperature=float(batch.temperatures[i]),
            metadata=batch.metadata[i],
            images=shown[i][0],
            pictures=shown[i][1],
            routes=routes[i],
        )
        for i in range(len(batch))
    ]
