"""The frozen reference that a policy is kept near to, or compared with.

Promises: it runs on the same engine as the policy, forward only; it is part of the checkpoint, refreshed or not; on the
CPU it takes no memory of the device between passes, and below a policy's adapters none at all; a moving average follows
in float32 whatever the dtype of its pass.
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

from app import checks
from app.tree import TreeEngine, moves_base, quantised_layers
from modules.models.source import ModelSource, build_model

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
        checks.at_least(1, {"reference_refresh.every": self.every})
        if not 0 <= self.ema < 1:
            raise ValueError(f"reference_refresh.ema: {self.ema}, must be at least 0 and below 1")


class ReferencePolicy(nn.Module):
    """A frozen model and its engine.

    Args:
        source: "initial", a copy of `policy` as it is now, or another model.
        policy: the model being trained.
        engine_over: the tree engine over a model.
        refresh: when and how it follows the policy; None for never.
        offload: keep the weights in CPU memory and move them to the device for each pass.

    Raises:
        ValueError: a refresh from a policy of another architecture.
    """

    def __init__(
        self,
        source: ModelSource | Literal["initial"],
        policy: PreTrainedModel,
        engine_over: Callable[[PreTrainedModel], TreeEngine],
        refresh: Refresh | None = None,
        offload: bool = False,
    ) -> None:
        super().__init__()
        model = copy.deepcopy(policy) if source == "initial" else build_model(source, key="reference")
        self.model: PreTrainedModel = model.requires_grad_(False).eval()
        self._engine_over = engine_over
        self._refresh, self._offload = refresh, offload
        self._masters: dict[str, Tensor] = {}  # float32 on the CPU; no buffers, which precision bf16-true would cast
        if refresh is not None and source != "initial" and quantised_layers(model):
            raise ValueError(
                "reference_refresh: a reference in 4 bit cannot follow a policy that began elsewhere; set reference to"
                " 'initial', or leave reference.quantization out"
            )
        if refresh is not None and _shapes(model) != _shapes(policy):
            raise ValueError(
                "reference_refresh: the reference has other parameters than the policy; remove one of them"
            )

    @contextmanager
    def engine(self, device: torch.device) -> Iterator[TreeEngine]:
        """Its engine, the weights being on `device` meanwhile."""
        engine = self._engine_over(self.model)
        self.model.to(device)
        try:
            yield engine
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
            if not mine.is_floating_point():  # 4 bit, which nothing trains
                continue
            if share < 1 and mine.itemsize < 4:
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


class WithoutAdapters:
    """The reference that is the policy with its adapters off: what they are put on, which never changes, without a
    second copy of it.

    Args:
        policy: the model being trained.
        engine: the policy's tree engine.

    Raises:
        ValueError: a policy without adapters, or whose adapters train biases of the model below them, or took something
            away from its weights when they were made.
    """

    def __init__(self, policy: Any, engine: Callable[[], TreeEngine]) -> None:
        if not hasattr(policy, "disable_adapter"):
            raise ValueError(
                "reference: 'base' is the model below the policy's adapters, and it has none: set model.adapter, or"
                " reference to 'initial'"
            )
        biased = [name for name, config in policy.peft_config.items() if getattr(config, "bias", "none") != "none"]
        if biased:
            raise ValueError(
                f"reference: 'base' cannot be had while model.adapter.bias is {policy.peft_config[biased[0]].bias!r},"
                " which trains biases of the model itself: set it to 'none', or reference to 'initial'"
            )
        if (began := moves_base(policy)) is not None:
            raise ValueError(
                f"reference: 'base' cannot be had while model.adapter.init_lora_weights is {began!r}, which moves part"
                " of the model's own weights into the adapter: leave it out, or set reference to 'initial'"
            )
        self._policy, self._engine = policy, engine

    @contextmanager
    def engine(self, device: torch.device) -> Iterator[TreeEngine]:
        """The policy's engine, adapters being off meanwhile."""
        with self._policy.disable_adapter():
            yield self._engine()

    def follow(self, policy: PreTrainedModel, version: int) -> None:
        """It does not."""


def _shapes(model: nn.Module) -> dict[str, torch.Size]:
    return {name: param.shape for name, param in model.named_parameters()}
