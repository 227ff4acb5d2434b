"""States of the running requests, for models whose layers carry one from token to token.

Row r of every buffer belongs to request r, beside its row of the key-value grid. A forward is a forest of pieces, one a
request, that start from their rows' states and leave new ones there.

Promises: a request whose tokens are all still to be computed starts from zeros, whatever its row held before; a layer
that carries a state past the functions that are known is an error, never a wrong token.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedModel

from app.tree import PieceStates, PieceTree, StateLayers

_Key = tuple[int, str]  # layer and kind


class StateSlots:
    """One row a request, of every layer's states; nothing for models that have none.

    Attributes:
        layers: the model's layers with states.
        moved: how often buffers were laid out anew.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.layers = StateLayers.of(model)
        self.moved = 0
        self._rows: dict[_Key, Tensor] = {}
        self._trees: dict[int, PieceTree] = {}

    @property
    def bytes(self) -> int:
        """Bytes held: most rows so far x the states of all layers."""
        return sum(buffer.nbytes for buffer in self._rows.values())

    def begin(self, rows: list[int], computed: list[int], lengths: list[int]) -> PieceStates | None:
        """States for a forward of `lengths` next tokens of each of `rows`, of which so many are computed."""
        if not self.layers.expected:
            return None
        starts = {}
        for key, buffer in self._rows.items():
            known = torch.tensor([n > 0 and row < len(buffer) for row, n in zip(rows, computed, strict=True)])
            held = buffer[torch.tensor(rows).clamp(max=len(buffer) - 1).to(buffer.device)]
            starts[key] = held.where(known.to(buffer.device).view(-1, *[1] * (held.dim() - 1)), 0)
        count = len(rows)
        return PieceStates(PieceTree(lengths, [-1 - k for k in range(count)], count), starts, range(count))

    def end(self, states: PieceStates, rows: list[int]) -> None:
        """Keeps what the forward left; raises ValueError when a layer did not say."""
        self.layers.refuse_unreached(states)
        for key, ends in states.ends.items():
            buffer = self._at_least(key, max(rows) + 1, ends)
            buffer[torch.tensor(rows, device=buffer.device)] = ends

    def begin_static(self, positions: Tensor) -> PieceStates | None:
        """As `begin`, of one next token for each of the first rows, at positions int64 [rows] that stay on the device;
        `reserve` has made room."""
        if not self.layers.expected:
            return None
        count = len(positions)
        first = positions == 0
        starts = {
            key: buffer[:count].masked_fill(first.view(-1, *[1] * (buffer.dim() - 1)), 0)
            for key, buffer in self._rows.items()
        }
        if count not in self._trees:  # kept for its indices: a first step makes them, all others read them there
            self._trees[count] = PieceTree([1] * count, [-1 - k for k in range(count)], count)
        return PieceStates(self._trees[count], starts, range(count))

    def end_static(self, states: PieceStates) -> None:
        """As `end`, after `begin_static`."""
        self.layers.refuse_unreached(states)
        for key, ends in states.ends.items():
            self._rows[key][: len(ends)] = ends

    def reserve(self, rows: int) -> None:
        """Makes room for the states of so many rows, of layers that have run."""
        for key, buffer in self._rows.items():
            self._at_least(key, rows, buffer)

    def kept(self, rows: int) -> dict[_Key, Tensor]:
        """A copy of the states of the first rows, for `put`."""
        return {key: buffer[:rows].clone() for key, buffer in self._rows.items()}

    def put(self, kept: dict[_Key, Tensor]) -> None:
        """Puts them back."""
        for key, held in kept.items():
            self._rows[key][: len(held)] = held

    def copy_rows(self, sources: list[int], targets: list[int]) -> None:
        """Copies states of rows `sources`, some of which may have none yet, to rows `targets`, in all layers."""
        self.reserve(max(*sources, *targets) + 1)
        for buffer in self._rows.values():
            buffer[targets] = buffer[sources]

    def _at_least(self, key: _Key, rows: int, like: Tensor) -> Tensor:
        """The buffer of `key`, with so many rows of the shape of those of `like`."""
        buffer = self._rows.get(key)
        if buffer is None or len(buffer) < rows:
            grown = like.new_zeros(rows, *like.shape[1:])
            if buffer is not None:
                grown[: len(buffer)] = buffer
            self._rows[key] = buffer = grown
            self.moved += 1
        return buffer
