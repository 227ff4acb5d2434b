"""Layers that attend to the few tokens an indexer chose (DeepSeek sparse attention: DeepSeek-V3.2, GLM-5 and others).

An indexer is a small module inside such a layer: it scores every earlier token by keys of its own, or pools, blocks
or groups of tokens in a row (GLM-5.3, MiniMax-M3, Qwen 4), and each query attends to the best alone, in this layer and
in those that share its choice. It has no gradient: what it chooses is no function to differentiate.

Promises: scores and choice are the module's own code (but for `group_indexer`'s), over [path | chunk] instead of a
sequence, a block of queries at a time, so that scores [queries, heads, keys] stay within bounds; pools and blocks are
those of each token's own sequence, branch by branch; keys of the path are kept, never computed again. Of scores that
are equal, or differ by rounding, others may be chosen than in a dense run, as between any two batches.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from app.tree.attention.chosen.group_indexer import Groups, IndexKeys, chooses_groups, query_blocks, run_group_indexer
from app.tree.attention.chunk_attention import ChunkAttention
from app.tree.attention.groups import RowShares
from app.tree.attention.path_cache import PathCache
from app.tree.prefix_tree import Ints
from app.tree.states.compressors import compressors_of
from app.tree.states.lookback import instead
from app.tree.transfer import on_device

KIND = "indexed_attention"
"""What configurations call such layers."""
_CACHES = ("cache", "past_key_values")  # the argument, and its name before transformers 5.24
_MASKS = "build_attention_mask_from_topk"  # of layers that make a mask of the choice, instead of handing it on


Choose = Callable[[int, Any, dict[str, Any]], Tensor]
"""Of a layer, its indexer's own forward, and the arguments of a call by name."""


@dataclass(frozen=True, eq=False)
class Indexers:
    """The indexers of one model.

    Attributes:
        layers: by layer, the attention module that has one, and its indexer.
        kinds: what the model calls its layers, for which it wants masks.
        masking: attention modules that make a mask of a choice, theirs or another's.
    """

    layers: dict[int, tuple[nn.Module, nn.Module]]
    kinds: tuple[str, ...]
    masking: tuple[nn.Module, ...] = ()

    @classmethod
    def of(cls, model: PreTrainedModel) -> Indexers:
        """Finds them by what they are made of.

        Raises:
            ValueError: an adapter (PEFT's `modules_to_save`) trains a copy of one, or of a part of it.
        """
        found = dict[int, tuple[nn.Module, nn.Module]]()
        for name, module in model.named_modules():
            for child in module.children():
                if _chooses(child):
                    _refuse_copies(name, child)
                    found[cast(int, child.layer_idx)] = module, child
        masking = tuple(module for module in model.modules() if hasattr(module, _MASKS)) if found else ()
        return cls(found, tuple(getattr(model.config.get_text_config(), "layer_types", None) or ()), masking)

    def __len__(self) -> int:
        return len(self.layers)

    @property
    def alone(self) -> list[nn.Module]:
        """Those that choose among tokens in a row: one process has to run them over all rows."""
        return [one for _, one in self.layers.values() if pools(one) or chooses_blocks(one) or chooses_groups(one)]

    @property
    def types(self) -> frozenset[str]:
        """Types of layers that can be run since their indexers are known."""
        own = {self.kinds[layer] for layer in self.layers if layer < len(self.kinds)}
        return frozenset({KIND} | own if self.layers else ())

    def begin(self, chunk: ChunkAttention, cache: PathCache, device: torch.device) -> dict[str, Any]:
        """Arguments of a forward over `chunk`, whose path has index keys in `cache`."""
        if not self.layers:
            return {}
        chunk.index_cache = cache
        chunk.stand_in, masks = self.masks(len(chunk.layout.tokens), device)
        return masks

    def masks(self, rows: int, device: torch.device) -> tuple[Tensor, dict[str, Any]]:
        """Arguments of a forward of so many rows: no mask but, for layers that hand one on to their indexer and to the
        attention function, a stand-in bool [1, 1, rows, 1] that says nothing and takes no memory; and this."""
        stand_in: Tensor = torch.ones((), dtype=torch.bool, device=device).expand(1, 1, rows, 1)
        if any(chooses_groups(indexer) for _, indexer in self.layers.values()):
            stand_in = stand_in.as_subclass(_GivesWay)
        return stand_in, {"attention_mask": {**dict.fromkeys(self.kinds), KIND: stand_in}}

    @contextmanager
    def run_by(self, choose: Choose) -> Iterator[None]:
        """Inside, `choose` is called in the place of an indexer's forward."""
        with ExitStack() as stack:
            for layer, (_, indexer) in self.layers.items():
                own = type(indexer).forward.__get__(indexer)  # an engine may run inside of another's pass
                stack.enter_context(instead(indexer, "forward", partial(_called, choose, layer, own)))
            for module in self.masking:
                stack.enter_context(instead(module, _MASKS, _unmasked))
            yield

    @contextmanager
    def chosen_over_trees(self) -> Iterator[None]:
        """Inside, indexers choose among the tokens of a chunk and its path."""
        running: dict[int, ChunkAttention] = {}

        def note(module: Any, args: Any, kwargs: Any) -> None:
            if "tree_chunk" not in kwargs:
                raise ValueError(
                    f"layer {module.layer_idx} ({type(module).__name__}): runs without the tree inside of a"
                    " TreeEngine's pass, as when a loss calls the model itself; ask an engine for its outputs, or the"
                    " model before the pass"
                )
            running[module.layer_idx] = kwargs["tree_chunk"]

        def choose(layer: int, forward: Any, arguments: dict[str, Any]) -> Tensor:
            return _choose(layer, forward, running[layer], arguments)

        with ExitStack() as stack:
            for attention, _ in self.layers.values():
                stack.callback(attention.register_forward_pre_hook(note, with_kwargs=True).remove)
            stack.enter_context(self.run_by(choose))
            yield


