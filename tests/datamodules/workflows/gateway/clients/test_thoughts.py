"""Thoughts of a reply are apart from what it says, and in later prompts where the model's template shows them."""

from __future__ import annotations

from typing import Any

import pytest
from anthropic import Anthropic
from openai import OpenAI
from openai.types.chat import ChatCompletionMessage

from datamodules.conversations.chat_template import Chat
from datamodules.workflows.base import EpisodeEngine
from datamodules.workflows.gateway import Budget, Session
from datamodules.workflows.gateway.protocols.servable import Sampling
from datamodules.workflows.tool_calls import hermes_calls
from tests.datamodules.workflows.gateway.clients.door import CALL, QUESTION, TOKENIZER, Door, door
from tests.datamodules.workflows.scripted_engine import WITH_CALLS, ScriptedEngine
from tests.helpers.recorded_samples import byte_tokenizer

THINKS = "<think>\nThree a piece.\n</think>\n\n"
LOOK_UP: dict[str, Any] = {
    "type": "function",
    "function": {"name": "look_up", "parameters": {"type": "object", "properties": {"fruit": {"type": "string"}}}},
}
# As Qwen 3.8 has it: the prompt opens the thought, and history takes it from `reasoning_content` alone.
APART = """{%- for m in messages -%}
{%- if m.role == 'assistant' -%}
<|begin|>assistant
<think>
{{ m.reasoning_content | trim }}
</think>

{{ m.content }}<|end|>
{% else -%}
<|begin|>{{ m.role }}
{{ m.content }}<|end|>
{% endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}<|begin|>assistant
<think>
{% endif -%}"""
# As Nemotron 3 has it: the prompt opens the thought, and history needs the mark in the content.
MARKED = APART.replace("<think>\n{{ m.reasoning_content | trim }}\n</think>\n\n{{", "{{")
KEEPS = WITH_CALLS.replace(".split('</think>')[-1]", "")


def client(there: Door) -> OpenAI:
    return OpenAI(base_url=there.v1, api_key=there.key, max_retries=0)


def session_of(replies: list[str], template: str) -> tuple[Session, ScriptedEngine]:
    tokenizer = byte_tokenizer(template)
    engine = ScriptedEngine(tokenizer, replies)
    episode = EpisodeEngine(engine, tokenizer, None, name="e", seed="s")  # type: ignore[arg-type]
    return Session(episode, Chat(tokenizer), Sampling(200), Budget(), hermes_calls), engine


def streamed(there: Door, **asked: Any) -> dict[str, str]:
    found: dict[str, str] = {}
    for event in client(there).chat.completions.create(model="any", stream=True, **asked):
        for key in ("reasoning_content", "content"):
            found[key] = found.get(key, "") + (getattr(event.choices[0].delta, key, None) or "")
    return found


def test_they_are_apart_streamed_and_whole() -> None:
    with door([THINKS + "It is 6."] * 2 + [THINKS + CALL] * 2) as there:
        asked: dict[str, Any] = {"messages": [{"role": "user", "content": QUESTION}]}
        said = client(there).chat.completions.create(model="any", **asked).choices[0].message
        assert (said.content, said.reasoning_content) == ("It is 6.", "Three a piece.")  # type: ignore[attr-defined]
        assert streamed(there, **asked) == {"content": "It is 6.", "reasoning_content": "Three a piece."}
        called = client(there).chat.completions.create(model="any", tools=[LOOK_UP], **asked).choices[0].message
        assert called.content == "I look." and called.tool_calls and called.reasoning_content  # type: ignore[attr-defined]
        assert streamed(there, tools=[LOOK_UP], **asked)["content"] == "I look."
        assert there.session.text() == "I look."


def test_log_probabilities_are_of_all_that_was_sampled() -> None:
    with door([THINKS + "It is 6."] * 2) as there:
        asked: dict[str, Any] = {"messages": [{"role": "user", "content": QUESTION}], "logprobs": True}
        whole = client(there).chat.completions.create(model="any", **asked).choices[0].logprobs
        pieces = [
            one
            for event in client(there).chat.completions.create(model="any", stream=True, **asked)
            for one in (event.choices[0].logprobs.content or [] if event.choices[0].logprobs else [])
        ]
        assert whole and whole.content and [one.token for one in pieces] == [one.token for one in whole.content]
        assert "".join(one.token for one in pieces).startswith(THINKS)


