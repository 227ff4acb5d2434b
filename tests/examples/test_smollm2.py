"""The example with a real model, at toy size: its own files are understood and train, and its sums are what it says."""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path

import pytest

from app.cli import main
from benchmarks.learning.beside_trl import markdown, summary
from datamodules.prompts import Prompt
from examples.smollm2.prepare import HELD_OUT, last_number, write_sums
from modules import ModelSource, build_model
from tests.datamodules.workflows.scripted_engine import CHATML
from tests.helpers.recorded_samples import byte_tokenizer
from tests.helpers.tiny_model import TINY_WITH_ENDS

EXAMPLE = Path(__file__).parents[2] / "examples" / "smollm2"


def sums(path: Path) -> list[tuple[int, int, int]]:
    found = []
    for line in path.read_text().splitlines():
        record = json.loads(line)
        one, other = record["question"].removeprefix("What is ").removesuffix("?").split(" + ")
        found.append((int(one), int(other), record["answer"]))
    return found


def test_held_out_sums_are_not_trained_on(tmp_path: Path) -> None:
    write_sums(tmp_path)
    train, held_out = sums(tmp_path / "train.jsonl"), sums(tmp_path / "held_out.jsonl")
    assert all(one + other == answer for one, other, answer in train + held_out)
    trained, tested = ({tuple(sorted(pair[:2])) for pair in some} for some in (train, held_out))
    assert len(tested) == HELD_OUT and len(trained) == len(train) and not trained & tested
    assert len(trained | tested) == 90 * 91 // 2


def test_the_last_number_counts() -> None:
    prompt = Prompt("", answer="98")
    said = {
        "98": 1,
        "23 + 75 = 98.": 1,
        "23 + 75": 0,
        "To find 23 + 75, we": 0,
        "": 0,
        "98 or 99": 0,
        "1.98": 0,
        "1,098": 0,
        "-98": 0,
    }
    assert {text: last_number(prompt, text) for text in said} == said


def test_the_page_beside_trl_is_made_of_its_figures() -> None:
    results = EXAMPLE.parents[1] / "benchmarks" / "results" / "learning"
    report = json.loads((results / "beside_trl.json").read_text())
    assert report["summary"] == summary(report["results"])
    assert (results / "beside_trl.md").read_text() == markdown(report)


@pytest.mark.parametrize(
    "overlay", [pytest.param([], id="whole"), pytest.param(["lora.yaml"], id="lora", marks=pytest.mark.slow)]
)
def test_two_steps(overlay: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a model of random weights where prepare.py puts the real one, and a reward that such a model can earn."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["arborist"])
    place = tmp_path / "runs" / "smollm2"
    place.mkdir(parents=True)
    write_sums(place)
    tiny = {**TINY_WITH_ENDS, "vocab_size": 260, "max_position_embeddings": 256}
    build_model(ModelSource(config=tiny)).save_pretrained(place / "model")
    byte_tokenizer(CHATML).save_pretrained(place / "model")
    flags = [part for name in ["grpo.yaml", *overlay] for part in ("--config", str(EXAMPLE / name))]
    flags += ["--trainer.max_steps=2", "--trainer.accelerator=cpu", "--trainer.val_check_interval=2", "--run_dir=run"]
    flags += [
        "--data.batch_size=2",
        "--data.validation.prompts.init_args.size=2",
        "--trainer.callbacks=[{class_path: callbacks.SavePretrained}]",
    ]
    main(["fit", *flags, "--data.reward=tests.datamodules.rewards.reward_functions.length"])
    with Path("run/metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [float(row["grad_norm"]) > 0 for row in rows if row.get("grad_norm")] == [True, True]
    assert max(float(row["logprob_diff_max"]) for row in rows if row.get("logprob_diff_max")) < 1e-4
    assert (tmp_path / "run" / "model" / "adapter_config.json").exists() == bool(overlay)
