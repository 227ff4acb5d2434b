"""On a CUDA machine: checks torch, attention kernels and gradients, then measures tree training for one model size.

    python -m benchmarks.gpu_suite --size 0.6B --out benchmarks/results       # 0.6B, 1.7B, 4B, 8B; under ten minutes
    python -m benchmarks.gpu_suite --toy --out DIR                            # no GPU needed; figures mean nothing

Data: --data FILE or ${ARBORIST_DATA}/tau/airline_tokens.npz, else synthetic conversations. Qwen3 shapes with random
bf16 weights and float32 gradients; forward and backward, no optimizer. Against dense with gradient checkpointing,
dense-leaf (checkpointing only where its activations do not fit), path-at-a-time and sparse (benchmarks.systems).
Writes gpu_SIZE.json and, where matplotlib is installed, gpu_SIZE.png. Exit code 1 when a check fails.
With --backends the first workload's tree pass is also timed with every attention backend. Needs torch >= 2.11 and
transformers >= 5.17; flash attention is ATen's own, no package.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from app.tree.cost import ModelShape
from app.tree.memory import auto_budgets
from benchmarks.gpu_parity import backends, check_engine, check_kernels, check_torch
from benchmarks.measure import compare, environment, measure, profile, seconds, spread, table
from benchmarks.models import TOY_SHAPE
from benchmarks.systems import Settings, System, make_systems, qwen3
from benchmarks.workloads import DEFAULT_DATA, WORKLOADS, Case, conversations, make_case, parse_size

SHAPES: dict[str, dict[str, Any]] = {
    "0.6B": {"hidden": 1024, "layers": 28, "heads": 16, "key_value_heads": 8, "intermediate": 3072, "tied": True},
    "1.7B": {"hidden": 2048, "layers": 28, "heads": 16, "key_value_heads": 8, "intermediate": 6144, "tied": True},
    "4B": {"hidden": 2560, "layers": 36, "heads": 32, "key_value_heads": 8, "intermediate": 9728, "tied": True},
    "8B": {"hidden": 4096, "layers": 36, "heads": 32, "key_value_heads": 8, "intermediate": 12288, "tied": False},
}


def checks(device: torch.device) -> dict[str, list[dict[str, Any]]]:
    """All checks; matrix products in full float32 meanwhile."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        found = {"torch": check_torch(device), "kernels": check_kernels(device)}
        found["engine"] = check_engine(device) if all(row["ok"] for row in found["torch"]) else []
    finally:
        torch.set_float32_matmul_precision(before)
    return found


def measure_case(model: PreTrainedModel, case: Case, args: argparse.Namespace, deadline: float) -> dict[str, Any]:
    """Times and memory of all systems on one case, and how well the device is used."""
    device = next(model.parameters()).device
    settings = Settings(args.chunk, args.live, args.sample, True, not _leaf_fits(model, case), args.attention)
    systems = make_systems(model, case, settings)
    rows = measure(model, systems, args.repeats, deadline)
    result = {
        "case": case.name,
        "source": case.source,
        "sequences": len(case.sequences),
        "longest": int(case.lengths.max()),
        "systems": rows,
        "against_ours": {"wall_seconds": compare(rows, "wall_seconds")},
        "utilisation": utilisation(model, case, settings, rows),
    }
    if args.profile:
        ours = next(system for system in systems if system.name == "ours")
        result["profile"] = profile(ours.run, device)
    return result


def compare_backends(model: PreTrainedModel, case: Case, args: argparse.Namespace, deadline: float) -> dict[str, Any]:
    """Times and memory of the tree pass with every attention backend that trains on this device, interleaved."""
    device = next(model.parameters()).device
    systems = []
    for name in backends(device):
        made = make_systems(model, case, Settings(args.chunk, args.live, args.sample, attention=name))
        systems.append(replace(next(system for system in made if system.name == "ours"), name=name))
    rows = measure(model, systems, args.repeats, deadline)
    return {
        "case": case.name,
        "systems": rows,
        "utilisation": {name: row["least_flops"] / row["wall_seconds"]["median"] / 1e12 for name, row in rows.items()},
    }


def _leaf_fits(model: PreTrainedModel, case: Case) -> bool:
    """Whether the longest sequence's activations take no more than the engine itself would keep."""
    return int(case.lengths.max()) <= auto_budgets(model, "auto", "auto")[1]


def utilisation(
    model: PreTrainedModel, case: Case, settings: Settings, rows: dict[str, dict[str, Any]]
) -> dict[str, Any]:
    """TFLOP/s of the tree pass beside those of the dense model on one sequence of as many tokens as a chunk has, and
    of a large matrix product."""
    parameter = next(model.parameters())
    device = parameter.device
    chunk = min(auto_budgets(model, settings.chunk_tokens, settings.live_tokens))
    longest = int(case.lengths.argmax())
    one = case.pick([longest])
    tokens = min(chunk, int(one.lengths[0]))
    mask = one.scored[0][:tokens].copy()
    mask[-1] = True  # a turn may lie beyond the cut
    cut = Case(one.workload, 1, 1, one.source, (one.sequences[0][:tokens],), (mask,), one.weights)
    dense: System = make_systems(model, cut, Settings(settings.chunk_tokens, settings.live_tokens))[0]
    rate = _rate(dense.run, dense.flops, device)
    size = 8192 if device.type == "cuda" else 256
    a, b = (torch.randn(size, size, dtype=parameter.dtype, device=device) for _ in range(2))
    product = _rate(lambda: a @ b, 2.0 * size**3, device)
    found: dict[str, Any] = {"dense_tokens": tokens, "dense_tflops": rate, "matrix_product_tflops": product}
    if "ours" in rows:
        ours = rows["ours"]["least_flops"] / rows["ours"]["wall_seconds"]["median"] / 1e12
        found |= {"tree_tflops": ours, "tree_over_dense": ours / rate, "tree_over_product": ours / product}
    return found