def index_parameters(model: PreTrainedModel) -> list[nn.Parameter]:
    """Of all indexers, which no loss of a model's outputs reaches: an optimizer that had them would shrink them by its
    weight decay alone."""
    indexers = [indexer for _, indexer in Indexers.of(model).layers.values()]
    indexers += [one.indexer for one in compressors_of(model) if one.indexer is not None]
    return [p for indexer in indexers for p in indexer.parameters()]


class _GivesWay(Tensor):
    """A mask that says nothing: combined with a choice, which stands for one, it is the choice, for `chosen_in`."""

    def __and__(self, other: Any) -> Any:
        return other


def chosen_in(mask: Tensor | None, indices: Tensor | None, stand_in: Tensor | None) -> tuple[Tensor | None, ...]:
    """What an attention function was given for a mask and for a choice -> both, where a layer of `Indexers.masking` has
    given the choice for a mask."""
    if stand_in is not None and indices is None and mask is not None and mask.dtype == torch.int32:
        return stand_in, mask
    return mask, indices


def _unmasked(topk_indices: Tensor, **_: Any) -> Tensor:
    """int32 [1, n, k] -> the same, for `chosen_in` to find."""
    return topk_indices


def _refuse_copies(parent: str, indexer: nn.Module) -> None:
    names = [*parent.split("."), *(part for name, _ in indexer.named_modules() for part in name.split("."))]
    if "modules_to_save" in names:
        raise ValueError(
            "modules_to_save names an indexer or a part of one, which chooses tokens and has no gradient; leave it out"
        )


def _chooses(module: nn.Module) -> bool:
    """Whether a module is an indexer that scores tokens, or pools or blocks of them: others may keep more than a row a
    token."""
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    if code is None or not isinstance(getattr(module, "layer_idx", None), int):
        return False
    if "update_index" in code.co_names:
        return chooses_blocks(module)
    if chooses_groups(module):
        return "update_indexer" in code.co_names
    known = "layers" not in code.co_names or pools(module)
    return known and "update_indexer" in code.co_names and isinstance(getattr(module, "index_topk", None), int)


def chooses_blocks(indexer: nn.Module) -> bool:
    """Whether an indexer chooses blocks of `block_size` positions, for each of its heads others (MiniMax-M3)."""
    return all(isinstance(getattr(indexer, name, None), int) for name in ("block_size", "topk_blocks", "num_heads"))


def pools(indexer: nn.Module) -> bool:
    """Whether an indexer scores pools of `index_kpool` tokens in a row, counted from a sequence's first (GLM-5.3): it
    takes no mask of what each query sees, but sequences, whose lengths it asks the cache for. The tokens behind a
    query's last pool are chosen as well, but where `index_kpool_always_select_tail` is False."""
    return isinstance(getattr(indexer, "index_kpool", None), int)


