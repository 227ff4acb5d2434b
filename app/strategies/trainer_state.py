"""Lightning's checkpoint dictionary, taken apart for a checkpoint directory and put together again.

Promises: large tensors of `state_dict` become pieces (every rank writes a share of what all of them hold; tied
tensors once); the rest, of rank 0, is what `trainer.pt` holds. Architecture and generation configuration of every
transformers model among the module's children are part of it, so that a checkpoint can be exported by itself.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from app.strategies.checkpoints import unpack
from app.strategies.collectives import Communicator
from app.strategies.pieces import Piece, load_whole

_WEIGHTS = "model/"
_OPTIMIZER, _ALIASES, _MODELS = "optimizer_description", "tied_weights", "transformers_models"


def take_apart(
    checkpoint: dict[str, Any], module: Module, ranks: Communicator
) -> tuple[dict[str, Any], dict[str, Piece]]:
    """What `trainer.pt` holds, and this rank's pieces (views of the live tensors) by name."""
    contents = dict(checkpoint)
    weights = contents.pop("state_dict")
    small, aliases, pieces = {}, {}, {}
    first_of: dict[tuple[int, torch.Size, tuple[int, ...]], str] = {}
    for name, value in weights.items():
        if not isinstance(value, Tensor) or not value.numel() or not value.dim() or value.is_complex():
            small[name] = value.detach().cpu().clone() if isinstance(value, Tensor) else value
            continue
        first = first_of.setdefault((value.data_ptr(), value.shape, value.stride()), name)
        if first != name:
            aliases[name] = first
        else:
            pieces[_WEIGHTS + name] = Piece.rows(value.detach(), ranks.rank, ranks.size)
    contents["state_dict"] = small
    contents[_ALIASES] = aliases
    contents[_MODELS] = {name: _configuration(child) for name, child in module.named_children() if _is_model(child)}
    for state in contents.pop("optimizer_states", []):
        contents[_OPTIMIZER], optimizer_pieces = state["description"], state["pieces"]
        pieces |= optimizer_pieces
    return contents, pieces


def put_together(path: Path) -> dict[str, Any]:
    """The dictionary Lightning restores from: whole weights in CPU memory; in place of optimizer states
    `{"description", "path"}`, since every rank reads only its own pieces of these."""
    contents = unpack(path)
    weights: dict[str, Any] = contents["state_dict"]
    weights.update({n.removeprefix(_WEIGHTS): t for n, t in load_whole(path, _is_weight).items()})
    weights.update({name: weights[first] for name, first in contents.pop(_ALIASES).items()})
    contents.pop(_MODELS)
    if _OPTIMIZER in contents:
        contents["optimizer_states"] = [{"description": contents.pop(_OPTIMIZER), "path": path}]
    return contents


def model_weights(path: Path, name: str) -> tuple[dict[str, str], dict[str, Tensor]]:
    """Of the transformers model that was the module's child `name`: its configurations by file name (JSON text) and its
    weights by their names in it.

    Raises:
        ValueError: there is no such model; names those there are.
    """
    contents = unpack(path)
    models = contents[_MODELS]
    if name not in models:
        raise ValueError(f"{path} holds no transformers model '{name}'; it holds {sorted(models) or 'none'}")
    prefix = f"{_WEIGHTS}{name}."
    weights = {n.removeprefix(prefix): t for n, t in load_whole(path, lambda n: n.startswith(prefix)).items()}
    for small, value in contents["state_dict"].items():
        if small.startswith(f"{name}."):
            weights[small.removeprefix(f"{name}.")] = value
    for alias, first in contents[_ALIASES].items():
        if alias.startswith(f"{name}.") and first.startswith(f"{name}."):
            weights[alias.removeprefix(f"{name}.")] = weights[first.removeprefix(f"{name}.")]
    return models[name], weights


def _is_weight(name: str) -> bool:
    return name.startswith(_WEIGHTS)


def _is_model(module: Any) -> bool:
    return hasattr(module, "save_pretrained") and hasattr(module, "config")


def _configuration(model: Any) -> dict[str, str]:
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    files = {"config.json": base.config.to_json_string(use_diff=False)}
    generation = getattr(base, "generation_config", None)
    if generation is not None:
        files["generation_config.json"] = generation.to_json_string(use_diff=True)
    for adapter in getattr(model, "peft_config", {}).values():
        with tempfile.TemporaryDirectory() as directory:  # peft offers its own form of JSON as a file only
            adapter.save_pretrained(directory)
            files["adapter_config.json"] = (Path(directory) / "adapter_config.json").read_text()
    return files
