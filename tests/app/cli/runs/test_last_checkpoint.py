"""A run's last checkpoint: the one of most steps, whatever the times of its files, that is there in full."""

from __future__ import annotations

import os
import shutil
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import OnExceptionCheckpoint

from app.cli.runs.last_checkpoint import last_checkpoint, last_checkpoints, to_load
from app.strategies.checkpoint.checkpoints import MANIFEST_FILE, TRAINER_FILE, pack
from app.strategies.manifest import Written, manifest


def save(path: Path, step: int, time: float) -> Path:
    """A checkpoint of `step`, whose directory has that time (seconds)."""
    path.mkdir()
    contents = {TRAINER_FILE: pack({"global_step": step}), "shard-0.safetensors": bytes(100)}
    for name, data in contents.items():
        (path / name).write_bytes(data)
    (path / MANIFEST_FILE).write_bytes(manifest({name: Written.of(data) for name, data in contents.items()}, 1))
    return at(path, time)


def save_file(path: Path, step: int, time: float) -> Path:
    """As another strategy saves, weights and all."""
    torch.save({"global_step": step, "state_dict": {"weight": torch.zeros(10)}}, path)
    return at(path, time)


def at(path: Path, time: float) -> Path:
    os.utime(path, (time, time))
    return path


@pytest.fixture(autouse=True)
def told() -> Iterator[list[warnings.WarningMessage]]:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        yield found


@pytest.mark.parametrize("kind", [save, save_file])
@pytest.mark.parametrize("older", ["last.ckpt", "last-v1.ckpt"])
def test_most_steps_count_and_times_between_equals_alone(
    tmp_path: Path, kind: Callable[..., Path], older: str, told: list[warnings.WarningMessage]
) -> None:
    [newer] = {"last.ckpt", "last-v1.ckpt"} - {older}
    last = kind(tmp_path / newer, 8, time=1000)
    other = save(tmp_path / older, 4, time=900)
    assert last_checkpoint([tmp_path]) == last and not told
    at(other, 2000)
    assert last_checkpoint([tmp_path]) == last
    [line] = told
    assert str(line.message).endswith(f"{other}, of step 4, is newer by its time: name it where it is meant")
    shutil.rmtree(other)
    other = save(other, 8, time=2000)
    assert last_checkpoint([tmp_path]) == other
    assert last_checkpoint([tmp_path / "none", tmp_path]) == other and last_checkpoint([tmp_path / "none"]) is None


def cut(path: Path) -> None:
    (path / "shard-0.safetensors").write_bytes(bytes(99))


def edit(path: Path) -> None:
    (path / TRAINER_FILE).write_bytes((path / TRAINER_FILE).read_bytes().replace(b"global_step", b"global_stop"))


def lose(path: Path) -> None:
    (path / MANIFEST_FILE).unlink()


def become_a_file(path: Path) -> None:
    shutil.rmtree(path)
    path.write_bytes(b"PK")


def become_another(path: Path) -> None:
    shutil.rmtree(path)
    torch.save({"weight": torch.zeros(3)}, path)


@pytest.mark.parametrize("damage", [cut, edit, lose, become_a_file, become_another])
def test_what_is_damaged_does_not_win_over_what_is_sound(
    tmp_path: Path, damage: Callable[[Path], None], told: list[warnings.WarningMessage]
) -> None:
    damaged, sound = save(tmp_path / "last-v1.ckpt", 8, time=2000), save(tmp_path / "last.ckpt", 4, time=1000)
    damage(damaged)
    at(damaged, 2000)
    assert last_checkpoint([tmp_path]) == sound
    [line] = told
    assert str(line.message).startswith(f"ckpt_path: {damaged}") and str(line.message).endswith(
        f"{sound}, of step 4, is taken as the run's last"
    )
    lose(sound)  # whoever loads one says what is wrong
    at(sound, 1000)
    assert last_checkpoint([tmp_path]) == damaged and len(told) == 1
    damaged.unlink() if damaged.is_file() else shutil.rmtree(damaged)
    assert last_checkpoint([tmp_path]) == sound and len(told) == 1


def test_a_link_counts_as_what_it_points_to(tmp_path: Path) -> None:
    (tmp_path / "last.ckpt").symlink_to("step=9.ckpt")
    assert last_checkpoints([tmp_path]) == []
    older = save(tmp_path / "last-v1.ckpt", 4, time=2000)
    assert last_checkpoint([tmp_path]) == older
    save(tmp_path / "step=9.ckpt", 9, time=1000)
    assert last_checkpoint([tmp_path]) == tmp_path / "last.ckpt"


def test_lightning_is_told_the_path(tmp_path: Path) -> None:
    trainer = Trainer(logger=False, callbacks=[OnExceptionCheckpoint(tmp_path)])
    assert to_load("last", trainer, [tmp_path]) == "last", "which starts from the beginning"
    last = save(tmp_path / "last.ckpt", 4, time=2000)
    assert to_load("last", trainer, [tmp_path]) == str(last)
    assert to_load("elsewhere.ckpt", trainer, [tmp_path]) == "elsewhere.ckpt" and to_load(None, trainer, []) is None
    failed = save(tmp_path / "on_exception.ckpt", 6, time=1000)
    assert to_load("last", trainer, [tmp_path]) == str(failed)
