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


class StateSlots:
    """One row a request, of every layer's states; nothing for models that have none.

    Attributes:
        layers: the model's layers with states.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.layers = StateLayers.of(model)
        self._rows: dict[tuple[int, str], Tensor] = {}

    @property
    def bytes(self) -> int:
        """Bytes held: most rows so far x the states of all layers."""
        return sum(buffer.nbytes for buffer in self._rows.values())

    def begin(self, rows: list[int], computed: list[int], lengths: list[int]) -> PieceStates | None:
        """States for a forward of `lengths` next tokens of each of `rows`, of which so many are computed."""
        if not self.layers.mixers:
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
            buffer = self._rows.get(key)
            if buffer is None or len(buffer) <= max(rows):
                grown = ends.new_zeros(max(rows) + 1, *ends.shape[1:])
                if buffer is not None:
                    grown[: len(buffer)] = buffer
                self._rows[key] = buffer = grown
            buffer[torch.tensor(rows, device=buffer.device)] = ends

    def copy_rows(self, sources: list[int], targets: list[int]) -> None:
        """Copies states of rows `sources`, some of which may have none yet, to rows `targets`, in all layers."""
        most = max(*sources, *targets)
        for key, buffer in self._rows.items():
            if len(buffer) <= most:
                grown = buffer.new_zeros(most + 1, *buffer.shape[1:])
                grown[: len(buffer)] = buffer
                self._rows[key] = buffer = grown
            buffer[targets] = buffer[sources]
