"""Prompt files that are damaged, cut, fake, hostile or out of form: refused in one line, or sound prompts."""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from pyarrow import parquet

from datamodules.answers import RegexAnswer
from datamodules.files import expressions
from datamodules.prompts import DatasetPrompts, JsonlPrompts, Prompt, PromptSource
from datamodules.prompts.tokenizers import encode_prompt
from tests.fuzz.damage import DEEP, VALUES, Refused, damaged, edits, examples, gzipped, is_sound_text, outcome
from tests.helpers.recorded_samples import byte_tokenizer

TEXTS = [
    {"question": f"{n} + {n}?", "answer": f"easy\n#### {2 * n}", "level": n, "more": {"hint": "é"}} for n in range(4)
]
MESSAGES = [{"question": [{"role": "user", "content": "Hi \u6f22"}], "answer": [{"role": "assistant", "content": "1"}]}]
CHAT = byte_tokenizer()


def written(records: list[Any]) -> bytes:
    return "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records).encode()


def load(path: Path, source: type[PromptSource] = JsonlPrompts, **options: Any) -> list[Prompt] | Refused:
    """All prompts, each checked as the dealer checks it."""

    def call() -> list[Prompt]:
        made: Any = source
        prompts = list(made(str(path), shuffle=False, **options).samples())
        for prompt in prompts:
            encode_prompt(CHAT, prompt)
        return prompts

    found: list[Prompt] | Refused = outcome(call)
    if not isinstance(found, Refused):
        assert found and all(map(is_sound, found))
    return found


def is_sound(prompt: Prompt) -> bool:
    """Every text can be written to any file, nothing stands for a missing value, and other processes can be told."""
    asked = prompt.text or "".join(str(message.get("content") or "") for message in prompt.messages)
    texts = (asked, prompt.answer, prompt.solution, json.dumps(prompt.metadata, ensure_ascii=False))
    return (
        all(map(is_sound_text, texts)) and bool(asked.strip()) and not {asked, prompt.answer} & {"None", "nan", "inf"}
    )


@examples(180)
@given(edits)
def test_damaged_lines(tmp_path: Path, changes: list[Any]) -> None:
    path = tmp_path / "a.jsonl"
    for records in (TEXTS, MESSAGES):
        path.write_bytes(damaged(written(records), changes))
        load(path)


@examples(150)
@given(edits)
def test_damaged_gzip_is_refused_or_the_same(tmp_path: Path, changes: list[Any]) -> None:
    whole, path = tmp_path / "whole" / "a.jsonl", tmp_path / "a.jsonl.gz"
    whole.parent.mkdir(exist_ok=True)
    whole.write_bytes(written(TEXTS))
    path.write_bytes(damaged(gzipped(written(TEXTS)), changes))
    found = load(path)
    if not isinstance(found, Refused):
        assert [(one.text, one.metadata) for one in found] == [(r["question"], without(r)) for r in TEXTS]


def without(record: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in record.items() if key not in ("question", "answer")}


@examples(80)
@given(edits)
def test_damaged_tables(tmp_path: Path, changes: list[Any]) -> None:
    whole, path = tmp_path / "whole", tmp_path / "a.parquet"
    if not whole.exists():
        parquet.write_table(pa.Table.from_pylist(TEXTS), whole)
    path.write_bytes(damaged(whole.read_bytes(), changes))
    load(path, DatasetPrompts)


@pytest.mark.parametrize("field", ["question", "answer", "level", "more"])
def test_edited_fields(tmp_path: Path, field: str) -> None:
    path = tmp_path / "a.jsonl"
    for value in VALUES:
        record = json.dumps({**TEXTS[0], field: "HERE"}).replace('"HERE"', value)
        path.write_text(f"{record}\n")
        for options in ({}, {"chat": True}, {"template": "{question} ({level}) {more.hint}"}):
            load(path, **options)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "only blank lines"),
        (b'{"question": "\\ud83d", "answer": ""}', r"a.jsonl:1: .*half a character .* in question"),
        (b'{"question": "q", "answer": "", "m": [{"x": "\\udc00"}]}', r"half a character .* in m\.0\.x"),
        (b'{"question": "q", "answer": "", "m": "\xed\xa0\xbd"}', "a.jsonl:1: not valid JSON"),
        (b'{"question": ' + DEEP.encode() + b"}", "a.jsonl:1: not valid JSON .nested too deeply"),
        (b'\n{"question": "q", "answer": NaN}', "a.jsonl:2: field 'answer' holds nothing"),
        (b'{"question": " ", "answer": "a"}', "a.jsonl:1: the prompt is empty"),
        (b'\xef\xbb\xbf{"question": "q", "answer": "a"}', None),
        ('{"question": "q", "answer": "a"}'.encode("utf-16"), "a.jsonl:1: not valid JSON"),
        (b"\x1f\x8b\x08\x00", "a.jsonl:1: not valid JSON"),
        (b'{"question": "q", "answer": "a", "' + b"\\u001b" * 5_000 + b'": 1}', None),
        (b'{"' + b"\\u001b" * 5_000 + b'": 1}', "no text in field 'question'"),
    ],
)
def test_files_that_are_no_prompts(tmp_path: Path, data: bytes, said: str | None) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(data)
    judge(load(path), said)


