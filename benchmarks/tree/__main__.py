"""Time, memory and exactness of the tree engine against dense, dense-leaf, path-at-a-time and sparse training.

    arborist bench tree --size 1x2 --sample 2 --threads 1 --out DIR          # a small Qwen3; needs ARBORIST_DATA
    arborist bench tree --model CONFIG --data rollouts.jsonl --out DIR       # your shape, your rollouts
    arborist bench tree --toy --out DIR                                      # seconds, synthetic

(`python -m benchmarks.tree` is the same.) Forward and backward of one batch, systems interleaved in one process
(benchmarks.common.systems says what they are); weights are random. Writes NAME.json, NAME.md and NAME.png into --out
after every case. "FLOP limit": FLOPs of a system over those of the tree; "of limit": how much of it the time ratio
reaches. The gradient error is the largest difference from dense over the largest gradient, on a few of the batch's
sequences. Ids beyond the model's vocabulary are taken modulo. The engine's first-use self-check is off here: it runs
once.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from transformers import PreTrainedModel

from benchmarks.common.measure import compare, environment, measure, seconds, table
from benchmarks.common.models import DTYPES, OptionError, build_model, describe
from benchmarks.common.systems import Settings, gradient_error, gradients, make_systems
from benchmarks.common.workloads import (
    DEFAULT_DATA,
    WORKLOADS,
    Case,
    conversations,
    make_case,
    parse_size,
    recorded_case,
)
from benchmarks.tree.report import Report
from datamodules.files.data_files import DataFileError, resolve

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Budget:
    """How often, on what, and until when a case is measured.

    Attributes:
        repeats: timed rounds. check: number of (shortest) sequences on which gradients are compared with
        dense.
        deadline: of `time.perf_counter`.
    """

    repeats: int
    check: int
    deadline: float


class TooLong(RuntimeError):
    """A case that would not end in time; the message says how long it would take."""


def run_case(
    model: PreTrainedModel, case: Case, settings: Settings, budget: Budget, progress: Progress
) -> dict[str, Any]:
    """Counts, times, memory and gradient errors of every system on one case.

    Raises:
        TooLong: one round of it would not end before the deadline; nothing was measured.
    """
    device = next(model.parameters()).device
    clock = "wall_seconds" if device.type == "cuda" else "cpu_seconds"
    systems = make_systems(model, case, settings)
    shortest = np.argsort(case.lengths, kind="stable")
    one = make_systems(model, case.pick([int(shortest[0])]), settings)[0]
    rate = one.flops / seconds(one.run, device)[0]
    rounds = 1 if budget.repeats == 1 and device.type == "cpu" else 2
    expected, left = rounds * sum(s.flops * s.share for s in systems) / rate, budget.deadline - time.perf_counter()
    if expected > left:
        raise TooLong(f"it needs about {expected / 60:.1f} minutes and {max(0.0, left) / 60:.1f} are left")
    progress(f"{len(case.sequences)} sequences, about {expected:.0f} s for {rounds} rounds")
    small = case.pick(shortest[: budget.check].tolist())
    errors = _errors(model, small, settings) if budget.check else {}
    rows = measure(model, systems, budget.repeats, budget.deadline, progress)
    for name, row in rows.items():
        row["gradient_error"] = errors.get(name)
    return {
        "case": case.name,
        "source": case.source,
        "sequences": len(case.sequences),
        "longest": int(case.lengths.max()),
        "repeats": len(rows["ours"][clock]["runs"]),
        "settings": {"chunk_tokens": settings.chunk_tokens, "live_tokens": settings.live_tokens},
        "checked_sequences": len(small.sequences),
        "checked_tokens": int(small.lengths.sum()),
        "clock": clock,
        "systems": rows,
        "against_ours": {c: compare(rows, c) for c in ("cpu_seconds", "wall_seconds")},
    }


def _errors(model: PreTrainedModel, case: Case, settings: Settings) -> dict[str, dict[str, float]]:
    """Gradient error of every system but dense against dense."""
    whole = Settings(settings.chunk_tokens, settings.live_tokens)
    found = {system.name: gradients(model, system) for system in make_systems(model, case, whole)}
    dense = found.pop("dense")
    return {name: gradient_error(got, dense) for name, got in found.items()}


def _cases(args: argparse.Namespace) -> list[tuple[str, Callable[[int], Case]]]:
    """(name, what makes it for a vocabulary) of every case, in order."""
    if args.data is not None and not args.data.endswith(".npz"):
        kind: Literal["file", "directory"] = "directory" if Path(args.data).expanduser().is_dir() else "file"
        path = resolve(args.data, "--data", kind)
        for name in ("size", "workloads"):
            if getattr(args, name) is not None:
                raise OptionError(
                    f"--{name} chooses among recorded conversations; {path} holds sequences, which run as they are:"
                    f" leave --{name} out (--first N takes the first ones)"
                )
        return [("recorded", lambda vocabulary: recorded_case(path, args.first, vocabulary))]
    if args.first is not None:
        raise OptionError("--first is for files of sequences; choose conversations by --size and --workloads")
    source, recorded = conversations(args.data, args.toy)

    def maker(workload: str, tasks: int, trials: int) -> Callable[[int], Case]:
        return lambda vocabulary: make_case(source, recorded, workload, tasks, trials, vocabulary)

    return [
        (f"{workload} {tasks}x{trials}", maker(workload, tasks, trials))
        for tasks, trials in args.size or [(1, 2)]
        for workload in args.workloads or WORKLOADS
    ]


def _budget(text: str) -> int | str:
    if text == "auto":
        return text
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected 'auto' or a number of tokens, got {text!r}")
    return int(text)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `run`."""
    add = parser.add_argument
    add("--model", metavar="CONFIG", help="directory with a config.json, or a JSON file (default: a small Qwen3 shape)")
    add("--vocabulary", type=int, metavar="N", help="of the model, instead of the configuration's own")
    add("--dtype", choices=list(DTYPES), default="float32", help="of weights and passes (default float32)")
    add("--device", choices=["cpu", "cuda"], default="cpu", help="where it runs (default cpu)")
    add(
        "--data",
        metavar="FILE",
        help="recorded conversations (npz), or sequences (jsonl, parquet, npz, a directory of recorded batches);"
        f" default {DEFAULT_DATA}, else synthetic conversations",
    )
    add("--size", type=parse_size, nargs="+", help="of conversations: tasks x trials, such as 1x2 4x2 (default 1x2)")
    add("--workloads", nargs="+", choices=WORKLOADS, help="of conversations (default: all)")
    add("--first", type=int, metavar="N", help="of a file of sequences: its first N")
    add("--repeats", type=int, default=3, metavar="N", help="timed rounds of a case (default 3)")
    add(
        "--minutes",
        type=float,
        default=15.0,
        metavar="M",
        help="what would not end in this time is left out, by name (default 15)",
    )
    add(
        "--sample",
        type=int,
        default=0,
        metavar="N",
        help="sequences that stand for all in dense and dense-leaf (default 0: run all)",
    )
    add(
        "--check",
        type=int,
        default=3,
        metavar="N",
        help="sequences on which gradients are compared with dense (default 3; 0: none)",
    )
    add("--chunk", type=_budget, default="auto", metavar="N", help="chunk_tokens: most in one forward (default auto)")
    add(
        "--live",
        type=_budget,
        default="auto",
        metavar="N",
        help="live_tokens: most kept at once (default auto)",
    )
    add("--threads", type=int, metavar="N", help="of torch; 1 gives steady CPU seconds on a busy machine")
    add("--hardware", default="a CPU", help="what the report says the machine is (default a CPU)")
    add("--toy", action="store_true", help="a tiny model on synthetic conversations, in seconds")
    add("--out", metavar="DIR", help="folder for NAME.json, NAME.md and NAME.png")
    add("--name", default="tree", help="of the report (default tree)")
    add("--append", action="store_true", help="keep the cases that a report of this name already has")


