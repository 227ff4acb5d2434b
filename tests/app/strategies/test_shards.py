"""Parameters sharded over groups train as whole ones do, hold what they say, and save what any layout reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor

from app.strategies import DTAStrategy
from tests.app.strategies import shard_jobs as jobs
from tests.app.strategies.shard_jobs import Layout
from tests.helpers.rank_pool import RankPool

START = 170.0
ALONE: Layout = (1, 1, False)
LAYOUTS: list[Layout] = [ALONE, (2, 1, False), (2, 2, False), (2, 2, True), (4, 2, False), (4, 2, True), (4, 4, True)]


@pytest.fixture
def pools(one_rank: RankPool, two_ranks: RankPool, four_ranks: RankPool) -> dict[int, RankPool]:
    return {pool.size: pool for pool in (one_rank, two_ranks, four_ranks)}


def _difference(got: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    assert got.keys() == expected.keys()
    return max(float((got[name].double() - expected[name].double()).abs().max()) for name in got)


@pytest.mark.slow
@pytest.mark.parametrize("layout", [(2, 2, True), (4, 2, True), (4, 4, True)])
@pytest.mark.parametrize(("precision", "tolerance"), [("32-true", 2e-4), ("64-true", 1e-6)])
def test_five_steps_are_those_of_one_process(
    pools: dict[int, RankPool], layout: Layout, precision: str, tolerance: float
) -> None:
    """AdamW divides small gradients by their own size, and the model's norms round in float32."""
    [expected] = pools[1].run(jobs.fit, START, layout=ALONE, steps=5, precision=precision)
    for got in pools[layout[0]].run(jobs.fit, START, layout=layout, steps=5, precision=precision):
        assert _difference(got["parameters"], expected["parameters"]) < tolerance
        assert got["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("before", LAYOUTS)
def test_a_checkpoint_is_the_same_in_every_layout(pools: dict[int, RankPool], tmp_path: Path, before: Layout) -> None:
    """Loaded and written again, to the bit."""
    pools[before[0]].run(jobs.fit, START, layout=before, steps=2, directory=tmp_path)
    expected = jobs.contents(tmp_path / "step=2.ckpt")
    assert any(name.startswith("optimizer/exp_avg/") for name in expected)
    for number, after in enumerate(LAYOUTS):
        target = tmp_path / str(number)
        pools[after[0]].run(jobs.again, START, layout=after, start=tmp_path / "step=2.ckpt", directory=target)
        found = jobs.contents(target / "again.ckpt")
        assert found.keys() == expected.keys()
        for name, tensor in expected.items():
            assert torch.equal(found[name], tensor), (name, after)


def test_a_run_goes_on_with_shards_and_holds_its_part(pools: dict[int, RankPool], tmp_path: Path) -> None:
    """For `make test`: one step on two ranks with whole parameters, the next two with shards."""
    [whole] = pools[1].run(jobs.fit, START, layout=ALONE, steps=3)
    pools[2].run(jobs.fit, START, layout=(2, 1, False), steps=1, directory=tmp_path)
    found = pools[2].run(jobs.fit, START, layout=(2, 2, True), steps=3, start=tmp_path / "step=1.ckpt")
    vocabulary = whole["parameters"]["policy.model.embed_tokens.weight"].numel()
    layers = sum(parameter.numel() for parameter in whole["parameters"].values()) - vocabulary
    for got in found:
        assert _difference(got["parameters"], whole["parameters"]) < 2e-4
    assert sum(got["held"] for got in found) == layers + 2 * vocabulary
    assert max(got["held"] for got in found) <= layers / 2 + vocabulary + 1
    assert sum(got["state"] for got in found) >= 2 * (layers + vocabulary)  # and the padding of buckets


@pytest.mark.parametrize(
    ("arguments", "message"),
    [({}, r"shard_parameters=True\) has no effect in groups of one rank: set group_size")],
)
def test_refused_by_name(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(MisconfigurationException, match=message):
        DTAStrategy(shard_parameters=True, **arguments)
