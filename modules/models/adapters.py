"""Adapters (PEFT's) that are trained in place of a model's weights.

Promises: a run trains one adapter, all of whose weights are in the model; an error names the key of YAML. One that says
it was trained on another model is warned of, and so is one that was trained with dropout, which is off here.
"""

from __future__ import annotations

import difflib
import re
import warnings
from collections.abc import Iterable
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn
from transformers import PreTrainedModel

from app.hub import check_reachable
from app.text import reason

_OTHER_TRAINING = {
    "ADALORA": "gives ranks to layers by a call after every step, which is not made here: all keep theirs; use LORA",
    "LILY": "mixes its matrices by a mean over all tokens of a pass, and a tree has other passes; use LORA",
    "PVERA": "draws numbers for every token in training, and tokens that sequences share are computed once; use VERA",
}
_OTHER_OPTIONS = {
    "alora_invocation_tokens": "it works behind those tokens alone, which nobody tells it in a pass over a tree",
    "layer_replication": "an adapter with layers of its own is none that engines and servers could merge",
    "kasa_config": "its regularisation is a loss beside the objective's, and would be left out",
    "monteclora_config": "it draws numbers in training, and tokens that sequences share are computed once",
    "velora_config": "its gradient is an estimate from the tokens of a pass, and a tree has other passes",
    "use_asa": "it chooses subspaces by a call after every step, which is not made here",
}


def refuse_adapter(path: str) -> None:
    """transformers would load the model that the adapter names, and train the adapter or nothing, in silence."""
    there = Path(path)
    if (there / "adapter_config.json").is_file():
        if (there / "config.json").is_file():
            raise ValueError(
                f"model.path: '{path}' holds an adapter beside a model, and both would be loaded: move adapter_* to a"
                " directory of their own, and name that in model.adapter to go on with it"
            )
        raise ValueError(
            f"model.path: '{path}' holds an adapter alone: name it in model.adapter, and in model.path the model that"
            " it was trained on"
        )


def _refuse_several(adapter: str) -> None:
    """PEFT writes further adapters of a model into folders of the first one's, and would read the first alone."""
    there = Path(adapter)
    beside = sorted(one.parent.name for one in there.glob("*/adapter_config.json"))
    if not (there / "adapter_config.json").is_file():
        if beside:
            raise ValueError(f"model.adapter: '{adapter}' holds adapters in its folders {', '.join(beside)}; name one")
        return
    others = [name for name in beside if not re.fullmatch(r"checkpoint-\d+", name)]  # earlier states of the same
    if others:
        raise ValueError(
            f"model.adapter: '{adapter}' holds several adapters, its own and those in its folders {', '.join(others)},"
            f" and a run trains one: name {there / others[0]} for that, or copy the files adapter_* to a directory of"
            " their own"
        )


def _check_base(adapter: str, config: Any, path: str) -> None:
    """Warns of an adapter that says it was trained on another model than `path`; one that was moved keeps its name."""
    said = config.base_model_name_or_path
    if not said or Path(said).resolve() == Path(path).resolve():
        return
    if Path(said).exists() or Path(said).name != Path(path).resolve().name:
        rank_zero_warn(
            f"model.adapter: '{adapter}' was trained on '{said}', and model.path is '{path}'; where that is another"
            " model, not the same one moved, name the former in model.path"
        )


def _refuse_other_training(config: Any, key: str) -> None:
    """Kinds and options that need more than a gradient, or are no function of a token and what is before it."""
    kind = str(getattr(config.peft_type, "value", config.peft_type))
    if kind in _OTHER_TRAINING:
        raise ValueError(f"{key}peft_type: {kind} {_OTHER_TRAINING[kind]}")
    for name, why in _OTHER_OPTIONS.items():
        if getattr(config, name, None):
            raise ValueError(f"{key}{name}: {why}; leave it out")


def _rates(config: Any) -> dict[str, float]:
    """Dropout of any kind, by the fields of PEFT's configuration: no pass over a tree has it."""
    rates = {field.name: getattr(config, field.name) for field in fields(config) if "dropout" in field.name}
    return {name: rate for name, rate in rates.items() if isinstance(rate, float | int) and rate > 0}


def _refuse_drawn(config: Any, key: str) -> None:
    """PEFT saves how the adapter began and not what was left of the model, and begins again when it loads."""
    began = getattr(config, "init_lora_weights", None)
    if isinstance(began, str) and began.startswith("pissa_niter"):
        raise ValueError(
            f"{key}: {began!r} is an approximation, drawn at random, and anew whenever the adapter is loaded, so"
            " that it would be loaded as another model: use 'pissa', which is exact (of an adapter that is there, let"
            " PEFT's save_pretrained convert it by path_initial_model_for_weight_conversion)"
        )


