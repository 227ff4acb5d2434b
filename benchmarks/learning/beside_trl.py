"""One job, two trainers: GRPO of a real chat model here and by TRL's GRPOTrainer, on the same machine.

    make trl && python -m examples.smollm2.prepare runs/smollm2
    python -m benchmarks.learning.beside_trl --out benchmarks/results/learning               # two hours on two cores
    python -m benchmarks.learning.beside_trl --out DIR --seeds 1 --steps 4 --every 2          # a try

The job is examples/smollm2: same weights, sums, reward, groups (8 prompts x 8 replies), length, learning rate,
clipping and optimizer; both in float32. TRL generates and trains in turn, with a thread a core; Arborist generates in
one thread while it trains in another. TRL runs without gradient checkpointing, which it would have by default: faster
so. The runs alternate. Seconds are a run's own, without start and validation; CPU seconds and memory are the process's,
all of it.
Writes beside_trl.json, .md and .png into --out after every run; one that was stopped goes on where it was.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from benchmarks.common.records import write_json
from benchmarks.learning.__main__ import ROOT, finished

CASES = ("Arborist", "Arborist, LoRA", "TRL")
TARGET = 0.6


def trl_run(config: dict[str, Any], out: Path) -> None:
    """Trains with TRL what `config` (of `fit`) describes, and writes what `result` reads. Runs in TRL's environment."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    from datamodules.prompts import Prompt
    from examples.smollm2.prepare import last_number

    trainer_options, data = config["trainer"], config["data"]["init_args"]
    length = data["workflow"]["init_args"]["max_new_tokens"]
    model_path = config["model"]["init_args"]["model"]["path"]
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(model_path, padding_side="left")

    def load(source: dict[str, Any]) -> list[dict[str, Any]]:
        options = source["init_args"]
        records = [json.loads(line) for line in Path(options["path"]).read_text().splitlines()]
        return [
            {"prompt": [{"role": "user", "content": options["template"].format(**one)}], "answer": str(one["answer"])}
            for one in records
        ]

    def reward(completions: list[list[dict[str, str]]], answer: list[str], **_: Any) -> list[float]:
        return [
            last_number(Prompt("", answer=right), said[0]["content"])
            for said, right in zip(completions, answer, strict=True)
        ]

    held_out = load(data["validation"]["prompts"])

    def accuracy() -> float:
        texts = [
            tokenizer.apply_chat_template(one["prompt"], tokenize=False, add_generation_prompt=True) for one in held_out
        ]
        given = tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False)
        model.eval()
        with torch.no_grad():
            said = model.generate(**given, do_sample=False, max_new_tokens=length)
        model.train()
        replies = tokenizer.batch_decode(said[:, given["input_ids"].shape[1] :], skip_special_tokens=True)
        return statistics.mean(
            last_number(Prompt("", answer=one["answer"]), reply) for one, reply in zip(held_out, replies, strict=True)
        )

    curve: list[tuple[int, float, float]] = []
    durations: list[float] = []

    class Watch(TrainerCallback):  # type: ignore[misc]  # transformers is not installed where mypy runs for TRL
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            curve.append((0, 0.0, accuracy()))
            self.began = time.perf_counter()

        def on_step_end(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
            durations.append(time.perf_counter() - self.began)
            if state.global_step % trainer_options["val_check_interval"] == 0:
                curve.append((state.global_step, sum(durations), accuracy()))
            self.began = time.perf_counter()

    batch = data["batch_size"] * data["group_size"]
    adam = config["model"]["init_args"]["optimizer"]["init_args"]
    trainer = GRPOTrainer(
        model,
        reward,
        args=GRPOConfig(
            output_dir=str(out / "trl"),
            seed=config["seed_everything"],
            max_steps=trainer_options["max_steps"],
            per_device_train_batch_size=batch,
            num_generations=data["group_size"],
            max_completion_length=length,
            learning_rate=adam["lr"],
            weight_decay=adam["weight_decay"],
            lr_scheduler_type="constant",
            max_grad_norm=trainer_options["gradient_clip_val"],
            gradient_checkpointing=False,
            bf16=False,
            use_cpu=True,
            report_to=[],
            save_strategy="no",
            logging_steps=1,
            disable_tqdm=True,
        ),
        train_dataset=Dataset.from_list(load(data["prompts"])),
        processing_class=tokenizer,
        callbacks=[Watch()],
    )
    trainer.train()
    rewards = [one["reward"] for one in trainer.state.log_history if "reward" in one]
    (out / "trl.json").write_text(json.dumps({"curve": curve, "durations": durations, "rewards": rewards}))


def arborist_result(run_dir: Path) -> dict[str, Any]:
    """Curve, seconds of steps and rewards, from the run's metrics; tokens too."""
    with (run_dir / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    steps = [row for row in rows if row.get("time/step")]
    durations = [float(row["time/step"]) for row in steps]
    # A validation is logged with the index of the step before it: 0 before training, else one less than were taken.
    found = {int(row["step"]): float(row["val/accuracy"]) for row in rows if row.get("val/accuracy")}
    points = {step + (step > 0): value for step, value in found.items()}
    total = {name: sum(float(row[f"tokens/{name}"]) for row in steps) for name in ("dense", "leaf", "tree")}
    return {
        "curve": [(step, sum(durations[:step]), value) for step, value in sorted(points.items())],
        "durations": durations,
        "rewards": [float(row["reward"]) for row in steps],
        "tokens": {name: value / len(steps) for name, value in total.items()},
    }


def timed(command: list[str], run_dir: Path, threads: int, deadline_s: float) -> dict[str, float]:
    """Runs a trainer in a process of its own: its CPU seconds with its children's, and its peak resident bytes."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with (run_dir / "output.log").open("w") as log:
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "PYTHONPATH": str(ROOT)}
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log)
        peak, end = 0, time.monotonic() + deadline_s
        while process.poll() is None:
            if time.monotonic() > end:
                process.kill()
                raise TimeoutError(f"{run_dir}: a run took longer than --deadline_s {deadline_s:.0f}")
            peak = max(peak, _peak_bytes(process.pid))
            time.sleep(0.5)
    if process.returncode:
        raise RuntimeError(f"{run_dir}: ended with exit code {process.returncode}; see output.log in it")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return {"cpu_s": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, "peak_bytes": peak}


def _peak_bytes(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM")), 0)


def result(name: str, seed: int, given: argparse.Namespace, run_dir: Path) -> dict[str, Any]:
    run_dir.mkdir(parents=True)
    config = yaml.safe_load((ROOT / "examples/smollm2/grpo.yaml").read_text())
    config["seed_everything"] = seed
    module = config["model"]["init_args"]
    if name.endswith("LoRA"):
        laid = yaml.safe_load((ROOT / "examples/smollm2/lora.yaml").read_text())["model"]["init_args"]
        module |= laid | {"model": {**module["model"], **laid["model"]}}
    config["trainer"] |= {"max_steps": given.steps, "val_check_interval": given.every, "accelerator": "cpu"}
    config["trainer"] |= {"callbacks": [], "enable_checkpointing": False}
    config["data"]["init_args"]["seed"] = seed
    config["data"]["init_args"]["prompts"]["init_args"]["seed"] = seed
    file = run_dir / "given.yaml"
    file.write_text(yaml.safe_dump(config))
    if name == "TRL":
        command = [str(given.trl), "-m", "benchmarks.learning.beside_trl", "--trl_run", str(file)]
        command += ["--out", str(run_dir)]
        used = timed(command, run_dir, os.cpu_count() or 1, given.deadline_s)
        found = json.loads((run_dir / "trl.json").read_text())
    else:
        command = [sys.executable, "-m", "app", "fit", "--config", str(file), "--run_dir", str(run_dir / "run")]
        used = timed(command, run_dir, 1, given.deadline_s)
        found = arborist_result(run_dir / "run")
    return {"trainer": name, "seed": seed, **used, **found}


def summary(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    rows = []
    for name in CASES:
        mine = [one for one in results if one["trainer"] == name]
        if not mine:
            continue
        reached = [next((after for _, after, value in one["curve"] if value >= TARGET), None) for one in mine]
        rows.append(
            {
                "trainer": name,
                "before": statistics.median(one["curve"][0][2] for one in mine),
                "after": [round(one["curve"][-1][2], 3) for one in mine],
                "seconds_a_step": round(statistics.median(s for one in mine for s in one["durations"]), 2),
                "minutes": [round(sum(one["durations"]) / 60, 1) for one in mine],
                "minutes_to_target": [None if s is None else round(s / 60, 1) for s in reached],
                "cpu_s": [round(one["cpu_s"]) for one in mine],
                "peak_gib": round(statistics.median(one["peak_bytes"] for one in mine) / 2**30, 1),
            }
        )
    return rows


def markdown(report: dict[str, Any]) -> str:
    lines = [
        "# Beside TRL",
        "",
        f"`{report['command']}` on {report['hardware']}; TRL 1.16.0. SmolLM2-135M on sums of two-digit numbers, GRPO, 8"
        f" prompts x 8 replies of at most 12 tokens, {report['steps']} steps, float32; held-out accuracy is of greedy"
        " answers to 128 sums. Minutes are of training; CPU seconds and memory of the whole process.",
        "",
        "| trainer | held-out before | after, by seed | seconds a step, median | minutes, by seed | minutes to"
        f" {TARGET} (at a validation) | CPU seconds | peak memory (GiB) |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in report["summary"]:
        shown = {
            name: ", ".join("-" if one is None else str(one) for one in row[name])
            for name in ("after", "minutes", "minutes_to_target", "cpu_s")
        }
        lines.append(
            f"| {row['trainer']} | {row['before']:.3f} | {shown['after']} | {row['seconds_a_step']:.2f} |"
            f" {shown['minutes']} | {shown['minutes_to_target']} | {shown['cpu_s']} | {row['peak_gib']:.1f} |"
        )
    ours = [one["tokens"] for one in report["results"] if one["trainer"] == CASES[0]]
    if ours:
        dense, leaf, tree = (statistics.median(one[name] for one in ours) for name in ("dense", "leaf", "tree"))
        lines += [
            "",
            f"Tokens a step of Arborist: {tree:,.0f} in the tree; {dense / tree:.1f} times fewer than one sequence a"
            f" turn, {leaf / tree:.1f} times fewer than without prefixes of others (an episode is one turn here).",
        ]
    return "\n".join([*lines, ""])


def picture(results: list[dict[str, Any]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(11, 4), sharey=True)
    for one in results:
        number = CASES.index(one["trainer"])
        label = one["trainer"] if one["seed"] == 1 else None
        steps, seconds, values = zip(*one["curve"])
        axes[0].plot(steps, values, color=f"C{number}", alpha=0.8, label=label)
        axes[1].plot([s / 60 for s in seconds], values, color=f"C{number}", alpha=0.8, label=label)
    for axis, what in zip(axes, ("optimizer steps", "minutes of training")):
        axis.set(xlabel=what)
        axis.grid(alpha=0.3)
    axes[0].set(ylabel="held-out accuracy", ylim=(0, 1))
    axes[1].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=CASES)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--every", type=int, default=10, help="steps between validations")
    parser.add_argument(
        "--trl", type=Path, default=ROOT / ".venv-trl/bin/python", help="Python of an environment with TRL"
    )
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "beside_trl", help="where the runs write")
    parser.add_argument("--deadline_s", type=float, default=3600.0, help="seconds one run may take")
    parser.add_argument("--hardware", default="a CPU", help="what the report says the machine is")
    parser.add_argument("--trl_run", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args(argv)
    if given.trl_run:
        trl_run(yaml.safe_load(given.trl_run.read_text()), given.out)
        return {}
    if given.every < 2:
        parser.error(
            f"--every {given.every}: at least 2, or what is logged after the first step covers what was before it"
        )
    if not given.trl.exists():
        parser.error(f"--trl {given.trl}: there is no such Python; `make trl` makes an environment")
    command = f"python -m benchmarks.learning.beside_trl --steps {given.steps} --every {given.every}"
    results = finished(given.out / "beside_trl.json", command)
    given.out.mkdir(parents=True, exist_ok=True)
    report: dict[str, Any] = {"command": command, "hardware": given.hardware, "steps": given.steps}
    runs = given.runs / time.strftime("%Y-%m-%d_%H-%M-%S")
    for seed in range(1, given.seeds + 1):
        for name in given.cases:
            if any((one["trainer"], one["seed"]) == (name, seed) for one in results):
                continue
            results.append(result(name, seed, given, runs / f"{name}_{seed}"))
            results.sort(key=lambda one: (CASES.index(one["trainer"]), one["seed"]))
            report |= {"summary": summary(results), "results": results}
            write_json(given.out / "beside_trl.json", report)
            (given.out / "beside_trl.md").write_text(markdown(report))
            picture(results, given.out / "beside_trl.png")
            print(markdown(report), flush=True)
    return report


if __name__ == "__main__":
    main()