def without(message: ChatCompletionMessage) -> dict[str, Any]:
    """As most clients send a reply back."""
    return {
        key: value for key, value in message.model_dump().items() if key in ("role", "content", "tool_calls") and value
    }


def as_it_came(message: ChatCompletionMessage) -> dict[str, Any]:
    return {**without(message), "reasoning_content": message.reasoning_content}  # type: ignore[attr-defined]


@pytest.mark.parametrize("sends", [without, as_it_came])
def test_the_template_has_them_back_whoever_forgot_them(sends: Any) -> None:
    """This one shows those behind the last message of the user: a conversation with a tool is one path, until it asks
    again."""
    session, engine = session_of([THINKS + CALL, THINKS + "It is 6.", "Yes."], WITH_CALLS)
    with door([], session) as there:
        messages: list[Any] = [{"role": "user", "content": QUESTION}]
        said = client(there).chat.completions.create(model="any", messages=messages, tools=[LOOK_UP]).choices[0].message
        assert said.tool_calls
        messages += [sends(said), {"role": "tool", "tool_call_id": said.tool_calls[0].id, "content": "3"}]
        said = client(there).chat.completions.create(model="any", messages=messages, tools=[LOOK_UP]).choices[0].message
        first, second = engine.seen
        path = [*first.tokens, *engine.responses[0].tokens]
        assert second.tokens[: len(path)] == path and not session.transcript.drift
        messages += [sends(said), {"role": "user", "content": "Sure?"}]
        client(there).chat.completions.create(model="any", messages=messages, tools=[LOOK_UP])
        assert "Three a piece" not in TOKENIZER.decode(engine.seen[2].tokens) and session.transcript.drift["thoughts"]


@pytest.mark.parametrize("other", ["", "Four a piece."])
def test_a_client_may_drop_or_change_them(other: str) -> None:
    session, engine = session_of([THINKS + "It is 6.", "Yes."], KEEPS)
    with door([], session) as there:
        messages: list[Any] = [{"role": "user", "content": QUESTION}]
        said = client(there).chat.completions.create(model="any", messages=messages).choices[0].message
        messages += [{**without(said), "reasoning_content": other}, {"role": "user", "content": "Sure?"}]
        client(there).chat.completions.create(model="any", messages=messages)
        assert "Three a piece" not in TOKENIZER.decode(engine.seen[1].tokens)


def test_replies_that_say_the_same_keep_their_own() -> None:
    first, second = "<think>\nOne.\n</think>\n\nYes.", "<think>\nTwo.\n</think>\n\nYes."
    session, engine = session_of([first, second, "No."], KEEPS)
    with door([], session) as there:
        messages: list[Any] = []
        for ask in ("a", "b", "c"):
            messages.append({"role": "user", "content": ask})
            said = client(there).chat.completions.create(model="any", messages=messages).choices[0].message
            messages.append(without(said))
        shown = TOKENIZER.decode(engine.seen[2].tokens)
        assert shown.index("One.") < shown.index("Two.") and shown.count("Yes.") == 2
        assert not session.transcript.drift


def test_other_protocols_do_not_show_them_and_go_on_with_them() -> None:
    session, engine = session_of([THINKS + "It is 6.", "Yes.", THINKS + "It is 6.", "Yes."], KEEPS)
    with door([], session) as there:
        made = Anthropic(base_url=there.address, api_key=there.key, max_retries=0)
        messages: list[Any] = [{"role": "user", "content": QUESTION}]
        said = made.messages.create(model="any", max_tokens=99, messages=messages)
        assert [one.type for one in said.content] == ["text"] and said.content[0].text == "It is 6."  # type: ignore[union-attr]
        messages += [{"role": "assistant", "content": said.content}, {"role": "user", "content": "Sure?"}]
        made.messages.create(model="any", max_tokens=99, messages=messages)
        first = client(there).responses.create(model="any", input=QUESTION)
        assert first.output_text == "It is 6."
        client(there).responses.create(model="any", input="Sure?", previous_response_id=first.id)
        for k in (0, 2):
            path = [*engine.seen[k].tokens, *engine.responses[k].tokens]
            assert engine.seen[k + 1].tokens[: len(path)] == path


