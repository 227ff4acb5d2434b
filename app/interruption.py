"""What ends a run before its time, and waits until it is saved: signals, and errors between two steps.

    with listening():                    # the command line
        allow_saving(say="...")          # training has begun: from here on a signal only sets what `pending` says
        if pending() is not None: ...    # whoever waits, or has finished a step
        if not put_off(error): raise     # rank 0, which waits for rollouts; `failure` says that the run is ending

Promises: before training and after it, Ctrl-C and SIGTERM end the process as KeyboardInterrupt does; while saving is
allowed the first one is a request, which `pending` reports within milliseconds on any thread, even when the main thread
is inside a call that cannot be interrupted. A second Ctrl-C ends at once: as KeyboardInterrupt where Python code runs,
and `_AT_ONCE` seconds later in any case, after what was registered with `at_forced_end`. Nothing else is done in a
signal handler, least of all a collective. An error is put off only while saving is allowed: whoever allows it raises
the error afterwards, and `end_of` says of it what was saved.

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
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

_ONE = 1.0  # seconds in which signals count as one
_AT_ONCE = 10.0  # seconds a process has for closing what it started after the second Ctrl-C
_LAST_S = 2.0  # seconds for what was registered with `at_forced_end`


@dataclass(frozen=True)
class End:
    """How a run ended before its time, on all its ranks together.

    Attributes:
        steps: optimizer steps done.
        checkpoint: where they are saved; None where nothing is.
        finished: whether these are all steps (`trainer.max_steps`), so that going on would train nothing.
        unsaved: what could not be saved and why, or what asked for nothing to be saved.
    """

    steps: int
    checkpoint: Path | None
    finished: bool = False
    unsaved: str = ""

    def __str__(self) -> str:
        saved = f"saved as {self.checkpoint}" if self.checkpoint is not None else "nothing new was saved"
        return f"ended after step {self.steps}, {saved}" + (f"; {self.unsaved}" if self.unsaved else "")


class Interrupted(BaseException):
    """A run that ended because it was asked to, by the signal `signum`. Not an Exception: nothing goes wrong."""

    def __init__(self, signum: int, end: End) -> None:
        super().__init__(f"{signal.Signals(signum).name} after step {end.steps}")
        self.signum = signum
        ends_run(self, end)


_END = "run_end"  # the attribute of an error: whoever catches it may come from anywhere, and keeps nothing alive


def ends_run(error: BaseException, end: End) -> None:
    """Says of `error`, which all ranks raise together (or errors for it), how the run ended."""
    setattr(error, _END, end)


def end_of(error: BaseException) -> End | None:
    """How the run ended that raises `error`; None where not all of its ranks ended together."""
    end = getattr(error, _END, None)
    return end if isinstance(end, End) else None


class _Listener:
    """What the handler (on the main thread) and the thread that reads the signals' numbers know."""

    def __init__(self) -> None:
        self.signum: int | None = None
        self.failure: Exception | None = None
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
    """Training has ended: a signal ends the process from now on, and an error is raised where it happens."""
    _listener.saving = False
    _listener.failure = None


def put_off(error: Exception) -> bool:
    """Whether the run is saved before it ends with `error`, which was caught between two steps, on the rank that owns
    the data: with that one, or the first that was put off. False: it is to be raised."""
    if _listener.saving and _listener.failure is None:
        _listener.failure = error
    return _listener.saving


def failure() -> Exception | None:
    """The error with which the run ends as soon as it is saved."""
    return _listener.failure


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
