"""The routers of a model: what sends a token to some of a layer's experts, and the place where it can be told whither.

Every family scores, biases, groups and normalises in its own way, and they all end in one `topk` over the scores of the
experts (of groups of experts there may be others before it). What that returns is looked at, or replaced: by other
experts, with the scores that the router itself gave them, and their gradient. All else stays the family's own.

Promises: nothing is known of a family by its name; a router without such a call, or with several, is an error that
names the layer. Inside `chosen_by` routers do as they are told, in whatever thread they run (as they do again in a
backward); outside the model is as it was found.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

Choose = Callable[[int, Tensor], Tensor]
"""`choose(place, own) -> experts`: int64 [n, k] both, of the router at `place` among the model's; `own` as it is leaves
the router's own choice."""
REMEDY = "leave the engine's record_experts, or replay_experts of recorded rollouts, off for this model"


@dataclass(frozen=True)
class Router:
    """One router: its name and module, the layer it is in, and how many of how many experts it chooses."""

    name: str
    module: nn.Module
    layer: int
    chosen: int
    experts: int


@dataclass(frozen=True)
class Routers:
    """The routers of one model, first to last."""

    all: tuple[Router, ...]

    @classmethod
    def of(cls, model: PreTrainedModel) -> Routers:
        """Finds them.

        Raises:
            ValueError: there are none, or one whose choice cannot be replaced.
        """
        found = []
        for name, module in model.named_modules():
            chosen, experts = _sizes(module)
            if not (chosen and experts) or not _calls_topk(type(module)):
                continue
            where = f"{type(model).__name__}: '{name}' ({type(module).__name__})"
            if getattr(module, "topk_method", None) == "group_limited_greedy":
                raise ValueError(
                    f"{where} takes an expert's weight from scores that are 0 outside of the groups it chose itself"
                    f" (topk_method 'group_limited_greedy'), so that recorded experts would count nothing; {REMEDY}"
                )
            numbers = [int(part) for part in name.split(".") if part.isdigit()]
            if not numbers:
                raise ValueError(f"{where} is in no numbered layer; {REMEDY}")
            found.append(Router(name, module, numbers[0], chosen, experts))
        if not found:
            raise ValueError(
                f"{type(model).__name__} has no router that chooses experts by topk, whose choice could be recorded and"
                f" replayed (a model without experts, say); {REMEDY}"
            )
        if len({one.chosen for one in found}) > 1 or len({one.layer for one in found}) < len(found):
            raise ValueError(
                f"{type(model).__name__}: layers choose different numbers of experts, or have several routers"
                f" ({', '.join(f'{one.name}: {one.chosen}' for one in found[:4])} ...); {REMEDY}"
            )
        return cls(tuple(found))

    @property
    def shape(self) -> tuple[int, int]:
        """Layers of experts, and experts of a token: a row of a table of routes."""
        return len(self.all), self.all[0].chosen

    @property
    def experts(self) -> int:
        """Most experts of a layer."""
        return max(one.experts for one in self.all)

    @property
    def dtype(self) -> torch.dtype:
        """Of a table of routes."""
        return torch.uint8 if self.experts <= 256 else torch.int16

    @contextmanager
    def chosen_by(self, choose: Choose) -> Iterator[None]:
        """Inside, every forward of a router asks `choose`."""
        before = [one.module.__dict__.get("forward") for one in self.all]
        try:
            for place, one in enumerate(self.all):
                one.module.__dict__["forward"] = partial(_routed, one, one.module.forward, partial(choose, place))
            yield
        finally:
            for one, forward in zip(self.all, before, strict=True):
                one.module.__dict__.pop("forward", None)
                if forward is not None:
                    one.module.__dict__["forward"] = forward

    @contextmanager
    def seen_by(self, chosen: list[Tensor]) -> Iterator[None]:
        """Inside, one forward of the model appends each router's choice, int64 [n, k], to `chosen`.

        Raises:
            ValueError: not every router ran, once, in its turn.
        """
        with self.chosen_by(partial(_noted, chosen)):
            yield
        if len(chosen) != len(self.all):
            raise ValueError(f"'{self.all[len(chosen)].name}' did not run in a forward; {REMEDY}")


def _noted(chosen: list[Tensor], place: int, own: Tensor) -> Tensor:
    if place != len(chosen):
        raise ValueError(f"routers ran in another order than they have in the model; {REMEDY}")
    chosen.append(own)
    return own


def _routed(router: Router, forward: Any, choose: Callable[[Tensor], Tensor], *args: Any, **kwargs: Any) -> Any:
    choice = _Choice(router, choose)
    with choice:
        out = forward(*args, **kwargs)
    if choice.calls != 1:
        raise ValueError(
            f"'{router.name}' ({type(router.module).__name__}) calls topk over its {router.experts} experts"
            f" {choice.calls} times a forward, and what it chooses can be replaced only where it does once; {REMEDY}"
        )
    return out


class _Choice(TorchFunctionMode):
    """Replaces the result of one router's topk over scores of all experts, [n, experts]."""

    def __init__(self, router: Router, choose: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.router, self.choose, self.calls = router, choose, 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if func is not torch.topk and func is not torch.Tensor.topk:
            return out
        scores: Tensor = kwargs["input"] if "input" in kwargs else args[0]
        own: Tensor = out[1]
        if scores.dim() != 2 or scores.shape[1] != self.router.experts or own.shape[1] != self.router.chosen:
            return out  # of groups
        self.calls += 1
        experts = self.choose(own)
        return out if experts is own else torch.return_types.topk((scores.gather(1, experts), experts))


def _sizes(module: nn.Module) -> tuple[int, int]:
    """How many experts a module chooses for a token, and of how many; 0 where it does not say."""
    config = getattr(module, "config", None)
    chosen = getattr(module, "top_k", None) or getattr(config, "top_k_experts", None)
    experts = getattr(module, "n_routed_experts", None) or getattr(module, "num_experts", None)
    if experts is None and chosen is not None:  # Gemma 4
        experts = getattr(config, "num_experts", None)
    return (chosen, experts) if isinstance(chosen, int) and isinstance(experts, int) else (0, 0)


def _calls_topk(kind: type[nn.Module]) -> bool:
    """Whether a method of a module's type, of its own file, has a call of that name: models inherit one of search."""
    methods = (inspect.unwrap(method) for _, method in inspect.getmembers(kind, inspect.isfunction))
    return any("topk" in one.__code__.co_names for one in methods if one.__module__ == kind.__module__)
