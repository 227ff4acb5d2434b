"""Rank 0 owns the stream and leads: it tells all ranks what to do next, which they do, and answer.

    rank 0                                      every other rank
    exchange.lead(work, answer)                 exchange.lead(work, answer)
      work() calls exchange.ask(request, parts,   answer(request, parts), as often as it is asked
      answer) and returns what is to be said      returns what rank 0 said last

Promises: the other ranks need not know what rank 0 is about to do. A batch travels once, however many messages are
about it: ranks keep it, packed, until a message is about another one, or `forget`. An error of rank 0 while it leads,
or of any rank while it answers, is raised on all ranks, with the words of the rank that had it; nobody is left waiting.
A message is two broadcasts (its size, and itself), so that rank 0's own work does not grow with the ranks; an answer is
one small all-gather and one transfer. A rank that is missing from one is named as in any other collective. Of ranks
that run a plan together the first one answers for all. One process sends nothing and packs nothing.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from app.batch import RolloutBatch
from app.exchange import Answer, Parts, Said
from app.strategies.ranks.balance import Calibration
from app.strategies.ranks.collectives import CollectiveError, Communicator
from app.strategies.ranks.groups import GroupRanks
from app.strategies.ranks.wire import PackedBatch, pack, pack_values, unpack_values
from app.text import well_formed

_WHAT = "a message of rank 0"


class RankZeroError(RuntimeError):
    """Rank 0, the owner of the stream, failed while it led; the message is rank 0's own."""


class RankTraffic:
    """One rank's end of it.

    Attributes:
        bytes: that rank 0 sent to every other rank since `reset`; 0 on the others.
        seconds: rank 0's wall seconds of packing and sending since then.
    """

    def __init__(self, ranks: Communicator, group_size: int = 1) -> None:
        self._ranks, self._group_size = ranks, group_size
        self._held: Parts | None = None
        self.reset()

    def reset(self) -> None:
        self.bytes, self.seconds = 0, 0.0

    def forget(self) -> None:
        """On every rank alike: the batch that is held will not be needed again."""
        self._held = None

    def lead(self, work: Callable[[], Said], answer: Answer) -> Said:
        """Collective. Rank 0 does `work`, in which it may `ask`; the others answer until it is done.

        Returns:
            What `work` returned: rank 0's own object there, an equal one elsewhere.

        Raises:
            RankZeroError: on all ranks but 0, with type and message of rank 0's error, which rank 0 raises itself.
        """
        if self._ranks.rank != 0:
            return self._follow(answer)
        try:
            said = work()
            self._send("done", said)
        except CollectiveError:
            raise  # there is no way to tell the others; their own watch does
        except Exception as error:
            self._send("error", (f"{type(error).__name__}: {error}", None, {}))
            raise
        return said

    def ask(self, request: Any, parts: Parts | None, answer: Answer) -> list[Tensor]:
        """Rank 0 only, inside of `lead`: what `answer(request, parts)` returned, flat float32, on the first rank of
        every group, in order.

        Raises:
            RuntimeError: another rank failed, naming it and its error; rank 0's own error is raised as it is.
        """
        if self._ranks.size == 1:
            return [answer(request, parts).view(-1)]
        self._send("ask", (request, parts, {}))
        own = _attempt(answer, request, parts)
        answers = self._answer(own)
        if isinstance(own, Exception):
            raise own
        failed = {rank: said for rank, said in enumerate(answers) if isinstance(said, str)}
        if failed:
            first = min(failed)
            raise RuntimeError(
                f"what rank 0 asked for failed on rank {first}: {failed[first]} (ranks: {sorted(failed)})"
            )
        return [said for said in answers[:: self._group_size] if not isinstance(said, str)]

    def _follow(self, answer: Answer) -> Said:
        own: Exception | None = None
        while True:
            verb, said = self._decode(self._ranks.broadcast_bytes(None, _WHAT))
            if verb == "done":
                return said
            if verb == "error":
                if own is not None:
                    raise own
                raise RankZeroError(f"rank 0 failed: {said[0]}")
            mine = _attempt(answer, *said[:2])
            own = mine if isinstance(mine, Exception) else None
            if isinstance(mine, Tensor) and self._ranks.rank % self._group_size:
                mine = mine.new_empty(0)  # the first of the group says the same
            self._answer(mine)

    def _send(self, verb: str, said: Said) -> None:
        if self._ranks.size == 1:
            return
        start = time.perf_counter()
        data = _encode(verb, said, held=self._held)
        self._ranks.broadcast_bytes(data, _WHAT)
        if said[1] is not None:
            self._held = said[1]
        self.bytes += len(data)
        self.seconds += time.perf_counter() - start

    def _decode(self, data: Tensor) -> tuple[str, Said]:
        pieces = _split(data)
        verb, request, about = json.loads(bytes(pieces[-1].numpy()))
        if about == "new":
            self._held = PackedBatch(bytes(pieces[2].numpy()), pieces[0].clone())  # not the rest of the message
        values = unpack_values(bytes(pieces[3].numpy()), pieces[1])
        return verb, (request, self._held if about != "nothing" else None, values)

    def _answer(self, own: Tensor | Exception) -> list[Tensor | str]:
        """Collective. On rank 0 all ranks' tensors, or what they say of their errors; [] elsewhere."""
        if isinstance(own, Exception):
            data = np.frombuffer(well_formed(f"{type(own).__name__}: {own}").encode(), np.uint8)
        else:
            data = own.contiguous().numpy().reshape(-1).view(np.uint8)
        flag = np.array([isinstance(own, Exception)], np.uint8)  # comes last: the numbers before it stay aligned
        message = torch.from_numpy(np.concatenate([data, flag]))
        found = self._ranks.collect(message, "answers to rank 0")
        return [bytes(m[:-1].numpy()).decode() if m[-1] else m[:-1].view(torch.float32) for m in found]


