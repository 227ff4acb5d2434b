"""Rewards that misbehave, by name: `KINDS[name]` says what the pool has to make of each.

`Hostile` gives a good prompt the number that is its answer; a bad one names its kind in `metadata["kind"]`. Cheap to
import: reward workers do it.
"""

from __future__ import annotations

import asyncio
import ctypes
import fractions
import os
import re
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator
from contextlib import suppress
from pathlib import Path
from typing import Any

from datamodules.prompts.base import Prompt

RIGHT = "right"
"""The call's own number comes back."""

KINDS: dict[str, tuple[Callable[[float], Any], str]] = {}
"""Name: what it does, given the right number, and `RIGHT` or a pattern of the error, whose kind comes first."""

# Seconds that processes sleep that nobody should find afterwards; a test run has its own.
LEFT_BEHIND = os.environ.get("ARBORIST_FUZZ_SLEEP", "98765.4321")


class Hostile:
    def __call__(self, prompt: Prompt, completion: str) -> Any:
        right = float(prompt.answer)
        kind = prompt.metadata.get("kind")
        return right if kind is None else KINDS[kind][0](right)


def kind(expected: str) -> Callable[[Callable[[float], Any]], Callable[[float], Any]]:
    def add(function: Callable[[float], Any]) -> Callable[[float], Any]:
        KINDS[function.__name__] = (function, expected)
        return function

    return add


def gives(name: str, value: Any, expected: str) -> None:
    KINDS[name] = (lambda right: value() if callable(value) else value, expected)


def raises(name: str, error: Callable[[], BaseException], expected: str) -> None:
    """`expected` without the file and line that end every error of a reward."""

    def throw(right: float) -> Any:
        raise error()

    KINDS[name] = (throw, rf"exception: raised {expected} at hostile_rewards\.py:\d+$")


class _NoText(Exception):
    def __str__(self) -> str:
        raise SystemExit("not even a text")


class _NoNumber:
    def __float__(self) -> float:
        raise KeyboardInterrupt


class _Odd(BaseException):
    pass


class _Later:
    def __await__(self) -> Generator[None, None, float]:
        yield
        return 1.0


# ---- what is returned

gives("none", None, "exception: returned a NoneType, not a number")
gives("text", "1.5", "exception: returned a str, not a number")
gives("bytes", b"1.0", "exception: returned a bytes, not a number")
gives("complex", 1j, "exception: returned a complex, not a number")
gives("nan", float("nan"), "nan: returned nan")
gives("infinity", float("-inf"), "nan: returned -inf")
gives("too_large", 10**400, "exception: returned a int, not a number")
gives("triple", (1.0, {}, {}), "exception: returned a tuple, not a number")
gives("parts_list", (1.0, ["a"]), "exception: returned parts that are a list")
gives("parts_text", (1.0, {"a": "2"}), "exception: returned a str for its part 'a', not a number")
gives("parts_nan", (1.0, {"a": float("nan")}), "nan: returned nan for its part 'a'")
gives("parts_many", lambda: (1.0, dict.fromkeys(range(300_000), 1.0)), "exception: returned 300000 parts, at most 64")
gives("no_number", _NoNumber, "exception: raised KeyboardInterrupt")
gives("awaitable", _Later, "exception: returned a _Later, not a number")


@kind(RIGHT)
def fraction(right: float) -> Any:
    return fractions.Fraction(right), {"half \ud83d": True, "x" * 10**6: 1}


# ---- asynchronous ones


@kind(RIGHT)
async def later(right: float) -> Any:
    asyncio.get_running_loop().create_task(asyncio.sleep(1000))  # which nobody awaits
    await asyncio.sleep(0)
    return right


@kind("timeout: did not return within")
async def never(right: float) -> Any:
    while True:
        with suppress(asyncio.CancelledError):
            await asyncio.sleep(1000)


@kind("exception: raised CancelledError")
async def cancelled(right: float) -> Any:
    raise asyncio.CancelledError


@kind("exception: returned a coroutine, not a number")
async def twice(right: float) -> Any:
    return later(right)


# ---- what is raised

