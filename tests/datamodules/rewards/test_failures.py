"""Rewards that hang, crash, leak or return nonsense, for real: retries, scores for failures, memory, cache."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

import pytest
from jsonargparse import ArgumentParser

from datamodules.prompts.base import Prompt
from datamodules.rewards import RewardError, RewardOptions, RewardPool
from tests.datamodules.rewards.reward_functions import PreparesOnce
from tests.datamodules.rewards.test_rewards import PROMPT, with_pool

MEMORY = 400.0  # MB: an idle worker of these tests has imported little more than Python


def run(calls: list[str], deadline_s: float = 60.0, workers: int = 1, **options: Any) -> tuple[list[Any], RewardPool]:
    """What became of one burst of calls."""
    pools: list[RewardPool] = []

    async def body(pool: RewardPool) -> list[Any]:
        pools.append(pool)
        return await asyncio.gather(*(pool.judge(PROMPT, one) for one in calls), return_exceptions=True)

    results = with_pool(body, deadline_s=deadline_s, workers=workers, **options)
    return [one if isinstance(one, BaseException) else one.value for one in results], pools[0]


def test_a_call_that_eats_memory_is_killed_and_the_others_live() -> None:
    results, pool = run(["a", "hog", "bb"], deadline_s=60.0, memory_mb=MEMORY)
    assert results[0] == 1.0 and results[2] == 2.0
    assert isinstance(results[1], RewardError) and results[1].failure == "memory"
    assert "reward_options.memory_mb" in str(results[1]) and "of 400 MB" in str(results[1])
    assert pool.restarts == 2  # the call is only blamed for what it does to a fresh worker


def test_a_leaking_worker_is_replaced_and_no_result_is_lost() -> None:
    results, pool = run(["leak"] * 40, memory_mb=MEMORY)  # 1.6 GB in all
    assert pool.failures == 0 and pool.restarts >= 3
    assert len(set(results)) == pool.restarts + 1  # each answers with its process id


def test_a_worker_is_replaced_after_as_many_calls_as_asked_for() -> None:
    results, pool = run(["pid"] * 20, max_calls=5)
    pids = list(dict.fromkeys(results))
    assert [results.count(pid) for pid in pids] == [5, 5, 5, 5] and pool.failures == 0


@pytest.mark.parametrize("how", ["raise", "die", "segfault", "hang"])
def test_a_failure_that_passes_is_tried_again(how: str, tmp_path: Path) -> None:
    deadline_s = 3.0 if how == "hang" else 60.0
    results, pool = run([f"once/{how}{tmp_path}/seen", "a"], deadline_s=deadline_s, retries=1)
    assert results == [float(len(f"once/{how}{tmp_path}/seen")), 1.0]
    assert pool.retries == 1 and pool.failures == 0


def test_retries_end_and_are_for_the_named_failures_only() -> None:
    results, pool = run(["raise", "a"], retries=2)
    assert isinstance(results[0], RewardError) and results[1] == 1.0
    assert pool.retries == 2 and pool.failures == 1
    results, pool = run(["raise", "nan"], retries=2, retry_on=["crash", "nan"])
    assert [one.failure for one in results] == ["exception", "nan"]
    assert pool.retries == 2  # of the second alone


@pytest.mark.parametrize("how", ["nan", "bad part", "raise", "die", "hang"])
def test_a_failure_may_be_scored_but_never_in_silence(how: str, caplog: pytest.LogCaptureFixture) -> None:
    async def body(pool: RewardPool) -> None:
        judged = await pool.judge(PROMPT, how)
        assert judged.value == -1.0 and "task-7" in judged.failed
        assert judged.metadata() == {"reward_failed": judged.failed}
        assert pool.failures == 1

    with caplog.at_level(logging.WARNING):
        with_pool(body, deadline_s=2.0, on_failure=-1.0)
    (message,) = caplog.messages
    assert "'task-7'" in message and "scored -1 (reward_options.on_failure)" in message


def test_a_pool_that_is_not_running_scores_nothing() -> None:
    pool = RewardPool(len, options=RewardOptions(on_failure=0.0))  # type: ignore[arg-type]
    with pytest.raises(RewardError, match="not running"):
        asyncio.run(pool.judge(PROMPT, "a"))

    async def body(pool: RewardPool) -> None:
        waiting = asyncio.create_task(pool.judge(PROMPT, "hang"))
        behind = asyncio.create_task(pool.judge(PROMPT, "a"))
        await asyncio.sleep(0.1)
        pool.close()
        for one in (waiting, behind):
            with pytest.raises(RewardError, match="were closed"):
                await asyncio.wait_for(one, 60.0)

    with_pool(body, on_failure=0.0)


def test_a_call_whose_worker_is_replaced_fails_when_the_pool_is_closed(tmp_path: Path) -> None:
    async def body(pool: RewardPool) -> None:
        assert await pool.score(PROMPT, "a") == 1.0
        calls = [asyncio.create_task(pool.score(PROMPT, "a")) for _ in range(4)]
        async with asyncio.timeout(60.0):
            while not (tmp_path / "again").exists():  # the next worker prepares
                await asyncio.sleep(0.01)
        pool.close()
        for one in calls:
            with pytest.raises(RewardError, match="were closed"):
                await asyncio.wait_for(one, 60.0)

    with_pool(body, PreparesOnce(str(tmp_path)), max_calls=1)


def test_results_are_cached_by_everything_the_reward_sees() -> None:
    async def body(pool: RewardPool) -> None:
        first = await pool.judge(PROMPT, "leak")  # a process id and a side effect: never twice by accident
        for _ in range(3):
            assert await pool.judge(Prompt(id="task-7", answer="42"), "leak") == first
        assert pool.cache_hits == 3
        await pool.judge(Prompt(id="task-7", answer="43"), "leak")  # another reference answer
        await pool.judge(Prompt(id="task-8", answer="42"), "leak")
        assert pool.cache_hits == 3
        await pool.judge(PROMPT, "leak")  # the least recently used one had to go
        assert pool.cache_hits == 3
        for _ in range(2):
            with pytest.raises(RewardError):
                await pool.judge(PROMPT, "raise")
        assert pool.cache_hits == 3 and pool.failures == 2

    with_pool(body, cache=2)


def test_parts_are_handed_on_and_bad_ones_refused() -> None:
    async def body(pool: RewardPool) -> None:
        judged = await pool.judge(PROMPT, "parts")
        assert judged.value == 0.75 and judged.metadata() == {"reward_parts": {"correct": 1.0, "short": 0.5}}
        assert (await pool.judge(PROMPT, "a")).metadata() == {}
        said = (await pool.judge(PROMPT, "words")).metadata()
        assert said == {"reward_parts": {"correct": 1.0}, "feedback": "line 3: \\ud83d"}
        with pytest.raises(RewardError, match="'task-7' returned nan for its part 'short'"):
            await pool.judge(PROMPT, "bad part")
        with pytest.raises(RewardError, match="returned 20001 characters of feedback, at most 20000 are taken"):
            await pool.judge(PROMPT, "too many words")

    with_pool(body)


def test_a_limit_below_an_idle_worker_is_refused_at_the_start() -> None:
    with pytest.raises(ValueError, match=r"before its first call it holds .* of 1 MB .*; raise the limit"):
        with_pool(lambda pool: asyncio.sleep(0), memory_mb=1.0)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"workers": 0}, "workers: 0"),
        ({"deadline_s": 0.0}, "deadline_s: 0.0"),
        ({"retries": -1}, "retries: -1"),
        ({"retry_on": ["crash"]}, "retry_on has no effect with retries: 0"),
        ({"retries": 1, "retry_on": []}, "choose at least one"),
        ({"retries": 1, "retry_on": ["oom"]}, r"retry_on: \['oom'\]"),
        ({"cache": -1}, "cache: -1"),
        ({"on_failure": float("nan")}, "on_failure: nan"),
        ({"on_failure": "zero"}, "on_failure: 'zero'"),
        ({"memory_mb": 0.0}, "memory_mb: 0.0"),
        ({"memory_mb": float("inf")}, "memory_mb: inf"),
        ({"keep_environment": ["PATH"]}, "keep_environment: 'PATH' has no effect"),
        ({"max_calls": 0}, "max_calls: 0"),
    ],
)
def test_options_without_sense_are_refused_by_name(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=f"reward_options.{said}" if not said.startswith(("choose", "set")) else said):
        RewardOptions(**options)


def test_variables_that_may_be_secrets_by_their_value_can_be_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("BACKEND", raising=False)
    RewardOptions(keep_environment=["BACKEND"])
    monkeypatch.setenv("BACKEND", "http://host:80")
    RewardOptions(keep_environment=["BACKEND"])
    monkeypatch.setenv("BACKEND", "torch")
    with pytest.raises(ValueError, match="'BACKEND' has no effect"):
        RewardOptions(keep_environment=["BACKEND"])


def test_yaml_makes_options() -> None:
    parser = ArgumentParser()
    parser.add_argument("--reward_options", type=RewardOptions | None)
    given = {"retries": 2, "retry_on": ["crash", "timeout"], "cache": 100, "on_failure": 0.0, "memory_mb": 2000}
    made = parser.instantiate_classes(parser.parse_object({"reward_options": given})).reward_options
    assert made == RewardOptions(1, 15.0, 2, ["crash", "timeout"], 100, 0.0, 2000.0)
    assert made.retried == ("crash", "timeout")
