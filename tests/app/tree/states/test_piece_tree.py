"""Rows of convolutions and blocks of scans over random trees of pieces, against walking every row's ancestors."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from app.tree.states.block_scan import BlockIndex, block_scan
from app.tree.states.piece_tree import BLOCKS, PieceTree


@st.composite
def trees(draw: st.DrawFn) -> PieceTree:
    lengths = draw(st.lists(st.integers(1, 9), min_size=1, max_size=8))
    starts = draw(st.integers(1, 3))
    parents = [draw(st.integers(-starts, k - 1)) for k in range(len(lengths))]
    return PieceTree(lengths, parents, starts)


def walk(tree: PieceTree, piece: int) -> tuple[int, list[int]]:
    """The start a piece's path begins at, and the rows on it, its own last."""
    rows: list[int] = []
    while piece >= 0:
        first = int(tree.first[piece])
        rows = [*range(first, first + int(tree.lengths[piece])), *rows]
        piece = int(tree.parents[piece])
    return -1 - piece, rows


@given(tree=trees(), reach=st.integers(0, 6))
def test_convolution_rows_are_each_rows_own_ancestors(tree: PieceTree, reach: int) -> None:
    rows = tree.convolution(reach)
    base = tree.starts * reach
    for piece in range(len(tree.lengths)):
        start, path = walk(tree, piece)
        seen = [*range(start * reach, (start + 1) * reach), *(base + row for row in path)]
        assert rows.tails[piece].tolist() == seen[len(seen) - reach :]
        for k in range(int(tree.lengths[piece])):
            at = int(rows.select[path[len(path) - 1 - k]])
            end = len(seen) - k
            assert rows.gather[at - reach : at + 1].tolist() == seen[end - reach - 1 : end]


@given(tree=trees(), size=st.sampled_from(BLOCKS), kind=st.sampled_from(["delta", "delta a channel", "state space"]))
def test_a_scan_over_blocks_is_the_recurrence_over_tokens(tree: PieceTree, size: int, kind: str) -> None:
    """Outputs, end states and gradients, to float64's rounding."""
    heads, shared, dk, dv, n = 4, 2, 3, 4, tree.rows
    random = torch.Generator().manual_seed(n)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=random, dtype=torch.float64)

    q, k, v = draw(n, shared, dk), draw(n, shared, dk) / dk**0.5, draw(n, heads, dv)
    g = -draw(n, heads, dk if kind == "delta a channel" else 1).abs()
    beta, starts = draw(n, heads).sigmoid(), draw(tree.starts, heads, dk, dv)
    inputs = [x.requires_grad_() for x in (q, k, v, g, starts, *([beta] if kind != "state space" else []))]
    tree.__dict__["block"] = size
    index = BlockIndex.of(tree, q.device)
    out, ends = block_scan(q, k, v, g, None if kind == "state space" else beta, starts, index, index.last)
    query, keys = (x.repeat_interleave(heads // shared, 1) for x in (q, k))
    states, expected = {-1 - s: starts[s] for s in range(tree.starts)}, [torch.empty(0)] * n
    for piece in range(len(tree.lengths)):
        state = states[int(tree.parents[piece])]
        for row in walk(tree, piece)[1][-int(tree.lengths[piece]) :]:
            state = state * g[row].exp()[:, :, None]
            held = torch.einsum("hkv,hk->hv", state, keys[row])
            written = v[row] if kind == "state space" else beta[row][:, None] * (v[row] - held)
            state = state + keys[row][:, :, None] * written[:, None, :]
            expected[row] = torch.einsum("hkv,hk->hv", state, query[row])
        states[piece] = state
    last = torch.stack([states[piece] for piece in range(len(tree.lengths))])
    torch.testing.assert_close(out, torch.stack(expected), rtol=0, atol=1e-12)
    torch.testing.assert_close(ends, last, rtol=0, atol=1e-12)
    weights, end_weights = draw(*out.shape), draw(*last.shape)
    for used, (a, b) in {"outputs": (1, 0), "ends": (0, 1), "both": (1, 1)}.items():
        loss = sum(f * (x * y).sum() for f, x, y in ((a, out, weights), (b, ends, end_weights)) if f)
        aim = a * (torch.stack(expected) * weights).sum() + b * (last * end_weights).sum()
        ours = torch.autograd.grad(loss, inputs, retain_graph=True)
        truth = torch.autograd.grad(aim, inputs, retain_graph=True)
        for got, want in zip(ours, truth, strict=True):
            torch.testing.assert_close(got, want, rtol=0, atol=1e-11, msg=lambda m, used=used: f"{used}: {m}")


@pytest.mark.parametrize(
    ("lengths", "block"), [([1] * 50, 1), ([16] * 100, 16), ([2000], 64), ([3, 3, 3], 4), ([5, 900, 700], 64)]
)
def test_blocks_suit_the_pieces(lengths: list[int], block: int) -> None:
    tree = PieceTree(lengths, [-1, *[0] * (len(lengths) - 1)])
    assert tree.block == block
    blocks = tree.blocks(tree.block)
    assert sorted(blocks.rows[blocks.rows < tree.rows].tolist()) == list(np.arange(tree.rows))
