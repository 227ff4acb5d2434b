"""The report's charts, by bokeh: drawn on canvases, so that thousands of points stay fluid, offline, on a phone too.

Promises: pure functions of runs; a chart without data is None; several runs are laid over each other, one colour each;
long series are averaged down to `MOST_POINTS` points a line, which `thinned` says.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from bokeh.models import ColumnDataSource, HoverTool, NumeralTickFormatter
from bokeh.models.annotations import TeeHead, Whisker
from bokeh.plotting import figure

from app.statistics import Z95, mean_interval
from callbacks.figures import PART_COLOURS
from callbacks.pictures import TIME_PARTS, total
from callbacks.report.runs import RunData, Series

MOST_POINTS = 500
RUN_COLOURS = ("#2a78b5", "#d1622b", "#2e8b63", "#8b6bb1", "#b8860b", "#c2185b", "#00838f", "#5d4037")
_INK, _GREY, _GRID = "#22303c", "#8a97a3", "#e6e9ec"
_DASHES = ("solid", "dashed", "dotted", "dotdash")


@dataclass(frozen=True)
class Chart:
    """A chart with its words. Attributes: key, of the element it goes into; section; title; about, what is healthy."""

    key: str
    section: str
    title: str
    about: str
    figure: Any


def charts(runs: Sequence[RunData]) -> list[Chart]:
    """All that these runs have data for."""
    found: list[Chart] = []

    def add(section: str, title: str, about: str, drawn: Any) -> None:
        if drawn is not None:
            found.append(Chart(f"chart{len(found)}", section, title, about, drawn))

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


def reward_curve(runs: Sequence[RunData]) -> Any:
    """Training reward with the interval of its running mean, and held-out accuracy with intervals over prompts."""
    plot = _figure()
    drawn = False
    for colour, run in zip(RUN_COLOURS, runs):
        name = run.name if len(runs) > 1 else ""
        reward = next((key for key in ("rollouts/reward", "reward") if key in run.series), None)
        if reward is not None:
            steps, values = (np.asarray(one, float) for one in run.series[reward])
            window = max(1, len(values) // 20)
            means, half = _running(values, window)
            source = _source(steps, y=values)
            plot.line("x", "y", source=source, color=colour, alpha=0.25)
            source = _source(steps, y=means, low=means - half, high=means + half)
            plot.varea("x", "low", "high", source=source, color=colour, alpha=0.15)
            label = " ".join(filter(None, (name, "training")))
            plot.line("x", "y", source=source, color=colour, width=2, legend_label=label, name=label)
            drawn = True
        held_out = held_out_curve(run)
        if held_out:
            steps, values, low, high = (np.array(one) for one in zip(*held_out, strict=True))
            shade = colour if len(runs) > 1 else RUN_COLOURS[1]
            source = ColumnDataSource({"x": steps, "y": values, "low": low, "high": high})
            lower, upper = TeeHead(line_color=shade, size=8), TeeHead(line_color=shade, size=8)
            whisker = Whisker(base="x", lower="low", upper="high", source=source, line_color=shade)
            whisker.update(lower_head=lower, upper_head=upper)
            plot.add_layout(whisker)
            label = " ".join(filter(None, (name, "held-out")))
            plot.line("x", "y", source=source, color=shade, width=2, legend_label=label, name=label)
            plot.scatter("x", "y", source=source, color=shade, size=7, legend_label=label)
            drawn = True
    return _finish(plot) if drawn else None


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


def several(runs: Sequence[RunData]) -> Any:
    """pass@k, mean@n, maj@n of held-out prompts."""
    names = {key for run in runs for key in run.series if any(f"/{kind}@" in key for kind in ("pass", "mean", "maj"))}
    return lines(runs, tuple(sorted(names)), share=True)


def parts(runs: Sequence[RunData]) -> Any:
    """What rewards are made of."""
    names = {key for run in runs for key in run.series if key.startswith(("reward/", "penalty/"))}
    return lines(runs, tuple(sorted(names)))


def lines(runs: Sequence[RunData], names: Sequence[str], log: bool = False, share: bool = False) -> Any:
    """One line a metric that was logged: a colour a run, or a metric where there is one run."""
    wanted = [(i, run, k, name) for i, run in enumerate(runs) for k, name in enumerate(names) if name in run.series]
    if log:  # a logarithm has no place for what is not above 0
        wanted = [one for one in wanted if any(value > 0 for value in one[1].series[one[3]][1])]
    if not wanted:
        return None
    plot = _figure("log" if log else "linear")
    for i, run, k, name in wanted:
        steps, values = (np.asarray(one, float) for one in run.series[name])
        if log:
            steps, values = steps[values > 0], values[values > 0]
        colour = RUN_COLOURS[(i if len(runs) > 1 else k) % len(RUN_COLOURS)]
        dash = _DASHES[k % len(_DASHES)] if len(runs) > 1 else "solid"
        label = f"{run.name} {name}" if len(runs) > 1 else name
        source = _source(steps, y=values)
        plot.line("x", "y", source=source, color=colour, width=1.6, line_dash=dash, legend_label=label, name=label)
        if len(values) < 12:
            plot.scatter("x", "y", source=source, color=colour, size=5, legend_label=label)
    if share:
        plot.yaxis.formatter = NumeralTickFormatter(format="0%")
        plot.y_range.start = 0
    return _finish(plot)


def step_times(run: RunData, bars: int = 100) -> Any:
    """Stacked bars of seconds a step; neighbouring steps are averaged down to at most `bars` bars."""
    split = step_parts(run.series)
    if split is None:
        return None
    steps, seconds = split
    per_bar = max(1, -(-len(steps) // bars))
    groups = [slice(at, at + per_bar) for at in range(0, len(steps), per_bar)]
    data: dict[str, Any] = {label: [float(np.mean(values[g])) for g in groups] for label, values in seconds.items()}
    data["left"] = [steps[g][0] - 0.5 for g in groups]
    data["right"] = [steps[g][-1] + 0.5 for g in groups]
    plot = _figure()
    stack = np.zeros(len(groups))
    everything = sum(float(np.sum(values)) for values in seconds.values()) or 1.0
    for label, values in seconds.items():
        source = ColumnDataSource(
            {"left": data["left"], "right": data["right"], "bottom": stack, "top": stack + data[label],
             "x": [(a + b) / 2 for a, b in zip(data["left"], data["right"])], "y": data[label]}
        )  # fmt: skip
        share = f"{label} ({np.sum(values) / everything:.0%})"
        plot.quad("left", "right", "top", "bottom", source=source, color=PART_COLOURS[label], line_color=None,
                  legend_label=share, name=label)  # fmt: skip
        stack = stack + np.array(data[label])
    if len(stack) > 10 and stack.max() > 3 * np.median(stack) > 0:  # a first step (warm-up) may tower over all others
        plot.y_range.end = 3 * float(np.median(stack))
    plot.y_range.start = 0
    return _finish(plot)


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
    """Mean of the last `window` values (fewer at the start), and half of its 95% interval: [n] each."""
    ones = np.minimum(np.arange(1, len(values) + 1), window)
    sums, squares = (np.concatenate([[0.0], np.cumsum(one)]) for one in (values, values**2))
    stop = np.arange(1, len(values) + 1)
    means = (sums[stop] - sums[stop - ones]) / ones
    variances = np.maximum(0.0, (squares[stop] - squares[stop - ones]) / ones - means**2)
    return means, Z95 * np.sqrt(variances / np.maximum(1, ones - 1)) * (ones > 1)


def _source(steps: Any, **columns: Any) -> ColumnDataSource:
    """At most `MOST_POINTS` points, means of neighbours."""
    each = max(1, -(-len(steps) // MOST_POINTS))
    edges = np.arange(0, len(steps), each)
    sizes = np.diff(np.append(edges, len(steps)))
    shrink: Callable[[Any], Any] = lambda one: np.add.reduceat(np.asarray(one, float), edges) / sizes  # noqa: E731
    return ColumnDataSource({"x": shrink(steps), **{name: shrink(one) for name, one in columns.items()}})


def _figure(y: Literal["linear", "log"] = "linear") -> Any:
    plot = figure(height=260, sizing_mode="stretch_width", tools="", y_axis_type=y, min_border=4,
                  toolbar_location=None, background_fill_alpha=0, border_fill_alpha=0)  # fmt: skip
    plot.toolbar.visible = False  # else a mark of it stays
    return plot


def _finish(plot: Any) -> Any:
    plot.xaxis.axis_label = "optimizer steps"
    plot.outline_line_color = None
    plot.xgrid.grid_line_color, plot.ygrid.grid_line_color = None, _GRID
    for axis in plot.axis:
        axis.update(axis_line_color=_GREY, major_tick_line_color=_GREY, minor_tick_line_color=None,
                    major_label_text_color=_INK, axis_label_text_color=_GREY,
                    axis_label_text_font_style="normal")  # fmt: skip
    named = [one for one in plot.renderers if one.name]
    plot.add_tools(HoverTool(renderers=named, tooltips=[("", "$name"), ("step", "@x{0,0}"), ("", "@y{0.[00000]}")]))
    if plot.legend:  # two columns fit a phone
        legend = plot.legend[0]
        legend.update(orientation="horizontal", border_line_color=None, background_fill_alpha=0, click_policy="hide",
                      label_text_font_size="11px", spacing=4, padding=2, margin=0,
                      ncols=min(2, len(legend.items)))  # fmt: skip
        plot.add_layout(legend, "below")
    return plot
