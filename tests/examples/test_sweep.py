"""The search of examples/sweep at toy size: it goes on where it was, and a trial that is asked to end has saved."""

from __future__ import annotations

from pathlib import Path

import optuna
import pytest
from optuna.trial import TrialState

from app.cli.runs.run_directory import RunDirectory
from examples.sweep import search

TOY = """
model: {init_args: {optimizer: {init_args: {lr: 0.5}}}}
data: {init_args: {batch_size: 4, validation: {prompts: {init_args: {size: 8}}}}}
trainer: {accelerator: cpu}
"""


@pytest.mark.slow
def test_a_search(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "toy.yaml").write_text(TOY)
    out = tmp_path / "search"
    flags = [str(out), "--warm_steps", "2", "--every", "2", "--more", str(tmp_path / "toy.yaml")]
    first = search.main([*flags, "--trials", "1", "--steps", "4"])
    assert [one.state for one in first.trials] == [TrialState.COMPLETE]
    assert list(first.trials[0].intermediate_values) == list(search.held_out(out / "trial_00")) == [0, 1, 3]
    lr = first.trials[0].params["lr"]
    assert f"lr: {lr}" in (out / "trial_00" / "config.yaml").read_text(), "what is searched is what was run"
    played = (out / "trial_00" / "metrics.csv").read_text()

    monkeypatch.setattr(
        search.optuna.pruners, "MedianPruner", lambda **_: optuna.pruners.ThresholdPruner(lower=2.0, n_warmup_steps=1)
    )
    second = search.main([*flags, "--trials", "2", "--steps", "100000"])  # which nobody waits for
    assert [one.state for one in second.trials] == [TrialState.COMPLETE, TrialState.PRUNED]
    assert (out / "trial_00" / "metrics.csv").read_text() == played, "what was played is not played again"
    assert (out / "trial_01" / "checkpoints" / "last.ckpt").exists()
    assert "go on with" in (out / "trial_01.log").read_text()
    head, _, *rows = (out / "trials.md").read_text().splitlines()[4:]
    assert head.startswith("| trial |") and [row.split("|")[1].strip() for row in rows] == ["0", "1"]
    assert "ended after" in rows[1] and (out / "trials.png").stat().st_size > 1000


def test_a_directory_has_one_search_at_a_time_and_one_warm_start(tmp_path: Path) -> None:
    held = RunDirectory(tmp_path)
    with pytest.raises(SystemExit, match=f"{tmp_path} is in use by process"):
        search.main([str(tmp_path)])
    held.close()
    (tmp_path / "warm_start").mkdir()
    (tmp_path / "warm_start" / "summary.json").write_text('{"steps": 2}')
    with pytest.raises(SystemExit, match=r"--warm_steps: 3, but .* has 2; name these, or another directory"):
        search.main([str(tmp_path), "--warm_steps", "3"])


def test_a_row_that_is_being_written_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "metrics.csv").write_text("step,val/accuracy\n0,0.5\n24,0.7")
    assert search.held_out(tmp_path) == {0: 0.5}
