"""A batch under way is taken up with the columns it had."""

from __future__ import annotations

import pytest
import torch

from app.batch import BatchError
from modules.step import state_of, take_up
from tests.helpers.tiny_policy import make_batch


def test_columns_are_taken_back() -> None:
    batch, offered = make_batch(), make_batch()
    batch.add_column("proximal", torch.rand(batch.num_tokens))
    assert torch.equal(take_up(offered, None, state_of(batch, 1, {})).columns["proximal"], batch.columns["proximal"])
    with pytest.raises(BatchError, match=r"StepHandle\.batch: the datamodule offers another batch"):
        take_up(make_batch(1), batch, None)


def test_the_proximal_column_had_another_name_in_early_checkpoints() -> None:
    batch = make_batch()
    batch.add_column("start", torch.rand(batch.num_tokens))
    assert list(take_up(make_batch(), None, state_of(batch, 1, {})).columns) == ["proximal"]
