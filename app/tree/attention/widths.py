"""Two backends for a model whose layers have heads of different widths, which one of them does not take.

Promises: a layer is computed by the first that does not refuse it; what neither takes is refused in the second's words.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from app.tree.attention.chunk_attention import Backend, ChunkAttention, LayerCall
from app.tree.planning.layout import Part


class WidthBackend:
    """`first`, and `other` for layers that it refuses. Plans, and the parts of a chunk, are those of `first`."""

    def __init__(self, first: Backend, other: Backend) -> None:
        self.first, self.other = first, other
        self.name, self.masked_block = f"{first.name} and {other.name}", first.masked_block

    def refusal(self, q: Tensor, call: LayerCall) -> str | None:
        return self._of(q, call).refusal(q, call)

    def calls(self, parts: Sequence[Part]) -> int:
        return self.first.calls(parts)

    def estimated_calls(self, pieces: int, tokens: int) -> int:
        return self.first.estimated_calls(pieces, tokens)

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, chunk: ChunkAttention, call: LayerCall
    ) -> Tensor:
        return self._of(q, call).attend(q, k, v, sinks, chunk, call)

    def _of(self, q: Tensor, call: LayerCall) -> Backend:
        return self.other if self.first.refusal(q, call) else self.first
