"""The three workloads the benchmarks run: training sequences of recorded (or made-up) agent conversations.

    python -m benchmarks.common.workloads [--data FILE] [--size 1x2] [--vocabulary 8192]   # prints what a size contains

`turns`, `whole` and `think` are those of `datamodules.conversations.tokens`; scored are the assistant turns alone. The
recordings come from --data FILE or ${ARBORIST_DATA}/tau/airline_tokens.npz; without either, conversations of the same
shape (one system prompt, trials of a task that part at the first turn) are drawn from a seed, and results say so.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import get_args

import numpy as np
import numpy.typing as npt

from app.tree import PrefixTree
from datamodules.conversations.sequence_files import load_sequences
from datamodules.conversations.tokens import Conversation, Workload, load_npz
from datamodules.files.data_files import DataFileError, resolve

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

DEFAULT_DATA = "${ARBORIST_DATA}/tau/airline_tokens.npz"
WORKLOADS: tuple[str, ...] = get_args(Workload)


@dataclass(frozen=True, eq=False)
class Case:
    """One batch: N sequences (token ids below the vocabulary) and, for each, which positions its loss needs.

    `source`: name of the recorded file, or "synthetic". `tasks`, `trials`: 0 where sequences are not of tasks.
    `weights`: float64 [N], the sequences' factors in the loss.
    """

    workload: str
    tasks: int
    trials: int
    source: str
    sequences: tuple[Ints, ...]
    scored: tuple[Bools, ...]
    weights: npt.NDArray[np.float64]

    @property
    def name(self) -> str:
        return self.workload if not self.tasks else f"{self.workload} {self.tasks}x{self.trials}"

    @property
    def lengths(self) -> Ints:
        return np.array([len(s) for s in self.sequences], np.int64)

    def tree(self, share: str = "tree") -> PrefixTree:
        return PrefixTree.build(self.sequences, self.scored, share=share)

    def pick(self, indices: Sequence[int]) -> Case:
        """The case with these sequences only."""
        sequences, scored = tuple(self.sequences[i] for i in indices), tuple(self.scored[i] for i in indices)
        weights = self.weights[list(indices)]
        return Case(self.workload, self.tasks, self.trials, self.source, sequences, scored, weights)


def conversations(data: str | None = None, toy: bool = False) -> tuple[str, list[Conversation]]:
    """(source, conversations): recorded ones, or synthetic ones when `toy`, or when no `data` is named and
    ARBORIST_DATA is not set.

    Raises:
        DataFileError: a named file that does not exist, or none of the default's name in ARBORIST_DATA.
    """
    if toy:
        return "synthetic", synthetic(system=48, task=16, turns=(2, 4), message=(8, 16))
    try:
        path = resolve(data or DEFAULT_DATA, "--data")
    except DataFileError:
        if data is not None or os.environ.get("ARBORIST_DATA"):
            raise
        print(f"no recorded conversations ({DEFAULT_DATA}); using synthetic ones", file=sys.stderr)
        return "synthetic", synthetic()
    return path.name, _load(str(path))


def make_case(
    source: str, recorded: Sequence[Conversation], workload: str, tasks: int, trials: int, vocabulary: int
) -> Case:
    """The first `trials` trials of the first `tasks` tasks, ids modulo `vocabulary`, loss weights drawn from a seed.

    Raises:
        ValueError: fewer tasks or trials than asked for, naming the numbers.
    """
    by_task: dict[str, list[Conversation]] = {}
    for conversation in recorded:
        by_task.setdefault(conversation.task, []).append(conversation)
    names = sorted(by_task, key=lambda name: (len(name), name))
    if len(names) < tasks or any(len(by_task[name]) < trials for name in names[:tasks]):
        fewest = min((len(group) for group in by_task.values()), default=0)
        raise ValueError(f"size {tasks}x{trials}: {source} has {len(names)} tasks of at least {fewest} trials")
    chosen = [c for name in names[:tasks] for c in sorted(by_task[name], key=lambda c: c.trial)[:trials]]
    pairs = [pair for c in chosen for pair in c.sequences(workload)]  # type: ignore[arg-type]
    sequences = tuple(tokens.astype(np.int64) % vocabulary for tokens, _ in pairs)
    scored = tuple(mask for _, mask in pairs)
    return Case(workload, tasks, trials, source, sequences, scored, _weights(scored))


def recorded_case(path: Path, first: int | None, vocabulary: int) -> Case:
    """The first sequences (None: all) of a file that holds sequences, ids modulo `vocabulary`; loss weights as in
    `make_case`. Raises RecordedDataError and RecordingError (`datamodules.conversations.sequence_files`)."""
    found = load_sequences(path)
    sequences = tuple(tokens.astype(np.int64) % vocabulary for tokens in found.tokens[:first])
    scored = tuple(found.trained[:first])
    return Case("recorded", 0, 0, path.name, sequences, scored, _weights(scored))


def _weights(scored: Sequence[Bools]) -> npt.NDArray[np.float64]:
    """One factor a sequence, drawn from a seed, of a size that makes the loss a mean over scored tokens."""
    drawn: npt.NDArray[np.float64] = np.random.default_rng(0).normal(size=len(scored))
    return drawn / max(1, sum(int(mask.sum()) for mask in scored))


def synthetic(
    tasks: int = 8,
    trials: int = 4,
    system: int = 3_800,
    task: int = 60,
    turns: tuple[int, int] = (6, 20),
    message: tuple[int, int] = (40, 320),
    seed: int = 0,
) -> list[Conversation]:
    """Conversations that share a prompt of `system` tokens, and per task `task` more; after that the trials part.

    `turns`, `message`: fewest and most generated turns of a conversation, and tokens of one message.
    """
    rng = np.random.default_rng(seed)
    prompt = rng.integers(0, 150_000, system)
    made = []
    for t in range(tasks):
        opening = rng.integers(0, 150_000, task)
        for trial in range(trials):
            pieces, starts, ends = [prompt, opening], [], []
            length = system + task
            for _ in range(rng.integers(turns[0], turns[1] + 1)):
                sizes = rng.integers(message[0], message[1] + 1, 2)  # a generated turn, then what answers it
                starts.append(length)
                ends.append(length + sizes[0])
                pieces.append(rng.integers(0, 150_000, sizes.sum()))
                length += int(sizes.sum())
            spans = np.array(starts), np.array(ends), np.arange(len(starts))
            made.append(Conversation(str(t), trial, "none", 0.0, "synthetic", np.concatenate(pieces), *spans))
    return made


def parse_size(text: str) -> tuple[int, int]:
    """ "1x2" -> (1 task, 2 trials); for argparse."""
    tasks, cross, trials = text.partition("x")
    if not (cross and tasks.isdigit() and trials.isdigit() and int(tasks) and int(trials)):
        raise argparse.ArgumentTypeError(f"expected TASKSxTRIALS such as 1x2, got {text!r}")
    return int(tasks), int(trials)


def parser_of(program: str, about: str, size_of: str = "") -> argparse.ArgumentParser:
    """What every benchmark on one of these workloads takes: --data and --size; `about`: the module's docstring."""
    parser = argparse.ArgumentParser(prog=f"python -m {program}", description=about.split("\n\n")[0])
    parser.add_argument("--data", help=f"token arrays (default {DEFAULT_DATA}, else synthetic conversations)")
    parser.add_argument("--size", type=parse_size, default=(1, 2), help=f"{size_of}tasks x trials, such as 1x2")
    return parser


def add_run(parser: argparse.ArgumentParser, threads: int | None = None) -> None:
    """What every benchmark that times or checks passes takes: --threads, --toy and --out."""
    parser.add_argument("--threads", type=int, default=threads, help="of torch; 1 gives steady CPU seconds")
    parser.add_argument("--toy", action="store_true", help="a tiny model on synthetic conversations, in seconds")
    parser.add_argument("--out", help="folder for the results")


@cache
def _load(path: str) -> list[Conversation]:
    return load_npz(path)


def main(argv: Sequence[str] | None = None) -> None:
    parser = parser_of("benchmarks.common.workloads", __doc__)
    parser.add_argument("--vocabulary", type=int, default=8192)
    args = parser.parse_args(argv)
    source, recorded = conversations(args.data)
    for workload in WORKLOADS:
        tasks, trials = args.size
        case = make_case(source, recorded, workload, tasks, trials, args.vocabulary)
        tree = case.tree()
        print(
            f"{case.name}: {tree.num_sequences} sequences, {tree.num_dense_tokens:,} dense, {tree.num_leaf_tokens:,} "
            f"dense-leaf, {tree.num_tokens:,} tree tokens ({source})"
        )


if __name__ == "__main__":
    main()
