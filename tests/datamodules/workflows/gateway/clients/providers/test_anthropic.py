"""The `anthropic` package, unmodified, through the door."""

from __future__ import annotations

from typing import Any

import pytest

from tests.datamodules.workflows.gateway.clients.door import CALL, PRICES, QUESTION, Door, door

anthropic = pytest.importorskip("anthropic", reason="pip install -e '.[dev]' brings it")

LOOK_UP = {
    "name": "look_up",
    "description": "price of a fruit",
    "input_schema": {"type": "object", "properties": {"fruit": {"type": "string"}}, "required": ["fruit"]},
}


def client(there: Door, **options: Any) -> Any:
    return anthropic.Anthropic(base_url=there.address, api_key=there.key, max_retries=0, **options)


def said(there: Door, streamed: bool, **options: Any) -> Any:
    options = {"model": "any", "max_tokens": 100, **options}
    if not streamed:
        return client(there).messages.create(**options)
    with client(there).messages.stream(**options) as stream:
        return stream.get_final_message()


@pytest.mark.parametrize("streamed", [False, True])
def test_a_conversation_with_tools(streamed: bool) -> None:
    with door() as there:
        messages: list[Any] = [{"role": "user", "content": QUESTION}]
        while True:
            answer = said(there, streamed, messages=messages, tools=[LOOK_UP])
            messages.append({"role": "assistant", "content": answer.content})
            calls = [block for block in answer.content if block.type == "tool_use"]
            if not calls:
                break
            assert answer.stop_reason == "tool_use" and answer.content[0].text == "I look."
            results = [
                {"type": "tool_result", "tool_use_id": one.id, "content": str(PRICES[one.input["fruit"]])}
                for one in calls
            ]
            messages.append({"role": "user", "content": results})
        there.check_one_path()
        last = there.session.transcript.calls[-1]
    assert (answer.content[0].text, answer.stop_reason) == ("It is 6.", "end_turn")
    assert (answer.usage.input_tokens, answer.usage.output_tokens) == (last.prompt.count, 9)


@pytest.mark.parametrize("streamed", [False, True])
def test_the_runner_of_tools(streamed: bool) -> None:
    """It would have the provider hold the conversation; refused, it sends the whole one."""

    @anthropic.beta_tool
    def look_up(fruit: str) -> str:
        """Price of a fruit."""
        return str(PRICES[fruit])

    with door() as there:
        ask: Any = {"model": "any", "max_tokens": 100, "messages": [{"role": "user", "content": QUESTION}]}
        runner = client(there).beta.messages.tool_runner(tools=[look_up], stream=streamed, **ask)
        answer = runner.until_done()
        assert not there.session.refused
        there.check_one_path()
        with pytest.raises(anthropic.BadRequestError, match=r"thread: .* continue_unthreaded"):
            client(there).beta.messages.thread(model="any", max_tokens=9).send({"role": "user", "content": "x"})
    assert answer.content[0].text == "It is 6."


@pytest.mark.parametrize("streamed", [False, True])
def test_a_reply_says_why_it_ended(streamed: bool) -> None:
    with door(["six", "six!or more"]) as there:
        ask: Any = {"messages": [{"role": "user", "content": "x"}]}
        assert said(there, streamed, max_tokens=2, **ask).stop_reason == "max_tokens"
        answer = said(there, streamed, stop_sequences=["?", "!"], **ask)
    assert (answer.content[0].text, answer.stop_reason, answer.stop_sequence) == ("six", "stop_sequence", "!")


def test_system_blocks_thoughts_and_results_are_the_templates_own() -> None:
    with door(["well"]) as there:
        client(there).messages.create(
            model="any",
            max_tokens=9,
            system=[{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
            messages=[
                {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
                {
                    "role": "assistant",
                    "content": [
                        {"type": "thinking", "thinking": "hm", "signature": ""},
                        {"type": "tool_use", "id": "t", "name": "look_up", "input": {"fruit": "pear"}},
                    ],
                },
                {
                    "role": "user",
                    "content": [
                        {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "text", "text": "5"}]},
                        {"type": "text", "text": "go on"},
                    ],
                },
            ],
        )
        (exchange,) = there.session.exchanges
    assert exchange.messages == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "ab"},
        {
            "role": "assistant",
            "content": "",
            "reasoning_content": "hm",
            "tool_calls": [
                {"id": "t", "type": "function", "function": {"name": "look_up", "arguments": '{"fruit": "pear"}'}}
            ],
        },
        {"role": "tool", "tool_call_id": "t", "content": "5"},
        {"role": "user", "content": "go on"},
    ]


def test_tokens_are_counted_as_they_are_sent() -> None:
    with door(["well"]) as there:
        ask: Any = {"model": "any", "messages": [{"role": "user", "content": QUESTION}], "tools": [LOOK_UP]}
        counted = client(there).messages.count_tokens(**ask).input_tokens
        assert not there.engine.seen
        assert client(there).messages.create(max_tokens=9, **ask).usage.input_tokens == counted


def test_models_are_listed() -> None:
    with door() as there:
        assert [one.id for one in client(there).models.list()] == ["policy"]
        assert client(there).models.retrieve("policy").display_name == "policy"
        with pytest.raises(anthropic.NotFoundError, match="the only model listed"):
            client(there).models.retrieve("another")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"top_p": 0.5}, "top_p"),
        ({"top_k": 3}, "top_k"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking"),
        ({"output_config": {"effort": "low"}}, "output_config.effort: not supported; leave it out, or have override"),
        (
            {"output_config": {"format": {"type": "json_schema", "schema": {}}}},
            'output_config.format: {"type": "json_schema", "schema": {}} cannot be honoured; nothing forces a reply',
        ),
        ({"tool_choice": {"type": "any"}, "tools": [LOOK_UP]}, "tool_choice"),
        ({"temperature": 1.5}, "temperature"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"name": "x", "input_schema": {"type": "what"}}]}, "tools[0].input_schema"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
            "messages[0].content[0].source.type",
        ),
        ({"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "It"}]}, "messages"),
        ({"container": "c"}, "container"),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "q", "content": "3"}]}]},
            "messages[0].content[0].tool_use_id",
        ),
    ],
)
def test_what_is_not_honoured_is_refused_by_name(options: dict[str, Any], says: str) -> None:
    with door() as there:
        ask = {"model": "any", "max_tokens": 9, "messages": [{"role": "user", "content": "x"}], **options}
        with pytest.raises(anthropic.BadRequestError) as caught:
            client(there).post("/v1/messages", body=ask, cast_to=object)
        told = caught.value.body
    assert told["error"]["message"].startswith(says) and told["error"]["type"] == "invalid_request_error"


def test_errors_are_those_the_package_knows() -> None:
    with door([CALL], max_calls=1) as there:
        ask: Any = {"model": "any", "max_tokens": 9, "messages": [{"role": "user", "content": "x"}]}
        with pytest.raises(anthropic.AuthenticationError):
            anthropic.Anthropic(base_url=there.address, api_key="no", max_retries=0).messages.create(**ask)
        with pytest.raises(anthropic.NotFoundError):
            client(there).messages.batches.list()
        with pytest.raises(anthropic.BadRequestError, match="prompt is too long"):
            client(there).messages.create(**{**ask, "messages": [{"role": "user", "content": "x" * 5000}]})
    with door(["a"], max_calls=1) as there:
        client(there).messages.create(**ask)
        with pytest.raises(anthropic.BadRequestError, match="spent"):  # a status that is not tried again
            client(there, **{}).with_options(max_retries=3).messages.create(**ask)
        assert len(there.engine.seen) == 1
