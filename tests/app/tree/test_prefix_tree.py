"""`PrefixTree.build` against the set-of-prefixes definition: counts, structure, round trip, inputs and their errors."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from app.tree import PrefixTree
from tests.app.tree import brute
from tests.app.tree.cases import Case, cases


def build(case: Case) -> PrefixTree:
    return PrefixTree.build(case.sequences, scored=case.scored, keys=case.keys, share=case.share)


@given(cases())
def test_counts_equal_the_brute_force_trie(case: Case) -> None:
    tree = build(case)
    dense = sum(case.lengths)
    leaf = brute.leaf_tokens(case.sequences, case.keys)
    assert tree.num_sequences == len(case.sequences)
    assert tree.num_dense_tokens == dense
    expected = {"tree": len(brute.trie(case.sequences, case.keys)), "leaf": leaf, "none": dense}
    assert tree.num_tokens == len(tree.tokens) == expected[case.share]
    if case.share != "none":
        assert tree.num_leaf_tokens == leaf


@given(cases(shares=("tree",)))
def test_segments_are_maximal_unbranched_runs(case: Case) -> None:
    tree = build(case)
    assert tree.num_segments == brute.num_segments(brute.trie(case.sequences, case.keys))
    assert (tree.segment_length > 0).all() and tree.segment_length.sum() == tree.num_tokens
    pairs = sum(len(word) for _, word in brute.trie(case.sequences, case.keys))
    assert tree.num_attention_pairs == pairs


@given(cases())
def test_layout_is_depth_first(case: Case) -> None:
    """Parents precede children, a subtree is one contiguous range, offsets and depths follow from the parents."""
    tree = build(case)
    assert (tree.segment_parent < np.arange(tree.num_segments)).all()
    assert (tree.segment_offset == np.cumsum(tree.segment_length) - tree.segment_length).all()
    members: list[set[int]] = [{s} for s in range(tree.num_segments)]
    for segment in range(tree.num_segments - 1, -1, -1):
        parent = int(tree.segment_parent[segment])
        start = 0 if parent < 0 else int(tree.segment_start[parent] + tree.segment_length[parent])
        assert tree.segment_start[segment] == start
        if parent >= 0:
            members[parent] |= members[segment]
        assert members[segment] == set(range(segment, int(tree.segment_end[segment])))


@given(cases())
def test_round_trip(case: Case) -> None:
    """Every sequence is read back, both through `sequence_tokens` and by walking token parents up from its end."""
    tree = build(case)
    for i, sequence in enumerate(case.sequences):
        places = tree.sequence_tokens([i])
        assert (tree.tokens[places] == sequence).all()
        assert (tree.token_depth[places] == np.arange(len(sequence))).all()
        node, walked = int(tree.sequence_last_token[i]), []
        while node >= 0:
            walked.append(node)
            node = int(tree.token_parent[node])
        assert walked[::-1] == places.tolist()
    together = tree.sequence_tokens(range(len(case.sequences)))
    assert (tree.tokens[together] == np.concatenate(case.sequences)).all()


@given(cases())
def test_scored_positions(case: Case) -> None:
    """Each sequence keeps its own mask; position 0 is never scored; a shared token is when any sequence needs it."""
    tree = build(case)
    masks = case.scored or [np.ones(n, bool) for n in case.lengths]
    wanted = set()
    for i, mask in enumerate(masks):
        expected = mask.copy()
        expected[0] = False
        assert (tree.sequence_scored([i]) == expected).all()
        wanted |= set(tree.sequence_tokens([i])[expected].tolist())
    assert tree.scored_tokens.tolist() == sorted(wanted)
    order = list(range(len(masks)))[::-1]
    assert (tree.sequence_scored(order) == np.concatenate([tree.sequence_scored([i]) for i in order])).all()


@given(cases(shares=("tree",)))
def test_sequences_share_only_within_a_key(case: Case) -> None:
    tree = build(case)
    keys = case.keys or [0] * len(case.sequences)
    owners: dict[int, int] = {}
    for i, key in enumerate(keys):
        for place in tree.sequence_tokens([i]).tolist():
            assert owners.setdefault(place, key) == key


@given(cases(), st.randoms(use_true_random=False))
def test_result_does_not_depend_on_input_order(case: Case, random) -> None:
    """The same sequences in another order: the same tree, with sequence indices renamed."""
    order = list(range(len(case.sequences)))
    random.shuffle(order)

    def permuted(values):
        return None if values is None else [values[i] for i in order]

    one = build(case)
    other = PrefixTree.build(permuted(case.sequences), permuted(case.scored), permuted(case.keys), share=case.share)
    for name in ("tokens", "segment_parent", "segment_start", "segment_length", "segment_offset"):
        assert (getattr(one, name) == getattr(other, name)).all(), name
    if case.share != "none":  # where nothing is merged, duplicates may trade places
        assert (one.sequence_segment[order] == other.sequence_segment).all()
        assert (one.scored_tokens == other.scored_tokens).all()
    again = build(case)
    assert (again.sorted_sequences == one.sorted_sequences).all()
    assert (again.sequence_segment == one.sequence_segment).all()


@pytest.mark.parametrize(
    "convert",
    [
        lambda a: a.astype(np.int32),
        lambda a: a.astype(np.uint16),
        lambda a: a.tolist(),
        lambda a: torch.from_numpy(a),
        lambda a: torch.from_numpy(a).to(torch.int32),
        lambda a: np.repeat(a, 2)[::2],  # not contiguous
    ],
    ids=["int32", "uint16", "list", "tensor64", "tensor32", "strided"],
)
def test_every_kind_of_integer_array(convert) -> None:
    arrays = [np.array(a) for a in ([5, 6, 7], [5, 6], [5, 300, 1], [9])]
    reference = PrefixTree.build(arrays)
    tree = PrefixTree.build([convert(a) for a in arrays])
    assert tree.tokens.dtype == np.int64
    assert tree.tokens.tolist() == reference.tokens.tolist()
    assert tree.sequence_segment.tolist() == reference.sequence_segment.tolist()


def test_masks_as_tensors_and_integers() -> None:
    arrays = [np.array([1, 2, 3]), np.array([1, 4])]
    tensors = [torch.tensor([False, False, True]), torch.tensor([False, True])]
    integers = [np.array([0, 0, 1]), np.array([0, 1], np.uint8)]
    for masks in (tensors, integers):
        assert PrefixTree.build(arrays, scored=masks).sequence_scored([0, 1]).tolist() == [
            False,
            False,
            True,
            False,
            True,
        ]


def test_the_callers_arrays_are_not_aliased() -> None:
    """Rollout buffers are reused: writing into them later must not change a tree."""
    array, mask = np.array([1, 2, 3]), np.array([False, True, True])
    tree = PrefixTree.build([array], scored=[mask])
    array[:] = 9
    mask[:] = False
    assert tree.tokens.tolist() == [1, 2, 3]
    assert tree.sequence_scored([0]).tolist() == [False, True, True]


def test_empty_tree() -> None:
    tree = PrefixTree.build([])
    assert (tree.num_sequences, tree.num_tokens, tree.num_dense_tokens, tree.num_leaf_tokens) == (0, 0, 0, 0)
    assert tree.num_attention_pairs == 0
    for share in ("leaf", "none"):
        assert PrefixTree.build([], scored=[], keys=[], share=share).num_tokens == 0


def test_thousands_of_levels_need_no_recursion() -> None:
    """A comb: every turn forks once, so the tree is as deep as it has sequences."""
    spine = np.arange(1500)
    tree = PrefixTree.build([np.append(spine[:n], 7000) for n in range(1, 1500)])
    assert tree.num_tokens == 1499 + 1499
    assert tree.sequence_tokens([1498]).shape == (1500,)


GOOD = np.array([1, 2, 3])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(sequences=[GOOD, np.array([1, -2])]), r"sequences\[1\].*-2"),
        (dict(sequences=[GOOD, GOOD[None]]), r"sequences\[1\].*\(1, 3\)"),
        (dict(sequences=[GOOD, np.array([1.0, 2.0])]), r"sequences\[1\].*float64"),
        (dict(sequences=[GOOD, torch.tensor([1.5])]), r"sequences\[1\].*float32"),
        (dict(sequences=[GOOD, np.zeros(0, np.int64)]), r"sequences\[1\].*empty"),
        (dict(sequences=[GOOD, []]), r"sequences\[1\].*empty"),
        (dict(sequences=[GOOD, np.array(4)]), r"sequences\[1\]"),
        (dict(sequences=[GOOD, np.array([True, False])]), r"sequences\[1\].*bool"),
        (dict(sequences=[GOOD, GOOD], scored=[np.ones(3, bool), np.ones(2, bool)]), r"scored\[1\].*sequences\[1\]"),
        (dict(sequences=[GOOD, GOOD], scored=[np.ones(3, bool)]), r"scored"),
        (dict(sequences=[GOOD], scored=[np.array([0.5, 1, 1])]), r"scored\[0\]"),
        (dict(sequences=[GOOD], scored=[np.array([0, 2, 1])]), r"scored\[0\]"),
        (dict(sequences=[GOOD, GOOD], keys=[1]), r"keys"),
        (dict(sequences=[GOOD, GOOD], keys=[0.7, 0.9]), r"keys.*integers"),
        (dict(sequences=[GOOD], share="prefix"), r"share.*'prefix'"),
    ],
)
def test_wrong_input_names_the_argument(arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PrefixTree.build(**arguments)
