"""The systems the benchmarks compare, each one pass (forward and backward) over the same case with the same loss.

Promises: every system accumulates the gradient of `sum_i weight_i * sum_t logprob_i[t]` over scored positions, in the
accumulation dtype, into `.grad`; only scored positions reach the vocabulary in all of them; building the tree and
planning count as part of a pass.

    dense            every sequence alone through the plain transformers model (SDPA attention, gradient checkpointing
                     where asked for); sequences evenly spaced over the lengths, the longest among them, may stand for
                     all
    dense-leaf       the same for the sequences no other extends, which carry the losses of their prefixes
    path-at-a-time   depth first, one node of the published engine's trie a forward (a node ends where a sequence ends
                     or branches off, and where the chunk budget does), every inner node first without gradient
    sparse           one chunk for as much of the tree as memory takes
    ours             the planner at its budgets
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config

from app.tree import FlatOutputs, PrefixTree, TreeEngine, on_device
from app.tree.memory import auto_budgets, pass_memory
from app.tree.planning.cost import ModelShape, plan_flops
from app.tree.planning.packing import Packing
from app.tree.planning.plan import Chunk, ExecutionPlan, Piece, Step
from app.tree.planning.planner import plan
from benchmarks.common.workloads import Case, Ints

NAMES = ("dense", "dense-leaf", "path-at-a-time", "sparse", "ours")


@dataclass(frozen=True)
class Settings:
    """Budgets (tokens), attention backend, rows of logits at a time and element-wise parts, all of the tree systems;
    `sample` sequences stand for all in dense ones (0: run all); `systems`: those of `NAMES` that run."""

    chunk_tokens: int | str = "auto"
    live_tokens: int | str = "auto"
    sample: int = 0
    checkpoint_dense: bool = False
    checkpoint_leaf: bool = False
    attention: str = "auto"
    head_tokens: int | str = "auto"
    elementwise: str = "eager"
    systems: tuple[str, ...] = NAMES


@dataclass(frozen=True, eq=False)
class System:
    """One way to compute a case.

    Attributes:
        run: does it once. share: part of `flops` that `run` really executes (below 1: a subsample).
        tokens, pairs: query tokens and query-key pairs of one forward of everything; flops: of forward and backward,
            without recomputation by checkpointing; least: of these, what is left when nothing runs twice.
        extra: tokens that go forward a second time.
        detail: what a reader has to know (subsample, checkpointing, chunks).
        predicted_bytes: beyond model and gradients, as the engine's budgets count them; None for dense systems.
    """

    name: str
    run: Callable[[], Any]
    tokens: int
    pairs: int
    flops: float
    least: float
    share: float = 1.0
    extra: int = 0
    detail: str = ""
    predicted_bytes: int | None = None


@dataclass(frozen=True, eq=False)
class _Item:
    """A sequence as the dense model runs it: tokens, scored positions (ascending) and their factors in the loss."""

    tokens: Ints
    positions: Ints
    factors: np.ndarray[Any, np.dtype[np.float64]]


def qwen3(
    hidden: int,
    layers: int,
    heads: int,
    key_value_heads: int,
    head_dim: int = 128,
    intermediate: int | None = None,
    vocabulary: int = 151_936,
    tied: bool = False,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    seed: int = 0,
    window: int | None = None,
) -> PreTrainedModel:
    """A Qwen3 of this shape with random weights, in training mode, with zeroed gradients in the accumulation dtype.
    `window`: all layers but the first see that many tokens."""
    config = Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=intermediate or 3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=key_value_heads,
        head_dim=head_dim,
        max_position_embeddings=65_536,
        use_sliding_window=window is not None,
        sliding_window=window,
        max_window_layers=1,
        tie_word_embeddings=tied,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
    )
    torch.manual_seed(seed)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=dtype)
    model.train()
    attach_gradients(model)
    return model


def attach_gradients(model: PreTrainedModel) -> None:
    """Zeroed `.grad` of every parameter, float32 for low-precision ones: all systems accumulate alike."""
    for parameter in model.parameters():
        wanted = torch.promote_types(torch.float32, parameter.dtype)
        if parameter.dtype != wanted:
            parameter.grad_dtype = wanted
        parameter.grad = torch.zeros_like(parameter, dtype=wanted)


def zero_gradients(model: PreTrainedModel) -> None:
    torch._foreach_zero_([p.grad for p in model.parameters()])


def gradients(model: PreTrainedModel, system: System) -> dict[str, Tensor]:
    """Gradients of one run, by parameter name."""
    zero_gradients(model)
    system.run()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


def gradient_error(got: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float]:
    """`norm`: ||difference|| / ||expected|| over all parameters; `largest`: largest difference over the largest
    expected entry. NaN stays NaN."""
    square = scale = torch.zeros((), dtype=torch.float64)
    largest: list[Tensor] = []
    peak: list[Tensor] = []
    for name, want in expected.items():
        wanted = want.detach().cpu().double()
        difference = got[name].detach().cpu().double() - wanted
        square, scale = square + difference.square().sum(), scale + wanted.square().sum()
        largest.append(difference.abs().max())
        peak.append(wanted.abs().max())
    top = max(peak)
    worst = torch.stack(largest).max()  # of a tensor, max propagates NaN
    return {"norm": float((square / scale).sqrt()), "largest": float(worst / top)}


def make_systems(model: PreTrainedModel, case: Case, settings: Settings) -> list[System]:
    """Systems of `NAMES` for one case, in that order. The budgets are fixed here, from what is free now."""
    shape = ModelShape.of(model.config)
    leaf_items = merged(case)
    items = [_item(case, i) for i in range(len(case.sequences))]
    tree = case.tree()
    head = None if isinstance(settings.head_tokens, str) else settings.head_tokens
    chunk, live = auto_budgets(model, settings.chunk_tokens, settings.live_tokens, tree, head)
    whole = max(1, min(tree.num_tokens, live))
    common: Any = {"attention": settings.attention, "head_tokens": settings.head_tokens, "self_check": False}
    common["elementwise"] = settings.elementwise
    engines = {
        "path-at-a-time": PathEngine(model, chunk_tokens=chunk, live_tokens=chunk, **common),
        "sparse": SparseEngine(model, chunk_tokens=whole, live_tokens=whole, **common),
        "ours": TreeEngine(model, chunk_tokens=chunk, live_tokens=live, **common),
    }
    found = [
        _dense("dense", model, items, shape, settings.sample, settings.checkpoint_dense),
        _dense("dense-leaf", model, leaf_items, shape, settings.sample, settings.checkpoint_leaf),
        *(_tree(name, engine, case, shape) for name, engine in engines.items()),
    ]
    return [system for system in found if system.name in settings.systems]


def _item(case: Case, index: int) -> _Item:
    mask = case.scored[index].copy()
    mask[0] = False
    positions = np.flatnonzero(mask)
    return _Item(case.sequences[index], positions, np.full(len(positions), case.weights[index]))


def merged(case: Case) -> list[_Item]:
    """Sequences that no other extends, each with the summed factors of itself and the prefixes dropped for it."""
    tree = case.tree()
    order = tree.sorted_sequences
    is_leaf = np.isin(order, tree.leaf_sequences)
    places = np.flatnonzero(is_leaf)  # a dropped sequence is a prefix of the next leaf in sorted order
    owner = order[places[np.searchsorted(places, np.arange(len(order)))]] if len(order) else order
    factors = {int(leaf): np.zeros(len(case.sequences[leaf])) for leaf in order[is_leaf]}
    scored = {leaf: np.zeros(len(total), bool) for leaf, total in factors.items()}
    for leaf, index in zip(owner.tolist(), order.tolist(), strict=True):
        item = _item(case, index)
        factors[leaf][item.positions] += item.factors
        scored[leaf][item.positions] = True
    found = [(leaf, np.flatnonzero(mask)) for leaf, mask in scored.items()]
    return [_Item(case.sequences[leaf], positions, factors[leaf][positions]) for leaf, positions in found]


def _dense(
    name: str, model: PreTrainedModel, items: list[_Item], shape: ModelShape, sample: int, checkpoint: bool
) -> System:
    def work(chosen: list[_Item]) -> tuple[int, int, float]:
        tokens = sum(len(item.tokens) for item in chosen)
        pairs = sum(len(item.tokens) * (len(item.tokens) + 1) // 2 for item in chosen)
        return tokens, pairs, 3 * shape.forward_flops(tokens, pairs, sum(len(item.positions) for item in chosen))

    ordered = sorted(items, key=lambda item: len(item.tokens))
    chosen = ordered
    if 0 < sample < len(ordered):
        places = np.linspace(len(ordered) - 1, 0, sample).round().astype(int)
        chosen = [ordered[place] for place in places]
    tokens, pairs, flops = work(items)
    detail = "all sequences" if len(chosen) == len(items) else f"{len(chosen)} of {len(items)} sequences, scaled"
    return System(
        name,
        lambda: _run_dense(model, chosen, checkpoint),
        tokens,
        pairs,
        flops,
        flops,
        share=work(chosen)[2] / flops,
        detail=detail + (", checkpointing" if checkpoint else ""),
    )


def _run_dense(model: PreTrainedModel, items: list[_Item], checkpoint: bool) -> None:
    device = next(model.parameters()).device
    if checkpoint:
        _checkpointing(model, "enable", {"use_reentrant": False})
    try:
        for item in items:
            if not len(item.positions):
                continue
            ids = torch.from_numpy(item.tokens).to(device)
            positions = torch.from_numpy(item.positions).to(device)
            logits = model(input_ids=ids[None], use_cache=False, logits_to_keep=positions - 1).logits[0]
            logits = logits.to(torch.promote_types(torch.float32, logits.dtype))
            factors = torch.from_numpy(item.factors).to(logits)
            loss = -(factors * functional.cross_entropy(logits, ids[positions], reduction="none")).sum()
            loss.backward()
    finally:
        if checkpoint:
            _checkpointing(model, "disable")


def _checkpointing(model: PreTrainedModel, verb: str, *args: Any) -> None:
    """transformers renames these methods: the new name where there is one, the old one before."""
    old = getattr(model, f"gradient_checkpointing_{verb}")
    getattr(model, f"activation_checkpointing_{verb}", old)(*args)


def _tree(name: str, engine: TreeEngine, case: Case, shape: ModelShape) -> System:
    tree = case.tree()
    execution = engine.plan(tree)
    memory = pass_memory(
        engine.model,
        execution.chunk_tokens,
        execution.peak_live_tokens,
        tree,
        engine.heads.head_tokens,
        execution.chunks,
    )
    loss_fn = weighted_loss(case, next(engine.model.parameters()).device)
    return System(
        name,
        lambda: engine.backward(case.tree(), loss_fn, batched=True),
        tree.num_tokens,
        tree.num_attention_pairs,
        plan_flops(execution, shape),
        3 * shape.forward_flops(tree.num_needed_tokens, tree.num_attention_pairs, len(tree.scored_tokens)),
        extra=execution.extra_forward_tokens,
        detail=f"{len(execution.chunks)} chunks of at most {execution.chunk_tokens:,}, "
        f"{execution.peak_live_tokens:,} tokens live",
        predicted_bytes=memory.total - memory.parameters,
    )


def weighted_loss(case: Case, device: torch.device) -> Callable[[FlatOutputs, Tensor], Tensor]:
    """The systems' common loss in its batched form."""
    weights = torch.from_numpy(case.weights)

    def loss_fn(out: FlatOutputs, indices: Tensor) -> Tensor:
        assert out.logprobs is not None
        factors = torch.repeat_interleave(weights[indices.cpu()], out.cu_seqlens.cpu().diff())
        return (on_device(factors.numpy(), device, out.logprobs.dtype) * out.logprobs).sum()

    return loss_fn


