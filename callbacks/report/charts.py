"""The report's charts as plain data; `page.js` draws them with BokehJS, on canvases: fluid, offline, on a phone too.

Promises: pure functions of runs that import no plotting library, so that a page costs a run next to nothing; a chart
without data is None; several runs are laid over each other, one colour each; long series are averaged down to
`MOST_POINTS` points a line, which `thinned` says.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from app.statistics import mean_interval, student95
from callbacks.figures import PART_COLOURS
from callbacks.pictures import TIME_PARTS, total
from callbacks.report.runs import RunData, Series

MOST_POINTS = 500
RUN_COLOURS = ("#2a78b5", "#d1622b", "#2e8b63", "#8b6bb1", "#b8860b", "#c2185b", "#00838f", "#5d4037")
_BAND = 3  # values that an interval is drawn of: of two it is seven times as wide as their standard deviation
_DASHES = ("solid", "dashed", "dotted", "dotdash")


@dataclass
class Plot:
    """What a chart shows.

    Attributes:
        log: a logarithmic y axis. share: it begins at 0 and counts in percent. high: where it ends, None for all.
        marks: in order of drawing, each with `kind` and what that needs: "line" (x, y, and by choice width, alpha,
        dash), "points" (x, y, size), "band" and "whiskers" (x, low, high), "bars" (left, right, bottom, top, and x, y
        for the pointer); `colour`, and `label` of those that the legend names.
    """

    log: bool = False
    share: bool = False
    high: float | None = None
    marks: list[dict[str, Any]] = field(default_factory=list)

    def add(self, kind: str, colour: str, columns: dict[str, Any], **options: Any) -> None:
        self.marks.append({"kind": kind, "colour": colour, **columns, **options})


@dataclass(frozen=True)
class Chart:
    """A chart with its words. Attributes: key, of the element it goes into; section; title; about, what is healthy."""

    key: str
    section: str
    title: str
    about: str
    plot: Plot


def charts(runs: Sequence[RunData]) -> list[Chart]:
    """All that these runs have data for."""
    found: list[Chart] = []

    def add(section: str, title: str, about: str, plot: Plot | None) -> None:
        if plot is not None:
            found.append(Chart(f"chart{len(found)}", section, title, about, plot))

    add("learning", "Reward and held-out accuracy", _ABOUT_REWARD, reward_curve(runs))
    add("learning", "Held-out, of several samples", "Above accuracy: there is something left to learn.", several(runs))
    add("learning", "Rewards by part", "A part that rises alone is what the policy exploits.", parts(runs))
    for section, names, title, about, options in _LINES:
        add(section, title, about, lines(runs, names, **options))
    for run in runs:
        named = f": {run.name}" if len(runs) > 1 else ""
        add("time", f"Seconds of a step{named}", "Waiting means that rollouts are the bottleneck.", step_times(run))
    return found


_ABOUT_REWARD = (
    "Training reward (thin: a batch; thick: mean of some, its band their 95% interval) and accuracy on held-out prompts"
    " with its 95% interval over prompts."
)
_LINES: list[tuple[str, tuple[str, ...], str, str, dict[str, Any]]] = [
    ("learning", ("entropy",), "Entropy", "Nats a token. To 0 within tens of steps: it explores no more.", {}),
    ("learning", ("rollouts/flat", "rollouts/solved", "rollouts/unsolved"), "Groups without signal",
     "Share of groups whose episodes have one reward; all solved; none solved. Below 0.8.", {"share": True}),
    ("learning", ("grad_norm",), "Gradient norm", "Before clipping; steady within a factor of ten.", {"log": True}),
    ("sampler", ("staleness", "staleness_max"), "Staleness",
     "Versions between sampling a token and training on it.", {}),
    ("sampler", ("mismatch_kl", "val/mismatch_kl"), "Sampler against trainer",
     "KL, nats a token, with the same weights on both sides: below 1e-6 in float32, 1e-3 in bf16.", {"log": True}),
    ("sampler", ("clip_fraction", "correction_cut"), "Tokens cut", "By clipping; by the correction.", {"share": True}),
    ("rollouts", ("rollouts/length", "rollouts/stale_length"), "Length of an episode",
     "Generated tokens; of those dropped as stale. A reward that rises with the length may be exploited.", {}),
    ("rollouts", ("rollouts/dropped_stale", "rollouts/dropped_filtered", "rollouts/failed"), "Groups lost",
     "Since the run began: too old, refused by the filter, failed.", {}),
    ("time", ("tokens/dense", "tokens/leaf", "tokens/tree"), "Tokens of a step",
     "One sequence a turn; without prefixes of others; in the tree, which is what is computed.", {}),
]  # fmt: skip


def reward_curve(runs: Sequence[RunData]) -> Plot | None:
    """Training reward with the interval of its running mean, and held-out accuracy with intervals over prompts."""
    plot = Plot()
    for colour, run in zip(RUN_COLOURS, runs):
        name = run.name if len(runs) > 1 else ""
        reward = next((key for key in ("rollouts/reward", "reward") if key in run.series), None)
        if reward is not None:
            steps, values = (np.asarray(one, float) for one in run.series[reward])
            means, half = _running(values, window := max(1, len(values) // 20))
            label = " ".join(filter(None, (name, "training")))
            plot.add("line", colour, _points(steps, y=values), alpha=0.25)
            if window >= _BAND:
                begin = _BAND - 1
                band = _points(steps[begin:], low=(means - half)[begin:], high=(means + half)[begin:])
                plot.add("band", colour, band)
                for edge in ("low", "high"):  # by which it is seen where it has no width
                    plot.add("line", colour, {"x": band["x"], "y": band[edge]}, width=6, alpha=0.15)
            plot.add("line", colour, _points(steps, y=means), width=2, label=label)
        held_out = held_out_curve(run)
        if held_out:
            x, y, low, high = ([float(one) for one in column] for column in zip(*held_out, strict=True))
            shade = colour if len(runs) > 1 else RUN_COLOURS[1]
            label = " ".join(filter(None, (name, "held-out")))
            plot.add("whiskers", shade, {"x": x, "low": low, "high": high})
            plot.add("line", shade, {"x": x, "y": y}, width=2, label=label)
            plot.add("points", shade, {"x": x, "y": y}, size=7, label=label)
    return plot if plot.marks else None


def held_out_curve(run: RunData) -> list[tuple[float, float, float, float]]:
    """(step, accuracy, low, high) of each validation: the interval over prompts where `Report` kept their rewards, else
    no width."""
    if run.held_out:
        return [(row["step"], *_accuracy(row)) for row in run.held_out]
    steps, values = run.series.get("val/accuracy", ([], []))
    return [(step, value, value, value) for step, value in zip(steps, values, strict=True)]


def prompt_means(row: dict[str, Any]) -> dict[str, float]:
    """Mean reward of each held-out prompt of one validation, all sets together."""
    return {
        f"{name}/{prompt}": sum(rewards) / len(rewards)
        for name, one in row["sets"].items()
        for prompt, rewards in one["rewards"].items()
        if rewards
    }


def _accuracy(row: dict[str, Any]) -> tuple[float, float, float]:
    means = list(prompt_means(row).values())
    low, high = mean_interval(means)
    mean = sum(means) / len(means)
    return mean, low if math.isfinite(low) else mean, high if math.isfinite(high) else mean


def several(runs: Sequence[RunData]) -> Plot | None:
    """pass@k, mean@n, maj@n of held-out prompts."""
    names = {key for run in runs for key in run.series if any(f"/{kind}@" in key for kind in ("pass", "mean", "maj"))}
    return lines(runs, tuple(sorted(names)), share=True)


def parts(runs: Sequence[RunData]) -> Plot | None:
    """What rewards are made of."""
    names = {key for run in runs for key in run.series if key.startswith(("reward/", "penalty/"))}
    return lines(runs, tuple(sorted(names)))


def lines(runs: Sequence[RunData], names: Sequence[str], log: bool = False, share: bool = False) -> Plot | None:
    """One line a metric that was logged: a colour a run, or a metric where there is one run."""
    plot = Plot(log, share)
    for i, run in enumerate(runs):
        for k, name in enumerate(names):
            if name not in run.series:
                continue
            steps, values = (np.asarray(one, float) for one in run.series[name])
            if log:  # a logarithm has no place for what is not above 0
                steps, values = steps[values > 0], values[values > 0]
                if not len(values):
                    continue
            colour = RUN_COLOURS[(i if len(runs) > 1 else k) % len(RUN_COLOURS)]
            dash = _DASHES[k % len(_DASHES)] if len(runs) > 1 else "solid"
            label = f"{run.name} {name}" if len(runs) > 1 else name
            points = _points(steps, y=values)
            plot.add("line", colour, points, width=1.6, dash=dash, label=label)
            if len(values) < 12:
                plot.add("points", colour, points, size=5, label=label)
    return plot if plot.marks else None


def step_times(run: RunData, bars: int = 100) -> Plot | None:
    """Stacked bars of seconds a step; neighbouring steps are averaged down to at most `bars` bars."""
    split = step_parts(run.series)
    if split is None:
        return None
    steps, seconds = split
    per_bar = max(1, -(-len(steps) // bars))
    groups = [slice(at, at + per_bar) for at in range(0, len(steps), per_bar)]
    left, right = [steps[g][0] - 0.5 for g in groups], [steps[g][-1] + 0.5 for g in groups]
    middle = [(a + b) / 2 for a, b in zip(left, right, strict=True)]
    plot = Plot()
    stack = np.zeros(len(groups))
    everything = sum(float(np.sum(values)) for values in seconds.values()) or 1.0
    for label, values in seconds.items():
        height = np.array([np.mean(values[g]) for g in groups])
        columns = {"left": left, "right": right, "bottom": _short(stack), "top": _short(stack + height)}
        hovered = {"x": middle, "y": _short(height)}
        share = f"{label} ({np.sum(values) / everything:.0%})"
        plot.add("bars", PART_COLOURS[label], {**columns, **hovered}, label=share)
        stack = stack + height
    if len(stack) > 10 and stack.max() > 3 * np.median(stack) > 0:  # a first step (warm-up) may tower over all others
        plot.high = 3 * float(np.median(stack))
    return plot


def step_parts(series: Series) -> tuple[list[float], dict[str, Any]] | None:
    """Steps, and seconds of each part of them, [n] each; None without `time/step`."""
    if "time/step" not in series:
        return None
    steps, whole = series["time/step"]
    split = {label: total(series, keys, len(steps)) for label, keys in TIME_PARTS.items()}
    known = np.sum(list(split.values()), axis=0)
    split["other"] = np.maximum(0.0, np.asarray(whole) - known).tolist()
    return steps, split


def thinned(runs: Sequence[RunData]) -> int:
    """Most values that one point of a line is the mean of."""
    longest = max((len(steps) for run in runs for steps, _ in run.series.values()), default=0)
    return max(1, -(-longest // MOST_POINTS))


def _running(values: Any, window: int) -> tuple[Any, Any]:
    """Mean of the last `window` values (fewer at the start), and half of its 95% interval by Student's quantile, 0 for
    one: [n] each."""
    ones = np.minimum(np.arange(1, len(values) + 1), window)
    sums, squares = (np.concatenate([[0.0], np.cumsum(one)]) for one in (values, values**2))
    stop = np.arange(1, len(values) + 1)
    means = (sums[stop] - sums[stop - ones]) / ones
    variances = np.maximum(0.0, (squares[stop] - squares[stop - ones]) / ones - means**2)
    student = np.array([0.0, 0.0, *map(student95, range(2, window + 1))])
    return means, student[ones] * np.sqrt(variances / np.maximum(1, ones - 1))


def _points(steps: Any, **columns: Any) -> dict[str, list[float]]:
    """At most `MOST_POINTS` points, means of neighbours."""
    each = max(1, -(-len(steps) // MOST_POINTS))
    edges = np.arange(0, len(steps), each)
    sizes = np.diff(np.append(edges, len(steps)))
    shrink: Callable[[Any], list[float]] = lambda one: _short(np.add.reduceat(np.asarray(one, float), edges) / sizes)  # noqa: E731
    return {"x": shrink(steps), **{name: shrink(one) for name, one in columns.items()}}


def _short(values: Any) -> list[float]:
    """With as many digits as a screen can show."""
    return [float(f"{value:.7g}") for value in values]
