"""Which tokens a model lets placeholders of a picture see: asked of the masks that it makes itself.

Promises: no family is known by its name. Masks of a short text with two pictures, narrower windows than these included,
say in which layers the placeholders of a picture see each other; whatever else they let tokens see is refused.
"""

from __future__ import annotations

import copy
import dis
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from app.tree.prefix_tree import Bools

_ASKED = np.array([False, True, True, True, False, True, True, False])
"""Placeholders in the text that a model is asked about; its pictures are wider than its window."""
_WINDOW = 2
KIND_ARGUMENTS = ("mm_token_type_ids", "token_type_ids")
"""Names by which models take whether a token is a placeholder."""


@dataclass(frozen=True)
class Sight:
    """What tokens of a model see beside those before them.

    Attributes:
        layers: those in which placeholders next to each other, of one picture, see each other; empty in most models.
        kinds: the types of these layers, by which masks are named; None: masks are not told apart.
        window: how many tokens those of windowed layers see, themselves included; None: no layer has a window.
    """

    layers: frozenset[int] = frozenset()
    kinds: frozenset[str | None] = frozenset()
    window: int | None = None

    def differs(self, masks: Any, is_row: Bools) -> bool:
        """Whether any of the masks that a model made for one sequence is otherwise.

        Args:
            masks: [1, 1, n, n], bool or added to scores, or None where all see what precedes them; by the type of layer
                or one for all; or [1, n], the tokens that others see. What else kernels have for masks is not looked
                into.
            is_row: bool [n], which tokens are placeholders.
        """
        read = [(kind, mask) for kind, mask in _by_kind(masks) if mask is None or isinstance(mask, torch.Tensor)]
        return any(not _is(mask, is_row, kind in self.kinds, self.window) for kind, mask in read)


def sight_of(model: PreTrainedModel) -> Sight:
    """What the layers of `model` see.

    Raises:
        ValueError: masks of another kind.
    """
    own: Any = getattr(model, "create_masks_for_generate", None)
    own_text = model.config.get_text_config()
    window, told = (getattr(own_text, name, None) for name in ("sliding_window", "use_bidirectional_attention"))
    named = [] if own is None else [name for name in KIND_ARGUMENTS if name in inspect.signature(own).parameters]
    if not named:
        if told or _reads(model.base_model.forward, "token_type_ids"):
            raise ValueError(_refusal(model))
        return Sight(window=window)
    config = copy.deepcopy(model.config)
    text = config.get_text_config()
    text._attn_implementation = "sdpa"  # whose masks are tensors
    if window is not None:
        text.sliding_window = _WINDOW
    shape = torch.zeros(1, len(_ASKED), 1)
    masks = own(config, shape, None, None, None, **{named[0]: torch.from_numpy(_ASKED.astype(np.int64))[None]})
    kinds = set[str | None]()
    for kind, mask in _by_kind(masks):
        if _is(mask, _ASKED, True, _WINDOW):
            kinds.add(kind)
        elif not _is(mask, _ASKED, False, _WINDOW):
            raise ValueError(_refusal(model))
    types = getattr(text, "layer_types", None) or [None] * text.num_hidden_layers
    layers = frozenset(i for i, kind in enumerate(types) if kind in kinds or None in kinds)
    return Sight(layers, frozenset(kinds), window)


def seen(is_row: Bools, together: bool, window: int | None) -> Bools:
    """[n, n]: which keys the queries of a sequence see: those before them, with `together` all of the placeholders next
    to each other that one is among, and none that a window or more before them."""
    place = np.arange(len(is_row))
    run = np.where(is_row, np.cumsum(np.diff(is_row, prepend=False) & is_row), -1)
    shown = place[None, :] <= place[:, None]
    if together:
        shown |= (run[:, None] == run[None, :]) & is_row[:, None]
    return shown if window is None else shown & (place[:, None] - place[None, :] < window)


def _is(mask: torch.Tensor | None, is_row: Bools, together: bool, window: int | None) -> bool:
    """Whether a mask is that of a layer, with the window or without."""
    if mask is None or (mask.dim() == 2 and bool(mask.all())):
        return not together
    if mask.shape[-2:] != (len(is_row), len(is_row)):
        return False
    found = (mask if mask.dtype == torch.bool else mask == 0)[0, 0].cpu().numpy()
    return any(np.array_equal(found, seen(is_row, together, one)) for one in {None, window})


def _reads(function: Any, name: str) -> bool:
    """Whether a function does anything with an argument: Gemma 3n takes one and leaves it."""
    loads = (one.argval for one in dis.get_instructions(inspect.unwrap(function)) if one.opname.startswith("LOAD"))
    return any(name in (value if isinstance(value, tuple) else (value,)) for value in loads)


def _by_kind(masks: Any) -> Iterator[tuple[str | None, Any]]:
    return iter(masks.items()) if isinstance(masks, dict) else iter([(None, masks)])


def _refusal(model: PreTrainedModel) -> str:
    return (
        f"pictures: placeholders see tokens after them in {type(model).__name__} (bidirectional attention), others than"
        " those of their own picture, or in a way that cannot be asked for, and tree training sees ancestors alone; use"
        " a model with causal attention, or batches without pictures"
    )
