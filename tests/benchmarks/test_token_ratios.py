"""Token accounting: equal to an independent count, and to the published table of the data."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from benchmarks.tree.token_ratios import count, main, markdown, measure
from datamodules.conversations.tokens import Conversation, load_npz
from tests.helpers.recorded_samples import real_file


def trie_counts(sequences: Sequence[np.ndarray]) -> tuple[int, int, int]:
    """(tree tokens, tree attention pairs, dense-leaf tokens), from sets of prefix hashes: no sorting, no tree."""
    seen: set[int] = set()
    inner: set[int] = set()
    tokens = pairs = 0
    hashes = []
    for sequence in sequences:
        state, chain = 0, []
        for depth, token in enumerate(sequence.tolist(), start=1):
            inner.add(state)
            state = hash((state, token))
            chain.append(state)
            if state not in seen:
                seen.add(state)
                tokens += 1
                pairs += depth
        hashes.append((state, len(chain)))
    leaves = {state: length for state, length in hashes if state not in inner}
    return tokens, pairs, sum(leaves.values())


def conversation(task: int, trial: int) -> Conversation:
    rng = np.random.default_rng([task, trial])
    body = np.concatenate([np.full(4, task), rng.integers(0, 2, 20)])
    starts = np.array([5, 12, 18])
    tokens = np.concatenate([[1, 2, 3], body])
    return Conversation(str(task), trial, "m", 0.0, "made", tokens, starts, starts + 3, starts)


@pytest.mark.parametrize("workload", ["turns", "whole", "think"])
def test_counts_of_made_conversations(workload: str) -> None:
    made = [conversation(task, trial) for task in range(3) for trial in range(3)]
    counted = count(made, workload)
    sequences = [tokens for c in made for tokens, _ in c.sequences(workload)]
    assert (counted.tree_tokens, counted.tree_pairs, counted.leaf_tokens) == trie_counts(sequences)
    assert counted.sequences == len(sequences)
    assert counted.dense_tokens == sum(map(len, sequences))
    assert counted.dense_pairs == sum(sum(range(1, len(s) + 1)) for s in sequences)


def test_draws_are_seeded_and_the_table_has_every_size() -> None:
    made = [conversation(task, trial) for task in range(25) for trial in range(2)]
    rows = measure(made, draws=3, seed=1)
    assert rows == measure(made, draws=3, seed=1) and rows != measure(made, draws=3, seed=2)
    assert [(row["tasks"], row["draws"]) for row in rows] == [(1, 25), (8, 3), (20, 3), (25, 1)]
    table = markdown(rows).splitlines()
    assert len(table) == 2 + 4 and table[2].startswith("| 1 x 2 |") and table[5].startswith("| all 25 x 2 |")


@pytest.mark.parametrize("workload", ["turns", "whole", "think"])
def test_one_real_task_against_an_independent_count(workload: str) -> None:
    chosen = [c for c in load_npz(real_file("tau/airline_tokens.npz")) if c.task == "7"]
    counted = count(chosen, workload)
    sequences = [tokens for c in chosen for tokens, _ in c.sequences(workload)]
    assert (counted.tree_tokens, counted.tree_pairs, counted.leaf_tokens) == trie_counts(sequences)


@pytest.mark.slow
def test_real_data_gives_the_published_table() -> None:
    """The table of the data's README (there to three digits; drawn sizes are means over other draws)."""
    rows = measure(load_npz(real_file("tau/airline_tokens.npz")), draws=40)
    one, eight, twenty, everything = rows
    committed = json.loads((Path(__file__).parents[2] / "benchmarks/results/tree/token_ratios.json").read_text())[
        "rows"
    ]
    assert (committed[0], committed[-1]) == (one, everything)  # the exact rows; the drawn ones have other draws
    assert one["draws"] == 50 and one["turns"]["dense_tokens"] == everything["turns"]["dense_tokens"] == 13_872_588
    assert everything["turns"]["sequences"] == 2_454 and everything["tasks"] == 50

    def ratio(row: dict, workload: str, baseline: str, unit: str) -> float:
        return row[workload][f"{baseline}_{unit}"] / row[workload][f"tree_{unit}"]

    published = [  # turns dense / tree, turns dense-leaf / tree, think dense / tree: tokens, pairs
        (one, (18.8, 11.9), (1.78, 1.31), (15.3, 9.3), 0.005),
        (eight, (24.2, 13.0), (2.26, 1.41), (18.7, 10.0), 0.05),
        (twenty, (25.1, 13.2), (2.32, 1.43), (19.3, 10.1), 0.05),
        (everything, (25.3, 13.3), (2.39, 1.45), (19.3, 10.1), 0.005),
    ]
    for row, turns, leaf, think, tolerance in published:
        for workload, baseline, expected in (
            ("turns", "dense", turns),
            ("turns", "leaf", leaf),
            ("think", "dense", think),
        ):
            for unit, value in zip(("tokens", "pairs"), expected, strict=True):
                assert ratio(row, workload, baseline, unit) == pytest.approx(value, rel=tolerance)
        # One sequence a conversation: no sequence is a prefix of another, and the tree is that of the turns.
        assert row["whole"]["tree_tokens"] == row["turns"]["tree_tokens"]
        assert row["whole"]["dense_tokens"] == row["turns"]["leaf_tokens"]
        # Every turn is a leaf (but for turns that two trials have in common): dense-leaf gains nothing.
        assert ratio(row, "think", "leaf", "tokens") > 0.99 * ratio(row, "think", "dense", "tokens")


def test_command_writes_table_and_numbers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    npz = real_file("tau/airline_tokens.npz")
    main(["--npz", str(npz), "--draws", "1", "--out", str(tmp_path)])
    printed = capsys.readouterr().out
    assert (tmp_path / "token_ratios.md").read_text().startswith(printed)
    rows = json.loads((tmp_path / "token_ratios.json").read_text())["rows"]
    assert rows[-1]["think"]["sequences"] == 2_454
