"""Whole runs through the command line, most in processes of their own: the quickstart's configurations, a few steps."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from app.cli import main
from callbacks.report.charts import held_out_curve
from callbacks.report.runs import read_run
from datamodules.pipeline.gate import unaccounted

ROOT = Path(__file__).parents[3]
DATA = os.environ.get("ARBORIST_DATA", "")
SYNCHRONOUS = ["--data.max_staleness", "0", "--data.batch_size", "4", "--data.validation.prompts.init_args.size", "32"]
SYNCHRONOUS += ["--trainer.val_check_interval", "6"]  # due at the end of six steps, too


def arborist(*args: str, data: str | None = DATA) -> subprocess.CompletedProcess[str]:
    """One command, with one thread a process and no launcher's variables in its environment."""
    env = {k: v for k, v in os.environ.items() if k not in ("LOCAL_RANK", "RANK", "WORLD_SIZE", "ARBORIST_DATA")}
    env |= {"OMP_NUM_THREADS": "1"} | ({"ARBORIST_DATA": data} if data else {})
    command = [sys.executable, "-m", "app", *args]
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=500)


def fit(config: str, run_dir: Path, *args: str, says: str = "") -> list[dict[str, str]]:
    """A run that has to end well, and to say `says`; returns the rows of its metrics.csv."""
    done = arborist("fit", "--config", f"configs/{config}", "--run_dir", str(run_dir), *args)
    assert done.returncode == 0 and says in done.stderr, done.stdout + done.stderr
    assert done.stderr.splitlines()[-1] == f"run directory: {run_dir}, report: {run_dir / 'report.html'}"
    return metrics(run_dir)


def metrics(run_dir: Path) -> list[dict[str, str]]:
    with (run_dir / "metrics.csv").open() as file:
        return list(csv.DictReader(file))


def column(rows: list[dict[str, str]], name: str) -> list[float]:
    return [float(row[name]) for row in rows if row.get(name)]


@pytest.fixture(scope="module")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model after a short warm start."""
    run_dir = tmp_path_factory.mktemp("warm")
    rows = fit("quickstart_sft.yaml", run_dir, "--trainer.max_steps", "40")
    losses = column(rows, "loss")
    assert sum(losses[-5:]) < 0.75 * sum(losses[:5]), "imitation learns"
    return run_dir / "model"


@pytest.fixture(scope="module")
def synchronous(warm: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six synchronous steps of reinforcement learning from the warm start."""
    run_dir = tmp_path_factory.mktemp("sync")
    fit("quickstart.yaml", run_dir, "--model.model.path", str(warm), "--trainer.max_steps", "6", *SYNCHRONOUS)
    return run_dir


def test_a_run_leaves_everything_behind(synchronous: Path) -> None:
    names = {path.name for path in synchronous.iterdir()}
    pictures = {"reward_curve.png", "step_time.png", "tree.png"}
    assert names >= {"report.html", "report.jsonl"}
    assert names >= {"config.yaml", "metrics.csv", "samples.jsonl", "summary.json", "checkpoints"} | pictures
    kept = read_run(synchronous)
    assert [row["batch"] for row in kept.batches] == [1, 2, 4, 6] and kept.notes == []
    for row in kept.batches:  # advantages as they were trained on
        assert row["credit"] == "advantage" and row["groups"] == row["groups_shown"] == 4
        assert all(len(values) == len(row["tree"]["parent"]) for values in row["tree"].values())
    before_and_after = [accuracy for _, accuracy, _, _ in held_out_curve(kept)]
    assert before_and_after == pytest.approx(column(metrics(synchronous), "val/accuracy"))
    assert "held-out accuracy" in (synchronous / "report.html").read_text()
    summary = json.loads((synchronous / "summary.json").read_text())
    rows = metrics(synchronous)
    assert summary["dense_tokens"] == sum(column(rows, "tokens/dense"))
    assert summary["tree_tokens"] == sum(column(rows, "tokens/tree")) < summary["dense_tokens"]
    assert [summary["accuracy_before"], summary["accuracy_after"]] == column(rows, "val/accuracy")
    assert column(rows, "lr") == pytest.approx([0.001 * (1 - 0.9 * step / 500) for step in range(6)])  # its schedule
    assert max(column(rows, "logprob_diff_max")) < 1e-5 and set(column(rows, "staleness")) == {0.0}


def test_every_group_is_accounted_for_in_the_metrics(synchronous: Path) -> None:
    rows = [row for row in metrics(synchronous) if row["rollouts/admitted"]]
    assert len(rows) == 6
    for row in rows:
        counters = {k.removeprefix("rollouts/"): int(float(v)) for k, v in row.items() if k.startswith("rollouts/")}
        assert unaccounted(counters) == 0
    assert {"dropped_filtered", "requeued", "skipped", "trained", "truncated"} <= counters.keys()
    assert counters["trained"] == 6 * 4


@pytest.mark.slow
def test_a_recording_trains_to_the_same_numbers_without_rolling_out(warm: Path, tmp_path: Path) -> None:
    """Asynchronous, so that no seed could repeat it."""
    model = ["--model.model.path", str(warm)]
    few = ["--trainer.max_steps", "4", "--data.batch_size", "4", "--data.validation.prompts.init_args.size", "8"]
    debug = ["--config", "configs/debug/record.yaml"]
    recorded = fit("quickstart.yaml", tmp_path / "recorded", *debug, *model, *few)
    rollouts = tmp_path / "recorded" / "rollouts"
    replay = ["--config", "configs/debug/replay.yaml", "--data.path", str(rollouts)]
    replayed = fit("quickstart.yaml", tmp_path / "replayed", *replay, *model)
    for name in ("loss", "grad_norm", "reward", "entropy"):
        assert len(column(replayed, name)) == 4 and column(replayed, name) == column(recorded, name), name

    run = ["predict", "--config", "configs/quickstart.yaml", *debug, "--run_dir", str(tmp_path / "only"), *model]
    done = arborist(*run, "--trainer.limit_predict_batches", "2", "--data.batch_size", "4")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "batch 2/2  prompts 4  episodes 32" in done.stderr
    assert len(list((tmp_path / "only" / "rollouts").iterdir())) == 2


