"""A signal that asks this process to end: noticed at once, acted upon where a run can be saved.

    with listening():                    # the command line
        allow_saving(say="...")          # training has begun: from here on a signal only sets what `pending` says
        if pending() is not None: ...    # whoever waits, or has finished a step

Promises: before training and after it, Ctrl-C and SIGTERM end the process as KeyboardInterrupt does; while saving is
allowed the first one is a request, which `pending` reports within milliseconds on any thread, even when the main thread
is inside a call that cannot be interrupted. A second Ctrl-C ends at once: as KeyboardInterrupt where Python code runs,
and `_AT_ONCE` seconds later in any case, after what was registered with `at_forced_end`. Nothing else is done in a
signal handler, least of all a collective.

A signal that is ignored as the process starts stays so: shells start jobs in the background without Ctrl-C, which is to
end what is in front alone. `ignored` says so of SIGINT.

Signals of one second count as one: a terminal sends Ctrl-C to torchrun and to the ranks, and torchrun passes it on.
Further SIGTERMs change nothing: SIGKILL is what comes after them.
"""

from __future__ import annotations

import _thread
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

_ONE = 1.0  # seconds in which signals count as one
_AT_ONCE = 10.0  # seconds a process has for closing what it started after the second Ctrl-C
_LAST_S = 2.0  # seconds for what was registered with `at_forced_end`


class Interrupted(BaseException):
    """A run that ended because it was asked to, on all its ranks together. Not an Exception: nothing goes wrong.

    Args:
        signum: the signal. steps: optimizer steps done. checkpoint: where they are saved; None where nothing is.
        finished: whether these are all steps (`trainer.max_steps`), so that going on would train nothing.
    """

    def __init__(self, signum: int, steps: int, checkpoint: Path | None, finished: bool = False) -> None:
        super().__init__(f"{signal.Signals(signum).name} after step {steps}")
        self.signum, self.steps, self.checkpoint, self.finished = signum, steps, checkpoint, finished


class _Listener:
    """What the handler (on the main thread) and the thread that reads the signals' numbers know."""

    def __init__(self) -> None:
        self.signum: int | None = None
        self.since = 0.0
        self.saving = False
        self.at_once = False
        self.say = ""
        self.last_resort: threading.Timer | None = None

    def note(self, signum: int) -> None:
        """A signal arrived just now."""
        now = time.monotonic()
        if self.signum is None:
            self.signum, self.since = signum, now
            if self.saving and self.say:
                _write(f"{signal.Signals(signum).name}: {self.say}")
        elif signum == signal.SIGINT and now - self.since > _ONE and not self.at_once:
            self.end(signum)

    def end(self, signum: int) -> None:
        self.at_once = True
        _thread.interrupt_main()
        self.last_resort = threading.Timer(_AT_ONCE, force_end, args=(128 + signum,))
        self.last_resort.daemon = True
        self.last_resort.start()

    def handle(self, signum: int, frame: FrameType | None) -> None:
        if self.signum is None and not self.saving:
            self.signum, self.since = signum, time.monotonic()
        if self.at_once or not self.saving:
            raise KeyboardInterrupt


_at_forced_end: list[Callable[[], None]] = []


def at_forced_end(do: Callable[[], None]) -> Callable[[], None]:
    """Has `do`, which takes moments, done before `force_end`, where nothing that `atexit` knows of is. A decorator."""
    _at_forced_end.append(do)
    return do


def force_end(code: int) -> None:
    """Ends this process with the exit code, whatever its main thread is inside of. From any thread."""
    latest = threading.Timer(_LAST_S, os._exit, args=(code,))
    latest.daemon = True
    latest.start()
    for do in _at_forced_end:
        with suppress(Exception):
            do()
    os._exit(code)


_listener = _Listener()
_installed: list[signal.Signals] = []


@contextmanager
def listening() -> Iterator[None]:
    """Ctrl-C and SIGTERM mean what the head of this file says, until the end of the block. On the main thread only;
    does nothing on another."""
    global _listener
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    _listener = _Listener()
    read, write = os.pipe()
    os.set_blocking(write, False)
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    # Python's own handlers run on the main thread, between two of its instructions; the numbers arrive here regardless.
    wakeup = signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    reader = threading.Thread(target=_read, args=(read, _listener), name="signals", daemon=True)
    reader.start()
    _installed[:] = [number for number, handler in before.items() if handler is not signal.SIG_IGN]
    take_over()
    try:
        yield
    finally:
        _listener.saving = False
        _installed.clear()
        signal.set_wakeup_fd(wakeup)
        for number, handler in before.items():
            if handler is not None:
                signal.signal(number, handler)
        os.close(write)
        reader.join(1.0)
        if _listener.last_resort is not None:
            _listener.last_resort.cancel()


def take_over() -> None:
    """Makes the handlers ours again, where another library has set its own meanwhile. Does nothing outside
    `listening`."""
    for number in _installed:
        signal.signal(number, _listener.handle)


def ignored() -> bool:
    """Whether SIGINT does nothing here, as whoever started this process had it."""
    return signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def received() -> int | None:
    """The signal that asked this process to end, if one did."""
    return _listener.signum


def pending() -> int | None:
    """The signal that asks a run to save and end; None while there is none, or nothing could be saved."""
    return _listener.signum if _listener.saving else None


def allow_saving(say: str = "") -> None:
    """Training has begun. `say`: what the first signal is answered with."""
    _listener.say = say
    _listener.saving = True


def forbid_saving() -> None:
    """Training has ended: a signal ends the process from now on."""
    _listener.saving = False


def request(signum: int) -> None:
    """As if the signal had come to this process: another rank has received it."""
    if _listener.signum is None and _listener.saving:
        _listener.note(signum)


def end_now() -> None:
    """Ends the main thread by KeyboardInterrupt, whether or not saving is allowed. From any thread."""
    _listener.at_once = True
    _thread.interrupt_main()


def _read(handle: int, listener: _Listener) -> None:
    with os.fdopen(handle, "rb", buffering=0) as numbers:
        while received := numbers.read(64):
            for number in received:
                if number in _installed:
                    listener.note(number)


def _write(text: str) -> None:
    sys.stderr.write(f"\n{text}\n")
    sys.stderr.flush()
