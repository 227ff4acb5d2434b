"""Sequences -> compressed prefix tree, in numpy.

Promises: every shared prefix appears once; duplicates, sequences that are prefixes of others, sequences of
one token and nothing in common are all ordinary; the result does not depend on the order of the input except
through the sequence indices; no Python loop over tokens and no recursion.

How: sort the sequences (a prefix sorts right before its extensions), take the longest common prefix of
neighbours, and grow the rightmost path of the tree one sequence at a time. Tokens are then laid out in
depth-first order, so a subtree is one contiguous range of tokens.

Pictures: a placeholder stands for one row of one picture's features, so that is its identity. It gets an id of its own
beyond every vocabulary, `FIRST_ROW` + the row among those of all pictures, and whatever compares tokens tells pictures
apart whose placeholders have equal ids. A picture is one identity as a whole, for its rows depend on all of it: no fork
falls inside one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from app.tree.experts.routes import TreeRoutes

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

SHARE_MODES = ("tree", "leaf", "none")
FIRST_ROW = 2**31
"""Token ids from here on are rows of pictures, where a tree has any."""


class Picture(Protocol):
    """What a tree needs to know of a picture.

    Attributes:
        key: names its content; pictures with equal keys are one.
        pixels: uint8 [H, W, 3], of a size that the model's image processor keeps.
        tokens: how many placeholders it takes, one for each row of its features.
    """

    @property
    def key(self) -> bytes: ...
    @property
    def pixels(self) -> npt.NDArray[np.uint8]: ...
    @property
    def tokens(self) -> int: ...


@dataclass(frozen=True, eq=False)
class PrefixTree:
    """A compressed prefix tree of N sequences; build it with `PrefixTree.build`.

    S segments (maximal unbranched runs of tokens) in depth-first order, T tokens in the same order.

    Attributes:
        tokens: int64 [T], token ids; of placeholders `FIRST_ROW` + the row they stand for, see `picture_rows`.
        segment_parent: int64 [S], index of the parent segment, -1 for roots; parents come before children.
        segment_start: int64 [S], depth (position in the sequence) of the segment's first token.
        segment_length: int64 [S], tokens in the segment.
        segment_offset: int64 [S], where the segment's tokens start in `tokens`.
        sequence_segment: int64 [N], the segment that holds the last token of each sequence.
        sequence_length: int64 [N], tokens of each sequence.
        sorted_sequences: int64 [N], sequence indices in depth-first order.
        shared_with_previous: int64 [N], tokens that `sorted_sequences[k]` has in common with entry k - 1.
        num_leaf_tokens: dense-leaf tokens: sequences that are prefixes of (or equal to) others dropped, the rest
            counted alone; the same in every sharing mode.
        scored_masks: the caller's `scored`, bool [L_i] each, or None for "all but the first token".
        pictures: distinct pictures, whose rows are numbered one after the other.
        routes: the experts that tokens were sent to when they were sampled; None where nothing is known of them.
    """

    tokens: Ints
    segment_parent: Ints
    segment_start: Ints
    segment_length: Ints
    segment_offset: Ints
    sequence_segment: Ints
    sequence_length: Ints
    sorted_sequences: Ints
    shared_with_previous: Ints
    num_leaf_tokens: int
    scored_masks: tuple[Bools, ...] | None
    pictures: tuple[Picture, ...] = ()
    routes: TreeRoutes | None = None

    @classmethod
    def build(
        cls,
        sequences: Sequence[Any],
        scored: Sequence[Any] | None = None,
        keys: Sequence[int] | npt.ArrayLike | None = None,
        share: str = "tree",
        images: Sequence[Any] | None = None,
        pictures: Sequence[Picture] = (),
    ) -> PrefixTree:
        """Builds the tree of `sequences`.

        Args:
            sequences: N one-dimensional integer arrays or tensors of token ids >= 0, none empty. N may be 0.
            scored: N bool arrays [L_i], the positions whose outputs losses need; default all but position 0.
            keys: N integers; sequences share tokens only where their keys are equal (temperature, adapter, ...).
            share: "tree", every common prefix; "leaf", only sequences that are prefixes of others are merged
                into the longer one (the dense-leaf baseline); "none", nothing.
            images: N integer arrays [L_i]: -1 for text, and for placeholders the index of their picture in `pictures`,
                which has one for each of its rows, in order, with nothing or text (between tiles) in between. Their
                positions are never scored. Default: text alone.
            pictures: distinct by `key`.

        Raises:
            ValueError: naming the argument and the sequence that is wrong.
        """
        arrays, count = [_as_tokens(sequence, i) for i, sequence in enumerate(sequences)], len(sequences)
        if share not in SHARE_MODES:
            raise ValueError(f"share must be one of {SHARE_MODES}, got {share!r}")
        masks = None if scored is None else _as_masks(scored, arrays)
        if images is not None:
            arrays, masks = _with_pictures(arrays, masks, images, pictures)
        elif len(pictures):
            raise ValueError("pictures: given without images=..., which say where they are")
        key_array = np.zeros(count, np.int64) if keys is None else _as_array(keys)
        if key_array.shape != (count,) or (count and key_array.dtype.kind not in "iub"):
            raise ValueError(
                f"keys: expected {count} integers, one a sequence, got {key_array.dtype} of shape {key_array.shape}"
            )

        order = _sort(arrays, key_array)
        lengths = np.array([len(a) for a in arrays], np.int64)
        shared = _common_prefixes(arrays, key_array, order)
        covered = np.zeros(count, bool)
        covered[:-1] = shared[1:] == lengths[order][:-1]
        leaf_tokens = int(lengths[order][~covered].sum())
        if share == "none":
            shared[:] = 0
        elif share == "leaf" and count:
            shared[1:][shared[1:] < lengths[order][:-1]] = 0
        return _grow(arrays, lengths, order, shared, leaf_tokens, masks, tuple(pictures))

    def select(self, indices: Sequence[int] | Ints) -> PrefixTree:
        """The tree of the sequences `indices`, in that order, which share every common prefix (whatever keys this one
        was built with)."""
        picks = np.asarray(indices, np.int64)
        if not len(picks):
            return self.rebuilt([], picks)
        ends, tokens = np.cumsum(self.sequence_length[picks])[:-1], self.tokens[self.sequence_tokens(picks)]
        return self.rebuilt(np.split(tokens, ends), picks, scored=np.split(self.sequence_scored(picks), ends))

    def rebuilt(self, sequences: Sequence[Ints], picks: Sequence[int] | Ints, **options: Any) -> PrefixTree:
        """A tree of `sequences`, which are `picks` of this one's with the ids they have in it, over the same pictures
        and with the same routes; `options` of `build`."""
        tree = PrefixTree.build(sequences, **options)
        routes = self.routes and self.routes.moved(self.sequence_tokens(picks), tree)
        return replace(tree, pictures=self.pictures, routes=routes)

    @property
    def num_sequences(self) -> int:
        return len(self.sequence_length)

    @property
    def num_segments(self) -> int:
        return len(self.segment_parent)

    @property
    def num_tokens(self) -> int:
        """Tokens of the tree: each shared prefix once."""
        return len(self.tokens)

    @property
    def num_dense_tokens(self) -> int:
        """Tokens of all sequences, each counted alone."""
        return int(self.sequence_length.sum())

    @cached_property
    def picture_rows(self) -> Ints:
        """int64 [T]: which row each token stands for, counted over `pictures` one after the other; -1 for text."""
        if not self.pictures:
            return np.full(self.num_tokens, -1, np.int64)
        return np.where(self.tokens >= FIRST_ROW, self.tokens - FIRST_ROW, -1)

    @cached_property
    def picture_starts(self) -> Ints:
        """int64 [pictures + 1]: the first row of each picture, and the number of rows."""
        return np.cumsum([0, *(picture.tokens for picture in self.pictures)])

    @cached_property
    def leaf_sequences(self) -> Ints:
        """Sequence indices, depth first, that no other sequence of this tree extends (one of each duplicate)."""
        lengths = self.sequence_length[self.sorted_sequences]
        covered = np.zeros(len(lengths), bool)
        covered[:-1] = self.shared_with_previous[1:] == lengths[:-1]
        return self.sorted_sequences[~covered]

    @property
    def num_attention_pairs(self) -> int:
        """Query-key pairs that causal attention over the tree computes: the sum of (depth + 1)."""
        first, length = self.segment_start, self.segment_length
        return int((length * (first + 1) + length * (length - 1) // 2).sum())

    @cached_property
    def token_depth(self) -> Ints:
        """int64 [T], position of each token in its sequences."""
        return np.arange(self.num_tokens) + np.repeat(self.segment_start - self.segment_offset, self.segment_length)

    @cached_property
    def token_parent(self) -> Ints:
        """int64 [T], index of the token before each token, -1 for the first tokens of roots."""
        parents = np.arange(-1, self.num_tokens - 1)
        up = self.segment_parent
        before = np.where(up >= 0, self.segment_offset[up] + self.segment_length[up] - 1, -1) if len(up) else up
        parents[self.segment_offset] = before
        return parents

    @cached_property
    def segment_end(self) -> Ints:
        """int64 [S], index one past the last segment of each segment's subtree."""
        ends = np.arange(1, self.num_segments + 1)
        for segment in range(self.num_segments - 1, -1, -1):
            parent = self.segment_parent[segment]
            if parent >= 0 and ends[segment] > ends[parent]:
                ends[parent] = ends[segment]
        return ends

    @cached_property
    def segment_sequences(self) -> Ints:
        """int64 [S], number of sequences whose path runs through (or ends in) each segment."""
        counts = np.bincount(self.sequence_segment, minlength=self.num_segments).astype(np.int64)
        for segment in range(self.num_segments - 1, -1, -1):
            if self.segment_parent[segment] >= 0:
                counts[self.segment_parent[segment]] += counts[segment]
        return counts

    @cached_property
    def sequence_last_token(self) -> Ints:
        """int64 [N], tree token that is the last of each sequence."""
        segment = self.sequence_segment
        return self.segment_offset[segment] + self.sequence_length - 1 - self.segment_start[segment]

    def sequence_tokens(self, indices: Sequence[int] | Ints) -> Ints:
        """Tree-token index of every position of the sequences `indices`, concatenated: int64 [sum of L_i]."""
        picks = np.asarray(indices, np.int64)
        lengths = self.sequence_length[picks]
        segment, stop = self.sequence_segment[picks], lengths  # depth one past what is not placed yet
        place = np.cumsum(lengths) - lengths  # where each sequence begins in the result
        starts: list[Ints] = []  # one run of tokens a (sequence, segment) pair: where it goes, from where, how many
        sources: list[Ints] = []
        counts: list[Ints] = []
        while len(segment):  # one level up a turn, all sequences at once
            first = self.segment_start[segment]
            starts.append(place + first)
            sources.append(self.segment_offset[segment])
            counts.append(stop - first)
            up = self.segment_parent[segment] >= 0
            segment, stop, place = self.segment_parent[segment[up]], first[up], place[up]
        if not starts:
            return np.zeros(0, np.int64)
        start, source, count = np.concatenate(starts), np.concatenate(sources), np.concatenate(counts)
        order = np.argsort(start)
        return np.arange(int(lengths.sum())) + np.repeat((source - start)[order], count[order])

    def sequence_scored(self, indices: Sequence[int] | Ints) -> Bools:
        """Which positions of the sequences `indices` are scored, concatenated: bool [sum of L_i]; position 0 never."""
        lengths = self.sequence_length[indices]
        starts = np.cumsum(lengths) - lengths
        if self.scored_masks is None:
            flat = np.ones(int(lengths.sum()), bool)
        else:
            flat = np.concatenate([self.scored_masks[i] for i in indices] or [np.zeros(0, bool)])
        flat[starts] = False
        return flat

    @cached_property
    def scored_tokens(self) -> Ints:
        """Tree tokens that at least one sequence scores, ascending."""
        if self.scored_masks is None:
            return np.flatnonzero(self.token_depth > 0)
        positions = [np.flatnonzero(mask) for mask in self.scored_masks]
        segment = np.repeat(self.sequence_segment, [len(p) for p in positions])
        position = np.concatenate(positions) if positions else np.zeros(0, np.int64)
        segment = _climb(segment, self.segment_parent, lambda at: self.segment_start[at] > position)
        scored = np.zeros(self.num_tokens, bool)
        scored[(self.segment_offset[segment] + position - self.segment_start[segment])[position > 0]] = True
        return np.flatnonzero(scored)

    @cached_property
    def segment_needed(self) -> Ints:
        """int64 [S], how many of each segment's tokens, from its first, a scored token depends on. The others (what
        follows the last scored position, and that position itself) never have to run: outputs there are 0.0."""
        scored, offset = self.scored_tokens, self.segment_offset
        if not len(scored):
            return np.zeros(self.num_segments, np.int64)
        own = offset + self.segment_length
        subtree = np.append(offset, self.num_tokens)[self.segment_end]
        before, until_own, until_end = np.searchsorted(scored, [offset, own, subtree])
        last = np.where(until_own > before, scored[until_own - 1] - offset, 0)
        return np.where(until_end > until_own, self.segment_length, last)

    @cached_property
    def num_needed_tokens(self) -> int:
        """Tokens that have to run: those some scored token depends on."""
        return int(self.segment_needed.sum())

    @cached_property
    def sequence_last_needed(self) -> Ints:
        """int64 [N], the deepest tree token on each sequence's path that has to run, -1 where there is none."""
        segment = _climb(self.sequence_segment, self.segment_parent, lambda at: self.segment_needed[at] == 0)
        own = np.where(segment == self.sequence_segment, self.sequence_last_token, self.num_tokens)
        last = self.segment_offset[segment] + self.segment_needed[segment] - 1
        return np.where(segment >= 0, np.minimum(own, last), -1)