def _wide(made: Any) -> Any:
    """With adapters of float64 where the model is, as PEFT has them, also on ranks where no weight has storage."""
    if made.dtype == torch.float64:
        for param in made.parameters():
            param.data = param.data.double()
    return made


def unlike_linear(model: PreTrainedModel) -> list[str]:
    """Names of the layers that PEFT takes for linear and that return something else than their class does: routers that
    say which experts (Llama 4, PhiMoE), projections of groups (DeepSeek-V4). An adapter on one fails when it runs."""
    layers = ((name, layer) for name, layer in model.named_modules() if isinstance(layer, nn.Linear))
    own = ((name, layer) for name, layer in layers if type(layer).__module__.startswith("transformers.models."))
    return [name for name, layer in own if not _returns_rows(layer)]


def _returns_rows(layer: nn.Linear) -> bool:
    """Asked without storage, so that nothing is computed and nothing drawn."""
    weights = {name: parameter.detach().to("meta") for name, parameter in layer.named_parameters()}
    rows = torch.empty(2, layer.in_features, dtype=layer.weight.dtype, device="meta")
    try:
        found = torch.func.functional_call(layer, weights, (rows,))
    except Exception:  # rows of another kind, which fail anywhere in transformers
        return False
    return isinstance(found, Tensor) and found.shape == (2, layer.out_features)


def _refused_by_peft(model: PreTrainedModel) -> list[str]:
    """Names of the linear layers on which it puts no adapter in some models: Mamba's kernels read the weight alone."""
    if model.config.model_type not in ("falcon_h1", "nemotron_h"):
        return []
    return [name for name, _ in model.named_modules() if name.endswith(".out_proj")]


def stacked_experts(model: nn.Module) -> set[str]:
    """Last names of the parameters [experts, rows, columns] that hold all experts of a layer; below adapters, too."""
    stacked = (name for name, one in model.named_parameters() if one.dim() == 3 and "experts." in name)
    return {name.rpartition(".")[2] for name in stacked}


def _what_adapters_can_be_on(model: PreTrainedModel) -> str:
    linear = {name.rpartition(".")[2] for name, layer in model.named_modules() if isinstance(layer, nn.Linear)}
    experts = ", ".join(sorted(stacked_experts(model)))
    more = f", and experts' parameters called {experts} (target_parameters)" if experts else ""
    return f"it has linear layers called {', '.join(sorted(linear))}{more}"


def _refuse_without_place(made: Any, given: dict[str, Any], offered: str, but: list[str]) -> None:
    """PEFT looks for all names together, and says nothing of one that is nowhere where another is somewhere."""

    def named(key: str) -> list[str]:
        """What is left of a list: PEFT moves names of experts and routers from modules to parameters."""
        here, asked = getattr(made.peft_config["default"], key, None), given.get(key)
        return [] if isinstance(here, str) or isinstance(asked, str) else [n for n in asked or () if n in (here or ())]

    def on(name: str, places: Iterable[str]) -> bool:
        return any(f".{place}".endswith(f".{name}") for place in places)

    tuner = made.base_model
    modules = getattr(tuner, "targeted_module_names", None)
    if modules is None:  # prompts, which are on no layer
        return
    kept = [name for name, part in made.named_modules() if type(part).__name__ == "ModulesToSaveWrapper"]
    places = {
        "target_modules": modules,
        "target_parameters": tuner.targeted_parameter_names,
        "modules_to_save": kept,
    }
    for key, found in places.items():
        for name in named(key):
            if key == "target_modules" and on(name, but) and not on(name, found):
                raise ValueError(
                    f"model.adapter.target_modules: '{name}' names layers that get no adapter: routers and projections"
                    " that do not compute as a linear layer, indexers, or a tower without model.train_tower; leave it"
                    " out"
                )
            if not on(name, found):
                raise ValueError(
                    f"model.adapter.{key}: '{name}' has no place in this model, and the run would go on with the others"
                    f" alone; {offered}"
                )
    layers = given.get("layers_to_transform")
    for index in [layers] if isinstance(layers, int) else layers or ():
        if not any(f".{index}." in place for place in modules):
            raise ValueError(f"model.adapter.layers_to_transform: no layer {index} has a module of target_modules")


