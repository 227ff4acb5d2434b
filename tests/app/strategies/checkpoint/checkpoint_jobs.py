"""What ranks run in the tests of checkpoints (importable, hence not in a test file)."""

from __future__ import annotations

import resource
import signal
import threading
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from app.strategies.checkpoint.checkpoints import CheckpointError, CheckpointWriter, pack, unpack
from app.strategies.checkpoint.loading import read
from app.strategies.checkpoint.optimizer_state import load_sharded, save_sharded
from app.strategies.pieces import Piece, load_pieces, load_whole
from app.strategies.ranks.collectives import Communicator
from app.strategies.zero1 import ShardedOptimizer
from tests.app.strategies import toy_model as toy
from tests.app.strategies.zero1_jobs import communicator

SECONDS = 60.0
Make = Callable[[nn.Module], Optimizer]


def writer() -> CheckpointWriter:
    return CheckpointWriter(dist.new_group(backend="gloo", timeout=timedelta(seconds=SECONDS)), SECONDS)


def devices_of_the_thread(directory: Path, devices: list[str]) -> list[list[tuple[str, str]]]:
    """Which device was made a thread's own, and of which thread, while writers for ranks on `devices` saved."""
    found: list[list[tuple[str, str]]] = []
    before = torch.cuda.set_device
    for number, device in enumerate(devices):
        seen: list[tuple[str, str]] = []
        torch.cuda.set_device = lambda chosen, seen=seen: seen.append((threading.current_thread().name, str(chosen)))
        try:
            group = dist.new_group(backend="gloo", timeout=timedelta(seconds=SECONDS))
            saving = CheckpointWriter(group, SECONDS, device=torch.device(device))
            saving.save(directory / f"{number}.ckpt", pack({}), rows(torch.ones(4), communicator()))
            saving.wait(SECONDS)
            saving.close()
        finally:
            torch.cuda.set_device = before
        found.append(seen)
    return found


def rows(tensor: Tensor, ranks: Communicator) -> dict[str, Piece]:
    return {"model/weight": Piece.rows(tensor, ranks.rank, ranks.size)}


def _model(dtype: torch.dtype, make_optimizer: Make) -> tuple[toy.Toy, ShardedOptimizer]:
    model = toy.Toy(dtype=dtype)
    return model, ShardedOptimizer(make_optimizer(model), model, communicator(), 60)


def train_and_save(path: Path, dtype: torch.dtype, steps: int, make_optimizer: Make = toy.adamw) -> dict[str, Tensor]:
    model, sharded = _model(dtype, make_optimizer)
    _steps(model, sharded, range(steps))
    description, pieces = save_sharded(sharded)
    saving = writer()
    saving.save(path, pack({"optimizer": description, "weights": toy.values(model)}), pieces)
    _steps(model, sharded, range(steps, steps + 1))  # while it is written
    saving.wait(SECONDS)
    saving.close()
    return toy.values(model)


def load_and_train(
    path: Path, dtype: torch.dtype, first: int, steps: int, make_optimizer: Make = toy.adamw
) -> dict[str, Tensor]:
    model, sharded = _model(dtype, make_optimizer)
    contents = unpack(path)
    model.load_state_dict(contents["weights"], strict=False)
    load_sharded(sharded, contents["optimizer"], lambda pieces: load_pieces(pieces, path))
    _steps(model, sharded, range(first, first + steps))
    return toy.values(model)


def _steps(model: toy.Toy, sharded: ShardedOptimizer, steps: range) -> None:
    ranks = sharded.ranks
    for step in steps:
        sharded.optimizer.zero_grad()
        model.backward(range(ranks.rank, toy.SAMPLES, ranks.size), step)
        sharded.reduce()
        sharded.optimizer.step()
        sharded.gather_parameters()


