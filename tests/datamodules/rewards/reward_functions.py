"""Rewards that misbehave on demand, for tests: the completion (or the prompt's answer) says how."""

from __future__ import annotations

import ctypes
import os
import sys
import time

from datamodules.prompts.base import Prompt
from datamodules.rewards.functions import Reward

_LEAKED: list[bytes] = []


def misbehave(prompt: Prompt, completion: str) -> Reward:
    """What the first word of the prompt's metadata["reward"], or of the completion, asks for; else its length."""
    how = prompt.metadata.get("reward", completion)
    match how.split("/"):
        case ["nan"]:
            return float("nan")
        case ["inf"]:
            return float("inf")
        case ["raise"]:
            raise RuntimeError("no such answer key")
        case ["exit"]:
            sys.exit(3)
        case ["die"]:
            os._exit(3)
        case ["segfault"]:
            ctypes.string_at(0)
        case ["hang"]:
            while True:
                time.sleep(1.0)
        case ["hog"]:  # takes memory and never returns
            held = []
            while True:
                held.append(b"x" * 10**7)
                time.sleep(0.005)
        case ["leak"]:  # returns, but keeps 40 MB
            _LEAKED.append(b"x" * (40 * 10**6))
            return float(os.getpid())
        case ["parts"]:
            return 0.75, {"correct": 1.0, "short": 0.5}
        case ["words"]:
            return 0.5, {"correct": 1.0, "feedback": "line 3: \ud83d"}
        case ["too many words"]:
            return 0.5, {"feedback": "x" * 20_001}
        case ["bad part"]:
            return 1.0, {"correct": 1.0, "short": float("nan")}
        case ["once", how_first, *path]:  # misbehaves the first time only, as the file remembers
            path = "/" + "/".join(path)
            if not os.path.exists(path):
                open(path, "w").close()
                return misbehave(Prompt(id=prompt.id), how_first)
        case ["pid"]:
            return float(os.getpid())
        case ["slow pid"]:
            time.sleep(0.1)
            return float(os.getpid())
        case ["sleep"]:
            time.sleep(0.05)
    return float(len(completion))


def length(prompt: Prompt, completion: str) -> float:
    """Something a model without training differs in."""
    return float(len(completion))


class Scaled:
    """A callable object, as `class_path` / `init_args` make it."""

    def __init__(self, factor: float = 2.0) -> None:
        self.factor = factor

    def __call__(self, prompt: Prompt, completion: str) -> float:
        return self.factor * float(completion == prompt.answer)


class SlowToPrepare:
    """Needs a second once."""

    def __init__(self) -> None:
        self.ready = False

    def prepare(self) -> None:
        time.sleep(1.0)
        self.ready = True

    def __call__(self, prompt: Prompt, completion: str) -> float:
        return float(self.ready)


class PreparesOnce:
    """Its first worker is ready at once; the others say so in `folder` and never are."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def prepare(self) -> None:
        try:
            open(os.path.join(self.folder, "first"), "x").close()
        except FileExistsError:
            open(os.path.join(self.folder, "again"), "w").close()
            time.sleep(1000)

    def __call__(self, prompt: Prompt, completion: str) -> float:
        return 1.0


class FailsToLoad:
    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return _refuse, ()


def _refuse() -> None:
    raise ImportError("licence server unreachable")
