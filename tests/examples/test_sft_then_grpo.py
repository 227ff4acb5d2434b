"""Imitation, then GRPO, at toy size: both parts train by their own files, and their sums are what they say."""

from __future__ import annotations

import csv
import json
import re
import sys
from pathlib import Path

import pytest

from app.cli import main
from benchmarks.learning.sft_then_grpo import markdown, summary
from datamodules.prompts import Prompt
from examples.sft_then_grpo.prepare import HELD_OUT, TRAIN, WORKED, write_sums
from examples.smollm2.prepare import last_number
from modules import ModelSource, build_model
from tests.datamodules.workflows.scripted_engine import CHATML
from tests.helpers.recorded_samples import byte_tokenizer
from tests.helpers.tiny_model import TINY_WITH_ENDS

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "sft_then_grpo"


def test_no_sum_is_in_two_files_and_what_is_imitated_earns_the_reward(tmp_path: Path) -> None:
    write_sums(tmp_path)
    files = {
        name: [json.loads(line) for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()]
        for name in ("worked", "train", "held_out")
    }
    assert {name: len(records) for name, records in files.items()} == {
        "worked": WORKED,
        "train": TRAIN,
        "held_out": HELD_OUT,
    }
    questions = [record["question"] for records in files.values() for record in records]
    assert len(set(questions)) == len(questions)
    totals = {question: sum(map(int, re.findall(r"\d+", question))) for question in questions}
    assert all(record["answer"] == totals[record["question"]] for record in files["train"] + files["held_out"])
    for record in files["worked"]:
        assert last_number(Prompt("", answer=str(totals[record["question"]])), record["worked"]) == 1.0
        assert [sum(map(int, re.findall(r"\d+", part))) for part in re.findall(r"[^=,]+(?==)", record["worked"])] == [
            int(number) for number in re.findall(r"= (\d+)", record["worked"])
        ]


def test_the_page_is_made_of_its_figures() -> None:
    results = ROOT / "benchmarks" / "results" / "learning"
    report = json.loads((results / "sft_then_grpo.json").read_text())
    assert report["summary"] == summary(report["results"])
    assert (results / "sft_then_grpo.md").read_text() == markdown(report)


def test_both_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a model of random weights where prepare.py puts the real one, and a reward that such a model can earn."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["arborist"])
    place = tmp_path / "runs" / "sft_then_grpo"
    place.mkdir(parents=True)
    write_sums(place)
    tiny = {**TINY_WITH_ENDS, "vocab_size": 260, "max_position_embeddings": 256}
    build_model(ModelSource(config=tiny)).save_pretrained(place / "model")
    byte_tokenizer(CHATML).save_pretrained(place / "model")
    short = ["--trainer.max_steps=2", "--trainer.accelerator=cpu", "--trainer.callbacks=[callbacks.SavePretrained]"]
    main(["fit", "--config", str(EXAMPLE / "sft.yaml"), "--run_dir=run/warm_start", "--data.batch_size=4", *short])
    flags = ["--config", str(EXAMPLE / "grpo.yaml"), "--run_dir=run", "--model.model.path=run/warm_start/model", *short]
    flags += ["--data.batch_size=2", "--data.validation.prompts.init_args.size=2", "--trainer.val_check_interval=2"]
    main(["fit", *flags, "--data.reward=tests.datamodules.rewards.reward_functions.length"])
    for part in ("run/warm_start", "run"):
        with Path(part, "metrics.csv").open() as file:
            rows = list(csv.DictReader(file))
        assert [float(row["grad_norm"]) > 0 for row in rows if row.get("grad_norm")] == [True, True]
        assert Path(part, "model", "config.json").is_file()
