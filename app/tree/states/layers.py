"""The layers of a model that carry states: found by what they are made of, hooked by the functions they call.

Promises: nothing is known of a family by its name; a layer that calls none of the known functions, or did not call one
that it reads, is an error naming the layer and the function. A model is left without hooks; what stays is one wrapper
around each function of its modeling file, which does nothing outside forwards with states.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Set
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import transformers
from torch import nn
from transformers import PreTrainedModel

from app.tree.states.compressors import Compressor, compressors_of
from app.tree.states.functions import (
    FUNCTIONS,
    REFUSED,
    SHORTCUTS,
    STATES_ARGUMENT,
    carries_state,
    over_pieces,
    unknown,
)
from app.tree.states.lookback import Lookback, lookbacks_of, run_over_pieces, takes_more
from app.tree.states.piece_states import PieceStates, StateKey

_MARK = "_runs_over_pieces"


@dataclass(frozen=True, eq=False)
class StateLayers:
    """The layers of one model.

    Attributes:
        mixers: by name in the model, the modules that carry states.
        expected: layers and kinds that every forward has to call a function for, with its name.
        lookbacks: parts that look back by themselves.
        compressors: parts that make keys of several tokens.
        attending: layers that have to attend; one may do both.
        functions: names of the functions that `expected` are, as in `FUNCTIONS`.
    """

    mixers: dict[str, nn.Module]
    lookbacks: list[Lookback]
    compressors: list[Compressor]
    expected: dict[StateKey, str]
    attending: frozenset[int]
    functions: frozenset[str]

    @classmethod
    def of(cls, model: PreTrainedModel) -> StateLayers:
        """Finds them, and wraps the functions they call.

        Raises:
            ValueError: a layer with a convolution over time that calls none of the known functions, that has no way to
                hand them a state, or whose convolution has an adapter, which such layers read past.
        """
        lookbacks, compressors = lookbacks_of(model), compressors_of(model)
        alone = {one.module for one in lookbacks}
        mixers = {
            name: module
            for name, module in model.named_modules()
            if isinstance(getattr(module, "layer_idx", None), int) and module not in alone and _convolves(name, module)
        }
        expected = {one.key: f"{one.method} of {type(one.module).__name__}" for one in lookbacks}
        expected |= {key: f"forward of {type(one.module).__name__}" for one in compressors for key in one.keys}
        functions: set[str] = set()
        for name, module in mixers.items():
            where = f"'{name}' ({type(module).__name__})"
            read = _functions_read(type(module))
            refused = sorted(REFUSED.keys() & read.keys())
            if refused:
                raise ValueError(
                    f"layer {module.layer_idx}, {where}: {refused[0]}: {REFUSED[refused[0]]}, and a branch continues"
                    " its parent's state; use a model without such layers"
                )
            if not FUNCTIONS.keys() & read.keys():
                raise ValueError(
                    f"layer {module.layer_idx}, {where} has a convolution over time, and calls none of"
                    f" {sorted(FUNCTIONS)}, through which tree training carries states; use a model that does"
                )
            if not takes_more(module):
                raise ValueError(
                    f"layer {module.layer_idx}, {where}: its forward takes nothing for the functions that carry its"
                    " state, as later ones do (LFM2's from transformers 5.22 on, and this is"
                    f" {transformers.__version__}); use a newer transformers, or another model"
                )
            for function, scope in read.items():
                if function in FUNCTIONS:
                    kind, instead = FUNCTIONS[function]
                    functions.add(function)
                    expected[module.layer_idx, kind] = f"{function} of {where}"
                    _wrap(scope, function, instead)
                elif function in SHORTCUTS:
                    _wrap(scope, function, SHORTCUTS[function])
                elif carries_state(scope[function]):
                    _wrap(scope, function, unknown)
        return cls(mixers, lookbacks, compressors, expected, _attending(model, mixers, alone), frozenset(functions))

    @property
    def alone(self) -> list[nn.Module]:
        """Parts that one process has to run over all rows."""
        return [one.module for one in self.lookbacks]

    @property
    def indices(self) -> frozenset[int]:
        """Layers that carry a state."""
        return frozenset(layer for layer, _ in self.expected)

    @property
    def first_of_each(self) -> int:
        """How many layers from the first on hold one of each kind of state, and one that attends; 0 without states."""
        first = {kind: layer for layer, kind in sorted(self.expected, reverse=True)}
        return 1 + max([*first.values(), min(self.attending, default=0)]) if first else 0

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Inside, a forward with states knows which layer is running."""
        handles = [mixer.register_forward_pre_hook(_note, with_kwargs=True) for mixer in self.mixers.values()]
        try:
            with run_over_pieces(self.lookbacks):
                yield
        finally:
            for handle in handles:
                handle.remove()

    def refuse_unreached(self, states: PieceStates) -> None:
        """Raises ValueError when a forward did not call a function that its layers read."""
        missing = [where for key, where in self.expected.items() if key not in states.called]
        if missing:
            raise ValueError(
                f"layer {min(set(self.expected) - states.called)[0]}: {missing[0]} was not called in a forward, so tree"
                " training cannot carry the layer's state; load the model with transformers' own layers"
                " (use_kernels=False) and uncompiled"
            )


