"""Interleaved timing and peak memory of systems in one process, and the ratios and tables made of them.

Promises: all systems take turns within a repeat, in an order that rotates, so a busy machine slows them alike; ratios
are formed within a repeat and their median is reported; CPU seconds are of all threads of the process.
"""

from __future__ import annotations

import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
import transformers
from torch.autograd import DeviceType
from transformers import PreTrainedModel

from benchmarks.common.failures import noted
from benchmarks.common.memory import Resident, peak_bytes
from benchmarks.common.systems import System, zero_gradients


def measure(
    model: PreTrainedModel,
    systems: Sequence[System],
    repeats: int,
    deadline: float | None = None,
    progress: Callable[[str], None] = lambda line: None,
    failed: dict[str, str] | None = None,
    so_far: Callable[[dict[str, dict[str, Any]]], None] = lambda rows: None,
    left_out: list[str] | None = None,
) -> dict[str, dict[str, Any]]:
    """Each system's row: counts, seconds scaled to all of the case, peak memory.

    With more than one repeat, or on a GPU, a first round warms up and measures `peak_bytes`, and on a GPU
    `first_seconds`: what new shapes cost (kernels that are loaded or compiled, cuDNN's plans). `resident_bytes` is the
    least of the timed rounds', and rough. Systems that fail are left out: for want of GPU memory, or, with `failed`,
    by any error, which it then has by the system's name; so are those that alone would not end before the deadline.

    Args:
        deadline: of `time.perf_counter`; no further repeat starts that would end after it; at least one is made.
        progress: is told what was done.
        so_far: is given the rows of the systems that have been timed, after each time.
        left_out: gets the names of those for which no time was left, with their seconds.
    """
    device = next(model.parameters()).device
    kind = torch.OutOfMemoryError if failed is None else Exception
    failed = {} if failed is None else failed
    rows = {system.name: _row(system) | {"peak_bytes": None, "first_seconds": None} for system in systems}
    late: set[str] = set()
    if repeats > 1 or device.type == "cuda":
        for system in systems:
            begin = time.perf_counter()
            with noted(failed, system.name, kind):
                zero_gradients(model)
                rows[system.name]["peak_bytes"] = peak_bytes(system.run, device)
            now = time.perf_counter()
            if device.type == "cuda":  # a CPU's allocations are traced meanwhile, which takes longer
                rows[system.name]["first_seconds"] = (now - begin) / system.share
                if deadline is not None and now + (now - begin) > deadline and system.name not in failed:
                    late.add(system.name)
                    if left_out is not None:
                        left_out.append(f"{system.name} ({now - begin:.0f} s: no time left)")
            progress(f"memory of {system.name}, {now - begin:.1f} s")
    runs: dict[str, list[tuple[float, float, int | None]]] = {system.name: [] for system in systems}
    for repeat in range(repeats):
        begin = time.perf_counter()
        for k in range(len(systems)):
            system = systems[(k + repeat) % len(systems)]
            if system.name in failed or system.name in late:
                continue
            with noted(failed, system.name, kind):
                zero_gradients(model)
                with Resident(device) as resident:
                    wall, cpu = seconds(system.run, device)
                runs[system.name].append((wall / system.share, cpu / system.share, resident.bytes))
                progress(f"repeat {repeat + 1} of {repeats}: {system.name} {cpu:.1f} CPU s, {wall:.1f} s")
            so_far(_timed(rows, runs, failed))
        now = time.perf_counter()
        if deadline is not None and now + (now - begin) > deadline:
            break
    return _timed(rows, runs, failed)


def _timed(
    rows: dict[str, dict[str, Any]], runs: dict[str, list[tuple[float, float, int | None]]], failed: dict[str, str]
) -> dict[str, dict[str, Any]]:
    """Rows of the systems that were timed and have not failed, with their times."""
    found: dict[str, dict[str, Any]] = {}
    for name, row in rows.items():
        if name in failed or not runs[name]:
            continue
        wall, cpu, resident = zip(*runs[name], strict=True)
        found[name] = row | {"wall_seconds": spread(wall), "cpu_seconds": spread(cpu)}
        found[name]["resident_bytes"] = min((count for count in resident if count is not None), default=None)
        found[name]["tflops_per_wall_second"] = row["flops"] / found[name]["wall_seconds"]["median"] / 1e12
    return found


def seconds(run: Callable[[], Any], device: torch.device) -> tuple[float, float]:
    """(wall, CPU) seconds of one run."""
    synchronize(device)
    wall, cpu = time.perf_counter(), time.process_time()
    run()
    synchronize(device)
    return time.perf_counter() - wall, time.process_time() - cpu


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def spread(values: Sequence[float]) -> dict[str, Any]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values), "runs": list(values)}


def _row(system: System) -> dict[str, Any]:
    return {
        "tokens": system.tokens,
        "pairs": system.pairs,
        "flops": system.flops,
        "least_flops": system.least,
        "measured_share": system.share,
        "extra_forward_tokens": system.extra,
        "detail": system.detail,
        "predicted_bytes": system.predicted_bytes,
    }


