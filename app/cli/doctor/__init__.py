"""Checks whether this machine, or a whole cluster, can run Arborist, or asks a run that hangs where it is.

    arborist doctor               one line a check; what is wrong comes with its remedy; exit code 1 if something is
    arborist doctor --servers URL ...
                                  also whether these inference servers answer
    arborist doctor --dump PID    stacks of all threads of all ranks of that run, pending prompts, gate and tasks, in
                                  a file in the run directory, whose path is printed
    torchrun ... -m app doctor --cluster [--servers URL ...]
    srun ... python -m app doctor --cluster
                                  the ranks of a job, started as a run would be: do they meet, with the same versions
                                  and clocks, does each see what the others write, how fast do they add gradients up,
                                  does rank 0 reach the servers

Versions are compared with pyproject.toml, so there is one support matrix. Checks look and measure; none changes
anything.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from app.cli.doctor.dump import dump
from app.cli.doctor.findings import print_findings
from app.cli.doctor.machine import examine

_DUMP_S, _CLUSTER_S = 15.0, 120.0
_FOLDER = Path("runs")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `run`."""
    parser.add_argument("--dump", type=int, metavar="PID", help="any process of a run that hangs")
    parser.add_argument("--cluster", action="store_true", help="under torchrun or srun: examines all ranks together")
    parser.add_argument("--servers", nargs="+", default=[], metavar="URL", help="inference servers of a run")
    parser.add_argument("--folder", type=Path, help=f"with --cluster: what all ranks share (default: {_FOLDER})")
    parser.add_argument(
        "--deadline",
        type=float,
        metavar="SECONDS",
        help=f"for the answers to --dump and of --servers (default: {_DUMP_S:g}), or each wait of --cluster (default:"
        f" {_CLUSTER_S:g})",
    )


def run(args: argparse.Namespace) -> int:
    """Does what was asked for and prints it; returns the exit code.

    Raises:
        ValueError: an option that cannot be used, by name.
    """
    if args.deadline is not None and args.deadline <= 0:
        raise ValueError(f"--deadline: must be above 0 seconds, got {args.deadline:g}")
    if args.cluster and args.dump is not None:
        raise ValueError("--cluster has no effect with --dump, which asks a run that is there: leave one of them out")
    if args.servers and args.dump is not None:
        raise ValueError("--servers has no effect with --dump, which asks a run that is there: leave one of them out")
    if args.folder and not args.cluster:
        raise ValueError("--folder has no effect without --cluster: start this under torchrun or srun, with it")
    if args.deadline is not None and not (args.cluster or args.servers) and args.dump is None:
        raise ValueError(
            "--deadline has no effect without --cluster, --servers or --dump: add one of them, or leave it out"
        )
    if args.dump is not None:
        print(dump(args.dump, args.deadline or _DUMP_S))
        return 0
    if args.cluster:
        from app.cli.doctor.cluster import examine_cluster

        return examine_cluster(args.folder or _FOLDER, args.servers, args.deadline or _CLUSTER_S)
    findings = list(examine())
    if args.servers:
        from app.cli.doctor.cluster import asked_servers

        findings += asked_servers(args.servers, args.deadline or _DUMP_S)
    return print_findings(findings)
