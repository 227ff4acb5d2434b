"""What it takes to begin an episode of an agent: a program of its own that imports everything, beside a fork.

    python -m benchmarks.rollouts.agents                   # two minutes; writes agents.json and .md
    python -m benchmarks.rollouts.agents --quick --out DIR

Each row is a function whose module imports what agents are written with, and which answers at once: what remains is the
way to it. Episodes of both kinds by turns, two at a time; seconds an episode, medians (least-most) of the repeats, CPU
seconds of all processes that had a part in it. The nursery's own imports, once a fit, have a column of their own.
Packages that are not installed are left out, and said.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import importlib.util
import resource
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil

from benchmarks.common.measure import spread
from benchmarks.common.records import write_json
from datamodules.processes.calls import ProcessCalls
from datamodules.processes.environment import InEnvironment
from datamodules.processes.forks import Forks
from datamodules.workflows.gateway.agents import VARIABLES, written_with

AGENTS = {
    "nothing": (),
    "openai": ("openai",),
    "anthropic": ("anthropic",),
    "openai-agents": ("agents",),
    "LangGraph": ("langgraph.prebuilt", "langchain_openai"),
    "litellm": ("litellm",),
}
_AT_ONCE = 2
_DEADLINE_S = 120.0
_SETTLED_S = 0.3  # a nursery takes leave of its forks every tenth of a second


async def row(name: str, imports: Sequence[str], folder: Path, episodes: int, repeats: int) -> dict[str, Any]:
    """Lists of CPU and wall seconds an episode, "alone" and "forked", and what the first fork took ("first")."""
    module = f"agent_{name.replace('-', '_')}"
    lines = [*(f"import {one}" for one in imports), "def answer(task):", "    return 1.0"]
    (folder / f"{module}.py").write_text("\n".join([*lines, ""]))
    function = importlib.import_module(module).answer
    kinds = {
        "alone": ProcessCalls({"agent": InEnvironment(function)}, _AT_ONCE, once=True),
        "forked": ProcessCalls(
            {"agent": InEnvironment(function)}, _AT_ONCE, once=True, forks=Forks(written_with(function), VARIABLES)
        ),
    }
    found: dict[str, Any] = {kind: {"cpu": [], "wall": []} for kind in kinds}
    try:
        found["first"] = (await _played(kinds["forked"], 1))["wall"]
        for repeat in range(repeats):
            for kind in (kinds, reversed(kinds))[repeat % 2]:
                for which, seconds in (await _played(kinds[kind], episodes)).items():
                    found[kind][which].append(seconds / episodes)
    finally:
        for one in kinds.values():
            one.stop()
    return found


async def _played(calls: ProcessCalls, episodes: int) -> dict[str, float]:
    cpu, begin = _cpu_seconds(), time.perf_counter()
    given = ({"OPENAI_API_KEY": "none"}, "task")
    await asyncio.gather(*(calls.call("agent", given, {}, _DEADLINE_S) for _ in range(episodes)))
    wall = time.perf_counter() - begin
    await asyncio.sleep(_SETTLED_S)
    return {"cpu": _cpu_seconds() - cpu, "wall": wall}


def _cpu_seconds() -> float:
    """Of this process, and of all those below it that run, or were taken leave of."""
    own, ended = (resource.getrusage(which) for which in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    found = own.ru_utime + own.ru_stime + ended.ru_utime + ended.ru_stime
    return found + sum(sum(one.cpu_times()[:4]) for one in psutil.Process().children(recursive=True))


def markdown(report: dict[str, Any]) -> str:
    lines = [
        "# How an episode of an agent begins",
        "",
        f"`{report['command']}`, {report['date']}, on {report['hardware']}: {report['episodes']} episodes of a function"
        f" that answers at once, {_AT_ONCE} at a time; seconds each, medians (least-most) of {report['repeats']}.",
        "",
        "| imports | CPU, a program of its own | CPU, forked | times less | wall, a program | wall, forked | first |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, one in report["rows"].items():
        cells = {(kind, which): spread(one[kind][which]) for which in ("cpu", "wall") for kind in ("alone", "forked")}
        said = [f"{cell['median']:.3f} ({cell['min']:.3f}-{cell['max']:.3f})" for cell in cells.values()]
        less = cells["alone", "cpu"]["median"] / cells["forked", "cpu"]["median"]
        lines.append(f"| {' | '.join([name, *said[:2], f'{less:.0f}', *said[2:], format(one['first'], '.2f')])} |")
    if report["left_out"]:
        lines += ["", f"Not installed: {', '.join(report['left_out'])}."]
    return "\n".join([*lines, ""])


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/rollouts"))
    parser.add_argument("--quick", action="store_true", help="toy size")
    parser.add_argument("--hardware", default="a CPU", help="what the report says the machine is")
    given = parser.parse_args(argv)
    episodes, repeats = (2, 1) if given.quick else (10, 5)
    there = {
        name: imports
        for name, imports in AGENTS.items()
        if all(importlib.util.find_spec(one.partition(".")[0]) is not None for one in imports)
    }
    report: dict[str, Any] = {"command": "python -m benchmarks.rollouts.agents", "hardware": given.hardware}
    report |= {"date": datetime.now(UTC).date().isoformat(), "episodes": episodes, "repeats": repeats, "rows": {}}
    report["left_out"] = [name for name in AGENTS if name not in there]
    given.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as name:
        sys.path.insert(0, name)
        for agent, imports in there.items():
            report["rows"][agent] = asyncio.run(row(agent, imports, Path(name), episodes, repeats))
            write_json(given.out / "agents.json", report)
            print(f"{agent}: done", flush=True)
        sys.path.remove(name)
    (given.out / "agents.md").write_text(markdown(report))
    print(markdown(report))
    return report


if __name__ == "__main__":
    main()
