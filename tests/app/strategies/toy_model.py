"""A small model with everything the sharded optimizer must get right, its data, and plain torch training as the
reference.

The loss of one sample is nonlinear, the loss of a step is the mean over the whole batch; a rank computes its share
of samples only, divided by the global count.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from app.strategies.muon import Muon

SAMPLES = 8
LEARNING_RATE = 0.05


class Toy(nn.Module):
    """A tied parameter, a frozen one, odd shapes (5 x 7 and a scalar), about 150 elements."""

    def __init__(self, seed: int = 0, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)

        def values(*shape: int) -> nn.Parameter:
            return nn.Parameter((torch.randn(*shape, generator=generator) * 0.5).to(dtype))

        self.embedding = nn.Embedding(11, 7)
        self.embedding.weight = values(11, 7)
        self.hidden = nn.Linear(7, 5)
        self.hidden.weight, self.hidden.bias = values(5, 7), values(5)
        self.back = nn.Linear(5, 7, bias=False)
        self.back.weight = values(7, 5)
        self.scale = nn.Parameter(torch.tensor(0.7, dtype=dtype))
        self.frozen = nn.Parameter(torch.randn(7, generator=generator).to(dtype), requires_grad=False)
        self.head = nn.Linear(7, 11, bias=False)
        self.head.weight = self.embedding.weight

    def sample_loss(self, sample: int, step: int) -> Tensor:
        tokens = torch.tensor([(3 * sample + step) % 11, (sample * sample + 1) % 11, (5 * sample + 2 * step) % 11])
        states = self.back(torch.tanh(self.hidden(self.embedding(tokens)))) * self.scale + self.frozen
        return nn.functional.cross_entropy(self.head(states)[:-1].float(), tokens[1:])

    def backward(self, samples: Iterable[int], step: int) -> None:
        """Adds this share's gradient of the mean over all samples, sample by sample."""
        for sample in samples:
            (self.sample_loss(sample, step) / SAMPLES).backward()


def two_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Weight decay on matrices, none elsewhere; the frozen parameter is among them, as users leave it."""
    parameters = list(model.parameters())
    return [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0, "lr": LEARNING_RATE / 2},
    ]


def sgd(model: nn.Module) -> Optimizer:
    return torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=0.9)


def adamw(model: nn.Module) -> Optimizer:
    return torch.optim.AdamW(two_groups(model), lr=LEARNING_RATE)


def adagrad(model: nn.Module) -> Optimizer:
    """Alone among torch's it has state before its first step; here not of zeros."""
    return torch.optim.Adagrad(two_groups(model), lr=LEARNING_RATE, lr_decay=0.1, initial_accumulator_value=0.01)


def muon(model: nn.Module) -> Optimizer:
    """Two matrices whole, the rest (the tied embedding among it) flat."""
    return Muon(model.named_parameters(), lr=LEARNING_RATE, weight_decay=0.1)


def adafactor(model: nn.Module) -> Optimizer:
    """All whole, with state of rows and of columns."""
    return torch.optim.Adafactor(two_groups(model), lr=LEARNING_RATE)


def adamw_8bit(model: nn.Module) -> Optimizer:
    """All whole, with bytes and tables as state: quantised in blocks, which a cut through a parameter would move."""
    from bitsandbytes.optim import AdamW8bit  # an optional package

    return AdamW8bit(two_groups(model), lr=LEARNING_RATE, min_8bit_size=1)


def adadelta_named(model: nn.Module) -> Optimizer:
    """Named parameters, which put `param_names` into the groups."""
    return torch.optim.Adadelta(model.named_parameters(), lr=1.0)


def one_cycle_of_rates(optimizer: Optimizer) -> Any:
    """Of optimizers without betas or momentum of that kind, too."""
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, total_steps=20, cycle_momentum=False)


def one_cycle(optimizer: Optimizer) -> Any:
    """Rewrites learning rate and betas of every group at every step."""
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=LEARNING_RATE, total_steps=20)


def values(model: nn.Module) -> dict[str, Tensor]:
    return {name: param.detach().clone() for name, param in model.named_parameters()}


def train_plainly(
    make_optimizer: Callable[[nn.Module], Optimizer] = sgd,
    steps: int = 3,
    make_scheduler: Callable[[Optimizer], Any] | None = None,
    clip: float | None = None,
    skip: Iterable[int] = (),
    only: str | None = None,
) -> dict[str, Tensor]:
    """The same training with plain torch in one process: parameters after `steps` steps, those in `skip` left out."""
    model = Toy()
    for name, param in model.named_parameters():
        param.requires_grad_(param.requires_grad and only in (None, name))
    optimizer = make_optimizer(model)
    scheduler = make_scheduler(optimizer) if make_scheduler else None
    for step in range(steps):
        optimizer.zero_grad()
        model.backward(range(SAMPLES), step)
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        if step not in skip:
            optimizer.step()
        if scheduler:
            scheduler.step()
    return values(model)
