"""Parts of layers that look a few tokens back by themselves, through a cache: a dilated convolution, embeddings of the
last tokens together (Qwen 4's n-grams), projections that convolve (ZAYA).

No function of theirs takes a state, but what they give for a token is made of it and of so many tokens before it. So
they run their own code without a cache over each piece behind the tokens before it, as a convolution does.

Promises: found by what they are made of; outside of forwards with states they are as before.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, cast
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from app.tree.states.functions import STATES_ARGUMENT
from app.tree.states.piece_states import PieceStates, StateKey


@dataclass(frozen=True, eq=False)
class Lookback:
    """One such part.

    Attributes:
        module, method: what looks back; its first argument has a row a token, [1, n, ...], the second is the cache.
        above: modules around it that may be given the states, innermost first. handed: whether the first of them is,
            always: then it is asked alone.
        layer: whose it is. kind: of its state, the last `reach` rows.
        nothing: what stands before a sequence's first row.
    """

    module: Any
    method: str
    above: tuple[nn.Module, ...]
    layer: int
    kind: str
    reach: int
    nothing: int = 0
    handed: bool = False

    @property
    def key(self) -> StateKey:
        return self.layer, self.kind

    def run(self, running: Mapping[nn.Module, PieceStates], rows: Tensor, cache: Any = None, *others: Any) -> Any:
        """[1, n, ...] -> [1, n, ...], or several of these, in the place of the method; `running`: states of those
        modules that have any."""
        own = getattr(type(self.module), self.method).__get__(self.module)
        states = running.get(self.module)
        if states is None:
            return own(rows, cache, *others)
        if any(one is not None for one in (cache, *others)):
            raise ValueError(
                f"layer {self.layer} ({type(self.module).__name__}): received a cache or a mask; layers that carry"
                " states take none in a tree"
            )
        shapes = list[torch.Size]()

        def behind(found: Tensor) -> Tensor:
            out = own((found + self.nothing if self.nothing else found)[None], None)
            if isinstance(out, Tensor):
                return out[0]
            shapes.extend(one.shape[2:] for one in out)
            return torch.cat([one[0].flatten(1) for one in out], -1)

        # States are rows less `nothing`: zeros are none, as of all states.
        less = rows[0] - self.nothing if self.nothing else rows[0]
        made = states.lookback(self.key, behind, less, self.reach)[None]
        if not shapes:
            return made
        return tuple(one.unflatten(-1, s) for one, s in zip(made.split([s.numel() for s in shapes], -1), shapes))


def lookbacks_of(model: nn.Module) -> list[Lookback]:
    """Those of a model; none in most."""
    found, parts = list[Lookback](), dict(model.named_modules())
    for name, module in parts.items():
        looks_back = _looks_back(module)
        if looks_back is not None:
            around = (parts[name.rsplit(".", n)[0]] for n in range(1, name.count(".") + 1))
            above = tuple(part for part in around if takes_more(part))
            _refuse_bias(name, module)
            found.append(Lookback(module, looks_back[0], above, cast(int, module.layer_idx), *looks_back[1:]))
    return found


@contextmanager
def run_over_pieces(lookbacks: Sequence[Lookback]) -> Iterator[None]:
    """Inside, they run over the pieces of a forward with states."""
    # Nobody hands them the states, and hooks of a checkpointed layer do not run again: the token ids that it hands
    # them are those of its forward, each time.
    known, running = WeakTensorKeyDictionary(), WeakValueDictionary[nn.Module, PieceStates]()

    def note_layer(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        states = kwargs.get(STATES_ARGUMENT)
        if states is not None:
            known.update((ids, states) for ids in _numbers(args, kwargs))

    def note_handed(part: nn.Module, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        running.pop(part, None)
        if kwargs.get(STATES_ARGUMENT) is not None:
            running[part] = kwargs[STATES_ARGUMENT]

    def note_part(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        running.pop(module, None)
        running.update((module, known[ids]) for ids in _numbers(args, kwargs) if ids in known)

    with ExitStack() as stack:
        for above in dict.fromkeys(part for one in lookbacks if not one.handed for part in one.above):
            stack.callback(above.register_forward_pre_hook(note_layer, with_kwargs=True).remove)
        for one in lookbacks:
            part, note = (one.above[0], partial(note_handed, one.module)) if one.handed else (one.module, note_part)
            stack.callback(part.register_forward_pre_hook(note, with_kwargs=True).remove)
            stack.enter_context(instead(one.module, one.method, partial(one.run, running)))
        yield


@contextmanager
def instead(module: nn.Module, name: str, function: Callable[..., Any]) -> Iterator[None]:
    """Inside, a module's method is this function."""
    before = module.__dict__.get(name)
    setattr(module, name, function)
    try:
        yield
    finally:
        delattr(module, name)
        if before is not None:
            setattr(module, name, before)


def _numbers(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """Tensors of whole numbers among arguments."""
    given = (*args, *kwargs.values())
    return [one for one in given if isinstance(one, Tensor) and one.dtype == torch.int64]


def takes_more(module: nn.Module) -> bool:
    """Whether the forward of a module takes arguments by any name, among them the states."""
    given = inspect.signature(type(module).forward).parameters.values()
    return any(one.kind is inspect.Parameter.VAR_KEYWORD for one in given)


def _refuse_bias(name: str, module: Any) -> None:
    """What is before a sequence's first row are rows of zeros, which a projection with a bias makes others of."""
    biased = getattr(getattr(module, "q_proj", None), "bias", None)
    if biased is not None:
        raise ValueError(
            f"'{name}' ({type(module).__name__}) convolves projections with a bias (attention_bias), of which a tree"
            " gives those before a sequence's first token another value than the model; use a model without"
        )


def _looks_back(module: Any) -> tuple[str, str, int, int, bool] | None:
    """Method, kind, reach, what is before the first row, and whether the module around it is handed the states; of the
    module itself, not of a wrapper around it."""
    layer, reach = getattr(module, "layer_idx", None), getattr(module, "short_conv_state_len", None)
    if not isinstance(layer, int):
        return None
    if hasattr(type(module), "_short_conv") and isinstance(reach, int):
        return "_short_conv", "lookback", reach, 0, False
    reach = getattr(module, "conv_kernel_size", None)
    if hasattr(module, "v_proj_delayed") and isinstance(reach, int):
        return "forward", "lookback", reach, 0, True
    reach = getattr(module, "context_len", None)
    if hasattr(type(module), "_shift_right_ignore_eos") and isinstance(reach, int):
        return "forward", "tokens", reach, int(module.eos_token_id), False
    return None
