"""A program that asks twice, with Python's standard library alone: python3 agent.py QUESTION

It could be in any language: it finds its provider in OPENAI_BASE_URL and OPENAI_API_KEY, and prints its answer last.
"""

from __future__ import annotations

import json
import os
import sys
import urllib.request


def ask(messages: list[dict[str, str]]) -> str:
    """What the model says next."""
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        json.dumps({"model": "policy", "messages": messages}).encode(),
        {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        return str(json.load(answer)["choices"][0]["message"]["content"])


messages = [{"role": "user", "content": sys.argv[1]}]
draft = ask(messages)
print("draft:", draft)
messages += [
    {"role": "assistant", "content": draft},
    {"role": "user", "content": "Check that, and say the answer alone, on one line."},
]
print(" ".join(ask(messages).split()))
