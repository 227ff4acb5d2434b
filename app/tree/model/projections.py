"""Weight gradients of the layers' linear projections, added to `.grad` by the product that makes them.

Promises: inside `summed_in_place` a trained projection that is nothing but `x W^T (+ b)` adds its weight's gradient to
`.grad`, in the accumulation dtype, with one product: for low precision autograd would make a rounded [out, in], a copy
of it in float32 and a sum, twenty bytes a parameter and chunk. All else is autograd's as before: frozen weights,
adapters and what they stand beside, weights in shards, those made of others, those with hooks (but `READS`), and
everything under autocast. Modules are left as they were found.

CUDA devices alone: on CPUs the sum is lost in the product's time, and low precision has no product with float32 sums.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn import functional

DEVICES = ("cuda",)
READS = "reads_what_is_there"
"""An attribute of hooks after accumulation that need no gradient of autograd's: it calls them at the end of a backward
all the same."""
_aten = torch.ops.aten


@contextmanager
def summed_in_place(body: nn.Module, opaque: bool = False) -> Iterator[None]:
    """Forwards of `body` inside, and their backwards, which have to end inside too. `opaque`: torch.compile leaves the
    projections as they are."""
    found, project = _projections(body), torch.compiler.disable(_project) if opaque else _project
    try:
        for linear in found:
            linear.__dict__["forward"] = partial(project, linear)
        yield
    finally:
        for linear in found:
            linear.__dict__.pop("forward", None)


def add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total [m, n] += left.T @ right, of [k, m] and [k, n] in one dtype, by one product without a temporary; on CUDA
    devices that dtype may be lower than that of `total`, in which sums are kept."""
    if left.dtype == total.dtype:
        total.addmm_(left.t(), right)
    else:
        _aten.addmm.dtype_out(total, left.t(), right, total.dtype, out=total)


def _projections(body: nn.Module) -> list[nn.Linear]:
    """Whose weights' gradients may be summed past autograd."""
    device = next(body.parameters()).device.type
    if device not in DEVICES or torch.is_autocast_enabled(device):
        return []
    modules = list(body.modules())
    if any(isinstance(module, FSDPModule) for module in modules):
        return []
    adapted = {id(part) for module in modules if hasattr(module, "base_layer") for part in module.modules()}
    return [m for m in modules if type(m) is nn.Linear and id(m) not in adapted and _is_plain(m)]


def _is_plain(linear: nn.Linear) -> bool:
    weight, wide = linear.weight, torch.promote_types(torch.float32, linear.weight.dtype)
    return bool(
        weight.requires_grad
        and weight.is_leaf
        and weight.is_floating_point()
        and not isinstance(weight, DTensor)
        and not weight._backward_hooks
        and all(hasattr(hook, READS) for hook in (getattr(weight, "_post_accumulate_grad_hooks", None) or {}).values())
        and (weight.grad is None or weight.grad.dtype == wide)
        and "forward" not in linear.__dict__
    )


def _project(linear: nn.Linear, x: Tensor) -> Tensor:
    if not torch.is_grad_enabled():
        return functional.linear(x, linear.weight, linear.bias)
    out: Tensor = _Projection.apply(x, linear.weight, linear.bias)
    return out


class _Projection(torch.autograd.Function):
    """x [..., in] -> x W^T + b [..., out]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: nn.Parameter, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight = weight  # itself: where layers run again in backward, what was saved comes back detached
        return functional.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (x,), weight = ctx.saved_tensors, ctx.weight
        rows = grads[0].flatten(0, -2)
        if weight.grad is None:
            weight.grad = torch.zeros_like(weight, dtype=torch.promote_types(torch.float32, weight.dtype))
        add_product(weight.grad, rows, x.flatten(0, -2))
        grad_x = grads[0] @ weight if ctx.needs_input_grad[0] else None
        grad_bias = rows.sum(0) if ctx.needs_input_grad[2] else None
        return grad_x, None, grad_bias
