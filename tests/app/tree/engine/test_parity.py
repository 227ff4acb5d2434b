"""The engine against the dense oracle: outputs and gradients, on random trees, budgets, masks, temperatures and losses.

Tolerances are the project's: 1e-9 in float64 on float64-clean models; 2e-6 of the largest gradient in float32, or what
dense itself loses to float32 where larger terms cancelled (tied embeddings of a token that only repeats itself).
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from app.tree import PrefixTree, TreeEngine
from tests.app.tree import models, oracle
from tests.app.tree.cases import Case, cases
from tests.app.tree.losses import KINDS, SequenceLoss
from tests.app.tree.parity import assert_backward, assert_forward, masked_block, take_grads

EXAMPLES = settings.default.max_examples
FEW, MANY = settings(max_examples=EXAMPLES // 6), settings(max_examples=EXAMPLES // 2)

wants = st.sampled_from(
    [("logprobs",), ("entropy",), ("values",), ("logprobs", "values"), ("logprobs", "entropy", "values")]
)
kinds = st.sampled_from(sorted(KINDS))
blocks = st.sampled_from([1, 3, 256])  # rows of a masked attention block
heads = st.sampled_from([1, 4, "auto"])  # rows of logits held at a time

CANCELLED = 0.05
"""Gradients of these models are of order 0.1 to 10; where all are smaller, larger terms cancelled."""


@pytest.mark.parametrize("name", models.FLOAT64_CLEAN)
@settings(FEW)
@given(case=cases(), want=wants, block=blocks, head_tokens=heads)
def test_forward_float64(name: str, case: Case, want, block: int, head_tokens) -> None:
    model, head = models.shared(name, torch.float64)
    with masked_block(block):
        assert_forward(model, head, case, want, 1e-9, head_tokens=head_tokens)


@pytest.mark.parametrize("name", models.FLOAT64_CLEAN)
@settings(MANY)
@given(case=cases(), want=wants, kind=kinds, block=blocks, head_tokens=heads, batched=st.booleans())
def test_backward_float64(name: str, case: Case, want, kind: str, block: int, head_tokens, batched: bool) -> None:
    model, head = models.shared(name, torch.float64)
    with masked_block(block):
        assert_backward(model, head, case, kind, want, 1e-9, batched, head_tokens=head_tokens)


@pytest.mark.parametrize("name", models.FLOAT32)
@settings(FEW)
@given(case=cases(), want=wants, kind=kinds, block=blocks, batched=st.booleans())
def test_backward_float32(name: str, case: Case, want, kind: str, block: int, batched: bool) -> None:
    model, head = models.shared(name, torch.float32)
    exact = models.shared(name, torch.float64)
    with masked_block(block):
        assert_backward(model, head, case, kind, want, 2e-6, batched, floor=CANCELLED, exact=exact)


@pytest.mark.parametrize("name", models.FLOAT32)
@settings(FEW)
@given(case=cases(), block=blocks)
def test_forward_float32(name: str, case: Case, block: int) -> None:
    """To 1e-5 of what transformers' own forward gives."""
    model, head = models.shared(name, torch.float32)
    with masked_block(block):
        assert_forward(model, head, case, ("logprobs", "entropy", "values"), 1e-5)


@pytest.mark.parametrize(("chunk_tokens", "live_tokens"), [(2000, 4000), (700, 900), (100, 150)])
def test_long_sequences_use_every_kind_of_attention_part(chunk_tokens: int, live_tokens: int) -> None:
    """Hundreds of tokens a branch: causal squares, whole rectangles and masked blocks at their real sizes."""
    random = np.random.default_rng(4)
    stem = random.integers(0, 31, 300)
    arms = [np.concatenate([stem[:cut], random.integers(0, 31, 200)]) for cut in (150, 300, 300)]
    sequences = [np.concatenate([arm, random.integers(0, 31, n)]) for arm in arms for n in (3, 20, 280)] + [stem[:40]]
    model = models.make("starcoder2", torch.float64, max_position_embeddings=1024)
    loss = SequenceLoss("mean_times_variance", [len(s) for s in sequences], 0, ("logprobs", "entropy"))
    _, expected = oracle.dense_backward(model, sequences, loss)
    with masked_block(256):
        TreeEngine(model, chunk_tokens, live_tokens, self_check=False).backward(
            PrefixTree.build(sequences), loss, want=("logprobs", "entropy")
        )
    assert oracle.relative_error(take_grads(model), expected)[0] < 1e-9
