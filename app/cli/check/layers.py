"""Seconds of a batch's forward and backward, measured on this device with the model's first layers.

Promises: no weights are read and at most as many layers are made as show what one more of them takes; the rest is
multiplied. What that would take too long for, or cannot show, is None.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Hashable, Sequence
from typing import Any

MOST_SECONDS = 20.0
"""That the passes may take by the planner's prediction, which small models exceed a few times."""

REPEATS = 3  # the fastest counts, as what else the machine does only ever adds


def depths(kinds: Sequence[Hashable]) -> tuple[int, int]:
    """(a, p) of least 2a + p: after the first `a` layers, at least one, kinds repeat every `p` to the end, more than
    once. Where they do not, `a` is all of them.

    >>> depths("ffff"), depths("ff"), depths("dmmm"), depths("sfsfsf"), depths("abcd")
    ((1, 1), (2, 1), (1, 1), (2, 2), (4, 1))
    """
    layers = len(kinds)
    found = [
        (2 * a + p, a, p)
        for p in range(1, layers // 2 + 1)
        for a in range(1, layers - 2 * p + 1)
        if (layers - a) % p == 0 and all(kinds[i] == kinds[i + p] for i in range(a, layers - p))
    ]
    return min(found)[1:] if found else (layers, 1)


def measured_seconds(model: Any, tree: Any, device: str, dtype: str, predicted: float) -> float | None:
    """Of forward and backward of the summed log-probabilities of `tree`.

    Args:
        model: on the meta device, with adapters where it is to have some.
        tree: a `PrefixTree` without pictures. dtype: "float32" or "bfloat16".
        predicted: seconds that the planner predicts for all layers.

    Returns None: layers that cannot be told apart, an engine that refuses the model, more than `MOST_SECONDS`, or
        memory that does not suffice.
    """
    import torch

    from app.tree import TreeEngine, first_layers

    each = kinds(model)
    if not each:
        return None
    first, period = depths(each)
    wanted = [first, first + period] if first < len(each) else [first]
    if REPEATS * predicted * sum(wanted) / len(each) > MOST_SECONDS:
        return None

    def run(depth: int) -> float | None:
        with torch.device("meta"):
            shallow = first_layers(model, depth)
        if shallow is None:
            return None
        shallow = shallow.to(getattr(torch, dtype)).to_empty(device=device).train()
        shallow.tie_weights()
        with torch.no_grad():
            for tensor in [*shallow.parameters(), *shallow.buffers()]:
                tensor.normal_(0, 0.02) if tensor.is_floating_point() else tensor.zero_()
        engine = TreeEngine(shallow, self_check=False)

        def once() -> None:
            shallow.zero_grad(set_to_none=False)
            engine.backward(tree, lambda out, _: out.logprobs.sum(), batched=True)

        once()
        return min(_seconds(once, device) for _ in range(REPEATS))

    try:
        taken = [run(depth) for depth in wanted]
    except (ValueError, MemoryError, RuntimeError):  # what is refused, a fit says; a CPU's memory ends in the last
        return None
    shallow, deeper = taken[0], taken[-1]
    if shallow is None or deeper is None:
        return None
    return shallow + max(0.0, deeper - shallow) * (len(each) - first) / period


def kinds(model: Any) -> list[Hashable]:
    """What tells a layer from others: the shapes of its parameters, and its kind in the configuration."""
    text = model.config.get_text_config()
    named = next((found for name in ("layer_types", "layers_block_type") if (found := getattr(text, name, None))), None)
    shapes: dict[int, list[Hashable]] = {}
    for name, parameter in model.named_parameters():
        if found := re.search(r"\.(?:layers|h|blocks)\.(\d+)\.(.*)", name):
            shapes.setdefault(int(found[1]), []).append((found[2], tuple(parameter.shape), parameter.requires_grad))
    if sorted(shapes) != list(range(text.num_hidden_layers)):
        return []
    return [(tuple(shapes[i]), named[i] if named else None) for i in sorted(shapes)]


def _seconds(run: Callable[[], None], device: str) -> float:
    """On a CPU this thread's own, where others may have the core."""
    import torch

    now = time.thread_time if device == "cpu" else time.perf_counter
    if device == "cuda":
        torch.cuda.synchronize()
    began = now()
    run()
    if device == "cuda":
        torch.cuda.synchronize()
    return now() - began
