"""Hypothesis strategies for sets of sequences that share prefixes in every way we know of; masks, keys, budgets.

Promises: token ids below `VOCABULARY`; lengths at most `MAX_LENGTH`; duplicates, prefixes of others, one-token
sequences, nothing shared, deep chains, wide stars and random tries all come up often; examples shrink well.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from hypothesis import strategies as st

VOCABULARY = 31
MAX_LENGTH = 24
SHARE_MODES = ("tree", "leaf", "none")
TEMPERATURES = (1.0, 0.6, 1.7)  # by sharing key

Tokens = list[int]


@dataclass(frozen=True)
class Case:
    """Arguments of one tree pass; `temperatures` is a function of `keys`, as sharing demands."""

    sequences: list[npt.NDArray[np.int64]]
    scored: list[npt.NDArray[np.bool_]] | None
    keys: list[int] | None
    share: str
    chunk_tokens: int
    live_tokens: int
    seed: int

    @property
    def temperatures(self) -> list[float] | None:
        return None if self.keys is None else [TEMPERATURES[key] for key in self.keys]

    @property
    def lengths(self) -> list[int]:
        return [len(sequence) for sequence in self.sequences]


def _ids(alphabet: int) -> st.SearchStrategy[int]:
    """Few letters make accidental sharing likely; they are spread over the vocabulary."""
    return st.integers(0, alphabet - 1).map(lambda letter: (letter * 7 + 3) % VOCABULARY)


@st.composite
def random_tries(draw: st.DrawFn) -> list[Tokens]:
    """Random words over one to three letters: everything is a prefix of something."""
    alphabet = draw(st.integers(1, 3))
    return draw(st.lists(st.lists(_ids(alphabet), min_size=1, max_size=8), min_size=1, max_size=9))


@st.composite
def grown_trees(draw: st.DrawFn) -> list[Tokens]:
    """Each new sequence continues an earlier one from a random cut: forks at any depth, prefixes, duplicates."""
    sequences = [draw(st.lists(_ids(VOCABULARY), min_size=1, max_size=8))]
    for _ in range(draw(st.integers(0, 7))):
        parent = sequences[draw(st.integers(0, len(sequences) - 1))]
        cut = draw(st.integers(0, len(parent)))
        suffix = draw(st.lists(_ids(VOCABULARY), min_size=0 if cut else 1, max_size=6))
        sequences.append((parent[:cut] + suffix)[:MAX_LENGTH])
    return sequences


@st.composite
def deep_chains(draw: st.DrawFn) -> list[Tokens]:
    """Turns of a conversation: every cut of one long sequence is a training sequence, with or without a side branch
    (the think block that later turns drop)."""
    spine = draw(st.lists(_ids(VOCABULARY), min_size=2, max_size=18))
    cuts = draw(st.lists(st.integers(1, len(spine)), min_size=1, max_size=7))
    branch = draw(st.lists(_ids(VOCABULARY), max_size=3))
    return [spine[:cut] + (branch if draw(st.booleans()) else []) for cut in cuts]


@st.composite
def wide_stars(draw: st.DrawFn) -> list[Tokens]:
    """Samples of one prompt: a shared stem and many short branches."""
    stem = draw(st.lists(_ids(VOCABULARY), min_size=1, max_size=6))
    count = draw(st.integers(2, 10))
    return [[*stem, (3 * i + 1) % VOCABULARY, *draw(st.lists(_ids(4), max_size=3))] for i in range(count)]


@st.composite
def nothing_shared(draw: st.DrawFn) -> list[Tokens]:
    """Every sequence starts with a token of its own."""
    tails = draw(st.lists(st.lists(_ids(2), max_size=6), min_size=1, max_size=6))
    return [[i, *tail] for i, tail in enumerate(tails)]


@st.composite
def forests(draw: st.DrawFn) -> list[Tokens]:
    """One or two of the shapes above, some sequences repeated, in random order."""
    shapes = st.one_of(grown_trees(), deep_chains(), wide_stars(), random_tries(), nothing_shared())
    sequences = draw(shapes)
    if draw(st.booleans()):
        sequences = sequences + draw(shapes)
    copies = draw(st.lists(st.integers(0, len(sequences) - 1), max_size=3))
    sequences = (sequences + [sequences[i] for i in copies])[:14]
    return draw(st.permutations(sequences))


@st.composite
def budgets(draw: st.DrawFn, num_tokens: int) -> int:
    """From one token to everything and beyond; small ones more often, since they make long plans."""
    return draw(st.one_of(st.integers(1, 6), st.integers(1, num_tokens + 3)))


@st.composite
def cases(draw: st.DrawFn, shares: tuple[str, ...] = SHARE_MODES) -> Case:
    """A whole case. `live_tokens` may be smaller than `chunk_tokens`: the engine then caps its chunks."""
    sequences = [np.array(sequence, np.int64) for sequence in draw(forests())]
    total = sum(len(sequence) for sequence in sequences)
    scored = None
    if draw(st.booleans()):
        densities = st.sampled_from((0.0, 0.3, 1.0))
        random = np.random.default_rng(draw(st.integers(0, 999)))
        scored = [random.random(len(sequence)) < draw(densities) for sequence in sequences]
    keys = None
    if draw(st.integers(0, 2)) == 0:
        keys = [draw(st.integers(0, len(TEMPERATURES) - 1)) for _ in sequences]
    return Case(
        sequences=sequences,
        scored=scored,
        keys=keys,
        share=draw(st.sampled_from(shares)),
        chunk_tokens=draw(budgets(total)),
        live_tokens=draw(budgets(total)),
        seed=draw(st.integers(0, 999)),
    )
