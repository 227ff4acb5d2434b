"""The policy's weights as an inference engine needs them: adapters merged, names of the base model, ties once.

Promises: the trainer's model is only read; a LoRA-ed policy (any adapter peft can merge) comes out under exactly the
names of its base model, one layer merged at a time on a copy of that layer; which tensors are tied is told by the
tensors, not by the configuration; what an engine could not load, or would load as another model, is refused here; what
does not fit into one memory is exported a layer at a time (`WeightParts`). peft itself is not imported: its layers
are recognised by what they offer.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterable, Iterator, Set
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import Module
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from app.tree import kept_in_float32, moves_base, own_config, plain_names, quantised_layers, tied_names

Fetch = Callable[[Iterable[str]], dict[str, Tensor]]
"""Gets tensors by their names in a base model's own `state_dict()`, into memory that may be written."""


class ExportError(ValueError):
    """Weights that cannot be exported; the message names the tensor or module and the remedy."""


def base_model(policy: Module) -> PreTrainedModel:
    """The transformers model inside `policy`: itself, or what a `peft.PeftModel` wraps (adapters still in place)."""
    return cast(Any, policy).get_base_model() if hasattr(policy, "get_base_model") else policy


def merged_weights(policy: Module) -> dict[str, Tensor]:
    """The weights `policy` computes with, by the names of its base model's own `state_dict()`.

    Returns:
        Detached tensors in the parameters' dtype: the trainer's own memory where no adapter sits (copy before training
        goes on), new tensors on the CPU for layers with one. Tied tensors come under each of their names.

    Raises:
        ExportError: adapters that cannot be merged, or give values that are not finite, or separate tied embeddings;
            weights in 4 bit, which come in `WeightParts`.
    """
    base = base_model(policy)
    in_bits = next(iter(quantised_layers(base)), None)
    if in_bits is not None:  # PEFT would merge into 4 bit, and round what was trained away
        raise ExportError(
            f"weight export: '{in_bits}' is in 4 bit, and is read back a layer at a time: ask for WeightParts, as"
            " callbacks.WeightSync and SavePretrained do, or write the adapter alone"
        )
    weights = {name: tensor.detach() for name, tensor in base.state_dict().items()}
    adapted = _adapted_modules(base)
    return _merge(adapted, tied_names(base) if adapted else {}, weights)


def checkpoint_weights(policy: Module) -> dict[str, Tensor]:
    """The same weights by the names and in the layout of a checkpoint on disk, which is what servers load.

    transformers keeps some layers in another form than checkpoints do (the experts of a mixture, for example), and
    tied tensors stand in a checkpoint once. Tensors as in `merged_weights`.

    Raises:
        ExportError: as `merged_weights`; or names that are not those of the model its configuration describes.
    """
    base = base_model(policy)
    weights = merged_weights(policy)
    plain = _plain(base)
    _check_names(plain, weights.keys())
    return _as_saved(plain, weights)


def checkpoint_shapes(policy: Module) -> dict[str, tuple[int, ...]]:
    """Of `checkpoint_weights`, whether the policy has storage or not."""
    plain = _plain(base_model(policy))
    return {name: tuple(tensor.shape) for name, tensor in _as_saved(plain, dict(plain.state_dict())).items()}


def weight_parts(policy: Module) -> list[list[str]]:
    """The names of the base model's `state_dict()`, a layer's together, in the order in which `WeightParts` asks for
    them. Of tied tensors one name alone, or all names together where adapters are on one."""
    base = base_model(policy)
    adapted, ties = _adapted_modules(base), tied_names(base)

    def place(name: str) -> str:
        inside = next((path for path in adapted if name.startswith(f"{path}.")), None)
        layer = re.match(r"(.*?\.\d+)(\.|$)", inside or name)
        return layer[1] if layer else inside or name

    apart = {tied: source for tied, source in ties.items() if {place(tied), place(source)} & adapted.keys()}
    together = {place(tied): place(source) for tied, source in apart.items()}
    parts: dict[str, list[str]] = {}
    for name in plain_names(base.state_dict()):
        if name not in ties or name in apart:
            parts.setdefault(together.get(place(name), place(name)), []).append(name)
    return list(parts.values())


