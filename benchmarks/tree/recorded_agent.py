"""An agent of the `openai` package that compacts its history and starts a sub-agent. Cheap to import: it runs in a
process of its own."""

from __future__ import annotations

from typing import Any

from openai import OpenAI

RULES = "You keep the books of a harbour. Say what you would do next, and why, in a few words. " * 6
REPORT = "The next ship has come in, its papers are in order but for one, and the crane is free until noon. " * 3


def solve(task: Any) -> str:
    """Four turns, a sub-agent of two, a compaction, and three turns more."""
    client = OpenAI()

    def ask(messages: list[Any]) -> str:
        said = client.chat.completions.create(model="policy", messages=messages).choices[0].message.content or ""
        messages.append({"role": "assistant", "content": said})
        return said

    messages: list[Any] = [{"role": "system", "content": RULES}, {"role": "user", "content": task.text}]
    for _ in range(4):
        ask(messages)
        messages.append({"role": "user", "content": REPORT})
    helper: list[Any] = [{"role": "system", "content": "You look up one ship."}, {"role": "user", "content": REPORT}]
    ask(helper)
    helper.append({"role": "user", "content": "And which berth is free?"})
    messages[-1]["content"] += ask(helper)
    ask(messages)
    summary = "So far: " + " ".join(one["content"][-80:] for one in messages if one["role"] == "assistant")
    messages = [messages[0], {"role": "user", "content": summary}]
    for _ in range(3):
        ask(messages)
        messages.append({"role": "user", "content": REPORT})
    return "done"
