"""Which processes are forked, and from what: for functions whose packages take longer to import than to use.

Promises: modules of the user are imported by each process for itself, but for those that are asked for by name; a
package that cannot be shared, and a machine where nothing can be forked, cost time alone, and are told.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from datamodules.processes.foreign import described
from datamodules.processes.nursery import Nursery, Unfit, is_installed

_log = logging.getLogger(__name__)
_READY_S = 120.0
_LIVED_S = 600.0  # one that ends sooner than that is not replaced: the next would end as soon


class Forks:
    """A nursery from the first time on that one is needed.

    Args:
        packages: by their names, modules of them that the nursery imports.
        variables: names of environment variables that each process finds anew.
        asked: names of modules that the user asks for beside them, which may be the user's own.
        ours: names of modules of this project in which what is sent to processes is written.
    """

    def __init__(
        self,
        packages: Mapping[str, Sequence[str]],
        variables: Collection[str],
        asked: Collection[str] = (),
        ours: Sequence[str] = (),
    ) -> None:
        self._packages = {**packages, **{one: [one] for one in asked}}
        self._variables, self._asked, self._ours = variables, frozenset(asked), ours
        self._is_possible = sys.platform == "linux"
        self._nursery: Nursery | None = None
        self._ready: Nursery | None = None  # the same, once it is
        self._ready_at = 0.0
        self._opening: asyncio.Task[Nursery | None] | None = None

    async def starter(self, keep_environment: Sequence[str], log: Path | None) -> Nursery | None:
        """What starts a process; None where it begins as a program of its own. Who stops waiting for it stops nothing.

        Args:
            keep_environment, log: see `Nursery`.

        Raises:
            OSError: somebody left it meanwhile.
        """
        nursery = self._nursery
        if nursery is not None and nursery is self._ready:
            if not nursery.is_gone:
                return nursery
            await self.lose(nursery, "it is gone")
        if not self._is_possible:
            return None
        if self._opening is None or self._opening.done():
            self._opening = asyncio.create_task(self._opened(keep_environment, log))
        opening = self._opening
        await asyncio.wait([opening])
        if opening.cancelled():
            raise BrokenPipeError("it was ended before it began")
        return opening.result()

    async def lose(self, nursery: Nursery | None, why: str) -> None:
        """Ends one that forks no more. Another takes its place if it has forked for long; else processes begin as
        programs of their own from then on."""
        if nursery is not self._nursery:  # somebody was quicker
            return
        lived = nursery is not None and nursery is self._ready and time.monotonic() - self._ready_at >= _LIVED_S
        self._is_possible = lived
        self._nursery = None
        told = (
            "what forked processes %s (%s), and another takes its place"
            if lived
            else "processes begin as programs of their own from now on, which takes longer; what forked them %s (%s)"
        )
        _log.warning(told, await nursery.end(is_gone=True) if nursery is not None else "could not be started", why)

    def leave(self) -> Nursery | None:
        """The nursery, for somebody to end it with all that it has forked. The next process is forked by another."""
        nursery, self._nursery = self._nursery, None
        opening, self._opening = self._opening, None
        if opening is not None:
            with suppress(RuntimeError):  # its event loop is closed, and nobody waits
                opening.get_loop().call_soon_threadsafe(opening.cancel)
        return nursery

    async def _opened(self, keep_environment: Sequence[str], log: Path | None) -> Nursery | None:
        """One that is ready; None where there can be none."""
        while self._is_possible:
            if (nursery := await self._open(keep_environment, log)) is not None:
                return nursery
        return None

    async def _open(self, keep_environment: Sequence[str], log: Path | None) -> Nursery | None:
        """A nursery that is ready; or one package less, or none any more, and None."""
        nursery = None
        try:
            modules = [one for package in self._packages.values() for one in package]
            shared = {one.partition(".")[0] for one in self._asked}
            nursery = self._nursery = Nursery(modules, self._variables, keep_environment, log, shared, self._ours)
            await nursery.ready(_READY_S)
            self._ready, self._ready_at = nursery, time.monotonic()
            return nursery
        except Unfit as error:
            package = next(name for name, modules in self._packages.items() if error.module in modules)
            del self._packages[package]
            level = logging.WARNING if package in self._asked else logging.INFO
            _log.log(level, "processes import %s each for itself: %s", package, error)
        except (EOFError, OSError) as error:
            if nursery is not self._nursery:
                raise BrokenPipeError("it was ended before it began") from error
            await self.lose(nursery, described(error))
        finally:
            if nursery is not None and nursery is not self._ready:
                nursery.kill()
                if nursery is self._nursery:
                    self._nursery = None
        return None


def modules_of(function: Callable[..., Any], packages: Collection[str]) -> dict[str, list[str]]:
    """By package, the modules of these packages that a function's own module has something of, or another module of the
    user's that this one has something of, and so on. What they import when they are called is not seen.

    Args:
        packages: names, dots included. Those that are not installed do not count: a file of the user's, say.
    """
    while isinstance(function, partial):
        function = function.func
    function = inspect.unwrap(function)
    begin = getattr(function, "__module__", None) or type(function).__module__
    found: dict[str, list[str]] = {}
    seen, left = {begin}, [begin] if begin in sys.modules else []
    while left:
        for value in list(vars(sys.modules[left.pop()]).values()):
            name = _module_of(value)
            if name in seen or name not in sys.modules or name.partition(".")[0] in sys.stdlib_module_names:
                continue
            seen.add(name)
            if not is_installed(name):
                left.append(name)
            elif package := next((one for one in packages if f"{name}.".startswith(f"{one}.")), ""):
                found.setdefault(package, []).extend([name] if value is not sys.modules[name] else _with_below(name))
    return found


def _module_of(value: Any) -> str:
    """Its own name, or that of the one in which it, or its class, was written; "" where it does not say."""
    with suppress(Exception):  # of stand-ins for what is made at its first use
        name = value.__name__ if issubclass(type(value), ModuleType) else value.__module__
        if isinstance(name, str):
            return name
    return ""


def _with_below(module: str) -> list[str]:
    """With those below it: `import langgraph.prebuilt` leaves the name of the first alone."""
    return [one for one in list(sys.modules) if f"{one}.".startswith(f"{module}.")]