def compare(rows: dict[str, dict[str, Any]], clock: str) -> dict[str, dict[str, float]]:
    """Each other system against `ours`, by `clock` ("cpu_seconds" or "wall_seconds"): `ratio`, the median over
    repeats of its time over ours; `flop_limit`, its FLOPs over the tree's with nothing run twice; `of_limit`."""
    result: dict[str, dict[str, float]] = {}
    ours = rows.get("ours")
    for name, row in rows.items():
        if ours is None or name == "ours":
            continue
        pairs = zip(row[clock]["runs"], ours[clock]["runs"], strict=True)
        ratios = [other / own for other, own in pairs]
        limit = row["flops"] / ours["least_flops"]
        ratio = statistics.median(ratios)
        result[name] = {
            "ratio": ratio,
            "ratio_min": min(ratios),
            "ratio_max": max(ratios),
            "flop_limit": limit,
            "of_limit": ratio / limit,
        }
    return result


def ratio(found: dict[str, float]) -> str:
    """One of `compare`: the median, and from least to most."""
    return f"{found['ratio']:.2f} ({found['ratio_min']:.2f} to {found['ratio_max']:.2f})"


def table(result: dict[str, Any], clock: str) -> str:
    """A case's rows as Markdown."""
    head = ["system", "tokens", "pairs (M)", "TFLOP", "extra forward tokens", "CPU s (min-max)", "wall s (min-max)"]
    head += ["peak memory (MiB)", "gradient error", "time / ours", "FLOP limit", "of limit"]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for name, row in result["systems"].items():
        versus = result["against_ours"][clock].get(name)
        error = row.get("gradient_error")
        cells = [
            name,
            f"{row['tokens']:,}",
            f"{row['pairs'] / 1e6:,.3g}",
            f"{row['flops'] / 1e12:,.3g}",
            f"{row['extra_forward_tokens']:,}",
            _range(row["cpu_seconds"]),
            _range(row["wall_seconds"]),
            _memory(row),
            "-" if error is None else f"{error['largest']:.1e}",
            *(
                ["1" if name == "ours" else "-", "-", "-"]
                if versus is None
                else [f"{versus[k]:.2f}" for k in ("ratio", "flop_limit", "of_limit")]
            ),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    notes = "; ".join(f"{name}: {row['detail']}" for name, row in result["systems"].items())
    return "\n".join(lines) + f"\n\n{notes}.\n"


def _memory(row: dict[str, Any]) -> str:
    if row["peak_bytes"] is not None:
        return f"{row['peak_bytes'] / 2**20:,.0f}"
    return "-" if row["resident_bytes"] is None else f"{row['resident_bytes'] / 2**20:,.0f} resident"


def profile(run: Callable[[], Any], device: torch.device, top: int = 20) -> list[dict[str, Any]]:
    """What one run spends most time in, most first: own milliseconds, share of the total and calls, of operators on a
    CPU and of kernels on a GPU."""
    cuda = device.type == "cuda"
    activities = [torch.profiler.ProfilerActivity.CPU] + [torch.profiler.ProfilerActivity.CUDA] * cuda
    with torch.profiler.profile(activities=activities) as recorded:
        run()
        synchronize(device)
    return ranked(recorded.key_averages(), cuda, top)


def ranked(events: Sequence[Any], cuda: bool, top: int) -> list[dict[str, Any]]:
    """`profile` of the profiler's averages. On a GPU each kernel's time stands there again under the operator that
    launched it, and under ranges with names: kernels alone are counted."""
    if cuda:
        events = [e for e in events if e.device_type == DeviceType.CUDA and not getattr(e, "is_user_annotation", False)]
    own = {e.key: (e.self_device_time_total if cuda else e.self_cpu_time_total) / 1e3 for e in events}
    calls = {e.key: e.count for e in events}
    total = sum(own.values()) or 1.0
    most = sorted(own.items(), key=lambda pair: -pair[1])[:top]
    return [
        {"operator": key, "milliseconds": spent, "share": spent / total, "calls": calls[key]} for key, spent in most
    ]


def _range(seconds_: dict[str, Any]) -> str:
    return f"{seconds_['median']:,.2f} ({seconds_['min']:,.2f}-{seconds_['max']:,.2f})"


def environment(device: torch.device) -> dict[str, Any]:
    """What the figures were measured on: kinds and versions, no names or paths."""
    found = {
        "device": "CPU" if device.type == "cpu" else torch.cuda.get_device_name(device),
        "cpu_architecture": platform.machine(),
        "torch_threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    if device.type == "cuda":
        found["gpu_memory_gib"] = round(torch.cuda.get_device_properties(device).total_memory / 2**30)
        found |= {"cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version(), "driver": _driver()}
        found |= {name: _installed(name) for name in ("triton", "fla-core", "flash-attn")}
    return found


def _installed(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _driver() -> str:
    """Of the first GPU: all of a machine have one."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return found.split("\n")[0].strip()
