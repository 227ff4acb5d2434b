"""The faults a run must survive with exact accounts: each function makes one real run, breaks something at a random
moment of it, and returns what happened.

    outcome = FAULTS["kill_server"](place, random.Random(1))

Promises: the moment is drawn from `rng` within a few optimizer steps, from the first step's end on; faults that a run
must survive are over before it ends, with two more steps trained since; for those that end a run, the run is resumed
from its last checkpoint and the accounts are those of the whole line of weights. `Outcome.wrong` is empty, or names
what a run lost, trained twice or left behind.
"""

from __future__ import annotations

import gc
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from benchmarks.common.servers import Servers
from datamodules.files.recording import read_batch, versions
from datamodules.inference.embedded import EmbeddedEngine
from datamodules.inference.protocol import InferenceEngine
from tests.faults.endings import ENDINGS
from tests.faults.fit import Fit, accounts, engine_on, last_checkpoint, read_ledger, step_of
from tests.faults.outcome import Outcome, Place
from tests.faults.rewards import TurnsBad, right_digits
from tests.faults.traces import Traces

ROOT = Path(__file__).resolve().parents[2]
WINDOW_S = 1.5  # the moment is drawn from this long after the first step
_HEAL_S = 400.0
_MORE_STEPS = 2
_SLOW_S = 5.0
# Lightning puts these into the environment of a process that has trained; another trainer chooses its own.
_OURS = ("MASTER_ADDR", "MASTER_PORT", "RANK", "LOCAL_RANK", "NODE_RANK", "WORLD_SIZE")


class _Breaker:
    """A thread that waits for the first step, then for a random moment, then acts; `over` is set when that is done.

    Asked after every step, it says whether the run may end.
    """

    def __init__(self, rng: random.Random, act: Callable[[], None], healed: Callable[[], bool]) -> None:
        self.moment_s = rng.uniform(0.0, WINDOW_S)
        self.fit: Fit | None = None
        self.traces: Traces | None = None
        self.broke_at = self.healed_at = 0.0
        self.after_steps = 0
        self.error = ""
        self._act = act
        self._healed = healed
        self._more = 0
        self._thread = threading.Thread(target=self._run, daemon=True)

    def enough(self) -> bool:
        assert self.traces is not None
        self.traces.see()
        if not self._thread.is_alive() and not self.broke_at:
            self._thread.start()
        if self.error:
            return True
        self._more += bool(self.healed_at)
        return self._more >= _MORE_STEPS

    def join(self) -> None:
        if self._thread.ident is not None:
            self._thread.join(_HEAL_S)

    def _run(self) -> None:
        assert self.fit is not None
        time.sleep(self.moment_s)
        self.after_steps = len(self.fit.ledger.steps)
        self.broke_at = time.monotonic()
        try:
            self._act()
            ends = time.monotonic() + _HEAL_S
            while not self._healed():
                if time.monotonic() > ends:
                    raise TimeoutError(f"not healed within {_HEAL_S:g} s: {self.fit.engine.health()}")
                time.sleep(0.02)
            self.healed_at = time.monotonic()
        except Exception as error:
            self.error = f"{type(error).__name__}: {error}"


def _survive(
    name: str,
    place: Place,
    engine: InferenceEngine,
    breaker: _Breaker,
    expect: Callable[[dict[str, Any]], str] = lambda accounts: "",
    **settings: Any,
) -> Outcome:
    """A run that goes on in spite of its fault. `expect`: what its accounts lack, in words."""
    traces = breaker.traces = Traces(place.pids)
    fit = breaker.fit = Fit(settings.pop("directory", None) or place.fresh(name), engine, breaker.enough, **settings)
    outcome = Outcome(name, breaker.moment_s)
    try:
        fit.run()
    except Exception as error:
        outcome.wrong.append(f"the run ended with {type(error).__name__}: {error}")
    breaker.join()
    gc.collect()
    outcome.accounts = accounts(fit.ledger.trained(), fit.state)
    outcome.after_steps, outcome.steps = breaker.after_steps, len(fit.ledger.steps)
    outcome.stall_s = fit.ledger.longest_pause(breaker.broke_at)
    outcome.healed_s = max(0.0, breaker.healed_at - breaker.broke_at)
    outcome.wrong += [breaker.error] * bool(breaker.error) + outcome.accounts.pop("wrong") + traces.left()
    outcome.wrong += [missing] if (missing := expect(outcome.accounts)) else []
    return outcome