def run_block_indexer(forward: Any, arguments: Mapping[str, Any], rows: int, total: int, keys: IndexKeys) -> Tensor:
    """As `run_indexer`, of one that chooses blocks: int32 [B, H, rows, k], their numbers in the row's own sequence,
    whose keys lie in its order; `position_ids` int64 [B, rows] is among the arguments. All are chosen where k blocks
    hold `total`."""
    module, hidden = forward.__self__, arguments["hidden_states"]
    most = min(module.topk_blocks, -(-total // module.block_size))
    found = torch.full((len(hidden), module.num_heads, rows, most), -1, dtype=torch.int32, device=hidden.device)
    for block in query_blocks(rows, module.num_heads * total * len(hidden)):
        given = {name: _rows(value, block, rows) for name, value in arguments.items()}
        picks = forward(**{**given, _cache_of(forward): _WithLengths(keys)})
        found[:, :, block, : picks.shape[-1]] = picks
    return found


def run_indexer(
    forward: Any,
    arguments: Mapping[str, Any],
    rows: int,
    total: int,
    keys: IndexKeys,
    visible: Callable[[slice], Tensor],
) -> Tensor:
    """Runs an indexer's own `forward`, a block of rows at a time.

    Args:
        arguments: by name, tensors [B, rows, ...].
        total: most keys that there will be.
        keys: of all rows.
        visible: bool [B or 1, rows of the block, keys so far] of a block of rows; not asked of one that pools, whose
            rows are the last of the keys so far, and see all before them.

    Returns:
        int32 [B, rows, k]: positions of keys, -1 where there were fewer; a row may not see all. k is `total` where
        every row chose all that it sees, and only there.
    """
    module, hidden = forward.__self__, arguments["hidden_states"]
    most = _most(module, total)
    found = torch.full((len(hidden), rows, most), -1, dtype=torch.int32, device=hidden.device)
    cache = _WithLengths(keys) if pools(module) else keys
    everything = pools(module) and most == total
    scored = -(-total // module.index_kpool) if pools(module) else total  # which each block makes of all keys anew
    for block in query_blocks(rows, module.n_heads * scored * len(hidden)):
        given = {name: _rows(value, block, rows) for name, value in arguments.items()}
        mask = hidden.new_ones(hidden[:, block].shape[:2], dtype=torch.bool) if pools(module) else visible(block)
        picks = forward(**{**given, "attention_mask": mask, _cache_of(forward): cache})
        if not everything:
            found[:, block, : picks.shape[-1]] = picks
    if everything:  # which pools say in more columns than there are tokens
        found[:] = torch.arange(total, dtype=torch.int32, device=hidden.device)
    return found


def _most(indexer: Any, total: int) -> int:
    """Columns for what an indexer chooses among so many tokens: `total` where it chooses all that there are."""
    if not pools(indexer):
        return min(indexer.index_topk, total)
    tail = indexer.index_kpool - 1 if indexer.index_kpool_always_select_tail else 0  # most behind the last pool
    if total <= indexer.index_topk and tail == indexer.index_kpool - 1:
        return total
    most: int = indexer.index_topk + tail
    return most + (most == total)  # with one for none: not all of so many are chosen


class _WithLengths:
    """Keys of an indexer that asks the layers of its cache for lengths."""

    def __init__(self, all: IndexKeys) -> None:
        self.all, self.layers = all, self

    def __getitem__(self, layer: int) -> _WithLengths:
        self.layer = layer
        return self

    def update_indexer(self, keys: Tensor, layer: int) -> Tensor:
        self.keys = self.all.update_indexer(keys, layer)
        return self.keys

    def update_index(self, keys: Tensor) -> Tensor:
        """Keys [B, 1, n, D] -> [B, 1, keys, D]."""
        return self.all.update_indexer(keys[:, 0], self.layer).unsqueeze(1)

    def get_seq_length(self) -> int:
        return self.keys.shape[1]


def _called(choose: Choose, layer: int, forward: Any, *args: Any, **kwargs: Any) -> Tensor:
    (_, _), *given = _signature(forward.__func__).bind(forward.__self__, *args, **kwargs).arguments.items()
    return choose(layer, forward, dict(given))


def _cache_of(forward: Any) -> str:
    """What the argument for a cache is called."""
    parameters = _signature(forward.__func__).parameters
    return next(name for name in _CACHES if name in parameters)


@cache
def _signature(function: Any) -> inspect.Signature:
    """Read once: it takes longer than what an indexer does for a decoded token."""
    return inspect.signature(function)


def _rows(value: Any, block: slice, rows: int) -> Any:
    """A block of rows of an argument that has all of them."""
    if isinstance(value, tuple):
        return tuple(_rows(one, block, rows) for one in value)
    return value[:, block] if isinstance(value, Tensor) and value.dim() > 1 and value.shape[1] == rows else value


class _ChunkKeys:
    """Those of a path, and behind them a chunk's, of which each block of rows brings its own."""

    def __init__(self, cache: PathCache, path: int, rows: int) -> None:
        self.cache, self.path, self.rows, self.filled = cache, path, rows, path
        self.all: Tensor | None = None

    def update_indexer(self, keys: Tensor, layer: int) -> Tensor:
        if self.all is None:
            self.all = keys.new_empty(1, self.path + self.rows, keys.shape[2])
            if self.path:
                self.all[:, : self.path] = self.cache.read(layer, 0, self.path)[0][0]
        stop = self.filled + keys.shape[1]
        self.all[:, self.filled : stop] = keys
        self.filled = stop
        return self.all[:, :stop]


@dataclass(frozen=True)
class _OwnKeys:
    """Takes those of this rank's rows and gives one for all: while keys are made, nothing is chosen."""

    blocks: list[Tensor] = field(default_factory=list)

    def update_indexer(self, keys: Tensor, layer: int) -> Tensor:
        self.blocks.append(keys)
        return keys[:, :1]


@dataclass(frozen=True)
class _KnownKeys:
    """Those of all rows, before any of them chooses."""

    all: Tensor

    def update_indexer(self, keys: Tensor, layer: int) -> Tensor:
        return self.all


def _choose(layer: int, forward: Any, chunk: ChunkAttention, arguments: dict[str, Any]) -> Tensor:
    """As `run_indexer`, of the rows of a chunk, positions in [path | chunk]."""
    rows, path, shares = len(chunk.layout.tokens), chunk.path_tokens, chunk.shares
    if pools(forward.__self__) or chooses_blocks(forward.__self__):
        return _choose_by_lines(layer, forward, chunk, arguments)
    if shares is not None:
        return _choose_together(layer, forward, chunk, shares, arguments)
    keys, device = _ChunkKeys(cast(PathCache, chunk.index_cache), path, rows), arguments["hidden_states"].device

    def seen(block: slice) -> Tensor:
        return _visible(chunk, block, device)[None]

    if chooses_groups(forward.__self__):
        groups = _groups(chunk, forward.__self__.compress_ratio, device)
        found = run_group_indexer(forward.__self__, arguments, groups, path + rows, keys)
    else:
        found = run_indexer(forward, arguments, rows, path + rows, keys, seen)
    if chunk.store:
        assert keys.all is not None
        chunk.index_keys[layer] = (keys.all[:, path:].unsqueeze(0),)
    return found


class _LineKeys:
    """Those of the tokens before a run of rows, on the path and in the chunk, and behind them the run's; the path's are
    put in front once for all runs."""

    def __init__(self, cache: PathCache, path: int, rows: int) -> None:
        self.cache, self.path, self.rows = cache, path, rows
        self.chunk: Tensor | None = None

    def begin(self, above: Tensor, start: int) -> None:
        self.filled, self.before = start, self.path + len(above) - start  # a row's place in the line, less its own
        if len(above):
            assert self.chunk is not None, "rows above come first"
            self.line[:, self.path : self.path + len(above)] = self.chunk[:, above]

    def update_indexer(self, keys: Tensor, layer: int) -> Tensor:
        if self.chunk is None:
            self.chunk = keys.new_empty(1, self.rows, keys.shape[2])
            self.line = keys.new_empty(1, self.path + self.rows, keys.shape[2])
            if self.path:
                self.line[:, : self.path] = self.cache.read(layer, 0, self.path)[0][0]
        stop = self.filled + keys.shape[1]
        self.chunk[:, self.filled : stop] = keys
        self.line[:, self.before + self.filled : self.before + stop] = keys
        self.filled = stop
        return self.line[:, : self.before + stop]


def _choose_by_lines(layer: int, forward: Any, chunk: ChunkAttention, arguments: dict[str, Any]) -> Tensor:
    """As `_choose`, by an indexer that takes sequences: once for each run of rows without a branch, behind the tokens
    before it."""
    rows, path, device = len(chunk.layout.tokens), chunk.path_tokens, arguments["hidden_states"].device
    keys = _LineKeys(cast(PathCache, chunk.index_cache), path, rows)
    place = torch.arange(path + rows, dtype=torch.int32, device=device)
    found = list[Tensor]()
    for above, start, stop in _lines(chunk.layout.ends):
        before = on_device(above, device)
        keys.begin(before, start)
        given = {name: _rows(value, slice(start, stop), rows) for name, value in arguments.items()}
        line = torch.cat([place[:path], place[path:][before], place[path + start : path + stop]])
        if chooses_blocks(forward.__self__):
            found.append(run_block_indexer(forward, given, stop - start, len(line), keys))
        else:
            picks = run_indexer(forward, given, stop - start, len(line), keys, _not_asked)
            found.append(torch.where(picks < 0, picks, line[picks.clamp_min(0).long()]))
    if chunk.store:
        assert keys.chunk is not None
        chunk.index_keys[layer] = (keys.chunk.unsqueeze(0),)
    if chooses_blocks(forward.__self__):
        most = max(part.shape[-1] for part in found)
    else:
        most = _most(forward.__self__, path + rows)  # a line may have a column more, of none
    return torch.cat([nn.functional.pad(part, (0, most - part.shape[-1]), value=-1) for part in found], -2)


def _groups(chunk: ChunkAttention, size: int, device: torch.device) -> Groups:
    """Made for the first layer that asks."""
    key = ("groups", size)
    if key not in chunk.kept:
        chunk.kept[key] = Groups.of_tree(chunk.depths, chunk.layout.ends, chunk.path_tokens, size, device)
    found: Groups = chunk.kept[key]
    return found


def _not_asked(block: slice) -> Tensor:
    raise AssertionError("an indexer that pools asks for no mask")


def _lines(ends: Ints) -> Iterator[tuple[Ints, int, int]]:
    """Runs of rows each of which is the child of the one before: the rows above, the first, and the one behind the
    last. `ends`: of each row, in depth-first order, the row behind its last descendant."""
    start = 0
    for stop in (np.flatnonzero(ends == np.arange(1, len(ends) + 1)) + 1).tolist():
        yield np.flatnonzero(ends[:start] > start), start, stop
        start = stop


def _choose_together(
    layer: int, forward: Any, chunk: ChunkAttention, shares: RowShares, arguments: dict[str, Any]
) -> Tensor:
    """As `_choose`, by ranks that have a share of the rows each, and tell each other keys and choices of all."""
    rows, path, run = len(chunk.layout.tokens), chunk.path_tokens, shares.run
    device, here = arguments["hidden_states"].device, run.stop - run.start
    mine = _OwnKeys()
    run_indexer(forward, arguments, here, 1, mine, lambda block: torch.ones(1, 1, 1, dtype=torch.bool, device=device))
    keys = shares.everyones(torch.cat(mine.blocks, 1))
    if chunk.store:
        chunk.index_keys[layer] = (keys.unsqueeze(0),)
    if path:
        keys = torch.cat([cast(PathCache, chunk.index_cache).read(layer, 0, path)[0][0], keys], 1)

    def seen(block: slice) -> Tensor:
        return _visible(chunk, slice(run.start + block.start, run.start + block.stop), device, rows)[None]

    return shares.everyones(run_indexer(forward, arguments, here, path + rows, _KnownKeys(keys), seen))


def _visible(chunk: ChunkAttention, rows: slice, device: torch.device, keys: int | None = None) -> Tensor:
    """bool [rows, path + keys]: as `visible_rows`, behind the path, of which every row sees all."""
    return nn.functional.pad(visible_rows(chunk, rows, device, keys), (chunk.path_tokens, 0), value=True)


def visible_rows(chunk: ChunkAttention, rows: slice, device: torch.device, keys: int | None = None) -> Tensor:
    """bool [rows, keys]: which rows of the chunk these rows see. `rows`: bounds within the chunk; `keys`: how many of
    its first, default up to the last of `rows`, beyond which none of these sees any."""
    keys = rows.stop if keys is None else keys
    if "ends" not in chunk.kept:
        chunk.kept["ends"] = on_device(np.ascontiguousarray(chunk.layout.ends), device)
    query = torch.arange(rows.start, rows.stop, device=device)[:, None]
    key = torch.arange(keys, device=device)[None, :]
    return (key <= query) & (query < chunk.kept["ends"][None, :keys])
