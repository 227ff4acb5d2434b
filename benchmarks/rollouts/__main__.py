"""Rollouts from a real SGLang server on CPU: what our engine costs, what asynchrony and the tree gain.

    python -m benchmarks.rollouts                                # needs `make sglang`, ARBORIST_DATA; 10 minutes
    python -m benchmarks.rollouts --quick --out DIR              # toy size
    python -m benchmarks.rollouts --only throughput
    python -m benchmarks.rollouts --quickstart RUN RUN    # reads two finished fits of the quickstart, runs nothing

Writes rollouts.json, rollouts.md and pictures (--name) into --out; parts that are not asked for keep what the file
has of them. Trainer, server and load generator share the machine's cores. Parts: `throughput` (tokens a second beside a
bare load generator, and of the agents' gateway), `downtime` (of a weight update), `runs` (waiting, tree pass, optimizer
and sync of whole fits), `latency` (the same with a model so light that
tools, not the server's computing, are what episodes wait for).
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.common.records import write_json

if TYPE_CHECKING:
    from benchmarks.rollouts.runs import Work

PARTS = ("throughput", "downtime", "runs", "latency")
MODEL = {
    "model_type": "qwen3",
    "vocab_size": 8192,
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 16384,
    "tie_word_embeddings": True,
    "bos_token_id": None,
    "pad_token_id": 0,
    "eos_token_id": 1,
}
LIGHT = MODEL | {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
SPEED = {"concurrent": 32, "requests": 64, "prompt_tokens": 128, "new_tokens": 128, "repeats": 11}
QUICK_SPEED = {"concurrent": 4, "requests": 8, "prompt_tokens": 16, "new_tokens": 8, "repeats": 1}
DOWN = {"concurrent": 32, "new_tokens": 256, "repeats": 10}
QUICK_DOWN = {"concurrent": 2, "new_tokens": 200, "repeats": 1}


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.rollouts", description=__doc__.split("\n\n")[0])
    parser.add_argument("--quick", action="store_true", help="toy size, figures without meaning")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--data", help="recorded conversations (default: ${ARBORIST_DATA}/tau/airline_tokens.npz)")
    parser.add_argument("--steps", type=int, default=12, help="optimizer steps of each run")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each setting")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/rollouts"))
    parser.add_argument("--name", default="rollouts")
    parser.add_argument(
        "--quickstart", nargs="+", type=Path, metavar="RUN", help="run directories of quickstart fits, to put beside"
    )
    args = parser.parse_args(argv)
    if args.steps < 2 or args.repeats < 1:
        parser.error("--steps must be at least 2, --repeats at least 1")
    args.out.mkdir(parents=True, exist_ok=True)
    file = args.out / f"{args.name}.json"
    result: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    if args.quickstart:
        command = "python -m app fit --config configs/quickstart.yaml [--config configs/quickstart_sglang.yaml]"
        _keep(result, "quickstart", _finished(args.quickstart), f"{command} --model.model.path DIR", args)
        return result

    import torch

    from benchmarks.common.servers import Servers
    from benchmarks.rollouts.runs import Work, draw
    from modules import ModelSource, build_model

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for model in (MODEL, LIGHT):
            parts = [part for part in args.only if (part == "latency") == (model is LIGHT)]
            if not parts:
                continue
            work = Work(args.data or "${ARBORIST_DATA}/tau/airline_tokens.npz", model, 16, 4, args.steps, 4)
            if args.quick:
                work = Work(work.data, model, 2, 4, min(args.steps, 2), 2, 0.01)
            with tempfile.TemporaryDirectory(prefix="arborist-rollouts-") as made:
                scratch = Path(made)
                policy = build_model(ModelSource(config=model)).eval()
                policy.save_pretrained(scratch / "model")
                cache = 65536 if args.quick else 262144
                count = 2 if model is LIGHT else 1  # enough that the tools are the bottleneck
                servers = Servers(scratch / "model", 16384, scratch, count=count, kv_cache_tokens=cache)
                try:
                    servers.start()
                    for part in parts:
                        measured = _measure(part, servers, policy, scratch, work, args)
                        _keep(result, part, measured, _command(args, part), args)
                        if part in ("runs", "latency"):
                            draw(measured, args.out / f"{args.name}_{part}.png")
                finally:
                    servers.close()
    finally:
        torch.set_num_threads(threads)
    return result


def _keep(result: dict[str, Any], part: str, measured: dict[str, Any], command: str, args: Any) -> None:
    """Adds a part to `result` and writes the files again."""
    result[part] = measured | {
        "command": command,
        "cores": os.cpu_count(),
        "load": [round(value, 1) for value in os.getloadavg()],
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
    }
    write_json(args.out / f"{args.name}.json", result)
    (args.out / f"{args.name}.md").write_text(markdown(result, args.name))


def _finished(runs: Sequence[Path]) -> dict[str, Any]:
    """Accuracy and seconds of finished fits, by the name of their rollout engine."""
    import yaml

    from callbacks.pictures import read_metrics

    engines: dict[str, Any] = {}
    for run in runs:
        engine = yaml.safe_load((run / "config.yaml").read_text())["data"]["init_args"]["engine"]["class_path"]
        steps, accuracy = read_metrics(run / "metrics.csv")["val/accuracy"]
        curve = {int(step): value for step, value in zip(steps, accuracy, strict=True)}
        engines[engine.rpartition(".")[2]] = json.loads((run / "summary.json").read_text()) | {"curve": curve}
    return {"engines": engines}


def _measure(part: str, servers: Any, policy: Any, scratch: Path, work: Work, args: Any) -> dict[str, Any]:
    from benchmarks.rollouts.runs import compare_runs
    from benchmarks.rollouts.speed import downtime, throughput

    url = servers.urls[0]
    if part == "throughput":
        return throughput(url, policy, scratch / part, QUICK_SPEED if args.quick else SPEED)
    if part == "downtime":
        scale = QUICK_DOWN if args.quick else DOWN
        return {"scale": scale, "methods": downtime(url, policy, scratch / part, scale)}
    return compare_runs(work, 1 if args.quick else args.repeats, scratch / part, servers)


def _command(args: Any, part: str) -> str:
    fits = part in ("runs", "latency")
    steps = [f"--steps {args.steps}"] * (fits and args.steps != 12)
    repeats = [f"--repeats {args.repeats}"] * (fits and args.repeats != 3)
    return " ".join(["python -m benchmarks.rollouts --only", part, *["--quick"] * args.quick, *steps, *repeats])


def markdown(result: dict[str, Any], name: str) -> str:
    lines = [
        "# Rollouts from a real SGLang server",
        "",
        "SGLang on CPU (float32, one thread), a Qwen3 shape with random weights and a vocabulary of 8,192 (hidden size"
        " 64 and 2 layers where nothing else is said); trainer, servers and load generator share the cores."
        " Medians (least-most); load averages are those at the end of a part: above what the part itself needs (1"
        " to 3), others worked on the machine.",
    ]
    sections = {
        "throughput": _throughput,
        "downtime": _downtime,
        "runs": partial(_runs, "runs"),
        "latency": partial(_runs, "latency"),
        "quickstart": _quickstart,
    }
    for part, section in sections.items():
        if part in result:
            one = result[part]
            lines += ["", *section(one, name), "", f"`{one['command']}`, {one['date']}, {one['cores']} cores, load"]
            lines[-1] += f" averages {', '.join(map(str, one['load']))}."
    return "\n".join(lines) + "\n"


def _throughput(one: dict[str, Any], name: str) -> list[str]:
    rates, cpu = one["tokens_per_second"], one["client_cpu_seconds"]
    return [
        f"## Engine beside a bare load generator, and the agents' gateway, {one['concurrent']} concurrent requests",
        "",
        f"{one['requests']} requests of about {one['prompt_tokens']} + {one['new_tokens']} tokens with"
        f" log-probabilities, {one['repeats']} interleaved repeats. The bare one posts and reads JSON, without"
        " streaming, and checks nothing. Through the gateway each is a chat of its own session, its client's HTTP and"
        " JSON included.",
        "",
        "| | tokens/s | CPU seconds of the client |",
        "|---|---|---|",
        *(f"| {key} | {_range(rates[key], 0)} | {_range(cpu[key], 2)} |" for key in rates),
        f"| ours / bare (wanted: at least {one['wanted']}) | {_range(one['ratio'], 3)} | |",
        f"| gateway / ours (wanted: at least {one['wanted']}) | {_range(one['gateway_ratio'], 3)} | |",
    ]


def _downtime(one: dict[str, Any], name: str) -> list[str]:
    lines = [
        f"## Weight updates during {one['scale']['concurrent']} running requests",
        "",
        "| method | updates | standing still (s) | of those in the server's calls (s) | above them (s) | wanted |",
        "|" + "---|" * 6,
    ]
    for method, row in one["methods"].items():
        cells = (_range(row[key], 3) for key in ("downtime_s", "update_s", "over_s"))
        lines.append(f"| {method} | {row['updates']} | {' | '.join(cells)} | at most {row['wanted_s']} |")
    return lines


def _runs(part: str, one: dict[str, Any], name: str) -> list[str]:
    model = one["model"]
    bound = "the server's computing" if part == "runs" else "the tools' latency"
    columns = ("wall", "wait", "prepare", "tree", "optimizer", "sync", "other", "cpu_trainer", "cpu_server")
    lines = [
        f"## Whole runs on replayed airline conversations, bound by {bound}",
        "",
        f"{one.get('servers', 1)} server(s), {one['steps']} optimizer steps. A model of hidden size"
        f" {model['hidden_size']}, {model['num_hidden_layers']} layer(s), {model['num_attention_heads']} heads of"
        f" {model['head_dim']}."
        f" A step trains one task: {one['group_size']} episodes of the first {one['turns']} turns, replies as long as"
        f" recorded (at most {one['new_tokens']} tokens), {1000 * one['latency_s']:.0f} ms for every turn's tools."
        " Asynchronous: `max_staleness: 2`. Seconds of all steps:",
        "",
        f"![where the time goes]({name}_{part}.png)",
        "",
        "| | " + " | ".join(columns).replace("_", " ") + " |",
        "|" + "---|" * (len(columns) + 1),
    ]
    for setting, row in one["settings"].items():
        lines.append(f"| {setting} | " + " | ".join(_range(row[key], 1) for key in columns) + " |")
    row = next(iter(one["settings"].values()))
    dense, leaf, tree = (row[f"tokens_{key}"]["median"] for key in ("dense", "leaf", "tree"))
    return [
        *lines,
        "",
        f"- trainer idle (`wait`), asynchronous over synchronous, both on the tree: {_range(one['idle_ratio'], 2)}"
        + (f" (wanted: at most {one['idle_wanted']})" if part == "latency" else ""),
        f"- wall time, synchronous dense-leaf over asynchronous tree: {_range(one['speedup'], 2)}; of that asynchrony"
        f" {_range(one['speedup_of_asynchrony'], 2)}, the tree {_range(one['speedup_of_tree'], 2)}",
        f"- tokens of all steps: dense {dense:,.0f}, leaf {leaf:,.0f}, tree {tree:,.0f}",
        *(f"- {note}" for note in one.get("notes", [])),
    ]


def _quickstart(one: dict[str, Any], name: str) -> list[str]:
    lines = [
        "## The quickstart's task, embedded and on a real server",
        "",
        "From one warm start, one after the other. Held-out accuracy of 256 sums, greedy answers:",
        "",
        "| engine | steps | seconds | " + " | ".join(f"after {step}" for step in _first(one)["curve"]) + " |",
        "|---|---|---|" + "---|" * len(_first(one)["curve"]),
    ]
    for engine, row in one["engines"].items():
        cells = [engine, str(row["steps"]), f"{row['seconds']:.0f}", *(f"{v:.3f}" for v in row["curve"].values())]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _first(one: dict[str, Any]) -> dict[str, Any]:
    return next(iter(one["engines"].values()))


def _range(values: dict[str, Any], digits: int) -> str:
    shown = (f"{values[key]:,.{digits}f}" for key in ("median", "min", "max"))
    return "{} ({}-{})".format(*shown)


if __name__ == "__main__":
    main()
