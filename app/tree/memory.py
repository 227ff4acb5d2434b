"""Bytes of a tree pass, part by part, and token budgets from the memory that is free.

Promises: nothing is allocated or run; when not even the smallest pass fits, the error says what takes how much and what
to do, before anything runs.
"""

from __future__ import annotations

import gc
import os
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TypeVar

import numpy as np
import psutil
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from app.tree.attention import path_cache
from app.tree.heads import Heads
from app.tree.model.checkpointing import checkpointable, checkpoints_itself
from app.tree.model.picture_shares import dealt
from app.tree.model.pictures import tower_parameters
from app.tree.model.quantised import elements, quantised_layers, scales
from app.tree.model.shape import shape_of
from app.tree.model.vocabulary import CutVocabulary, vocabulary_modules
from app.tree.planning.cost import ModelShape, TowerShape
from app.tree.planning.plan import Chunk, most_ends, most_waiting, path_rows
from app.tree.prefix_tree import Picture, PrefixTree

DEVICE_CHUNK = {"cpu": 2048, "cuda": 32768}
"""Most tokens a chunk when the user leaves it open: CPUs are fastest at 1-4K (cache); on GPUs a chunk adds to the
gradient of every weight, so that longer ones gain as long as they fit, and the planner weighs shorter ones too."""

Result = TypeVar("Result")

_ROUND = 1024
"""Live tokens above it are a multiple of it, so that a few bytes more or less make no other plan."""

_CPU_SHARE, _GPU_SHARE = 0.5, 0.8
"""Of the free memory, what a pass may take: a CPU's is also other processes', and its allocator returns it late."""

_TOWER_SHARE = 0.125
"""Of the free memory, what graphs of pictures through a trained tower may take."""

_LEAST = 16
"""Live tokens below which a pass would crawl."""


@dataclass(frozen=True)
class PassMemory:
    """Estimated bytes of a backward pass.

    Attributes:
        parameters: there already, for orientation; not part of `total`.
        gradients: of parameters that have none yet.
        gathered: where weights are in 4 bit, the largest one read back; where parameters are sharded (FSDP2), the
            largest unit's twice, as the next is on its way while one runs, and its gradients with what is sent of them;
            where the vocabulary is, hidden states and gradients of the rows of all ranks, once as sent and once as they
            come, and the gradient of what one chunk looks up.
        path_cache: keys and values of the longest path, of layers with a window those in sight, with their gradients;
            those of anchors on their way to it, and gradients on theirs to a chunk.
        states: of layers that carry one, at the ends of the chunks of the longest path, with their gradients.
        outputs: tokens, outputs and their gradients, of the tree and of all sequences.
        head_block: logits, softmax and gradient of one block of rows, as this projection is computed on this device.
        backward: gradients of one layer's activations of a chunk while its backward runs, or a scan's own buffers.
        live_activations: what `live_tokens` keep for backward.
        pictures: tables of features, with their gradients and the graphs that made them where a tower is trained.
    """

    parameters: int
    gradients: int
    gathered: int
    path_cache: int
    states: int
    outputs: int
    head_block: int
    backward: int
    live_activations: int
    pictures: int = 0

    @property
    def total(self) -> int:
        return sum(getattr(self, field.name) for field in fields(self)) - self.parameters

    def __str__(self) -> str:
        parts = (f"{field.name.replace('_', ' ')} {_size(getattr(self, field.name))}" for field in fields(self))
        return ", ".join(parts)


def token_bytes(model: PreTrainedModel) -> int:
    """Bytes a live token keeps for backward in this model, checkpointed by the user or not."""
    shape, element = shape_of(model), next(model.parameters()).element_size()
    whole = shape.activation_bytes(element)
    return max(1, int(whole * shape.checkpoint_share())) if checkpoints_itself(model) else whole


