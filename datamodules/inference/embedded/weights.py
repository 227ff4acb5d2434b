"""The weights of an embedded engine: a copy of the trainer's model, and what may be loaded into it.

Promises: the trainer's model and all random generators stay as they are; a policy with adapters becomes a plain model
of its merged weights; weights that do not fit are refused as a whole, before any of them is written.
"""

from __future__ import annotations

from contextlib import AbstractContextManager

import psutil
import torch
from torch import Tensor
from torch.nn import Module
from transformers import AutoConfig, PreTrainedModel

from app.tree import Indexers, StateLayers, auto_class, free_bytes, leave_unscaled, own_config
from datamodules.inference.embedded.kv_slots import ATTENTION
from datamodules.inference.export import WeightParts, base_model, merged_weights
from datamodules.inference.protocol import GenerationError

_KNOWN = {"full_attention", "sliding_attention", "chunked_attention", "mlp", "moe"}  # with keys and values or no state


def copy_of(policy: Module, dtype: str | None, device: str | None, parts: WeightParts | None = None) -> PreTrainedModel:
    """A second model of the same configuration and weights, its attention reading the slots.

    `policy`, a transformers model or a `peft` model around one, stays as it is. `parts`: its weights, where it has no
    storage.

    Raises:
        GenerationError: a model whose state cannot be kept, or that is larger than the memory that is free.
    """
    model = base_model(policy)
    config = own_config(model)
    text = config.get_text_config()
    kinds = getattr(text, "layer_types", None) or ()
    layers = StateLayers.of(model)
    if not layers.attending:
        raise GenerationError(
            f"EmbeddedEngine.start: {type(model).__name__} has no layer of attention, by whose keys room is"
            " counted, and which tree training asks for, too; use another model"
        )
    stateful, known = layers.indices, _KNOWN | Indexers.of(model).types
    foreign = sorted({kind for k, kind in enumerate(kinds) if kind not in known and k not in stateful})
    if config.is_encoder_decoder or foreign:
        what = f"layers of type {', '.join(foreign)}" if foreign else "an encoder"
        raise GenerationError(
            f"EmbeddedEngine.start: {type(model).__name__} has {what}, whose state it cannot keep; generate with"
            " an SGLang server instead"
        )
    target = torch.device(device) if device is not None else model.device if parts is None else parts.device
    element = getattr(torch, dtype).itemsize if dtype else model.dtype.itemsize
    needs, free = element * sum(parameter.numel() for parameter in model.parameters()), _free(target)
    if needs > free:
        raise GenerationError(
            f"EmbeddedEngine.start: its own copy of the model takes {needs / 1e9:.1f} GB, and {free / 1e9:.1f} GB are"
            f" free on {target}; set EmbeddedEngine.device to another, or generate with SGLang servers (SGLangEngine)"
        )
    with _unmoved_generators(target), target:
        own: PreTrainedModel = auto_class(config).from_config(
            config, dtype=getattr(torch, dtype) if dtype else model.dtype
        )
    own.config.get_text_config()._attn_implementation = ATTENTION  # towers of other inputs attend as ever
    leave_unscaled(own)  # requests lie in one sequence, in which a layer cannot tell a token's place
    if parts is not None:
        fill(own, parts)
    else:
        with torch.no_grad():
            for mine, theirs in matched(own, merged_weights(policy)):
                mine.copy_(theirs)
    return own.eval().requires_grad_(False)


def _unmoved_generators(device: torch.device) -> AbstractContextManager[None]:
    """Building a model draws initial weights, overwritten at once: the trainer's streams must not notice."""
    return torch.random.fork_rng(devices=[device] if device.type == "cuda" else [])


def read(path: str) -> dict[str, Tensor]:
    """state_dict of the model that `save_pretrained` wrote to the directory `path`."""
    try:
        with _unmoved_generators(torch.device("cpu")):
            kind = auto_class(AutoConfig.from_pretrained(path, local_files_only=True))
            weights: dict[str, Tensor] = kind.from_pretrained(path, local_files_only=True).state_dict()
            return weights
    except (OSError, ValueError) as error:
        raise GenerationError(f"WeightUpdate.path: {path} holds no model of save_pretrained: {error}") from error


def _free(device: torch.device) -> int:
    """Bytes; on a CPU all there are, whatever other ranks may take of them."""
    return int(free_bytes(device) if device.type == "cuda" else psutil.virtual_memory().available)


@torch.no_grad()
def fill(model: PreTrainedModel, parts: WeightParts) -> None:
    """Writes weights into `model` as they come.

    Raises:
        GenerationError: names or shapes differ, or some are missing; those before are written then.
    """
    own = model.state_dict()
    written = set()
    for part in parts.merged():
        for name, value in part.items():
            if name not in own or own[name].shape != value.shape:
                raise GenerationError(
                    f"WeightUpdate.parts: '{name}' {tuple(value.shape)} is no tensor of the engine's"
                    f" {type(model).__name__}; send the parts of a model of the same configuration"
                )
            own[name].copy_(value)
            written.add(own[name].data_ptr())
    missing = [name for name, tensor in own.items() if tensor.data_ptr() not in written]
    if missing:
        raise GenerationError(f"WeightUpdate.parts: {len(missing)} tensors are missing, {missing[:3]} among them")


def matched(model: PreTrainedModel, weights: dict[str, Tensor]) -> list[tuple[Tensor, Tensor]]:
    """(tensor of the model, new value) pairs; raises GenerationError, nothing changed, when names or shapes differ."""
    own = model.state_dict()
    # A tied tensor may come under one of its names only.
    given = {own[name].data_ptr() for name in weights if name in own}
    missing = sorted(name for name in own if name not in weights and own[name].data_ptr() not in given)
    unknown = sorted(name for name in weights if name not in own)
    if missing or unknown:
        raise GenerationError(
            f"WeightUpdate.state_dict: does not fit {type(model).__name__}; missing {missing[:3]} ({len(missing)}),"
            f" unknown {unknown[:3]} ({len(unknown)}); send the state_dict of a model of the same configuration"
        )
    for name, value in weights.items():
        if value.shape != own[name].shape:
            raise GenerationError(
                f"WeightUpdate.state_dict: '{name}' has shape {tuple(value.shape)}, the engine's is"
                f" {tuple(own[name].shape)}; send the state_dict of a model of the same configuration"
            )
    return [(own[name], value) for name, value in weights.items()]
