"""On a CUDA machine: checks torch, attention kernels and gradients, measures tree training; one command a question.

    python -m benchmarks.gpu_suite --checks flash --workloads none --out DIR                # does it run? 3 minutes
    python -m benchmarks.gpu_suite --checks none --size 0.6B --workloads whole think --profile \\
        --sweep chunk=2048,8192,32768 head=220,4096 attention=flash,cudnn,triton elementwise=compile \\
        --out DIR                                                                           # is it faster? 9 minutes
    python -m benchmarks.gpu_suite --checks none --size 8B --workloads whole --out DIR      # and at 8B? 9 minutes
    python -m benchmarks.gpu_suite --checks none --workloads none --train 4B --out DIR      # whole steps, 6 minutes
    python -m benchmarks.gpu_suite --checks none --workloads none --hybrid 4B --out DIR     # Qwen3.5, 9 minutes
    python -m benchmarks.gpu_suite --checks none --workloads none --decode 0.6B --out DIR   # CUDA graphs, 2 minutes
    python -m benchmarks.gpu_suite --checks flex --workloads none --out DIR                 # FlexAttention, compiled
    python -m benchmarks.gpu_suite --toy --out DIR                        # no GPU needed; figures mean nothing

What fits: up to 4B either card (80 GB of an H100, 141 GB of an H200), 8B an H200 (on an H100 with short chunks that
run twice); --train takes 18 bytes a parameter beside activations: 1.7B on an H100, 4B on an H200; --hybrid 4B either.

Data: --data FILE or ${ARBORIST_DATA}/tau/airline_tokens.npz, else synthetic conversations; which, is printed and
written. Qwen3 shapes with random bf16 weights and float32 gradients; forward and backward, no optimizer (but with
--train). Against dense with gradient checkpointing, dense-leaf (checkpointing only where its activations do not fit; on
a GPU also kept to flash kernels, as ours are), path-at-a-time and sparse (benchmarks.common.systems). Every size writes
gpu_SIZE.json, anew after each timed run, and gpu_SIZE.png where matplotlib is installed; checks write gpu_checks.json
after each group of them, --train gpu_train.json after each step. All files of a folder make one page, gpu.md, beside
what was expected. --hybrid: eight answers of 64, 128 and 1,024 tokens to a prompt of 16,384, as gpu_hybrid_SIZE.json.
--decode: tokens a second of the embedded engine for 1, 16 and 128 requests at a time, as gpu_decode_SIZE.json.

What fails (a check, a system, a part, an import) is printed and written as `failed`, the rest goes on, and the exit
code is 1; what --limit leaves no time for is `left_out`. Needs torch >= 2.11 and transformers >= 5.17, --train and
--decode also what benchmarks/README.md lists; flash attention is ATen's own, no package; scans of hybrid models run on
kernels where fla-core is installed.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import PreTrainedModel

from app.tree.memory import auto_budgets
from benchmarks.common.failures import described, noted
from benchmarks.common.measure import compare, environment, measure, profile, seconds, spread, table
from benchmarks.common.memory import fitting, of_predicted
from benchmarks.common.models import TOY_SHAPE
from benchmarks.common.records import write_json
from benchmarks.common.systems import NAMES, Settings, System, make_systems, qwen3
from benchmarks.common.workloads import DEFAULT_DATA, WORKLOADS, Case, conversations, make_case, parse_size
from benchmarks.gpu import hybrids
from benchmarks.gpu.decode import add_decoding, check_decoding
from benchmarks.gpu.interval import check_interval
from benchmarks.gpu.page import UNDERSTOOD, write_page
from benchmarks.gpu.parity import backends, check_engine, check_kernels, check_margin, check_torch

SHAPES: dict[str, dict[str, Any]] = {
    "0.6B": {"hidden": 1024, "layers": 28, "heads": 16, "key_value_heads": 8, "intermediate": 3072, "tied": True},
    "1.7B": {"hidden": 2048, "layers": 28, "heads": 16, "key_value_heads": 8, "intermediate": 6144, "tied": True},
    "4B": {"hidden": 2560, "layers": 36, "heads": 32, "key_value_heads": 8, "intermediate": 9728, "tied": True},
    "8B": {"hidden": 4096, "layers": 36, "heads": 32, "key_value_heads": 8, "intermediate": 12288, "tied": False},
}
VOCABULARY = 151_936
SWEPT = {**{one: f"{one}_tokens" for one in ("chunk", "live", "head")}, **{x: x for x in ("attention", "elementwise")}}
"""What --sweep may change, and the setting it is."""


def checks(
    device: torch.device,
    level: str,
    seeds: int = 3,
    so_far: Callable[[dict[str, list[dict[str, Any]]]], None] = lambda found: None,
) -> dict[str, list[dict[str, Any]]]:
    """The checks of a level: "flash", all but compiled kernels; "flex", gradients with compiled kernels alone; "all".
    Matrix products in full float32 meanwhile. `so_far`: is given those that have run, after each group."""
    groups: dict[str, Callable[[], list[dict[str, Any]]]]
    cuda = device.type == "cuda"
    if level == "flex":
        groups = {"engine": lambda: check_engine(device, ("flex",) if cuda else ("auto",))}
        if cuda:  # code generation for CPUs takes minutes and is torch's own affair
            groups["elementwise"] = lambda: check_engine(device, elementwise="compile")
    else:
        trained = backends(device, compiled=level == "all") if cuda else ()  # a CPU has what "auto" is
        groups = {
            "torch": lambda: check_torch(device),
            "kernels": lambda: check_kernels(device),
            "engine": lambda: check_engine(device, ("auto", *trained)),
            "self_check": lambda: check_margin(device, seeds),
            "interval": lambda: check_interval(device, (64, 128, 256) if cuda else ()),
            "decoding": lambda: check_decoding(device),
            "states": lambda: hybrids.check_states(device, level == "all"),
        }
    found: dict[str, list[dict[str, Any]]] = {}
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        for name, group in groups.items():
            failed: dict[str, str] = {}
            with noted(failed, f"checks of {name}"):
                found[name] = group()
            if failed:
                found[name] = [{"check": name, "ok": False, "error": error} for error in failed.values()]
            so_far(found)
    finally:
        torch.set_float32_matmul_precision(before)
    return found


def measure_case(
    model: PreTrainedModel,
    case: Case,
    args: argparse.Namespace,
    deadline: float,
    so_far: Callable[[dict[str, Any]], None],
) -> dict[str, Any]:
    """Times and memory of all systems on one case, and how well the device is used. `so_far`: is given what there is
    after each timed run."""
    device = next(model.parameters()).device
    settings = Settings(args.chunk, args.live, args.sample, True, not _leaf_fits(model, case), args.attention)
    chosen = replace(settings, systems=("ours", *args.systems))
    systems, left_out = fitting(make_systems(model, case, chosen), device)
    for leaf in [x for x in systems if x.name == "dense-leaf" and device.type == "cuda"]:
        # There transformers' attention may choose cuDNN's kernels, another family than ours.
        systems.append(replace(leaf, name="dense-leaf, flash", run=_with_flash(leaf.run)))
    systems.sort(key=lambda system: system.name != "ours")  # what one is here for
    failed: dict[str, str] = {}
    result: dict[str, Any] = {
        "case": case.name,
        "source": case.source,
        "sequences": len(case.sequences),
        "longest": int(case.lengths.max()),
        "systems": {},
        "against_ours": {"wall_seconds": {}},
        "utilisation": {},
        "memory_of_predicted": {},
        "left_out": left_out,
        "failed": failed,
    }
    rows = measure(
        model, systems, args.repeats, deadline, _say, failed, lambda some: so_far(result | {"systems": some}), left_out
    )
    result |= {"systems": rows, "against_ours": {"wall_seconds": compare(rows, "wall_seconds")}}
    result["memory_of_predicted"] = of_predicted(rows)
    so_far(result)
    with noted(failed, "utilisation"):
        result["utilisation"] = utilisation(model, case, settings, rows)
    if args.profile and "ours" in rows:
        with noted(failed, "profile"):
            result["profile"] = profile(next(system for system in systems if system.name == "ours").run, device, 40)
    return result


def sweep(
    model: PreTrainedModel,
    case: Case,
    args: argparse.Namespace,
    deadline: float,
    so_far: Callable[[dict[str, Any]], None],
) -> dict[str, Any]:
    """Times and memory of the tree pass at other settings, one changed at a time, interleaved with the usual ones.
    `so_far`: as in `measure_case`."""
    usual = Settings(args.chunk, args.live, args.sample, attention=args.attention, systems=("ours",))
    points = [("ours", usual)]
    for name, values in args.sweep:
        points += [(f"{name}={value}", replace(usual, **{SWEPT[name]: value})) for value in values]
    systems, failed, left_out = list[System](), dict[str, str](), list[str]()
    for name, settings in points:
        with noted(failed, name):
            systems.append(replace(make_systems(model, case, settings)[0], name=name))

    def result(rows: dict[str, dict[str, Any]]) -> dict[str, Any]:
        return {
            "case": case.name,
            "systems": rows,
            "tflops": {name: row["least_flops"] / row["wall_seconds"]["median"] / 1e12 for name, row in rows.items()},
            "memory_of_predicted": of_predicted(rows),
            "failed": failed,
            "left_out": left_out,
        }

    rows = measure(model, systems, args.repeats, deadline, _say, failed, lambda some: so_far(result(some)), left_out)
    return result(rows)


def _with_flash(run: Callable[[], Any]) -> Callable[[], Any]:
    def restricted() -> None:
        with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
            run()

    return restricted


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
    margins = [row for row in found.get("self_check", []) if "margin" in row]
    if margins:
        largest = max(max(row["outputs"], row["gradients"]) for row in margins)
        lines.append(f"self-check of right models: at most {largest:.2f} of {margins[0]['margin']:g} allowed")
    return "\n".join(lines)


def _say(line: str) -> None:
    print(f"  {line}", flush=True)


def _swept(text: str) -> tuple[str, list[int | str]]:
    name, _, values = text.partition("=")
    if name not in SWEPT or not values:
        raise argparse.ArgumentTypeError(f"{text!r}: expected NAME=VALUE,VALUE with NAME out of {sorted(SWEPT)}")
    if name in ("attention", "elementwise"):
        return name, list(values.split(","))
    if not all(value.isdigit() and int(value) for value in values.split(",")):
        raise argparse.ArgumentTypeError(f"{text!r}: expected numbers of tokens of at least 1 after {name}=")
    return name, [int(value) for value in values.split(",")]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_suite", description=__doc__.split("\n\n")[0])
    parser.add_argument("--checks", choices=("none", "flash", "flex", "all"), default="all", help="what is checked")
    parser.add_argument("--size", nargs="+", choices=list(SHAPES), default=["0.6B"], help="Qwen3 shapes, one by one")
    parser.add_argument("--batch", type=parse_size, help="tasks x trials (default 8x4; toy 1x2)")
    parser.add_argument("--workloads", nargs="+", choices=(*WORKLOADS, "none"), default=["turns", "think", "whole"])
    parser.add_argument("--systems", nargs="*", choices=NAMES, default=NAMES, help="what is measured beside ours")
    parser.add_argument("--data", help=f"token arrays (default {DEFAULT_DATA}, else synthetic conversations)")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--sample", type=int, default=4, help="sequences that stand for all in dense (0: run all)")
    parser.add_argument("--attention", default="auto", help="attention backend of the tree systems")
    parser.add_argument(
        "--sweep",
        nargs="+",
        type=_swept,
        default=[],
        metavar="NAME=VALUE,VALUE",
        help="also time the first workload's tree pass at these: chunk, live, head (tokens), attention, elementwise",
    )
    parser.add_argument("--train", choices=list(SHAPES), help="also whole optimizer steps under DTAStrategy, this size")
    parser.add_argument("--hybrid", choices=list(hybrids.SHAPES), help="also Qwen3.5 of this size, long prompts")
    parser.add_argument("--decode", choices=list(SHAPES), help="also decoding with and without CUDA graphs, this size")
    parser.add_argument("--limit", type=float, default=540, help="seconds after which no further work is begun")
    parser.add_argument("--profile", action="store_true", help="also list what the tree pass spends its time on")
    parser.add_argument("--toy", action="store_true", help="the same code at toy size, on the CPU if need be")
    parser.add_argument("--out", help="folder for the results")
    return parser


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Runs what `argv` asks for; returns the report of the last part, with whether all of them `passed`."""
    begin = time.perf_counter()
    parser = _parser()
    args = parser.parse_args(argv)
    if not args.toy and not torch.cuda.is_available():
        parser.error("no CUDA device; --toy runs the same code at toy size on the CPU")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu":
        torch.set_num_threads(1)  # matrices this small only lose time to a thread pool
    args.chunk, args.live = (64, 96) if args.toy else ("auto", "auto")
    args.workloads = [workload for workload in args.workloads if workload != "none"]
    common: dict[str, Any] = {
        "toy": args.toy,
        "figures": "GPU" if device.type == "cuda" and not args.toy else "toy size or CPU: these are not GPU figures",
        "attention": args.attention,
        "environment": environment(device),
        "checks": {},
        "left_out": [],
        "failed": {},
    }
    passed = True
    if args.checks != "none":
        seeds = 1 if args.toy else 3
        found = checks(device, args.checks, seeds, lambda some: _write(common | {"checks": some}, args.out, "checks"))
        common["checks"] = found
        passed = _write(common, args.out, "checks")
        print(_summary(found), flush=True)
    if args.workloads or args.train:
        common["conversations"] = conversations(args.data, args.toy)[0]
        print(f"conversations: {common['conversations']}", flush=True)
    report = common
    sizes = (["toy"] if args.toy else args.size) if args.workloads else []
    for k, name in enumerate(sizes):
        now = time.perf_counter()
        share = now + (begin + args.limit - now) / (len(sizes) - k)
        report = measure_size(name, args, device, common | {"left_out": [], "failed": {}}, share)
        passed &= report["passed"]
    if args.hybrid:
        report = measure_hybrid(args, device, common | {"left_out": [], "failed": {}}, begin + args.limit)
        passed &= report["passed"]
    if args.decode:
        name, shape, size = ("toy", TOY_SHAPE, 512) if args.toy else (args.decode, SHAPES[args.decode], VOCABULARY)
        report = common | {"left_out": [], "failed": {}, "model": f"Qwen3 {name}, decoding"}
        make = partial(qwen3, **shape, vocabulary=size, dtype=torch.bfloat16, device=device)
        add_decoding(make, args.toy, report, partial(_write, report, args.out, f"decode_{name}"))
        passed &= report["passed"]
    if args.train:
        report = common | {"left_out": [], "failed": {}}
        _train("toy" if args.toy else args.train, args, device, report)
        passed &= _write(report, args.out, "train")
        print(json.dumps({"train": report["train"]}), flush=True)
    return report | {"passed": passed}