def pass_memory(
    model: PreTrainedModel,
    chunk_tokens: int,
    live_tokens: int,
    tree: PrefixTree | None = None,
    head_tokens: int | None = None,
    chunks: Sequence[Chunk] | None = None,
    ranks: int = 1,
    device: torch.device | None = None,
) -> PassMemory:
    """Estimates a pass over `tree` (without one: what does not depend on it) at these budgets. `chunks`: of its plan,
    where there is one, whose sizes and states are counted then. `ranks`: how many run it together, sharing rows and
    heads; the bytes are those of one of them. `device`: where it will run, default where the model is."""
    shape, parameter = shape_of(model), next(model.parameters())
    element = parameter.element_size()
    accumulated = max(4, element)
    missing = sum(_here(p) for p in model.parameters() if p.requires_grad and p.grad is None)
    longest = int(tree.sequence_length.max()) if tree is not None and tree.num_sequences else 0
    tokens, dense = (tree.num_tokens, tree.num_dense_tokens) if tree is not None else (0, 0)
    heads = Heads(model, None, head_tokens or "auto", device)
    rows = heads.head_tokens
    scored = len(tree.scored_tokens) if tree is not None else rows
    layer = shape.activation_bytes(element) // shape.layers
    scan = 4 * shape.states.scan_buffer_values() if shape.states is not None else 0
    largest = min(chunk_tokens, max(tokens, _LEAST)) if not chunks else max(chunk.tokens for chunk in chunks)
    cut, width = CutVocabulary.of(model), shape.hidden
    held = 1 + longest // chunk_tokens if chunks is None else most_ends(chunks)
    where, on_path = device or parameter.device, 0  # values of the path's keys, and of the values beside them
    for window, values in shape.keys_seen(ranks).items():
        kept, most = longest, longest if window is None else max(1, window - 1)
        if chunks is not None:
            kept = path_rows(chunks, most)
        elif window is not None and tree is not None:
            kept = min(longest, _rows_in_sight(tree, most) + held * most)
        on_path += 2 * values * path_cache.rows(kept, where)
    key_value = 2 * shape.key_values(ranks)
    waiting = min(tokens, held * chunk_tokens) if chunks is None else most_waiting(chunks)
    dealt = shape.state_values - shape.undealt_values
    return PassMemory(
        parameters=sum(_here(p) * p.element_size() for p in model.parameters())
        + sum(x.nbytes for _, x in scales(model)),
        gradients=missing * accumulated,
        gathered=_largest_unit(model) * 2 * (element + accumulated)
        + max((elements(layer.weight) for layer in quantised_layers(model).values()), default=0) * element
        + (0 if cut is None else 4 * min(largest, scored) * width * element + cut.count * width * accumulated),
        path_cache=on_path * (element + accumulated)
        + key_value * (waiting * element + min(chunk_tokens, tokens) * accumulated),
        states=2 * 4 * (shape.undealt_values + -(-dealt // ranks)) * held,
        outputs=tokens * (8 + 3 * accumulated) + dense * (8 + 3 * accumulated),
        head_block=heads.block_bytes(min(rows, max(1, scored), -(-chunk_tokens // ranks))),
        backward=largest * max(layer, scan) // ranks,
        live_activations=live_tokens * token_bytes(model) // ranks,
        pictures=_picture_bytes(model, tree, ranks) if tree is not None and tree.pictures else 0,
    )


def _rows_in_sight(tree: PrefixTree, most: int) -> int:
    """The longest way down, in tokens, of each segment at most so many."""
    rows, above = np.minimum(tree.segment_length, most), tree.segment_parent
    while (above >= 0).any():  # each pass doubles the length of the ways that are added up
        rows = rows + np.where(above >= 0, rows[above], 0)
        above = np.where(above >= 0, above[above], -1)
    return int(rows.max(initial=0))


def tower_graphs_fit(model: PreTrainedModel, pictures: Sequence[Picture]) -> bool:
    """Whether the graphs of all these pictures through a trained tower may be kept during a pass; otherwise the tower
    runs once more for each at the end of it."""
    return _graph_bytes(model, pictures) <= _TOWER_SHARE * free_bytes(next(model.parameters()).device)


def _graph_bytes(model: PreTrainedModel, pictures: Sequence[Picture]) -> int:
    tower, element = TowerShape.of(model.config), next(model.parameters()).element_size()
    if tower is None:
        return 0
    return sum(tower.graph_bytes(picture.tokens, element) for picture in pictures)


def _picture_bytes(model: PreTrainedModel, tree: PrefixTree, ranks: int) -> int:
    """Of the rank with most rows."""
    shares = ([tree.pictures[k] for k in owned] for owned in dealt(tree, ranks))
    pictures = max(shares, key=lambda own: sum(picture.tokens for picture in own))
    tower, hidden = TowerShape.of(model.config), ModelShape.of(model.config).hidden
    element = next(model.parameters()).element_size()
    values = sum(picture.tokens for picture in pictures) * hidden * (1 + (tower.deepstack if tower is not None else 0))
    if not any(parameter.requires_grad for parameter in tower_parameters(model)):
        return values * element
    kept = min(_graph_bytes(model, pictures), int(_TOWER_SHARE * free_bytes(next(model.parameters()).device)))
    return values * (element + max(4, element)) + kept


def _here(parameter: Tensor) -> int:
    """Elements that this process holds."""
    return (parameter.to_local() if isinstance(parameter, DTensor) else parameter).numel()


def _largest_unit(model: PreTrainedModel) -> int:
    """Elements of the largest part of a sharded model that is gathered at once; 0 where nothing is sharded."""
    units = {id(module) for module in model.modules() if isinstance(module, FSDPModule)}
    never = {id(module) for module in vocabulary_modules(model)}

    def own(module: nn.Module) -> int:
        mine = sum(p.numel() for p in module.parameters(recurse=False) if isinstance(p, DTensor))
        return mine + sum(own(child) for child in module.children() if id(child) not in units | never)

    return max((own(module) for module in model.modules() if id(module) in units), default=0)


def auto_budgets(
    model: PreTrainedModel,
    chunk_tokens: int | str,
    live_tokens: int | str,
    tree: PrefixTree | None = None,
    head_tokens: int | None = None,
    ranks: int = 1,
    free: int | None = None,
) -> tuple[int, int]:
    """Replaces "auto" by numbers: (chunk_tokens, live_tokens), of all `ranks` that run a pass together.

    `chunk_tokens`: the device's good size. `live_tokens`: what of half the free memory of a CPU (shared with the other
    ranks on it), or four fifths of a GPU's, is left beside the other parts of a pass over `tree`, in multiples of 1,024
    where it is more. `free`: bytes to count with instead of those that are free now.

    Raises:
        ValueError: when no number of live tokens fits, naming the bytes of each part where least is needed.
    """
    on_gpu = next(model.parameters()).device.type == "cuda"
    chunk = chunk_tokens if not isinstance(chunk_tokens, str) else ranks * DEVICE_CHUNK["cuda" if on_gpu else "cpu"]
    if not isinstance(live_tokens, str):
        return chunk, live_tokens
    free = free_bytes(next(model.parameters()).device) if free is None else free
    usable = int(free * (_GPU_SHARE if on_gpu else _CPU_SHARE))
    # From the most that could fit, downwards: smaller chunks may take more, as each of a long path keeps the states at
    # its end. These count by chunks that keep all of their activations, the rest by checkpointed ones.
    each, tried = token_bytes(model), list[tuple[int, int, PassMemory]]()
    share = shape_of(model).checkpoint_share() if checkpointable(model) else 1.0
    live = _rounded(max(_LEAST, ranks * usable // each))
    while True:
        need = pass_memory(model, min(chunk, max(live, int(live / share))), live, tree, head_tokens, ranks=ranks)
        kept = pass_memory(model, min(chunk, live), live, tree, head_tokens, ranks=ranks)
        need = replace(need, states=kept.states)
        if need.total <= usable:
            return chunk, live
        tried.append((need.total, live, need))
        if live == _LEAST:
            break
        if live > chunk:
            fewer = max(chunk, live - -(-ranks * (need.total - usable) // each))
        else:  # other parts shrink with the chunks: no further than is certain, or a few percent
            fewer = min(live * usable // need.total, live * 97 // 100)
        live = max(_LEAST, _rounded(min(fewer, live - 1)))
    total, live, need = min(tried, key=lambda one: one[:2])
    raise ValueError(
        f"live_tokens='auto': a tree pass does not fit, because {_size(free)} of memory are free, of which it may"
        f" take {_size(usable)}, and with only {live} live tokens it needs {_size(total)}: {need}. Free"
        " memory, use a smaller model, shorter sequences or fewer ranks on this machine, or set live_tokens"
    )


def _rounded(live: int) -> int:
    return live if live < _ROUND else live - live % _ROUND


class Budget:
    """The token budgets of one engine, from pass to pass.

    Promises: free memory is asked for at the first two plans for a backward pass alone (by the second an optimizer has
    its state), so that equal trees get equal plans from then on; a pass that ran out of a GPU's memory is repeated with
    half the live tokens, from exactly the gradients it began with, and later passes keep to these, or to the most that
    has fitted.

    Args:
        chunk_tokens, live_tokens: numbers, or "auto".
    """

    def __init__(self, chunk_tokens: int | str, live_tokens: int | str) -> None:
        self.chunk_tokens, self.live_tokens = chunk_tokens, live_tokens
        self._room: int | None = None  # bytes, were there no gradients
        self._passes = 0
        self._most: int | None = None
        self._planned = 0
        self._together = 1  # tokens that the last plan could not part
        self._fitted = 0  # live tokens of the largest pass that did

    def tokens(
        self, model: PreTrainedModel, tree: PrefixTree, head_tokens: int, ranks: int = 1, together: int = 1
    ) -> tuple[int, int]:
        """(chunk_tokens, live_tokens) of a pass over `tree`, of which `together` tokens have to run in one chunk.
        Raises as `auto_budgets`."""
        free = None
        if isinstance(self.live_tokens, str):
            parameters = [p for p in model.parameters() if p.grad is not None]
            gradients = sum(_here(p.grad) * p.grad.element_size() for p in parameters if p.grad is not None)
            if self._room is None or self._passes < 2:
                self._room = free_bytes(next(model.parameters()).device) + gradients
            free = self._room - gradients
        chunk, live = auto_budgets(model, self.chunk_tokens, self.live_tokens, tree, head_tokens, ranks, free)
        self._planned = live if self._most is None else min(live, max(self._most, together))
        self._together = together
        return chunk, self._planned

    def has_fitted(self, used: int | None) -> bool:
        """Whether a pass that needs so many live tokens has run before, beside an optimizer's state."""
        return self._passes >= 2 and (used or 0) <= self._fitted

    def run(
        self,
        run: Callable[[], Result],
        modules: Sequence[nn.Module],
        together: bool,
        remember: Callable[[], Callable[[], None]] | None,
        used: Callable[[], int | None] = lambda: None,
    ) -> Result:
        """`run()`, a backward pass planned anew at each call; once more with half the live tokens, or as many as have
        to run in one chunk, when a GPU's memory runs out.

        Args:
            modules: whose gradients it adds to.
            together: whether other ranks run the same plan, so that this one cannot choose another by itself.
            remember: called before; what it returns undoes what losses of a failed attempt have recorded.
            used: live tokens that the plan which ran last needed of its budget, where that is known.

        Raises:
            torch.OutOfMemoryError: with a note on what to change, where the pass cannot be repeated.
        """
        before = _GradientsBefore(modules) if runs_out(modules[0]) and not together else None
        forget = remember() if before is not None and remember is not None else None
        while True:
            try:
                result = run()
                self._passes += 1
                self._fitted = max(self._fitted, used() or 0)
                if self._most is not None:  # what has fitted once is not what runs out in a smaller pass
                    self._most = max(self._most, self._fitted)
                return result
            except torch.OutOfMemoryError as error:
                half, needed = self._planned // 2, used()
                if needed is not None and needed <= half:  # the same plan would fit into half of the budget
                    half = needed // 2
                half = max(half, self._together)
                if before is None or half < _LEAST or half >= self._planned or not before.restore():
                    error.add_note(
                        f"A tree pass of {self._planned} live tokens ran out of memory and was not repeated with fewer:"
                        f" {self._why(together, half)}"
                    )
                    raise
                found = str(error).splitlines()[0]
            # The error is gone, and with its traceback all that the failed attempt had allocated.
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            if forget is not None:
                forget()
            warnings.warn(
                f"a tree pass of {self._planned} live tokens ran out of memory ({found}); it is repeated with {half},"
                " and so are later ones",
                stacklevel=3,
            )
            self._most = half

    def _why(self, together: bool, half: int) -> str:
        """No pass with `half` live tokens, and the remedy. `together`: ranks run the same plan."""
        remedy = "Set live_tokens (or chunk_tokens) to less"
        if together:
            return f"ranks of a group run one plan together. {remedy}"
        if half >= self._planned:
            return (
                f"a picture has {self._together} placeholders next to each other that see each other, which have to run"
                " in one chunk. Show smaller pictures, or use a device with more memory"
            )
        if half < _LEAST:
            return f"{half} are too few. {remedy}"
        return (
            f"gradients of earlier passes are in the same tensors, or some were on their way to other ranks. {remedy}"
        )


class _GradientsBefore:
    """The gradients before a pass, of which nothing is copied: those that are absent or zero can be made so again."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        trained = [p for module in modules for p in module.parameters() if p.requires_grad]
        self._absent = [p for p in trained if p.grad is None]
        self._present = [p for p in trained if p.grad is not None]
        self._there = [p.grad for p in self._present if p.grad is not None]
        norms = torch._foreach_norm(self._there, float("inf")) if self._there else []
        self._largest = torch.stack([norm.float() for norm in norms]).max() if norms else None  # read after a failure

    def restore(self) -> bool:
        """As before; False, and nothing done, where other passes had left something in them, or some were taken away
        meanwhile (complete, to be summed over ranks)."""
        taken = any(p.grad is not grad for p, grad in zip(self._present, self._there, strict=True))
        if taken or (self._largest is not None and not bool(self._largest == 0)):
            return False
        for parameter in self._absent:
            parameter.grad = None
        for grad in self._there:
            grad.zero_()
        return True


def runs_out(module: nn.Module) -> bool:
    """Whether allocations for this module fail by an error that one can go on from: on GPUs, not in host memory."""
    return next(module.parameters()).device.type == "cuda"


def free_bytes(device: torch.device) -> int:
    """Memory this process may still take: on a GPU what is free or cached, on a CPU this rank's part of what is
    available, within the limit of its control group."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device))
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", 0)) or (dist.get_world_size() if dist.is_initialized() else 1)
    return min(psutil.virtual_memory().available, _control_group_room()) // ranks


def _control_group_room() -> int:
    """Bytes left under a container's limit (control groups version 2); very many where there is none."""
    folder = Path("/sys/fs/cgroup")
    try:
        limit, used = (folder / "memory.max").read_text(), (folder / "memory.current").read_text()
        return max(0, int(limit) - int(used))
    except (OSError, ValueError):
        return 2**62


def _size(count: int) -> str:
    return f"{count / 2**30:.2f} GiB" if count >= 2**29 else f"{count / 2**20:.1f} MiB"
