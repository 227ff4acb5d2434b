"""Rewards of the coach's runs, in a module of their own: reward workers import it, and it imports next to nothing."""

from __future__ import annotations

from datamodules.prompts.base import Prompt


def one_for_all(prompt: Prompt, completion: str) -> float:
    return 1.0


def odd(prompt: Prompt, completion: str) -> float:
    return float(len(completion) % 2)


def half_fail(prompt: Prompt, completion: str) -> float:
    if int(prompt.text[0]) % 2:
        raise RuntimeError("the judge is asleep")
    return float(len(completion) % 2)
