"""Checkpoint directories: complete or absent, the moment's values, any number of ranks, nothing unsafe."""

from __future__ import annotations

import datetime
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from app.strategies.checkpoints import CheckpointError, pack, unpack
from app.strategies.pieces import CheckpointMismatch, Piece, load_pieces, load_whole
from tests.distributed import checkpoint_jobs as jobs
from tests.distributed import toy
from tests.distributed.ranks import RankPool

ROOT = Path(__file__).parents[2]
START = 170.0  # seconds: eight processes start on few cores


def _largest_difference(got: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    assert got.keys() == expected.keys()
    return max(float((got[name].double() - expected[name].double()).abs().max()) for name in expected)


@pytest.fixture(scope="module")
def eight_ranks() -> Iterator[RankPool]:
    pool = RankPool(8)
    yield pool
    pool.close()


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_saved_on_four_ranks_continues_on_any_number(
    one_rank: RankPool,
    two_ranks: RankPool,
    four_ranks: RankPool,
    eight_ranks: RankPool,
    tmp_path: Path,
    dtype: torch.dtype,
) -> None:
    path = tmp_path / "four.ckpt"
    whole = four_ranks.run(jobs.train_and_save, START, path=path, dtype=dtype, steps=3)[0]  # took a fourth step
    for pool in (one_rank, two_ranks, four_ranks, eight_ranks):
        for result in pool.run(jobs.load_and_train, START, path=path, dtype=dtype, first=3, steps=1):
            difference = _largest_difference(result, whole)
            # bfloat16 gradients of one sample are rounded before they are added in another order
            assert difference <= (1e-2 * toy.LEARNING_RATE if dtype == torch.float32 else 2e-2)
            if pool is four_ranks:
                assert difference == 0.0


def test_values_of_the_moment_in_order(two_ranks: RankPool, tmp_path: Path) -> None:
    for result in two_ranks.run(jobs.snapshots, directory=tmp_path):
        assert result["names"] == ["b.ckpt", "c.ckpt"]
        assert result["step"] == 3
        assert torch.equal(result["weight"], torch.arange(20.0).view(5, 4) + 200.0)


def test_a_failed_write_is_told_and_costs_nothing(two_ranks: RankPool, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for message in two_ranks.run(jobs.blocked, directory=tmp_path):
        assert "a checkpoint was not written" in message and "file" in message
    assert unpack(tmp_path / "good.ckpt") == {}


def test_killed_while_writing_leaves_a_whole_checkpoint(tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, jobs.__file__, str(tmp_path)], env=environment, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    for line in process.stdout:
        if int(line) == 3:
            break
    directory = tmp_path / "checkpoints"
    end = time.monotonic() + 60.0
    while not list(directory.glob(".partial-*")) and time.monotonic() < end:
        pass
    process.kill()
    process.wait()
    process.stdout.close()
    step = unpack(directory / "last.ckpt")["step"]
    [weight] = load_whole(directory / "last.ckpt", lambda name: True).values()
    assert step >= 3 and bool((weight == step).all()) and len(weight) == 1 << 20


class TestBadCheckpoints:
    @pytest.fixture
    def path(self, one_rank: RankPool, tmp_path: Path) -> Path:
        one_rank.run(jobs.snapshots, directory=tmp_path)
        return tmp_path / "b.ckpt"

    def test_cut_short(self, path: Path) -> None:
        [shard] = path.glob("*.safetensors")
        shard.write_bytes(shard.read_bytes()[:-4])
        with pytest.raises(CheckpointError, match=rf"{shard.name} has \d+ bytes, \d+ were written"):
            unpack(path)

    def test_missing_file(self, path: Path) -> None:
        next(path.glob("*.safetensors")).unlink()
        with pytest.raises(CheckpointError, match=r"safetensors is missing"):
            unpack(path)

    def test_no_checkpoint(self, tmp_path: Path) -> None:
        with pytest.raises(CheckpointError, match="no checkpoint of DTAStrategy"):
            unpack(tmp_path)

    def test_another_model(self, path: Path) -> None:
        for name, shape, message in (
            ("model/weight", (5, 5), r"'model/weight' has shape \(5, 4\) in the checkpoint and \(5, 5\)"),
            ("model/other", (5, 4), "holds no 'model/other'"),
        ):
            with pytest.raises(CheckpointMismatch, match=message):
                load_pieces({name: Piece(torch.zeros(shape), (0, 0), shape)}, path)


def test_what_could_not_be_loaded_safely_is_refused_by_name() -> None:
    with pytest.raises(CheckpointError, match=r"\['hyper_parameters'\]"):
        pack({"step": 1, "hyper_parameters": {"when": datetime.UTC}})