raises("long_error", lambda: RuntimeError("x" * 20 * 10**6), r"RuntimeError: x+\.\.\.")
raises("half_character", lambda: ValueError("\ud83d"), r"ValueError: \\ud83d")
raises("no_text", _NoText, "_NoText")
raises("interrupt", KeyboardInterrupt, "KeyboardInterrupt")
raises("generator_exit", GeneratorExit, "GeneratorExit")
raises("cancelled", asyncio.CancelledError, "CancelledError")
raises("leaves", lambda: SystemExit(3), "SystemExit: 3")
raises("eof", EOFError, "EOFError")
raises("broken_pipe", BrokenPipeError, "BrokenPipeError")
raises("timeout", TimeoutError, "TimeoutError")
raises("odd", _Odd, "_Odd")


@kind("exception: raised RecursionError")
def recursion(right: float) -> Any:
    return recursion(right)


@kind("exception: raised MemoryError")
def allocates(right: float) -> Any:
    return len(bytearray(10**13))


@kind(r"exception: raised (EOFError|RuntimeError: (input\(\): )?lost sys\.stdout)")  # after one that took that away
def asks(right: float) -> Any:
    return float(input())


# ---- children


def _fork(child: Callable[[], Any], by_hand: bool = False) -> int:
    pid = ctypes.CDLL(None).fork() if by_hand else os.fork()
    if pid == 0:
        child()
    return int(pid)


@kind(RIGHT)
def fork_returns(right: float) -> Any:
    return right if os.fork() else right + 1000


@kind(RIGHT)
def fork_raises(right: float) -> Any:
    if os.fork() == 0:
        raise ValueError("a child")
    time.sleep(0.05)
    return right


@kind(RIGHT)
def fork_leaves(right: float) -> Any:
    if os.fork() == 0:
        sys.exit(0)
    return right


@kind(RIGHT)
def fork_exits(right: float) -> Any:
    if os.fork() == 0:
        os._exit(0)
    return right


@kind(RIGHT)
def fork_behind_python(right: float) -> Any:
    return right if _fork(lambda: None, by_hand=True) else right + 1000


@kind(RIGHT)
def fork_behind_python_raises(right: float) -> Any:
    if ctypes.CDLL(None).fork() == 0:
        raise SystemExit
    time.sleep(0.05)
    return right


@kind(RIGHT)
def fork_twice_and_lives_on(right: float) -> Any:
    if _fork(lambda: os.fork()) == 0:
        os.setsid()
        subprocess.Popen(["sleep", LEFT_BEHIND])
        time.sleep(1000)
    return right


@kind(RIGHT)
def fork_in_a_thread(right: float) -> Any:
    def fork() -> None:
        if os.fork() == 0:
            raise SystemExit

    thread = threading.Thread(target=fork)
    thread.start()
    thread.join()
    return right


@kind(RIGHT)
def many_children(right: float) -> Any:
    for _ in range(10):
        _fork(lambda: time.sleep(1000))
    return right


@kind("crash: was lost: its worker exited with code -9")
def child_kills_it(right: float) -> Any:
    parent = os.getpid()
    _fork(lambda: os.kill(parent, signal.SIGKILL))
    time.sleep(1000)


@kind(RIGHT)
def a_session_of_its_own(right: float) -> Any:
    subprocess.Popen(["sleep", LEFT_BEHIND], start_new_session=True)
    return right


@kind("timeout: did not return within")
def a_session_and_hangs(right: float) -> Any:
    subprocess.Popen(["sleep", LEFT_BEHIND], start_new_session=True)
    time.sleep(1000)


# ---- messages


def _sockets() -> list[int]:
    numbers = [int(name) for name in os.listdir("/proc/self/fd")]
    found = []
    for number in numbers:
        try:
            if stat.S_ISSOCK(os.fstat(number).st_mode):
                found.append(number)
        except OSError:
            continue
    return found


def _say(data: bytes) -> None:
    for number in _sockets():
        with socket.socket(fileno=os.dup(number)) as connection:
            connection.sendall(data)


def says(name: str, data: Callable[[], bytes], expected: str) -> None:
    def say(right: float) -> Any:
        _say(data())
        return right

    KINDS[name] = (say, expected)


