"""The attention function transformers calls inside `TreeEngine` passes, and the registry of backends behind it.

Promises: every query sees exactly its ancestors (within the layer's window, or section) and itself; an argument the
model passes that is not honoured is an error naming argument and layer, never ignored; a backend that cannot run here
is refused with the remedy.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from app.tree.attention.chosen.indexers import chosen_in
from app.tree.attention.chosen.selected import BlocksBackend, SelectedBackend
from app.tree.attention.chunk_attention import Backend, ChunkAttention, LayerCall
from app.tree.attention.flash import FlashBackend
from app.tree.attention.flex import FLEX_HEAD_DIM, FLEX_MOST_HEAD_DIM, FlexBackend
from app.tree.attention.interval import IntervalBackend
from app.tree.attention.kernels import AMPERE, FLASH_DTYPES, capability, flash_refusal, triton_lacks
from app.tree.attention.packages import FLASH_3, HOPPER, PACKAGES, CudnnBackend
from app.tree.attention.part_attention import PartBackend
from app.tree.attention.places import Places, unscaled
from app.tree.attention.widths import WidthBackend
from app.tree.planning.layer_shapes import attention_shapes

ATTENTION_NAME = "arborist_tree"

BACKENDS: dict[str, Backend] = {
    backend.name: backend
    for backend in (PartBackend(), FlexBackend(), FlashBackend(), *PACKAGES, CudnnBackend(), IntervalBackend())
}
"""Attention backends by name."""

_HARMLESS = frozenset(
    {
        *("position_ids", "use_cache", "output_attentions", "output_hidden_states", "output_router_logits"),
        *("cache_position", "piece_states"),
    }
)
"""Arguments models pass along that do not change what a layer attends to."""


def choose_backend(name: str, model: PreTrainedModel, ahead: bool = False) -> Backend:
    """The backend called `name`, or for "auto" the fastest for the model's device, dtype (autocast counts) and heads.

    On CPUs that is `sdpa`. On CUDA devices `flash` for bf16 and float16 from compute capability 8.0 on; on Hopper
    `flash3` where that package is installed, else `triton` for heads of 128 in models without windows or sections, with
    which it was measured (narrower heads it computes as if of 128, which flash kernels do not). `flex` for what is left
    of these two dtypes (soft-capped scores, heads that flash kernels do not take), compiled at the first step; `sdpa`,
    whose kernels start at once, for float32 and float64, for older GPUs, and where Triton, or what it needs to compile
    (a C compiler, Python's headers), is missing, or heads are too wide for it. Where flash kernels take the heads of
    some layers and not of others (Gemma 4), they compute the former, and `sdpa` the latter. `cudnn` is never chosen:
    between `flash` and `triton` on an H100. Where tokens see some `ahead` of them (placeholders of a picture), `sdpa`.

    Raises:
        ValueError: a name that is not in `BACKENDS`, or of one that computes no such tokens.
    """
    if ahead:
        if name not in ("auto", "sdpa"):
            raise ValueError(
                f"attention={name!r} lets tokens see those before them alone, and in {type(model).__name__}"
                " placeholders of a picture see each other; use attention='sdpa' (or 'auto')"
            )
        return BACKENDS["sdpa"]
    if name != "auto":
        if name not in BACKENDS:
            raise ValueError(f"attention must be 'auto' or one of {sorted(BACKENDS)}, got {name!r}")
        return BACKENDS[name]
    parameter = next(model.parameters())
    device, dtype = parameter.device, parameter.dtype
    if device.type != "cuda":
        return BACKENDS["sdpa"]
    if torch.is_autocast_enabled(device.type):
        dtype = torch.get_autocast_dtype(device.type)
    if dtype not in FLASH_DTYPES or capability(device) < AMPERE:
        return BACKENDS["sdpa"]
    config = model.config.get_text_config()
    shapes = attention_shapes(config)
    widths = {layer.head_dim for layer in shapes}
    taken = {width for width in widths if flash_refusal(device, dtype, width) is None}
    capped = getattr(config, "attn_logit_softcapping", None) is not None
    compiles = _triton_compiles()
    if taken and not capped:
        measured = capability(device)[0] == HOPPER[0] and widths == {128}
        windowed = any(layer.window is not None for layer in shapes)
        flash = BACKENDS["triton" if measured and not windowed and compiles else "flash"]
        if FLASH_3.missing(device) is None:
            flash = BACKENDS[FLASH_3.name]  # a package's 2 is what ATen has
        return flash if taken == widths else WidthBackend(flash, BACKENDS["sdpa"])
    narrow, wide = min(widths, default=0), max(widths, default=0)
    return BACKENDS["flex" if compiles and narrow >= FLEX_HEAD_DIM and wide <= FLEX_MOST_HEAD_DIM else "sdpa"]


@cache
def _triton_compiles() -> bool:
    """Warns, once, where only a compiler is missing: what runs then is right, and slower."""
    lacks = triton_lacks()
    if lacks is not None and find_spec("triton") is not None:
        warnings.warn(f"Triton lacks {lacks}; other kernels are used where they can be, slower ones", stacklevel=3)
    return lacks is None


def tree_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    tree_chunk: ChunkAttention | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    indices: Tensor | None = None,
    block_indices: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """transformers' attention function: query [1, Hq, n, d], key and value [1, Hk, n, d] -> [1, n, Hq, d].

    `sliding_window`: tokens a query sees, itself included; `softcap`: of the scores; `s_aux` [Hq]: attention sinks;
    `indices`: what an indexer of this pass chose; `block_indices`: the same of one that chooses blocks.

    Raises:
        ValueError: an argument that would change the result and is not supported (dropout, a mask, non-causal
            attention, ...), or that this backend cannot honour, naming argument and layer.
    """
    layer = getattr(module, "layer_idx", None)
    where = f"layer {layer} ({type(module).__name__})"
    if layer is None:
        raise ValueError(f"{where}: tree attention needs the layer's index")
    if tree_chunk is None:
        raise ValueError(
            f"{where}: does not hand keyword arguments of the forward on to its attention, by which tree attention"
            " learns of the tree; use another model (outside of TreeEngine calls another attn_implementation)"
        )
    attention_mask, indices = chosen_in(attention_mask, indices, tree_chunk.stand_in)
    if attention_mask is not (None if indices is None else tree_chunk.stand_in):
        raise ValueError(f"{where}: received attention_mask; tree attention takes none")
    if dropout:
        raise ValueError(f"{where}: attention dropout {dropout}; set attention_dropout to 0 or call model.eval()")
    if not (getattr(module, "is_causal", True) if is_causal is None else is_causal):  # as transformers' own read it
        raise ValueError(f"{where}: is_causal=False; only causal attention is supported")
    if sliding_window is not None and sliding_window < 1:
        raise ValueError(f"{where}: sliding_window={sliding_window}; set it to at least 1, or to None for no window")
    section = section_of(module)
    if section is not None and sliding_window is not None:
        raise ValueError(
            f"{where}: sliding_window={sliding_window} in sections of {section} tokens; tree attention takes one of the"
            " two; use another model"
        )
    hidden = _masked_window(module, layer) if sliding_window is None else None
    if hidden is not None and len(tree_chunk.depths) and int(tree_chunk.depths.max()) >= hidden:
        raise ValueError(
            f"{where}: has a window of {hidden} tokens in the mask that transformers makes and does not pass it to its"
            " attention function, so that tree attention would see further; shorten sequences to the window, or use"
            " another model"
        )
    unknown = {name for name, given in others.items() if given is not None and name not in _HARMLESS}
    if unknown:
        raise ValueError(
            f"{where}: unsupported attention arguments {sorted(unknown)}; they would be ignored silently;"
            " use another model"
        )
    narrow = query.shape[-1] - value.shape[-1]
    if narrow < 0:
        raise ValueError(f"{where}: values are wider than keys ({value.shape[-1]} > {query.shape[-1]}); not supported")
    tree_chunk.calls.append(layer)
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    call = LayerCall(layer, scale, sliding_window, softcap, section)
    device = query.device.type
    if torch.is_autocast_enabled(device):  # norms leave float32 queries and keys beside low-precision values
        query, key, value = (x.to(torch.get_autocast_dtype(device)) for x in (query, key, value))
    shares = tree_chunk.shares
    if shares is not None:
        unequal = shares.refusal(query.shape[1], key.shape[1])
        if unequal is not None:
            raise ValueError(f"{where}: {unequal}")
        query, key, value = shares.to_heads(query, key, value)
        s_aux = shares.heads_of(s_aux)
    if (scaled := Places.of(module)) is not None:
        query = scaled.scale(query, tree_chunk.depths_on(query.device))
    chosen = indices is not None or block_indices is not None
    if chosen and (tree_chunk.stand_in is None or sliding_window is not None or softcap is not None):
        raise ValueError(
            f"{where}: chooses tokens (indices) beside a window or soft-capping, or by no indexer known here; use"
            " another model"
        )
    # Taken out: what it holds has a graph, which holds the chunk, and the two would keep each other for good.
    backend = tree_chunk.backends.pop(layer, tree_chunk.backend)
    refusal = backend.refusal(query, call)
    if refusal is not None:
        raise ValueError(f"{where}: attention='{backend.name}' {refusal}")
    if narrow:  # kernels take values as wide as keys (latent attention has narrower ones); zeros change nothing
        value = nn.functional.pad(value, (0, narrow))
    if tree_chunk.store:
        tree_chunk.keys_values[layer] = (key.detach(), value.detach())
        tree_chunk.cache.limit(layer, sliding_window or call.section)
    with torch.autocast(device, enabled=False):
        if indices is not None and indices.shape[-1] != tree_chunk.path_tokens + query.shape[2]:
            backend = SelectedBackend(indices)
        if block_indices is not None:
            size = cast(int, cast(nn.Module, module.indexer).block_size)
            if block_indices.shape[-1] * size <= int(tree_chunk.depths.max()):
                backend = BlocksBackend(block_indices, size, query.shape[1])
        out = backend.attend(query, key, value, s_aux, tree_chunk, call)
    out = out[..., : out.shape[-1] - narrow]
    # As transformers' own functions return it: some layers ask for a view. No copy where kernels have this layout.
    return (out if shares is None else shares.to_rows(out)).transpose(1, 2).contiguous(), None


def section_of(module: nn.Module) -> int | None:
    """Tokens of a layer's sections, as its configuration has them (Llama 4): only masks of transformers say them."""
    config = getattr(module, "config", None)
    kinds, layer = getattr(config, "layer_types", None), getattr(module, "layer_idx", None)
    return getattr(config, "attention_chunk_size", None) if kinds and kinds[layer] == "chunked_attention" else None


def _masked_window(module: nn.Module, layer: int) -> int | None:
    """A layer's window as its configuration has it, which layers of Qwen2-MoE and PhiMoE do not pass on."""
    config = getattr(module, "config", None)
    kinds = getattr(config, "layer_types", None)
    windowed = kinds[layer] == "sliding_attention" if kinds else getattr(config, "model_type", None) == "phimoe"
    return getattr(config, "sliding_window", None) if windowed else None


AttentionInterface.register(ATTENTION_NAME, tree_attention)


@contextmanager
def tree_attention_on(model: PreTrainedModel) -> Iterator[None]:
    """The model attends through `tree_attention` inside, and as before afterwards; towers of other inputs always do as
    before."""
    config = model.config.get_text_config()  # a composite configuration would hand it to all of its parts
    before = config._attn_implementation
    config._attn_implementation = ATTENTION_NAME
    try:
        with unscaled(model):
            yield
    finally:
        config._attn_implementation = before