class WeightParts:
    """The weights of a policy whose tensors are elsewhere, a layer at a time; gone through once, by one of the methods.
    What is yielded may be dropped.

    Args:
        policy: whose names count, and whose tensors are not looked at.
        fetch: called once for each of `weight_parts`, in order.
        without: a model like the policy, adapters and all, that has no storage and gets its tensors for a while.

    Attributes:
        device: where the policy is.
    """

    def __init__(self, policy: Module, fetch: Fetch, without: Module) -> None:
        self._fetch, self._holder, base = fetch, base_model(without), base_model(policy)
        self._adapted, self._ties, self._plain = _adapted_modules(self._holder), tied_names(base), _plain(base)
        self._left = iter(weight_parts(policy))
        self.device = base.device

    def merged(self) -> Iterator[dict[str, Tensor]]:
        """As `merged_weights`, tied tensors under one name alone.

        Raises:
            ExportError: as `merged_weights`, and names that do not fit after the last part.
        """
        seen = set(self._ties)
        for names in self._left:
            weights = self._fetch(names)
            lent = {n: tensor for n, tensor in weights.items() if any(n.startswith(f"{p}.") for p in self._adapted)}
            self._holder.load_state_dict(lent, strict=False, assign=True)
            merged = _merge(self._adapted, self._ties, weights)
            empty = {name: tensor.to("meta") for name, tensor in lent.items()}
            self._holder.load_state_dict(empty, strict=False, assign=True)
            seen |= merged.keys()
            del weights, lent
            yield merged
            del merged  # what is dropped of it is gone
        _check_names(self._plain, seen)

    def saved(self, dtype: torch.dtype | None = None) -> Iterator[dict[str, Tensor]]:
        """As `checkpoint_weights`, where `dtype` is given `in_dtype`; errors as `merged`."""
        for merged in self.merged():
            part = _as_saved(self._plain, in_dtype(self._plain, merged, dtype))
            del merged
            yield part
            del part

    def skip(self) -> None:
        """Fetches what is left for nothing: others that hold parts of it expect to be asked."""
        for names in self._left:
            self._fetch(names)


def in_dtype(model: Module, weights: dict[str, Tensor], dtype: torch.dtype | None) -> dict[str, Tensor]:
    """`weights`, by the names in `model`, as `from_pretrained` would load them in `dtype` (None: as they are): in half
    precision what transformers keeps in float32 is so, and whole numbers are never cast."""
    if dtype is None:
        return weights
    kept = kept_in_float32(model, dtype)
    return {
        name: tensor.to(torch.float32 if name in kept else dtype) if tensor.is_floating_point() else tensor
        for name, tensor in weights.items()
    }