def measure_size(
    name: str, args: argparse.Namespace, device: torch.device, report: dict[str, Any], deadline: float
) -> dict[str, Any]:
    """All workloads and the sweep of one size, written as they are measured; `deadline` of `time.perf_counter`."""
    begin = time.perf_counter()
    shape, vocabulary = (TOY_SHAPE, 512) if args.toy else (SHAPES[name], VOCABULARY)
    tasks, trials = args.batch or ((1, 2) if args.toy else (8, 4))
    source, recorded = conversations(args.data, args.toy)
    report |= {"model": f"Qwen3 {name}", "cases": []}
    works = [*args.workloads[:1], *(["sweep"] if args.sweep else []), *args.workloads[1:]]
    with noted(report["failed"], report["model"]):
        model = qwen3(**shape, vocabulary=vocabulary, dtype=torch.bfloat16, device=device)
        report["parameters"] = sum(p.numel() for p in model.parameters())
        report["shape"] = shape | {"vocabulary": vocabulary}
    for k, work in enumerate(works if "shape" in report else ()):
        now = time.perf_counter()
        if now >= deadline:
            report["left_out"].append(work)
            continue
        until = now + (deadline - now) / (len(works) - k)
        with noted(report["failed"], work):
            named = args.workloads[0] if work == "sweep" else work
            case = make_case(source, recorded, named, tasks, trials, vocabulary)
            if work == "sweep":
                report["sweep"] = sweep(
                    model, case, args, until, lambda some: _write(report | {"sweep": some}, args.out, name)
                )
                print(json.dumps({"TFLOP/s": report["sweep"]["tflops"]}), flush=True)
            else:
                _add_case(model, case, args, until, report, name)
        _write(report, args.out, name)
    if report["left_out"]:
        print(f"out of time, not measured: {', '.join(report['left_out'])}")
    if args.out:
        with noted(report["failed"], "plot"):
            report["plot"] = plot(report, Path(args.out) / f"gpu_{name}.png")
    report["seconds"] = time.perf_counter() - begin
    _write(report, args.out, name)
    return report