def judge(found: Any, said: str | None) -> None:
    if said is None:
        assert not isinstance(found, Refused), found
    else:
        assert isinstance(found, Refused)
        with pytest.raises(AssertionError, match=said):
            raise AssertionError(found.message)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (gzipped(written(TEXTS))[:-12], "unreadable after line"),
        (b"not gzip at all", "unreadable after line 0 .*Not a gzipped file"),
        (gzipped(written(TEXTS))[:20] + b"\xff" * 30, "unreadable after line 0"),
        (gzipped(b"\n" * 1_100_000), "more than 1,000,000 blank lines"),
    ],
    ids=["cut", "fake", "damaged", "blank"],
)
def test_files_that_are_no_gzip(tmp_path: Path, data: bytes, said: str) -> None:
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(data)
    judge(load(path), rf"a.jsonl.gz.*{said}")


def test_a_bomb_is_refused_before_it_is_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.jsonl.gz"
    line = b'{"question": "' + b"q" * 1_000_000 + b'", "answer": "a"}\n'
    with gzip.open(path, "wb") as file:
        for _ in range(20):
            file.write(line)
    monkeypatch.setattr("datamodules.files.data_files._UNSUSPICIOUS_BYTES", 2**22)
    judge(load(path), r"unpack to more than .* give it unpacked")


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{question}", None),
        ("{{{level}}} {more.hint}", None),
        ("{question.nope}", "nothing in field 'question.nope'"),
        ("{question.__class__}", "nothing in field 'question.__class__'"),
        ("{question:>2000000000}", "is no name of a field"),
        ("{question!r}", "is no name of a field"),
        ("{question[0]}", "is no name of a field"),
        ("{}", "is no name of a field"),
        ("{question:{level}}", "is no name of a field"),
        ("{nope}", "nothing in field 'nope'"),
        ("{question", "expected '}'"),
        ("}", "Single '}'"),
        ("\x1b{nope}" * 2_000, "nothing in field 'nope'"),
    ],
)
def test_templates_reach_fields_alone(tmp_path: Path, template: str, said: str | None) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(written(TEXTS))
    judge(load(path, template=template), said)


@pytest.mark.parametrize(
    ("pattern", "answer", "said"),
    [
        (r"#### (.+)", "#### 7", None),
        (r"^.{0,2000}?(\d{1,1000})\.?\d{0,1000}$", "#### 7", None),
        (r"####( \d+)?", "####", "or its first group, is nowhere in field 'answer'"),
        (r"(x+x+)+y", "x" * 5_000, "for more than .* s; write it without nested repetitions"),
        (r"(a|aa)+$", "a" * 60 + "b", "for more than .* s"),
        (r"(a+)+$", "a" * 60 + "b", "is nowhere"),
        (r"(a{99999999999})", "a", "repeats too much"),
        (r"(((a{1000}){1000}){1000})", "a", "repeats too much"),
        ("(" * 5_000 + ")" * 5_000, "a", "is no regular expression"),
        ("(" * 50_000, "a", "repeats too much"),
        (r"(\p{L})", "a", "is no regular expression"),
        (r"a", "a", "has no group"),
        ("(\x1b[", "a", "is no regular expression"),
    ],
)
def test_patterns_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pattern: str, answer: str, said: str | None
) -> None:
    monkeypatch.setattr(expressions, "DEADLINE_S", 0.1)
    path = tmp_path / "a.jsonl"
    path.write_bytes(written([{"question": "q", "answer": answer}]))
    judge(load(path, answer_pattern=pattern), said)


def test_a_completion_that_defeats_the_pattern_has_no_vote(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expressions, "DEADLINE_S", 0.1)
    vote = RegexAnswer(r"<a>((?:x+x+)+)</a>")
    assert vote("<a>xx</a>") == "xx"
    assert vote("<a>" + "x" * 5_000) == ""


def test_paths_that_cannot_be_looked_at(tmp_path: Path) -> None:
    long = "cannot be looked at .File name too long" if sys.version_info < (3, 14) else "there is no file"
    judge(load(tmp_path / ("a" * 300 + ".jsonl")), long)
    judge(load(tmp_path / "a\x00b.jsonl"), "there is no file")
