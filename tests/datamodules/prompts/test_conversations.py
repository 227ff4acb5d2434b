"""Questions and answers as chat messages: nothing that was said is lost on the way to a prompt and its reply."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from datamodules.prompts import JsonlPrompts, Prompt

ASKED, SAID = {"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}
BEFORE = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes?"}]
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
SYSTEM = {"role": "system", "content": "Be brief."}


def first(folder: Path, record: dict[str, Any], **options: Any) -> Prompt:
    file = folder / "chat.jsonl"
    file.write_text(json.dumps(record) + "\n")
    return JsonlPrompts(str(file), **options).deal(0)


@pytest.mark.parametrize("key", ["tool_calls", "function_call", "reasoning_content", "reasoning", "thinking"])
def test_an_answer_that_says_more_than_its_text_is_refused(tmp_path: Path, key: str) -> None:
    for content in ("A moment.", None) if key == "tool_calls" else ("A moment.",):
        answer = [{**SAID, "content": content, key: [CALL] if key == "tool_calls" else "I add."}]
        with pytest.raises(ValueError, match=rf"chat.jsonl:1: the answer has '{key}', which is not in its text"):
            first(tmp_path, {"question": [ASKED], "answer": answer})


@pytest.mark.parametrize(
    ("question", "before"),
    [
        ([ASKED], [*BEFORE, ASKED]),
        ([ASKED], [{"role": "user", "content": "2+2?"}]),
        ([*BEFORE, ASKED], [ASKED]),
        ([ASKED], [SYSTEM, ASKED]),
        ("1+1?", [*BEFORE, ASKED]),
    ],
)
def test_an_answer_to_another_conversation_is_refused(tmp_path: Path, question: Any, before: Any) -> None:
    with pytest.raises(ValueError, match=r"chat.jsonl:1: the messages before the answer are not those of the prompt"):
        first(tmp_path, {"question": question, "answer": [*before, SAID]})


@pytest.mark.parametrize(
    ("question", "options"),
    [
        ("1+1?", {}),
        ("1+1?", {"chat": True, "system": "Be brief."}),
        ("1+1?", {"template": "Q: {question}\nA:"}),
        ([ASKED], {"system": "Be brief."}),
        ([SYSTEM, ASKED], {}),
    ],
)
def test_an_answer_may_repeat_what_it_answers(tmp_path: Path, question: Any, options: dict[str, Any]) -> None:
    assert first(tmp_path, {"question": question, "answer": [ASKED, SAID]}, **options).solution == "2"


def test_one_field_may_hold_whole_conversations(tmp_path: Path) -> None:
    both = {"question_field": "messages", "answer_field": "messages"}
    prompt = first(tmp_path, {"messages": [*BEFORE, ASKED, SAID], "other": 1}, **both)
    assert prompt.messages == (*BEFORE, ASKED) and prompt.solution == "2" and prompt.metadata == {"other": 1}
    for value in ([SAID], "1+1?"):
        with pytest.raises(ValueError, match=r"chat.jsonl:1: .* both name 'messages', which then has to hold a conver"):
            first(tmp_path, {"messages": value}, **both)


def test_a_question_that_is_answered_already_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"the last message in field .messages. is of the assistant.* too"):
        first(tmp_path, {"messages": [ASKED, SAID], "answer": "2"}, question_field="messages")


def test_a_second_system_message_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"chat.jsonl:1: field 'question' begins with a system message, and JsonlProm"):
        first(tmp_path, {"question": [SYSTEM, ASKED], "answer": "2"}, system="Be kind.")


def test_an_answer_in_parts_is_told_so(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"chat.jsonl:1: the answer's content is a list; write it as text"):
        first(tmp_path, {"question": [ASKED], "answer": [{**SAID, "content": [{"type": "text", "text": "2"}]}]})
