"""Which prompts sit out a turn: those whose groups the filter keeps leaving out.

A prompt that the policy always solves, or never does, costs a whole group of episodes each time it is dealt and teaches
nothing; most of those that do so once do so the next time (Zheng et al. 2025, "Act only when it pays", whose rollouts
took up to 2.4 times less time for leaving them out beforehand). So it waits as networks do for a host that does not
answer: after a first group that was left out it sits out one of its turns, after a second in a row three, then seven
and so on up to `most`; a group that is kept ends that.

Promises: no clock and no chance: with `max_staleness: 0`, and prompts that come once a batch at most, a run deals the
same again; no prompt is given up for ever; what is remembered is bounded, and part of the stream's checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping

_REMEMBERED = 100_000
"""Prompts; beyond it the one that was left out longest ago is as good as new."""


class Rest:
    """The prompts that sit out. No lock of its own.

    Args:
        most: turns in a row that a prompt sits out at most; 0 for none ever.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._prompts: dict[str, tuple[int, int]] = {}  # id: times left out in a row, turns it still sits out

    def passes(self, prompt_id: str) -> bool:
        """The turn of a prompt has come: whether it sits it out, which is one less to come."""
        times, left = self._prompts.get(prompt_id, (0, 0))
        if left:
            self._prompts[prompt_id] = (times, left - 1)
        return left > 0

    def filtered(self, prompt_id: str) -> None:
        """A group of this prompt was left out."""
        if not self._most:
            return
        times = self._prompts.pop(prompt_id, (0, 0))[0] + 1
        self._prompts[prompt_id] = (times, min(2 ** min(times, 62) - 1, self._most))
        if len(self._prompts) > _REMEMBERED:
            del self._prompts[next(iter(self._prompts))]

    def kept(self, prompt_id: str) -> None:
        """A group of this prompt is trained on."""
        self._prompts.pop(prompt_id, None)

    def state_dict(self) -> dict[str, list[int]]:
        """By prompt id, as primitives; in the order in which prompts are forgotten."""
        return {prompt: list(pair) for prompt, pair in self._prompts.items()}

    def load_state_dict(self, state: Mapping[str, list[int]]) -> None:
        """Goes on from a `state_dict`, of another `most` too; of none, from nothing."""
        self._prompts = {
            prompt: (times, min(left, self._most)) for prompt, (times, left) in state.items() if self._most
        }
