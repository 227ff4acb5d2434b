"""Checkpoint directories with damaged files: refused in one line; where there are no hashes, refused or read."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from app.strategies.checkpoint.checkpoints import CheckpointWriter, pack, unpack
from app.strategies.manifest import MANIFEST_FILE, read_manifest
from app.strategies.pieces import Piece, load_whole
from tests.fuzz.damage import Refused, damaged, edits, examples, outcome


class Files(dict[str, bytes]):
    """Contents by name, which a failing example does not print."""

    def __repr__(self) -> str:
        return f"Files of {sorted(self)}"


WEIGHT = torch.arange(40.0).view(8, 5)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Files]:
    """A checkpoint's files by name."""
    directory = tmp_path_factory.mktemp("saved")
    dist.init_process_group("gloo", init_method=f"file://{directory}/store", rank=0, world_size=1)
    saving = CheckpointWriter(dist.new_group(backend="gloo", timeout=timedelta(seconds=60)), 60.0)
    pieces = {name: Piece.rows(WEIGHT + i, 0, 1) for i, name in enumerate(("model/a", "optimizer/exp_avg/a"))}
    saving.save(directory / "a.ckpt", pack({"global_step": 3, "loops": {"a": [1, 2.0, None, "b"]}}), pieces)
    saving.wait(60.0)
    saving.close()
    dist.destroy_process_group()
    yield Files({file.name: file.read_bytes() for file in sorted((directory / "a.ckpt").iterdir())})


def read(path: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    return unpack(path), load_whole(path, lambda name: True)


def write(path: Path, files: dict[str, bytes]) -> None:
    path.mkdir(exist_ok=True)
    for name, data in files.items():
        (path / name).write_bytes(data)


@examples(120)
@given(number=st.integers(0, 2), changes=edits)
def test_no_damage_is_read(files: Files, tmp_path: Path, number: int, changes: Any) -> None:
    name = sorted(files)[number]
    changed = damaged(files[name], changes)
    write(tmp_path / "a.ckpt", files | {name: changed})
    found = outcome(lambda: read(tmp_path / "a.ckpt"))
    if name == MANIFEST_FILE and not isinstance(found, Refused):  # its blanks, and the number of ranks, mean nothing
        assert found[0]["global_step"] == 3 and torch.equal(found[1]["model/a"], WEIGHT)
    else:
        assert isinstance(found, Refused) or changed == files[name]


@examples(120)
@given(number=st.integers(0, 2), changes=edits)
def test_without_hashes_damage_ends_in_no_traceback(files: Files, tmp_path: Path, number: int, changes: Any) -> None:
    write(tmp_path / "a.ckpt", files)
    name = sorted(files)[number]
    changed = damaged(files[name], changes)
    sizes = {file: written.size for file, written in read_manifest(tmp_path / "a.ckpt").items()}
    old = json.dumps({"format": 1, "ranks": 1, "files": sizes | ({name: len(changed)} if name in sizes else {})})
    text = damaged(old.encode(), changes) if name == MANIFEST_FILE else old.encode()
    write(tmp_path / "a.ckpt", files | {name: changed} | {MANIFEST_FILE: text})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        outcome(lambda: read(tmp_path / "a.ckpt"))
