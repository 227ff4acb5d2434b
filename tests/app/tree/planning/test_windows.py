"""Parts of windowed layers against the definition: query i sees key j exactly when j is an ancestor of i (or i itself)
at a depth above depth(i) - window; of layers with sections, when both are in the same."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.tree import PrefixTree
from app.tree.planning import layout as layout_module
from app.tree.planning.layout import Part, layout
from app.tree.planning.planner import plan
from app.tree.planning.windows import layer_parts
from tests.app.tree.cases import Case, cases


def blocks(part: Part) -> np.ndarray:
    """bool [queries, keys] of one part."""
    shape = (part.q_stop - part.q_start, part.k_stop - part.k_start)
    if part.mask is not None:
        assert part.mask.shape == shape and not part.causal
        return part.mask
    return np.tril(np.ones(shape, bool)) if part.causal else np.ones(shape, bool)


def pairs(parts: list[Part], rows: int, path: int) -> np.ndarray:
    """How many parts compute each (row, key of [path | chunk]) pair."""
    count = np.zeros((rows, path + rows), np.int64)
    for part in parts:
        first = 0 if part.path else path
        block = blocks(part)
        assert block.any(1).all(), "a row of a part sees none of its keys"
        count[part.q_start : part.q_stop, first + part.k_start : first + part.k_stop] += block
    return count


def visible(
    tree: PrefixTree, tokens: np.ndarray, path: int, window: int | None, section: int | None = None
) -> np.ndarray:
    out = np.zeros((len(tokens), path + len(tokens)), np.int64)
    row = {int(token): path + k for k, token in enumerate(tokens)}
    for query, token in enumerate(tokens.tolist()):
        depth = int(tree.token_depth[token])
        while token >= 0:
            at = int(tree.token_depth[token])
            if (window is None or depth - at < window) and (section is None or depth // section == at // section):
                out[query, row.get(token, at)] = 1
            token = int(tree.token_parent[token])
    return out


@given(cases(), st.sampled_from([1, 2, 4, 256]), st.sampled_from([None, 1, 2, 3, 5, 8, 40]), st.sampled_from([None, 0]))
def test_every_pair_within_the_window_is_in_exactly_one_part(
    case: Case, masked_block: int, window: int | None, wanted: int | None
) -> None:
    tree = PrefixTree.build(case.sequences, keys=case.keys, share=case.share)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layout_module, "MASKED_BLOCK", masked_block)
        for chunk in plan(tree, case.chunk_tokens, tree.num_tokens).chunks:
            rows = layout(chunk, masked_block=wanted)
            depths = tree.token_depth[rows.tokens]
            parts = layer_parts(rows, depths, chunk.path_tokens, window)
            expected = visible(tree, rows.tokens, chunk.path_tokens, window)
            assert (pairs(parts, len(rows.tokens), chunk.path_tokens) == expected).all()


@given(cases(), st.sampled_from([1, 2, 4, 256]), st.sampled_from([1, 2, 3, 5, 8, 40]), st.booleans())
def test_every_pair_within_a_section_is_in_exactly_one_part(
    case: Case, masked_block: int, section: int, cut: bool
) -> None:
    """Whatever kernels know: squares are cut always, into what is causal again."""
    tree = PrefixTree.build(case.sequences, keys=case.keys, share=case.share)
    for chunk in plan(tree, case.chunk_tokens, tree.num_tokens).chunks:
        rows = layout(chunk, masked_block=0 if masked_block == 1 else masked_block)
        depths = tree.token_depth[rows.tokens]
        parts = layer_parts(rows, depths, chunk.path_tokens, None, cut, section)
        expected = visible(tree, rows.tokens, chunk.path_tokens, None, section)
        assert (pairs(parts, len(rows.tokens), chunk.path_tokens) == expected).all()
        assert masked_block > 1 or all(part.mask is None for part in parts)


def test_a_long_branch_is_not_computed_beyond_its_window() -> None:
    """At real sizes: pairs computed, masked ones included, stay within a block's worth of what the window allows."""
    stem, window = np.arange(3000), 512
    sequences = [stem, *(np.append(stem[:2800], [4000 + k] * 90) for k in range(20))]
    tree = PrefixTree.build(sequences)
    chunks = plan(tree, 1500, tree.num_tokens).chunks
    computed = needed = 0
    for chunk in chunks:
        rows = layout(chunk)
        depths = tree.token_depth[rows.tokens]
        parts = layer_parts(rows, depths, chunk.path_tokens, window)
        computed += sum(block.size if part.mask is not None else block.sum() for part, block in with_blocks(parts))
        needed += int(np.minimum(depths + 1, window).sum())
        assert len(parts) < 60
    assert needed <= computed < 1.4 * needed


def with_blocks(parts: list[Part]) -> list[tuple[Part, np.ndarray]]:
    return [(part, blocks(part)) for part in parts]
