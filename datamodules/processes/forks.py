"""Which processes are forked, and from what: for functions whose packages take longer to import than to use.

Promises: modules of the user are imported by each process for itself, as ever; a package that cannot be shared, and a
machine where nothing can be forked, cost time alone, and are told.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from datamodules.processes.foreign import described
from datamodules.processes.nursery import Nursery, Unfit, is_installed

_log = logging.getLogger(__name__)
_READY_S = 120.0


class Forks:
    """A nursery from the first time on that one is needed.

    Args:
        packages: of those that are installed and that this process has imported, the nursery imports what it has of
            them, and these modules, which they import at their first use.
        variables: names of environment variables that each process finds anew.
    """

    def __init__(self, packages: Mapping[str, Sequence[str]], variables: Collection[str]) -> None:
        self._packages, self._variables = packages, variables
        self._unfit: set[str] = set()
        self._is_possible = sys.platform == "linux"
        self._nursery: Nursery | None = None
        self._ready: Nursery | None = None  # the same, once it is
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
        """Ends one that forks no more. Processes begin as programs of their own from then on."""
        if nursery is not self._nursery:  # somebody was quicker
            return
        self._is_possible = False
        self._nursery = None
        told = "processes begin as programs of their own from now on, which takes longer; what forked them %s (%s)"
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
            nursery = self._nursery = Nursery(self._modules(), self._variables, keep_environment, log)
            await nursery.ready(_READY_S)
            self._ready = nursery
            return nursery
        except Unfit as error:
            package = self._package(error.module)
            self._unfit.add(package)
            _log.info("processes import %s each for itself: %s", package, error)
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

    def _modules(self) -> list[str]:
        """To import, packages one after the other."""
        found: dict[str, list[str]] = {}
        for name in list(sys.modules):
            if (package := self._package(name)) and package not in self._unfit and is_installed(name):
                found.setdefault(package, []).append(name)
        return [name for package, names in found.items() for name in (*names, *self._packages[package])]

    def _package(self, module: str) -> str:
        """Of ours, that it is in; "" for none."""
        return next((one for one in self._packages if f"{module}.".startswith(f"{one}.")), "")
