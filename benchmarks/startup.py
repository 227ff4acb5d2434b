"""How long does a user wait for the first sign of life?

    python -m benchmarks.startup --out benchmarks/results/startup

In processes of their own, by turns: `arborist --help`, `arborist fit --help`, and the quickstart's two fits (imitation
from a configuration; GRPO with an embedded engine and a validation before the first step, from a model that is made
here), up to the first line that shows progress, on a terminal as a user has one. Wall seconds and CPU seconds, of one
thread each, medians with the least and the most. Files are in the cache of the operating system: the first repeat is
left out, unless --left_out says otherwise. Writes startup.json and startup.md into --out.
"""

from __future__ import annotations

import argparse
import os
import pty
import resource
import select
import signal
import subprocess
import sys
import tempfile
import termios
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.common.measure import spread
from benchmarks.common.records import write_json
from benchmarks.learning.__main__ import ROOT

WANTED = {"arborist --help": 1.5, "fit, imitation": 8.0, "fit, GRPO": 8.0}
PROGRESS = b"training "  # the bar that `callbacks.Progress` shows


def cases(folder: Path) -> dict[str, tuple[list[str], bytes | None]]:
    """By name: arguments of `python -m app`, and what ends the wait (None: the end of the process)."""
    sft, grpo = ROOT / "configs/quickstart_sft.yaml", ROOT / "configs/quickstart.yaml"
    return {
        "arborist --help": (["--help"], None),
        "arborist fit --help": (["fit", "--help"], None),
        "fit, imitation": (["fit", "--config", str(sft)], PROGRESS),
        "fit, GRPO": (["fit", "--config", str(grpo), "--model.model.path", str(folder / "warm/model")], PROGRESS),
    }


def measured(arguments: list[str], until: bytes | None, run_dir: Path, deadline_s: float) -> tuple[float, float]:
    """(wall seconds, CPU seconds) up to `until` in what it prints on a terminal, or to its end.

    Raises:
        RuntimeError: it ended without having printed that. TimeoutError.
    """
    if until is not None:
        arguments = [*arguments, "--run_dir", str(run_dir), "--trainer.accelerator", "cpu"]
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, 120))  # one without columns is none
    process = subprocess.Popen(
        [sys.executable, "-m", "app", *arguments], cwd=ROOT, stdin=theirs, stdout=theirs, stderr=theirs,
        env={**os.environ, "OMP_NUM_THREADS": "1", "TERM": "xterm"}, start_new_session=True,
    )  # fmt: skip
    os.close(theirs)
    said, wall, cpu = b"", 0.0, 0.0
    try:
        while True:
            if time.perf_counter() - began > deadline_s:
                raise TimeoutError(f"{arguments}: no progress within --deadline_s {deadline_s:g}")
            if not select.select([ours], [], [], 0.2)[0]:
                continue
            try:
                said += os.read(ours, 65536)
            except OSError:  # its end, on a terminal
                break
            if until is not None and until in said:
                wall, cpu = time.perf_counter() - began, _cpu_seconds(process.pid)
                break
    finally:
        if process.poll() is None and until is not None:
            os.killpg(process.pid, signal.SIGKILL)
        code = process.wait()
        os.close(ours)
    if until is None and code == 0:
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return time.perf_counter() - began, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    if not wall:
        raise RuntimeError(f"{arguments}: ended with code {code} and no progress:\n{said.decode(errors='replace')}")
    return wall, cpu


def _cpu_seconds(pid: int) -> float:
    """Of a process that still runs, without its children."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def markdown(report: dict[str, Any]) -> str:
    lines = [
        "# The first sign of life",
        "",
        f"`{report['command']}` on {report['hardware']}: seconds from the command to its end, or to the first line that"
        f" shows progress, medians (least-most) of {report['repeats']}.",
        "",
        "| command | wall | CPU | wanted |",
        "|---|---|---|---|",
    ]
    for name, row in report["rows"].items():
        wanted = f"at most {WANTED[name]:g}" if name in WANTED else ""
        wall, cpu = (f"{one['median']:.2f} ({one['min']:.2f}-{one['max']:.2f})" for one in map(spread, row.values()))
        lines.append(f"| {name} | {wall} | {cpu} | {wanted} |")
    return "\n".join([*lines, ""])


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--left_out", type=int, default=1, help="repeats before these, which are not counted")
    parser.add_argument("--deadline_s", type=float, default=120.0, help="seconds one command may take")
    parser.add_argument("--hardware", default="a CPU", help="what the report says the machine is")
    given = parser.parse_args(argv)
    rows: dict[str, dict[str, list[float]]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        warm = ["fit", "--config", "configs/quickstart_sft.yaml", "--trainer.max_steps", "1", "--run_dir"]
        subprocess.run([sys.executable, "-m", "app", *warm, str(folder / "warm")], cwd=ROOT, check=True,
                       capture_output=True, timeout=given.deadline_s)  # fmt: skip
        for repeat in range(given.left_out + given.repeats):
            for number, (case, (arguments, until)) in enumerate(cases(folder).items()):
                wall, cpu = measured(arguments, until, folder / f"{repeat}_{number}", given.deadline_s)
                if repeat >= given.left_out:
                    row = rows.setdefault(case, {"wall": [], "cpu": []})
                    row["wall"].append(wall)
                    row["cpu"].append(cpu)
    report = {"command": "python -m benchmarks.startup", "hardware": given.hardware, "repeats": given.repeats}
    report |= {"rows": rows}
    given.out.mkdir(parents=True, exist_ok=True)
    write_json(given.out / "startup.json", report)
    (given.out / "startup.md").write_text(markdown(report))
    print(markdown(report))
    return report


if __name__ == "__main__":
    main()
