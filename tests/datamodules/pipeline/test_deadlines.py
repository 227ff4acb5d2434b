"""Every wait has an end: a deadline that is none is refused by each option that takes one."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

from app import checks
from callbacks import SaveLast, WeightSync
from datamodules.inference import EmbeddedEngine
from datamodules.inference.protocol import WeightUpdate
from datamodules.inference.sglang import SGLangEngine
from datamodules.pipeline.watchdog import Stall
from datamodules.rewards import RewardOptions


@pytest.mark.parametrize("seconds", [math.inf, math.nan, 0.0, -1.0])
@pytest.mark.parametrize(
    "make",
    [
        lambda s: checks.deadline({"episode_deadline_s": s}),
        lambda s: Stall(after_s=s),
        lambda s: RewardOptions(deadline_s=s),
        lambda s: WeightUpdate(1, path="weights", deadline_s=s),
        lambda s: WeightSync(deadline_s=s),
        lambda s: EmbeddedEngine(kv_cache_tokens=64, request_timeout_s=s),
        lambda s: EmbeddedEngine(kv_cache_tokens=64, control_timeout_s=s),
        lambda s: SGLangEngine(["http://127.0.0.1:1"], request_timeout_s=s),
        lambda s: SGLangEngine(["http://127.0.0.1:1"], silence_s=s),
        lambda s: SaveLast(minutes=s),
    ],
)
def test_a_deadline_that_never_comes_is_refused(make: Callable[[float], Any], seconds: float) -> None:
    with pytest.raises(ValueError, match="must be above 0"):
        make(seconds)
