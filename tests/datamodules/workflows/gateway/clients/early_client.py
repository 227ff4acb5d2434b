"""An agent as graphs are written: its clients are made as the module is imported, and its reward stands beside it."""

from __future__ import annotations

from typing import Any

from anthropic import Anthropic
from openai import OpenAI

CLIENT, OTHER = OpenAI(max_retries=0), Anthropic(max_retries=0)


def solve(task: Any) -> str:
    """Asks both."""
    messages: list[Any] = [{"role": "user", "content": task.text}]
    first = CLIENT.chat.completions.create(model="any", messages=messages).choices[0].message.content
    (second,) = OTHER.messages.create(model="any", max_tokens=9, messages=messages).content
    return f"{first} {getattr(second, 'text', '')}"


def right(prompt: Any, answer: str) -> float:
    """Asks nobody."""
    return float(prompt.answer in answer)
