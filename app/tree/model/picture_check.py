"""What the self-check looks at where a batch has pictures: a sample with every way they can go wrong, and what enters
the language model beside what the untouched model gives it.

Promises: the sample holds a whole picture of the batch and another of its size (its negative) under equal ids, a fork
right after a picture, and a second picture in a later turn, in real tokens around them; the tower runs on these two.
What differs on the way in is named: features, positions, deepstack features, a mask.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers import PreTrainedModel

from app.tree.attention.groups import RankGroup, RowShares
from app.tree.model.language import language_model
from app.tree.model.sight import Sight
from app.tree.planning.layout import layout
from app.tree.planning.plan import ExecutionPlan
from app.tree.prefix_tree import Bools, Ints, Picture, PrefixTree

BEFORE, AFTER = 12, 16
"""Tokens of text around a picture."""
_ROUNDING = 16
"""Rounding steps of the largest value that features may be off: a tower takes pictures together or one by one."""


Entries = dict[str, Tensor | bool]
"""What enters the language model for one sequence, by name; see `by_token`."""


@dataclass(frozen=True, eq=False)
class Sample:
    """Sequences of the model's own ids; `images`: as `PrefixTree.build` takes them, None without pictures."""

    sequences: list[Ints]
    scored: list[Bools]
    images: list[Ints] | None = None
    pictures: tuple[Picture, ...] = ()

    def tree(self) -> PrefixTree:
        return PrefixTree.build(self.sequences, self.scored, images=self.images, pictures=self.pictures)

    def permuted(self, seed: int) -> Sample:
        """With ids of text that have changed places; seed 0: as it is."""
        text = self.sequences if self.images is None else [s[i < 0] for s, i in zip(self.sequences, self.images)]
        ids = np.unique(np.concatenate(text))
        places = np.random.default_rng(seed).permutation(len(ids)) if seed else np.arange(len(ids))
        changed = [s.copy() for s in self.sequences]
        for k, sequence in enumerate(changed):
            here = slice(None) if self.images is None else self.images[k] < 0
            sequence[here] = ids[places[np.searchsorted(ids, sequence[here])]]
        return replace(self, sequences=changed)

    def seen(self, i: int) -> tuple[list[Picture], Bools]:
        """Pictures of sequence i in order, and which tokens are their placeholders."""
        if self.images is None:
            return [], np.zeros(len(self.sequences[i]), bool)
        owners, shown, k = self.images[i][self.images[i] >= 0], list[Picture](), 0
        while k < len(owners):
            shown.append(self.pictures[int(owners[k])])
            k += shown[-1].tokens
        return shown, self.images[i] >= 0


@dataclass(frozen=True, eq=False)
class _Negative:
    """A picture of the same shape with nothing in common."""

    key: bytes
    pixels: npt.NDArray[np.uint8]
    tokens: int


