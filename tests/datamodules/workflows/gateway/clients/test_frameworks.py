"""Agents of frameworks, unmodified, through the door; and requests as those write them that are no dependency here. A
conversation is one path, whatever they put around it. None of them reaches anything but the loopback interface."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import openai
import pytest
from pydantic import BaseModel

from tests.datamodules.workflows.gateway.agents import LOOK_UP
from tests.datamodules.workflows.gateway.clients.door import PRICES, QUESTION, Door, door

WHY = "pip install -e '.[dev]' brings it"


pytestmark = pytest.mark.usefixtures("nothing_leaves")


class Bill(BaseModel):
    total: int


def look_up(fruit: str) -> int:
    """Price of a fruit."""
    return PRICES[fruit]


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("protocol", ["chat", "responses"])
def test_openai_agents(protocol: str, streamed: bool) -> None:
    agents = pytest.importorskip("agents", reason=WHY)
    from openai import AsyncOpenAI

    async def run(there: Door) -> str:
        agents.set_tracing_disabled(True)
        client = AsyncOpenAI(base_url=there.v1, api_key=there.key, max_retries=0)
        kind = {"chat": agents.OpenAIChatCompletionsModel, "responses": agents.OpenAIResponsesModel}[protocol]
        agent = agents.Agent(
            name="shopper", model=kind(model="any", openai_client=client), tools=[agents.function_tool(look_up)]
        )
        if not streamed:
            return str((await agents.Runner.run(agent, QUESTION)).final_output)
        result = agents.Runner.run_streamed(agent, QUESTION)
        async for _ in result.stream_events():
            pass
        return str(result.final_output)

    with door() as there:
        assert asyncio.run(run(there)) == "It is 6."
        there.check_one_path()


@pytest.mark.parametrize("streamed", [False, True])
def test_langgraph(streamed: bool) -> None:
    graph = pytest.importorskip("langgraph.graph", reason=WHY)
    prebuilt = pytest.importorskip("langgraph.prebuilt", reason=WHY)
    chat = pytest.importorskip("langchain_openai", reason=WHY)
    with door() as there:
        model = chat.ChatOpenAI(model="any", base_url=there.v1, api_key=there.key, max_retries=0, streaming=streamed)
        model = model.bind_tools([look_up])
        steps = graph.StateGraph(graph.MessagesState)
        steps.add_node("model", lambda state: {"messages": [model.invoke(state["messages"])]})
        steps.add_node("tools", prebuilt.ToolNode([look_up]))
        steps.add_edge(graph.START, "model")
        steps.add_conditional_edges("model", prebuilt.tools_condition)
        steps.add_edge("tools", "model")
        agent = steps.compile()
        ask = {"messages": [("user", QUESTION)]}
        if streamed:
            *_, (_, state) = agent.stream(ask, stream_mode=["messages", "values"])
        else:
            state = agent.invoke(ask)
        assert state["messages"][-1].content == "It is 6."
        there.check_one_path()


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("protocol", ["chat", "responses", "messages"])
def test_pydantic_ai(protocol: str, streamed: bool) -> None:
    pydantic_ai = pytest.importorskip("pydantic_ai", reason=WHY)
    from anthropic import AsyncAnthropic
    from openai import AsyncOpenAI
    from pydantic_ai.models.anthropic import AnthropicModel
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.providers.anthropic import AnthropicProvider
    from pydantic_ai.providers.openai import OpenAIProvider

    async def run(there: Door) -> str:
        client = AsyncOpenAI(base_url=there.v1, api_key=there.key, max_retries=0)
        other = AsyncAnthropic(base_url=there.address, api_key=there.key, max_retries=0)
        model = {
            "chat": lambda: OpenAIChatModel("any", provider=OpenAIProvider(openai_client=client)),
            "responses": lambda: OpenAIResponsesModel("any", provider=OpenAIProvider(openai_client=client)),
            "messages": lambda: AnthropicModel("any", provider=AnthropicProvider(anthropic_client=other)),
        }[protocol]()
        agent = pydantic_ai.Agent(model, tools=[look_up])
        if not streamed:
            return str((await agent.run(QUESTION)).output)
        async with agent.run_stream(QUESTION) as result:
            return str(await result.get_output())

    # A text before a call ends a streamed run of this package, so the model calls without one.
    with door([CALL_ALONE, "It is 6."]) as there:
        assert asyncio.run(run(there)) == "It is 6."
        there.check_one_path()


@pytest.mark.parametrize("form", ["tool", "prompted"])
@pytest.mark.parametrize("protocol", ["chat", "responses"])
def test_output_types_of_pydantic_ai_are_read_without_a_grammar(protocol: str, form: str) -> None:
    """By the profile that the documentation names; without it they are refused."""
    pydantic_ai = pytest.importorskip("pydantic_ai", reason=WHY)
    from openai import AsyncOpenAI
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.profiles.openai import OpenAIModelProfile
    from pydantic_ai.providers.openai import OpenAIProvider

    kind = {"chat": OpenAIChatModel, "responses": OpenAIResponsesModel}[protocol]
    profile = OpenAIModelProfile(supports_forced_tool_choice=False, supports_json_object_output=False)
    wanted = pydantic_ai.PromptedOutput(Bill) if form == "prompted" else Bill

    async def run(there: Door, **options: Any) -> Any:
        provider = OpenAIProvider(openai_client=AsyncOpenAI(base_url=there.v1, api_key=there.key, max_retries=0))
        return (await pydantic_ai.Agent(kind("any", provider=provider, **options), output_type=wanted).run("x")).output

    said = '{"total": 6}'
    if form == "tool":
        said = f'<tool_call>\n{{"name": "final_result", "arguments": {said}}}\n</tool_call>'
    with door([said]) as there:
        assert asyncio.run(run(there, profile=profile)) == Bill(total=6)
    with door([said]) as there, pytest.raises(Exception, match="nothing forces"):
        asyncio.run(run(there))


CALL_ALONE = '<tool_call>\n{"name": "look_up", "arguments": {"fruit": "apple"}}\n</tool_call>'


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("provider", ["openai", "anthropic"])
def test_litellm(provider: str, streamed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    litellm = pytest.importorskip("litellm", reason=WHY)
    litellm.telemetry = False
    tool = {
        "type": "function",
        "function": {
            "name": "look_up",
            "description": "price of a fruit",
            "parameters": {"type": "object", "properties": {"fruit": {"type": "string"}}, "required": ["fruit"]},
        },
    }
    with door() as there:
        options = {"api_base": there.v1 if provider == "openai" else there.address, "api_key": there.key}
        messages: list[Any] = [{"role": "user", "content": QUESTION}]
        while True:
            answer = litellm.completion(
                model=f"{provider}/any", messages=messages, tools=[tool], max_tokens=100, stream=streamed, **options
            )
            if streamed:
                answer = litellm.stream_chunk_builder(list(answer), messages=messages)
            message = answer.choices[0].message
            messages.append(message)
            if not message.tool_calls:
                break
            messages += [
                {"role": "tool", "tool_call_id": one.id, "content": str(PRICES["apple"])} for one in message.tool_calls
            ]
        assert message.content == "It is 6."
        there.check_one_path()
        with pytest.raises(litellm.ContextWindowExceededError):
            litellm.completion(
                model=f"{provider}/any",
                max_tokens=9,
                messages=[{"role": "user", "content": "x" * 5000}],
                num_retries=0,
                **options,
            )


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