def run(args: argparse.Namespace, command: str = "arborist bench tree") -> dict[str, Any]:
    """Measures, prints, and writes the report, which is also returned.

    Raises:
        OptionError: an option out of range or without effect, naming it.
        DataFileError, RecordedDataError, RecordingError: `--data` that is not there or cannot be read.
    """
    begin = time.perf_counter()
    _check(args)
    if args.threads or args.toy:
        torch.set_num_threads(args.threads or 1)
    settings = Settings(args.chunk, args.live, args.sample)
    if args.toy:
        settings = Settings(64, 96, 2)
    cases = _cases(args)
    model = build_model(args.model, args.toy, args.vocabulary, DTYPES[args.dtype], args.device)
    report = Report(
        _command(command, args),
        args.hardware,
        environment(torch.device(args.device)),
        describe(model, args.dtype),
        Path(args.out) if args.out else None,
        args.name,
    )
    if args.append:
        report.keep_earlier()
    report.unfinished = [name for name, _ in cases]
    for name, make in cases:

        def progress(line: str, name: str = name) -> None:
            print(f"[{time.perf_counter() - begin:6.0f} s] {name}: {line}", file=sys.stderr, flush=True)

        try:
            case = make(model.config.get_text_config().vocab_size)
        except ValueError as error:
            raise OptionError(f"--size: {error}") from None
        budget = Budget(args.repeats, args.check, begin + 60 * args.minutes)
        try:
            result = run_case(model, case, settings, budget, progress)
        except TooLong as error:
            report.left_out[name] = str(error)
            print(f"{name} is left out: {error}; raise --minutes or lower --sample", file=sys.stderr)
        else:
            print(f"## {name}\n\n{table(result, result['clock'])}", flush=True)
            report.add(result)
        report.unfinished.remove(name)
        report.write()  # after every case: a long run that is stopped leaves what it has
    return report.data()


