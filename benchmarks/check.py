"""What `arborist check` predicts, beside what then happens: seconds, memory, and whether there is something to learn.

    python -m benchmarks.check --out benchmarks/results/check
    python -m benchmarks.check --out DIR --only smollm2          # one part of it

Parts: `quickstart` (its imitation first, which `arborist check` needs to find something), `airline` (recorded
conversations, a task a step; needs ARBORIST_DATA) and `smollm2` (examples/smollm2, whose prepare.py fetches the model).
Each is checked, then trained for some steps. Seconds of a step are those of the thread that trains, on the processor,
so that other work on the machine counts little; wall seconds are beside them. The first step, which also checks itself,
is left out. Memory is the most that the process ever held. What was rolled out in the first steps is compared with what
the check rolled out; both are samples, and the check's interval says how far apart they may be.

Writes check.json and check.md into --out after every part. A part that is there is not run again, nor is what a part
that was stopped had finished in --runs (--again does both).
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import yaml
from lightning.pytorch import Callback, LightningModule, Trainer

from app.statistics import share_interval
from benchmarks.common.records import write_json
from benchmarks.learning.__main__ import ROOT

STEPS = {"quickstart": 40, "smollm2": 6}
EARLY = 5
"""Steps whose rollouts are compared with the check's: later ones have learnt."""

TASKS = 4
"""Recorded ones that are checked and trained on, a step each."""

GIB = 2**30


class Watch(Callback):
    """Writes `watch.jsonl` into the run directory, a line a step: `tree` and `optimizer`, CPU seconds of the thread
    that trains (for preparation, forward and backward; for clipping and the optimizer); `peak`, GiB that the process
    held at most so far."""

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._began = self._backward = time.thread_time()

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        self._backward = time.thread_time()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        found = {
            "tree": self._backward - self._began,
            "optimizer": time.thread_time() - self._backward,
            "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIB,
        }
        with (Path(trainer.log_dir or ".") / "watch.jsonl").open("a") as file:
            file.write(json.dumps(found) + "\n")


