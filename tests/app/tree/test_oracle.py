"""The reference is checked too: against a longhand computation, and its gradients against finite differences."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from tests.app.tree import models, oracle
from tests.app.tree.losses import KINDS, SequenceLoss

SEQUENCES = [np.array([3, 10, 17, 24, 3, 0, 9]), np.array([3, 10, 5]), np.array([8])]
SCORED = [np.array([1, 0, 1, 1, 0, 1, 1], bool), np.ones(3, bool), np.ones(1, bool)]
TEMPERATURES = [0.6, 1.0, 1.7]
WANT = ("logprobs", "entropy", "values")


@pytest.mark.parametrize("name", models.FLOAT64_CLEAN)
def test_outputs_by_hand(name: str) -> None:
    model, head = models.shared(name, torch.float64)
    outputs = oracle.dense_forward(model, SEQUENCES, SCORED, TEMPERATURES, head)
    for ids, mask, temperature, out in zip(SEQUENCES, SCORED, TEMPERATURES, outputs):
        hidden = model.base_model(input_ids=torch.from_numpy(ids)[None]).last_hidden_state[0]
        assert (out.logprobs[0], out.entropy[0], out.values[0]) == (0, 0, 0)
        for t in range(1, len(ids)):
            distribution = F.softmax(model.lm_head(hidden[t - 1]) / temperature, -1)
            expected = [
                distribution[ids[t]].log(),
                torch.distributions.Categorical(distribution).entropy(),
                head(hidden[t - 1])[0],
            ]
            if not mask[t]:
                expected = [torch.zeros(())] * 3
            assert [out.logprobs[t].item(), out.entropy[t].item(), out.values[t].item()] == pytest.approx(
                [e.item() for e in expected], abs=1e-12
            )


@pytest.mark.parametrize("kind", list(KINDS))
def test_gradients_equal_finite_differences(kind: str) -> None:
    """Along one random direction of all parameters; the float32 rotary table does not move, so float64 is enough."""
    model, head = models.make("starcoder2", torch.float64), models.value_head(torch.float64)
    loss = SequenceLoss(kind, [len(s) for s in SEQUENCES], 5, WANT)
    named = oracle.parameters(model, head)
    generator = torch.Generator().manual_seed(3)
    direction = {n: torch.randn(p.shape, generator=generator, dtype=p.dtype) for n, p in named.items()}

    def total(step: float) -> float:
        with torch.no_grad():
            for name, p in named.items():
                p.add_(direction[name], alpha=step)
            outputs = oracle.dense_forward(model, SEQUENCES, SCORED, TEMPERATURES, head)
            value = sum(float(loss(out, i)) for i, out in enumerate(outputs))
            for name, p in named.items():
                p.sub_(direction[name], alpha=step)
        return value

    _, grads = oracle.dense_backward(model, SEQUENCES, loss, SCORED, TEMPERATURES, head)
    slope = sum(float((grads[name] * direction[name]).sum()) for name in named)
    step = 1e-5
    numeric = (8 * (total(step) - total(-step)) - (total(2 * step) - total(-2 * step))) / (12 * step)
    assert numeric == pytest.approx(slope, rel=1e-7, abs=1e-8)
    assert all(grad.abs().max() > 0 for name, grad in grads.items() if "k_proj.bias" not in name)


def test_losses_are_nonlinear_in_the_whole_sequence() -> None:
    """All but the plain sum: the gradient at one position moves when another position's log-probability does."""
    for kind in set(KINDS) - {"plain_sum", "clipped_ratio"}:
        loss = SequenceLoss(kind, [4], 1, ("logprobs",))
        gradients = []
        for first in (-1.0, -2.0):
            x = torch.tensor([0.0, first, -0.5, -3.0], dtype=torch.float64, requires_grad=True)
            loss(type("Out", (), {"logprobs": x}), 0).backward()
            gradients.append(x.grad[2].item())
        assert abs(gradients[0] - gradients[1]) > 1e-6, kind
