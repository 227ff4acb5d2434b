"""Pictures show what the data says: places and heights of bars, rows of the tree, ordinary odd cases."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from app.tree import PrefixTree
from callbacks import figures


def test_tree_rows_cover_every_leaf_once() -> None:
    #  1 2 -> 3, -> 4 5 (twice), and a root of its own; [1, 2] ends inside
    tree = PrefixTree.build([[1, 2, 3], [1, 2, 4, 5], [1, 2, 4, 5], [1, 2], [7]])
    first, rows = figures._leaf_rows(tree)
    by_start = {
        (int(s), int(n)): (int(a), int(r))
        for s, n, a, r in zip(tree.segment_start, tree.segment_length, first, rows, strict=True)
    }
    assert by_start[(0, 2)] == (0, 2)  # the shared prefix spans its two leaves
    assert sorted(by_start.values()) == [(0, 1), (0, 2), (1, 1), (2, 1)]


@pytest.mark.parametrize("sequences", [[[5]], [[1, 2, 3]] * 4, [[i] * 3 for i in range(1, 40)]])
def test_ordinary_odd_trees_are_drawn(sequences: list[list[int]], tmp_path: Path) -> None:
    figure = figures.prefix_tree(PrefixTree.build(sequences), "odd")
    figure.savefig(tmp_path / "tree.png")
    axes = figure.axes[0]
    assert axes.get_xlim() == (0, max(1, len(sequences[0])))
    assert axes.get_ylim()[0] == len({tuple(s) for s in sequences})


def test_bars_average_neighbouring_steps_and_keep_their_sum() -> None:
    steps = list(range(1, 11))
    figure = figures.step_times(steps, {"tree pass": [1.0, 3.0] * 5, "optimizer": [0.5] * 10}, "t", bars=5)
    bars = figure.axes[0].patches
    assert len(bars) == 10
    assert [bar.get_height() for bar in bars] == [2.0] * 5 + [0.5] * 5
    assert [bar.get_y() for bar in bars[5:]] == [2.0] * 5  # stacked
    assert bars[0].get_x() == 0.5 and bars[4].get_x() == 8.5
    labels = [text.get_text() for text in figure.axes[0].get_legend().get_texts()]
    assert labels == ["optimizer  500 ms  (20%)", "tree pass  2 s  (80%)"]


def test_one_step_is_enough() -> None:
    figures.step_times([1], {"tree pass": [0.1]}, "t").canvas.draw()
    figures.reward_curve([1], [0.5], [], "r").canvas.draw()
    figures.reward_curve([], [], [(0, 0.1)], "r").canvas.draw()


def test_running_mean_looks_back_only() -> None:
    values = np.array([1.0, 2.0, 3.0, 10.0])
    assert figures._running_mean(values, 2).tolist() == [1.0, 1.5, 2.5, 6.5]
