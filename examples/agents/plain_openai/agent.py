"""An agent with a calculator, written with the `openai` package alone."""

from __future__ import annotations

import ast
import json
import operator
from typing import Any

from openai import OpenAI

_OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.USub: operator.neg}
_MOST_TURNS = 6
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "calculate",
            "description": "The value of an expression of whole numbers with +, - and *.",
            "parameters": {
                "type": "object",
                "properties": {"expression": {"type": "string"}},
                "required": ["expression"],
            },
        },
    }
]


def solve(task: Any) -> str:
    """Calls the tool until the model answers without it. `task.text` is the question."""
    client = OpenAI()  # finds OPENAI_BASE_URL and OPENAI_API_KEY
    messages: list[Any] = [{"role": "user", "content": task.text}]
    for _ in range(_MOST_TURNS):
        message = client.chat.completions.create(model="policy", messages=messages, tools=TOOLS).choices[0].message
        if not message.tool_calls:
            return message.content or ""
        messages.append(message.model_dump(exclude_none=True))
        for call in message.tool_calls:
            messages.append({"role": "tool", "tool_call_id": call.id, "content": calculated(call.function.arguments)})
    return ""


def calculated(arguments: str) -> str:
    """The tool's answer; the model is told what was wrong."""
    try:
        return str(_value(ast.parse(json.loads(arguments)["expression"], mode="eval").body))
    except Exception as error:
        return f"error: {type(error).__name__}: {error}"[:200]


def _value(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.UnaryOp):
        return _OPERATORS[type(node.op)](_value(node.operand))  # type: ignore[index]
    if isinstance(node, ast.BinOp):
        return _OPERATORS[type(node.op)](_value(node.left), _value(node.right))  # type: ignore[index]
    raise ValueError(f"{type(node).__name__} is not allowed")
