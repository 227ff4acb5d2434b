"""What a gateway in front of a provider records of protocols other than Chat Completions, by their own packages."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from datamodules.recorded import RecordedDataModule
from datamodules.workflows.gateway.heard import BrokenOff, read
from datamodules.workflows.gateway.overheard import Conversations, NotRecorded
from tests.datamodules.workflows.gateway.clients.door import CALL, QUESTION, START_S, TOKENIZER, door
from tests.datamodules.workflows.gateway.test_upstream import KEEPS_ITS_HISTORY, Front, front
from tests.helpers.recorded_samples import byte_tokenizer

anthropic = pytest.importorskip("anthropic", reason="pip install -e '.[dev]' brings it")

SCHEMA = {"type": "object", "properties": {"fruit": {"type": "string"}}, "required": ["fruit"]}
OF_RESPONSES: Any = {"type": "function", "name": "look_up", "description": "prices", "parameters": SCHEMA}
OF_MESSAGES: Any = {"name": "look_up", "description": "prices", "input_schema": SCHEMA}
OF_CHAT = {"type": "function", "function": {"name": "look_up", "description": "prices", "parameters": SCHEMA}}


def by_responses(gateway: Front, key: str, streamed: bool, remembered: bool) -> None:
    """`remembered`: the provider is asked to go on, and is not sent the conversation again."""
    client = gateway.client("one", key)
    said: list[Any] = []

    def ask(items: list[Any]) -> Any:
        options: dict[str, Any] = {"model": "policy", "tools": [OF_RESPONSES], "instructions": "Be brief."}
        options["input"] = items if remembered else [*said, *items]
        if remembered and said:
            options["previous_response_id"] = said[-1].id
        if streamed:
            with client.responses.stream(**options) as stream:
                answer = stream.get_final_response()
        else:
            answer = client.responses.create(**options)
        said.extend([answer] if remembered else [*items, *answer.model_dump(exclude_none=True)["output"]])
        return answer

    (call,) = (one for one in ask([{"role": "user", "content": QUESTION}]).output if one.type == "function_call")
    answer = ask([{"type": "function_call_output", "call_id": call.call_id, "output": "3"}])
    assert answer.output_text == "It is 6."
    ask([{"role": "user", "content": "Sure?"}])


def by_messages(gateway: Front, key: str, streamed: bool) -> None:
    base = f"{gateway.gateway.address}/r/one"
    client = anthropic.Anthropic(base_url=base, api_key=key, max_retries=0, timeout=START_S)
    messages: list[Any] = []

    def ask(content: Any) -> Any:
        messages.append({"role": "user", "content": content})
        options: dict[str, Any] = {"model": "policy", "max_tokens": 100, "system": "Be brief.", "tools": [OF_MESSAGES]}
        if streamed:
            with client.messages.stream(messages=messages, **options) as stream:
                answer = stream.get_final_message()
        else:
            answer = client.messages.create(messages=messages, **options)
        messages.append({"role": "assistant", "content": answer.content})
        return answer

    (call,) = (one for one in ask(QUESTION).content if one.type == "tool_use")
    ask([{"type": "tool_result", "tool_use_id": call.id, "content": "3"}])
    ask("Sure?")


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("how", ["responses", "responses, remembered", "messages"])
def test_a_conversation_with_tools_becomes_a_line(how: str, streamed: bool, tmp_path: Path) -> None:
    byte_tokenizer(KEEPS_ITS_HISTORY).save_pretrained(tmp_path / "tokenizer")
    directory = tmp_path / "recorded"
    with door([CALL, "It is 6.", "Yes."]) as there, front(there.v1, directory) as gateway:
        if how == "messages":
            by_messages(gateway, there.key, streamed)
        else:
            by_responses(gateway, there.key, streamed, "remembered" in how)
        gateway.post("one", "reward", {"reward": 0.5})
        gateway.post("one", "end")
        assert gateway.gateway.counts == {"written": 1, "replies": 3}
    (line,) = gateway.lines()
    assert (line["model"], line["reward"], line["tools"]) == ("policy", 0.5, [OF_CHAT])
    roles = ["system", "user", "assistant", "tool", "assistant", "user", "assistant"]
    assert [one["role"] for one in line["messages"]] == roles
    assert all(one.get("weight", 1) == 1 for one in line["messages"])
    (call,) = line["messages"][2]["tool_calls"]
    assert (call["name"], call["arguments"]) == ("look_up", {"fruit": "apple"})
    assert line["messages"][3] == {"role": "tool", "content": "3", "id": call["id"]}
    file = next(directory.iterdir())
    data = RecordedDataModule(str(file), workload="whole", tokenizer=str(tmp_path / "tokenizer"))
    data.setup("fit")
    batch = data.batch(0)
    (tokens,), (mask,) = list(batch.sequences()), list(batch.split(batch.loss_mask))
    assert TOKENIZER.decode(tokens[mask]) == f"{CALL}<|end|>It is 6.<|end|>Yes.<|end|>"
    assert TOKENIZER.decode(tokens).startswith(there.prompts()[0])  # what the provider was sent


@pytest.mark.parametrize("streamed", [False, True])
def test_completions_become_prompts_and_what_follows_them(streamed: bool, tmp_path: Path) -> None:
    TOKENIZER.save_pretrained(tmp_path / "tokenizer")
    replies = iter(["b", "c", "d"])
    with door(lambda _: next(replies)) as there, front(there.v1, tmp_path / "recorded") as gateway:
        client = gateway.client("one", there.key)
        for options in ({"n": 2}, {"stop": ["x"]}):
            answer: Any = client.completions.create(model="policy", prompt="a:", stream=streamed, **options)  # type: ignore[call-overload]
            list(answer) if streamed else None
        gateway.post("one", "reward", {"reward": 1})
        gateway.post("one", "end")
        assert gateway.gateway.counts == {"written": 1, "replies": 3}
    lines = gateway.lines()
    assert [(one["prompt"], one["ended"]) for one in lines] == [("a:", True), ("a:", True), ("a:", False)]
    assert sorted(one["completion"] for one in lines) == ["b", "c", "d"] and len({one["task_id"] for one in lines}) == 1
    file = next((tmp_path / "recorded").iterdir())
    data = RecordedDataModule(str(file), workload="whole", tokenizer=str(tmp_path / "tokenizer"))
    data.setup("fit")
    batch = data.batch(0)
    told = [TOKENIZER.decode(one) for one in batch.sequences()]
    trained = [
        TOKENIZER.decode(tokens[mask])
        for tokens, mask in zip(batch.sequences(), batch.split(batch.loss_mask), strict=True)
    ]
    assert sorted(trained) == ["b<|end|>", "c<|end|>", "d"] and all(one.startswith("a:") for one in told)


def encoded(value: Any) -> bytes:
    return json.dumps(value).encode()


SAID = {"role": "assistant", "type": "message", "content": [{"type": "output_text", "text": "b"}]}
ANSWERED = {"id": "r1", "model": "m", "status": "completed", "output": [SAID]}
OF_ANTHROPIC = {"model": "m", "stop_reason": "end_turn", "content": [{"type": "text", "text": "b"}]}
USER = [{"role": "user", "content": "a"}]
GOING_ON = {"type": "continue", "previous_message_id": "m1"}
IMAGE = [{"role": "user", "content": [{"type": "image", "source": {}}]}]


@pytest.mark.parametrize(
    ("path", "request_", "answer", "cause"),
    [
        ("responses", {"input": "a"}, {**ANSWERED, "status": "incomplete"}, "cut_off"),
        ("responses", {"input": "a"}, {**ANSWERED, "output": [SAID, SAID]}, "not_text"),
        ("responses", {"input": "a"}, {**ANSWERED, "output": [{"type": "web_search_call"}, SAID]}, "not_text"),
        ("responses", {"input": "a", "previous_response_id": "r0"}, ANSWERED, "not_text"),
        ("responses", {"input": "a", "conversation": "c"}, ANSWERED, "not_text"),
        ("responses", {"input": "a", "tools": [{"type": "web_search"}]}, ANSWERED, "not_text"),
        ("messages", {"messages": USER}, {**OF_ANTHROPIC, "stop_reason": "max_tokens"}, "cut_off"),
        ("messages", {"messages": USER}, {**OF_ANTHROPIC, "content": [{"type": "server_tool_use"}]}, "not_text"),
        ("messages", {"messages": IMAGE}, OF_ANTHROPIC, "not_text"),
        ("messages", {"messages": [*USER, {"role": "assistant", "content": "x"}]}, OF_ANTHROPIC, "not_text"),
        ("messages", {"messages": USER, "thread": {"type": "fork"}}, OF_ANTHROPIC, "not_text"),
        ("messages", {"messages": USER, "thread": GOING_ON}, {**OF_ANTHROPIC, "id": "m1"}, "not_text"),
        ("messages", {"messages": USER, "mcp_servers": [{"type": "url"}]}, OF_ANTHROPIC, "not_text"),
        (
            "messages",
            {"messages": USER, "context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}},
            {**OF_ANTHROPIC, "context_management": {"applied_edits": [{"type": "clear_tool_uses_20250919"}]}},
            "not_text",
        ),
        ("completions", {"prompt": "a"}, {"choices": [{"text": "b", "finish_reason": "length"}]}, "cut_off"),
        ("completions", {"prompt": [1, 2]}, {"choices": [{"text": "b", "finish_reason": "stop"}]}, "not_text"),
        (
            "completions",
            {"prompt": "a", "echo": True},
            {"choices": [{"text": "ab", "finish_reason": "stop"}]},
            "not_text",
        ),
    ],
)
def test_what_is_not_whole_or_more_than_text_is_not_recorded(path: str, request_: Any, answer: Any, cause: str) -> None:
    conversations = Conversations()
    with pytest.raises(NotRecorded) as caught:
        conversations.add(path, encoded(request_), encoded(answer), False)
    assert caught.value.cause == cause and list(conversations.lines("s", 1.0)) == []


def test_a_stream_that_fails_or_stops_is_not_recorded() -> None:
    begun = b'data: {"type": "message_start", "message": {"model": "m"}}\n\n'
    failed = begun + b'event: error\ndata: {"type": "error", "error": {"type": "overloaded_error"}}\n\n'
    with pytest.raises(BrokenOff):
        read("messages", encoded({"messages": USER}), failed, True)
    for path, request_, stream in (
        ("messages", {"messages": USER}, begun),
        ("responses", {"input": "a"}, b'data: {"type": "response.created", "response": {}}\n\n'),
    ):
        with pytest.raises(NotRecorded) as caught:
            Conversations().add(path, encoded(request_), stream, True)
        assert caught.value.cause == "cut_off"


def test_what_coding_agents_send_is_recorded() -> None:
    """A tool of a namespace, as Codex has it, and a message of the system among the others, as Claude Code has it."""
    called = {"type": "function_call", "namespace": "shop", "name": "look_up", "call_id": "c", "arguments": "{}"}
    space = {"type": "namespace", "name": "shop", "tools": [OF_RESPONSES]}
    answer = {**ANSWERED, "output": [called]}
    by_codex = read("responses", encoded({"input": "a", "tools": [space]}), encoded(answer), False)
    ((reply, _),) = by_codex.replies
    assert [reply["tool_calls"][0]["name"]] == [one["function"]["name"] for one in by_codex.tools] == ["shop.look_up"]
    told = {"role": "system", "content": "There are skills."}
    by_claude = read("messages", encoded({"messages": [*USER, told]}), encoded(OF_ANTHROPIC), False)
    assert by_claude.messages == [*USER, told]


def test_a_call_that_gives_a_text_is_recorded_as_the_gateway_shows_it() -> None:
    called = {"type": "custom_tool_call", "call_id": "c", "name": "apply_patch", "input": 'a "b"'}
    tool = {"type": "custom", "name": "apply_patch", "format": {"type": "grammar", "syntax": "lark", "definition": "x"}}
    answer = {**ANSWERED, "output": [called]}
    heard = read("responses", encoded({"input": "a", "tools": [tool]}), encoded(answer), False)
    ((reply, _),) = heard.replies
    assert reply["tool_calls"] == [{"id": "c", "name": "apply_patch", "arguments": {"input": 'a "b"'}}]
    assert heard.tools is not None and heard.tools[0]["function"]["parameters"]["required"] == ["input"]


def test_both_ways_to_a_conversation_are_one() -> None:
    """A conversation that is sent again, and one that its provider is asked to go on with."""
    conversations = Conversations()
    conversations.add("responses", encoded({"input": "a", "instructions": "x"}), encoded(ANSWERED), False)
    second = {**ANSWERED, "id": "r2"}
    for request_ in (
        {"input": "c", "instructions": "x", "previous_response_id": "r1"},
        {"input": [*USER, SAID, {"role": "user", "content": "c"}], "instructions": "x"},
    ):
        conversations.add("responses", encoded(request_), encoded(second), False)
    (line,) = conversations.lines("s", 1.0)
    assert [one["content"] for one in line["messages"]] == ["x", "a", "b", "c", "b"]
    # Instructions are those of one request.
    conversations.add("responses", encoded({"input": "c", "previous_response_id": "r1"}), encoded(second), False)
    other = list(conversations.lines("s", 1.0))[-1]
    assert [(one["content"], one.get("weight", 1)) for one in other["messages"]] == [
        ("a", 1),
        ("b", 0),
        ("c", 1),
        ("b", 1),
    ]


@pytest.mark.parametrize("streamed", [False, True])
def test_a_thread_has_system_tools_and_messages_from_where_it_begins(streamed: bool) -> None:
    """Of Anthropic's, which hold a conversation at the provider: as `anthropic` 2.12's runner of tools sends them."""

    def add(identity: str, said: dict[str, Any], **asked: Any) -> None:
        reason = "tool_use" if said["type"] == "tool_use" else "end_turn"
        answer = {"id": identity, "model": "m", "stop_reason": reason, "content": [said]}
        events = [
            {"type": "message_start", "message": {"id": identity, "model": "m"}},
            {"type": "content_block_start", "index": 0, "content_block": said},
            {"type": "message_delta", "delta": {"stop_reason": reason}, "context_management": kept},
        ]
        stream = b"".join(b"data: " + encoded(one) + b"\n\n" for one in events)
        answer |= {"context_management": kept}
        conversations.add("messages", encoded(asked), stream if streamed else encoded(answer), streamed)

    kept = {"applied_edits": [{"type": "clear_thinking_20251015"}]}  # no thought is recorded
    conversations = Conversations()
    call = {"type": "tool_use", "id": "t", "name": "look_up", "input": {"fruit": "apple"}}
    result = {"type": "tool_result", "tool_use_id": "t", "content": "3"}
    add("m1", call, messages=USER, system="x", tools=[OF_MESSAGES], thread={"type": "create"})
    add("m2", {"type": "text", "text": "6"}, messages=[{"role": "user", "content": [result]}], thread=GOING_ON)
    (line,) = conversations.lines("s", 1.0)
    assert line["tools"] == [OF_CHAT]
    roles = ["system", "user", "assistant", "tool", "assistant"]
    assert [one["role"] for one in line["messages"]] == roles
    assert all(one.get("weight", 1) == 1 for one in line["messages"])


def test_conversations_that_began_alike_are_of_one_task_and_a_sub_agents_is_another() -> None:
    """A preference between a helper's answer and the task's would be of two questions."""

    def call(into: Conversations, asked: list[dict[str, str]], reply: str) -> list[dict[str, str]]:
        said = {"role": "assistant", "content": reply}
        choice = {"index": 0, "finish_reason": "stop", "message": said}
        answer = {"id": "x", "object": "chat.completion", "model": "any", "choices": [choice]}
        request = {"model": "any", "messages": asked}
        into.add("chat/completions", json.dumps(request).encode(), json.dumps(answer).encode(), False)
        return [*asked, said]

    task, helper, told = ({"role": "user", "content": text} for text in ("task", "helper: look it up", "it says 42"))
    one, other = Conversations(), Conversations()
    first = call(one, [task], "ask a helper")
    call(one, [helper], "42")
    call(one, [*first, told], "It is 42.")
    call(other, [task], "It is 7.")
    lines = [*one.lines("A", 1.0), *other.lines("B", 0.0)]
    tasks = {line["messages"][-1]["content"]: line["task_id"] for line in lines}
    assert tasks["It is 42."] == tasks["It is 7."] != tasks["42"]
