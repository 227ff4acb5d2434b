"""A report of `benchmarks.tree`: what was measured as JSON, as Markdown, and as a picture.

Promises: written whole after every case, so a run that is stopped leaves what it has; what is missing is named.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.common.measure import table
from benchmarks.common.models import OptionError
from benchmarks.common.records import write_json

_BASELINES = ("dense", "dense-leaf", "path-at-a-time", "sparse")
_COLOURS = dict(zip(_BASELINES, ("#4c6a92", "#7fa3c7", "#c98a4b", "#8c8c8c"), strict=True))


@dataclass
class Report:
    """Attributes:
    command: what made it. hardware: what the machine is, in words. environment, model: see `benchmarks.common.measure`
    and `benchmarks.common.models`. folder: where to write, None: nowhere. name: of the files.
    cases: results of `benchmarks.tree.run_case`. unfinished: names of cases not yet measured.
    left_out: names of cases that were not measured, and why. earlier: commands that made the cases kept.
    """

    command: str
    hardware: str
    environment: dict[str, Any]
    model: dict[str, Any]
    folder: Path | None
    name: str
    cases: list[dict[str, Any]] = field(default_factory=list)
    unfinished: list[str] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)
    earlier: list[str] = field(default_factory=list)

    def keep_earlier(self) -> None:
        """Takes over the cases of the report that is there. Raises OptionError when it is of another model or machine,
        whose figures do not belong beside each other."""
        assert self.folder is not None, "checked with the options"
        path = self.folder / f"{self.name}.json"
        if not path.exists():
            return
        known = json.loads(path.read_text())
        for key in ("model", "environment", "hardware"):
            if known[key] != getattr(self, key):
                raise OptionError(f"--append: {path} is of another {key}; choose another --name")
        self.cases, self.earlier, self.left_out = known["cases"], known["commands"], known["left_out"]

    def add(self, result: dict[str, Any]) -> None:
        """Adds a case, in place of one of the same name."""
        places = [k for k, case in enumerate(self.cases) if case["case"] == result["case"]]
        if places:
            self.cases[places[0]] = result
        else:
            self.cases.append(result)
        self.left_out.pop(result["case"], None)

    def data(self) -> dict[str, Any]:
        return {
            "commands": list(dict.fromkeys([*self.earlier, self.command])),
            "hardware": self.hardware,
            "environment": self.environment,
            "model": self.model,
            "unfinished": self.unfinished,
            "left_out": self.left_out,
            "cases": self.cases,
        }

    def write(self) -> None:
        if self.folder is None:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        data = self.data()
        write_json(self.folder / f"{self.name}.json", data)
        (self.folder / f"{self.name}.md").write_text(markdown(data, self.name))
        if self.cases:
            plot(data, self.folder / f"{self.name}.png")


def markdown(report: dict[str, Any], name: str = "tree") -> str:
    """Summary first, then every case in full."""
    env = report["environment"]
    model = ", ".join(f"{key} {value}" for key, value in report["model"].items())
    on_gpu = env["device"] != "CPU"
    lines = [
        "# Tree engine against its baselines",
        "",
        f"Made by {' and '.join(f'`{command}`' for command in report['commands'])} on {report['hardware']}; torch "
        f"{env['torch']}, threads: {env['torch_threads']}, transformers {env['transformers']}. Model: {model}, random "
        "weights.",
        "",
        "Forward and backward of one batch; medians of interleaved repeats, ratios formed within a repeat; times of "
        "subsampled dense systems are scaled by FLOPs. Time ratios are of "
        f"{'wall' if on_gpu else 'CPU'} seconds. Peak memory: tensors above model and gradients"
        + ("." if on_gpu else "; `resident`: of the process instead (rough), where there was one run only."),
        "",
        f"![time of the baselines over ours]({name}.png)",
        "",
        "| case | tree tokens | ours, s | dense / ours (of limit) | dense-leaf / ours (of limit) "
        "| ours / path-at-a-time (FLOPs) | ours / sparse | repeats |",
        "|---|---|---|---|---|---|---|---|",
        *(_summary(result) for result in report["cases"]),
    ]
    for case, reason in report["left_out"].items():
        lines += ["", f"{case} is left out: {reason}."]
    if report["unfinished"]:
        lines += ["", f"Stopped before it had measured {', '.join(report['unfinished'])}."]
    for result in report["cases"]:
        lines += ["", f"## {result['case']} ({result['sequences']} sequences, {result['source']})", ""]
        lines.append(table(result, result["clock"]).rstrip("\n"))
    return "\n".join(lines) + "\n"


def _summary(result: dict[str, Any]) -> str:
    ours, versus = result["systems"]["ours"], result["against_ours"][result["clock"]]

    def over(name: str) -> str:
        found = versus.get(name)
        return "-" if found is None else f"{found['ratio']:.2f} ({found['of_limit']:.2f})"

    def under(name: str, flops: bool = False) -> str:
        found = versus.get(name)
        if found is None:
            return "-"
        return f"{1 / found['ratio']:.2f}" + (f" ({found['of_limit'] / found['ratio']:.2f})" if flops else "")

    cells = [result["case"], f"{ours['tokens']:,}", f"{ours[result['clock']]['median']:,.2f}"]
    cells += [
        over("dense"),
        over("dense-leaf"),
        under("path-at-a-time", flops=True),
        under("sparse"),
        str(result["repeats"]),
    ]
    return "| " + " | ".join(cells) + " |"


def plot(report: dict[str, Any], path: Path) -> None:
    """Bars of each baseline's time over ours by case, whiskers from least to most, and a line at its FLOP limit."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    cases = report["cases"]
    figure, axes = pyplot.subplots(figsize=(max(5.0, 1.5 + 1.5 * len(cases)), 4), layout="constrained")
    width = 0.8 / len(_BASELINES)
    for k, name in enumerate(_BASELINES):
        for at, case in enumerate(cases):
            found = case["against_ours"][case["clock"]].get(name)
            if found is None:
                continue
            x = at + (k - (len(_BASELINES) - 1) / 2) * width
            whiskers = [[found["ratio"] - found["ratio_min"]], [found["ratio_max"] - found["ratio"]]]
            axes.bar(x, found["ratio"], 0.9 * width, color=_COLOURS[name], yerr=whiskers, capsize=2)
            axes.hlines(found["flop_limit"], x - 0.45 * width, x + 0.45 * width, color="black", linewidth=1.5)
    handles = [pyplot.Rectangle((0, 0), 1, 1, color=colour) for colour in _COLOURS.values()]
    limit = pyplot.Line2D([], [], color="black", linewidth=1.5)
    axes.legend([*handles, limit], [*_BASELINES, "ratio of FLOPs"], frameon=False, fontsize="small")
    axes.axhline(1, color="black", linewidth=0.5)
    axes.set_yscale("log")
    axes.set_yticks([0.5, 1, 2, 5, 10, 20], ["0.5", "1", "2", "5", "10", "20"])
    axes.minorticks_off()
    axes.set_xticks(range(len(cases)), [case["case"] for case in cases])
    axes.set_ylabel("time over ours (log)")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
