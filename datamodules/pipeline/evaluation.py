"""Rolls out held-out prompts: no gate, no groups to keep whole, everything sent at once.

Promises: one failed episode costs itself only, and is counted in a warning; none is scored 0 in silence.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any

from app.batch import Trajectory
from datamodules.groups import Group, label, to_batch
from datamodules.pending import Pending, Pulse
from datamodules.pipeline.episodes import EpisodePlayer
from datamodules.processes import foreign
from datamodules.prompts.base import Prompt

_log = logging.getLogger(__name__)


async def evaluate(
    player: EpisodePlayer,
    prompts: Sequence[Prompt],
    *,
    samples: int,
    temperature: float,
    seed: str,
    pending: dict[Any, Pending],
    pulse: Pulse,
) -> list[Group]:
    """Plays `samples` episodes of every prompt.

    Args:
        player: plays episodes.
        prompts: encoded.
        samples: episodes of each prompt.
        temperature: of sampling; 0 is greedy.
        seed: of the sampling.
        pending: kept up to date with what is being played.
        pulse: beaten whenever something arrives.

    Returns:
        One group a prompt, without the episodes that failed (and without prompts none of whose episodes is left).

    Raises:
        RuntimeError: every episode failed.
    """
    failures: list[str] = []
    version = player.engine.version

    async def sample(at: int, number: int) -> list[Trajectory]:
        prompt = prompts[at]
        pending[at, number] = table = Pending(prompt.id, pulse)
        try:
            trajectories = await player.play(
                prompt,
                name=f"validation/{prompt.id}#{number}",
                seed=f"{seed}/{prompt.id}/{number}",
                sample=number,
                temperature=temperature,
                pending=table,
            )
            trajectories = label(trajectories, at, number, samples)
            to_batch([Group(at, prompt.id, version, trajectories)])
            return trajectories
        except Exception as error:
            failures.append(f"prompt '{prompt.id}': {foreign.described(error)}")
            return []
        finally:
            del pending[at, number]

    episodes = await asyncio.gather(*(sample(at, number) for at in range(len(prompts)) for number in range(samples)))
    if failures:
        what = f"validation: {len(failures)} of {len(episodes)} episodes failed"
        if len(failures) == len(episodes):
            raise RuntimeError(f"{what}; the first: {failures[0]}")
        _log.warning("%s and are left out; the first: %s", what, failures[0])
    groups = []
    for at, prompt in enumerate(prompts):
        trajectories = [one for episode in episodes[at * samples : (at + 1) * samples] for one in episode]
        if trajectories:
            groups.append(Group(at, prompt.id, version, trajectories))
    return groups
