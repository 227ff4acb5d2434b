"""Figures from plain data: reward curve, split of step times, prefix tree. Promises: pure functions, no trainer,
no global matplotlib state (safe without a display and beside a notebook's own figures).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.cm import ScalarMappable
from matplotlib.collections import PolyCollection
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure

from app.tree import PrefixTree

_INK, _GREY = "#22303c", "#8a97a3"
_REWARD, _HELD_OUT = "#2a78b5", "#d1622b"
_SUBTITLE: dict[str, Any] = {"loc": "left", "fontsize": 9.5, "color": _GREY}
PART_COLOURS = {
    "waiting for rollouts": "#c9ced3",
    "prepare": "#8fc1a9",
    "tree pass": "#2e8b63",
    "optimizer": "#e0a53c",
    "weight sync": "#8b6bb1",
    "other": "#eceff1",
}


def reward_curve(
    steps: Sequence[float], rewards: Sequence[float], held_out: Sequence[tuple[float, float]], title: str
) -> Figure:
    """Mean reward of each training batch, its running mean, and held-out accuracy.

    Args:
        steps, rewards: [n], optimizer steps done and the reward of the batch.
        held_out: (optimizer steps done, accuracy) pairs, in order.
    """
    figure, axes = _figure(title)
    if len(rewards):
        window = max(1, len(rewards) // 20)
        axes.plot(steps, rewards, color=_REWARD, alpha=0.3, linewidth=1, label="training batch")
        if window > 1:
            smooth = _running_mean(np.asarray(rewards, float), window)
            axes.plot(steps, smooth, color=_REWARD, linewidth=2, label=f"mean of {window} batches")
    if held_out:
        x, y = zip(*held_out, strict=True)
        axes.plot(x, y, "o-", color=_HELD_OUT, linewidth=2, markersize=5, label="held-out prompts")
        ends = dict.fromkeys([0, len(x) - 1])
        for i in ends:
            axes.annotate(
                f"{y[i]:.2f}",
                (x[i], y[i]),
                textcoords="offset points",
                xytext=(6, -14) if i == 0 else (0, 9),
                ha="left" if i == 0 else "right",
                color=_HELD_OUT,
                fontweight="bold",
            )
    axes.set_xlabel("optimizer steps")
    axes.set_ylabel("mean reward")
    axes.margins(x=0.02, y=0.1)
    axes.grid(axis="y", color="#e6e9ec")
    axes.legend(frameon=False, loc="best")
    return figure


def step_times(steps: Sequence[float], parts: Mapping[str, Sequence[float]], title: str, bars: int = 80) -> Figure:
    """Stacked bars of seconds per optimizer step; neighbouring steps are averaged down to at most `bars` bars.

    Args:
        steps: [n]. parts: label -> seconds, [n] each; colours by `PART_COLOURS`.
    """
    figure, axes = _figure(title)
    per_bar = max(1, -(-len(steps) // bars))
    groups = [np.arange(at, min(at + per_bar, len(steps))) for at in range(0, len(steps), per_bar)]
    left = np.array([steps[group[0]] - 0.5 for group in groups])
    widths = np.array([steps[group[-1]] - steps[group[0]] + 1.0 for group in groups]) * 0.94
    total = sum(float(np.sum(values)) for values in parts.values()) or 1.0
    bottom = np.zeros(len(groups))
    for label, values in parts.items():
        array = np.asarray(values, float)
        heights = np.array([array[group].mean() for group in groups])
        name = f"{label}  {_seconds(array.mean())}  ({array.sum() / total:.0%})"
        axes.bar(left, heights, widths, bottom=bottom, align="edge", color=PART_COLOURS.get(label, _GREY), label=name)
        bottom += heights
    if len(bottom) > 10:  # a first step (warm-up) may tower over all others
        limit = 3 * float(np.median(bottom))
        if 0 < limit < bottom.max():
            axes.set_ylim(0, limit)
            axes.set_title(f"cut off above: the longest takes {_seconds(bottom.max())}", **_SUBTITLE)
    axes.set_xlabel("optimizer steps")
    axes.set_ylabel("seconds per step")
    axes.grid(axis="y", color="#e6e9ec")
    axes.set_axisbelow(True)
    handles, labels = axes.get_legend_handles_labels()
    legend = axes.legend(
        handles[::-1], labels[::-1], frameon=False, loc="center left", bbox_to_anchor=(1.01, 0.5), title="mean (share)"
    )
    legend.get_title().set_color(_INK)
    return figure


def prefix_tree(tree: PrefixTree, title: str) -> Figure:
    """The tree as an icicle: depth in tokens to the right, leaves in depth-first order downwards, colour by sharing."""
    figure, axes = _figure(title)
    first_row, rows = _leaf_rows(tree)
    left = tree.segment_start.astype(float)
    right = left + tree.segment_length
    top, bottom = first_row.astype(float), (first_row + rows).astype(float)
    corners = np.stack(
        [
            np.stack([left, top], 1),
            np.stack([right, top], 1),
            np.stack([right, bottom], 1),
            np.stack([left, bottom], 1),
        ],
        axis=1,
    )
    shared = tree.segment_sequences
    most = max(2, int(shared.max(initial=1)))
    norm = LogNorm(1, most)
    edge = 0.8 if tree.num_segments <= 150 else 0.25 if tree.num_segments <= 1500 else 0.0
    boxes = PolyCollection(
        list(corners), array=shared, cmap="viridis_r", norm=norm, edgecolors="white", linewidths=edge
    )
    axes.add_collection(boxes)
    axes.set_xlim(0, max(1.0, float(right.max(initial=1.0))))
    axes.set_ylim(max(1, int(bottom.max(initial=1.0))), 0)
    axes.set_xlabel("position in the sequence (tokens)")
    axes.set_ylabel("distinct sequences, depth first")
    axes.grid(False)
    bar = figure.colorbar(ScalarMappable(norm, "viridis_r"), ax=axes, pad=0.02)
    bar.set_label("sequences that share the segment")
    ticks = [t for t in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 4096, 16384) if t <= most]
    bar.set_ticks(ticks, labels=[str(t) for t in ticks])
    bar.minorticks_off()
    dense, unique = tree.num_dense_tokens, max(1, tree.num_tokens)
    axes.set_title(
        f"{tree.num_sequences} sequences: {dense:,} tokens one by one, {tree.num_leaf_tokens:,} as leaves,"
        f" {tree.num_tokens:,} as a tree ({dense / unique:.1f} x fewer than one by one)",
        **_SUBTITLE,
    )
    return figure


def _leaf_rows(tree: PrefixTree) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """First leaf row and number of leaf rows of every segment; leaves are numbered in depth-first order."""
    end = tree.segment_end
    is_leaf = end == np.arange(1, tree.num_segments + 1)
    before = np.concatenate([[0], np.cumsum(is_leaf)])
    return before[:-1], before[end] - before[:-1]


def _running_mean(values: npt.NDArray[np.float64], window: int) -> npt.NDArray[np.float64]:
    """Mean of the last `window` values (fewer at the start): [n] -> [n]."""
    sums = np.concatenate([[0.0], np.cumsum(values)])
    stop = np.arange(1, len(values) + 1)
    start = np.maximum(0, stop - window)
    return (sums[stop] - sums[start]) / (stop - start)


def _seconds(value: float) -> str:
    return f"{value * 1000:.3g} ms" if value < 1 else f"{value:.3g} s"


def _figure(title: str) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(9, 4.5), dpi=140, layout="constrained")
    FigureCanvasAgg(figure)
    axes: Any = figure.add_subplot()
    figure.suptitle(title, x=0.01, ha="left", color=_INK, fontsize=12, fontweight="bold")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(_GREY)
    axes.tick_params(colors=_INK)
    return figure, axes
