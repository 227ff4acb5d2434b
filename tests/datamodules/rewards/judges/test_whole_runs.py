"""Whole runs whose rewards a judge gives, from YAML to metrics, against a real HTTP server."""

from __future__ import annotations

import json
import subprocess
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import yaml

from datamodules.pipeline.gate import unaccounted
from tests.app.cli.test_runs import arborist, column, metrics
from tests.helpers.judge_server import Asked, JudgeServer, Said
from tests.helpers.ports import free_port

pytestmark = pytest.mark.slow

TINY = {"model_type": "qwen3", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
TINY |= {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 64}
JUDGE = "datamodules.rewards.judges.RubricJudge"


def run(directory: Path, url: str, *args: str, judge: dict[str, Any], **model: Any) -> subprocess.CompletedProcess[str]:
    """A short synchronous run of the quickstart whose reward is a judge."""
    options = {"model": {"url": url, "name": "scripted", **model}, "verifier": "datamodules.rewards.exact_match"}
    reward = {"class_path": JUDGE, "init_args": {**options, **judge}}
    own = {
        "model": {"init_args": {"model": {"path": None, "config": {**TINY, "vocab_size": 17}}}},
        "data": {"init_args": {"reward": reward, "batch_size": 2, "group_size": 4, "max_staleness": 0}},
    }
    path = directory / "judged.yaml"
    path.write_text(yaml.safe_dump(own))
    few = ["--trainer.max_steps", "3", "--trainer.val_check_interval", "3"]
    few += ["--data.validation.prompts.init_args.size", "4"]
    both = ["--config", "configs/quickstart.yaml", "--config", str(path), "--run_dir", str(directory / "run")]
    return arborist("fit", *both, *few, *args)


def grade(asked: Asked, number: int) -> str:
    return json.dumps({"reasoning": "", "short": min(5, len(asked.blocks["REPLY"]))})


def accounts(rows: list[dict[str, str]]) -> dict[str, int]:
    last = next(row for row in reversed(rows) if row.get("rollouts/admitted"))
    names = [name.removeprefix("rollouts/") for name in last if name.startswith("rollouts/") and last[name]]
    return {name: int(float(last[f"rollouts/{name}"])) for name in names}


def test_a_rubric_rewards_a_run(tmp_path: Path) -> None:
    rubric = {"criteria": {"short": "the answer is short"}, "scale": 5}
    with JudgeServer(grade) as server:
        done = run(tmp_path, server.url, judge=rubric)
        assert done.returncode == 0, done.stdout + done.stderr
    rows = metrics(tmp_path / "run")
    assert len(server.asked) in range(24, 33)  # perhaps those of the next batch; held-out ones are the verifier's
    assert column(rows, "rollouts/judge_calls")[-1] == 24
    assert column(rows, "rollouts/judge_input_tokens")[-1] == 2400
    for reward, short, verifier, drift in zip(
        *(column(rows, name) for name in ("reward", "reward/short", "reward/verifier", "reward/drift")), strict=True
    ):
        assert reward == pytest.approx(short) and drift == pytest.approx(short - verifier)
    samples = map(json.loads, (tmp_path / "run" / "samples.jsonl").read_text().splitlines())
    sample = next(one for one in samples if one["set"] == "train")
    assert sample["reward"] == pytest.approx(min(5, len(sample["metadata"]["completion"])) / 5)


def test_a_run_outlives_a_judge_that_was_away(tmp_path: Path) -> None:
    def away(asked: Asked, number: int) -> Said | str:
        faults = {3: Said("gone", 503), 5: Said(drop=True), 7: Said("later", 429, {"retry-after": "1"})}
        faults |= {9: Said("?"), 11: Said("", after_s=3.0), 13: Said("no", 403)}
        return faults.get(number, grade(asked, number))

    rubric = {"criteria": {"short": "the answer is short"}, "scale": 5}
    with JudgeServer(away) as server:
        done = run(tmp_path, server.url, judge=rubric, attempt_s=1.0, deadline_s=20.0)
        assert done.returncode == 0, done.stdout + done.stderr
    rows = metrics(tmp_path / "run")
    assert column(rows, "rollouts/failed")[-1] == 1  # the refusal alone
    assert "the judge refuses the request with status 403: " in done.stdout + done.stderr
    assert column(rows, "rollouts/judge_retries")[-1] >= 3 and len(column(rows, "reward")) == 3
    assert 24 + 3 <= column(rows, "rollouts/judge_calls")[-1] <= len(server.asked)
    assert unaccounted(accounts(rows)) == 0


BUSY, GONE_S = 12, 6.0  # requests that find it busy; then nobody is there for so long


def test_a_run_waits_for_a_judge_that_is_busy_and_then_away(tmp_path: Path) -> None:
    """Status 429 to whoever asks, then nobody at its address: it costs time alone, and each request is counted."""
    rubric = {"criteria": {"short": "the answer is short"}, "scale": 5}
    left = threading.Event()

    def judge(one: Asked, number: int) -> Said | str:
        if number < 4:
            return grade(one, number)
        if number < 4 + BUSY:
            return Said("slow down", 429)
        left.set()
        return Said(drop=True)

    with ExitStack() as servers:
        first = JudgeServer(judge, free_port())
        serving = ExitStack()
        serving.enter_context(first)

        def leave() -> None:  # and come back at the same address
            assert left.wait(300)
            serving.close()
            time.sleep(GONE_S)
            servers.enter_context(JudgeServer(grade, first.port))

        away = threading.Thread(target=leave, daemon=True)
        away.start()
        done = run(tmp_path, first.url, judge=rubric, deadline_s=280.0)
        away.join(300)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = metrics(tmp_path / "run")
    last = {name: column(rows, f"rollouts/{name}")[-1] for name in ("failed", "judge_retries", "judge_refused")}
    assert last["failed"] == 0 and last["judge_refused"] == 0 and last["judge_retries"] > BUSY
    assert len(column(rows, "reward")) == 3 and unaccounted(accounts(rows)) == 0
    assert column(rows, "rollouts/judge_calls")[-1] == 24 + last["judge_retries"]
    assert column(rows, "rollouts/judge_input_tokens")[-1] == 2400


def test_a_run_whose_judge_has_spent_its_budget_ends_and_says_so(tmp_path: Path) -> None:
    """And so it does where it goes on: a budget is of all launches. Raised, it trains the batch that was missing."""
    rubric = {"criteria": {"short": "the answer is short"}, "scale": 5}
    with JudgeServer(grade) as server:
        done = run(tmp_path, server.url, judge=rubric, budget={"max_calls": 18})
        rows = metrics(tmp_path / "run")
        on = run(tmp_path, server.url, "--ckpt_path", "last", judge=rubric, budget={"max_calls": 18})
        asked = len(server.asked)
        last = run(tmp_path, server.url, "--ckpt_path", "last", judge=rubric, budget={"max_calls": 40})
    for one in (done, on):
        assert one.returncode != 0 and asked == 18
        assert "the judge has spent its budget: 18 of 18 (model.budget.max_calls)" in one.stdout + one.stderr
    assert last.returncode == 0, last.stdout + last.stderr
    assert column(metrics(tmp_path / "run"), "rollouts/judge_calls")[-1] == 18 + 8
    assert len(column(rows, "reward")) == 2  # two batches of eight were judged
    assert unaccounted(accounts(rows)) == 0
