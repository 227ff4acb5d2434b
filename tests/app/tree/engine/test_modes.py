"""The three training modes are arguments of one engine: dense-leaf (sequences that no other extends, packed by length),
sparse (one chunk a memory budget), and planned. Same losses, same gradients."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch

from app.tree import PrefixTree, TreeEngine
from tests.app.tree import models, oracle
from tests.app.tree.losses import SequenceLoss
from tests.app.tree.parity import take_grads

RANDOM = np.random.default_rng(0)
STEM = RANDOM.integers(0, 31, 10)
SEQUENCES = [np.concatenate([STEM, RANDOM.integers(0, 31, n)]) for n in (40, 20, 20, 10, 10)] + [STEM]
LENGTHS = [len(s) for s in SEQUENCES]  # 50, 30, 30, 20, 20, and 10, which all others extend
MODES = {
    "disabled": ("leaf", sys.maxsize, 60),
    "sparse": ("tree", sys.maxsize, 60),
    "dta": ("tree", 16, 60),
}


@pytest.mark.parametrize("mode", MODES)
def test_modes_give_the_gradients_of_every_sequence_alone(mode: str) -> None:
    share, chunk, live = MODES[mode]
    model = models.make("starcoder2", torch.float64, sliding_window=25)
    loss = SequenceLoss("tanh_of_sums", LENGTHS, 0, ("logprobs", "entropy"))
    total, expected = oracle.dense_backward(model, SEQUENCES, loss)
    tree = PrefixTree.build(SEQUENCES, share=share)
    got = TreeEngine(model, chunk, live).backward(tree, loss, want=("logprobs", "entropy"))
    assert got == pytest.approx(total, rel=1e-9)
    assert oracle.relative_error(take_grads(model), expected)[0] < 1e-9


def test_disabled_packs_whole_sequences_by_length() -> None:
    """Longest first, each where it fits best; a sequence's last token predicts nothing and does not run."""
    share, chunk, live = MODES["disabled"]
    tree = PrefixTree.build(SEQUENCES, share=share)
    assert tree.num_tokens == tree.num_leaf_tokens == sum(LENGTHS) - len(STEM)
    plan = TreeEngine(models.make("starcoder2"), chunk, live, checkpointing=False).plan(tree)
    packed = sorted(sorted(piece.tokens for piece in chunk.pieces) for chunk in plan.chunks)
    assert packed == [[19, 19], [29, 29], [49]]
    assert plan.extra_forward_tokens == 0 and all(chunk.path_tokens == 0 for chunk in plan.chunks)


def test_sparse_takes_as_much_as_the_memory_budget() -> None:
    share, chunk, _ = MODES["sparse"]
    tree = PrefixTree.build(SEQUENCES, share=share)
    assert len(TreeEngine(models.make("starcoder2"), chunk, 10_000).plan(tree).chunks) == 1