def command(arguments: Sequence[str], log: Path, deadline_s: float) -> None:
    """Runs `arborist ...` in a process of its own, one thread a part. Raises RuntimeError, naming its output."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    with log.open("w") as file:
        line = [sys.executable, "-m", "app", *arguments]
        done = subprocess.run(line, cwd=ROOT, env=environment, stdout=file, stderr=file, timeout=deadline_s)
    if done.returncode:
        raise RuntimeError(f"arborist {arguments[0]} ended with exit code {done.returncode}; its output is in {log}")


def fit(
    config: Path, more: Sequence[str], run_dir: Path, steps: int | None, given: argparse.Namespace
) -> list[dict[str, float]]:
    """Trains without validation and checkpoints; metrics of every step, with what `Watch` saw under `watch/`."""
    settings = yaml.safe_load(config.read_text())
    trainer = settings["trainer"] | {"accelerator": "cpu", "enable_checkpointing": False, "limit_val_batches": 0}
    trainer["callbacks"] = [{"class_path": "benchmarks.check.Watch"}]
    trainer.pop("val_check_interval", None)
    trainer |= {} if steps is None else {"max_steps": steps}
    settings["trainer"] = trainer
    run_dir.parent.mkdir(parents=True, exist_ok=True)
    file = run_dir.parent / "given.yaml"
    file.write_text(yaml.safe_dump(settings))
    log = run_dir.parent / "fit.log"
    if not (run_dir / "summary.json").exists():  # written last
        shutil.rmtree(run_dir, ignore_errors=True)
        command(["fit", "--config", str(file), "--run_dir", str(run_dir), *more], log, given.deadline_s)
    with (run_dir / "metrics.csv").open() as table:
        rows = [row for row in csv.DictReader(table) if row.get("time/step")]
    watched = [json.loads(line) for line in (run_dir / "watch.jsonl").read_text().splitlines()]
    return [
        {name: float(value) for name, value in row.items() if value} | {f"watch/{k}": v for k, v in seen.items()}
        for row, seen in zip(rows, watched, strict=True)
    ]


def check(what: Path, more: Sequence[str], out: Path, given: argparse.Namespace) -> dict[str, Any]:
    out.mkdir(parents=True, exist_ok=True)
    if not (out / "check.json").exists():
        command(["check", str(what), "--out", str(out), *more], out / "check.log", given.deadline_s)
    found: dict[str, Any] = json.loads((out / "check.json").read_text())
    return found


# ---- predicted beside measured


def row(what: str, predicted: float, measured: float, interval: Sequence[float] | None = None) -> dict[str, Any]:
    """`error`: of the prediction, as a share of what was measured; of shares (with an interval) the difference."""
    found: dict[str, Any] = {"what": what, "predicted": predicted, "measured": measured}
    if interval is not None:
        return found | {"error": predicted - measured, "interval": list(interval)}
    return found | {"error": predicted / measured - 1}


def held(found: dict[str, Any]) -> float:
    """GiB that the process is predicted to hold at most, what it is without a model included."""
    return float(found["gib_all"] + found["gib_process"])


def mean(rows: Sequence[dict[str, float]], name: str) -> float:
    return statistics.fmean(one[name] for one in rows if name in one)


def cost_rows(steps: Sequence[dict[str, float]], tree: float, optimizer: float, gib: float) -> list[dict[str, Any]]:
    """`tree`, `optimizer`: predicted CPU seconds; `gib`: predicted memory."""
    later = steps[1:] or steps
    return [
        row("forward and backward, s", tree, statistics.median(one["watch/tree"] for one in later)),
        row("optimizer, s", optimizer, statistics.median(one["watch/optimizer"] for one in later)),
        row("memory, GiB", gib, max(one["watch/peak"] for one in steps)),
    ]


def signal_rows(found: dict[str, Any], steps: Sequence[dict[str, float]]) -> list[dict[str, Any]]:
    """Of the steps whose rollouts the model made before it had learnt much."""
    early, size, groups = steps[:EARLY], found["group_size"], found["groups"]
    any_ = f"pass@{size}"
    return [
        row("groups that differ", found["different"], 1 - mean(early, "rollouts/flat"), found["different_interval"]),
        row("pass@1", found["pass@1"], mean(early, "rollouts/reward"), found["pass@1_interval"]),
        row(any_, found[any_], 1 - mean(early, "rollouts/unsolved"), _around(found[any_], groups)),
        row("generated tokens an episode", found["tokens_mean"], mean(early, "rollouts/length")),
        row(
            "dense tokens / tree tokens",
            found["dense_over_tree"],
            mean(early, "tokens/dense") / mean(early, "tokens/tree"),
        ),
    ]


def _around(share: float, n: int) -> tuple[float, float]:
    """95% interval of a share that was found in n."""
    return share_interval(round(share * n), n)


def rolled_out(config: Path, more: Sequence[str], out: Path, steps: int, given: argparse.Namespace) -> dict[str, Any]:
    """A run of `config` (with these options): checked, then trained."""
    found = check(config, ["--with", *more] if more else [], out / "check", given)
    taken = fit(config, more, out / "run", steps, given)
    rows = cost_rows(taken, found["predicted_seconds"], found["predicted_optimizer_seconds"], held(found))
    return {
        "verdict": found["verdict"],
        "steps": len(taken),
        "reward": [mean(taken[:EARLY], "rollouts/reward"), mean(taken[-EARLY:], "rollouts/reward")],
        "wall_seconds": statistics.median(one["time/step"] for one in taken[1:] or taken),
        "rows": [*rows, *signal_rows(found, taken)],
    }


# ---- the parts


def quickstart(out: Path, given: argparse.Namespace) -> dict[str, Any]:
    warm = given.runs / "warm_start"
    if not (warm / "summary.json").exists():  # written last
        command(["fit", "--config", "configs/quickstart_sft.yaml", "--run_dir", str(warm)], warm.parent / "warm.log",
                given.deadline_s)  # fmt: skip
    more = ["--model.model.path", str(warm / "model")]
    return rolled_out(ROOT / "configs/quickstart.yaml", more, out, given.steps or STEPS["quickstart"], given)


def smollm2(out: Path, given: argparse.Namespace) -> dict[str, Any]:
    if not (ROOT / "runs/smollm2/model").exists():
        raise FileNotFoundError("runs/smollm2/model: run `python -m examples.smollm2.prepare runs/smollm2` first")
    return rolled_out(ROOT / "examples/smollm2/grpo.yaml", [], out, given.steps or STEPS["smollm2"], given)


def airline(out: Path, given: argparse.Namespace) -> dict[str, Any]:
    """A task a step: every step of configs/tau_recorded.yaml has a prediction of its own, found by its tokens."""
    from datamodules.conversations.tokens import load_npz, save_npz

    source = Path(os.environ.get("ARBORIST_DATA", "")) / "tau/airline_tokens.npz"
    if not source.is_file():
        raise FileNotFoundError(
            "ARBORIST_DATA: name the folder that holds tau/airline_tokens.npz, or set --only to the other parts"
        )
    config = ROOT / "configs/tau_recorded.yaml"
    settings = yaml.safe_load(config.read_text())
    out.mkdir(parents=True, exist_ok=True)
    shape = out / "config.json"
    shape.write_text(json.dumps(settings["model"]["init_args"]["model"]["config"]))
    known = load_npz(source)
    predicted: dict[int, dict[str, Any]] = {}
    tasks = settings["data"]["init_args"]["tasks"][:TASKS]
    for task in tasks:
        one = out / f"task_{task}.npz"
        save_npz(one, [conversation for conversation in known if conversation.task == str(task)])
        found = check(one, ["--model", str(shape)], out / f"check_{task}", given)
        predicted[found["tree_tokens"]] = found
    steps = fit(config, ["--data.tasks", json.dumps(tasks)], out / "run", None, given)
    pairs = [(predicted[round(one["tokens/tree"])], one) for one in steps]
    errors = [found["predicted_seconds"] / one["watch/tree"] - 1 for found, one in pairs[1:]]
    later = [found for found, _ in pairs[1:]]
    seconds = statistics.median(found["predicted_seconds"] for found in later)
    optimizer = statistics.median(found["predicted_optimizer_seconds"] for found in later)
    whole = cost_rows(steps, seconds, optimizer, max(held(found) for found, _ in pairs))
    saved = [found["dense_over_tree"] for found, _ in pairs]
    return {
        "steps": len(steps),
        "errors": errors,
        "wall_seconds": statistics.median(one["time/step"] for one in steps[1:]),
        "rows": [
            *whole,
            row(
                "dense tokens / tree tokens",
                statistics.fmean(saved),
                statistics.fmean(one["tokens/dense"] / one["tokens/tree"] for one in steps),
            ),
        ],
    }


PARTS: dict[str, Callable[[Path, argparse.Namespace], dict[str, Any]]] = {
    "quickstart": quickstart,
    "airline": airline,
    "smollm2": smollm2,
}


def markdown(report: dict[str, Any]) -> str:
    lines = [
        "# What `arborist check` predicts, and what happens",
        "",
        f"`{report['command']}` on {report['hardware']}. Error: of the prediction, by what was measured; of shares, the"
        " difference, with the 95% interval that the check's own sample gives. Seconds are CPU seconds of the thread"
        f" that trains, medians without the first step; shares and tokens are of the first {EARLY} steps.",
        "",
        "| run | figure | predicted | measured | error | interval of the check |",
        "|---|---|---|---|---|---|",
    ]
    for name, part in report["parts"].items():
        for one in part["rows"]:
            share = "interval" in one
            error = f"{one['error']:+.3f}" if share else f"{one['error']:+.0%}"
            interval = " to ".join(f"{end:.3f}" for end in one["interval"]) if share else ""
            lines.append(
                f"| {name} | {one['what']} | {one['predicted']:.3g} | {one['measured']:.3g} | {error} | {interval} |"
            )
    lines.append("")
    for name, part in report["parts"].items():
        said = f"{name}: {part['steps']} steps, {part['wall_seconds']:.2f} s each by the clock, other work included"
        if "verdict" in part:
            first, last = part["reward"]
            said += (
                f'; verdict "{part["verdict"]}"; mean reward {first:.3f} in the first {EARLY} steps, {last:.3f} in the'
                f" last {EARLY}"
            )
        if "errors" in part:
            low, high = min(part["errors"]), max(part["errors"])
            said += f"; seconds of a single step were mispredicted by {low:+.0%} to {high:+.0%}"
        lines += [said + ".", ""]
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--steps", type=int, help=f"optimizer steps of a run that rolls out (default {STEPS})")
    parser.add_argument("--again", action="store_true", help="parts that are there, too")
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "check_benchmark", help="where the runs write")
    parser.add_argument("--deadline_s", type=float, default=3600.0, help="seconds one command may take")
    parser.add_argument("--hardware", default="a CPU", help="what the report says the machine is")
    given = parser.parse_args(argv)
    if given.steps is not None and given.steps < 2:
        parser.error(f"--steps {given.steps}: at least 2, as the first is left out")
    given.out.mkdir(parents=True, exist_ok=True)
    given.runs.mkdir(parents=True, exist_ok=True)
    file = given.out / "check.json"
    line = "python -m benchmarks.check" + (f" --steps {given.steps}" if given.steps else "")
    before = json.loads(file.read_text()) if file.exists() else {}
    parts = before["parts"] if before.get("command") == line else {}
    report: dict[str, Any] = {"command": line, "hardware": given.hardware, "parts": parts}
    for name in given.only:
        if name in parts and not given.again:
            continue
        out = given.runs / name
        if given.again:
            shutil.rmtree(out, ignore_errors=True)
        parts[name] = PARTS[name](out, given)
        report["parts"] = {name: parts[name] for name in PARTS if name in parts}
        write_json(file, report)
        (given.out / "check.md").write_text(markdown(report))
        print(markdown(report), flush=True)
    return report


if __name__ == "__main__":
    main()
