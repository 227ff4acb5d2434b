"""Missions in the grid worlds of the package minigrid: a prompt is an episode's first view, or a step of a way.

Promises: prompt i depends on i and the options alone; a world is opened again from a prompt's metadata, in the same
state; views are what the agent sees, without a display. Every step of a way shows all views before it, so that trees
share them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from app import checks
from datamodules.files.expressions import Template
from datamodules.prompts.base import Prompt, PromptSource
from datamodules.prompts.extras import needs

_MOVES = (0, 1, 2)  # of minigrid's actions: left, right, forward; the others change the world itself
_NAMES = ("left", "right", "forward", "pickup", "drop", "toggle", "done")
_OPTIONS = ("environment", "seed", "view", "tile", "actions")
TASK = "{mission}. You see what is before you. Answer each picture with one of these words: {actions}."


class GridWorld:
    """One episode of an environment.

    Args:
        environment: its id, such as "MiniGrid-Empty-Random-5x5-v0".
        seed: of the episode.
        view: tiles a side of what the agent sees, an odd number of at least 3; it stands in the middle of the lowest
            row.
        tile: pixels a side of a tile.
        actions: the words for minigrid's actions (left, right, forward, pickup, drop, toggle, done), in that order;
            where there are fewer, the others are not to be had.

    Attributes:
        mission: in English.
        done: whether the episode is over. success: whether the mission is accomplished.

    Raises:
        ValueError: an environment that is not there.
    """

    def __init__(self, environment: str, seed: int, view: int, tile: int, actions: Sequence[str]) -> None:
        needs("minigrid", "minigrid", "MiniGridPrompts")
        import gymnasium
        import minigrid  # registers its environments

        del minigrid
        try:
            made: Any = gymnasium.make(environment, disable_env_checker=True).unwrapped
        except gymnasium.error.Error as error:
            raise ValueError(f"MiniGridPrompts.environment: there is no '{environment}' ({error})") from None
        if not hasattr(made, "get_pov_render"):
            raise ValueError(f"MiniGridPrompts.environment: '{environment}' is none of minigrid's; name one of those")
        self._world = made
        self._world.agent_view_size = view
        self._world.reset(seed=seed)
        self._tile, self._actions = tile, list(actions)
        self.mission = str(self._world.mission)
        self.done = self.success = False

    @classmethod
    def of(cls, prompt: Prompt) -> GridWorld:
        """That of a prompt, at the beginning of its episode. Raises ValueError: one of another source."""
        if stray := [name for name in _OPTIONS if name not in prompt.metadata]:
            raise ValueError(
                f"prompt '{prompt.id}': its metadata has no '{stray[0]}', which says what world it is of; use"
                " MiniGridPrompts"
            )
        return cls(**{name: prompt.metadata[name] for name in _OPTIONS})

    def picture(self) -> npt.NDArray[np.uint8]:
        """What the agent sees: uint8 [view * tile, view * tile, 3]."""
        return np.ascontiguousarray(self._world.get_pov_render(tile_size=self._tile))

    def act(self, word: str) -> bool:
        """Does what a word says. False, and nothing is changed, where it is none of `actions`."""
        if self.done or word not in self._actions:
            return False
        _, reward, terminated, truncated, _ = self._world.step(self._actions.index(word))
        self.done, self.success = terminated or truncated, float(reward) > 0
        return True

    def way(self) -> tuple[str, ...]:
        """A shortest way to success from the beginning of the episode, by turns and steps alone (breadth first). The
        world is left where it was.

        Raises ValueError: there is none.
        """
        world = self._world
        pose, steps = (tuple(world.agent_pos), world.agent_dir), world.step_count
        ways: dict[Any, tuple[str, ...]] = {pose: ()}
        ahead = deque([pose])
        try:
            while ahead:
                at = ahead.popleft()
                for action in _MOVES:
                    world.agent_pos, world.agent_dir, world.step_count = at[0], at[1], 0
                    _, reward, terminated, _, _ = world.step(action)
                    way, there = (*ways[at], self._actions[action]), (tuple(world.agent_pos), world.agent_dir)
                    if terminated and float(reward) > 0:
                        return way
                    if not terminated and there not in ways:
                        ways[there] = way
                        ahead.append(there)
        finally:
            world.agent_pos, world.agent_dir, world.step_count = *pose, steps
        raise ValueError(
            f"MiniGridPrompts.steps: '{world.spec.id}' is not to be done by {', '.join(self._actions[:3])} alone; leave"
            " steps out, or choose an environment of walking"
        )


class MiniGridPrompts(PromptSource):
    """Episodes of an environment, for `MiniGridWorkflow`; with `steps`, what a warm start imitates.

    Args:
        environment: its id, such as "BabyAI-GoToLocal-v0".
        first: seed of the first episode; those of prompts are counted from there. Training and validation are apart
            where their ranges are.
        size: prompts after which the source starts over; None for no end.
        view, tile: see `GridWorld`; pictures are of view * tile pixels a side.
        actions: the words for the actions (see `GridWorld`); None for minigrid's own seven.
        task: the first message beside the first view, with the places {mission} and {actions}.
        steps: prompts an episode, each a step of a shortest way with the conversation before it, to be imitated (its
            action is the solution); an episode that is shorter starts over. None for episodes to be played.

    Raises:
        ImportError: the package is not installed.
        ValueError: an argument out of range; (when dealt) a mission that cannot be accomplished by walking, with steps.
    """

    def __init__(
        self,
        environment: str = "MiniGrid-Empty-Random-5x5-v0",
        first: int = 0,
        size: int | None = None,
        view: int = 7,
        tile: int = 8,
        actions: Sequence[str] | None = None,
        task: str = TASK,
        steps: int | None = None,
    ) -> None:
        needs("minigrid", "minigrid", "MiniGridPrompts")
        checks.at_least(0, {"MiniGridPrompts.first": first})
        counts = {"MiniGridPrompts.size": size, "MiniGridPrompts.tile": tile, "MiniGridPrompts.steps": steps}
        checks.at_least(1, counts)
        if view < 3 or view % 2 == 0:
            raise ValueError(f"MiniGridPrompts.view: {view}, must be an odd number of at least 3")
        words = list(_NAMES if actions is None else actions)
        if not 3 <= len(words) <= len(_NAMES) or len({*words}) < len(words) or not all(map(str.strip, words)):
            raise ValueError(
                f"MiniGridPrompts.actions: {words}, must be 3 to {len(_NAMES)} different words, for {', '.join(_NAMES)}"
            )
        self._task = Template(task, "MiniGridPrompts.task")
        if unknown := sorted(self._task.names - {"mission", "actions"}):
            raise ValueError(f"MiniGridPrompts.task: {{{unknown[0]}}} is none of {{mission}}, {{actions}}")
        self._first, self._size, self._steps = first, size, steps
        self._options: dict[str, Any] = {"environment": environment, "view": view, "tile": tile, "actions": words}
        self._way = lru_cache(1)(self._walked)
        GridWorld(seed=first, **self._options)  # one that is not there is found now

    @property
    def name(self) -> str:
        return "minigrid"

    @property
    def size(self) -> int | None:
        return self._size

    def deal(self, index: int) -> Prompt:
        index = index if self._size is None else index % self._size
        episode, step = divmod(index, self._steps or 1)
        seed = self._first + episode
        metadata: Mapping[str, Any] = {**self._options, "seed": seed}
        name = f"{self._options['environment']}:{seed}"
        if self._steps is None:
            world = GridWorld(seed=seed, **self._options)
            return Prompt(id=name, messages=(self._begin(world),), pictures=(world.picture(),), metadata=dict(metadata))
        mission, way, views = self._way(seed)
        step %= len(way)
        messages = [mission]
        for word in way[:step]:
            messages += [{"role": "assistant", "content": word}, {"role": "user", "content": [{"type": "image"}]}]
        return Prompt(
            id=f"{name}:{step}",
            messages=tuple(messages),
            solution=way[step],
            pictures=views[: step + 1],
            metadata=dict(metadata),
        )

    def _begin(self, world: GridWorld) -> dict[str, Any]:
        values = {"mission": world.mission, "actions": ", ".join(self._options["actions"])}
        text = self._task.fill(values.__getitem__)
        return {"role": "user", "content": [*([{"type": "text", "text": text}] if text else []), {"type": "image"}]}

    def _walked(self, seed: int) -> tuple[dict[str, Any], tuple[str, ...], tuple[npt.NDArray[np.uint8], ...]]:
        """The first message of an episode, a shortest way, and what is seen before each of its steps."""
        world = GridWorld(seed=seed, **self._options)
        way, views = world.way(), list[npt.NDArray[np.uint8]]()
        for word in way:
            views.append(world.picture())
            world.act(word)
        return self._begin(world), way, tuple(views)
