"""Output types, forced calls and their like, of clients as they are: told the model, refused, and never left out."""

from __future__ import annotations

import asyncio
import json
from typing import Any, Literal

import pytest
from anthropic import Anthropic
from openai import BadRequestError, OpenAI
from pydantic import BaseModel

from datamodules.conversations.chat_template import Chat
from datamodules.workflows.base import EpisodeEngine
from datamodules.workflows.gateway import Budget, Session
from datamodules.workflows.gateway.protocols.servable import Sampling
from datamodules.workflows.tool_calls import hermes_calls
from tests.datamodules.workflows.gateway.clients.door import CALL, QUESTION, Door, door
from tests.datamodules.workflows.scripted_engine import WITH_CALLS, ScriptedEngine
from tests.helpers.recorded_samples import byte_tokenizer

pytestmark = pytest.mark.usefixtures("nothing_leaves")

WHY = "pip install -e '.[dev]' brings it"
PROMPT = Sampling(200, override=True)
LOOK_UP: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "look_up",
        "parameters": {"type": "object", "properties": {"fruit": {"type": "string"}}, "required": ["fruit"]},
    },
}
FLAT = {"type": "function", **LOOK_UP["function"]}
ANTHROPIC = {"name": "look_up", "input_schema": LOOK_UP["function"]["parameters"]}
FORM = {"type": "json_schema", "json_schema": {"name": "Bill", "schema": {"type": "object", "title": "Bill"}}}


class Bill(BaseModel):
    """What is to be paid."""

    total: int


def said(fruits: str = "final_result", arguments: str = '{"total": 6}') -> str:
    return f'<tool_call>\n{{"name": "{fruits}", "arguments": {arguments}}}\n</tool_call>'


def client(there: Door) -> OpenAI:
    return OpenAI(base_url=there.v1, api_key=there.key, max_retries=0)


def system_of(prompt: str) -> str:
    """The one message of the system; the tests' template has another one for tools, before it."""
    found = [one.partition("<|end|>")[0] for one in prompt.split("<|begin|>system\n")[1:]]
    assert len(found) == 1 + ('"function"' in prompt), prompt
    return found[-1]


def test_chat_completions_parse_an_output_type() -> None:
    with door(['{"total": 6}'], sampling=PROMPT) as there:
        messages: list[Any] = [{"role": "system", "content": "Sum."}, {"role": "user", "content": QUESTION}]
        answer = client(there).chat.completions.parse(model="any", messages=messages, response_format=Bill)
        assert answer.choices[0].message.parsed == Bill(total=6)
        (prompt,) = there.prompts()
        told = system_of(prompt)
        assert told.startswith("Sum.\n\nYour reply must be JSON that follows this schema, without any text")
        schema = json.loads(told.partition(":\n")[2])
        assert schema["properties"]["total"]["type"] == "integer" and schema["additionalProperties"] is False
        (trained,) = there.session.transcript.calls
        assert trained.is_trained and trained.prompt.tokens == there.engine.seen[0].tokens
        assert there.session.counts["prompted_calls"] == 1


def test_an_output_type_beside_tools_keeps_a_conversation_one_path() -> None:
    with door([CALL, '{"total": 6}'], sampling=PROMPT) as there:
        asked: list[Any] = [{"role": "user", "content": QUESTION}]
        options: dict[str, Any] = {"model": "any", "tools": [LOOK_UP], "response_format": FORM}
        first = client(there).chat.completions.create(messages=asked, **options).choices[0].message
        asked += [first, {"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": "3"}]  # type: ignore[index]
        last = client(there).chat.completions.create(messages=asked, **options)
        assert json.loads(last.choices[0].message.content or "") == {"total": 6}
        there.check_one_path()
        assert "A reply that calls no tool must be JSON" in system_of(there.prompts()[0])


def test_responses_parse_an_output_type_and_go_on() -> None:
    """Told once, whether the system's message is the instructions or one of the input, and told anew where a later
    request wants it alone."""
    with door(['{"total": 6}', '{"total": 7}', '{"total": 8}', "It is 9."], sampling=PROMPT) as there:
        made = client(there)
        first = made.responses.parse(model="any", input=QUESTION, text_format=Bill, instructions="Sum.")
        assert first.output_parsed == Bill(total=6)
        given: list[Any] = [{"role": "system", "content": "Add."}, {"role": "user", "content": QUESTION}]
        begun = made.responses.parse(model="any", input=given, text_format=Bill)
        again = made.responses.parse(model="any", input="More.", text_format=Bill, previous_response_id=begun.id)
        assert again.output_parsed == Bill(total=8)
        made.responses.create(model="any", input="Plain.", previous_response_id=first.id)
        instructions, system, gone_on, plain = there.prompts()
        assert system_of(instructions).startswith("Sum.\n\nYour reply must be JSON")
        assert system_of(system).startswith("Add.\n\nYour reply") and system_of(gone_on) == system_of(system)
        assert "system" not in plain  # instructions are of their own request alone
        assert there.engine.seen[2].tokens[: len(there.engine.seen[1].tokens)] == there.engine.seen[1].tokens


