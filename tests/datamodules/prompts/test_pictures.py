"""Prompt sources with pictures: columns of files in the forms in which data sets have them, and easy-vqa's own."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from datamodules.files.picture_files import PictureError, pixels_of
from datamodules.prompts import DatasetPrompts, EasyVqaPrompts, JsonlPrompts, Prompt
from datamodules.rewards import RegexMatch, math_verify
from tests.helpers.tiny_vision import noise, png

A, B = noise(1), noise(2)


def shown(prompt: Prompt) -> list[Any]:
    """Texts of the user's message, and pixels where it shows pictures."""
    pictures = iter(prompt.pictures)
    content = prompt.messages[-1]["content"]
    return [pixels_of(next(pictures), "here") if part["type"] == "image" else part["text"] for part in content]


def assert_shown(prompt: Prompt, expected: list[Any]) -> None:
    got = shown(prompt)
    assert len(got) == len(expected)
    assert all(np.array_equal(a, b) if isinstance(b, np.ndarray) else a == b for a, b in zip(got, expected))


def jsonl(folder: Path, *records: dict[str, Any], **options: Any) -> JsonlPrompts:
    (folder / "data").mkdir(exist_ok=True)
    for name, pixels in (("a.png", A), ("b.png", B)):
        (folder / "data" / name).write_bytes(png(pixels))
    (folder / "data" / "rows.jsonl").write_text("\n".join(json.dumps(record) for record in records))
    options = {"question_field": "problem", "image_field": "images", "shuffle": False, **options}
    return JsonlPrompts(str(folder / "data" / "rows.jsonl"), **options)


def test_jsonl_rows_name_pictures_beside_them(tmp_path: Path) -> None:
    url = "data:image/png;base64," + base64.b64encode(png(B)).decode()
    source = jsonl(
        tmp_path,
        {"problem": "<image>Find x.", "images": ["a.png"], "answer": "3"},
        {"problem": "Compare.", "images": ["a.png", {"path": "b.png", "bytes": None}], "answer": "x"},
        {"problem": "First <image>, then <image>?", "images": [url, str(tmp_path / "data" / "a.png")], "answer": "y"},
        {"problem": [{"role": "user", "content": "<image> is?"}], "images": "b.png", "answer": "z", "more": 1},
        system="Count.",
    )
    prompts = [source.deal(k) for k in range(4)]
    assert_shown(prompts[0], [A, "Find x."])
    assert_shown(prompts[1], [A, B, "Compare."])
    assert_shown(prompts[2], ["First ", B, ", then ", A, "?"])
    assert_shown(prompts[3], [B, " is?"])
    assert [one.messages[0]["content"] for one in prompts] == ["Count."] * 4
    assert prompts[3].metadata == {"more": 1} and prompts[0].answer == "3"


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"problem": "q"}, r"rows.jsonl:1: no picture in field 'images' \(the record has problem, answer\)"),
        ({"problem": "q", "images": []}, "no picture in field 'images'"),
        ({"problem": "q", "images": ["a.png", None]}, "no picture in field 'images'"),
        ({"problem": "<image><image>", "images": ["a.png"]}, "1 pictures, but its messages have 2 places"),
        ({"problem": [{"role": "system", "content": "s"}], "images": "a.png"}, "no message of a user shows its 1"),
    ],
)
def test_rows_without_their_pictures_are_refused_by_name(tmp_path: Path, record: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        jsonl(tmp_path, {**record, "answer": "3"})


@pytest.mark.parametrize("picture", ["data:image/png;base64,!!", "data:image/png,abc", "c.png", "a.txt"])
def test_pictures_that_cannot_be_read_are_named_when_they_are_prepared(tmp_path: Path, picture: str) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a.txt").write_text("text")
    prompt = jsonl(tmp_path, {"problem": "q", "images": [picture], "answer": "3"}).deal(0)
    with pytest.raises(PictureError, match="picture 0"):
        pixels_of(prompt.pictures[0], "picture 0")


def test_parquet_rows_hold_pictures_as_data_sets_write_them(tmp_path: Path) -> None:
    """Geometry3K and CLEVR-count as they are downloaded: records with bytes and path, a problem, an answer."""
    rows = {
        "images": [[{"bytes": png(A), "path": None}], [{"bytes": png(B), "path": "b.png"}]],
        "problem": ["<image>Find x.", "<image>How many cubes are there?"],
        "answer": ["\\sqrt{12}", "4"],
    }
    pyarrow.parquet.write_table(pyarrow.table(rows), tmp_path / "train.parquet")
    options: dict[str, Any] = {"question_field": "problem", "image_field": "images", "shuffle": False}
    source = DatasetPrompts(str(tmp_path / "train.parquet"), **options)
    assert_shown(source.deal(0), [A, "Find x."])
    assert_shown(source.deal(1), [B, "How many cubes are there?"])
    assert math_verify(source.deal(0), "so x is \\boxed{2\\sqrt{3}}") == 1.0
    counted = RegexMatch(r"\[\s*(?P<answer>\d+)\s*\]", whole=False)
    assert [counted(source.deal(1), reply) for reply in ("[3] no, [4]", "[4] or [5]", "4")] == [1.0, 0.0, 0.0]


def test_easy_vqa_has_real_pictures_and_answers() -> None:
    source = EasyVqaPrompts(shuffle=False, size=300)
    prompts = [source.deal(k) for k in range(300)]
    assert {one.metadata["kind"] for one in prompts} == {"yes_no", "open"} and prompts[0].id == "easy_vqa/train:0"
    for prompt in prompts[:5]:
        assert pixels_of(prompt.pictures[0], prompt.id).shape == (64, 64, 3)
    looked_at = [one.messages[0]["content"][1]["text"] for one in source.samples()]
    assert sorted(looked_at) == sorted({one.messages[0]["content"][1]["text"] for one in prompts})
    held_out = [EasyVqaPrompts("test", kind, shuffle=False) for kind in ("yes_no", "open")]  # type: ignore[arg-type]
    assert held_out[0].size + held_out[1].size == EasyVqaPrompts("test").size
    assert {held_out[0].deal(k).answer for k in range(50)} == {"yes", "no"}
    assert not {held_out[1].deal(k).answer for k in range(50)} & {"yes", "no"}
    with pytest.raises(ValueError, match=r"EasyVqaPrompts.size: 1000000, but test has \d+ questions of kind all"):
        EasyVqaPrompts("test", size=1_000_000)
