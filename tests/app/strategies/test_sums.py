"""Sums of gradients that begin inside a step's last backward: the bits of sums that begin at its end, in one order."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from app.strategies.sums import _accumulators
from modules import PolicyModule, RewardModule
from modules.step import TreeStep
from tests.app.strategies import sums_jobs as jobs
from tests.helpers.rank_pool import RankPool
from tests.helpers.tiny_policy import sgd, source

START = 170.0  # seconds: processes import everything the first time


def _both(pool: RankPool, **run: Any) -> list[dict[str, Any]]:
    """What every rank found with early sums, after comparing it with the same without."""
    found = pool.run(jobs.train, START, early=True, **run)
    plain = pool.run(jobs.train, START, early=False, **run)
    for early, late in zip(found, plain, strict=True):
        assert early["norms"] == pytest.approx(late["norms"], rel=0, abs=0, nan_ok=True)
        assert early["skipped"] == late["skipped"]
        for name, value in late["parameters"].items():
            assert torch.equal(early["parameters"][name], value), name
        assert early["order"] == late["order"] == found[0]["order"]
        assert late["early"] == [0] * 4
    assert not torch.equal(found[0]["parameters"]["policy.model.norm.weight"], torch.ones(16))  # it trains
    return found


@pytest.mark.parametrize(("tied", "dtype"), [(True, torch.float32), (False, torch.float32), (True, torch.bfloat16)])
def test_two_ranks_have_the_same_bits(two_ranks: RankPool, tied: bool, dtype: torch.dtype) -> None:
    for result in _both(two_ranks, tied=tied, dtype=dtype):
        assert min(result["early"]) > 0


def test_a_group_like_ncclss_has_the_same_bits(two_ranks: RankPool) -> None:
    """All sums may be under way there at once: every bucket but what the embedding and what is behind it has begun."""
    for result in _both(two_ranks, late=True):
        sums = [what for what in result["order"] if what.startswith("reduce-scatter")]
        assert min(result["early"]) >= len(sums) // 4 - 2
        assert "embed_tokens" in sums[-2] + sums[-1] and "layers.1" in sums[1]


def test_gradients_of_several_passes(two_ranks: RankPool) -> None:
    for result in _both(two_ranks, passes=2):
        assert min(result["early"]) > 0


def test_a_gradient_that_is_not_finite(two_ranks: RankPool) -> None:
    for result in _both(two_ranks, poison=(1, 2)):
        assert result["skipped"] == [2]


@pytest.mark.slow  # four processes import everything
@pytest.mark.parametrize("late", [False, True])
def test_four_ranks_of_which_two_have_no_work(four_ranks: RankPool, late: bool) -> None:
    found = _both(four_ranks, idle=(0, 3), late=late)
    assert [max(result["early"]) > 0 for result in found] == [False, True, True, False]


@pytest.mark.parametrize("critic", [False, True])
def test_a_fit_has_the_same_bits_where_a_callback_looks_at_gradients(two_ranks: RankPool, critic: bool) -> None:
    found = two_ranks.run(jobs.fit, START, early=True, devices=2, critic=critic)
    plain = two_ranks.run(jobs.fit, START, early=False, devices=2, critic=critic)
    for (parameters, early, _), (expected, none, missing) in zip(found, plain, strict=True):
        assert all(torch.equal(parameters[name], value) for name, value in expected.items())
        assert early > 0 and none == 0 and not missing


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("gradient", "gradient of 'policy.* was added to after ranks had begun to sum it.*completes_gradients = False"),
        ("last", "sum over ranks: a collective before all ranks have begun what this one has.*`end_step`"),
        ("collective", "sum over ranks: a collective before all ranks have begun what this one has.*`end_step`"),
    ],
)
def test_what_would_be_lost_or_hang_is_refused(two_ranks: RankPool, how: str, said: str) -> None:
    for message in two_ranks.run(jobs.misuse, START, how=how):
        assert re.search(said, message), message


def test_a_pass_of_ones_own_keeps_its_gradients_unless_it_says_otherwise() -> None:
    class Own(PolicyModule):
        def tree_pass(self, step: TreeStep) -> None:
            super().tree_pass(step)

    class Says(Own):
        completes_gradients = True

    made = [kind(source(), optimizer=sgd) for kind in (PolicyModule, Own, Says)]
    assert [one.completes_gradients for one in made] == [True, False, True]
    assert RewardModule(source(), optimizer=sgd).completes_gradients


def test_layers_that_make_their_graph_in_backward_complete_nothing_early() -> None:
    layer = torch.nn.Linear(2, 2)
    x = torch.ones(1, 2, requires_grad=True)
    for reentrant in (True, False):
        out = checkpoint(layer, x, use_reentrant=reentrant)
        assert _accumulators([out])[1] == reentrant
