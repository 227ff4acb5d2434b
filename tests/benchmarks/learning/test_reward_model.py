"""The benchmark of a reward model: pairs are what they say, both ways of sharing have one gradient, cases differ in the
reward alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonargparse
import pytest
from lightning import LightningDataModule, LightningModule

from benchmarks.learning import reward_model
from tests.helpers.doubles import conversations


def test_pairs_hold_a_right_and_a_wrong_sum(tmp_path: Path) -> None:
    sums = {}
    for name, split in (("train", "train"), ("held_out", "validation")):
        reward_model.pairs(tmp_path / f"{name}.jsonl", split, 200, seed=1)
        rows = [json.loads(line) for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()]
        for row in rows:
            first, second = row["prompt"].removesuffix("=").split("+")
            assert row["chosen"] == str(int(first) + int(second)) != row["rejected"] and row["rejected"].isdigit()
        sums[name] = {row["prompt"] for row in rows}
    assert not sums["train"] & sums["held_out"]


def test_sharing_changes_the_tokens_and_not_the_gradients(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    conversations(tmp_path / "recorded.npz", trials=2)
    monkeypatch.setattr(reward_model, "SHAPE", {**reward_model.SHAPE, "hidden_size": 16, "head_dim": 8})
    tree, alone = reward_model.sharing(str(tmp_path / "recorded.npz"), tasks=1, repeats=1)
    assert tree["tokens"] < alone["tokens"] and tree["gradient_error"] < 1e-5


def test_cases_are_runs_that_differ_in_the_reward(tmp_path: Path) -> None:
    truth, learned = (reward_model.rl_config(case, 1, tmp_path, tmp_path, 50) for case in reward_model.CASES)
    given = [one["data"]["init_args"].pop("reward") for one in (truth, learned)]
    assert truth == learned and given[0] == reward_model.TRUTH
    assert given[1]["init_args"] == {"path": str(tmp_path), "bounded": True, "verifier": reward_model.TRUTH}


def test_the_reward_model_is_configured(tmp_path: Path) -> None:
    for name in ("train", "held_out"):
        reward_model.pairs(tmp_path / f"{name}.jsonl", "train", 4, seed=1)
    config = reward_model.preference_config(tmp_path, tmp_path, 10)
    parser = jsonargparse.ArgumentParser(exit_on_error=False)
    parser.add_subclass_arguments(LightningModule, "model")
    parser.add_subclass_arguments(LightningDataModule, "data")
    made: Any = parser.instantiate(parser.parse_object({"model": config["model"], "data": config["data"]}))
    assert made.data.validation.size == 4 and made.model.centre == 0.01


def test_figures_are_read_off_runs(tmp_path: Path) -> None:
    rows = ["step,reward,reward/drift,val/accuracy,val/calibration_error,val/margin,val/loss", "0,,,0.25,0.1,2,0.3"]
    rows += [f"{k},0.5,{k / 10},,,," for k in range(10)] + ["10,,,0.75,0.05,3,0.2"]
    (tmp_path / "metrics.csv").write_text("\n".join(rows) + "\n")
    sharing = [
        {"as": name, "tokens": count, "seconds": seconds, "pairs": 2, "gradient_error": 1e-7}
        for name, count, seconds in (("tree", 100, 1.0), ("alone", 400, 4.0))
    ]
    found = [reward_model.result(case, 0, tmp_path, 1.0) for case in reward_model.CASES]
    found[0]["drift"] = None
    about = {"command": "x", "hardware": "y", "pair_steps": 10, "steps": 10}
    report = about | {"sharing": sharing, "held_out": reward_model.held_out(tmp_path), "results": found}
    text = reward_model.markdown(report)
    assert "| tree | 100 | 1.0 | 0.25 |" in text and "| 10 | 0.750 | 0.050 | 3.00 | 0.200 |" in text
    assert "| the truth | 0.250 | 0.750 | - |" in text
    assert "| the reward model | 0.250 | 0.750 | +0.000, +0.900 |" in text
