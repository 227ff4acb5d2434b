"""docs/agents.md, "Files of recordings": its examples are read as they stand."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from app.cli import main
from datamodules import RecordedDataModule
from datamodules.prompts.tokenizers import load_tokenizer
from tests.docs.test_readme import ROOT

SECTION = (ROOT / "docs" / "agents.md").read_text().partition("\n## Files of recordings\n")[2].partition("\n## ")[0]


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", SECTION, flags=re.MULTILINE | re.DOTALL)


@pytest.fixture(autouse=True)
def _in_an_empty_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["arborist"])


def sequences(path: str, tokenizer: str | None = None) -> list[tuple[list[int], list[int], float, str]]:
    """Tokens, trained tokens, reward and task of each sequence, all in one group."""
    data = RecordedDataModule(path, tokenizer=tokenizer, shuffle=False)
    data.setup("fit")
    batch = data.batch(0)
    assert data.num_tasks == 1 and len(batch.group_ids.unique()) == 1
    masks = batch.split(batch.loss_mask)
    return [
        (tokens.tolist(), tokens[mask].tolist(), float(reward), task)
        for tokens, mask, reward, task in zip(batch.sequences(), masks, batch.rewards, batch.prompt_ids, strict=True)
    ]


def test_token_arrays() -> None:
    (script,) = blocks("python")
    exec(script, {})
    assert sequences("mine.npz") == [
        ([5, 6, 1, 2, 3], [3], 1.0, "add"),
        ([5, 6, 1, 2, 4], [4], 0.0, "add"),
        ([5, 6, 1, 2, 4, 7, 8], [8], 0.0, "add"),
    ]
    main(["inspect", "mine.npz"])
    main(["look", "mine.npz"])


def test_conversations_as_text() -> None:
    tokenizer = load_tokenizer("train:300", ["1+2=3 no 4 5"])
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.content }}{{ eos_token if m.role == 'assistant' else '' }}{% endfor %}"
    )
    tokenizer.save_pretrained("tokenizer")
    Path("mine.jsonl").write_text(blocks("jsonl")[0])
    said = [(tokenizer.decode(trained), reward) for _, trained, reward, _ in sequences("mine.jsonl", "tokenizer")]
    assert said == [("3<eos>", 1.0), ("4<eos>", 0.0), ("5<eos>", 0.0)]
    main(["inspect", "mine.jsonl", "--tokenizer", "tokenizer"])


def test_sequences(capsys: pytest.CaptureFixture[str]) -> None:
    Path("mine.jsonl").write_text(blocks("jsonl")[1])
    main(["inspect", "mine.jsonl"])
    assert "1 sequences of 5 to 5 tokens, 1 tokens trained" in capsys.readouterr().out
