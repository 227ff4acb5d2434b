"""Values of columns go to other ranks and come out as the columns of their share, bit for bit (but for the sign of a
zero that is not trained)."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from modules.ranks import own_values, trained_values
from tests.helpers.tiny_policy import make_batch

SHARES = {
    "all": [[0, 3], [1], [2, 4, 5]],
    "some": [[3], [5]],
    "empty ranks": [[], [1, 2], [], [0]],
}


def _columns(mask: Tensor) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(len(mask), generator=generator)
    odd = torch.where(mask, noise, 0.0)
    odd[mask.nonzero()[1]] = -0.0
    odd[mask.nonzero()[2]] = float("nan")
    product = noise.abs() * mask * -1  # -0.0 where not trained
    off = torch.where(mask, noise, 0.0)
    off[(~mask).nonzero()[3]] = float("nan")
    return {
        "odd": odd,
        "product": product,
        "off the mask": off,
        "everywhere": noise,
        "zeros": torch.zeros(len(mask)),
        "flags": mask,
    }


@pytest.mark.parametrize("name", SHARES)
def test_values_arrive_bit_for_bit(name: str) -> None:
    batch, shares = make_batch(groups=3, episodes=2), SHARES[name]
    columns = _columns(batch.loss_mask)
    values, bounds = trained_values(batch, shares, columns)
    chosen = [sequence for share in shares for sequence in share]
    trained = int(batch.select(chosen).loss_mask.sum())
    dense = int(batch.lengths()[chosen].sum())
    sizes = {name: len(value) for name, value in values.items()}
    assert sizes == {
        "odd": trained,
        "product": trained,
        "off the mask": dense,
        "everywhere": dense,
        "zeros": trained,
        "flags": trained,
    }
    for rank, share in enumerate(shares):
        if not share:
            continue
        for column, value in own_values(batch.select(share), values, bounds, rank).items():
            expected = columns[column][batch.flat_index(share)]
            if column == "product":
                expected = torch.where(batch.select(share).loss_mask, expected, 0.0)
            assert value.dtype == expected.dtype
            bits = torch.uint8 if value.dtype == torch.bool else torch.int32
            assert torch.equal(value.view(bits), expected.view(bits)), column
