"""Calls of tools as they are read out of replies: what is one, what is told of one that is none."""

from __future__ import annotations

import json

import pytest

from datamodules.workflows.tool_calls import ToolCall, hermes_calls, json_calls

with pytest.raises(ValueError) as _refused:  # in the words of this Python
    json.dumps(float("inf"), allow_nan=False)
_NOT_JSON = str(_refused.value)


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ("no call", []),
        ('<tool_call>{"name": "f"}</tool_call>', [ToolCall("f")]),
        ('<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', [ToolCall("f", {"a": 1})]),
        (
            '<tool_call>{"name": "f", "arguments": {"a": "two\nlines"}}</tool_call>',
            [ToolCall("f", {"a": "two\nlines"})],
        ),
        ('<think><tool_call>{"name": "f"}</tool_call></think>It is 5.', []),
        ('It is 5. <think><tool_call>{"name": "f"}</tool_call>', []),
        ('No call yet</think><tool_call>{"name": "f"}</tool_call>', [ToolCall("f")]),
        ('<tool_call>{"name": "f"}</tool_call><think>now wait</think>I have called f.', [ToolCall("f")]),
        (
            '<tool_call>{"name": "f", "arguments": {"a": "<think>b</think>c"}}</tool_call>'
            '<tool_call>{"name": "g", "arguments": {"a": "</think>"}}</tool_call>',
            [ToolCall("f", {"a": "<think>b</think>c"}), ToolCall("g", {"a": "</think>"})],
        ),
        ('<tool_call>{"name": 3}</tool_call>', [ToolCall(error='a call needs a "name", which is a string')]),
        ("<tool_call>[1]</tool_call>", [ToolCall(error="a call must be a JSON object, this is a list")]),
        (
            '<tool_call>{"name": "f"}\n<tool_call>{"name": "g"}</tool_call>',
            [ToolCall(error="<tool_call> is not closed by </tool_call>"), ToolCall("g")],
        ),
        (
            '<tool_call>\n{"name": "f", "arguments": {"a": "</tool_call><tool_call>"}}\n</tool_call>',
            [ToolCall("f", {"a": "</tool_call><tool_call>"})],
        ),
        ('{"name": "f"}</tool_call>', [ToolCall(error="</tool_call> without <tool_call> before it")]),
        (
            '<tool_call>{"name": "f", "arguments": [1]}</tool_call>',
            [ToolCall("f", error='"arguments" must be a JSON object, this is a list')],
        ),
        (
            '<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>',
            [ToolCall(error="not valid JSON (NaN is not JSON)")],
        ),
        (
            '<tool_call>{"name": "f", "arguments": {"a": 1e999}}</tool_call>',
            [ToolCall("f", error=f'"arguments" cannot be written as JSON ({_NOT_JSON})')],
        ),
    ],
)
def test_hermes_calls(text: str, calls: list[ToolCall]) -> None:
    assert hermes_calls(text) == calls


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ("It is 5.", []),
        (' {"name": "f", "parameters": {"a": 1}}', [ToolCall("f", {"a": 1})]),
        ('<|python_tag|>[{"name": "f"}, {"name": "g"}]', [ToolCall("f"), ToolCall("g")]),
        ('{"name": "f"', [ToolCall(error="not valid JSON (Expecting ',' delimiter: line 1 column 13 (char 12))")]),
        ("[1]", [ToolCall(error="a call must be a JSON object, this is a int")]),
        ('{"name": "f", "parameters": {"a": "b</think>c"}}', [ToolCall("f", {"a": "b</think>c"})]),
        ('<think>{</think>\n{"name": "f"}\n<think>so</think>', [ToolCall("f")]),
        ("<|python_tag|>print(1)", []),
        ('{"name": "f"} is it', [ToolCall(error="not valid JSON (there is more behind it: ' is it')")]),
    ],
)
def test_json_calls(text: str, calls: list[ToolCall]) -> None:
    assert json_calls(text) == calls
