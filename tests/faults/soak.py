"""Faults at random moments of real runs, many times each, with exact accounts after every one.

    make soak                                                    # ten times each, about half an hour on two cores
    python -m tests.faults.soak --times 1 --only kill_server       # seconds to minutes

Writes soak.json and soak.md (--name) into --out after every run; faults that are not asked for stay as the file has
them. Exit code 1 when a run lost a group, trained
one twice, left something behind or did not go on. Faults: tests.faults.faults; two SGLang servers (`make sglang`)
last for the whole soak.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from benchmarks.common.records import write_json

if TYPE_CHECKING:  # reward workers import this module: it must stay light
    from tests.faults.outcome import Place

_QUIET = ("lightning.pytorch", "lightning.fabric", "lightning.pytorch.utilities.rank_zero")
_QUIET += ("lightning.fabric.utilities.seed", "lightning.fabric.utilities.distributed")


def soak(place: Place, faults: Sequence[str], times: int, seed: int, report: Any) -> None:
    """Runs every fault `times` times; `report(name, outcomes)` after each."""
    from tests.faults.faults import FAULTS
    from tests.faults.outcome import Outcome

    for name in faults:
        outcomes: list[dict[str, Any]] = []
        for number in range(times):
            began, rng = time.monotonic(), random.Random(f"{seed}/{name}/{number}")
            try:
                outcome = FAULTS[name](place, rng)
            except Exception as error:
                logging.exception("%s", name)
                outcome = Outcome(name, 0.0, wrong=[f"{type(error).__name__}: {error}"])
            outcomes.append(outcome.plain() | {"seconds": time.monotonic() - began, "load": os.getloadavg()[0]})
            line = "as it should" if not outcome.wrong else f"WRONG: {outcome.wrong}"
            print(f"{name} {number + 1}/{times}: {outcomes[-1]['seconds']:.0f} s, {line}", flush=True)
            report(name, outcomes)


def markdown(result: dict[str, Any]) -> str:
    from tests.faults.faults import FAULTS

    runs = [one for outcomes in result["faults"].values() for one in outcomes]
    bad = [one for one in runs if one["wrong"]]
    loads = [one["load"] for one in runs]
    commands = ", ".join(f"`{one}`" for one in dict.fromkeys(result["commands"].values()))
    lines = [
        "# Soak: faults at random moments of real runs",
        "",
        f"{commands}: {len(runs)} runs, {len(bad)} of them not as they should be. Quickstart's task with a"
        f" tiny model, two real SGLang servers on CPU (embedded engine for rewards) and the trainer on"
        f" {result['cores']} cores; load average during the runs {median(loads):.1f}, at most {max(loads):.1f}"
        " (other work on the machine stretches all seconds here).",
        "",
        "Groups are summed over the runs of a fault: admitted = trained + dropped + requeued + running + ready, every"
        " prompt dealt is in exactly one place. *In stream*: playing or ready when the run ended, so in its checkpoint."
        " *Healed*: from the fault until everything works again (of runs that end: until the first step of the resumed"
        " one). *Pause*: longest time between two optimizer steps from the fault on. Median (most).",
        "",
        "| fault | runs | right | admitted | trained | stale | failed | requeued | in stream | amiss | healed (s) |"
        " pause (s) |",
        "|" + "---|" * 12,
    ]
    for name, outcomes in result["faults"].items():
        total = {
            key: sum(one["accounts"].get(key, 0) for one in outcomes)
            for key in ("admitted", "trained", "dropped_stale", "failed", "requeued", "in_stream")
        }
        healed, pause = ([one[key] for one in outcomes] for key in ("healed_s", "stall_s"))
        right = sum(not one["wrong"] for one in outcomes)
        cells = [name, len(outcomes), right, *total.values(), 0 if right == len(outcomes) else "see below"]
        cells += [f"{median(values):.1f} ({max(values):.1f})" for values in (healed, pause)]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    lines += ["", *(f"- `{name}`: {' '.join((FAULTS[name].__doc__ or '').split())}" for name in result["faults"])]
    lines += [f"- not as it should be, {one['fault']}: {'; '.join(one['wrong'])}" for one in bad]
    if result["unfinished"]:
        lines += ["", f"Stopped before: {', '.join(result['unfinished'])}."]
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    from benchmarks.common.servers import Servers
    from modules import ModelSource, build_model
    from tests.faults.faults import FAULTS, WITH_SERVERS
    from tests.faults.fit import CONTEXT, MODEL
    from tests.faults.outcome import Place

    parser = argparse.ArgumentParser(prog="python -m tests.faults.soak", description=__doc__.split("\n\n")[0])
    parser.add_argument("--times", type=int, default=10, help="runs of each fault")
    parser.add_argument("--only", nargs="+", choices=list(FAULTS), help="these faults")
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/faults"))
    parser.add_argument("--name", default="soak")
    args = parser.parse_args(argv)
    if args.times < 1:
        parser.error("--times: must be at least 1")
    for name in _QUIET:
        logging.getLogger(name).setLevel(logging.ERROR)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs, and theirs, would ignore it
    faults = args.only or list(FAULTS)
    given = [f"--times {args.times}"] * (args.times != 10) + [f"--only {' '.join(faults)}"] * bool(args.only)
    file = args.out / f"{args.name}.json"
    result: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {"commands": {}, "faults": {}}
    result |= {"cores": os.cpu_count(), "seed": args.seed, "unfinished": faults}
    command = " ".join(["python -m tests.faults.soak", *given])
    for name in faults:
        result["commands"][name] = command
        result["faults"].pop(name, None)

    def report(name: str, outcomes: list[dict[str, Any]]) -> None:
        result["faults"][name] = outcomes
        result["unfinished"] = [
            f"{one} ({len(result['faults'].get(one, []))} of {args.times} runs)"
            for one in faults
            if len(result["faults"].get(one, [])) < args.times
        ]
        args.out.mkdir(parents=True, exist_ok=True)
        write_json(file, result)
        (args.out / f"{args.name}.md").write_text(markdown(result))

    with tempfile.TemporaryDirectory(prefix="arborist-soak-") as made:
        place = Place(Path(made))
        try:
            if set(faults) & set(WITH_SERVERS):
                build_model(ModelSource(config=MODEL)).save_pretrained(place.directory / "model")
                place.servers = Servers(place.directory / "model", CONTEXT, place.directory).start()
            soak(place, faults, args.times, args.seed, report)
        finally:
            if place.servers is not None:
                place.servers.close()
    return int(any(one["wrong"] for outcomes in result["faults"].values() for one in outcomes))


if __name__ == "__main__":
    sys.exit(main())