def _check(args: argparse.Namespace) -> None:
    for name, least in (("repeats", 1), ("check", 0), ("sample", 0), ("threads", 1), ("first", 1)):
        value = getattr(args, name)
        if value is not None and value < least:
            raise OptionError(f"--{name} must be at least {least}, got {value}")
    if not args.minutes > 0:
        raise OptionError(f"--minutes must be above 0, got {args.minutes}")
    if args.device == "cuda" and not torch.cuda.is_available():
        raise OptionError("--device cuda: there is no CUDA device; leave it out to run on the CPU")
    if args.append and not args.out:
        raise OptionError("--append has no effect without --out")
    if args.toy:
        for name in ("model", "data", "vocabulary", "sample"):
            if getattr(args, name):
                raise OptionError(f"--{name} has no effect with --toy, which brings its own; leave one of them out")
        if (args.chunk, args.live) != ("auto", "auto"):
            raise OptionError("--chunk and --live have no effect with --toy, which brings its own; leave them out")


def _command(command: str, args: argparse.Namespace) -> str:
    """The command line again, without paths and descriptions."""
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    words = [command]
    for name, value in vars(args).items():
        if name in ("hardware", "out", "name", "append", "verb") or value == parser.get_default(name):
            continue
        if name in ("model", "data"):
            value = Path(value).name
        flag = "--" + name
        values = value if isinstance(value, list) else [value]
        texts = [f"{v[0]}x{v[1]}" if isinstance(v, tuple) else str(v) for v in values]
        words.append(flag if value is True else f"{flag} {' '.join(texts)}")
    return " ".join(words)


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """`run` on a command line of its own; a wrong option ends in exit code 2."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.tree", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_arguments(parser)
    try:
        return run(parser.parse_args(argv), parser.prog)
    except (ValueError, DataFileError) as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
