"""Positions of text and pictures, for models whose rotary embedding counts time, height and width (3-D M-RoPE).

Promises: the model's own `get_rope_index` says how a picture of a shape is counted, asked once a shape; over a tree
these counts are added up segment by segment, so a shared prefix is counted once. Models without that function count
tokens.

How: text advances all three counts by one. A picture's rows have the count before it plus an offset each, and what
follows goes on from there plus one advance for the whole picture. So the count before a token is a sum over what
precedes it, and depends on its prefix alone.
"""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from app.tree.planning.uncut import refuse_adjacent
from app.tree.prefix_tree import Ints, Picture, PrefixTree


class PicturePositions:
    """How one model counts pictures, by their shapes; raises ValueError where it counts in a way unknown here."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model, self._known = model, dict[tuple[int, int, int], tuple[Ints, int]]()

    def of(self, picture: Picture) -> tuple[Ints, int]:
        """Offsets int64 [3, tokens] of its rows, and how far the counts advance over it."""
        vision = self._model.config.vision_config
        unit = vision.patch_size * vision.spatial_merge_size
        height, width = (side // unit for side in picture.pixels.shape[:2])
        shape = height, width, picture.tokens
        if shape not in self._known:
            whole = picture.pixels.shape[:2] == (height * unit, width * unit)
            found = _ask(self._model, *shape) if whole else None
            if found is None:
                raise ValueError(
                    f"picture {picture.key.hex()}: {picture.tokens} tokens for pixels of shape {picture.pixels.shape},"
                    f" and {type(self._model).__name__} makes one of each {unit} x {unit} pixels; resize it as its"
                    " image processor does"
                )
            self._known[shape] = found
        return self._known[shape]

    def of_tree(self, tree: PrefixTree) -> Ints:
        """int64 [3, T] of every tree token.

        Raises:
            ValueError: two pictures without a token of text between them, which the model would take for one.
        """
        refuse_adjacent(tree)
        offsets, advance = self._columns(tree)
        before = np.cumsum(advance) - advance  # in the tree's order; what precedes a segment is its parent's, so:
        first, total = tree.segment_offset, np.append(before, advance.sum())
        base = np.zeros(tree.num_segments, np.int64)
        own = total[first + tree.segment_length] - before[first] if tree.num_tokens else base
        for segment, parent in enumerate(tree.segment_parent.tolist()):  # parents come first
            if parent >= 0:
                base[segment] = base[parent] + own[parent]
        return offsets + before + np.repeat(base - before[first], tree.segment_length)

    def _columns(self, tree: PrefixTree) -> tuple[Ints, Ints]:
        """Offsets [3, T] of tokens and how far each advances the count: a picture with its last row."""
        rows = tree.picture_rows
        offsets, advance = np.zeros((3, len(rows)), np.int64), np.ones(len(rows), np.int64)
        here = np.flatnonzero(rows >= 0)
        known = [self.of(picture) for picture in tree.pictures]
        of_row = np.zeros(int(tree.picture_starts[-1]), np.int64)
        of_row[tree.picture_starts[1:] - 1] = [whole for _, whole in known]
        offsets[:, here] = np.concatenate([of_picture for of_picture, _ in known], 1)[:, rows[here]]
        advance[here] = of_row[rows[here]]
        return offsets, advance


def counts_pictures(model: PreTrainedModel) -> bool:
    """Whether the model counts time, height and width of pictures, and not tokens."""
    return hasattr(model.base_model, "get_rope_index")


def refuse_counts(model: PreTrainedModel) -> None:
    """Raises ValueError where a model counts pictures by something else than their grids."""
    counted = inspect.signature(model.base_model.get_rope_index).parameters if counts_pictures(model) else {}
    if counted and "image_grid_thw" not in counted:
        raise ValueError(_uncounted(model))


def _uncounted(model: PreTrainedModel) -> str:
    return (
        f"pictures: {type(model).__name__} counts the positions of a picture (get_rope_index) by more than its size and"
        " where it begins, and a tree adds such counts up along each path; use another model, or text alone"
    )


def _ask(model: PreTrainedModel, height: int, width: int, tokens: int) -> tuple[Ints, int] | None:
    """The model's own positions of one picture of height x width features, which some give a token a row beside; None
    where it makes another number of them.

    Raises:
        ValueError: a picture is counted by more than its size and what it is counted from, or not at all.
    """
    body: Any = model.base_model
    merge = model.config.vision_config.spatial_merge_size
    kinds = torch.tensor([[0, *[1] * tokens, 0, 0, *[1] * tokens, 0]])
    ids = torch.where(kinds == 1, model.config.image_token_id, 0)
    before = getattr(model.config, "vision_start_token_id", None)
    ids[0, [0, tokens + 2]] = 0 if before is None else before  # some find pictures by it, not by kinds
    grid = torch.tensor([[1, height * merge, width * merge]] * 2)
    known = {"input_ids": ids, "mm_token_type_ids": kinds, "image_grid_thw": grid, "attention_mask": ids >= 0}
    accepted = inspect.signature(body.get_rope_index).parameters
    try:
        positions = body.get_rope_index(**{name: value for name, value in known.items() if name in accepted})[0]
    except (RuntimeError, ValueError):  # whatever it says of a number that is not its own
        return None
    except Exception as error:  # of whoever wrote the model
        raise ValueError(
            f"pictures: {type(model).__name__} could not count the positions (get_rope_index) of a picture of {height}"
            f" x {width} features and {tokens} tokens: {error!r:.200}; use another model, or"
            " text alone"
        ) from error
    found = positions.reshape(len(positions), -1).numpy().astype(np.int64)
    first, second = found[:, : tokens + 2], found[:, tokens + 2 :]
    last = first[:, -1]
    if len(found) != 3 or (first[:, 0] != 0).any() or (last != last[0]).any() or (second != first + last[0] + 1).any():
        raise ValueError(_uncounted(model))
    return first[:, 1:-1] - 1, int(last[0]) - 1
