"""Where a model of a run comes from: a directory or hub name with weights, or a configuration to start from at random.

Promises: exactly one source; every mistake is an error that names the field; an unknown configuration key is refused
(transformers would keep it and ignore it). The attention implementation is left alone: the tree engine sets its own.
"""

from __future__ import annotations

import difflib
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_warn
from transformers import AutoConfig, AutoModelForSequenceClassification, PretrainedConfig, PreTrainedModel

from app import checks
from app.hub import NoDirectoryError, check_reachable, may_be_meant_here
from app.text import reason, why_not
from app.tree import (
    QUANTIZATIONS,
    auto_class,
    index_parameters,
    parted_ties,
    picture_processor,
    quantised_layers,
    quantised_loading,
    settle_quantised,
    tower_parameters,
)
from modules.models.adapters import adapted, refuse_adapter, unlike_linear
from modules.models.in_bits import cut_blocks, read_whole, settle_whole

_LARGEST = 2**31 - 1
_MOST_LAYERS = 10_000
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}


@dataclass
class ModelSource:
    """Names a causal language model; `build_model` makes it.

    Attributes:
        path: directory written by `save_pretrained`, or a name on the Hugging Face hub.
        config: `model_type` and any fields of that type's transformers configuration; weights start at random, drawn
            from torch's global generator (`seed_everything`). Without `eos_token_id` the tokenizer alone says what ends
            a sequence: some types would name a token of another tokenizer.
        dtype: parameter dtype: "float32", "bfloat16" or "float64".
        adapter: what is trained in place of these weights, which stay as they are, one a run: a directory written by
            PEFT, to go on with; or the fields of PEFT's configuration of a new one, with `peft_type` (LORA) and
            `target_modules` ("all-linear") where they are not said. Adapters of narrow weights are float32, as PEFT has
            them.
        quantization: "nf4": the linear layers below the adapter, but the output projection, are kept in 4 bit, and read
            back to `dtype` where they compute (QLoRA, Dettmers et al. 2023; bitsandbytes). None: as `dtype` says.
        train_tower: of a model that sees, also train what makes features of pictures, or put new adapters on it too; it
            stays as it is otherwise.
        freeze: parameters that stay as they are: names of parameters or modules, or patterns of them, such as
            `model.embed_tokens`, `model.layers.[0-3]` or, of a model of experts, `*.mlp.gate` (its routers).

    Raises:
        ValueError: both or neither of path and config, an adapter or 4 bit of random weights, another dtype or kind,
            `freeze` beside an adapter.
    """

    path: str | None = None
    config: dict[str, Any] | None = None
    dtype: str = "float32"
    adapter: str | dict[str, Any] | None = None
    train_tower: bool = False
    quantization: str | None = None
    freeze: Sequence[str] = ()

    def __post_init__(self) -> None:
        if (self.path is None) == (self.config is None):
            given = "both are" if self.path is not None else "neither is"
            raise ValueError(f"model: give either model.path or model.config, {given} set")
        checks.one_of("model.dtype", self.dtype, _DTYPES)
        if self.quantization is not None:
            checks.one_of("model.quantization", self.quantization, QUANTIZATIONS)
        if self.freeze and self.adapter is not None:
            raise ValueError("model.freeze has no effect beside model.adapter, which alone is trained; remove it")
        for key in ("adapter", "quantization"):
            if getattr(self, key) is not None and self.path is None:
                raise ValueError(
                    f"model.{key}: the weights of model.config are random and would stay so; name a model in model.path"
                )


def build_model(source: ModelSource, scores: bool = False, key: str = "model") -> PreTrainedModel:
    """The model of `source`, in training mode, on the current default device (on "meta" its weights are not read);
    inside PEFT's wrapper where it has adapters, which alone require gradients then.

    Args:
        scores: as a reward model (`AutoModelForSequenceClassification` with one label) in place of a language model.
            Its head starts as transformers draws it where `source` has none.
        key: the option of a configuration that is `source`, for messages.

    Raises:
        ValueError: naming the field of `source` that cannot be used.
    """
    try:
        return _built(source, scores)
    except ValueError as error:
        if key == "model" or not str(error).startswith("model."):
            raise
        raise ValueError(f"{key}{str(error).removeprefix('model')}") from None


