"""What the tests of judges share."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

from datamodules.prompts.base import Prompt
from datamodules.rewards import RewardOptions
from datamodules.rewards.judges import Judge, JudgeModel, RubricJudge
from datamodules.rewards.judges.pool import JudgePool

PROMPT = Prompt(id="task-7", text="What is 6 x 7?", answer="42")
CRITERIA = {"right": "the answer is right", "short": "no word too many"}


def model(url: str, **options: Any) -> JudgeModel:
    return JudgeModel(url=url, name="scripted", **{"deadline_s": 10.0, **options})


def rubric(url: str, *, about: dict[str, Any] | None = None, **options: Any) -> RubricJudge:
    return RubricJudge(model(url, **(about or {})), CRITERIA, **options)


def points(right: int, short: int) -> str:
    return json.dumps({"reasoning": "so it is", "right": right, "short": short})


def judged(
    judge: Judge,
    replies: Sequence[Any],
    options: RewardOptions | None = None,
    prompt: Prompt = PROMPT,
    state: dict[str, Any] | None = None,
) -> tuple[list[Any], JudgePool]:
    """What became of the replies, asked about at once and each alone: judgements, or errors. `state`: of an earlier
    launch."""
    pool = JudgePool(judge, options)
    pool.load_state_dict(state or {})

    async def body() -> list[Any]:
        await pool.open()
        try:
            return await asyncio.gather(*(pool.judge(prompt, one) for one in replies), return_exceptions=True)
        finally:
            pool.close()

    return asyncio.run(asyncio.wait_for(body(), 240.0)), pool