class SparseEngine(TreeEngine):
    """The tree engine with everything in one chunk, or in as few as memory allows."""

    def plan(self, tree: PrefixTree) -> ExecutionPlan:
        chunk, live = auto_budgets(self.model, self.budget.chunk_tokens, self.budget.live_tokens, tree)
        return plan(tree, chunk, live, packing=Packing(min(chunk, live)))


class PathEngine(TreeEngine):
    """The tree engine under the published algorithm's plan."""

    def plan(self, tree: PrefixTree) -> ExecutionPlan:
        chunk, _ = auto_budgets(self.model, self.budget.chunk_tokens, self.budget.live_tokens)
        return path_plan(tree, chunk)


def path_plan(tree: PrefixTree, chunk_tokens: int) -> ExecutionPlan:
    """One node a chunk, depth first; nodes with others below run twice (no packing, no retention).

    Inserting sequences one by one into a trie, as the published engine does, ends a node wherever a sequence ends: its
    loss is taken there. The segments of our tree do not end there, so they are cut.
    """
    spans: list[tuple[int, int]] = []
    parents: list[int] = []
    last = np.full(tree.num_segments, -1)
    ends = np.unique(tree.sequence_last_token + 1)
    for segment in range(tree.num_segments):
        start, length = int(tree.segment_offset[segment]), int(tree.segment_length[segment])
        above = int(tree.segment_parent[segment])
        parent = int(last[above]) if above >= 0 else -1
        inside = ends[np.searchsorted(ends, start, "right") : np.searchsorted(ends, start + length)]
        for first, stop in itertools.pairwise([start, *inside.tolist(), start + length]):
            for at in range(first, stop, chunk_tokens):
                spans.append((at, min(stop, at + chunk_tokens)))
                parents.append(parent)
                parent = len(spans) - 1
        last[segment] = parent
    inner = set(parents)
    depth = tree.token_depth
    chunks = tuple(
        Chunk(
            pieces=(Piece(start, stop, -1),),
            parent=parent,
            parent_piece=0 if parent >= 0 else -1,
            path_tokens=int(depth[start]),
            tokens=stop - start,
            anchors=(0,) if index in inner else (),
            keep=index not in inner,
        )
        for index, ((start, stop), parent) in enumerate(zip(spans, parents, strict=True))
    )
    return ExecutionPlan(tree, chunks, tuple(_depth_first(chunks)), chunk_tokens, chunk_tokens)


def _depth_first(chunks: tuple[Chunk, ...]) -> Iterator[Step]:
    path: list[int] = []
    for index, chunk in enumerate(chunks):
        while path and path[-1] != chunk.parent:
            yield from _leave(path.pop())
        if chunk.anchors:
            yield Step("anchor", index)
            yield Step("push", index, 0)
            path.append(index)
        else:
            yield Step("forward", index)
            yield Step("backward", index)
    while path:
        yield from _leave(path.pop())


def _leave(index: int) -> Iterator[Step]:
    yield Step("pop", index, 0)
    yield Step("forward", index)
    yield Step("backward", index)