def _functions_read(kind: type[nn.Module]) -> dict[str, dict[str, Any]]:
    """Names of globals that the methods of a module's type read, and the scope that holds each."""
    read: dict[str, dict[str, Any]] = {}
    for _, method in inspect.getmembers(kind, inspect.isfunction):
        method = inspect.unwrap(method)
        if method.__globals__.get("__name__") != nn.Module.__module__:
            read |= {name: method.__globals__ for name in method.__code__.co_names if name in method.__globals__}
    return read


def _wrap(scope: dict[str, Any], name: str, instead: Any) -> None:
    if not hasattr(scope[name], _MARK):
        wrapped = over_pieces(scope[name], instead)
        setattr(wrapped, _MARK, True)
        scope[name] = wrapped


def _attending(model: PreTrainedModel, mixers: dict[str, nn.Module], alone: Set[nn.Module]) -> frozenset[int]:
    """Layers that do more than carry a state or work on single tokens."""
    config = model.config.get_text_config()
    kinds = getattr(config, "layers_block_type", None) or getattr(config, "layer_types", None) or []
    tokenwise = {layer for layer, kind in enumerate(kinds) if kind in ("mlp", "moe")}
    stateful = {module.layer_idx for module in mixers.values()}
    for name, module in model.named_modules():
        layer = getattr(module, "layer_idx", None)
        around = any(mixer == name or mixer.startswith(f"{name}.") for mixer in mixers)
        if layer in stateful and not around and alone.isdisjoint(module.modules()):
            stateful.discard(layer)  # it attends as well
    return frozenset(set(range(config.num_hidden_layers)) - tokenwise - stateful)


def _convolves(name: str, module: nn.Module) -> bool:
    """Whether a convolution over time is among a module's own parts."""
    child: Any
    for part, child in module.named_children():
        base = child.get_base_layer() if hasattr(child, "get_base_layer") else child
        if isinstance(base, nn.Conv1d):
            if base is not child:
                raise ValueError(
                    f"'{name}.{part}' has an adapter ({type(child).__name__}), and its layer reads the convolution's"
                    " weight past it: the adapter would do nothing; leave convolutions out of target_modules"
                )
            return True
    return False


def _note(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    states = kwargs.get(STATES_ARGUMENT)
    if states is None:
        return
    states.layer, states.owner = module.layer_idx, type(module).__name__
    for name in ("attention_mask", "cache_params", "past_key_values"):
        if kwargs.get(name) is not None:
            raise ValueError(
                f"layer {states.layer} ({states.owner}): received {name}; layers that carry states take none in a tree"
            )