@pytest.mark.slow
def test_seed_everything_is_the_seed_of_the_draws_that_name_none(
    warm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model that is given has no other draws: runs with other seeds would be one run. In this process, and
    synchronous: else those groups make the batch that are finished first, whatever their draws are."""
    monkeypatch.setattr(sys, "argv", ["arborist"])

    def replies(name: str, config: Path, *seeds: str) -> list[str]:
        flags = ["--trainer.limit_predict_batches", "1", "--data.batch_size", "4", "--data.max_staleness", "0", *seeds]
        main(["predict", "--config", str(config), "--run_dir", str(tmp_path / name), *flags])
        return [json.loads(one)["completion"] for one in (tmp_path / name / "samples.jsonl").read_text().splitlines()]

    (tmp_path / "one.yaml").write_text(
        (ROOT / "configs/quickstart.yaml").read_text().replace("path: null", f"path: {warm}")
    )
    one = replies("one", tmp_path / "one.yaml")
    saved = tmp_path / "one" / "config.yaml"
    assert replies("two", saved, "--seed_everything", "2") != one, "what is saved pins no seed"
    assert replies("again", saved, "--seed_everything", "2", "--data.seed", "1") == one, "one that is named stays"


@pytest.mark.slow
def test_a_checkpoint_scores_the_same_and_goes_on(
    synchronous: Path, warm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = synchronous / "checkpoints" / "last.ckpt"
    common = ["--model.model.path", str(warm), "--ckpt_path", str(checkpoint), *SYNCHRONOUS]
    done = arborist("validate", "--config", "configs/quickstart.yaml", "--run_dir", str(tmp_path / "val"), *common)
    assert done.returncode == 0, done.stdout + done.stderr
    last = column(metrics(synchronous), "val/accuracy")[-1]
    assert column(metrics(tmp_path / "val"), "val/accuracy") == [last]
    assert "SaveLast" not in done.stderr  # Lightning's word of callbacks that are needed

    on = f"goes on from step 6 of {checkpoint}\npolicy: "
    resumed = fit("quickstart.yaml", tmp_path / "more", *common, "--trainer.max_steps", "8", says=on)
    assert [int(row["step"]) for row in resumed if row["reward"]] == [6, 7], "numbered as if nothing had been between"
    monkeypatch.setattr(sys, "argv", ["arborist"])
    flags = ["--model.model.path", str(warm), "--trainer.max_steps", "8", *SYNCHRONOUS]
    main(["fit", "--config", str(ROOT / "configs/quickstart.yaml"), "--run_dir", str(tmp_path / "all"), *flags])
    straight = metrics(tmp_path / "all")
    assert column(resumed, "reward") == column(straight, "reward")[-2:], "the same stream goes on"
    assert column(resumed, "loss") == pytest.approx(column(straight, "loss")[-2:], abs=1e-6)


@pytest.mark.slow
def test_going_on_with_other_settings_is_told_in_an_ordinary_line(
    synchronous: Path, warm: Path, tmp_path: Path
) -> None:
    common = ["--model.model.path", str(warm), "--ckpt_path", str(synchronous / "checkpoints" / "last.ckpt")]
    flags = [*common, *SYNCHRONOUS, "--trainer.max_steps", "7", "--data.workflow.temperature", "0.9"]
    flags += ["--model.lr_scheduler.init_args.total_iters", "7", "--model.objective", "gspo", "--model.chunk_tokens=99"]
    flags += ["--model.objective_options={clip_low: 0.1}", "--trainer.precision", "bf16-mixed"]
    done = arborist("fit", "--config", "configs/quickstart.yaml", "--run_dir", str(tmp_path / "more"), *flags)
    assert done.returncode == 0, done.stderr
    (line,) = (one for one in done.stderr.splitlines() if "ckpt_path: the stream of training data" in one)
    assert line.startswith("warning: ckpt_path: ") and "data.workflow.temperature was 1.0 and is 0.9." in line
    (line,) = (one for one in done.stderr.splitlines() if "lr_scheduler" in one)
    assert line.startswith("warning: model.lr_scheduler: total_iters was 500 and is 7, which has no effect")
    (line,) = (one for one in done.stderr.splitlines() if "the run goes on with other settings" in one)
    told = "model.objective was ppo_clip and is gspo; model.objective_options was None and is {'clip_low': 0.1}"
    assert line.endswith(f"settings: {told}; trainer.precision was None and is bf16-mixed")
    assert "UserWarning" not in done.stderr and "rank_zero_warn" not in done.stderr


@pytest.mark.slow
@pytest.mark.skipif(not Path(DATA, "gsm8k", "train.jsonl").is_file() or not DATA, reason="needs gsm8k/train.jsonl")
def test_gsm8k(tmp_path: Path) -> None:
    rows = fit("gsm8k.yaml", tmp_path)
    assert len(column(rows, "loss")) == 3 and column(rows, "rollouts/failed")[-1] == 0
    samples = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    assert samples and all(sample["metadata"]["answer"] for sample in samples)