# ------------------------------------------------------------------------------------------------------------- servers


def _states(engine: InferenceEngine) -> list[str]:
    return [server["state"] for server in engine.health()["servers"]]


def _serving(engine: InferenceEngine) -> Callable[[], bool]:
    return lambda: _states(engine) == ["serving"] * len(_states(engine))


def _wait_until_not(engine: InferenceEngine, index: int) -> None:
    """Until the engine has noticed that this server does not serve."""
    ends = time.monotonic() + _HEAL_S
    while _states(engine)[index] in ("serving", "updating", "suspect"):
        if time.monotonic() > ends:
            raise TimeoutError(f"nobody noticed within {_HEAL_S:g} s: {engine.health()}")
        time.sleep(0.02)


def kill_server(place: Place, rng: random.Random) -> Outcome:
    """kill -9; it is started again at its address (as `arborist serve` does) and joins with the current weights."""
    servers = _servers(place)
    engine, which = engine_on(servers.urls), rng.randrange(2)

    def act() -> None:
        servers.kill(which)
        _wait_until_not(engine, which)

    return _survive("kill_server", place, engine, _Breaker(rng, act, _serving(engine)))


def mute_server(place: Place, rng: random.Random) -> Outcome:
    """It accepts connections and never answers, until it has been found out."""
    servers = _servers(place)
    engine, which = engine_on(servers.urls), rng.randrange(2)

    def act() -> None:
        with servers.frozen(which):
            _wait_until_not(engine, which)

    return _survive("mute_server", place, engine, _Breaker(rng, act, _serving(engine)))


def slow_server(place: Place, rng: random.Random) -> Outcome:
    """One of two runs at a tenth of its speed for five seconds."""
    servers = _servers(place)
    engine, which = engine_on(servers.urls), rng.randrange(2)
    breaker = _Breaker(rng, lambda: servers.slow_down(which, _SLOW_S), _serving(engine))
    return _survive("slow_server", place, engine, breaker)


def update_fails_on_one(place: Place, rng: random.Random) -> Outcome:
    """One of two servers can open no file when an update by disk comes, which fails there, and ends the server."""
    servers = _servers(place)
    engine, which = engine_on(servers.urls), rng.randrange(2)
    directory = place.fresh("update_fails_on_one")

    def act() -> None:
        with servers.without_files(which):
            _wait_until_not(engine, which)

    breaker = _Breaker(rng, act, _serving(engine))
    weights = directory / "weights"
    return _survive("update_fails_on_one", place, engine, breaker, directory=directory, weights=weights)


# ------------------------------------------------------------------------------------------------------------- rewards


def _bad_reward(how: str, costs_a_group: bool) -> Callable[[Place, random.Random], Outcome]:
    def fault(place: Place, rng: random.Random) -> Outcome:
        name = f"reward_{how}"
        directory = place.fresh(name)
        flag = directory / "flag"
        engine = EmbeddedEngine(kv_cache_tokens=4096, num_threads=1)
        breaker = _Breaker(rng, flag.touch, lambda: _replaced(breaker))

        def expect(counts: dict[str, Any]) -> str:
            right = counts["failed"] == 1 if costs_a_group else counts["failed"] <= 1
            return "" if right else f"{counts['failed']} groups failed of one bad reward"

        return _survive(name, place, engine, breaker, expect, directory=directory, reward=TurnsBad(how, str(flag)))

    fault.__doc__ = {
        "hang": "A reward never returns: its process is killed after two seconds and its group dropped.",
        "segfault": "A reward ends its process: another takes its place, its group is dropped.",
        "leak": "A reward keeps 30 MB a call: its process is replaced at 800 MB.",
    }[how]
    return fault


def half_character(place: Place, rng: random.Random) -> Outcome:
    """A reward raises half an emoji, and has it in its answers from then on: its group is dropped, samples are written,
    the recording is read back."""
    directory = place.fresh("half_character")
    flag, samples = directory / "flag", directory / "samples.jsonl"
    engine = EmbeddedEngine(kv_cache_tokens=4096, num_threads=1)
    breaker = _Breaker(rng, flag.touch, lambda: samples.exists() and "ud83d" in samples.read_text(encoding="utf-8"))

    def expect(counts: dict[str, Any]) -> str:
        for line in samples.read_text(encoding="utf-8").splitlines():
            json.loads(line)
        for version in versions(directory / "rollouts"):
            read_batch(directory / "rollouts", version)
        return "" if counts["failed"] == 1 else f"{counts['failed']} groups failed of one bad reward"

    settings: dict[str, Any] = {"directory": directory, "reward": TurnsBad("half", str(flag)), "samples": True}
    return _survive("half_character", place, engine, breaker, expect, **settings)


