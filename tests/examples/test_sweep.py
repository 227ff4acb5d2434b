"""The search of examples/sweep at toy size: it goes on where it was, and a trial that is asked to end has saved."""

from __future__ import annotations

from pathlib import Path

import optuna
import pytest
from optuna.trial import TrialState

from examples.sweep import search

TOY = """
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
