"""The benchmark of a teacher: its cases differ in what they say they differ, and figures are read off the runs."""

from __future__ import annotations

from pathlib import Path

import jsonargparse
import pytest
from lightning import LightningDataModule, LightningModule

from benchmarks.learning import distill


@pytest.mark.parametrize("case", distill.CASES)
def test_cases_are_runs_that_differ_in_who_marks(case: str, tmp_path: Path) -> None:
    config = distill.rl_config(case, 1, tmp_path / "student", tmp_path / "teacher", 50)
    parser = jsonargparse.ArgumentParser(exit_on_error=False)
    parser.add_subclass_arguments(LightningModule, "model")
    parser.add_subclass_arguments(LightningDataModule, "data")
    made = parser.instantiate(parser.parse_object({"model": config["model"], "data": config["data"]}))
    assert made.data.batch_size * made.data.group_size == 512
    assert made.model.algorithm.advantage.name == ("dr_grpo" if case == "GRPO" else "distill")
    assert (made.model.reference_source is None) == (case == "GRPO")
    assert made.model.algorithm.advantage.options.get("task", 0.0) == (case == "teacher and reward")
    plain = distill.rl_config("GRPO", 1, tmp_path / "student", tmp_path / "teacher", 50)
    assert config["data"] == plain["data"] and config["trainer"] == plain["trainer"]


def test_the_teacher_is_larger_and_learns_longer() -> None:
    student, teacher = (distill.warm_config(name, 100) for name in ("student", "teacher"))
    sizes = [one["model"]["init_args"]["model"]["config"]["hidden_size"] for one in (student, teacher)]
    assert sizes == [128, 192]
    assert (student["trainer"]["max_steps"], teacher["trainer"]["max_steps"]) == (100, 1000)


def test_figures_are_read_off_a_run(tmp_path: Path) -> None:
    rows = ["step,reward,val/accuracy,rollouts/length,time/step,time/wait", "0,,0.25,,,"]
    rows += [f"{k},0.5,,3.0,2.0,0.5" for k in range(10)] + ["10,,0.95,,,"]
    (tmp_path / "metrics.csv").write_text("\n".join(rows) + "\n")
    found = distill.result("teacher", 0, tmp_path, 9.0)
    assert found["steps_to_target"] == pytest.approx(10 * 0.6 / 0.7)
    assert found["tokens_to_target"] == pytest.approx(found["steps_to_target"] * 512 * 3)
    [row] = distill.summary([found])
    report = {"command": "x", "hardware": "y", "steps": 10, "warm_steps": 3, "teacher": 0.99, "summary": [row]}
    assert "| teacher | 0.250 | 0.95 | 1 of 1 | 9 | 13,166 | 1.50 |" in distill.markdown(report)
