"""The attention parts of a chunk against the definition: query i sees key j exactly when j lies on i's own path."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.tree import PrefixTree
from app.tree.planning import layout as layout_module
from app.tree.planning.layout import Layout, layout
from app.tree.planning.planner import plan
from tests.app.tree.cases import Case, cases


def pairs_of(parts: Layout) -> npt.NDArray[np.int64]:
    """How many parts compute each (query row, key row) pair."""
    size = len(parts.tokens)
    count = np.zeros((size, size), np.int64)
    for part in parts.parts:
        block = np.ones((part.q_stop - part.q_start, part.k_stop - part.k_start), bool)
        if part.causal:
            assert block.shape[0] == block.shape[1] and part.mask is None
            block = np.tril(block)
        if part.mask is not None:
            assert part.mask.shape == block.shape
            block = part.mask
        count[part.q_start : part.q_stop, part.k_start : part.k_stop] += block
    return count


def visible(tree: PrefixTree, tokens: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """1 where the key token is the query token or one of its ancestors."""
    out = np.zeros((len(tokens), len(tokens)), np.int64)
    row = {int(token): k for k, token in enumerate(tokens)}
    for query, token in enumerate(tokens.tolist()):
        while token >= 0:
            if token in row:
                out[query, row[token]] = 1
            token = int(tree.token_parent[token])
    return out


@given(cases(), st.sampled_from([1, 2, 5, 256]))
def test_every_visible_pair_is_in_exactly_one_part(case: Case, masked_block: int) -> None:
    tree = PrefixTree.build(case.sequences, keys=case.keys, share=case.share)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layout_module, "MASKED_BLOCK", masked_block)
        for chunk in plan(tree, case.chunk_tokens, tree.num_tokens).chunks:
            for only in (None, chunk.anchors or None):
                rows = layout(chunk, only)
                chosen = range(len(chunk.pieces)) if only is None else only
                expected = [t for p in chosen for t in range(chunk.pieces[p].start, chunk.pieces[p].stop)]
                assert rows.tokens.tolist() == expected
                starts = np.cumsum([0, *(chunk.pieces[p].tokens for p in chosen)])[:-1]
                assert list(rows.piece_rows) == starts.tolist()
                assert (pairs_of(rows) == visible(tree, rows.tokens)).all()
