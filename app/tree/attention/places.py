"""Queries that a layer scales by their place in a sequence, which it counts itself (Llama 4's layers without rotary).

Promises: the layer's own formula, by the depth of each row instead of by the number of rows before it; a model is left
as it was found.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

_SCALES = "attn_temperature_tuning"


class Places(NamedTuple):
    """How a layer scales: by 1 + `strength` * log(1 + floor((place + 1) / `step`))."""

    step: int
    strength: float

    @classmethod
    def of(cls, module: Any) -> Places | None:
        """Of a layer's attention, whether it does so itself or was told not to; None where queries are not scaled."""
        told = getattr(getattr(module, "config", None), _SCALES, False)
        if not told or _SCALES not in vars(module) or module.use_rope:
            return None
        return cls(module.floor_scale, module.attn_scale)

    def scale(self, query: Tensor, places: Tensor) -> Tensor:
        """[1, H, n, d] at places int64 [n] -> the same shape and dtype."""
        steps = torch.floor((places.to(torch.promote_types(torch.float32, query.dtype)) + 1.0) / self.step)
        scaled: Tensor = query * (torch.log1p(steps) * self.strength + 1.0)[:, None]
        return scaled.to(query.dtype)


@contextmanager
def unscaled(model: nn.Module) -> Iterator[None]:
    """Inside, layers leave their queries as they are, for whoever knows their places."""
    changed = leave_unscaled(model)
    try:
        yield
    finally:
        for module in changed:
            setattr(module, _SCALES, True)


def leave_unscaled(model: nn.Module) -> list[nn.Module]:
    """Tells layers to leave their queries as they are, for good; those that scaled them."""
    changed = [one for one in model.modules() if Places.of(one) is not None and getattr(one, _SCALES)]
    for module in changed:
        setattr(module, _SCALES, False)
    return changed
