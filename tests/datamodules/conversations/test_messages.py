"""Files in OpenAI's and TRL's forms are trained as their chat template renders them, or refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from datamodules import RecordedDataModule
from datamodules.conversations.chat import ChatEncoder, load_transcripts
from datamodules.conversations.messages import as_recorded, check_messages
from datamodules.conversations.tokens import RecordedDataError
from tests.helpers.recorded_samples import TEMPLATE, byte_tokenizer, messages

TOOLS = [{"type": "function", "function": {"name": "cancel", "parameters": {"type": "object"}}}]
ASKED = {"role": "user", "content": "Cancel #7."}
NESTED = {"id": "c1", "type": "function", "function": {"name": "cancel", "arguments": '{"order": 7}'}}
CALLS = {"role": "assistant", "content": None, "tool_calls": [NESTED]}
SHOWN = {**CALLS, "content": "", "tool_calls": [{**NESTED, "function": {"name": "cancel", "arguments": {"order": 7}}}]}
RESULT = {"role": "tool", "tool_call_id": "c1", "name": "cancel", "content": "ok"}
CHAT = [{"role": "developer", "content": "Be brief."}, ASKED, CALLS, RESULT, {"role": "assistant", "content": "Done."}]
# Shows all that a template of any family may be given, and an option.
SHOWS_ALL = TEMPLATE.replace(
    "{{ m.content }}",
    "{{ prefix if m.role == 'user' }}{{ m.content }}{{ m.tool_call_id }}{{ m.name if m.role == 'tool' }}",
)
CALL = '<tool>{"name": "cancel", "arguments": {"order": 7}}</tool><|end|>'


def encoded(path: Path, record: dict[str, Any], template: str = SHOWS_ALL) -> tuple[str, list[str]]:
    """The whole text of a line, and what of it is trained."""
    path.write_text(json.dumps(record) + "\n")
    tokenizer = byte_tokenizer(template)
    one = ChatEncoder(tokenizer).encode(load_transcripts(path)[0])
    trained = [tokenizer.decode(one.tokens[start:end]) for start, end in zip(one.starts, one.ends, strict=True)]
    return tokenizer.decode(one.tokens), trained


def rendered(chat: list[dict[str, Any]], **options: Any) -> str:
    """By transformers alone, up to the end of the last turn."""
    return str(byte_tokenizer(SHOWS_ALL).apply_chat_template(chat, tools=TOOLS, tokenize=False, **options)).rstrip()


def test_a_line_of_openais_fine_tuning_is_trained_as_transformers_renders_it(tmp_path: Path) -> None:
    expected = rendered([{**CHAT[0], "role": "system"}, ASKED, SHOWN, *CHAT[3:]])
    for tools in (TOOLS, json.dumps(TOOLS)):
        record = {"messages": CHAT, "tools": tools, "parallel_tool_calls": False}
        assert encoded(tmp_path / "c.jsonl", record) == (expected, [CALL, "Done.<|end|>"])
    hidden = [*CHAT[:2], {**CALLS, "weight": 0}, *CHAT[3:]]
    record = {"messages": hidden, "tools": TOOLS}
    assert encoded(tmp_path / "c.jsonl", record) == (expected, ["Done.<|end|>"])


def test_of_messages_as_prompt_and_completion_the_completion_alone_is_trained(tmp_path: Path) -> None:
    record = {
        "prompt": [*CHAT[1:], ASKED],
        "completion": [CALLS],
        "tools": TOOLS,
        "chat_template_kwargs": {"prefix": "+"},
    }
    text, trained = encoded(tmp_path / "c.jsonl", record)
    assert trained == [CALL]
    assert text == rendered([ASKED, SHOWN, *CHAT[3:], ASKED, SHOWN], prefix="+")
    assert "+Cancel #7." in text


def test_an_option_that_begins_replies_otherwise_than_history_has_them_names_its_workload(tmp_path: Path) -> None:
    """As Qwen3's: without thoughts the prompt ends with an empty one, which later turns do not show."""
    begun = "<|begin|>assistant\n{{ '<think>\n\n</think>\n\n' if enable_thinking is false }}"
    template = TEMPLATE.replace("<|begin|>assistant\n", begun)
    record = {"messages": [ASKED, CHAT[4]], "chat_template_kwargs": {"enable_thinking": True}}
    assert encoded(tmp_path / "c.jsonl", record, template)[1] == ["Done.<|end|>"]
    record["chat_template_kwargs"] = {"enable_thinking": False}
    with pytest.raises(
        RecordedDataError, match=r"leave chat_template_kwargs out \(enable_thinking: false is workload: t"
    ):
        encoded(tmp_path / "c.jsonl", record, template)