def _as_array(value: Any) -> npt.NDArray[Any]:
    """A numpy view of an array, tensor (any device) or list."""
    if hasattr(value, "detach"):
        value = value.detach().cpu()
    return np.asarray(value)


def _as_tokens(sequence: Any, index: int) -> npt.NDArray[Any]:
    array = _as_array(sequence)
    if array.ndim != 1 or len(array) == 0:
        raise ValueError(f"sequences[{index}]: expected a non-empty 1-D array of token ids, got shape {array.shape}")
    if array.dtype.kind not in "iu":
        raise ValueError(f"sequences[{index}]: token ids must be integers, got {array.dtype}")
    low, high = int(array.min()), int(array.max())
    if low < 0 or high >= 2**32:
        raise ValueError(f"sequences[{index}]: token ids must lie in [0, 2^32), got {low if low < 0 else high}")
    return array


def _as_masks(scored: Sequence[Any], arrays: list[npt.NDArray[Any]]) -> tuple[Bools, ...]:
    if len(scored) != len(arrays):
        raise ValueError(f"scored: {len(scored)} masks for {len(arrays)} sequences; give one a sequence")
    masks = []
    for i, (mask, array) in enumerate(zip(scored, arrays, strict=True)):
        values = _as_array(mask)
        if values.shape != array.shape:
            raise ValueError(f"scored[{i}] has shape {values.shape} but sequences[{i}] has {array.shape}")
        if values.dtype.kind not in "b" and not np.isin(values, (0, 1)).all():
            raise ValueError(f"scored[{i}]: expected booleans, got {values.dtype} with values other than 0 and 1")
        masks.append(values.astype(bool))
    return tuple(masks)