def test_what_one_request_of_a_conversation_wants_is_not_told_the_next() -> None:
    with door([CALL, "It is 6.", CALL], sampling=PROMPT) as there:
        made = client(there)
        given: list[Any] = [{"role": "system", "content": "Add."}, {"role": "user", "content": QUESTION}]
        options: dict[str, Any] = {"model": "any", "tools": [FLAT]}
        begun = made.responses.create(input=given, tool_choice="required", **options)
        result = {"type": "function_call_output", "call_id": begun.output[-1].call_id, "output": "3"}  # type: ignore[union-attr]
        second = made.responses.create(input=[result], previous_response_id=begun.id, **options)  # type: ignore[list-item]
        options |= {"tool_choice": "required", "parallel_tool_calls": False}
        made.responses.create(input="More.", previous_response_id=second.id, **options)
        first, free, last = map(system_of, there.prompts())
        assert first == "Add.\n\nYour reply must be a call of one of the tools." and free == "Add."
        assert last == f"{first}\n\nA reply may hold one call of a tool at most."


def test_messages_are_told_a_shape_and_calls() -> None:
    with door(['{"total": 6}', CALL, CALL], sampling=PROMPT) as there:
        made = Anthropic(base_url=there.address, api_key=there.key, max_retries=0)
        asked: dict[str, Any] = {"model": "any", "messages": [{"role": "user", "content": QUESTION}]}
        shape = {"format": {"type": "json_schema", "schema": Bill.model_json_schema()}}
        counted = made.messages.count_tokens(**asked, output_config=shape)  # type: ignore[arg-type]
        made.messages.create(**asked, max_tokens=99, output_config=shape)  # type: ignore[call-overload]
        assert counted.input_tokens == len(there.engine.seen[0].tokens)
        for choice in ({"type": "any", "disable_parallel_tool_use": True}, {"type": "tool", "name": "look_up"}):
            made.messages.create(**asked, max_tokens=99, tools=[ANTHROPIC], tool_choice=choice)  # type: ignore[call-overload]
        shaped, forced, named = map(system_of, there.prompts())
        assert "follows this schema" in shaped and '"title": "Bill"' in shaped
        assert (
            forced == "Your reply must be a call of one of the tools.\n\nA reply may hold one call of a tool at most."
        )
        assert named == "Your reply must be a call of the tool look_up."


@pytest.mark.parametrize("method", ["function_calling", "json_schema", "json_mode"])
def test_langchain(method: Literal["function_calling", "json_schema", "json_mode"]) -> None:
    chat = pytest.importorskip("langchain_openai", reason=WHY)
    reply = said("Bill") if method == "function_calling" else '{"total": 6}'
    with door([reply, "Six."], sampling=PROMPT) as there:
        model = chat.ChatOpenAI(model="any", base_url=there.v1, api_key=there.key, max_retries=0)
        model = model.with_structured_output(Bill, method=method, include_raw=True)
        assert model.invoke(QUESTION)["parsed"] == Bill(total=6)
        if method != "json_schema":  # where the client raises
            assert model.invoke(QUESTION)["parsed"] is None
        told = system_of(there.prompts()[0])
        assert (
            "a call of the tool Bill" if method == "function_calling" else "must be a"
        ) in told or "JSON that" in told


@pytest.mark.parametrize("protocol", ["chat", "responses"])
def test_openai_agents(protocol: str) -> None:
    agents = pytest.importorskip("agents", reason=WHY)
    from openai import AsyncOpenAI

    def look_up(fruit: str) -> int:
        """Price of a fruit."""
        return 3

    async def run(there: Door) -> Any:
        agents.set_tracing_disabled(True)
        made = AsyncOpenAI(base_url=there.v1, api_key=there.key, max_retries=0)
        kind = {"chat": agents.OpenAIChatCompletionsModel, "responses": agents.OpenAIResponsesModel}[protocol]
        agent = agents.Agent(
            name="shopper",
            model=kind(model="any", openai_client=made),
            tools=[agents.function_tool(look_up)],
            output_type=Bill,
            model_settings=agents.ModelSettings(tool_choice="required", parallel_tool_calls=False),
        )
        return (await agents.Runner.run(agent, QUESTION)).final_output

    with door([CALL, '{"total": 6}'], sampling=PROMPT) as there:
        assert asyncio.run(run(there)) == Bill(total=6)
        first, second = map(system_of, there.prompts())
        assert "Your reply must be a call of one of the tools." in first and "one call" in first
        assert "must be a call" not in second  # the framework asks for it until one was made
        assert "JSON that follows this schema" in first and "JSON that follows this schema" in second


