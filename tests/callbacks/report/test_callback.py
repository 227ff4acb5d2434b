"""`Report` in a run: what it keeps and when, that a page which cannot be made ends nothing, and that it is seldom."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from app.batch import CALL_REWARD, EvalHandle, RolloutBatch, StepHandle
from app.cli import main
from app.interruption import End, Interrupted
from callbacks import Report, ValidateEnds, base
from tests.helpers import tiny_run
from tests.helpers.recorded_samples import byte_tokenizer
from tests.helpers.tiny_run import TinyData, TinyModule, trainer


class Batched(TinyModule):
    """Holds its batch as TreeModule does."""

    batch: RolloutBatch | None = None
    steps_done = 0

    def training_step(self, handle: StepHandle, batch_idx: int) -> torch.Tensor:
        self.batch, self.steps_done = handle.batch, handle.index
        loss = super().training_step(handle, batch_idx)
        self.policy_version -= handle.index == handle.count - 1
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch.index == batch.count - 1:
            self.policy_version, self.steps_done = self.policy_version + 1, 0
        super().on_train_batch_end(outputs, batch, batch_idx)


def rows(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "report.jsonl").read_text().splitlines()]


def test_first_second_fourth_and_last_batch_and_every_validation(tmp_path: Path) -> None:
    run = tmp_path / "run"
    trainer(run, Report(), ValidateEnds()).fit(Batched(2), datamodule=TinyData(batches=6, count=2))
    kept = rows(run)
    assert [(one["batch"], one["step"]) for one in kept if one["kind"] == "batch"] == [(1, 1), (2, 3), (4, 7), (6, 11)]
    held_out = [one for one in kept if one["kind"] == "held_out"]
    assert [one["step"] for one in held_out] == [0, 12]
    assert held_out[0]["sets"]["held-out"]["rewards"] == {"prompt-0": [0.0], "prompt-1": [1.0]}
    assert held_out[0]["sets"]["held-out"]["replies"]["prompt-1"]["runs"] == [["1 2", False], ["3 11", True]]
    assert "held-out accuracy" in (run / "report.html").read_text()


def test_a_run_that_goes_on_says_from_which_step(tmp_path: Path) -> None:
    """When it trains: a launch that ends before has taken nothing back."""
    first = trainer(tmp_path / "run", Report())
    first.fit(Batched(), datamodule=TinyData(validate=False))
    first.save_checkpoint(tmp_path / "last.ckpt")
    trainer(tmp_path / "run", Report(), max_epochs=2).fit(
        Batched(), datamodule=TinyData(validate=False), ckpt_path=tmp_path / "last.ckpt"
    )
    steps = [(one["kind"], one["step"]) for one in rows(tmp_path / "run")]
    assert steps[:5] == [("batch", 1), ("batch", 2), ("batch", 3), ("goes_on", 3), ("batch", 4)]
    assert [kind for kind, _ in steps].count("goes_on") == 1


def test_rewards_of_single_calls_are_those_of_a_validation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = tiny_run.make_batch

    def by_calls(rewards: list[float]) -> RolloutBatch:
        batch = made([0.0] * len(rewards))
        batch.metadata = [{CALL_REWARD: one} for one in rewards]
        return batch

    monkeypatch.setattr(tiny_run, "make_batch", by_calls)
    trainer(tmp_path / "run", Report()).validate(Batched(), datamodule=TinyData())
    (kept,) = rows(tmp_path / "run")
    found = kept["sets"]["held-out"]
    assert found["rewards"] == {"prompt-0": [0.0], "prompt-1": [1.0]} and found["replies"]["prompt-1"]["reward"] == 1.0


def test_recorded_text_is_read_with_the_datamodules_tokenizer(tmp_path: Path) -> None:
    data: Any = TinyData(batches=1)
    data.tokenizer = byte_tokenizer()
    trainer(tmp_path / "run", Report()).fit(Batched(), datamodule=data)
    (kept,) = rows(tmp_path / "run")
    assert kept["tree"]["text"][0] == byte_tokenizer().decode([1, 2, 3])


def interrupt(run: Path, signum: signal.Signals) -> None:
    """A run of two steps, ended by the signal before the third."""

    class Ends(Batched):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            if batch_idx == 2:
                raise Interrupted(signum, End(2, None))

    with pytest.raises(Interrupted):
        trainer(run, Report()).fit(Ends(), datamodule=TinyData(batches=3))


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_an_interrupted_run_has_its_page(tmp_path: Path, signum: signal.Signals) -> None:
    interrupt(tmp_path / "run", signum)
    assert (tmp_path / "run" / "report.html").exists() and [one["batch"] for one in rows(tmp_path / "run")] == [1, 2]


def test_a_long_run_that_is_preempted_leaves_its_page_to_look(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ctrl-C leaves time for it; what the page is made from is written in any case."""
    monkeypatch.setattr(base, "AT_ONCE_MIB", 0)
    interrupt(tmp_path / "patient", signal.SIGINT)
    assert (tmp_path / "patient" / "report.html").exists() and "look" not in capsys.readouterr().out
    run = tmp_path / "run"
    interrupt(run, signal.SIGTERM)
    assert not (run / "report.html").exists() and [one["batch"] for one in rows(run)] == [1, 2]
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("Report: ")]
    assert len(said) == 1 and f"'arborist look {run}' makes it" in said[0]
    main(["look", str(run)])
    assert (run / "report.html").exists()


def test_a_page_that_cannot_be_made_ends_no_run(tmp_path: Path) -> None:
    (tmp_path / "run" / "report.html").mkdir(parents=True)  # in the way
    with pytest.warns(UserWarning, match="arborist look"):
        trainer(tmp_path / "run", Report()).fit(Batched(), datamodule=TinyData(batches=1))


def test_episodes_of_held_out_batches_of_which_all_failed_were_asked_for() -> None:
    """Else a comparison says that none failed."""
    report, run = Report(), SimpleNamespace(is_global_zero=True, datamodule=None)
    batch = tiny_run.make_batch([1.0, 0.0])
    for one in (batch, None):
        handle = EvalHandle(batch=one, name="held-out", samples=2, prompts=1)
        report.on_validation_batch_end(cast(Any, run), cast(Any, None), None, handle, 0)
    assert report._held_out["held-out"]["asked"] == 4
    assert sum(map(len, report._held_out["held-out"]["rewards"].values())) == 2
