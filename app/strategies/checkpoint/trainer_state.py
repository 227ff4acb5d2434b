"""Lightning's checkpoint dictionary, taken apart for a checkpoint directory and put together again.

Promises: large tensors of `state_dict` become pieces (every rank writes a share of what all of them hold; tied
tensors once); the rest, of rank 0, is what `trainer.pt` holds. Architecture and generation configuration of every
transformers model among the module's children are part of it, so that a checkpoint can be exported by itself.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import Module

from app.strategies.checkpoint.checkpoints import CheckpointError, unpack
from app.strategies.pieces import Piece, SavedPieces, load_whole
from app.strategies.ranks.collectives import Communicator
from app.strategies.shards import computes_in, part_of
from app.tree import SavedWeight, plain_names, scaled_by

_WEIGHTS = "model/"
CONFIG_FILE, GENERATION_FILE, ADAPTER_FILE = "config.json", "generation_config.json", "adapter_config.json"
_UNTOLD = ("transformers_version", "dtype", "architectures", "layer_types", "_name_or_path")  # shape no parameter
CONFIGURATIONS = (CONFIG_FILE, GENERATION_FILE, ADAPTER_FILE)
"""Names of a model's configurations in a checkpoint; there are no others."""
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
        local = value.to_local() if isinstance(value, DTensor) else value
        at = local.data_ptr() or id(value)  # a rank may have no row of it
        first = first_of.setdefault((at, value.shape, value.stride()), name)
        if first != name:
            aliases[name] = first
        else:
            pieces[_WEIGHTS + name] = _piece(value.detach(), name, module, ranks)
    contents["state_dict"] = small
    contents[_ALIASES] = aliases
    contents[_MODELS] = {name: _configuration(child) for name, child in module.named_children() if _is_model(child)}
    for state in contents.pop("optimizer_states", []):
        contents[_OPTIMIZER], optimizer_pieces = state["description"], state["pieces"]
        pieces |= optimizer_pieces
    return contents, pieces


def _piece(weight: Tensor, name: str, module: Module, ranks: Communicator) -> Piece:
    """What this rank writes: its share of what all of them hold, or its part of what is cut up (which the same rank of
    every group has; one of them will write it)."""
    if not isinstance(weight, DTensor):
        return Piece.rows(weight, ranks.rank, ranks.size)
    local, first = part_of(weight)
    local = local.to(computes_in(module.get_parameter(name)))
    return Piece(local, (first, *(0 for _ in weight.shape[1:])), tuple(weight.shape))


def put_together(path: Path, checked: bool = False, weights: bool = True) -> dict[str, Any]:
    """The dictionary Lightning restores from: whole weights in CPU memory (none but small ones without `weights`); in
    place of optimizer states `{"description", "path"}`, since every rank reads only its own pieces of these. `checked`:
    its files were compared with what was written before.

    Raises:
        CheckpointError: it is damaged, or no checkpoint.
    """
    contents = _contents(path, checked)
    found: dict[str, Any] = contents["state_dict"]
    aliases = contents.pop(_ALIASES)
    if weights:
        found.update({n.removeprefix(_WEIGHTS): t for n, t in load_whole(path, _is_weight).items()})
        found.update({name: found[first] for name, first in aliases.items()})
    if _OPTIMIZER in contents:
        contents["optimizer_states"] = [{"description": contents.pop(_OPTIMIZER), "path": path}]
    return contents


def mismatch(checkpoint: Mapping[str, Any], module: Module, own: Collection[str] = ()) -> tuple[str, str] | None:
    """Of a checkpoint (as `put_together` returns it) whose weights are not of `module`: the name of the first parameter
    that shows it, and a line that says so and by which options the models differ. None where nothing is found. `own`:
    children that an option of their own makes, which are looked at last."""
    mine, saved = module.state_dict(), checkpoint["state_dict"]
    found = name = ""

    def later(name: str) -> bool:
        return name.partition(".")[0] in own

    for name in sorted((name for name in mine if name in saved), key=later):
        here, there = (tuple(getattr(values[name], "shape", ())) for values in (mine, saved))
        if here != there:
            found = f"'{name}' has shape {there} in the checkpoint and {here} in this run"
            break
    else:
        only = mine.keys() ^ saved.keys()
        if only:
            name = min(only, key=lambda name: (later(name), name in saved, name))
            where = "in the checkpoint only" if name in saved else "in this run only"
            found = f"'{name}' is {where} (and {len(only) - 1} more are on one side only)"
    options = []
    for child, files in checkpoint.get(_MODELS, {}).items():
        model = getattr(module, child, None)
        if model is not None and _is_model(model):
            here, there = (json.loads(text[CONFIG_FILE]) for text in (_configuration(model), files))
            keys = [key for key in there if key in here and here[key] != there[key] and key not in _UNTOLD]
            options += [f"{child}'s {key} is {there[key]!r:.80} there and {here[key]!r:.80} here" for key in keys[:3]]
    return (name, "; ".join([found, *options])) if found else None


