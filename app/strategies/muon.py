"""Muon (Jordan et al. 2024; Liu et al. 2025, arXiv:2502.16982) for a whole model: matrices by their orthogonalised
momentum, everything else by AdamW, with one learning rate for both.

    model:
      optimizer: {class_path: app.strategies.muon.Muon, init_args: {lr: 2.0e-6, weight_decay: 0.0}}

Promises: which parameters are matrices is told by their names and shapes, is the same on all ranks and in every run,
and is said when a fit begins; experts that share a tensor are orthogonalised each for itself, all at once; updates are
scaled to the size of AdamW's (0.2 root mean square), so that learning rates carry over. On one matrix it computes what
`torch.optim.Muon(adjust_lr_fn="match_rms_adamw")` does, which takes nothing but matrices. `DTAStrategy` deals the
matrices to ranks, whole, and cuts up the rest.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import AdamW, Optimizer

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of the quintic iteration, by Jordan: singular values end within 0.7 to 1.2
_RMS = 0.2  # of AdamW's updates, by Liu et al.
# What is no map from one hidden state to another, though it has two dimensions: tables of tokens and places, heads over
# a vocabulary or classes, scales and biases a head or expert. By parts of names, and by whole words of them.
_NO_MATRICES = ("embed", "norm", "bias", "a_log", "_ape")
_NO_MATRIX = {"wte", "wpe", "lm_head", "value_head", "score", "classifier"}


class Muon(Optimizer):
    """Muon for matrices, AdamW for the rest.

    Args:
        params: (name, parameter) pairs, or dictionaries whose `params` are; modules of Arborist pass these.
        lr: learning rate of both.
        weight_decay: decoupled, of both.
        momentum, nesterov, ns_steps: of the matrices: how much of the last momentum stays, whether the update looks
            ahead, and Newton-Schulz iterations.
        betas, eps: AdamW's.
        adamw: parts of names; parameters that have one are left to AdamW too, e.g. ["router"]. Each has to be found.

    Raises:
        ValueError: an option out of range.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-5,
        weight_decay: float = 0.0,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_steps: int = 5,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        adamw: tuple[str, ...] | list[str] = (),
    ) -> None:
        if not 0.0 <= momentum < 1.0:
            raise ValueError(f"Invalid momentum value: {momentum}: it must be from 0 to below 1")
        if not 1 <= ns_steps < 100:
            raise ValueError(f"Invalid ns_steps: {ns_steps}: it must be from 1 to 99")
        # Steps what is left to it, by this optimizer's groups and state; checks its options now.
        self._adamw = AdamW([torch.zeros(1)], lr, betas, eps, weight_decay)
        shared = {"lr": lr, "weight_decay": weight_decay, "betas": betas, "eps": eps}
        super().__init__(params, {**shared, "momentum": momentum, "nesterov": nesterov, "ns_steps": ns_steps})
        self._parts = tuple(adamw)
        self._left: set[int] | None = None  # no matrices
        self._described = ""

    def looks_at_whole(self, param: Tensor) -> bool:
        """Whether it is stepped as a matrix; what `DTAStrategy` has cut up has one dimension, and is not.

        Raises:
            ValueError: parameters without names, a part of a name that none has; when first asked.
        """
        return id(param) not in self._find_left() and param.dim() > 1

    @property
    def described(self) -> str:
        """What is stepped how, for people. Raises as `looks_at_whole`."""
        self._find_left()
        return self._described

    def _find_left(self) -> set[int]:
        """What is left to AdamW, of the parameters that this began with."""
        if self._left is not None:
            return self._left
        if not all("param_names" in group for group in self.param_groups):
            raise ValueError(
                "Muon tells matrices from embeddings by name: give it (name, parameter) pairs, such as"
                " model.named_parameters()"
            )
        named = [pair for group in self.param_groups for pair in zip(group["param_names"], group["params"])]
        for part in self._parts:
            if not any(part in name for name, _ in named):
                names = ", ".join(name for name, _ in named[:3])
                raise ValueError(f"adamw: no parameter's name has {part!r} in it; they are called {names} ...")
        left = [(name, param) for name, param in named if not is_matrix(name, param, self._parts)]
        sizes = [sum(param.numel() for _, param in pairs) for pairs in (named, left)]
        self._described = (
            f"Muon steps {len(named) - len(left)} tensors of matrices with {sizes[0] - sizes[1]:,} elements, AdamW the"
            f" other {len(left)} with {sizes[1]:,}"
        )
        self._left = {id(param) for _, param in left}
        return self._left

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's. Raises ValueError where the state steps as a matrix what this leaves to AdamW, or the reverse."""
        for group, saved in zip(self.param_groups, state_dict["param_groups"]):
            for param, number in zip(group["params"], saved["params"]):
                state = state_dict["state"].get(number)
                if state and ("momentum_buffer" in state) != self.looks_at_whole(param):
                    raise ValueError(
                        f"adamw: what has the shape {tuple(param.shape)} here was stepped by"
                        f" {'Muon' if 'momentum_buffer' in state else 'AdamW'} before, and is now by the other: give"
                        " the option that the state was saved with (model.optimizer.init_args.adamw), or begin from"
                        " the weights alone"
                    )
        super().load_state_dict(state_dict)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step, of the parameters that have a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        groups = [(group, [p for p in group["params"] if not self.looks_at_whole(p)]) for group in self.param_groups]
        self._adamw.param_groups = [{**self._adamw.defaults, **group, "params": rest} for group, rest in groups]
        self._adamw.state = self.state
        self._adamw.step()
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None and self.looks_at_whole(param):
                    self._step_matrix(param, param.grad, group)
        return loss

    def _step_matrix(self, param: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        state = self.state[param]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(param)
        average = state["momentum_buffer"]
        average.lerp_(grad, 1 - group["momentum"])
        update = grad.lerp(average, group["momentum"]) if group["nesterov"] else average
        param.mul_(1 - group["lr"] * group["weight_decay"])
        scale = _RMS * math.sqrt(max(param.shape[-2:]))
        param.add_(orthogonalised(update, group["ns_steps"]).to(param.dtype), alpha=-group["lr"] * scale)


def is_matrix(name: str, param: Tensor, left: Iterable[str] = ()) -> bool:
    """Whether a parameter is a matrix, or several [n, rows, columns], that maps hidden states. `left`: parts of names
    of those that are not to be."""
    lowered = name.lower()
    if param.dim() not in (2, 3) or min(param.shape[-2:]) == 1 or (param.dim() == 3 and "conv" in lowered):
        return False
    known = any(part in lowered for part in _NO_MATRICES) or not _NO_MATRIX.isdisjoint(lowered.split("."))
    return not known and not any(part in name for part in left)


def orthogonalised(matrices: Tensor, steps: int) -> Tensor:
    """Nearly U V^T of each matrix U S V^T: by Newton-Schulz iterations, in bfloat16.

    Args:
        matrices: [..., rows, columns].
        steps: iterations.

    Returns:
        bfloat16, of the same shape.
    """
    a, b, c = _COEFFICIENTS
    found = matrices.bfloat16().reshape(-1, *matrices.shape[-2:])
    tall = found.shape[-2] > found.shape[-1]
    if tall:
        found = found.mT
    found = found / found.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    for _ in range(steps):
        gram = found @ found.mT
        found = torch.baddbmm(found, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), found, beta=a)
    return (found.mT if tall else found).reshape(matrices.shape)
