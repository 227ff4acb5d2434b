"""An agent as graphs are written: its client is made as the module is imported, and its reward stands beside it."""

from __future__ import annotations

from typing import Any

from openai import OpenAI

CLIENT = OpenAI(max_retries=0)


def solve(task: Any) -> str:
    """Asks once."""
    messages: list[Any] = [{"role": "user", "content": task.text}]
    return CLIENT.chat.completions.create(model="any", messages=messages).choices[0].message.content or ""


def right(prompt: Any, answer: str) -> float:
    """Asks nobody."""
    return float(prompt.answer in answer)
