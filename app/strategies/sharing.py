"""Rank 0 owns the batches and leads; every other rank is sent its own part of one piece of work at a time, and answers.

    rank 0                                          every other rank
    traffic.lead(work, serve)                       traffic.lead(work, serve)
      work() calls traffic.ask(words, parts, serve)   serve(words, its part), as often as it is asked
      and returns the parts of what comes next        returns its part

Promises: a rank receives its own sequences and nothing of the others'; the other ranks need not know what rank 0 is
about to do. An error of rank 0 while it leads, or of any rank while it serves, is raised on all ranks, with the words
of the rank that had it; nobody is left waiting. Every message is one small broadcast (sizes) and one transfer point to
point, an answer one small all-gather and one transfer, packed as in `packing.py`; a rank that is missing from one is
named as in any other collective. One process sends nothing and packs nothing.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from app.batch import RolloutBatch
from app.strategies.collectives import CollectiveError, Communicator
from app.strategies.packing import pack, unpack

Parts = Sequence[RolloutBatch | None]
"""What each rank is given, by rank; None for nothing, which is ordinary."""
Serve = Callable[[Any, RolloutBatch | None], Tensor]
"""Called with what rank 0 asks for (JSON-able) and this rank's part; returns a float32 tensor on the CPU."""


class RankZeroError(RuntimeError):
    """Rank 0, the owner of the stream, failed while it led; the message is rank 0's own."""


class RankTraffic:
    """One rank's end of it.

    Attributes:
        bytes: sent by rank 0, to all ranks together, since `reset`; 0 on the others.
        seconds: rank 0's wall seconds of packing and sending since then.
    """

    def __init__(self, ranks: Communicator) -> None:
        self._ranks = ranks
        self.reset()

    def reset(self) -> None:
        self.bytes, self.seconds = 0, 0.0

    def lead(self, work: Callable[[], Parts | None], serve: Serve) -> RolloutBatch | None:
        """Collective. Rank 0 does `work`, in which it may `ask`; the others serve until it is done.

        Returns:
            This rank's part of what `work` returned: rank 0's own object there, an equal one on the CPU elsewhere.

        Raises:
            RankZeroError: on all ranks but 0, with type and message of rank 0's error, which rank 0 raises itself.
        """
        if self._ranks.rank != 0:
            return self._follow(serve)
        try:
            parts = work() or [None] * self._ranks.size
            self._send("done", None, parts)
        except CollectiveError:
            raise  # there is no way to tell the others; their own watch does
        except Exception as error:
            self._send("error", f"{type(error).__name__}: {error}", [None] * self._ranks.size)
            raise
        return parts[0]

    def ask(self, words: Any, parts: Parts, serve: Serve) -> list[Tensor]:
        """Rank 0 only, inside of `lead`: what each rank's `serve(words, part)` returned, flat float32, by rank.

        Raises:
            RuntimeError: another rank failed, naming it and its error; rank 0's own error is raised as it is.
            BatchError: metadata is not JSON-able.
        """
        if self._ranks.size == 1:
            return [serve(words, parts[0]).view(-1)]
        self._send("serve", words, parts)
        own = _attempt(serve, words, parts[0])
        answers = self._answer(own)
        if isinstance(own, Exception):
            raise own
        failed = {rank: answer for rank, answer in enumerate(answers) if isinstance(answer, str)}
        if failed:
            first = min(failed)
            raise RuntimeError(f"{json.dumps(words)} failed on rank {first}: {failed[first]} (ranks: {sorted(failed)})")
        return [answer for answer in answers if not isinstance(answer, str)]

    def _follow(self, serve: Serve) -> RolloutBatch | None:
        own: Exception | None = None
        while True:
            (verb, words), part = _decode(self._ranks.scatter(None, "parts of a batch, from rank 0"))
            if verb == "done":
                return part
            if verb == "error":
                if own is not None:
                    raise own
                raise RankZeroError(f"rank 0 failed: {words}")
            answer = _attempt(serve, words, part)
            own = answer if isinstance(answer, Exception) else None
            self._answer(answer)

    def _send(self, verb: str, words: Any, parts: Parts) -> None:
        if self._ranks.size == 1:
            return
        start = time.perf_counter()
        messages = [_encode([verb, words], part) for part in parts[1:]]
        self._ranks.scatter([torch.empty(0, dtype=torch.uint8), *messages], "parts of a batch, from rank 0")
        self.bytes += sum(map(len, messages))
        self.seconds += time.perf_counter() - start

    def _answer(self, own: Tensor | Exception) -> list[Tensor | str]:
        """Collective. On rank 0 all ranks' tensors, or what they say of their errors; [] elsewhere."""
        if isinstance(own, Exception):
            data = np.frombuffer(f"{type(own).__name__}: {own}".encode(), np.uint8)
        else:
            data = own.contiguous().numpy().reshape(-1).view(np.uint8)
        flag = np.array([isinstance(own, Exception)], np.uint8)  # comes last: the numbers before it stay aligned
        message = torch.from_numpy(np.concatenate([data, flag]))
        found = self._ranks.collect(message, "answers to rank 0")
        return [bytes(m[:-1].numpy()).decode() if m[-1] else m[:-1].view(torch.float32) for m in found]


def _attempt(serve: Serve, words: Any, part: RolloutBatch | None) -> Tensor | Exception:
    try:
        return serve(words, part)
    except Exception as error:
        return error


def _encode(words: Any, part: RolloutBatch | None) -> Tensor:
    """uint8: payload, header, words, and the lengths of the latter two; the payload comes first to be aligned."""
    header, payload = pack(part) if part is not None else (b"", torch.empty(0, dtype=torch.uint8))
    text = json.dumps(words).encode()
    lengths = np.array([len(header), len(text)])
    pieces = [payload.numpy(), *(np.frombuffer(piece, np.uint8) for piece in (header, text)), lengths.view(np.uint8)]
    return torch.from_numpy(np.concatenate(pieces))


def _decode(message: Tensor) -> tuple[Any, RolloutBatch | None]:
    data = message.numpy()
    header_bytes, text_bytes = data[-16:].copy().view(np.int64).tolist()
    text_at = len(data) - 16 - text_bytes
    header_at = text_at - header_bytes
    words = json.loads(bytes(data[text_at : text_at + text_bytes]))
    return words, unpack(bytes(data[header_at:text_at]), message[:header_at]) if header_bytes else None
