"""On a GPU a family computes what it computes on a CPU, in float32, densely and one sequence at a time."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
from transformers import PreTrainedModel

from app.tree import PrefixTree, TreeEngine
from tests.app.tree import oracle
from tests.app.tree.engine import families
from tests.app.tree.losses import SequenceLoss
from tests.app.tree.parity import take_grads

GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
ROWS = [row for row, family in families.SUPPORTED.items() if "float32" not in family.refused]


@pytest.fixture(autouse=True)
def exact() -> Iterator[None]:
    """Convolutions take TF32 unless told otherwise."""
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cudnn.allow_tf32 = before


def errors(there: PreTrainedModel, dense: PreTrainedModel) -> tuple[float, float]:
    """As `families.errors`, of the engine over `there`, on a device of its own."""
    loss = SequenceLoss("plain_sum", families.LENGTHS, 0, ("logprobs",))
    tree = PrefixTree.build(families.SEQUENCES)
    reference = oracle.dense_forward(dense, families.SEQUENCES)
    _, expected = oracle.dense_backward(dense, families.SEQUENCES, loss)
    engine = TreeEngine(there, 4, 8, self_check=False)
    found = engine.forward(tree).logprobs
    forward = max(float((got.cpu() - want.logprobs).abs().max().detach()) for got, want in zip(found, reference))
    engine.backward(tree, loss)
    got = {name: None if grad is None else grad.cpu() for name, grad in take_grads(there).items()}
    return forward, oracle.relative_error(got, expected)[0]


@pytest.mark.parametrize(
    ("row", "device"),
    [
        pytest.param("Qwen3", "cpu"),  # that this tells one from another
        *(pytest.param(row, "cuda", marks=GPU) for row in families.KINDS),
        *(
            pytest.param(row, "cuda", marks=[*GPU, pytest.mark.slow])
            for row in (*ROWS, *families.OTHERS)
            if row not in families.KINDS
        ),
    ],
)
def test_gradients_are_those_of_a_cpu(row: str, device: str) -> None:
    family = families.SUPPORTED[row] if row in families.SUPPORTED else families.other(row)
    dense = families.build(family)
    forward, backward = errors(copy.deepcopy(dense).to(device), dense)
    # Reductions go in other orders there, so that twice as much is rounding.
    allowed = 2 * max(family.tolerances[0], families.FORWARD), 2 * max(family.tolerances[1], families.FORWARD)
    families.within((forward, backward), allowed)