def adapted(model: PreTrainedModel, adapter: str | dict[str, Any], path: str, but: list[str]) -> Any:
    """`model` with adapters, which are trained, in PEFT's wrapper; new ones on no module of `but`. Raises ValueError
    naming the field."""
    try:
        import peft
    except ImportError as error:
        raise ValueError("model.adapter: adapters need the package peft: pip install -e '.[lora]'") from error
    if isinstance(adapter, str):
        _refuse_several(adapter)
        try:
            check_reachable(adapter, "adapter_config.json")
            config = peft.PeftConfig.from_pretrained(adapter)
            _refuse_other_training(config, "")
            _refuse_drawn(config, "init_lora_weights")
            for name, rate in _rates(config).items():
                rank_zero_warn(
                    f"model.adapter: '{adapter}' says {name} {rate}; a tree runs without, so it goes on with 0"
                )
                setattr(config, name, 0.0)
            if torch.get_default_device().type == "meta":  # another rank has the weights
                config.inference_mode = False  # as it is saved; else this rank would train nothing of it
                return _wide(peft.get_peft_model(model, config))
            _check_base(adapter, config, path)
            made = peft.PeftModel.from_pretrained(model, adapter, is_trainable=True, config=config)
            # It warns of what is missing, and says nothing of what has no place; a second time it returns both.
            found = made.load_adapter(adapter, "default", is_trainable=True)
            parameters = dict(made.named_parameters(remove_duplicate=False))
            loaded = {id(one) for name, one in parameters.items() if name not in found.missing_keys}
            # VB-LoRA's vector bank has a name in every layer, and is written under one.
            missing = [name for name in found.missing_keys if id(parameters.get(name)) not in loaded]
            if missing or found.unexpected_keys:
                what = "none for" if missing else "weights for layers that the model has not,"
                first = [*missing, *found.unexpected_keys][0]
                raise ValueError(f"it has {what} {first}; name the model it was trained on in model.path")
            return made
        except (OSError, ValueError, RuntimeError, KeyError, TypeError) as error:
            raise ValueError(f"model.adapter: '{adapter}' holds no adapter for {path}: {reason(error, 300)}") from error
    options = {"peft_type": "LORA", "task_type": "CAUSAL_LM"} | adapter
    kind = str(options["peft_type"]).upper()
    kinds = {one.value: made for one, made in peft.PEFT_TYPE_TO_CONFIG_MAPPING.items()}
    if kind not in kinds:
        raise ValueError(f"model.adapter.peft_type: {kind!r} is not one of {', '.join(sorted(kinds))}")
    known_fields = {field.name for field in fields(kinds[kind])}
    if "target_modules" in known_fields and "target_modules" not in adapter:
        options["target_modules"] = "all-linear"
        but = [*but, *_refused_by_peft(model)]
    for key in options:
        if key not in known_fields:
            close = difflib.get_close_matches(key, known_fields, n=1)
            hint = f"; did you mean '{close[0]}'?" if close else ""
            raise ValueError(f"model.adapter.{key} is not an option of {kind}{hint}")
    if but and "exclude_modules" in known_fields:
        given = options.get("exclude_modules") or []
        if isinstance(given, str):  # a pattern of whole names
            options["exclude_modules"] = "|".join([given, *map(re.escape, but)])
        else:
            options["exclude_modules"] = [*given, *but]
    try:
        config = peft.get_peft_config(options | {"peft_type": kind})
    except Exception as error:  # PEFT's methods check their options in classes of their own
        raise ValueError(f"model.adapter: {reason(error, 300)}") from error
    for name, rate in _rates(config).items():
        raise ValueError(f"model.adapter.{name}: {rate}, must be 0: tokens that sequences share are computed once")
    _refuse_other_training(config, "model.adapter.")
    _refuse_drawn(config, "model.adapter.init_lora_weights")
    if getattr(config, "init_lora_weights", None) == "eva":
        raise ValueError(
            "model.adapter.init_lora_weights: 'eva' begins with what layers see of your data, and nothing shows it to"
            " them here: begin it by PEFT's initialize_lora_eva_weights, and name its directory in model.adapter"
        )
    offered = _what_adapters_can_be_on(model)
    try:
        with warnings.catch_warnings():
            if not adapter.get("exclude_modules"):  # of what is left out here
                warnings.filterwarnings("ignore", "You have passed exclude_modules=")
            if not (adapter.get("rank_pattern") or adapter.get("alpha_pattern")):  # PEFT's, for parameters of experts
                warnings.filterwarnings("ignore", r"The following (rank|alpha)_pattern keys")
            made = _wide(peft.get_peft_model(model, config))
    except Exception as error:  # what layers they take, too
        raise ValueError(f"model.adapter: {reason(error, 300)}") from error
    _refuse_without_place(made, adapter, offered, but)
    if Path(path).is_dir():  # so that whoever loads the adapter finds the model from anywhere
        made.peft_config["default"].base_model_name_or_path = str(Path(path).absolute())
    return made
