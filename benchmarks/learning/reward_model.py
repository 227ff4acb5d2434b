"""What does a tree save where a reward model is trained, how good is one, and what is it worth as a reward?

    python -m benchmarks.learning.reward_model --out benchmarks/results/learning              # about 20 minutes
    python -m benchmarks.learning.reward_model --out DIR --seeds 1 --steps 5 --pair_steps 10     # a try

Three parts. Sharing: loss and gradients of preferences between recorded airline conversations (the best and the worst
trial of a task, `RecordedDataModule(pairs=True)`), as a tree and every conversation alone: tokens, CPU seconds, and how
far the gradients are apart. Training: pairs of a right and a wrong sum, from the quickstart's warm start; accuracy and
calibration on pairs of held-out sums. Use: the quickstart's GRPO with that score as the reward, beside the same with
the truth; held-out accuracy of greedy answers by the truth. Writes reward_model.json and .md into --out after every
run; one that was stopped goes on where it was.
"""

from __future__ import annotations

import argparse
import csv
import json
import random
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import yaml

from app.tree import FlatOutputs, PrefixTree, TreeEngine
from benchmarks.common.records import write_json
from benchmarks.learning.__main__ import ROOT, curve, finished, run, warm_config
from benchmarks.learning.noisy_judge import BATCH, GROUP
from benchmarks.learning.noisy_judge import rl_config as judged_config
from datamodules import RecordedDataModule
from datamodules.prompts import ArithmeticPrompts
from modules import ModelSource, build_model
from modules.supervised.reward_model import bradley_terry, with_scores

TRUTH = "datamodules.rewards.exact_match"
CASES = ("the truth", "the reward model")
PAIRS, HELD_OUT = 20_000, 512
RECORDED = "${ARBORIST_DATA}/tau/airline_tokens.npz"
SHAPE = {
    "model_type": "qwen3",
    "vocab_size": 151936,
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 32768,
    "pad_token_id": None,
}


def sharing(path: str = RECORDED, tasks: int = 2, repeats: int = 2) -> list[dict[str, Any]]:
    """A row for the tree, then one for every conversation alone; the fastest of the repeats."""
    data = RecordedDataModule(path, workload="whole", pairs=True, tasks_per_batch=tasks, shuffle=False)
    data.setup()
    batch = with_scores(data.batch(0))
    torch.manual_seed(0)
    model = build_model(ModelSource(config=dict(SHAPE)), scores=True)

    def loss(out: FlatOutputs, indices: torch.Tensor) -> torch.Tensor:
        assert out.values is not None
        losses, _ = bradley_terry(out.values[out.cu_seqlens[1:] - 1], batch.rewards[indices], batch.group_ids[indices])
        return losses.sum()

    rows, kept = [], []
    for share in ("tree", "none"):
        tree = PrefixTree.build(batch.sequences(), scored=batch.split(batch.loss_mask), share=share)
        engine = TreeEngine(model, self_check=False)
        seconds = []
        for _ in range(repeats):
            model.zero_grad()
            began = time.process_time()
            engine.backward_grouped(tree, loss, batch.group_ids, ("values",))
            seconds.append(time.process_time() - began)
        kept.append([p.grad.double().clone() for p in model.parameters() if p.grad is not None])
        rows.append({"as": "tree" if share == "tree" else "alone", "tokens": tree.num_tokens, "seconds": min(seconds)})
    most = max(float(one.abs().max()) for one in kept[1])
    error = max(float((one - other).abs().max()) for one, other in zip(*kept, strict=True)) / most
    return [{**row, "pairs": tasks, "gradient_error": error} for row in rows]


def pairs(path: Path, split: str, count: int, seed: int) -> None:
    """Sums with the right answer and a wrong one: a digit that is another one, or the sum plus or minus 1 or 10."""
    draw = random.Random(seed)
    source = ArithmeticPrompts(split=split, size=HELD_OUT if split == "validation" else None, seed=seed)  # type: ignore[arg-type]
    with path.open("w") as file:
        for index in range(count):
            prompt = source.deal(index)
            wrong = prompt.answer
            while wrong == prompt.answer:
                if draw.random() < 0.5:
                    wrong = str(max(0, int(prompt.answer) + draw.choice((-10, -1, 1, 10))))
                else:
                    at = draw.randrange(len(prompt.answer))
                    wrong = prompt.answer[:at] + draw.choice("0123456789") + prompt.answer[at + 1 :]
            file.write(json.dumps({"prompt": prompt.text, "chosen": prompt.answer, "rejected": wrong}) + "\n")