def measure_hybrid(
    args: argparse.Namespace, device: torch.device, report: dict[str, Any], deadline: float
) -> dict[str, Any]:
    """Answers of each length to one long prompt, beside dense, written as they are measured."""
    name = "toy" if args.toy else args.hybrid
    report |= {"model": f"Qwen3.5 {name}", "cases": []}
    model = None
    with noted(report["failed"], report["model"]):
        model = hybrids.build(args.hybrid, args.toy, torch.bfloat16, device)
        report["parameters"] = sum(p.numel() for p in model.parameters())
    for k, answer in enumerate(hybrids.ANSWERS if model is not None else ()):
        now, one = time.perf_counter(), hybrids.case(answer, model.config.vocab_size, args.toy)
        if now >= deadline:
            report["left_out"].append(one.name)
            continue
        until = now + (deadline - now) / (len(hybrids.ANSWERS) - k)
        with noted(report["failed"], one.name):
            _add_case(model, one, args, until, report, f"hybrid_{name}")
        _write(report, args.out, f"hybrid_{name}")
    _write(report, args.out, f"hybrid_{name}")
    return report


def _add_case(
    model: PreTrainedModel, case: Case, args: argparse.Namespace, until: float, report: dict[str, Any], name: str
) -> None:
    """Measures a case and adds it to the report, which is written meanwhile."""
    before = report["cases"]
    result = measure_case(
        model, case, args, until, lambda some: _write(report | {"cases": [*before, some]}, args.out, name)
    )
    size = report["model"].removeprefix("Qwen3 ")
    if not args.toy and case.workload == "whole" and size in UNDERSTOOD and "tree_tflops" in result["utilisation"]:
        result["utilisation"]["understood_from"] = UNDERSTOOD[size]
    report["cases"] = [*before, result]
    print(f"\n## {report['model']}, {case.name}: {report['figures']}\n\n{table(result, 'wall_seconds')}")
    print(json.dumps({key: result[key] for key in ("utilisation", "memory_of_predicted")}), flush=True)