def test_a_prompt_that_is_no_conversation_is_gone_on_with() -> None:
    with door([THINKS + "It is 6."] * 2) as there:
        asked: dict[str, Any] = {"model": "any", "prompt": "Two apples?", "max_tokens": 200}
        assert client(there).completions.create(**asked).choices[0].text == THINKS + "It is 6."
        pieces = [event.choices[0].text for event in client(there).completions.create(stream=True, **asked)]
        assert "".join(pieces) == THINKS + "It is 6."


@pytest.mark.parametrize("sends", [without, as_it_came])
@pytest.mark.parametrize("template", [APART, MARKED, KEEPS], ids=["apart", "marked", "kept"])
def test_each_template_has_them_in_its_own_form(template: str, sends: Any) -> None:
    opened = template is not KEEPS
    session, engine = session_of(
        [(THINKS.removeprefix("<think>\n") if opened else THINKS) + "It is 6.", "Yes."], template
    )
    with door([], session) as there:
        messages: list[Any] = [{"role": "user", "content": QUESTION}]
        said = client(there).chat.completions.create(model="any", messages=messages).choices[0].message
        assert (said.content, said.reasoning_content) == ("It is 6.", "Three a piece.")  # type: ignore[attr-defined]
        messages += [sends(said), {"role": "user", "content": "Sure?"}]
        client(there).chat.completions.create(model="any", messages=messages)
        path = [*engine.seen[0].tokens, *engine.responses[0].tokens]
        assert engine.seen[1].tokens[: len(path)] == path and not session.transcript.drift


def thinks(what: str) -> str:
    return f"<think>\n{what}\n</think>\n\nYes."


def test_a_thought_is_of_the_reply_to_the_message_before() -> None:
    """Also where the agent shows a window of its conversation; nobody else's reply that says the same has it."""
    session, engine = session_of([thinks("One."), thinks("Two."), thinks("Three."), "No.", "No."], KEEPS)
    with door([], session) as there:

        def ask(*said: str) -> str:
            roles = [{"role": ("user", "assistant")[k % 2], "content": one} for k, one in enumerate(said)]
            client(there).chat.completions.create(model="any", messages=roles)  # type: ignore[arg-type]
            return TOKENIZER.decode(engine.seen[-1].tokens)

        ask("a")
        ask("a", "Yes.", "b")
        ask("a", "Yes.", "b", "Yes.", "c")
        window = ask("b", "Yes.", "c", "Yes.", "d")
        assert "One." not in window and window.index("Two.") < window.index("Three.")
        assert "Two." not in ask("an example", "Yes.", "e")


def test_choices_that_say_the_same_with_other_thoughts_have_none_back() -> None:
    session, engine = session_of([thinks("One."), thinks("Two."), "No."], KEEPS)
    with door([], session) as there:
        messages: list[Any] = [{"role": "user", "content": "a"}]
        first, _ = client(there).chat.completions.create(model="any", messages=messages, n=2).choices
        messages += [without(first.message), {"role": "user", "content": "b"}]
        client(there).chat.completions.create(model="any", messages=messages)
        assert "One." not in (shown := TOKENIZER.decode(engine.seen[2].tokens)) and "Two." not in shown


def test_replies_that_say_the_same_keep_their_ids_behind_a_fork() -> None:
    session, engine = session_of([thinks("One."), thinks("Two."), "No."], KEEPS)
    with door([], session) as there:
        messages: list[Any] = [{"role": "system", "content": "s"}]
        for ask in ("a", "b", "c"):
            messages.append({"role": "user", "content": ask})
            messages[0] = {"role": "system", "content": "other" if ask == "c" else "s"}
            said = client(there).chat.completions.create(model="any", messages=messages).choices[0].message
            messages.append(without(said))
        assert not session.transcript.drift
        shown, sampled = engine.seen[2].tokens, [one.tokens for one in engine.responses[:2]]
        assert all(any(shown[k : k + len(ids)] == ids for k in range(len(shown))) for ids in sampled)


def test_a_stop_text_within_an_opened_thought_ends_a_thought() -> None:
    session, _ = session_of(["I see. Observation: x</think>Aloud"], APART)
    with door([], session) as there:
        messages: list[Any] = [{"role": "user", "content": "a"}]
        said = client(there).chat.completions.create(model="any", messages=messages, stop=["Observation:"]).choices[0]
        assert (said.message.content, said.message.reasoning_content) == ("", "I see.")  # type: ignore[attr-defined]
