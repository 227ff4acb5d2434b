"""Requests as agent frameworks write them that are no dependency here: a conversation with a call is one path of the
tree, whatever they put around it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import openai
import pytest

from tests.datamodules.workflows.gateway.agents import LOOK_UP
from tests.datamodules.workflows.gateway.clients.door import QUESTION, door

Message = dict[str, Any]


def in_parts(text: str) -> list[Message]:
    return [{"text": text, "type": "text"}]


def strands(said: Message, result: Message) -> tuple[list[Message], Message, Message]:
    calls = [{"function": one["function"], "id": one["id"], "type": "function"} for one in said["tool_calls"]]
    reply = {"role": "assistant", "content": in_parts(said["content"]), "tool_calls": calls}
    return [{"role": "user", "content": in_parts(QUESTION)}], reply, {**result, "content": in_parts(result["content"])}


def agent_framework(said: Message, result: Message) -> tuple[list[Message], Message, Message]:
    asked = [{"role": "system", "content": "You shop."}, {"role": "user", "content": QUESTION}]
    return asked, {**said, "name": "UnnamedAgent"}, result


def autogen(said: Message, result: Message) -> tuple[list[Message], Message, Message]:
    asked = [{"content": "You shop.", "role": "system"}, {"role": "user", "name": "user", "content": QUESTION}]
    return asked, said, result


def crewai(said: Message, result: Message) -> tuple[list[Message], Message, Message]:
    return [{"role": "user", "content": QUESTION}], said, {**result, "name": "look_up"}


def agno(said: Message, result: Message) -> tuple[list[Message], Message, Message]:
    return [{"role": "developer", "content": "You shop."}, {"role": "user", "content": QUESTION}], said, result


OPTIONS: dict[Callable[..., Any], dict[str, Any]] = {
    strands: {},
    agent_framework: {"tool_choice": "auto"},
    autogen: {"tool_choice": "auto", "stream": False},
    crewai: {"parallel_tool_calls": True, "tool_choice": "auto", "n": 1},
    agno: {},
}


@pytest.mark.parametrize("framework", OPTIONS)
def test_a_conversation_with_a_call_is_one_path(framework: Callable[..., Any]) -> None:
    nothing: Message = {"content": "", "tool_calls": []}
    with door() as there:
        client = openai.OpenAI(base_url=there.v1, api_key=there.key, max_retries=0)
        tools: Any = [{"type": "function", "function": {**LOOK_UP["function"], "strict": False}}]  # type: ignore[dict-item]

        def ask(messages: Any) -> Message:
            options: Any = OPTIONS[framework]
            answer = client.chat.completions.create(model="gpt-4o", messages=messages, tools=tools, **options)
            return answer.choices[0].message.model_dump(include={"role", "content", "tool_calls"})

        said = ask(framework(nothing, nothing)[0])
        result = {"role": "tool", "tool_call_id": said["tool_calls"][0]["id"], "content": "3"}
        asked, reply, told = framework(said, result)
        assert ask([*asked, reply, told])["content"] == "It is 6."
        there.check_one_path()
        assert not there.session.counts["nameless_calls"]
