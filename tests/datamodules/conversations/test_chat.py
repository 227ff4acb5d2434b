"""`ChatEncoder` trains what was recorded, or refuses: templates that drop, add or move what an assistant said."""

from __future__ import annotations

from typing import Any

import pytest

from datamodules.conversations.chat import ChatEncoder, SystemPrompt, Transcript
from datamodules.conversations.chat_template import Chat
from datamodules.conversations.messages import check_messages
from datamodules.conversations.tokens import RecordedDataError
from tests.helpers.recorded_samples import TEMPLATE, byte_tokenizer, messages

CALL = '<tool>{"name": "cancel", "arguments": {"order": 7}}</tool>'
NO_THOUGHTS = TEMPLATE.replace("{{ m.content }}", "{{ m.content.split('</think>')[-1].lstrip() }}")
NO_CALLS = TEMPLATE.replace("m.tool_calls or []", "[]")
NO_TEXT_BESIDE_CALLS = TEMPLATE.replace("{{ m.content }}", "{{ '' if m.tool_calls else m.content }}")
RESULTS_WITHIN = TEMPLATE.replace(
    "{{ m.content }}", "{{ messages[loop.index].content if m.tool_calls }}{{ m.content }}"
)
# As Qwen3.8's: the prompt begins a thought, and the history of every reply is one behind an empty thought.
THOUGHT_BEGUN = TEMPLATE.replace(
    "\n{{ m.content }}", "\n{{ '<think>\n\n</think>\n\n' if m.role == 'assistant' }}{{ m.content }}"
).replace("<|begin|>assistant\n", "<|begin|>assistant\n<think>\n{{ '' }}")
# As that of DeepSeek R1: the same prompt, behind which the thought goes on.
THOUGHT_KEPT = TEMPLATE.replace("<|begin|>assistant\n", "<|begin|>assistant\n<think>\n{{ '' }}")


# As that of DeepSeek V3: arguments are put together with other text.
TEXT_OF_CALLS = TEMPLATE.replace(
    '{{ {"name": c.function.name, "arguments": c.function.arguments} | tojson }}',
    """{{ '{"name": "' + c.function.name + '", "arguments": ' + c.function.arguments + '}' }}""",
)


def trained(template: str, changes: dict[int, dict[str, Any]]) -> list[str]:
    """What is trained of the sample conversation with these fields of its messages changed."""
    tokenizer = byte_tokenizer(template)
    chat = [{**message, **changes.get(k, {})} for k, message in enumerate(messages())]
    one = ChatEncoder(tokenizer).encode(Transcript("0", 0, "m", 1.0, chat, "FILE:3"))
    return [tokenizer.decode(one.tokens[start:end]) for start, end in zip(one.starts, one.ends, strict=True)]


@pytest.mark.parametrize(
    ("template", "changes", "message"),
    [
        (NO_THOUGHTS, {1: {"content": "<think>\nAsk.\n</think>\n\nWhich one?"}}, r"\[1\]: .* does not show all"),
        (NO_CALLS, {}, r"\[3\]: .* does not show all"),
        (NO_CALLS, {3: {"content": "Now I cancel."}}, r"\[3\]: .* does not show all"),
        (NO_TEXT_BESIDE_CALLS, {3: {"content": "A moment."}}, r"\[3\]: .* does not show all"),
        (RESULTS_WITHIN, {}, r"\[3\]: .* puts what came later into this turn"),
        (THOUGHT_BEGUN, {5: {"content": "<think>\nGone?\n</think>\n\nDone."}}, r"\[5\]: .* does not show all"),
    ],
)
def test_a_turn_that_is_not_what_was_said_is_refused(
    template: str, changes: dict[int, dict[str, Any]], message: str
) -> None:
    with pytest.raises(RecordedDataError, match=rf"FILE:3: messages{message}.*; use another template.* weight 0"):
        trained(template, changes)


def test_what_a_template_does_not_show_may_go_untrained() -> None:
    assert trained(NO_TEXT_BESIDE_CALLS, {3: {"content": "A moment.", "weight": 0}}) == [
        "Which one?<|end|>",
        "Done.<|end|>",
    ]


def test_an_empty_thought_that_nobody_had_is_not_trained() -> None:
    plain = ["Which one?<|end|>", f"{CALL}<|end|>", "Done.<|end|>"]
    assert trained(THOUGHT_BEGUN, {}) == plain
    empty = {1: {"content": "<think>\n\n</think>\n\nWhich one?"}}
    assert trained(NO_THOUGHTS, empty) == plain
    assert trained(TEMPLATE, empty)[0] == "<think>\n\n</think>\n\nWhich one?<|end|>"


def test_thoughts_that_are_shown_are_trained() -> None:
    thought = {5: {"content": "<think>\nGone?\n</think>\n\nDone."}}
    assert trained(TEMPLATE, thought)[-1] == "<think>\nGone?\n</think>\n\nDone.<|end|>"
    every = {
        k: {"content": f"<think>\nSo?\n</think>\n\n{said}"} for k, said in ((1, "Which one?"), (3, ""), (5, "Done."))
    }
    assert trained(THOUGHT_KEPT, every)[-1] == "So?\n</think>\n\nDone.<|end|>"


@pytest.mark.parametrize("key", ["content", "tool_calls"])
def test_an_end_of_turn_within_a_turn_is_refused(key: str) -> None:
    """Training would end the turn there."""
    called = {"name": "write", "arguments": {"text": "a<|end|>b"}}
    said = {"content": "a<|end|>b"} if key == "content" else {"content": "", "tool_calls": [called]}
    with pytest.raises(
        RecordedDataError, match=rf"FILE:3: messages\[3\]\.{key} contains the end-of-turn token '<.end.>'"
    ):
        trained(TEMPLATE, {3: said})