def _with_pictures(
    arrays: list[npt.NDArray[Any]], masks: tuple[Bools, ...] | None, images: Sequence[Any], pictures: Sequence[Picture]
) -> tuple[list[npt.NDArray[Any]], tuple[Bools, ...]]:
    """Tokens whose placeholders have the ids of the rows they stand for, and masks that score none of them."""
    if len(images) != len(arrays):
        raise ValueError(f"images: {len(images)} arrays for {len(arrays)} sequences; give one a sequence")
    keys = [picture.key for picture in pictures]
    if len(set(keys)) < len(keys):
        again = next(i for i, key in enumerate(keys) if key in keys[:i])
        raise ValueError(f"pictures[{again}] has the key of pictures[{keys.index(keys[again])}]; give each once")
    starts = np.cumsum([0, *(picture.tokens for picture in pictures)])
    out, scored = [], []
    for i, (array, given) in enumerate(zip(arrays, images)):
        column = _as_array(given)
        if column.shape != array.shape or column.dtype.kind not in "iu":
            raise ValueError(
                f"images[{i}]: expected {len(array)} integers, one a token, got {column.dtype} of shape {column.shape}"
            )
        if column.min() < -1 or column.max() >= len(pictures):
            raise ValueError(f"images[{i}]: indices must lie in [-1, {len(pictures)}), the number of pictures")
        here = np.flatnonzero(column >= 0)
        if int(array[column < 0].max(initial=0)) >= FIRST_ROW:
            raise ValueError(f"sequences[{i}]: token ids beside pictures must lie below {FIRST_ROW}")
        mask = column < 0 if masks is None else masks[i]
        if mask[here].any():
            position = int(here[mask[here].argmax()])
            raise ValueError(f"scored[{i}]: position {position} is a picture's placeholder, which has no probability")
        rows = _rows(column[here], starts, f"images[{i}]", here)
        out.append(array.astype(np.int64))
        out[-1][here] = FIRST_ROW + rows
        scored.append(mask)
    return out, tuple(scored)