def preference_config(warm: Path, folder: Path, steps: int) -> dict[str, Any]:
    """A reward model from the warm start; held-out pairs five times."""

    def source(name: str, **more: Any) -> dict[str, Any]:
        fields = {"question_field": "prompt", "answer_field": "chosen", **more}
        path = {"path": str(folder / f"{name}.jsonl")}
        return {"class_path": "datamodules.prompts.JsonlPrompts", "init_args": {**path, **fields}}

    tokenizer = yaml.safe_load((ROOT / "configs/quickstart.yaml").read_text())["data"]["init_args"]["tokenizer"]
    return {
        "seed_everything": 1,
        "trainer": {
            "accelerator": "cpu",
            "max_steps": steps,
            "val_check_interval": max(1, steps // 5),
            "check_val_every_n_epoch": None,
            "gradient_clip_val": 1.0,
            "enable_checkpointing": False,
            "callbacks": [{"class_path": "callbacks.SavePretrained"}],
        },
        "model": {
            "class_path": "modules.RewardModule",
            "init_args": {
                "model": {"path": str(warm)},
                "centre": 0.01,
                "optimizer": {"class_path": "torch.optim.AdamW", "init_args": {"lr": 1e-3, "weight_decay": 0.0}},
            },
        },
        "data": {
            "class_path": "datamodules.PairsDataModule",
            "init_args": {
                "prompts": source("train"),
                "validation": source("held_out", shuffle=False),
                "tokenizer": tokenizer,
                "batch_size": 128,
            },
        },
    }


def held_out(run_dir: Path) -> list[dict[str, float]]:
    """What the reward model was on held-out pairs, validation by validation."""
    names = ("val/accuracy", "val/calibration_error", "val/margin", "val/loss")
    with (run_dir / "metrics.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row.get(names[0])]
    return [{"step": float(row["step"]), **{name[4:]: float(row[name]) for name in names}} for row in rows]


def rl_config(case: str, seed: int, policy: Path, scorer: Path, steps: int) -> dict[str, Any]:
    """The runs of `benchmarks.learning.noisy_judge`, whose judge is the truth or the reward model."""
    config = judged_config("single, 0%", seed, policy, steps)
    learned = {"path": str(scorer), "bounded": True, "verifier": TRUTH}
    kind = "datamodules.rewards.judges.RewardModel"
    reward: Any = TRUTH if case == CASES[0] else {"class_path": kind, "init_args": learned}
    config["data"]["init_args"]["reward"] = reward
    return config


def result(case: str, seed: int, run_dir: Path, seconds: float) -> dict[str, Any]:
    with (run_dir / "metrics.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row.get("reward")]
    drift = [float(row["reward/drift"]) for row in rows if row.get("reward/drift")]
    tenth = max(1, len(drift) // 10)
    return {
        "case": case,
        "seed": seed,
        "curve": curve(run_dir),
        "drift": [statistics.fmean(drift[:tenth]), statistics.fmean(drift[-tenth:])] if drift else None,
        "seconds": seconds,
    }


def markdown(report: dict[str, Any]) -> str:
    lines = [
        "# A reward model",
        "",
        f"`{report['command']}` on {report['hardware']}. Sharing: {report['sharing'][0]['pairs']} pairs of recorded"
        " airline conversations, float32, one thread; gradients of the two ways differ by at most"
        f" {report['sharing'][0]['gradient_error']:.1e} of the largest.",
        "",
        "| pairs as | tokens | CPU s | of alone |",
        "|---|---|---|---|",
    ]
    alone = report["sharing"][1]
    for row in report["sharing"]:
        share = row["seconds"] / alone["seconds"]
        lines.append(f"| {row['as']} | {row['tokens']:,} | {row['seconds']:.1f} | {share:.2f} |")
    last = report["held_out"][-1]
    lines += [
        "",
        f"Trained on pairs of a right and a wrong sum, {report['pair_steps']} steps of 128 pairs, {HELD_OUT} pairs held"
        " out:",
        "",
        "| steps | held-out accuracy | calibration error | margin | loss |",
        "|---|---|---|---|---|",
        *(
            f"| {row['step']:.0f} | {row['accuracy']:.3f} | {row['calibration_error']:.3f} | {row['margin']:.2f} |"
            f" {row['loss']:.3f} |"
            for row in report["held_out"]
        ),
        "",
        f"As the reward (held-out pairs: {last['accuracy']:.3f}), {report['steps']} steps of {BATCH} prompts x"
        f" {GROUP} replies from the quickstart's warm start. Held-out: greedy answers to 256 sums, by the truth. Drift:"
        " the score, as sigmoid, less the truth, in the first and the last tenth of the steps.",
        "",
        "| reward | held-out before | after, by seed | drift at first, at last |",
        "|---|---|---|---|",
    ]
    for case in dict.fromkeys(one["case"] for one in report["results"]):
        mine = [one for one in report["results"] if one["case"] == case]
        start = statistics.fmean(one["curve"][0][1] for one in mine)
        ends = ", ".join(f"{one['curve'][-1][1]:.3f}" for one in mine)
        drifts = [one["drift"] for one in mine if one["drift"] is not None]
        drift = ", ".join(f"{statistics.fmean(column):+.3f}" for column in zip(*drifts)) if drifts else "-"
        lines.append(f"| {case} | {start:.3f} | {ends} | {drift} |")
    return "\n".join([*lines, ""])


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=80, help="optimizer steps of every run with a reward")
    parser.add_argument("--pair_steps", type=int, default=1500, help="of the reward model")
    parser.add_argument("--warm_steps", type=int, default=500, help="supervised steps of the warm start")
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "reward_model", help="where the runs write")
    parser.add_argument("--deadline_s", type=float, default=1800.0, help="seconds one run may take")
    parser.add_argument("--hardware", default="a CPU", help="what the report says the machine is")
    args = parser.parse_args(argv)
    options = {name: getattr(args, name) for name in ("steps", "pair_steps", "warm_steps")}
    given = " ".join(f"--{name} {value}" for name, value in options.items())
    command = f"python -m benchmarks.learning.reward_model {given}"
    results = finished(args.out / "reward_model.json", command)
    args.out.mkdir(parents=True, exist_ok=True)
    args.runs.mkdir(parents=True, exist_ok=True)
    warm = args.runs / f"warm_{args.warm_steps}"
    if not (warm / "summary.json").exists():  # written last
        run(warm_config("sums", args.warm_steps), warm, args.deadline_s)
    scorer = args.runs / f"reward_model_{args.pair_steps}"
    if not (scorer / "summary.json").exists():
        pairs(args.runs / "train.jsonl", "train", PAIRS, seed=5)
        pairs(args.runs / "held_out.jsonl", "validation", HELD_OUT, seed=6)
        run(preference_config(warm / "model", args.runs, args.pair_steps), scorer, args.deadline_s)
    about = {"command": command, "hardware": args.hardware, **options}
    report: dict[str, Any] = about | {"sharing": sharing(), "held_out": held_out(scorer), "results": results}
    runs = args.runs / time.strftime("%Y-%m-%d_%H-%M-%S")
    for seed in range(args.seeds):
        for case in CASES:
            if any((one["case"], one["seed"]) == (case, seed) for one in results):
                continue
            run_dir, began = runs / f"{case.replace(' ', '_')}_{seed}", time.monotonic()
            run(rl_config(case, seed, warm / "model", scorer / "model", args.steps), run_dir, args.deadline_s)
            results.append(result(case, seed, run_dir, time.monotonic() - began))
            results.sort(key=lambda one: (CASES.index(one["case"]), one["seed"]))
            write_json(args.out / "reward_model.json", report)
            (args.out / "reward_model.md").write_text(markdown(report))
            print(markdown(report), flush=True)
    return report


if __name__ == "__main__":
    main()
