"""The benchmark of predictions at toy size: figures by hand, and a checked and trained run end to end."""

from __future__ import annotations

import argparse
import copy
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks import check
from tests.fuzz.test_configurations import ROLLED_OUT, base


def test_errors_are_shares_of_what_was_measured_and_of_shares_differences() -> None:
    assert check.row("s", 8.0, 10.0)["error"] == pytest.approx(-0.2)
    found = check.row("share", 0.5, 0.75, (0.4, 0.6))
    assert found["error"] == pytest.approx(-0.25) and found["interval"] == [0.4, 0.6]


def test_the_first_step_is_in_no_seconds_and_later_ones_in_no_shares() -> None:
    steps = [{"watch/tree": s, "watch/optimizer": s / 10, "watch/peak": 1 + s / 100} for s in (9.0, 2.0, 3.0, 4.0)]
    tree, optimizer, memory = check.cost_rows(steps, 3.0, 0.6, 1.09)
    assert (tree["measured"], tree["error"]) == (3.0, 0.0)
    assert optimizer["error"] == pytest.approx(1.0) and memory["error"] == pytest.approx(0)
    found = {"groups": 32, "group_size": 4, "different": 0.5, "different_interval": [0.3, 0.7], "pass@1": 0.25,
             "pass@1_interval": [0.16, 0.37], "pass@4": 0.5, "tokens_mean": 8.0, "dense_over_tree": 3.0}  # fmt: skip
    late = {"rollouts/flat": 1.0, "rollouts/reward": 1.0, "rollouts/unsolved": 0.0, "rollouts/length": 99.0,
            "tokens/dense": 9.0, "tokens/tree": 1.0}  # fmt: skip
    early = {"rollouts/flat": 0.4, "rollouts/reward": 0.2, "rollouts/unsolved": 0.5, "rollouts/length": 10.0,
             "tokens/dense": 60.0, "tokens/tree": 20.0}  # fmt: skip
    rows = {one["what"]: one for one in check.signal_rows(found, [early] * check.EARLY + [late] * 9)}
    assert rows["groups that differ"]["measured"] == pytest.approx(0.6)
    assert rows["pass@1"]["error"] == pytest.approx(0.05) and rows["pass@4"]["error"] == pytest.approx(0)
    assert rows["pass@1"]["interval"] == [0.16, 0.37]  # over prompts, whose episodes are alike
    assert rows["generated tokens an episode"]["error"] == pytest.approx(-0.2)
    assert rows["dense tokens / tree tokens"]["error"] == pytest.approx(0)


@pytest.mark.slow
def test_a_part_is_checked_trained_reported_and_not_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = copy.deepcopy(base(ROLLED_OUT))
    config["data"]["init_args"] |= {
        "workflow": {"class_path": "datamodules.workflows.RLVRWorkflow", "init_args": {"max_new_tokens": 3}},
        "reward": "datamodules.rewards.exact_match",
        "batch_size": 8,
        "group_size": 4,
    }
    file = tmp_path / "toy.yaml"
    file.write_text(yaml.safe_dump(config))
    asked: list[Path] = []

    def toy(out: Path, given: argparse.Namespace) -> dict[str, Any]:
        asked.append(out)
        return check.rolled_out(file, [], out, given.steps, given)

    monkeypatch.setattr(check, "PARTS", {"toy": toy})
    monkeypatch.setattr(sys, "argv", ["check"])
    options = ["--out", str(tmp_path / "out"), "--runs", str(tmp_path / "runs"), "--steps", "3"]
    report = check.main(options)
    part = report["parts"]["toy"]
    assert json.loads((tmp_path / "out/check.json").read_text()) == report and part["steps"] == 3
    rows = {one["what"]: one for one in part["rows"]}
    assert rows["forward and backward, s"]["predicted"] > 0 and rows["forward and backward, s"]["measured"] > 0
    assert rows["optimizer, s"]["measured"] > 0 and rows["memory, GiB"]["measured"] > 0.1
    assert rows["dense tokens / tree tokens"]["measured"] > 1
    assert "| toy | groups that differ |" in (tmp_path / "out/check.md").read_text()
    assert check.main(options) == report and len(asked) == 1
    with pytest.raises(SystemExit):
        check.main([*options[:-1], "1"])
