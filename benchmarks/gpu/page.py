"""One page of what `benchmarks.gpu_suite` wrote into a folder: `gpu.md`, made anew from its JSON files.

Promises: every figure is one of a file beside it; what was expected before any GPU ran this stands above what was
measured, with the limits below which something is not understood; toy figures are called that; what is not there is
left out. Calls of the suite into one folder share the page.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common.measure import table

UNDERSTOOD = {"0.6B": 180.0, "8B": 260.0}
"""TFLOP/s of the tree pass on `whole` 8x4 on an H100 or H200, below which something is slow that no reckoning knows."""

EXPECTED = f"""Reckoned before any GPU ran this, of one H200: 600 TFLOP/s in matrix products, 370 and 310 in
FlashAttention-2 forward and backward, 4 TB/s of memory, norms, rotary embedding and SwiGLU unfused.

| shape | `whole` 8x4, TFLOP/s of the tree pass | not understood below |
|---|---|---|
| 0.6B | 237 | {UNDERSTOOD["0.6B"]:.0f} |
| 8B | 350 | {UNDERSTOOD["8B"]:.0f} |

Goals, 8B and 8x4: `turns` and `think` 14 and 12 times dense, 1.7 and 12 times dense-leaf, 1.3 times sparse
by FlexAttention; `whole` 1.1 times dense-leaf without checkpointing; 55% of the peak."""


def write_page(folder: Path) -> Path:
    """Writes `gpu.md` from every gpu_*.json of `folder`; returns its path."""
    paths = sorted(folder.glob("gpu_*.json"))
    lines = ["# One GPU", "", "By `python -m benchmarks.gpu_suite`; the JSON files beside this page have more.", ""]
    lines += ["## Expected", "", EXPECTED, ""]
    for path in paths:
        lines += _report(path.stem.removeprefix("gpu_"), json.loads(path.read_text()))
    page = folder / "gpu.md"
    page.write_text("\n".join(lines).rstrip() + "\n")
    return page


def _report(name: str, report: dict[str, Any]) -> Iterator[str]:
    environment = ", ".join(f"{key} {value}" for key, value in report["environment"].items())
    yield from (f"## {report.get('model', name)}", "")
    data = f"; conversations {report['conversations']}" if "conversations" in report else ""
    yield from (f"{report['figures']}. {environment}; attention {report['attention']}{data}.", "")
    if name == "checks" and report["checks"]:
        rows = [
            (check, f"{sum(row['ok'] for row in found)} of {len(found)}") for check, found in report["checks"].items()
        ]
        yield from _table(("check", "passed"), rows)
    for case in report.get("cases", []):
        yield from (f"### {case['case']}", "", table(case, "wall_seconds"), "")
        yield from _table(("utilisation", "value"), [*case["utilisation"].items(), *_predicted(case)])
        if case.get("left_out"):
            yield from (f"Not measured: {', '.join(case['left_out'])}.", "")
    if "sweep" in report:
        swept = report["sweep"]
        memory = swept["memory_of_predicted"]
        rows = [
            (point, row["wall_seconds"]["median"], swept["tflops"][point], memory.get(point, "-"))
            for point, row in swept["systems"].items()
        ]
        yield from (f"### Settings, on {swept['case']}", "")
        yield from _table(("setting", "wall s", "TFLOP/s", "peak memory / predicted"), rows)
        if swept.get("left_out"):
            yield from (f"Not measured: {', '.join(swept['left_out'])}.", "")
    if report.get("train", {}).get("steps"):
        yield from ("### Whole optimizer steps", "")
        steps = report["train"]["steps"]
        yield from _table(tuple(steps[0]), [tuple(step.values()) for step in steps])
    if report.get("decoding"):
        yield from _table(tuple(report["decoding"][0]), [tuple(row.values()) for row in report["decoding"]])
    parts = [report, *report.get("cases", []), report.get("sweep", {})]
    for part, error in ((part, error) for one in parts for part, error in one.get("failed", {}).items()):
        yield from (f"**Failed: {part}.** {error}", "")
    if report["left_out"]:
        yield from (f"Out of time, not measured: {', '.join(report['left_out'])}.", "")


def _predicted(case: dict[str, Any]) -> list[tuple[str, float]]:
    return [(f"peak memory / predicted, {name}", value) for name, value in case["memory_of_predicted"].items()]


def _table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> list[str]:
    cells = [[f"{cell:.3g}" if isinstance(cell, float) else str(cell) for cell in row] for row in rows]
    lines = [head, ["---"] * len(head), *cells]
    return [*("| " + " | ".join(line) + " |" for line in lines), ""]
