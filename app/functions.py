"""Functions that a configuration names: out of a table, by import path, or as they are, with options.

Promises: a function's parameters that are named after inputs get these inputs, the others are its options; a name that
leads nowhere, an option that a function does not have, and a parameter nobody fills in are errors that name the key.
"""

from __future__ import annotations

import importlib
import inspect
import math
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

Function = str | Callable


@dataclass(frozen=True)
class Choice:
    """A function and its options.

    Attributes:
        name: for logs and messages.
        needs: the inputs it is called with.
    """

    name: str
    function: Callable[..., Any]
    options: dict[str, Any]
    needs: frozenset[str]

    def __call__(self, inputs: Mapping[str, Any]) -> Any:
        return self.function(**{name: inputs[name] for name in self.needs}, **self.options)


class Shared:
    """A function that copies of what holds it share: the command line's hold its parser, and with it the run. It is
    pickled if the function is."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, *args: Any) -> Any:
        return self._function(*args)

    def __deepcopy__(self, memo: dict[int, Any]) -> Shared:
        return self


def choose(
    key: str,
    given: str | Callable[..., Any],
    options: Mapping[str, Any] | None,
    named: Mapping[str, Callable[..., Any]],
    inputs: Iterable[str],
    options_key: str | None = None,
) -> Choice:
    """The function that `given` names.

    Args:
        key: the YAML key, for messages; its options are at `options_key`, or `<key>_options`.
        given: a name out of `named`, an import path, or a function.
        inputs: everything a function can be called with.

    Raises:
        ValueError: naming the key.
    """
    function: Any = given
    if isinstance(given, str):
        module, _, name = given.rpartition(".")
        try:
            function = getattr(importlib.import_module(module), name) if module else named[given]
        except (ImportError, AttributeError, KeyError) as error:
            raise ValueError(
                f"{key}: no function '{given}'; name one of {', '.join(named)}, or give an import path of your own"
            ) from error
    if not callable(function) or inspect.ismodule(function):
        raise ValueError(f"{key}: '{given}' is a {type(function).__name__}, not a function")
    name = getattr(function, "__name__", type(function).__name__)
    signature, inputs = inspect.signature(function), tuple(inputs)
    needs = frozenset(signature.parameters) & frozenset(inputs)
    options, where = dict(options or {}), options_key or f"{key}_options"
    taken = needs & options.keys()
    if taken:
        raise ValueError(f"{where}: '{min(taken)}' is an input of {name}, which is filled in; remove it")
    try:
        signature.bind(**dict.fromkeys(needs), **options)
    except TypeError as error:
        own = [one for one in signature.parameters if one not in needs]
        raise ValueError(
            f"{where}: {name}: {error} (it has {', '.join(own) or 'no options'}; its parameters named after inputs are"
            f" filled in: {', '.join(inputs)})"
        ) from error
    _check_values(f"{where}: {name}", function, options)
    return Choice(name, function, options, needs)


def _check_values(where: str, function: Callable[..., Any], options: Mapping[str, Any]) -> None:
    """Raises ValueError for numbers that are not finite, and for text where a number belongs."""
    try:
        hints = typing.get_type_hints(function)
    except (NameError, TypeError, AttributeError):  # of a user's function, or of an object that is called
        hints = {}
    for key, value in options.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"{where}: {key}={value} must be a finite number")
        hint = hints.get(key)
        kinds: set[Any] = set(typing.get_args(hint)) if isinstance(hint, types.UnionType) else {hint}
        if not kinds <= {int, float, bool, str, type(None)}:
            continue
        kind = next((one for one in (bool, int, float) if isinstance(value, one)), type(value))  # numpy's float64, too
        fits = kind in kinds or (kind is int and float in kinds)
        if not fits:
            wanted = " or ".join(sorted("null" if one is type(None) else one.__name__ for one in kinds))
            raise ValueError(f"{where}: {key}={value!r} is {type(value).__name__}, must be {wanted}")