def _rows(owners: Ints, starts: Ints, name: str, positions: Ints) -> Ints:
    """The row each placeholder stands for; `owners`: its picture; `name`, `positions`: where they are, for errors."""
    rows, k = np.empty(len(owners), np.int64), 0
    while k < len(owners):
        picture = int(owners[k])
        size = int(starts[picture + 1] - starts[picture])
        have = int((np.append(owners[k : k + size], -1) != picture).argmax())
        if not 0 < have == size:
            raise ValueError(
                f"{name}, position {positions[k]}: {have} of the {size} placeholders of picture {picture} follow;"
                " pictures are whole, so cut sequences before or after them"
            )
        rows[k : k + size] = np.arange(starts[picture], starts[picture + 1])
        k += size
    return rows


def _sort(arrays: list[npt.NDArray[Any]], keys: Ints) -> Ints:
    """Depth-first order: by key, then by tokens. Big-endian bytes compare as the unsigned integers they hold."""
    names = [array.astype(">u4").tobytes() for array in arrays]
    return np.array(sorted(range(len(arrays)), key=lambda i: (keys[i], names[i], i)), np.int64)


def _common_prefixes(arrays: list[npt.NDArray[Any]], keys: Ints, order: Ints) -> Ints:
    """int64 [N]: tokens that each sequence, in sorted order, has in common with the one before it."""
    shared = np.zeros(len(order), np.int64)
    for k in range(1, len(order)):
        i, j = order[k - 1], order[k]
        if keys[i] != keys[j]:
            continue
        size = min(len(arrays[i]), len(arrays[j]))
        differs = arrays[i][:size] != arrays[j][:size]
        first = int(differs.argmax())
        shared[k] = first if differs[first] else size
    return shared


