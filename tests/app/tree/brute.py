"""The prefix tree by definition: a set of prefixes. Slow, obvious, and independent of `app.tree`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

Node = tuple[int, tuple[int, ...]]  # (sharing key, prefix of at least one token)


def words(sequences: Sequence[Any]) -> list[tuple[int, ...]]:
    """Sequences as tuples of Python integers."""
    return [tuple(int(token) for token in sequence) for sequence in sequences]


def trie(sequences: Sequence[Any], keys: Sequence[int] | None = None) -> set[Node]:
    """Every distinct (key, prefix): one node for each token of the tree."""
    keys = keys or [0] * len(sequences)
    return {(key, word[:n]) for key, word in zip(keys, words(sequences)) for n in range(1, len(word) + 1)}


def leaf_tokens(sequences: Sequence[Any], keys: Sequence[int] | None = None) -> int:
    """Tokens left when duplicates and sequences that are prefixes of others are dropped."""
    keys = keys or [0] * len(sequences)
    nodes = set(zip(keys, words(sequences)))
    extended = {(key, word[:n]) for key, word in nodes for n in range(1, len(word))}
    return sum(len(word) for key, word in nodes if (key, word) not in extended)


def num_segments(nodes: set[Node]) -> int:
    """Maximal unbranched runs: roots, plus nodes whose parent has at least two children."""
    children: dict[Node, int] = {}
    for key, word in nodes:
        children[(key, word[:-1])] = children.get((key, word[:-1]), 0) + 1
    return sum(len(word) == 1 or children[(key, word[:-1])] > 1 for key, word in nodes)


def tree_cost(nodes: Iterable[Node], prefix_cost: Callable[[int], float]) -> float:
    """Cost of computing the nodes once, `prefix_cost(n)` being that of a lone prefix of n tokens."""
    return sum(prefix_cost(len(word)) - prefix_cost(len(word) - 1) for _, word in nodes)


def default_cost(n: int) -> float:
    """DESIGN §3: tokens + attention pairs / 8192."""
    return n + n * (n + 1) / 2 / 8192
