"""Values of columns go to other ranks and come out as the columns of their share, bit for bit (but for the sign of a
zero that is not trained); groups that stay whole keep the limit of a rank's tokens."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from app.exchange import OneProcess
from app.tree import TreeEngine
from modules.ranks import RankWork, build_tree, own_values, settle_routes, trained_values
from tests.helpers.tiny_policy import make_batch, source
from tests.modules.ranks.training_jobs import EXPERTS, with_experts

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


class TwoParts(OneProcess):
    """Of whose ranks each takes at most 195 tokens."""

    parts, partition_options = 2, {"token_limit": 195}


def test_whole_groups_keep_the_limit_of_tokens() -> None:
    batch = make_batch(seed=1, groups=4, episodes=5)  # 386 tokens
    work = RankWork(TwoParts(), "tree", lambda name: pytest.fail("nothing is run"))
    shares = work.shares(batch, range(len(batch)), whole_groups=True)
    assert sorted(shares[0] + shares[1]) == list(range(len(batch)))
    assert all(int(batch.lengths()[share].sum()) <= 195 for share in shares)
    assert not {*batch.group_ids[shares[0]].tolist()} & {*batch.group_ids[shares[1]].tolist()}


def test_the_policy_alone_replays_experts_on_record() -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**source(**EXPERTS).config)).eval()  # type: ignore[arg-type]
    engine, plain = TreeEngine(model, self_check=False), make_batch()
    batch = with_experts(make_batch(), 0)
    work = RankWork(OneProcess(), "tree", lambda name: nullcontext(engine))
    settle_routes(batch)
    passes = {"policy": ["logprobs"], "reference": ["logprobs"]}
    own = engine.forward(build_tree(plain, "tree")).flat("logprobs") * plain.loss_mask
    found = {name: one["logprobs"] for name, one in work.outputs(batch, passes).items()}
    torch.testing.assert_close(found["reference"], own)
    replayed = engine.forward(build_tree(batch, "tree")).flat("logprobs") * batch.loss_mask
    torch.testing.assert_close(found["policy"], replayed)
    assert float((replayed - own).abs().max()) > 0.01
