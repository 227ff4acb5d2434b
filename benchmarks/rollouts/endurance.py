"""What does a run hold more of, the longer it lasts: memory, files, threads, processes, seconds a step?

    python -m benchmarks.rollouts.endurance                    # 25 minutes a case, two at a time; needs `make sglang`
    python -m benchmarks.rollouts.endurance --minutes 1 --only sums --out DIR

Cases are whole runs (`python -m app fit`) with validation, checkpoints, report and coach, on the quickstart's model:
`sums`, the quickstart on the embedded engine; `agent`, a function written with the `openai` package, forked for each
episode; `tools`, the same task as a `ToolWorkflow`; `ranks`, the quickstart on two ranks; `servers`, on an SGLang
server. All processes of a run are looked at every few seconds: the memory that is theirs alone, open files, threads.
What grows is fitted to the last third, when all has been loaded, every buffer has had its largest batch, and the first
checkpoint, after ten minutes, has been written: the median slope over pairs of looks, in steps (Theil and Sen's). Runs
are beside each other, so that seconds a step are rough.

Writes endurance.json, .md and .png into --out after every case.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import psutil
import torch
import yaml

from benchmarks.common.measure import environment
from benchmarks.common.records import write_json
from benchmarks.learning import door
from benchmarks.learning.__main__ import ROOT, run

CASES = ("sums", "agent", "tools", "ranks", "servers")
"""In the order in which they run."""
_SETTLED_S = 30.0  # a process that has lived as long stays: agents end sooner
_ENDS_S = 180.0


def config(case: str, seed: int, start: Path, given: argparse.Namespace) -> dict[str, Any]:
    """Of a run without an end, on the model in `start`: that of the quickstart or, for agents, of `learning.door`."""
    if case in ("agent", "tools"):
        shape = argparse.Namespace(steps=1, every=given.every, lr=2e-4, held_out=32, batch_size=4, group_size=4)
        made = door.rl_config({"tools": "workflow"}.get(case, case), seed, start, shape)
    else:
        made = yaml.safe_load((ROOT / "configs/quickstart.yaml").read_text())
        made["model"]["init_args"]["model"] = {"path": str(start)}
        made["model"]["init_args"]["optimizer"]["init_args"]["lr"] = 2e-4
        made["trainer"]["val_check_interval"] = given.every
        made["data"]["init_args"] |= {"batch_size": 16, "group_size": 4}
        made["data"]["init_args"]["validation"]["prompts"]["init_args"]["size"] = 32
    made["trainer"] |= {"max_steps": -1, "accelerator": "cpu", "enable_checkpointing": True, "callbacks": []}
    del made["model"]["init_args"]["lr_scheduler"]  # ends with a run
    made["data"]["init_args"]["batches_per_epoch"] = 100  # ends of epochs belong to a long run
    if case == "ranks":
        made["trainer"]["devices"] = 2
    if case == "servers":
        over = yaml.safe_load((ROOT / "configs/quickstart_sglang.yaml").read_text())
        made["data"]["init_args"]["engine"] = over["data"]["init_args"]["engine"]
    return made


def watched(case: str, run_dir: Path, start: Path, given: argparse.Namespace) -> list[dict[str, Any]]:
    """Looks at a run until its time is up, when it is asked to end: it has to save, and to end by itself.

    Returns:
        A dict each: seconds, step, and processes: for each that stays its pid, kind, MiB, files and threads.

    Raises:
        RuntimeError: the run ended by itself, or did not when it should, naming its log.
    """
    shutil.rmtree(run_dir, ignore_errors=True)
    run_dir.mkdir(parents=True)
    (run_dir / "given.yaml").write_text(yaml.safe_dump(config(case, 1, start, given)))
    command = [sys.executable, "-m", "app", "fit", "--config", str(run_dir / "given.yaml"), "--run_dir", str(run_dir)]
    looks: list[dict[str, Any]] = []
    with (run_dir / "output.log").open("w") as log:
        threads = {"OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(
            command, cwd=ROOT, env=os.environ | threads, stdout=log, stderr=log, start_new_session=True
        )
        try:
            root, began = psutil.Process(process.pid), time.perf_counter()
            while process.poll() is None and time.perf_counter() - began < 60 * given.minutes:
                time.sleep(given.look_s)
                step = last_step(run_dir / "metrics.csv")
                if step > 0:
                    looks.append({"seconds": time.perf_counter() - began, "step": step, **look(root)})
            if process.poll() is None:
                process.terminate()
                process.wait(_ENDS_S)
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"{case}: not over {_ENDS_S:.0f} s after SIGTERM; see {run_dir}/output.log") from None
        finally:
            if process.poll() is None:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
    if len(looks) < 8 or not (run_dir / "report.html").exists():
        raise RuntimeError(f"{case}: {len(looks)} looks, exit code {process.returncode}; see {run_dir}/output.log")
    return looks


def look(root: psutil.Process) -> dict[str, Any]:
    """The processes of a run that stay, and how many there are in all."""
    found, count = [], 0
    for process in (root, *root.children(recursive=True)):
        with suppress(psutil.Error):  # it has ended meanwhile
            count += 1
            if time.time() - process.create_time() < _SETTLED_S:
                continue
            held = process.memory_full_info().uss / 2**20
            found.append([process.pid, kind(process, root), held, process.num_fds(), process.num_threads()])
    return {"count": count, "processes": found}


def kind(process: psutil.Process, root: psutil.Process) -> str:
    """What a process of a run is for, by what it was started as."""
    line = " ".join(process.cmdline())
    if process == root:
        return "trainer"
    for name, mark in {"server": "sglang", "rank": "fit --config"}.items():
        if mark in line:
            return name
    return "worker"


def last_step(metrics: Path) -> int:
    """The last one that is logged; -1 where there is none."""
    with suppress(OSError, ValueError, IndexError):
        lines = metrics.read_text().split("\n")[:-1]
        return int(lines[-1].split(",")[lines[0].split(",").index("step")])
    return -1


def slope(points: Sequence[tuple[float, float]]) -> float:
    """The median slope over all pairs of (x, y); 0 where x never changes."""
    found = [(b[1] - a[1]) / (b[0] - a[0]) for a, b in combinations(points, 2) if a[0] != b[0]]
    return statistics.median(found) if found else 0.0


def outcome(looks: list[dict[str, Any]]) -> dict[str, Any]:
    """Of each kind of process: MiB, files and threads before and at the end of the last third, and what it
    grew by in 1,000 steps."""
    last = looks[2 * len(looks) // 3 :]
    kinds: dict[str, Any] = {}
    for name in dict.fromkeys(one[1] for at in last for one in at["processes"]):
        sums = [
            (at["step"], [sum(column) for column in zip(*(one[2:] for one in at["processes"] if one[1] == name))])
            for at in last
            if any(one[1] == name for one in at["processes"])
        ]
        parts = {key: [(step, values[i]) for step, values in sums] for i, key in enumerate(("mib", "files", "threads"))}
        tail = max(1, len(sums) // 8)
        kinds[name] = {
            "processes": statistics.median(sum(one[1] == name for one in at["processes"]) for at in last),
            **{f"{key}_before": statistics.median(y for _, y in points[:tail]) for key, points in parts.items()},
            **{f"{key}_end": statistics.median(y for _, y in points[-tail:]) for key, points in parts.items()},
            "mib_per_1000_steps": 1000 * slope(parts["mib"]),
        }
    quarters = [looks[i * (len(looks) - 1) // 4] for i in range(5)]
    pace = [(b["seconds"] - a["seconds"]) / max(1, b["step"] - a["step"]) for a, b in pairwise(quarters)]
    return {
        "steps": looks[-1]["step"],
        "minutes": looks[-1]["seconds"] / 60,
        "count_before": last[0]["count"],
        "count_end": max(at["count"] for at in last[-5:]),
        "seconds_a_step": pace,
        "kinds": kinds,
    }


def markdown(report: dict[str, Any]) -> str:
    lines = [
        "# What a long run holds",
        "",
        f"`{report['command']}`, on {report['cores']} cores ({report['environment']['cpu_architecture']}, torch"
        f" {report['environment']['torch']}): {report['at_once']} runs at a time. Memory is what belongs to the"
        " processes alone, in MiB; all is said of the last third, from its beginning to its end; growth is the median"
        " slope.",
        "",
        "| case | steps | processes | MiB | growth in 1,000 steps, MiB | open files | threads |",
        "|---|---|---|---|---|---|---|",
    ]
    for case, found in report["cases"].items():
        for name, row in found["kinds"].items():
            ends = {
                key: f"{row[f'{key}_before']:.0f} to {row[f'{key}_end']:.0f}" for key in ("mib", "files", "threads")
            }
            cells = (
                case,
                f"{found['steps']:,}",
                f"{name} x {row['processes']:.0f}",
                ends["mib"],
                f"{row['mib_per_1000_steps']:+.2f}",
                ends["files"],
                ends["threads"],
            )
            lines.append(f"| {' | '.join(cells)} |")
    lines += [
        "",
        "| case | minutes | processes in all, before and at the end | seconds a step, by quarter |",
        "|---|---|---|---|",
    ]
    for case, found in report["cases"].items():
        pace = ", ".join(f"{one:.2f}" for one in found["seconds_a_step"])
        lines.append(f"| {case} | {found['minutes']:.0f} | {found['count_before']} and {found['count_end']} | {pace} |")
    return "\n".join([*lines, ""])


def draw(curves: dict[str, list[dict[str, Any]]], file: Path) -> None:
    """MiB of each kind of process over the steps, a panel a case."""
    from matplotlib.figure import Figure

    figure = Figure((4 * len(curves), 3), layout="constrained")
    for axes, (case, looks) in zip(figure.subplots(1, len(curves), squeeze=False)[0], curves.items()):
        for name in dict.fromkeys(one[1] for at in looks for one in at["processes"]):
            points = [(at["step"], sum(one[2] for one in at["processes"] if one[1] == name)) for at in looks]
            axes.plot(*zip(*points), label=name)
        axes.set_title(case)
        axes.set_xlabel("optimizer steps")
        axes.set_ylim(bottom=0)
        axes.legend()
    figure.axes[0].set_ylabel("MiB of their own")
    figure.savefig(file, dpi=110)


def options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/rollouts"))
    parser.add_argument("--runs", type=Path, default=Path("runs/endurance"), help="where run directories are made")
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--minutes", type=float, default=25.0, help="of each case")
    parser.add_argument("--look_s", type=float, default=10.0, help="seconds between two looks")
    parser.add_argument("--every", type=int, default=100, help="steps between two validations")
    parser.add_argument("--at_once", type=int, default=2, help="runs beside each other")
    parser.add_argument("--warm_success", type=float, default=door.options([]).warm_success)
    parser.add_argument("--warm_steps", type=int, default=door.options([]).warm_steps)
    parser.add_argument("--deadline_s", type=float, default=1800.0, help="of the warm start")
    return parser.parse_args(argv)


def warm_start(case: str, given: argparse.Namespace) -> Path:
    """The directory of the model with which a case begins."""
    if case in ("agent", "tools"):
        return door.warm_start(given)
    start = given.runs / f"warm_sums_{given.warm_steps}"
    if not (start / "model" / "config.json").exists():
        made = yaml.safe_load((ROOT / "configs/quickstart_sft.yaml").read_text())
        made["trainer"] |= {"max_steps": given.warm_steps, "accelerator": "cpu"}
        run(made, start, given.deadline_s)
    return start / "model"


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    given = options(argv)
    given.out.mkdir(parents=True, exist_ok=True)
    command = f"python -m benchmarks.rollouts.endurance --minutes {given.minutes:g} --at_once {given.at_once}"
    report: dict[str, Any] = {
        "command": command,
        "cores": os.cpu_count(),
        "at_once": given.at_once,
        "environment": environment(torch.device("cpu")),
        "cases": {},
    }
    curves: dict[str, list[dict[str, Any]]] = {}
    starts = {case: warm_start(case, given) for case in given.only}
    with ThreadPoolExecutor(given.at_once) as pool:
        under_way = {pool.submit(watched, case, given.runs / case, starts[case], given): case for case in given.only}
        for done in as_completed(under_way):
            curves[under_way[done]] = done.result()
            print(under_way[done], outcome(done.result()), flush=True)
            report["cases"] = {one: outcome(curves[one]) for one in CASES if one in curves}
            write_json(given.out / "endurance.json", report)
            (given.out / "endurance.md").write_text(markdown(report))
            draw({one: curves[one] for one in CASES if one in curves}, given.out / "endurance.png")
    return report


if __name__ == "__main__":
    main()