def _merge(adapted: dict[str, Module], ties: dict[str, str], weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """`weights` of the base model, all or those of some layers, with what adapters make of them."""
    for path, module in adapted.items():
        own = [name for name in weights if name.startswith(f"{path}.")]
        for name in own:
            del weights[name]
        for name, tensor in _merged(path, module).state_dict().items() if own else ():
            weights[f"{path}.{name}"] = tensor.detach().cpu()
    _check_ties(ties, weights, adapted)
    return weights


def _check_names(plain: PreTrainedModel, names: Set[str]) -> None:
    expected = plain.state_dict().keys()
    if names != expected:
        missing, unknown = sorted(expected - names), sorted(names - expected)
        raise ExportError(
            f"weight export: the policy is not the {type(plain).__name__} its configuration describes; missing"
            f" {missing[:3]} ({len(missing)}), unknown {unknown[:3]} ({len(unknown)}); a server could not load it"
        )


def _as_saved(plain: PreTrainedModel, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Under the names of a checkpoint; of tied tensors the first alone."""
    for tied in plain.all_tied_weights_keys:
        weights.pop(tied, None)
    reverted = revert_weight_conversion(plain, weights)
    if plain.config.model_type == "kimi_linear":  # read under one name, layers with and without experts leave under it
        return {re.sub(r"\.block_sparse_moe\.(\w+_proj\.)", r".mlp.\1", name): t for name, t in reverted.items()}
    if plain.config.model_type == "deepseek_v4":
        return {_as_deepseek_has_it(name): tensor for name, tensor in reverted.items()}
    return reverted


def _as_deepseek_has_it(name: str) -> str:
    """A name of DeepSeek-V4 on the hub, of what transformers makes of it on the way back: it keeps its own prefix and
    the parts of its last mixing, and has two norms under one name."""
    name = name.removeprefix("model.").replace("embed_tokens.", "embed.").replace("hc_head.hc_", "hc_head_")
    return name.replace(".attn.norm.", ".attn.kv_norm.")


_OF_PLAIN_LORA = {"peft_type", "r", "lora_alpha", "target_modules", "lora_dropout", "init_lora_weights"}
_SAYS_NOTHING = {"task_type", "base_model_name_or_path", "revision", "inference_mode", "auto_mapping", "peft_version"}


def adapter_weights(policy: Module) -> dict[str, Tensor]:
    """The policy's adapter alone, by PEFT's names; the trainer's own memory.

    Raises:
        ExportError: a policy without one plain LoRA: servers add `lora_alpha / r x B A` to named projections, and would
            ignore in silence whatever else an adapter may be.
    """
    configs = getattr(policy, "peft_config", {})
    if len(configs) != 1:
        raise ExportError(
            f"weight export: the policy has {len(configs)} adapters, and servers take one: set model.adapter, or"
            " WeightSync.method to another than adapter"
        )
    config = next(iter(configs.values()))
    plain = type(config)(r=config.r, lora_alpha=config.lora_alpha) if hasattr(config, "lora_alpha") else None
    told = _OF_PLAIN_LORA | _SAYS_NOTHING
    more = [
        name
        for name, value in config.to_dict().items()
        if plain is not None and name not in told and value and value != getattr(plain, name, None)
    ]
    if moves_base(policy) is not None:  # servers have the model as it was loaded
        more.append("init_lora_weights")
    if plain is None or more:
        what = f"its {', '.join(more)}" if more else f"peft_type {config.peft_type}"
        raise ExportError(
            f"weight export: servers apply a plain LoRA alone and would ignore {what} in silence; leave it out of"
            " model.adapter, or set SGLangEngine.adapters to null, so that merged weights are sent"
        )
    from peft import get_peft_model_state_dict  # a policy with adapters has it

    return {name: tensor.detach() for name, tensor in get_peft_model_state_dict(policy).items()}


def num_bytes(weights: dict[str, Tensor]) -> int:
    """Bytes of all tensors; one that stands under two names counts once."""
    return sum({(tensor.data_ptr(), tensor.nbytes): tensor.nbytes for tensor in weights.values()}.values())


def _adapted_modules(base: Module) -> dict[str, Module]:
    """Outermost modules that peft put in the place of the base model's own, by path."""
    found: dict[str, Module] = {}
    for path, module in base.named_modules():
        inside = any(path.startswith(f"{outer}.") for outer in found)
        if not inside and (hasattr(module, "unload_and_optionally_merge_module") or hasattr(module, "base_layer")):
            found[path] = module
    return found


@torch.no_grad()
def _merged(path: str, module: Module) -> Module:
    own: Any = copy.deepcopy(module)  # merging writes into the base layer
    # peft's safe_merge would round what it adds to the base's dtype, and the sum once more.
    try:
        if hasattr(own, "unload_and_optionally_merge_module"):
            merged: Module = own.unload_and_optionally_merge_module(merge=True, safe_merge=False, adapter_names=None)
        else:
            own.merge(safe_merge=False)
            merged = own.get_base_layer()
    except (RuntimeError, NotImplementedError, ValueError) as error:  # as each of PEFT's methods says it
        raise ExportError(
            f"weight export: the adapter of '{path}' cannot be merged, and so not be sampled from: {error} Change"
            " model.adapter, or of supervised training write the adapter alone (arborist export --adapter)"
        ) from error
    bad = next((name for name, tensor in merged.state_dict().items() if not tensor.isfinite().all()), None)
    if bad is not None:
        raise ExportError(
            f"weight export: the adapters of '{path}' cannot be merged: its {bad} would not be finite; go back to a"
            " checkpoint before they diverged, with a lower learning rate"
        )
    return merged


def _check_ties(ties: dict[str, str], weights: dict[str, Tensor], adapted: dict[str, Module]) -> None:
    for name, source in ties.items() if adapted else ():
        apart = name.rpartition(".")[0] in adapted, source.rpartition(".")[0] in adapted
        if apart == (False, False) or not {name, source} & weights.keys():  # or of another part
            continue
        # One adapter on one of two tied modules drifts away with its first step, equal as they may be now.
        if not all(apart) or not torch.equal(weights[name], weights[source]):
            raise ExportError(
                f"weight export: adapters make '{name}' differ from '{source}', which the base model ties; engines"
                " would load one of them for both: write the adapter alone (arborist export --adapter, SavePretrained"
                " without merge), or train with both left out of its target_modules and modules_to_save, or with"
                " tie_word_embeddings: false in the model's configuration"
            )


def _plain(base: PreTrainedModel) -> PreTrainedModel:
    """A model of the same class without storage: its names, ties and conversions, and no adapter in the way."""
    with torch.device("meta"):
        plain = type(base)(own_config(base))
    plain.all_tied_weights_keys = tied_names(base)
    if hasattr(base, "_weight_conversions"):
        plain._weight_conversions = base._weight_conversions
    return plain