def reward_forks(place: Place, rng: random.Random) -> Outcome:
    """A reward forks children that come back with another number, by an exception or by an exit: every recorded reward
    is its own completion's, no group is dropped, no process is left."""
    directory = place.fresh("reward_forks")
    flag = directory / "flag"
    engine = EmbeddedEngine(kv_cache_tokens=4096, num_threads=1)
    breaker = _Breaker(rng, flag.touch, lambda: not flag.exists())

    def expect(counts: dict[str, Any]) -> str:
        recorded = directory / "rollouts"
        groups = [group for version in versions(recorded) for group in read_batch(recorded, version)]
        rolled_out = [one for group in groups for one in group.trajectories]
        own = [right_digits(one.metadata["answer"], one.metadata["completion"]) for one in rolled_out]
        wrong = [one for one, right in zip(rolled_out, own, strict=True) if abs(one.reward - right) > 1e-6]
        if wrong or not rolled_out:
            return f"{len(wrong)} of {len(rolled_out)} rewards are not their own completion's"
        return "" if counts["failed"] == 0 else f"{counts['failed']} groups failed"

    settings: dict[str, Any] = {"directory": directory, "reward": TurnsBad("fork", str(flag)), "samples": True}
    return _survive("reward_forks", place, engine, breaker, expect, **settings)


def _replaced(breaker: _Breaker) -> bool:
    assert breaker.fit is not None
    pool = breaker.fit.data._pool
    return pool is not None and pool.restarts > 0


# ----------------------------------------------------------------------------------------------- faults that end a run


def trainer_killed(place: Place, rng: random.Random) -> Outcome:
    """kill -9 of the trainer; another process resumes from the last checkpoint, on the same servers."""
    servers = _servers(place)
    directory, again = place.fresh("trainer_killed"), place.fresh("resumed")
    outcome = Outcome("trainer_killed", rng.uniform(0.0, WINDOW_S))
    seed = rng.randrange(1000)
    with _trainer(directory, servers, seed) as process:
        _wait_for(lambda: last_checkpoint(directory) is not None, process, directory)
        time.sleep(outcome.moment_s)
        traces = Traces(place.pids, root=process.pid)
        broke_at = time.monotonic()
        process.kill()
        process.wait()
    outcome.wrong += traces.left()
    checkpoint = last_checkpoint(directory)
    assert checkpoint is not None
    outcome.after_steps = step_of(checkpoint)
    with _trainer(
        again, servers, seed, "--resume", str(checkpoint), "--steps", str(step_of(checkpoint) + 4)
    ) as process:
        _wait_for((again / "trained.jsonl").exists, process, again)
        outcome.stall_s = outcome.healed_s = time.monotonic() - broke_at
        if process.wait(_HEAL_S) != 0:
            raise RuntimeError(f"the resumed run ended with code {process.returncode}: {_tail(again)}")
    trained = read_ledger(directory / "trained.jsonl", step_of(checkpoint)) + read_ledger(again / "trained.jsonl")
    outcome.steps = step_of(checkpoint) + 4
    outcome.accounts = accounts(trained, json.loads((again / "state.json").read_text()))
    outcome.wrong += outcome.accounts.pop("wrong")
    return outcome