says("half_a_message", lambda: b"\0\0\0\x40\x80\x04\x95ab", "crash: was lost: Garbled: it sent")
says("text", lambda: b"hello\n", "crash: was lost: Garbled: it sent b'hello'")
says("empty_line", lambda: b"\n", "crash: was lost: Garbled: it sent b''")
says("deep", lambda: b"[" * 100_000 + b"\n", "crash: was lost: Garbled: it sent")
says("another_answer", lambda: b'[1000000, "ok", [1.0, {}], 5]\n', "crash: was lost: Garbled: asked for answer")
says("no_answer", lambda: b'{"ok": 1}\n', "crash: was lost: Garbled: it sent")
says("endless", lambda: b"x" * (3 << 20), "crash: was lost: (Garbled: it sent .* bytes without an end|its worker)")


@kind("timeout: did not return within")
def half_a_message_and_hangs(right: float) -> Any:
    _say(b'[1, "ok", [')
    time.sleep(1000)


@kind("timeout: did not return within")
def reads_its_own_jobs(right: float) -> Any:
    for number in _sockets():
        with socket.socket(fileno=os.dup(number)) as connection:
            connection.recv(10)


@kind("crash: was lost: its worker exited with code 1")
def closes_everything(right: float) -> Any:
    os.closerange(0, 256)
    return right


# ---- output


@kind(RIGHT)
def prints(right: float) -> Any:
    print("half a character: \ud83d")
    for _ in range(20):
        print("x" * 10**6)
    os.write(2, b"y" * 10**6)
    return right


@kind(RIGHT)
def no_output(right: float) -> Any:
    sys.stdout = sys.stderr = None  # type: ignore[assignment]
    return right


# ---- ends


@kind("crash: was lost: its worker exited with code 0")
def exits(right: float) -> Any:
    os._exit(0)


@kind("crash: was lost: its worker exited with code -6")
def aborts(right: float) -> Any:
    os.abort()


@kind("crash: was lost: its worker exited with code -11")
def segmentation_fault(right: float) -> Any:
    return ctypes.string_at(0)


@kind("timeout: did not return within")
def stops(right: float) -> Any:
    os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(1000)


@kind(RIGHT)
def terminates(right: float) -> Any:
    os.kill(os.getpid(), signal.SIGTERM)
    return right


@kind("crash: was lost: its worker was killed")
def kills_its_guardian(right: float) -> Any:
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(1000)


@kind("timeout: did not return within")
def stops_its_guardian(right: float) -> Any:
    os.kill(os.getppid(), signal.SIGSTOP)
    time.sleep(1000)


# ---- hangs


@kind("timeout: did not return within")
def sleeps(right: float) -> Any:
    time.sleep(1000)


@kind("timeout: did not return within")
def hangs_in_c(right: float) -> Any:
    return re.match("(a+)+$", "a" * 60 + "b")


@kind("timeout: did not return within")
def deaf(right: float) -> Any:
    signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 32))
    while True:
        pass


@kind("timeout: did not return within")
def deadlock(right: float) -> Any:
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


# ---- what is left behind in the process


@kind(RIGHT)
def a_thread(right: float) -> Any:
    def work() -> None:
        end = time.monotonic() + 1
        while time.monotonic() < end:
            pass

    threading.Thread(target=work, daemon=True).start()
    return right


@kind(RIGHT)
def an_alarm(right: float) -> Any:
    def ring(number: int, frame: object) -> None:
        raise TimeoutError("an alarm of another call")

    signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, 0.01)
    return right


@kind(RIGHT)
def another_directory(right: float) -> Any:
    os.chdir("/")
    return right


# ---- memory and secrets


@kind("memory: took .* MB of .* MB")
def memory(right: float) -> Any:
    held = [b"x" * 10**7 for _ in range(25)]
    time.sleep(1000)
    return len(held)


@kind("memory: took .* MB of .* MB")
def memory_of_children(right: float) -> Any:
    def hold() -> None:
        held = b"x" * (11 * 10**7)
        time.sleep(1000)
        print(held)

    for _ in range(2):
        _fork(hold)
    time.sleep(1000)


@kind(RIGHT)
def secrets(right: float) -> Any:
    seen = " ".join([*os.environ, Path("/proc/self/environ").read_text()])
    assert "ARBORIST_FUZZ_API_KEY" not in seen and "ARBORIST_FUZZ_PLAIN" in seen
    return right