def test_columns_of_tables_hold_nothing_where_there_is_nothing(tmp_path: Path) -> None:
    nulls = {"tool_calls": None, "tool_call_id": None, "weight": None, "name": None}
    record = {"messages": [{**nulls, **one} for one in messages()], "tools": None, "reward": None, "task_id": None}
    assert encoded(tmp_path / "c.jsonl", record) == encoded(tmp_path / "c.jsonl", {"messages": messages()})


def test_lines_without_names_and_rewards_are_tasks_of_their_own_to_imitate(tmp_path: Path) -> None:
    byte_tokenizer().save_pretrained(tmp_path / "tokenizer")
    path = tmp_path / "c.jsonl"
    path.write_text(f"{json.dumps({'messages': CHAT})}\n" * 2)
    given: dict[str, Any] = {"tokenizer": str(tmp_path / "tokenizer"), "workload": "whole", "shuffle": False}
    with pytest.raises(RecordedDataError, match=r"unrewarded: 2 of 2 sessions have no reward .* keep for imitation"):
        RecordedDataModule(str(path), **given).setup()
    data = RecordedDataModule(str(path), unrewarded="keep", tasks_per_batch=2, **given)
    data.setup()
    assert data.batch(0).prompt_ids == ["c.jsonl:1", "c.jsonl:2"]


@pytest.mark.parametrize(
    ("message", "place"),
    [
        ({**ASKED, "content": [{"type": "image_url", "image_url": {}}]}, r"content must be text"),
        ({**ASKED, "content": None}, r"content must be text"),
        ({"role": "assistant", "content": None}, r"content must be text"),
        (
            {**CALLS, "tool_calls": [{**NESTED, "function": {"name": "f", "arguments": "7"}}]},
            "arguments must be an obj",
        ),
        (
            {**CALLS, "tool_calls": [{**NESTED, "function": {"name": "f", "arguments": "{"}}]},
            "arguments must be an obj",
        ),
        ({**CALLS, "tool_calls": [{"type": "custom", "custom": {"name": "f"}}]}, "name must be a string"),
        ({**ASKED, "name": "Ann"}, "name would be left out"),
    ],
)
def test_what_is_no_text_or_call_is_refused_by_its_place(message: dict[str, Any], place: str) -> None:
    with pytest.raises(RecordedDataError, match=rf"F:1: messages\[0\]\.(tool_calls\[0\]\.)?{place}"):
        check_messages([as_recorded(message)], "F:1")


def test_texts_in_parts_and_refusals_are_what_was_said() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert as_recorded({"role": "user", "content": parts}) == {"role": "user", "content": "ab"}
    assert as_recorded({"role": "assistant", "content": None, "refusal": "No."})["content"] == "No."


@pytest.mark.parametrize("name", ["mine.parquet", "mine.json"])
def test_a_table_is_told_how_it_becomes_jsonl(name: str) -> None:
    with pytest.raises(ValueError, match=rf"path: '{name}' is no JSONL; .*load_dataset\('{name[5:]}'.*to_json"):
        RecordedDataModule(name, tokenizer="t")