class SharedRanks(RankTraffic):
    """`app.exchange.Ranks` of a strategy that sums gradients over ranks; see there.

    Args:
        token_limit: most dense tokens of one rank in one step.
        grad_norm: that of the last gradient, over all ranks.
        group: the ranks that run a plan together with this one, if any.

    Attributes:
        completed: what is told of gradients that are about to be complete; by default nothing is.
    """

    def __init__(
        self,
        ranks: Communicator,
        calibration: Calibration,
        token_limit: int | None,
        grad_norm: Callable[[], float],
        group: GroupRanks | None = None,
    ) -> None:
        size = 1 if group is None else group.size
        super().__init__(ranks, size)
        self.rank, self.size, self.group = ranks.rank, ranks.size, group
        self.parts, self.part = ranks.size // size, ranks.rank // size
        self.partition_options: Mapping[str, Any] = {"cost": calibration.cost, "token_limit": token_limit}
        self._calibration, self._grad_norm = calibration, grad_norm
        self.completed: Callable[[Iterable[nn.Parameter], Sequence[Tensor]], None] | None = None

    def sum(self, tensor: Tensor) -> Tensor:
        return self._ranks.sum(tensor)

    def gather(self, tensor: Tensor, group: Any = None) -> list[Tensor]:
        return list(self._ranks.gather(tensor, "metrics")[:: self._group_size].to(tensor.device))

    def completing(self, parameters: Iterable[nn.Parameter], roots: Sequence[Tensor]) -> None:
        if self.completed is not None:
            self.completed(parameters, roots)

    def observe(self, tokens: int, pairs: int, seconds: float) -> None:
        self._calibration.observe(self._ranks, tokens, pairs, seconds)

    def grad_norm(self, optimizer: Optimizer, step: int) -> float:
        """Gradients are in the strategy's own buffers by now, and steps without a finite one are left out there."""
        return self._grad_norm()


def _attempt(answer: Answer, request: Any, parts: Parts | None) -> Tensor | Exception:
    try:
        return answer(request, parts)
    except Exception as error:
        return error


def _encode(verb: str, said: Said, held: Parts | None) -> Tensor:
    """uint8: the payloads of batch and values (first, to be aligned), their headers, the request, and all lengths."""
    request, batch, values = said
    batch_header, batch_payload = b"", torch.empty(0, dtype=torch.uint8)
    about = "nothing" if batch is None else "held"
    if batch is not None and batch is not held:
        assert isinstance(batch, RolloutBatch), "rank 0 has it whole"
        batch_header, batch_payload = pack(batch.without("columns", "metadata"))
        about = "new"
    header, payload = pack_values(values)
    text = json.dumps([verb, request, about]).encode()
    pieces = [batch_payload.numpy(), payload.numpy()]
    pieces += [np.frombuffer(piece, np.uint8) for piece in (batch_header, header, text)]
    lengths = np.array([len(piece) for piece in pieces])
    return torch.from_numpy(np.concatenate([*pieces, lengths.view(np.uint8)]))


def _split(data: Tensor) -> list[Tensor]:
    """The pieces of `_encode`."""
    lengths = data[-40:].clone().view(torch.int64)
    return list(data[:-40].split(lengths.tolist()))