def _train(name: str, args: argparse.Namespace, device: torch.device, report: dict[str, Any]) -> None:
    """Adds whole steps to the report, written after each."""
    failed: dict[str, str] = report["failed"]
    report["train"] = {"steps": []}
    try:
        from benchmarks.gpu.train import train
    except ImportError as error:  # images carry torch and transformers, not always Lightning and what its CLI needs
        failed["train"] = f"left out, for want of the module {error.name or described(error)}; see benchmarks/README.md"
        print(f"FAILED: --train is {failed['train']}", flush=True)
        return
    shape, vocabulary = (TOY_SHAPE, 512) if args.toy else (SHAPES[name], VOCABULARY)
    source, recorded = conversations(args.data, args.toy)

    def so_far(found: dict[str, Any]) -> None:
        report["train"] = found
        _write(report, args.out, "train")

    with noted(failed, "train"):
        train(shape, vocabulary, source, recorded, device, args.toy, so_far)
    if failed:
        failed["train"] += f" (in step {1 + len(report['train']['steps'])})"


def _passed(report: dict[str, Any]) -> bool:
    """Whether every check is right and nothing failed."""
    parts = [report, *report.get("cases", []), report.get("sweep", {})]
    right = all(row["ok"] for rows in report["checks"].values() for row in rows)
    return right and not any(part.get("failed") for part in parts)


def _write(report: dict[str, Any], out: str | None, name: str) -> bool:
    """Of a report into its file, and the page; whether all passed until now."""
    report["passed"] = _passed(report)
    if out:
        folder = Path(out)
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / f"gpu_{name}.json", report)
        write_page(folder)
    return bool(report["passed"])


if __name__ == "__main__":
    sys.exit(0 if main()["passed"] else 1)
