"""Recorded conversations played again with this run's model: a test bed for rollouts of agents with users and tools.

The model generates at every turn the recorded agent had; what the recorded user or tool said next then follows,
whatever the model said. So prompts grow as they really do (thousands of tokens, shared within a group and over turns),
tools take their time, and no user simulator, tool server or able model is needed. Nothing is learned from it.

Promises: the recorded tokens are those of `TauPrompts`, unchanged; the generated ones exactly those served.
"""

from __future__ import annotations

import asyncio
from typing import Any, Literal

from transformers import PreTrainedTokenizerBase

from app import checks
from app.batch import Trajectory
from datamodules.prompts.base import Prompt
from datamodules.workflows.base import EpisodeEngine
from datamodules.workflows.turns import ReplyOptions, Turns


class TauReplayWorkflow:
    """Replays the conversations of `datamodules.prompts.TauPrompts`: sample k of a prompt its trial k, in turn.

    The reward is the configured one of all replies' text; without one, that of the recorded trial.

    Args:
        max_new_tokens: most tokens of a reply, at least 1.
        max_turns: turns played of a conversation, the first so many; None for all. An episode that ends so has finish
            reason "max_turns".
        lengths: "recorded": a reply has as many tokens as the recorded one (at most `max_new_tokens`) and nothing else
            ends it, so that every run does the same work; "model": the model ends it, and what follows comes after the
            recorded end-of-turn token where it did not.
        tool_latency_s: seconds until the recorded tools answer; the calls of one turn run at the same time.
        temperature: of sampling, above 0.
        sequences: "whole" or "turns"; see `datamodules.workflows.turns.Sequences`.

    Raises:
        ValueError: an argument out of range.
    """

    def __init__(
        self,
        max_new_tokens: int = 512,
        max_turns: int | None = None,
        lengths: Literal["recorded", "model"] = "recorded",
        tool_latency_s: float = 0.0,
        temperature: float = 1.0,
        sequences: Literal["whole", "turns"] = "whole",
    ) -> None:
        name = type(self).__name__
        checks.at_least(1, {f"{name}.max_turns": max_turns})
        checks.at_least(0, {f"{name}.tool_latency_s": tool_latency_s})
        checks.one_of(f"{name}.lengths", lengths, ("recorded", "model"))
        checks.one_of(f"{name}.sequences", sequences, ("whole", "turns"))
        self.max_new_tokens = max_new_tokens
        self.max_turns = max_turns
        self.lengths = lengths
        self.tool_latency_s = tool_latency_s
        self.sequences: Literal["whole", "turns"] = sequences
        self._options = ReplyOptions(name, max_new_tokens, temperature)

    def prepare(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Looks up the token that ends a reply, where the model ends it."""
        if self.lengths == "model":
            self._options.prepare(tokenizer)

    def encode(self, prompt: Prompt) -> tuple[int, ...]:
        """The longest of the prompts its trials begin with. Raises ValueError for a prompt that is no recording."""
        longest: list[int] = max((trial["prompt"] for trial in _trials(prompt)), key=len)
        return tuple(longest)

    async def run(self, engine: EpisodeEngine, prompt: Prompt) -> list[Trajectory]:
        trials = _trials(prompt)
        trial = trials[engine.sample % len(trials)]
        recorded = trial["turns"][: self.max_turns]
        turns = Turns(prompt, self._options, trial["prompt"])
        replies: list[str] = []
        results = 0
        for turn in recorded:
            as_recorded = self.lengths == "recorded"
            asked = min(turn["tokens"], self.max_new_tokens)
            response = await turns.generate(engine, asked if as_recorded else None)
            if response is None:
                break
            replies.append(turns.reply(engine.tokenizer))
            if as_recorded and len(response.tokens) == asked:
                turns.finish_reason = "stop"  # as long as it was to be
            if turns.count == len(recorded):
                break
            if turn["results"] and self.tool_latency_s:
                with engine.waiting("tool", "recorded"):
                    await asyncio.sleep(self.tool_latency_s)
            results += turn["results"]
            if not as_recorded and turns.end is None:
                turns.extend([turn["end"]])
            turns.extend(turn["after"])
        if turns.count == len(recorded) < len(trial["turns"]):
            turns.finish_reason = "max_turns"
        reward = await engine.score(prompt, "\n".join(replies)) if engine.has_reward else trial["reward"]
        metadata: dict[str, object] = {"trial": trial["trial"], "tool_calls": results}
        return turns.trajectories(self.sequences, reward, metadata)


def _trials(prompt: Prompt) -> list[dict[str, Any]]:
    trials: list[dict[str, Any]] = prompt.metadata.get("trials", [])
    if not trials:
        raise ValueError(
            f"TauReplayWorkflow: prompt '{prompt.id}' is no recorded conversation; set prompts to"
            " datamodules.prompts.TauPrompts"
        )
    return trials
