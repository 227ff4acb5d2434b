"""What `OneProcess` answers, where a module expects ranks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from app.exchange import OneProcess, ranks_of


def _optimizer(*grads: float | None) -> torch.optim.Optimizer:
    params = [torch.nn.Parameter(torch.zeros(())) for _ in grads]
    for param, grad in zip(params, grads):
        param.grad = None if grad is None else torch.tensor(grad)
    return torch.optim.SGD(params, lr=0.1)


def test_a_strategy_without_an_exchange_is_one_process() -> None:
    mine = object()
    assert isinstance(ranks_of(SimpleNamespace(strategy=object())), OneProcess)
    assert ranks_of(SimpleNamespace(strategy=SimpleNamespace(exchange=mine))) is mine


def test_one_process_asks_itself() -> None:
    ranks = OneProcess()

    def answer(request: Any, parts: Any) -> Tensor:
        return torch.full((2, 1), float(request))

    assert ranks.lead(lambda: (ranks.ask(3, None, answer)[0].tolist(), None, {}), answer)[0] == [3.0, 3.0]
    tensor = torch.ones(1)
    assert ranks.sum(tensor) is tensor and ranks.gather(tensor)[0] is tensor


def test_the_gradient_norm_of_one_process() -> None:
    ranks = OneProcess()
    assert ranks.grad_norm(_optimizer(3.0, None, -4.0), 1) == pytest.approx(5.0)
    assert ranks.grad_norm(_optimizer(None), 1) == 0.0
    with pytest.raises(ValueError, match="the gradient norm of step 7 is nan"):
        ranks.grad_norm(_optimizer(float("nan")), 7)
