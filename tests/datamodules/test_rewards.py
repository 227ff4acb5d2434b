"""Rewards in real worker processes: right when they behave, contained when they do not."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from datamodules.prompts.base import Prompt
from datamodules.rewards import RewardError, RewardPool, exact_match, math_verify
from tests.datamodules.reward_functions import FailsToLoad, Scaled, misbehave

PROMPT = Prompt(id="task-7", answer="42")


def with_pool(body: Callable[[RewardPool], Awaitable[Any]], reward: Any = misbehave, **options: Any) -> Any:
    pool = RewardPool(reward, **{"deadline_s": 10.0, **options})

    async def run() -> Any:
        await pool.open()
        return await body(pool)

    try:
        return asyncio.run(run())
    finally:
        pool.close()


def test_results_belong_to_their_calls() -> None:
    async def body(pool: RewardPool) -> list[float]:
        return await asyncio.gather(*(pool.score(PROMPT, "x" * n) for n in range(200)))

    assert with_pool(body, workers=2) == [float(n) for n in range(200)]


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("nan", "returned nan"),
        ("inf", "returned inf"),
        ("raise", "RuntimeError: no such answer key"),
        ("exit", "SystemExit"),
        ("hang", "did not return within 1 s"),
        ("die", "exited with code 3"),
        ("segfault", "exited with code -11"),
    ],
)
def test_a_bad_reward_costs_its_own_call_only(how: str, said: str) -> None:
    async def body(pool: RewardPool) -> list[Any]:
        # Warm, then one burst: calls sent to the worker together with the bad one must survive its end.
        await pool.score(PROMPT, "")
        completions = ["a"] * 20 + [how] + ["bb"] * 20
        return await asyncio.gather(*(pool.score(PROMPT, c) for c in completions), return_exceptions=True)

    results = with_pool(body, deadline_s=1.0 if how == "hang" else 10.0)
    assert results[:20] == [1.0] * 20 and results[21:] == [2.0] * 20
    assert isinstance(results[20], RewardError)
    assert said in str(results[20]) and "task-7" in str(results[20])


def test_two_workers_share_slow_rewards() -> None:
    async def body(pool: RewardPool) -> set[float]:
        return set(await asyncio.gather(*(pool.score(PROMPT, "slow pid") for _ in range(12))))

    assert len(with_pool(body, workers=2, deadline_s=10.0)) == 2


def test_what_a_killed_reward_started_is_killed_too(tmp_path: Any) -> None:
    async def body(pool: RewardPool) -> None:
        with pytest.raises(RewardError, match="was killed"):
            await pool.score(PROMPT, f"child{tmp_path / 'pid'}")

    with_pool(body, deadline_s=1.5)
    child = int((tmp_path / "pid").read_text())
    assert _ends(child)


def test_close_ends_the_workers_even_a_hung_one() -> None:
    pids: list[int] = []

    async def body(pool: RewardPool) -> None:
        pids.append(int(await pool.score(PROMPT, "pid")))
        hung = asyncio.create_task(pool.score(PROMPT, "hang"))
        await asyncio.sleep(0.1)
        hung.cancel()

    with_pool(body, deadline_s=100.0)
    assert _ends(pids[0])


def test_a_cancelled_call_is_not_computed() -> None:
    async def body(pool: RewardPool) -> list[float]:
        first = asyncio.create_task(pool.score(PROMPT, "sleep"))
        hang = asyncio.create_task(pool.score(PROMPT, "hang"))
        await asyncio.sleep(0)
        hang.cancel()
        return [await first, await pool.score(PROMPT, "xyz"), pool.restarts]

    assert with_pool(body, deadline_s=2.0) == [5.0, 3.0, 0]


def test_a_pool_opens_again_after_close() -> None:
    pool = RewardPool(exact_match)

    async def run() -> float:
        await pool.open()
        return await pool.score(PROMPT, " 42\n")

    for _ in range(2):
        assert asyncio.run(run()) == 1.0
        pool.close()
        pool.close()


def test_rewards_that_cannot_be_sent_are_refused() -> None:
    with pytest.raises(ValueError, match=r"reward: .* cannot be sent to a worker process"):
        RewardPool(lambda prompt, completion: 1.0)
    with pytest.raises(ValueError, match="reward_workers: 0"):
        RewardPool(exact_match, workers=0)
    with pytest.raises(ValueError, match="could not be started: ImportError: licence server unreachable"):
        with_pool(lambda pool: asyncio.sleep(0), reward=FailsToLoad())


def test_callable_objects_and_math_verify_run_in_workers() -> None:
    async def body(pool: RewardPool) -> list[float]:
        return [await pool.score(PROMPT, text) for text in ("42", "so it is $42.0$", "41", "no idea")]

    assert with_pool(body, reward=Scaled(3.0)) == [3.0, 0.0, 0.0, 0.0]
    assert with_pool(body, reward=math_verify, deadline_s=20.0) == [1.0, 1.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("answer", "completion", "reward"),
    [
        ("1,000", "that makes $1000$ dollars", 1.0),
        ("1000", "\\boxed{1000.0}", 1.0),
        ("72", "48 + 24 = 72\n#### 72", 1.0),
        ("40", "She answered 200 calls in 5 days.\n#### 40\n", 1.0),
        ("5", "#### first step\nThe answer is 5.", 1.0),
        ("\\frac{1}{2}", "0.5", 1.0),
        ("5", "-5", 0.0),
        ("5", "", 0.0),
    ],
)
def test_math_verify(answer: str, completion: str, reward: float) -> None:
    assert math_verify(Prompt(id="p", answer=answer), completion) == reward


def test_math_verify_refuses_an_answer_it_cannot_read() -> None:
    with pytest.raises(ValueError, match="prompt 'p'"):
        math_verify(Prompt(id="p", answer=""), "3")


def _ends(pid: int, seconds: float = 5.0) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            with open(f"/proc/{pid}/stat") as file:
                if file.read().rsplit(")", 1)[1].split()[0] == "Z":
                    return True
        except FileNotFoundError:
            return True
        time.sleep(0.02)
    os.kill(pid, 9)
    return False
