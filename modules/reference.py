"""`ReferencePolicy`: the frozen model that the policy is kept near to, or compared with.

Promises: it runs on the same engine as the policy, forward only; it is part of the checkpoint, refreshed or not; on the
CPU it takes no memory of the device between passes; a moving average follows in float32 whatever the dtype of its pass.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from app.tree import TreeEngine
from modules.model_source import ModelSource, build_model

_MASTERS = "masters."  # in the state dictionary, before parameter names


@dataclass
class Refresh:
    """When the reference follows the policy.

    Attributes:
        every: rollout batches between two refreshes, at least 1.
        ema: share of the old reference that is kept, in [0, 1): 0 copies the policy. Below float32, where most steps
            of an average would be lost to rounding, it is kept in float32 in CPU memory, and rounded for the pass.

    Raises:
        ValueError: out of range.
    """

    every: int
    ema: float = 0.0

    def __post_init__(self) -> None:
        if self.every < 1:
            raise ValueError(f"reference_refresh.every: must be at least 1, got {self.every}")
        if not 0 <= self.ema < 1:
            raise ValueError(f"reference_refresh.ema: must be at least 0 and below 1, got {self.ema}")


class ReferencePolicy(nn.Module):
    """A frozen model and its engine.

    Args:
        source: "initial", a copy of `policy` as it is now, or another model.
        policy: the model being trained.
        make_engine: tree engine over a model.
        refresh: when and how it follows the policy; None for never.
        offload: keep the weights in CPU memory and move them to the device for each pass.

    Raises:
        ValueError: a refresh from a policy of another architecture.
    """

    def __init__(
        self,
        source: ModelSource | Literal["initial"],
        policy: PreTrainedModel,
        make_engine: Callable[[PreTrainedModel], TreeEngine],
        refresh: Refresh | None = None,
        offload: bool = False,
    ) -> None:
        super().__init__()
        model = copy.deepcopy(policy) if source == "initial" else build_model(source)
        self.model: PreTrainedModel = model.requires_grad_(False).eval()
        self._make_engine = make_engine
        self._engine: TreeEngine | None = None
        self._refresh, self._offload = refresh, offload
        self._masters: dict[str, Tensor] = {}  # float32 on the CPU; no buffers, which precision bf16-true would cast
        if refresh is not None and _shapes(model) != _shapes(policy):
            raise ValueError(
                "reference_refresh: the reference has other parameters than the policy; remove one of them"
            )

    @contextmanager
    def engine(self, device: torch.device) -> Iterator[TreeEngine]:
        """Its engine, the weights being on `device` meanwhile."""
        if self._engine is None:
            self._engine = self._make_engine(self.model)
        self.model.to(device)
        try:
            yield self._engine
        finally:
            if self._offload:
                self.model.to("cpu")

    @torch.no_grad()
    def follow(self, policy: PreTrainedModel, version: int) -> None:
        """Refreshes when `version` rollout batches are a multiple of `every`. All ranks do the same arithmetic."""
        if self._refresh is None or version % self._refresh.every:
            return
        own, share = dict(self.model.named_parameters()), 1 - self._refresh.ema
        for name, param in policy.named_parameters():
            mine = own[name]
            if share < 1 and mine.is_floating_point() and mine.itemsize < 4:
                if name not in self._masters:
                    self._masters[name] = mine.to("cpu", torch.float32)
                master = self._masters[name]
                mine.copy_(master.lerp_(param.to(master), share))
            else:
                mine.lerp_(param.to(mine), share)
        buffers = dict(self.model.named_buffers())
        for name, buffer in policy.named_buffers():
            buffers[name].copy_(buffer)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination.update({f"{prefix}{_MASTERS}{name}": master for name, master in self._masters.items()})

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *arguments: Any) -> None:
        start = f"{prefix}{_MASTERS}"
        names = [name for name in state_dict if name.startswith(start)]
        self._masters = {name.removeprefix(start): state_dict.pop(name).to("cpu", torch.float32) for name in names}
        super()._load_from_state_dict(state_dict, prefix, *arguments)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """Moves and casts with the module it belongs to, but stays on the CPU when offloaded."""
        if not self._offload:
            return super()._apply(fn, recurse)
        return super()._apply(lambda tensor: fn(tensor).to("cpu"), recurse)


def _shapes(model: nn.Module) -> dict[str, torch.Size]:
    return {name: param.shape for name, param in model.named_parameters()}
