"""Recorded batches as sessions: what was seen comes along."""

from __future__ import annotations

from pathlib import Path

import torch

from datamodules.files.recording import RolloutRecorder
from datamodules.groups import Group
from datamodules.recorded import RecordedDataModule
from tests.helpers.pictured import picture, pictured


def test_recorded_pictures_are_trained_on(tmp_path: Path) -> None:
    a, b = picture(0), picture(1)
    seen = [
        pictured([1, a, 2], episode_id=0),
        pictured([1, a, 2, b, 3], episode_id=0, turn_index=1),
        pictured([5, 6], episode_id=1),
    ]
    RolloutRecorder(tmp_path).write(0, [Group(0, "shown", 0, seen)])
    data = RecordedDataModule(str(tmp_path))
    data.setup("fit")
    batch = data.batch(0)
    assert [one.key for one in batch.pictures] == [a.key, b.key]
    assert batch.images is not None
    expected = [torch.full((len(one.tokens),), -1) if one.images is None else one.images for one in seen]
    assert batch.images.tolist() == torch.cat(expected).tolist()
