"""`arborist look PATH...`: one page about a run, finished or going on, about recordings, or about several laid over
each other.

    arborist look runs/mine                             a run as far as it is
    arborist look runs/a runs/b --out both.html         two runs, a colour each
    arborist look runs/mine/rollouts                    batches that a run recorded (data.record)
    arborist look airline.npz                           recorded conversations; text needs --tokenizer and --system

Curves with 95% intervals, the split of a step's time, staleness and mismatch, rewards by part, prefix trees coloured by
advantage with the tokens behind every box, best, worst and surprising transcripts, held-out prompts step by step.

Promises: what is read is not changed but for `report.html` of a run directory; the page is one file, needs no network
and runs no text that a model wrote.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import get_args

from app.cli.runs.run_directory import naming
from callbacks.report.callback import PAGE
from datamodules.conversations.tokens import Workload


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `run`."""
    parser.add_argument("paths", type=Path, nargs="+", metavar="PATH", help="run directories or recordings")
    parser.add_argument("--out", type=Path, help=f"the page (default PATH/{PAGE} of one run, else runs/look/NAME.html)")
    parser.add_argument("--workload", choices=get_args(Workload), default="whole", help="how conversations are cut")
    parser.add_argument("--tokenizer", help="directory of a tokenizer, for recordings")
    parser.add_argument("--system", type=Path, help="*_system.json that precedes conversations as text")


def run(arguments: argparse.Namespace) -> None:
    """Writes the page and says where.

    Raises:
        ValueError: a path or an option that cannot be used, by name.
    """
    from callbacks.report.page import write_page
    from callbacks.report.recorded import read_recorded
    from callbacks.report.runs import is_run, read_run
    from datamodules.files.recording import versions

    paths: list[Path] = arguments.paths
    for path in paths:
        if not path.exists():
            raise FileNotFoundError(f"PATH: there is no '{path}'; correct the path")
        if (path / "config.yaml").is_file() and not is_run(path) and not versions(path):  # a run that has just begun
            raise ValueError(f"{path}: nothing was logged or recorded yet; try again later")
    live = [is_run(path) for path in paths]
    if all(live):
        for name in ("tokenizer", "system"):
            if getattr(arguments, name) is not None:
                raise ValueError(
                    f"--{name}: has no effect on run directories, whose text is kept decoded; leave it out"
                )
    found = [
        read_run(path) if is_live else read_recorded(path, arguments.workload, arguments.tokenizer, arguments.system)
        for path, is_live in zip(paths, live, strict=True)
    ]
    alone = len(paths) == 1 and live[0]
    name = paths[0].absolute().name.split(".")[0]
    out: Path = arguments.out or (paths[0] / PAGE if alone else Path("runs") / "look" / f"{name}.html")
    with naming(out, "--out"):
        out.parent.mkdir(parents=True, exist_ok=True)
        write_page(found, out)
    print(f"{out}: {out.stat().st_size / 2**20:.1f} MiB, opens offline")