def snapshots(directory: Path) -> dict[str, Any]:
    """Saves, overwrites in memory, saves elsewhere and over the first, deletes; what is there at the end."""
    ranks, saving = communicator(), writer()
    tensor = torch.arange(20.0).view(5, 4)
    saving.save(directory / "a.ckpt", pack({"step": 1}), rows(tensor, ranks))
    tensor.add_(100.0)
    saving.save(directory / "b.ckpt", pack({"step": 2}), rows(tensor, ranks))
    tensor.add_(100.0)
    saving.save(directory / "b.ckpt", pack({"step": 3}), rows(tensor, ranks))
    saving.remove(directory / "a.ckpt")
    saving.save(directory / "c.ckpt", pack({"step": 4}), rows(tensor[:1], ranks))
    saving.wait(SECONDS)
    dist.barrier()
    names = sorted(path.name for path in directory.iterdir())
    [loaded] = load_whole(directory / "b.ckpt", lambda name: True).values()
    return {"names": names, "step": unpack(directory / "b.ckpt")["step"], "weight": loaded}


def blocked(directory: Path) -> str:
    """A save below a path that is a file, after a good one whose deletion was asked for; the error's text."""
    ranks, saving = communicator(), writer()
    saving.save(directory / "good.ckpt", pack({}), rows(torch.ones(4), ranks))
    saving.save(directory / "file" / "bad.ckpt", pack({}), rows(torch.ones(4), ranks))
    saving.remove(directory / "good.ckpt")
    try:
        saving.wait(SECONDS)
    except RuntimeError as error:
        return str(error)
    return "no error"


def too_large(directory: Path) -> str:
    """A save of 4 MB after a good one, where a file may have 1 MB; the error's text."""
    ranks, saving = communicator(), writer()
    saving.save(directory / "good.ckpt", pack({}), rows(torch.ones(4), ranks))
    saving.wait(SECONDS)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))
    try:
        saving.save(directory / "big.ckpt", pack({}), rows(torch.ones(1_000_000), ranks))
        saving.wait(SECONDS)
    except RuntimeError as error:
        return str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    return "no error"


def absent(directory: Path) -> str:
    """Rank 1 does not come to a save; the other's error."""
    saving = CheckpointWriter(dist.new_group(backend="gloo", timeout=timedelta(seconds=2)), 2.0)
    message = ""
    if dist.get_rank() == 0:
        saving.save(directory / "alone.ckpt", pack({}), rows(torch.ones(4), communicator()))
        try:
            saving.wait(SECONDS)
        except RuntimeError as error:
            message = str(error)
    dist.barrier()
    return message


def apart(directory: Path, same_name: bool) -> str:
    """The ranks read checkpoints of their own, in a directory of each."""
    rank = dist.get_rank()
    saving = writer()
    empty: dict[str, Any] = {"state_dict": {}, "tied_weights": {}, "transformers_models": {}}
    for number in range(2):
        name = "last.ckpt" if same_name or number == 0 else "last-v1.ckpt"
        (directory / str(number)).mkdir(exist_ok=True)
        saving.save(
            directory / str(number) / name,
            pack({"global_step": number, **empty}),
            rows(torch.ones(4), communicator()),
        )
        saving.wait(SECONDS)
    dist.barrier()
    (path,) = (directory / str(rank)).glob("last*.ckpt")
    try:
        read(path, communicator(), lambda: {}, weights=True)
    except CheckpointError as error:
        return str(error)
    return ""


def removed(path: Path) -> str:
    """Asks for the deletion of `path`; the error's text."""
    saving = writer()
    saving.remove(path)
    try:
        saving.wait(SECONDS)
    except RuntimeError as error:
        return str(error)
    return "no error"


def save_forever(directory: Path, steps: Connection) -> None:
    """One process that overwrites one checkpoint with ever new contents, and tells `steps` of each."""
    dist.init_process_group("gloo", init_method=f"file://{directory}/store", rank=0, world_size=1)
    saving, tensor = writer(), torch.zeros(1 << 20)
    for step in range(100000):
        tensor.fill_(step)
        saving.save(directory / "checkpoints" / "last.ckpt", pack({"step": step}), rows(tensor, communicator()))
        saving.wait(SECONDS)
        steps.send(step)
