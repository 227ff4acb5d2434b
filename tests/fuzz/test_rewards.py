"""Every way in which a reward is known to misbehave, in one pool and one event loop: each costs its own call only."""

from __future__ import annotations

import asyncio
import logging
import os
import random
import re
import time
from pathlib import Path

import pytest

from datamodules.prompts.base import Prompt
from datamodules.rewards import Judgement, RewardError, RewardOptions, RewardPool
from tests.fuzz.hostile_rewards import KINDS, RIGHT, Hostile

LEFT_BEHIND = f"98765.{os.getpid()}"  # another checkout may be tested beside this one
GOOD = 8  # calls that behave, for each that does not


def prompts(rng: random.Random) -> list[Prompt]:
    """Each with a number of its own for an answer."""
    kinds = [*KINDS, *[None] * (GOOD * len(KINDS))]
    rng.shuffle(kinds)
    return [
        Prompt(id=f"p{k}", answer=str(k), metadata={} if kind is None else {"kind": kind})
        for k, kind in enumerate(kinds)
    ]


def test_rewards_cost_their_own_call_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ARBORIST_FUZZ_API_KEY", "secret")
    monkeypatch.setenv("ARBORIST_FUZZ_PLAIN", "plain")
    monkeypatch.setenv("ARBORIST_FUZZ_SLEEP", LEFT_BEHIND)
    calls = prompts(random.Random(11))
    # The largest good worker has some 40 MB; a call that only starved on a busy machine may have another try.
    options = RewardOptions(workers=4, deadline_s=2.0, memory_mb=200.0, retries=1, retry_on=["timeout"])
    pool = RewardPool(Hostile(), options)

    async def run() -> list[Judgement | BaseException]:
        pool.start(tmp_path)
        await pool.open()
        try:
            async with asyncio.timeout(400.0):
                return await asyncio.gather(*(pool.judge(one, "said") for one in calls), return_exceptions=True)
        finally:
            pool.close()

    with caplog.at_level(logging.WARNING):
        results = asyncio.run(run())
    amiss = []
    for prompt, result in zip(calls, results, strict=True):
        kind = prompt.metadata.get("kind")
        expected = RIGHT if kind is None else KINDS[kind][1]
        if isinstance(result, RewardError):
            said = f"{result.failure}: {result}".replace(f"reward of prompt '{prompt.id}' ", "")
            if expected == RIGHT or not re.match(expected, said, re.DOTALL) or len(said) > 3000:
                amiss.append(f"{kind}: {said[:300]}")
        elif not isinstance(result, Judgement) or expected != RIGHT or result.value != float(prompt.answer):
            amiss.append(f"{kind}: {result!r:.300} for {prompt.answer}")
    assert not amiss, "\n".join(amiss)
    assert not caplog.records  # of ours or of asyncio's
    printed = capfd.readouterr()
    assert not printed.out and not printed.err
    assert sum(file.stat().st_size for file in tmp_path.iterdir()) < 4 * 4 * 10**6
    assert left_behind() == []


def left_behind(seconds: float = 60.0) -> list[str]:
    ends = time.monotonic() + seconds
    while (found := _sleepers()) and time.monotonic() < ends:
        time.sleep(0.02)
    return found


def _sleepers() -> list[str]:
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            line = Path("/proc", name, "cmdline").read_text()
        except OSError:
            continue
        if LEFT_BEHIND in line:
            found.append(f"{name}: {line}")
    return found
