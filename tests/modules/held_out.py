"""Held-out episodes by hand, in two named sets, and what is measured on them."""

from __future__ import annotations

from typing import Any

import torch

from app.batch import FINAL_ANSWER, EvalHandle, RolloutBatch, Trajectory
from tests.helpers.tiny_policy import Batches


def held_out(prompts: dict[str, list[tuple[float, str]]], version: int = -1) -> RolloutBatch:
    """Prompt -> (reward, final answer) of its episodes, which `version` sampled (-1: no engine)."""
    return RolloutBatch.from_trajectories(
        Trajectory(
            tokens=torch.tensor([3, 4, 5]),
            loss_mask=torch.tensor([False, True, True]),
            behavior_logprobs=torch.zeros(3),
            versions=torch.tensor([-1, version, version]),
            reward=reward,
            group_id=group,
            episode_id=100 * group + number,
            prompt_id=prompt,
            metadata={FINAL_ANSWER: answer},
        )
        for group, (prompt, episodes) in enumerate(prompts.items())
        for number, (reward, answer) in enumerate(episodes)
    )


SUMS = {"p": [(1.0, "4"), (0.0, "5")], "q": [(0.0, "6"), (0.0, "7")], "r": [(1.0, "8"), (1.0, "8")]}
GAMES = {"s": [(0.5, "x")]}
NAMED = {
    "accuracy": 3.5 / 7,
    "sums/accuracy": 0.5,
    "sums/pass@1": 0.5,
    "sums/pass@2": 2 / 3,
    "sums/mean@2": 0.5,
    "sums/maj@2": 0.5,
    "games/accuracy": 0.5,
    "games/pass@1": 0.0,
}
COMPARED = {"mismatch_kl", "logprob_diff_max"}  # of the games, with the policy


class Sets(Batches):
    """Two sets, one of them in two batches; rank 0 alone has episodes."""

    def __init__(self) -> None:
        super().__init__([])

    def val_dataloader(self) -> Any:
        first = {name: SUMS[name] for name in ("p", "q")}
        sums = [
            EvalHandle(self._mine(held_out(part)), "sums", "sums/", 2, (1, 2)) for part in (first, {"r": SUMS["r"]})
        ]
        games = [EvalHandle(self._mine(held_out(GAMES, version=0)), "games", "games/", 1, (1,))]
        return [torch.utils.data.DataLoader(handles, batch_size=None) for handles in (sums, games)]

    test_dataloader = val_dataloader
