"""Two ranks, one of which is asked to end: both stop at the same step, and one checkpoint holds it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from app.strategies.checkpoint.checkpoints import MANIFEST_FILE
from app.strategies.checkpoint.trainer_state import put_together
from tests.app.strategies.ranks import interruption_jobs
from tests.helpers.rank_pool import RankPool


@pytest.mark.parametrize(("waits", "steps"), [(False, 3), (True, 2)])
def test_whichever_rank_is_asked_all_end_at_the_same_step(
    two_ranks: RankPool, tmp_path: Path, waits: bool, steps: int
) -> None:
    assert two_ranks.run(interruption_jobs.asked, directory=tmp_path, waits=waits) == [143, 143]
    checkpoint = tmp_path / "here" / "checkpoints" / "last.ckpt"
    assert json.loads((checkpoint / MANIFEST_FILE).read_text())["ranks"] == 2
    assert put_together(checkpoint)["global_step"] == steps