def _rate(run: Any, flops: float, device: torch.device) -> float:
    run()
    return flops / spread([seconds(run, device)[0] for _ in range(3)])["median"] / 1e12


def plot(report: dict[str, Any], path: Path) -> bool:
    """Bars of seconds per workload and system; False where matplotlib is missing."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        return False
    cases = report["cases"]
    names = list(dict.fromkeys(name for case in cases for name in case["systems"]))
    figure, axes = pyplot.subplots(figsize=(1.5 + 2.6 * len(cases), 4), layout="constrained")
    width = 0.8 / max(1, len(names))
    for k, name in enumerate(names):
        at = [c + (k - (len(names) - 1) / 2) * width for c, case in enumerate(cases) if name in case["systems"]]
        rows = [case["systems"][name]["wall_seconds"] for case in cases if name in case["systems"]]
        low = [row["median"] - row["min"] for row in rows]
        high = [row["max"] - row["median"] for row in rows]
        axes.bar(at, [row["median"] for row in rows], width * 0.92, yerr=[low, high], label=name, capsize=2)
    axes.set_yscale("log")
    axes.set_xticks(range(len(cases)), [case["case"] for case in cases])
    axes.set_ylabel("seconds, forward and backward (log)")
    axes.set_title(f"{report['model']} on {report['environment']['device']}" + (" (toy)" if report["toy"] else ""))
    axes.legend(frameon=False, fontsize="small")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
    return True


def _summary(found: dict[str, list[dict[str, Any]]]) -> str:
    lines = []
    for name, rows in found.items():
        failed = [row for row in rows if not row["ok"]]
        lines.append(f"checks of {name}: {len(rows) - len(failed)} of {len(rows)} passed")
        lines += [f"  FAILED: {row}" for row in failed]
    return "\n".join(lines)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_suite", description=__doc__.split("\n\n")[0])
    parser.add_argument("--size", choices=list(SHAPES), default="0.6B", help="Qwen3 shape")
    parser.add_argument("--batch", type=parse_size, help="tasks x trials (default 1x4; toy 1x2)")
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=["turns", "think", "whole"])
    parser.add_argument("--data", help=f"token arrays (default {DEFAULT_DATA}, else synthetic conversations)")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--sample", type=int, default=4, help="sequences that stand for all in dense (0: run all)")
    parser.add_argument("--attention", default="auto", help="attention backend of the tree systems")
    parser.add_argument("--backends", action="store_true", help="also time the tree pass with every backend")
    parser.add_argument("--limit", type=float, default=540, help="seconds after which no further work is begun")
    parser.add_argument("--profile", action="store_true", help="also list what the tree pass spends its time on")
    parser.add_argument("--toy", action="store_true", help="the same code at toy size, on the CPU if need be")
    parser.add_argument("--out", help="folder for the results")
    return parser


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    begin = time.perf_counter()
    parser = _parser()
    args = parser.parse_args(argv)
    if not args.toy and not torch.cuda.is_available():
        parser.error("no CUDA device; --toy runs the same code at toy size on the CPU")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu":
        torch.set_num_threads(1)  # matrices this small only lose time to a thread pool
    args.chunk, args.live = (64, 96) if args.toy else ("auto", "auto")
    name, shape, vocabulary = args.size, SHAPES[args.size], 151_936
    if args.toy:
        name, shape, vocabulary = "toy", TOY_SHAPE, 512
    tasks, trials = args.batch or ((1, 2) if args.toy else (1, 4))

    report: dict[str, Any] = {
        "model": f"Qwen3 {name}",
        "toy": args.toy,
        "figures": "GPU" if device.type == "cuda" and not args.toy else "toy size or CPU: these are not GPU figures",
        "attention": args.attention,
        "environment": environment(device),
        "checks": checks(device),
        "cases": [],
        "left_out": [],
    }
    print(_summary(report["checks"]), flush=True)
    report["passed"] = all(row["ok"] for rows in report["checks"].values() for row in rows)
    source, recorded = conversations(args.data, args.toy)
    model = qwen3(**shape, vocabulary=vocabulary, dtype=torch.bfloat16, device=device)
    report["parameters"] = sum(p.numel() for p in model.parameters())
    report["shape"] = vars(ModelShape.of(model.config))
    for k, workload in enumerate(args.workloads):
        now = time.perf_counter()
        left = begin + args.limit - now
        if left <= 0:
            report["left_out"].append(workload)
            continue
        case = make_case(source, recorded, workload, tasks, trials, vocabulary)
        result = measure_case(model, case, args, now + left / (len(args.workloads) - k))
        report["cases"].append(result)
        print(f"\n## {report['model']}, {case.name}: {report['figures']}\n\n{table(result, 'wall_seconds')}")
        print(json.dumps({"utilisation": result["utilisation"]}), flush=True)
        _write(report, args.out, name)
        if args.backends and k == 0:
            report["backends"] = compare_backends(model, case, args, now + left / (len(args.workloads) - k))
            print(json.dumps({"tflops by backend": report["backends"]["utilisation"]}), flush=True)
    if report["left_out"]:
        print(f"out of time, not measured: {', '.join(report['left_out'])}")
    if args.out:
        folder = Path(args.out)
        report["plot"] = plot(report, folder / f"gpu_{name}.png")
    report["seconds"] = time.perf_counter() - begin
    _write(report, args.out, name)
    return report


def _write(report: dict[str, Any], out: str | None, name: str) -> None:
    if out:
        folder = Path(out)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"gpu_{name}.json").write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(0 if main()["passed"] else 1)
