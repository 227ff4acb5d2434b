"""How many tokens (and attention pairs) a prefix tree saves on recorded agent conversations: counted, not timed.

    python -m benchmarks.tree.token_ratios [--npz FILE] [--draws 100] [--seed 0] [--out benchmarks/results/tree]

Prints a Markdown table and, with --out, writes token_ratios.json and token_ratios.md there. Deterministic.

Three workloads (see datamodules.recorded), against two baselines: `dense` computes every sequence alone;
`dense-leaf` first drops sequences that are prefixes of others and hangs their losses on the longer one. Attention
pairs are the query-key pairs of causal attention, the sum over computed tokens of depth + 1. A size of
"n x trials" is n tasks drawn at random, `--draws` times; 1 and "all" are exact (every task once; everything). Ratios
are of summed counts over the draws.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, get_args

import numpy as np

from app.tree import PrefixTree
from benchmarks.common.records import write_json
from datamodules.conversations.tokens import Conversation, Workload, load_npz
from datamodules.files.data_files import resolve

DEFAULT_NPZ = "${ARBORIST_DATA}/tau/airline_tokens.npz"
TASKS = (1, 8, 20, None)  # None: all


@dataclass(frozen=True)
class Counts:
    """Work of one batch: tokens and attention pairs computed per optimizer step, under each way of computing it."""

    sequences: int
    dense_tokens: int
    leaf_tokens: int
    tree_tokens: int
    dense_pairs: int
    leaf_pairs: int
    tree_pairs: int

    def __add__(self, other: Counts) -> Counts:
        return Counts(*(a + b for a, b in zip(asdict(self).values(), asdict(other).values(), strict=True)))


def count(conversations: Sequence[Conversation], workload: Workload) -> Counts:
    """Counts of the batch that holds all sequences of `conversations`."""
    tree = PrefixTree.build([tokens for c in conversations for tokens, _ in c.sequences(workload)])
    lengths = tree.sequence_length
    leaves = lengths[tree.leaf_sequences]
    return Counts(
        sequences=tree.num_sequences,
        dense_tokens=tree.num_dense_tokens,
        leaf_tokens=tree.num_leaf_tokens,
        tree_tokens=tree.num_tokens,
        dense_pairs=_pairs(lengths),
        leaf_pairs=_pairs(leaves),
        tree_pairs=tree.num_attention_pairs,
    )


def measure(conversations: Sequence[Conversation], draws: int = 100, seed: int = 0) -> list[dict[str, Any]]:
    """One row per size of batch: tasks, trials, number of draws, and summed `Counts` for each workload."""
    by_task: dict[str, list[Conversation]] = {}
    for conversation in conversations:
        by_task.setdefault(conversation.task, []).append(conversation)
    groups = list(by_task.values())
    trials = sorted({len(group) for group in groups})
    rng = np.random.default_rng(seed)
    rows = []
    for size in TASKS:
        if size is not None and size >= len(groups):
            continue
        if size is None:
            batches = [list(range(len(groups)))]
        elif size == 1:
            batches = [[i] for i in range(len(groups))]
        else:
            batches = [rng.choice(len(groups), size, replace=False).tolist() for _ in range(draws)]
        row: dict[str, Any] = {
            "tasks": size or len(groups),
            "all": size is None,
            "trials": trials,
            "draws": len(batches),
        }
        for workload in get_args(Workload):
            parts = [count([c for i in batch for c in groups[i]], workload) for batch in batches]
            row[workload] = asdict(sum(parts[1:], parts[0]))
        rows.append(row)
    return rows


def markdown(rows: Sequence[dict[str, Any]]) -> str:
    """The table: for each workload, tokens (attention pairs) of each baseline over those of the tree."""
    workloads = get_args(Workload)
    head = ["tasks x trials", "sequences", "dense tokens"]
    for workload in workloads:
        head += [f"`{workload}`: dense / tree", f"`{workload}`: dense-leaf / tree"]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for row in rows:
        trials = "-".join(str(n) for n in (row["trials"][0], row["trials"][-1])[: len(row["trials"])])
        turns, draws = row["turns"], row["draws"]
        cells = [
            f"{'all ' if row['all'] else ''}{row['tasks']} x {trials}",
            f"{turns['sequences'] / draws:,.0f}",
            f"{turns['dense_tokens'] / draws:,.0f}",
        ]
        for workload in workloads:
            work = row[workload]
            for baseline in ("dense", "leaf"):
                tokens = work[f"{baseline}_tokens"] / work["tree_tokens"]
                pairs = work[f"{baseline}_pairs"] / work["tree_pairs"]
                cells.append(f"{_short(tokens)} ({_short(pairs)})")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.tree.token_ratios", description=__doc__.split("\n\n")[0]
    )
    parser.add_argument("--npz", default=DEFAULT_NPZ, help=f"token arrays (default {DEFAULT_NPZ})")
    parser.add_argument("--draws", type=int, default=100, help="random batches per size between one task and all")
    parser.add_argument("--seed", type=int, default=0, help="of the draws")
    parser.add_argument("--out", help="folder for token_ratios.json and token_ratios.md")
    args = parser.parse_args(argv)
    if args.draws < 1:
        parser.error("--draws: must be at least 1")
    rows = measure(load_npz(resolve(args.npz, "--npz")), args.draws, args.seed)
    table = markdown(rows)
    print(table, end="")
    if args.out:
        folder = Path(args.out)
        folder.mkdir(parents=True, exist_ok=True)
        command = f"python -m benchmarks.tree.token_ratios --draws {args.draws} --seed {args.seed}"
        settings = {"command": command, "data": Path(args.npz).name, "rows": rows}
        write_json(folder / "token_ratios.json", settings)
        (folder / "token_ratios.md").write_text(f"{table}\nTokens (attention pairs), from `{command}`.\n")


def _pairs(lengths: np.ndarray) -> int:
    """Query-key pairs of causal attention over sequences of these lengths, each alone."""
    return int((lengths * (lengths + 1) // 2).sum())


def _short(ratio: float) -> str:
    return f"{ratio:.1f}" if ratio >= 9.95 else f"{ratio:.2f}"


if __name__ == "__main__":
    main()