def _built(source: ModelSource, scores: bool) -> PreTrainedModel:
    dtype = _DTYPES[source.dtype]
    one_label = {"num_labels": 1} if scores else {}
    if source.path is not None:
        refuse_adapter(source.path)
        kept, in_bits = _loading(source), ""
        try:
            check_reachable(source.path, "config.json")
            config = AutoConfig.from_pretrained(source.path, trust_remote_code=False, **one_label)
            in_bits = read_whole(config)
            kind: Any = AutoModelForSequenceClassification if scores else auto_class(config)
            if _without_storage():
                if in_bits:
                    del config.quantization_config
                model = kind.from_config(config, dtype=dtype, trust_remote_code=False)
            else:
                with cut_blocks(config):
                    model = kind.from_pretrained(
                        source.path, config=config, dtype=dtype, trust_remote_code=False, **kept
                    )
                if in_bits and source.quantization is None:
                    settle_whole(model, dtype)
        except NoDirectoryError as error:
            raise ValueError(
                f"model.path: {error}; name one written by save_pretrained, or a model of the hub as OWNER/NAME"
            ) from None
        except (OSError, ValueError, RuntimeError, ImportError) as error:
            if in_bits and source.quantization is not None:
                raise ValueError(
                    f"model.quantization: the weights in '{source.path}' are kept in {in_bits}, of which no"
                    f" {source.quantization} is made: write them whole first (callbacks.SavePretrained of a run without"
                    " model.quantization), or leave it out"
                ) from error
            what = f"holds no {'model that scores with one label' if scores else 'causal language model'}"
            if not Path(source.path).is_dir():
                parent = Path(source.path).parent
                neither = (
                    f"no directory in '{parent}', nor" if may_be_meant_here(source.path) else "neither a directory nor"
                )
                what = (
                    f"is {neither} a model that came from the hub; name a directory written by save_pretrained, or a"
                    " model there is (HF_HUB_OFFLINE=1 asks no hub)"
                )
            raise ValueError(f"model.path: '{source.path}' {what}: {why_not(error)}") from error
        _settle(model, source)
        if in_bits:
            rank_zero_warn(
                f"model.path: the weights in '{source.path}' are kept in {in_bits}; they are read back, and are"
                f" {source.dtype} from here on"
            )
    else:
        assert source.config is not None
        config = _make_config(source.config)
        padding, size = config.pad_token_id, config.get_text_config().vocab_size
        if padding is not None and padding >= size:
            raise ValueError(
                f"model.config.pad_token_id: {padding} is outside the vocabulary of {size}; choose another"
            )
        _refuse_too_large(config, dtype)
        for key, value in one_label.items():
            setattr(config, key, value)
        kind = AutoModelForSequenceClassification if scores else auto_class(config)
        try:
            model = kind.from_config(config, dtype=dtype)
        except Exception as error:  # sizes that contradict each other fail anywhere in transformers
            raise ValueError(f"model.config: {reason(error, 300)}") from error
    tower = tower_parameters(model)
    if source.train_tower and not tower:
        raise ValueError(f"model.train_tower has no effect: a {config.model_type} sees no pictures; remove it")
    untrained = [*index_parameters(model), *(() if source.train_tower else tower)]
    for parameter in untrained:
        parameter.requires_grad_(False)
    _freeze(model, source.freeze, others=scores)
    if source.adapter is not None:
        assert source.path is not None
        but = [*_owners(model, untrained), *unlike_linear(model)]
        model = adapted(model, source.adapter, source.path, but)
        try:
            added = index_parameters(inner_model(model))  # by an adapter that has some, or whose kind excludes nothing
        except ValueError as error:
            raise ValueError(f"model.adapter: {error}") from error
        for parameter in added:
            parameter.requires_grad_(False)
        for name, other in parted_ties(inner_model(model)):
            rank_zero_warn(
                f"model.adapter: '{name}' and '{other}' are tied and will differ, so that merging is refused: write the"
                " adapter alone (arborist export --adapter), or leave both out of target_modules and modules_to_save"
            )
    # from_pretrained leaves evaluation mode on, in which dropout and gradient checkpointing would be off in silence.
    return model.train()


