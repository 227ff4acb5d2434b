"""A reward with half an emoji in it, alone here: reward workers import it, and it imports next to nothing."""

from __future__ import annotations

from datamodules.prompts.base import Prompt


def half_reward(prompt: Prompt, completion: str) -> tuple[float, dict[str, float]]:
    return 0.5, {"f\ud83d": 1.0}
