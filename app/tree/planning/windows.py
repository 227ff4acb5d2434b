"""Attention parts of a layer: the path, then the chunk's own rows, cut to the layer's sliding window or to its sections
(runs of so many positions, whose tokens see those of their own alone). Pure data.

Promises: every visible (query, key) pair is in exactly one part, and a part's every query sees at least one of its keys
(kernels disagree about the log-sum-exp of a row that sees nothing). Windows compare depths, never rows: a query at
depth d sees its ancestors at depths above d - window. Only the keys at the edge of the window, about `MASKED_BLOCK` of
them for a group of queries, are under a mask; keys beyond it are in no part. Sections need no mask: each is cut out.

The keys of every part without a mask, and of the path, are consecutive depths; that is what `layout` builds.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from app.tree.planning import layout as layout_module
from app.tree.planning.layout import Layout, Part
from app.tree.prefix_tree import Ints

_GROUP_ROWS = 4096
"""Most queries under one mask at the edge of a window."""


def layer_parts(
    rows: Layout,
    depths: Ints,
    path_tokens: int,
    window: int | None,
    cut_squares: bool = True,
    section: int | None = None,
) -> list[Part]:
    """Parts of one layer's attention over [path | chunk].

    Args:
        rows: the chunk's layout; depths: int64 [n], the depth of each of its rows.
        path_tokens: tokens of the path; row j of the path has depth j.
        window: how many tokens a query sees, itself included; None: all.
        cut_squares: False leaves causal squares whole, for kernels that know windows.
        section: tokens of a section, of which a query sees those before it; None: there are none. Not beside a window.
    """
    parts = [Part(0, len(rows.tokens), 0, path_tokens, path=True)] if path_tokens else []
    parts += rows.parts
    if section is not None and int(depths.max()) >= section:
        parts = [cut for part in parts for cut in _sections(part, depths, section)]
    if window is None or int(depths.max()) < window:
        return parts
    return [
        cut for part in parts for cut in ([part] if part.causal and not cut_squares else _cut(part, depths, window))
    ]


def _sections(part: Part, depths: Ints, section: int) -> Iterator[Part]:
    """What is left of a part, a section of its queries at a time."""
    own = depths[part.q_start : part.q_stop] // section
    if part.mask is not None:
        keys = depths[part.k_start : part.k_stop] // section
        yield replace(part, mask=part.mask & (own[:, None] == keys[None, :]))
        return
    breaks = (np.flatnonzero(np.diff(own)) + part.q_start + 1).tolist()
    first = 0 if part.path else int(depths[part.k_start])
    for start, stop in zip([part.q_start, *breaks], [*breaks, part.q_stop], strict=True):
        if part.causal:
            yield Part(start, stop, start, stop, causal=True)
            continue
        begin = part.k_start + max(0, int(own[start - part.q_start]) * section - first)
        if begin < part.k_stop:
            yield replace(part, q_start=start, q_stop=stop, k_start=begin)


def _cut(part: Part, depths: Ints, window: int) -> Iterator[Part]:
    if part.mask is not None:
        queries, keys = depths[part.q_start : part.q_stop], depths[part.k_start : part.k_stop]
        yield replace(part, mask=part.mask & (queries[:, None] - keys[None, :] < window))
    elif part.causal:
        yield from _cut_square(part, depths, window)
    else:
        first = 0 if part.path else int(depths[part.k_start])
        yield from _cut_rectangle(part, depths, first, window)


def _cut_square(part: Part, depths: Ints, window: int) -> Iterator[Part]:
    """A causal band: smaller squares, each with the rectangle of earlier keys its queries still see."""
    step = min(window, max(1, layout_module.MASKED_BLOCK))
    first = int(depths[part.k_start])
    for start in range(part.q_start, part.q_stop, step):
        stop = min(start + step, part.q_stop)
        if start > part.k_start:
            yield from _cut_rectangle(Part(start, stop, part.k_start, start), depths, first, window)
        yield Part(start, stop, start, stop, causal=True)


def _cut_rectangle(part: Part, depths: Ints, first: int, window: int) -> Iterator[Part]:
    """Keys of consecutive depths from `first` on: for groups of queries of similar depth, those all of them see in one
    part, and those at the edge of the window in a masked one."""
    keys = part.k_stop - part.k_start
    for start, stop in _groups(depths, part.q_start, part.q_stop, first, keys, window):
        group = depths[start:stop]
        # Depths seen by the highest and the lowest query begin at these keys, counted from `first`.
        some = max(0, int(group.min()) - window + 1 - first)
        every = max(0, int(group.max()) - window + 1 - first)
        if some < every:
            every += 1  # one key all of them see joins the mask, so that no row of it is empty
            seen = group[:, None] - (first + np.arange(some, every))[None, :] < window
            yield replace(
                part, q_start=start, q_stop=stop, k_start=part.k_start + some, k_stop=part.k_start + every, mask=seen
            )
        if every < keys:
            yield replace(part, q_start=start, q_stop=stop, k_start=part.k_start + every)


def _groups(depths: Ints, start: int, stop: int, first: int, keys: int, window: int) -> Iterator[tuple[int, int]]:
    """Row ranges whose queries all see the last key, and whose windows begin close together."""
    reach = first + keys + window - 1  # depths from here on are out of every key's sight
    near = max(1, min(window, layout_module.MASKED_BLOCK))
    begin, end, low, high = -1, -1, 0, 0
    for a, b in _runs(depths, start, stop, near):
        b = min(b, a + reach - int(depths[a]))
        if b <= a:
            continue
        lowest, highest = int(depths[a]), int(depths[b - 1])
        if a == end:
            joined_low, joined_high = min(low, lowest), max(high, highest)
            unmasked = joined_high - window + 1 <= first
            if unmasked or (joined_high - joined_low < near and b - begin <= _GROUP_ROWS):
                end, low, high = b, joined_low, joined_high
                continue
        if begin >= 0:
            yield begin, end
        begin, end, low, high = a, b, lowest, highest
    if begin >= 0:
        yield begin, end


def _runs(depths: Ints, start: int, stop: int, longest: int) -> Iterator[tuple[int, int]]:
    """Ranges of rows of consecutive depths, at most `longest` long."""
    breaks = np.flatnonzero(np.diff(depths[start:stop]) != 1) + start + 1
    for a, b in zip([start, *breaks.tolist()], [*breaks.tolist(), stop], strict=True):
        for begin in range(a, b, longest):
            yield begin, min(begin + longest, b)