FROZEN = "frozen_by_name"
"""Attribute of parameters that `ModelSource.freeze` keeps as they are."""


def _freeze(model: PreTrainedModel, names: Sequence[str], others: bool) -> None:
    """Parameters of these names stay as they are. `others`: the model has another head than the one that was named.

    Raises:
        ValueError: a name of nothing that would be trained, or nothing is left that is.
    """
    trained = {name: one for name, one in model.named_parameters() if one.requires_grad}
    for pattern in names:
        found = [name for name in trained if fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}.*")]
        if not found and not others:
            close = difflib.get_close_matches(pattern, [name.rpartition(".")[0] for name in trained], n=1)
            meant = f"did you mean '{close[0]}'?" if close else "names are those of model.named_parameters()"
            raise ValueError(f"model.freeze: '{pattern}' is the name of nothing that is trained; {meant}")
        for name in found:
            trained[name].requires_grad_(False)
            setattr(trained[name], FROZEN, True)
    if not any(one.requires_grad for one in trained.values()):
        raise ValueError("model.freeze: nothing is left to train; leave out some of its names")


def image_processor_of(source: ModelSource) -> Any | None:
    """What makes arguments of pictures for the model of `source`, from the files beside its weights (see
    `app.tree.picture_processor`); None where it sees no pictures, or there is none.

    Raises:
        ValueError: one that cannot be read.
    """
    if source.path is None:
        return None
    try:
        return picture_processor(source.path)
    except Exception as error:  # files that are cut or of another kind fail anywhere in transformers
        what = f"the image processor in '{source.path}' cannot be read"
        raise ValueError(f"model.path: {what}: {reason(error, 300)}") from error


def _loading(source: ModelSource) -> dict[str, Any]:
    """What `from_pretrained` is told of 4 bit. Raises ValueError naming the field."""
    if source.quantization is None:
        return {}
    try:
        return quantised_loading(source.quantization, _DTYPES[source.dtype], torch.get_default_device())
    except ValueError as error:
        raise ValueError(f"model.quantization: {error}") from error


def _settle(model: PreTrainedModel, source: ModelSource) -> None:
    """Weights are quantised as `source` says, and only the model itself knows. Raises ValueError naming the field."""
    found = getattr(model.config, "quantization_config", None)
    if found is None or _without_storage():
        return
    if source.quantization is None:
        raise ValueError(
            f"model.path: the weights in '{source.path}' are quantised ({getattr(found, 'quant_method', found)}), and"
            f" {' or '.join(QUANTIZATIONS)} is what can be trained on: name the model they were made of, or set"
            " model.quantization for weights of that kind"
        )
    try:
        settle_quantised(model, source.quantization)
    except ValueError as error:
        raise ValueError(f"model.quantization: {error}") from error
    if not (layers := quantised_layers(model)):
        raise ValueError(f"model.quantization: {type(model).__name__} has no linear layer to keep in 4 bit; remove it")
    saved = {layer.weight.quant_state.dtype for layer in layers.values()} | {model.get_input_embeddings().weight.dtype}
    if saved != {_DTYPES[source.dtype]}:  # of weights that were saved in 4 bit, which nobody casts
        names = " and ".join(sorted(str(one).removeprefix("torch.") for one in saved))
        raise ValueError(
            f"model.dtype: {source.dtype}, and '{source.path}' was saved in 4 bit of {names}: set model.dtype to that,"
            " or name the model it was made of"
        )
    del model.config.quantization_config  # whoever builds or serves a model by it has whole weights


def _without_storage() -> bool:
    return torch.get_default_device().type == "meta"


def inner_model(model: PreTrainedModel) -> PreTrainedModel:
    """The transformers model itself, its adapters in place, without the wrapper that PEFT puts around it."""
    inner: PreTrainedModel = model.get_base_model() if hasattr(model, "get_base_model") else model
    return inner