def _grow(
    arrays: list[npt.NDArray[Any]],
    lengths: Ints,
    order: Ints,
    shared: Ints,
    leaf_tokens: int,
    masks: tuple[Bools, ...] | None,
    pictures: tuple[Picture, ...],
) -> PrefixTree:
    """Grows the tree along its rightmost path, then renumbers nodes depth first and lays the tokens out."""
    end: list[int] = []  # depth one past the node's last token
    parent: list[int] = []
    source: list[int] = []  # a sequence whose tokens the node carries
    first: list[int] = []  # smallest sorted position in the node's subtree
    node_of = np.zeros(len(arrays), np.int64)
    path: list[int] = []  # nodes of the rightmost path
    for k, i in enumerate(order.tolist()):
        common, length = int(shared[k]), int(lengths[i])
        below = -1
        while path and end[path[-1]] > common:
            below = path.pop()
        if path and end[path[-1]] == common and below < 0:  # extends the sequence before it (or repeats it)
            end[path[-1]], source[path[-1]] = length, i
            node_of[i] = path[-1]
            continue
        if common > 0 and (not path or end[path[-1]] < common):  # split `below` at the fork
            end.append(common)
            parent.append(path[-1] if path else -1)
            source.append(source[below])
            first.append(first[below])
            parent[below] = len(end) - 1
            path.append(len(end) - 1)
        end.append(length)
        parent.append(path[-1] if path else -1)
        source.append(i)
        first.append(k)
        node_of[i] = len(end) - 1
        path.append(len(end) - 1)

    ends, parents = np.array(end, np.int64), np.array(parent, np.int64)
    depth_first = np.lexsort((ends, np.array(first, np.int64)))
    rank = np.empty_like(depth_first)
    rank[depth_first] = np.arange(len(depth_first))
    starts = np.where(parents >= 0, ends[parents], 0) if len(ends) else ends
    segment_parent = np.where(parents >= 0, rank[parents], -1)[depth_first] if len(ends) else parents
    segment_start, segment_length = starts[depth_first], (ends - starts)[depth_first]
    sources = np.array(source, np.int64)[depth_first]
    pieces = [
        arrays[i][a : a + n]
        for i, a, n in zip(sources.tolist(), segment_start.tolist(), segment_length.tolist(), strict=True)
    ]
    sequence_segment = rank[node_of] if len(ends) else node_of
    # A prefix of other sequences ends above the node it was inserted with, once that was split.
    sequence_segment = _climb(sequence_segment, segment_parent, lambda at: segment_start[at] >= lengths)
    return PrefixTree(
        tokens=np.concatenate(pieces).astype(np.int64) if pieces else np.zeros(0, np.int64),
        segment_parent=segment_parent,
        segment_start=segment_start,
        segment_length=segment_length,
        segment_offset=np.cumsum(segment_length) - segment_length,
        sequence_segment=sequence_segment,
        sequence_length=lengths,
        sorted_sequences=order,
        shared_with_previous=shared,
        num_leaf_tokens=leaf_tokens,
        scored_masks=masks,
        pictures=pictures,
    )


def _climb(segments: Ints, parents: Ints, beyond: Callable[[Ints], Bools]) -> Ints:
    """For each of `segments` the nearest ancestor (or itself) that is not `beyond`, -1 where all are; whatever is below
    a segment that is beyond has to be beyond too. Powers of two at a time: a chain of n takes log n rounds."""
    if not len(segments):
        return segments
    jumps = [parents]
    while (jumps[-1] >= 0).any():
        jumps.append(np.where(jumps[-1] >= 0, jumps[-1][jumps[-1]], -1))
    for jump in reversed(jumps):  # up to the last ancestor that is beyond, and one step more
        target = jump[segments]
        segments = np.where((target >= 0) & beyond(target), target, segments)
    return np.where(beyond(segments), parents[segments], segments)