class SavedModel:
    """A transformers model in the checkpoint `path`, that was the module's child `name`; nothing but its small tensors
    is in memory.

    Attributes:
        files: its configurations by file name (JSON text).
        tensors: of the shape and dtype of each of its weights, by their names in it; of those in 4 bit what these stand
            for.
        tied: names that stand for the same tensor as another, with that one.

    Raises:
        CheckpointError: it is damaged, or no checkpoint.
        ValueError: there is no such model, and it names those there are; weights in 4 bit, and no bitsandbytes.
    """

    def __init__(self, path: Path, name: str) -> None:
        contents = _contents(path)
        models = contents[_MODELS]
        if name not in models:
            raise ValueError(f"{path} holds no transformers model '{name}'; it holds {sorted(models) or 'none'}")
        self.files: dict[str, str] = models[name]
        self._saved, prefix = SavedPieces(path), f"{name}."
        aliases = {alias: first for alias, first in contents[_ALIASES].items() if alias.startswith(prefix)}
        self.tied = {alias.removeprefix(prefix): first.removeprefix(prefix) for alias, first in aliases.items()}
        stored = {one: one for one in (n.removeprefix(_WEIGHTS) for n in self._saved.tensors if _is_weight(n))}
        self._stored = {
            own.removeprefix(prefix): f"{_WEIGHTS}{first}"
            for own, first in (stored | aliases).items()
            if own.startswith(prefix) and f"{_WEIGHTS}{first}" in self._saved.tensors
        }
        small = {n.removeprefix(prefix): t for n, t in contents["state_dict"].items() if n.startswith(prefix)}
        self._small = {n: tensor for n, tensor in small.items() if isinstance(tensor, Tensor)}
        self.tensors = {n: self._saved.tensors[full] for n, full in self._stored.items()} | self._small
        self._quantised: dict[str, SavedWeight] = {}
        self._take_quantised()

    def _take_quantised(self) -> None:
        """Weights in 4 bit: what is beside their codes belongs to them, and is no weight of the model."""
        beside: dict[str, list[str]] = {}
        for name in self.tensors:
            if (owner := scaled_by(name)) is not None:
                beside.setdefault(owner, []).append(name)
        self.tied = {name: first for name, first in self.tied.items() if scaled_by(name) is None}
        for owner, names in beside.items():
            parts = self.fetch(names)
            weight = SavedWeight({name.removeprefix(f"{owner}."): tensor for name, tensor in parts.items()})
            self._quantised[owner] = weight
            self.tensors[owner] = torch.empty(weight.shape, dtype=weight.dtype, device="meta")
        self.tensors = {name: self.tensors[name] for name in plain_names(self.tensors)}

    def fetch(self, names: Iterable[str]) -> dict[str, Tensor]:
        """These of its weights, in CPU memory of their own.

        Raises:
            CheckpointError: files cannot be read.
        """
        names = list(names)
        read = self._saved.whole({self._stored[name] for name in names if name in self._stored})
        found = {name: read[self._stored[name]] if name in self._stored else self._small[name] for name in names}
        return {name: self._quantised[name].read_back(t) if name in self._quantised else t for name, t in found.items()}


def _contents(path: Path, checked: bool = False) -> dict[str, Any]:
    contents = unpack(path, checked)
    for key in ("state_dict", _ALIASES, _MODELS):
        if not isinstance(contents.get(key), dict):
            raise CheckpointError(f"ckpt_path: {path} holds no {key}: this project did not write it")
    return contents


def _is_weight(name: str) -> bool:
    return name.startswith(_WEIGHTS)


def _is_model(module: Any) -> bool:
    return hasattr(module, "save_pretrained") and hasattr(module, "config")


def _configuration(model: Any) -> dict[str, str]:
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    files = {CONFIG_FILE: base.config.to_json_string(use_diff=False)}
    generation = getattr(base, "generation_config", None)
    if generation is not None:
        files[GENERATION_FILE] = generation.to_json_string(use_diff=True)
    for adapter in getattr(model, "peft_config", {}).values():
        with tempfile.TemporaryDirectory() as directory:  # peft offers its own form of JSON as a file only
            adapter.save_pretrained(directory)
            files[ADAPTER_FILE] = (Path(directory) / ADAPTER_FILE).read_text()
    return files
