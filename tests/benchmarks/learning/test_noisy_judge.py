"""The benchmark of a judge that errs: its error rate is what the case says, its requests are counted, and cases differ
in the judge alone."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import jsonargparse
import pytest
from lightning import LightningDataModule

from benchmarks.learning import noisy_judge
from datamodules.prompts.base import Prompt
from datamodules.rewards.judges import Judge
from datamodules.rewards.judges.pool import JudgePool

PROMPT = Prompt(id="17+25", text="17+25=", answer="42")


def verdicts(judge: Judge, replies: list[str], times: int) -> tuple[list[list[float]], int]:
    client = judge.client()

    async def body() -> list[list[float]]:
        asked = [replies] if judge.is_relative else [[one] for one in replies]
        found = []
        for _ in range(times):
            found.append([one.value for part in asked for one in await judge.verdicts(client, PROMPT, part)])
        return found

    return asyncio.run(body()), client.spent.calls


def test_a_perfect_judge_tells_the_truth_however_it_is_asked() -> None:
    replies = ["42", "43", "42", "4"]
    assert verdicts(noisy_judge.NoisyRubric(0.0, 0), replies, 1) == ([[1.0, 0.0, 1.0, 0.0]], 4)
    assert verdicts(noisy_judge.NoisyRubric(0.0, 0, repeats=2), replies, 1) == ([[1.0, 0.0, 1.0, 0.0]], 8)
    [ranked], calls = verdicts(noisy_judge.NoisyRanking(0.0, 0), replies, 1)
    assert ranked == pytest.approx([2.5 / 3, 0.5 / 3, 2.5 / 3, 0.5 / 3]) and calls == 2


@pytest.mark.parametrize("repeats", [1, 2])
def test_the_error_rate_is_the_one_of_the_case(repeats: int) -> None:
    found, calls = verdicts(noisy_judge.NoisyRubric(0.3, 1, repeats), ["42", "7"], 2000)
    assert calls == 2 * repeats * 2000
    assert sum(one[0] for one in found) / 2000 == pytest.approx(0.7, abs=0.04)
    assert sum(one[1] for one in found) / 2000 == pytest.approx(0.3, abs=0.04)
    assert len({tuple(one) for one in found}) == (repeats + 1) ** 2  # each is drawn by itself


def test_rankings_err_as_often() -> None:
    found, _ = verdicts(noisy_judge.NoisyRanking(0.3, 1), ["42", "7"], 2000)
    # A question puts the right one before with 0.49, behind with 0.09, and ties else; the place is the mean of two.
    assert sum(one[0] for one in found) / 2000 == pytest.approx(0.49 + 0.42 / 2, abs=0.03)


@pytest.mark.parametrize("case", noisy_judge.CASES)
def test_cases_are_runs_that_differ_in_the_judge(case: str, tmp_path: Path) -> None:
    config = noisy_judge.rl_config(case, 1, tmp_path, 50)
    plain = noisy_judge.rl_config("single, 0%", 1, tmp_path, 50)
    parser = jsonargparse.ArgumentParser(exit_on_error=False)
    parser.add_subclass_arguments(LightningDataModule, "data")
    made: Any = parser.instantiate(parser.parse_object({"data": config["data"]})).data
    assert isinstance(made._pool, JudgePool) and made.batch_size * made.group_size == 256
    for one in (config, plain):
        one["data"]["init_args"].pop("reward")
    assert config == plain


def test_figures_are_read_off_a_run(tmp_path: Path) -> None:
    rows = ["step,val/accuracy,rollouts/judge_calls,reward/drift", "0,0.25,,", "5,,1280,0.1", "10,0.75,2560,0.3"]
    (tmp_path / "metrics.csv").write_text("\n".join(rows) + "\n")
    one = noisy_judge.result("single, 0%", 0, tmp_path, 9.0)
    half = {**one, "case": "twice, 30%", "curve": [(0, 0.25), (10, 0.5)]}
    report = {"command": "x", "hardware": "y", "steps": 10, "summary": noisy_judge.summary([one, half])}
    text = noisy_judge.markdown(report)
    assert "| single, 0% | 0.250 | 0.750 | 0.750 | +0.500 | 1.00 | 256 | +0.200 |" in text
    assert "| twice, 30% | 0.250 | 0.500 | 0.500 | +0.250 | 0.50 | 256 | +0.200 |" in text