def _owners(model: PreTrainedModel, parameters: Sequence[torch.nn.Parameter]) -> list[str]:
    """Names of the modules whose own the parameters are."""
    ids = {id(parameter) for parameter in parameters}
    return [name for name, module in model.named_modules() if any(id(p) in ids for p in module.parameters(False))]


def _make_config(fields: dict[str, Any]) -> PretrainedConfig:
    options = dict(fields)
    model_type = options.pop("model_type", None)
    if model_type is None:
        raise ValueError("model.config.model_type is missing: name an architecture of transformers, for example qwen3")
    try:
        default = AutoConfig.for_model(model_type)
    except (ValueError, TypeError) as error:
        raise ValueError(f"model.config.model_type: '{model_type}' is not an architecture of transformers") from error
    values = {**default.to_dict(), "num_labels": default.num_labels}  # which is told where it is not 2
    known = {*values, *default.attribute_map, "head_dim", "rope_theta", "rope_scaling"}
    if model_type.startswith("gemma4"):  # which it keeps as a part of per_layer_config
        known |= {"global_head_dim", "num_global_key_value_heads"}
    for key in options:
        if key not in known:
            close = difflib.get_close_matches(key, known, n=1)
            hint = f"; did you mean '{close[0]}'?" if close else ""
            raise ValueError(f"model.config.{key} is not an option of {model_type}{hint}")
    names = default.attribute_map
    options = {key: _checked(key, value, values.get(names.get(key, key))) for key, value in options.items()}
    try:
        return AutoConfig.for_model(model_type, **({"eos_token_id": None} | options))
    except Exception as error:  # transformers' own checks raise classes of their own
        raise ValueError(f"model.config: {reason(error, 300)}") from error


def _checked(key: str, value: Any, default: Any) -> Any:
    """`value`, of the kind that `default` is. What is below a size of 1 or not a number fails much later, or never."""
    if key == "rope_theta" and not (_is_number(value) and value > 1):
        raise ValueError(f"model.config.{key}: {value!r}, must be a number above 1")
    if value is None:
        return value
    if isinstance(default, bool) != isinstance(value, bool) and isinstance(default, bool | int | float):
        raise ValueError(f"model.config.{key}: {value!r}, must be of the kind of {default!r}")
    if isinstance(value, list | tuple) and value and all(map(_is_number, value)):
        return value  # several ends of sequence, or one a layer; transformers knows where it takes them
    if _is_number(default) and not _is_number(value):
        raise ValueError(f"model.config.{key}: {value!r}, must be a finite number, such as {default!r}")
    is_size = key.startswith("num_") or key.endswith(("_size", "_dim", "_embeddings"))
    is_size = is_size and not isinstance(value, bool)  # tie_word_embeddings
    least = 0 if key.endswith("_layers") and key != "num_hidden_layers" else 1  # none of a kind of layers
    if is_size and isinstance(value, int) and not least <= value <= _LARGEST:
        raise ValueError(f"model.config.{key}: {value}, must be between {least} and {_LARGEST:,}")
    if key == "num_hidden_layers" and isinstance(value, int) and value > _MOST_LAYERS:
        raise ValueError(f"model.config.{key}: {value}, must be at most {_MOST_LAYERS:,}")
    if isinstance(default, float):
        if default > 0 and value <= 0:
            raise ValueError(f"model.config.{key}: {value}, must be above 0")
        return float(value)  # transformers takes no whole number for one
    return value


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _refuse_too_large(config: PretrainedConfig, dtype: torch.dtype) -> None:
    if torch.get_default_device().type != "cpu":
        return
    try:
        with torch.device("meta"):
            shapes = auto_class(config).from_config(config, dtype=dtype)
    except Exception:  # sizes that contradict each other, which fail again, or a model that reads values as it is made
        return
    needed = sum(parameter.numel() * parameter.element_size() for parameter in shapes.parameters())
    there = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if needed > there:
        raise ValueError(
            f"model.config: its parameters need {needed / 1e9:,.0f} GB of this machine's {there / 1e9:,.0f} GB: lower"
            " vocab_size, num_hidden_layers, hidden_size, intermediate_size, head_dim, num_attention_heads or"
            " num_key_value_heads"
        )
