"""Rewards by the verifiers of reasoning-gym, for prompts of `ReasoningGymPrompts`."""

from __future__ import annotations

import json
import re
from importlib import import_module
from typing import Any

from datamodules.prompts.base import Prompt
from datamodules.prompts.extras import needs
from datamodules.prompts.reasoning_gym import METADATA, make_task
from datamodules.rewards.functions import note_unreadable


class ReasoningGym:
    """What the task's own verifier gives, usually from 0.0 (wrong) to 1.0; many tasks give something for the part that
    is right, and some a hundredth for any answer.

    Args:
        tag: the answer is what the last <tag> </tag> of the completion holds, and a completion without one is wrong,
            0.0; None takes the whole completion, white space around it aside.

    Raises:
        ValueError: the prompt is of another source.
        Exception: the verifier cannot even judge its own reference answer.
    """

    def __init__(self, tag: str | None = "answer") -> None:
        self.tag = tag
        self._tagged = None if tag is None else re.compile(f"<{re.escape(tag)}>(.*?)</{re.escape(tag)}>", re.DOTALL)
        self._tasks: dict[str, Any] = {}  # some are slow to make

    def prepare(self) -> None:
        needs("reasoning_gym", "reasoning-gym", "ReasoningGym")
        import_module("reasoning_gym")  # seconds, which are no call's fault

    def __call__(self, prompt: Prompt, completion: str) -> float:
        if METADATA not in prompt.metadata:
            raise ValueError(
                f"prompt '{prompt.id}' is no problem of reasoning-gym; take prompts from"
                " datamodules.prompts.ReasoningGymPrompts, or another reward (BySource, where sources are mixed)"
            )
        found = [completion] if self._tagged is None else self._tagged.findall(completion)
        if not found:
            return 0.0
        about = prompt.metadata[METADATA]
        task, entry = self._task(about["task"], about["options"]), about["entry"]
        try:
            return float(task.score_answer(found[-1].strip(), entry))
        except Exception:
            # Some verifiers raise on text they cannot read. Those that raise on the right answer are broken.
            task.score_answer(str(entry["answer"]), entry)
            note_unreadable()
            return 0.0

    def _task(self, name: str, options: dict[str, Any]) -> Any:
        key = json.dumps([name, options], sort_keys=True, default=str)
        if key not in self._tasks:
            self._tasks[key] = make_task(name, {**options, "seed": 0, "size": 1})
        return self._tasks[key]