def picture_sample(tree: PrefixTree, placeholder: int) -> Sample | None:
    """The sample of a batch; None where it has no picture."""
    rows, starts = tree.picture_rows, tree.picture_starts
    present = np.unique(np.searchsorted(starts, rows[rows >= 0], "right") - 1)
    if not len(present):
        return None
    chosen = int(min(present, key=lambda m: tree.pictures[m].tokens))
    picture = tree.pictures[chosen]
    last = int(np.flatnonzero(rows == starts[chosen + 1] - 1)[0])
    tokens = tree.tokens[tree.sequence_tokens([_through(tree, last)])]
    stop = int(tree.token_depth[last]) + 1
    # The occurrence that ends there: its first row is the nearest one before.
    start = int(np.flatnonzero(tokens[:stop] == tokens[stop - 1] - picture.tokens + 1)[-1])
    is_text = np.isin(tokens, tree.tokens[rows < 0])
    before = tokens[:start][_run_of(is_text[:start][::-1]) :][-BEFORE:]
    after = tokens[stop : stop + _length(is_text[stop:])][:AFTER]
    if len(after) < 2:  # nothing follows it anywhere in the batch
        some = tree.tokens[rows < 0][:AFTER]
        after = np.concatenate([after, some if len(some) else np.zeros(1, np.int64), [0, 0]])
    inside = tokens[start:stop]
    shown = ~np.isin(inside, tree.tokens[rows < 0])
    span = np.where(shown, placeholder, inside)
    negative = _Negative(b"negative of " + picture.key, 255 - picture.pixels, picture.tokens)
    texts: list[list[tuple[Ints, int]]] = [  # parts, and the picture they show
        [(before, -1), (span, 0), (after, -1)],
        [(before, -1), (span, 0), (after[1:], -1)],
        [(before, -1), (span, 1), (after, -1)],
        [(before, -1), (span, 0), (after, -1), (before[-1:], -1), (span, 1), (after, -1)],
    ]
    sequences = [np.concatenate([part for part, _ in text]) for text in texts]
    images = [np.concatenate([np.where(shown, m, -1) if m >= 0 else np.full(len(p), -1) for p, m in t]) for t in texts]
    from_on = max(1, len(before) + len(span) - BEFORE // 2)
    scored = [(column < 0) & (np.arange(len(column)) >= from_on) for column in images]
    return Sample(sequences, scored, images, (picture, negative))


def _through(tree: PrefixTree, token: int) -> int:
    """The longest sequence through a tree token."""
    segment = int(np.searchsorted(tree.segment_offset, token, "right")) - 1
    ends = tree.sequence_segment
    below = np.flatnonzero((ends >= segment) & (ends < tree.segment_end[segment]))
    long = below[tree.sequence_length[below] > tree.token_depth[token]]
    return int(long[np.argmax(tree.sequence_length[long])])


def _length(flags: Bools) -> int:
    """How many of them are true from the first on."""
    return int(np.append(~flags, True).argmax())


def _run_of(backwards: Bools) -> int:
    """Where the run of true ones that ends a list begins, given the list backwards."""
    return len(backwards) - _length(backwards)


@contextmanager
def entering(model: PreTrainedModel) -> Iterator[list[dict[str, Any]]]:
    """Collects what enters the language model inside, one dictionary a forward."""
    part = language_model(model)
    names = inspect.signature(part.forward).parameters
    calls: list[dict[str, Any]] = []

    def note(module: Any, args: Any, given: dict[str, Any]) -> None:
        calls.append({name: value for name, value in given.items() if name in names and value is not None})

    handle = part.register_forward_pre_hook(note, with_kwargs=True)
    try:
        yield calls
    finally:
        handle.remove()


def by_token(call: dict[str, Any], is_row: Bools, sight: Sight) -> Entries:
    """What entered, a row a token: [n, ...]; what is given for rows of pictures alone is 0 elsewhere. Of masks only
    whether they let tokens see anything else than `sight` says."""
    out: Entries = {}
    for name, value in call.items():
        if name == "attention_mask":
            out[name] = sight.differs(value, is_row)
        elif isinstance(value, list | tuple):
            where = torch.from_numpy(is_row)
            for k, part in enumerate(value):
                spread = torch.zeros(len(is_row), *part.shape[1:], dtype=torch.float64)
                spread[where] = part.detach().cpu().double()
                out[f"{name}[{k}]"] = spread
        elif isinstance(value, Tensor) and name == "position_ids":
            out[name] = value[-3:].reshape(-1, len(is_row)).t().cpu()
        elif isinstance(value, Tensor) and value.dim() > 1 and value.shape[1] == len(is_row):
            out[name] = value[0].detach().cpu().double()
    return out


def entries_over(
    plan: ExecutionPlan, calls: Sequence[dict[str, Any]], masked_block: int | None, group: RankGroup | None = None
) -> list[Entries]:
    """Entries of each sequence of a plan's tree, from what a forward pass over it called the language model with. What
    only some calls have is 0 in the others. "ran": which tokens some scored token depends on; where a `group` shares
    the rows, those of them that this rank ran. `masked_block`: the attention backend's."""
    tree, parts, order = plan.tree, list[Entries](), list[Ints]()
    chunks = dict.fromkeys(step.chunk for step in plan.steps if step.action in ("anchor", "forward"))
    for chunk, call in zip(chunks, calls, strict=True):
        tokens = layout(plan.chunks[chunk], None, masked_block).tokens
        order.append(tokens if group is None else tokens[RowShares.of(group, len(tokens)).run])
        parts.append(by_token(call, tree.picture_rows[order[-1]] >= 0, Sight()))
    whole: Entries = {"ran": torch.zeros(tree.num_tokens, dtype=torch.bool)}
    for part, tokens in zip(parts, order):
        for name, value in {**part, "ran": torch.ones(len(tokens), dtype=torch.bool)}.items():
            if isinstance(value, bool):
                whole[name] = value or whole.get(name, False)
                continue
            if name not in whole:
                whole[name] = torch.zeros(tree.num_tokens, *value.shape[1:], dtype=value.dtype)
            table = whole[name]
            assert isinstance(table, Tensor), "the same in every forward"
            table[torch.from_numpy(tokens)] = value
    index = [torch.from_numpy(tree.sequence_tokens([i])) for i in range(tree.num_sequences)]
    return [{name: x if isinstance(x, bool) else x[at] for name, x in whole.items()} for at in index]


def differences(own: Sequence[Entries], tree: Sequence[Entries], eps: float) -> str:
    """What of the entries of each sequence is otherwise than the untouched model has it, in words; empty: nothing."""
    for i, (theirs, ours) in enumerate(zip(own, tree)):
        ran = ours["ran"]
        assert isinstance(ran, Tensor), "of tokens"
        for name, value in theirs.items():
            mine = ours.get(name, False)
            if isinstance(value, bool):
                if value and not mine:
                    return f"'{name}', which the model makes of its pictures, is missing"
                continue
            exact, width = name == "position_ids", (len(value), -1)  # positions come as one, those of pictures as three
            if isinstance(mine, bool):
                if exact or bool(value.view(width)[ran].any()):
                    return f"'{name}', which the model makes of its pictures, is missing"
                continue
            apart = (value.view(width) - mine.view(width)).abs().amax(1).masked_fill(~ran, 0)
            allowed = 0.0 if exact else _ROUNDING * eps * max(1.0, float(value.abs().max()))
            if bool((apart > allowed).any()):
                first = int((apart > allowed).int().argmax())
                return f"'{name}' differs from the model's own, first at token {first} of sampled sequence {i}"
    return ""
