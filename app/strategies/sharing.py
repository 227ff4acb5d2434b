"""Ships rank 0's `RolloutBatch` to all ranks: three broadcasts (sizes, header, one flat payload), whatever the batch
holds.

Promises: every rank returns an equal batch, bit for bit, or every rank raises with rank 0's own words; nobody is left
waiting. Every rank gets the whole batch, because statistics of groups, tree advantages and denominators are pure
functions of it; `packing.py` makes that cheaper than the flat tensors of one rank's part would be.
"""

from __future__ import annotations

import torch
from torch import Tensor

from app.batch import BatchError, RolloutBatch
from app.strategies.collectives import Communicator
from app.strategies.packing import pack, unpack


class RankZeroError(RuntimeError):
    """Rank 0, the owner of the stream, could not deliver; the message is rank 0's own."""


def share_batch(
    ranks: Communicator, batch: RolloutBatch | None, error: BaseException | None = None
) -> tuple[RolloutBatch, int]:
    """Collective. Rank 0 passes the batch, or the error that kept it from having one; other ranks pass None.

    Returns:
        The batch (rank 0's own object there, an equal one on the CPU elsewhere), and the bytes a rank received.

    Raises:
        RankZeroError: on all ranks but 0, with rank 0's error type and message; rank 0 raises the error itself.
        BatchError: on rank 0 when it has neither, or when metadata is not JSON-able.
    """
    if ranks.rank == 0:
        try:
            if error is not None:
                raise error
            if batch is None:
                raise BatchError("share_batch: rank 0 owns the stream of batches but was given None")
            if ranks.size == 1:
                return batch, 0
            header, payload = pack(batch)
        except BaseException as failure:
            _send(ranks, ok=False, header=f"{type(failure).__name__}: {failure}".encode(), payload=None)
            raise
        _send(ranks, ok=True, header=header, payload=payload)
        return batch, len(header) + payload.numel()
    if batch is not None or error is not None:
        raise BatchError(f"share_batch: rank {ranks.rank} passed a batch or an error; only rank 0 owns the stream")
    header, payload = _receive(ranks)
    return unpack(header, payload), len(header) + payload.numel()


def _send(ranks: Communicator, *, ok: bool, header: bytes, payload: Tensor | None) -> None:
    sizes = torch.tensor([int(ok), len(header), payload.numel() if payload is not None else 0])
    ranks.broadcast_(sizes, "a rollout batch (sizes)")
    ranks.broadcast_(torch.frombuffer(bytearray(header), dtype=torch.uint8), "a rollout batch (header)")
    if payload is not None:
        ranks.broadcast_(payload, "a rollout batch (tensors)")


def _receive(ranks: Communicator) -> tuple[bytes, Tensor]:
    ok, header_bytes, payload_bytes = ranks.broadcast_(
        torch.zeros(3, dtype=torch.int64), "a rollout batch (sizes)"
    ).tolist()
    header = bytes(ranks.broadcast_(torch.empty(header_bytes, dtype=torch.uint8), "a rollout batch (header)").numpy())
    if not ok:
        raise RankZeroError(f"rank 0 has no batch to share: {header.decode()}")
    return header, ranks.broadcast_(torch.empty(payload_bytes, dtype=torch.uint8), "a rollout batch (tensors)")
