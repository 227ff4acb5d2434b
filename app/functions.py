"""Functions that a configuration names: out of a table, by import path, or as they are, with options.

Promises: a function's parameters that are named after inputs get these inputs, the others are its options; a name that
leads nowhere, an option that a function does not have, and a parameter nobody fills in are errors that name the key.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import math
import traceback
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
        function = _named(key, given, named)
    if not callable(function) or inspect.ismodule(function):
        raise ValueError(f"{key}: '{given}' is a {type(function).__name__}, not a function")
    if inspect.isclass(function):
        name = given if isinstance(given, str) else function.__name__
        raise ValueError(
            f"{key}: '{name}' is a class, of which one made of it is called: write {{class_path: {name}, init_args:"
            " {...}}"
        )
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


def _named(key: str, given: str, named: Mapping[str, Callable[..., Any]]) -> Any:
    """What `given`, a name out of `named` or an import path, leads to. Raises ValueError where that is nowhere."""
    path, _, name = given.rpartition(".")
    if not path and given in named:
        return named[given]
    nowhere = f"{key}: no function '{given}'"
    remedy = f"name one of {', '.join(named)}, or give an import path of your own"
    if not path:
        raise ValueError(f"{nowhere}; {remedy}")
    try:
        module = importlib.import_module(path)
    except Exception as error:  # a user's file may raise anything
        if isinstance(error, ModuleNotFoundError) and f"{path}.".startswith(f"{error.name}."):
            raise ValueError(
                f"{nowhere}: there is no module '{error.name}' to import (run where it is, or install its package);"
                f" {remedy}"
            ) from error
        raise ValueError(
            f"{key}: '{given}': importing '{path}' failed{_where(error)}: {type(error).__name__}: {error}; mend that"
            " file, or install what it imports"
        ) from error
    if not hasattr(module, name):
        own = [one for one, value in vars(module).items() if callable(value) and not one.startswith("_")]
        close = difflib.get_close_matches(name, own, n=1)
        meant = f"did you mean '{path}.{close[0]}'?" if close else remedy
        raise ValueError(f"{nowhere}: module '{path}' ({_file(module)}) has no '{name}'; {meant}")
    return getattr(module, name)


def _file(module: types.ModuleType) -> str:
    return getattr(module, "__file__", None) or "built in"


def _where(error: Exception) -> str:
    """The line that failed, of the last file that is no part of Python's import machinery."""
    if isinstance(error, SyntaxError):
        return ""  # its text has it
    frames = traceback.extract_tb(error.__traceback__)
    last = [one for one in frames if not one.filename.startswith(("<frozen importlib", importlib.__file__))][-1]
    return f" in {last.filename}, line {last.lineno} ({last.line})"


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
