"""The benchmark of hints: its cases differ in what they say they differ, and figures are read off the runs."""

from __future__ import annotations

from pathlib import Path

import jsonargparse
import pytest
from lightning import LightningDataModule, LightningModule

from benchmarks.learning import hints
from tests.helpers.recorded_samples import byte_tokenizer


@pytest.mark.parametrize("case", hints.CASES)
def test_cases_are_runs_that_differ_in_what_is_shown(case: str, tmp_path: Path) -> None:
    byte_tokenizer("{{ messages }}").save_pretrained(tmp_path / "model")
    for name in ("train", "held_out"):
        (tmp_path / f"{name}.jsonl").write_text('{"question": "What is 1 + 2?", "answer": 3}\n')
    config = hints.config(case, 1, tmp_path, 20)
    parser = jsonargparse.ArgumentParser(exit_on_error=False)
    parser.add_subclass_arguments(LightningModule, "model")
    parser.add_subclass_arguments(LightningDataModule, "data")
    made = parser.instantiate(parser.parse_object({"model": config["model"], "data": config["data"]}))
    assert (made.model.reference_source is None) == (case == "GRPO")
    assert made.model.algorithm.advantage.options.get("task", 0.0) == (case == "GRPO and right replies")
    shown = config["data"]["init_args"]["workflow"]["init_args"].pop("hint", "")
    assert ("{solved}" in shown, "{answer}" in shown) == (case == "GRPO and right replies", case == "answers alone")
    plain = hints.config("GRPO", 1, tmp_path, 20)
    assert config["data"] == plain["data"] and config["trainer"] == plain["trainer"]


def test_figures_are_read_off_a_run(tmp_path: Path) -> None:
    rows = ["step,val/accuracy,taught,time/step", "0,0.2,,"] + [f"{k},,0.5,2.0" for k in range(5)] + ["4,0.6,,"]
    (tmp_path / "metrics.csv").write_text("\n".join(rows) + "\n")
    results = [hints.result(case, 1, tmp_path) for case in hints.CASES]
    report = {"command": "c", "hardware": "h", "results": results, "summary": hints.summary(results)}
    assert report["summary"]["GRPO"] == {"accuracy": {0: [0.2], 5: [0.6]}, "seconds_a_step": 2.0}
    assert "| answers alone | 0.200 | 0.600 | 2.0 |" in hints.markdown(report)
    hints.draw(report, tmp_path / "hints.png")
    assert (tmp_path / "hints.png").stat().st_size > 1000