def disk_full(place: Place, rng: random.Random) -> Outcome:
    """The file system that weights are exported to fills up; with space again, the run is resumed."""
    servers = _servers(place)
    directory = place.fresh("disk_full")
    with _small_disk(directory / "disk") as disk:
        stop, filler = threading.Event(), disk / "filler"
        engine = engine_on(servers.urls)
        breaker = _Breaker(rng, lambda: _fill(filler, stop), lambda: True)
        traces = breaker.traces = Traces(place.pids)
        settings: dict[str, Any] = {"weights": disk / "weights", "checkpoints": True, "seed": rng.randrange(1000)}
        fit = breaker.fit = Fit(directory / "run", engine, breaker.enough, **settings)
        outcome = Outcome("disk_full", breaker.moment_s)
        try:
            fit.run()
            outcome.wrong.append("the run did not notice the full disk")
        except Exception as error:
            if "are free; free space there" not in str(error):
                outcome.wrong.append(f"the error does not say what is the matter: {type(error).__name__}: {error}")
        finally:
            stop.set()
            breaker.join()
        first = accounts(fit.ledger.trained(), fit.state)
        outcome.wrong += [f"before the resume: {one}" for one in first["wrong"]]
        outcome.after_steps = breaker.after_steps
        filler.unlink(missing_ok=True)
        checkpoint = last_checkpoint(directory / "run")
        assert checkpoint is not None
        began = time.monotonic()
        more = step_of(checkpoint) + 4
        resumed = Fit(directory / "resumed", engine_on(servers.urls), max_steps=more, **settings).run(checkpoint)
        outcome.stall_s = outcome.healed_s = resumed.ledger.steps[0][0] - began
        trained = read_ledger(directory / "run" / "trained.jsonl", step_of(checkpoint)) + resumed.ledger.trained()
        outcome.steps = more
        outcome.accounts = accounts(trained, resumed.state)
        outcome.wrong += outcome.accounts.pop("wrong") + traces.left()
    return outcome


def _fill(filler: Path, stop: threading.Event) -> None:
    """Takes every byte, and every one that is freed, until told to stop."""
    with filler.open("wb", buffering=0) as file:
        while not stop.is_set():
            try:
                file.write(b"\0" * 4096)
            except OSError:
                time.sleep(0.001)


@contextmanager
def _small_disk(at: Path) -> Iterator[Path]:
    """A file system of 2 MB. Raises PermissionError, with the remedy, where we may mount none."""
    at.mkdir(parents=True)
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(at)], capture_output=True, text=True
    )
    if mounted.returncode:
        raise PermissionError(
            f"disk_full needs a file system of its own (root may mount one): {mounted.stderr.strip()}"
        )
    try:
        yield at
    finally:
        subprocess.run(["umount", "--lazy", str(at)], check=True, capture_output=True)


@contextmanager
def _trainer(directory: Path, servers: Servers, seed: int, *more: str) -> Iterator[subprocess.Popen[bytes]]:
    directory.mkdir(parents=True, exist_ok=True)
    command = [
        sys.executable,
        "-m",
        "tests.faults.fit",
        str(directory),
        "--urls",
        *servers.urls,
        "--seed",
        str(seed),
    ]
    own = {name: value for name, value in os.environ.items() if name not in _OURS}
    with (directory / "log").open("wb") as log:
        process = subprocess.Popen([*command, *more], cwd=ROOT, env=own, stdout=log, stderr=subprocess.STDOUT)
    try:
        yield process
    finally:
        if process.poll() is None:
            for one in [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]:
                os.kill(one.pid, signal.SIGKILL)
            process.wait()


def _wait_for(what: Callable[[], bool], process: subprocess.Popen[bytes], directory: Path) -> None:
    ends = time.monotonic() + _HEAL_S
    while not what():
        if process.poll() is not None:
            raise RuntimeError(f"the trainer ended with code {process.returncode}: {_tail(directory)}")
        if time.monotonic() > ends:
            raise TimeoutError(f"the trainer did not get there within {_HEAL_S:g} s: {_tail(directory)}")
        time.sleep(0.02)


def _tail(directory: Path) -> str:
    return (directory / "log").read_text(errors="replace")[-1500:]


def _servers(place: Place) -> Servers:
    if place.servers is None:
        raise ValueError("this fault needs two servers: Place(directory, servers)")
    return place.servers


WITH_SERVERS = {
    one.__name__: one for one in (kill_server, mute_server, slow_server, update_fails_on_one, trainer_killed, disk_full)
}
WITHOUT_SERVERS = {
    "reward_hang": _bad_reward("hang", True),
    "reward_segfault": _bad_reward("segfault", True),
    "reward_leak": _bad_reward("leak", False),
    "reward_forks": reward_forks,
    "half_character": half_character,
}
FAULTS: dict[str, Callable[[Place, random.Random], Outcome]] = {**WITH_SERVERS, **WITHOUT_SERVERS, **ENDINGS}