@pytest.mark.parametrize("form", ["tool", "native", "prompted"])
@pytest.mark.parametrize("protocol", ["chat", "responses"])
def test_pydantic_ai(protocol: str, form: str) -> None:
    pydantic_ai = pytest.importorskip("pydantic_ai", reason=WHY)
    from openai import AsyncOpenAI
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.providers.openai import OpenAIProvider

    kind = {"chat": OpenAIChatModel, "responses": OpenAIResponsesModel}[protocol]
    wanted = {"tool": Bill, "native": pydantic_ai.NativeOutput(Bill), "prompted": pydantic_ai.PromptedOutput(Bill)}

    async def run(there: Door) -> Any:
        provider = OpenAIProvider(openai_client=AsyncOpenAI(base_url=there.v1, api_key=there.key, max_retries=0))
        agent = pydantic_ai.Agent(kind("any", provider=provider), output_type=wanted[form], retries=1)
        return (await agent.run(QUESTION)).output

    with door(["Six.", said() if form == "tool" else '{"total": 6}'], sampling=PROMPT) as there:
        assert asyncio.run(run(there)) == Bill(total=6)  # once it was told that its first reply is none
        told = {
            "tool": "Your reply must be a call of one of the tools",
            "native": "Your reply must be JSON that follows this schema",
            "prompted": "Your reply must be a JSON object",
        }
        assert all(told[form] in one for one in there.prompts())


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"tool_choice": "required"}, "tool_choice: .*no tools are offered; add tools"),
        ({"tool_choice": "any", "tools": [LOOK_UP]}, 'tool_choice: "any", must be "auto", "none", "required" or a'),
        (
            {"tool_choice": {"type": "function", "function": {"name": "buy"}}, "tools": [LOOK_UP]},
            'tool_choice.name: "buy", must be one of look_up',
        ),
        (
            {"tool_choice": {"type": "function", "function": {}}, "tools": [LOOK_UP]},
            "tool_choice.name: must be a text",
        ),
        ({"response_format": {**FORM, "regex": "x"}}, "response_format.regex: not supported"),
        ({"response_format": {"type": "grammar"}}, "response_format.type: .*json_schema"),
        ({"response_format": {"type": "json_schema"}}, "response_format.schema: must be an object"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "no"}}}},
            "response_format.json_schema.schema: no valid JSON schema",
        ),
    ],
)
def test_what_cannot_be_told_is_refused(asked: dict[str, Any], says: str) -> None:
    with door([], sampling=PROMPT) as there:
        messages: list[Any] = [{"role": "user", "content": QUESTION}]
        with pytest.raises(BadRequestError, match=says):
            client(there).chat.completions.create(model="any", messages=messages, **asked)


@pytest.mark.parametrize("key", ["schema", "response_schema"])
def test_the_schema_of_a_json_object_is_told(key: str) -> None:
    with door(["{}"], sampling=PROMPT) as there:
        form: Any = {"type": "json_object", key: {"type": "object", "title": "Bill"}}
        messages: list[Any] = [{"role": "user", "content": QUESTION}]
        client(there).chat.completions.create(model="any", messages=messages, response_format=form)
        assert '"title": "Bill"' in system_of(there.prompts()[0])


def test_what_changes_nothing_is_told_nobody() -> None:
    asked: dict[str, Any] = {"response_format": {"type": "text"}, "parallel_tool_calls": False}
    for sampling in (PROMPT, Sampling(200)):
        with door(["Six."], sampling=sampling) as there:
            messages: list[Any] = [{"role": "user", "content": QUESTION}]
            client(there).chat.completions.create(model="any", messages=messages, **asked)
            assert "system" not in there.prompts()[0] and not there.session.counts["prompted_calls"]


def test_a_template_without_messages_of_the_system_is_found_out() -> None:
    hides = "{% set messages = messages | rejectattr('role', 'equalto', 'system') | list %}" + WITH_CALLS
    tokenizer = byte_tokenizer(hides)
    episode = EpisodeEngine(ScriptedEngine(tokenizer, ["Six."]), tokenizer, None, name="e", seed="s")  # type: ignore[arg-type]
    session = Session(episode, Chat(tokenizer), PROMPT, Budget(), hermes_calls)
    with (
        door([], session) as there,
        pytest.raises(BadRequestError, match=r"response_format: .* does not show this conversation"),
    ):
        client(there).chat.completions.create(
            model="any", messages=[{"role": "user", "content": QUESTION}], response_format={"type": "json_object"}
        )
    assert session.misfit.startswith("response_format: ")  # which ends a run: every episode would meet it