@pytest.mark.parametrize("token", ["<|stop|>", "<|begin|>", "<|end|>"])
def test_a_reply_that_spells_an_end_or_a_beginning_is_refused(token: str) -> None:
    tokenizer = byte_tokenizer(TEMPLATE)
    tokenizer.add_special_tokens({"eos_token": "<|stop|>"})
    encoder = ChatEncoder(tokenizer)
    asked, reply = {"role": "user", "content": "Which?"}, {"role": "assistant", "content": f"That is {token}."}
    with pytest.raises(RecordedDataError, match=r"F: messages\[1\].content contains the .* '<\|\w+\|>': remove it"):
        encoder.encode(Transcript("0", 0, "m", 1.0, [asked, reply], "F"))
    if token != "<|end|>":  # in nobody's mouth it is trained by nobody
        others = [asked, {**reply, "weight": 0}, asked, {"role": "assistant", "content": "No."}]
        encoder.encode(Transcript("0", 0, "m", 1.0, others, "F"))


def test_every_turn_is_trained_with_the_end_that_engines_stop_at() -> None:
    """As GPT-OSS': the last reply of a conversation ends with another token than earlier ones."""
    template = TEMPLATE.replace("<|end|>", "{{ '<|stop|>' if loop.last and m.role == 'assistant' else '<|end|>' }}")
    tokenizer = byte_tokenizer(template)
    tokenizer.add_special_tokens({"eos_token": "<|stop|>"})
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    one = ChatEncoder(tokenizer).encode(Transcript("0", 0, "m", 1.0, [*chat, *chat], "F"))
    ends = [tokenizer.decode(one.tokens[start:end]) for start, end in zip(one.starts, one.ends, strict=True)]
    assert ends == ["b<|stop|>"] * 2
    # As rollouts serve it: what was said, its own end, and what follows.
    after = Chat(tokenizer).after_reply(chat[:1], tokenizer.eos_token_id, [tokenizer.eos_token_id])
    assert one.tokens[one.ends[0] : one.starts[1]].tolist() == after


def test_templates_that_take_arguments_as_text_are_given_it() -> None:
    assert trained(TEXT_OF_CALLS, {}) == trained(TEMPLATE, {})


def encoded(template: str, system: SystemPrompt | None = None, **fields: Any) -> None:
    one = {"messages": messages(), "tools": None, **fields}
    encoder = ChatEncoder(byte_tokenizer(template), system)
    encoder.encode(Transcript("0", 0, "m", 1.0, one["messages"], "FILE:3", tools=one["tools"]))


@pytest.mark.parametrize("role", ["system", "user", "tool"])
def test_a_template_that_leaves_somebody_out_is_refused(role: str) -> None:
    chat = [{"role": "system", "content": "Be brief."}, *messages()]
    encoded(TEMPLATE, messages=chat)
    number = 1 + [one["role"] for one in chat].index(role)
    without = TEMPLATE.replace("{%- for m in messages -%}", f"{{%- for m in messages if m.role != '{role}' -%}}")
    with pytest.raises(
        RecordedDataError, match=rf"FILE:3: .* not show the message of role {role} that is number {number} "
    ):
        encoded(without, messages=chat)


def test_a_template_that_leaves_tools_out_is_refused() -> None:
    tools = [{"type": "function", "function": {"name": "cancel"}}]
    encoded(TEMPLATE, tools=tools)
    for given in ({"tools": tools}, {"system": SystemPrompt("Be brief.", tools)}):
        with pytest.raises(
            RecordedDataError, match=r"FILE:3: .* does not show tools to the model, .* has 1; use another"
        ):
            encoded(TEMPLATE.replace("and tools", "and false"), **given)


def test_a_second_system_message_is_refused() -> None:
    chat = [{"role": "system", "content": "Be brief."}, *messages()]
    with pytest.raises(
        RecordedDataError, match=r"FILE:3: messages\[0\] is a system message, and data.system is another"
    ):
        encoded(TEMPLATE, SystemPrompt("Be kind."), messages=chat)
    encoded(TEMPLATE, SystemPrompt("Be kind."))


@pytest.mark.parametrize(
    ("k", "key", "value"),
    [(1, "reasoning_content", "Ask."), (1, "function_call", {"name": "f"}), (1, "train", False), (2, "name", "Ann")],
)
def test_a_key_that_no_template_would_be_given_is_refused(k: int, key: str, value: Any) -> None:
    chat = messages()
    chat[k][key] = value
    with pytest.raises(
        RecordedDataError, match=rf"FILE:3: messages\[{k}\].{key} would be left out, a message has role"
    ):
        check_messages(chat, "FILE:3")
    chat[k][key] = None
    check_messages(chat, "FILE:3")


def test_a_result_names_its_call_as_the_api_does() -> None:
    template = TEMPLATE.replace("{{ m.content }}", "{{ m.content }}{{ m.tool_call_id }}")
    chat, tokenizer = messages(), byte_tokenizer(template)
    chat[4]["tool_call_id"] = chat[4].pop("id")
    one = ChatEncoder(tokenizer).encode(Transcript("0", 0, "m", 1.0, chat, "FILE:3"))
    assert '{"ok": true}c1<|end|>' in tokenizer.decode(one.tokens)
