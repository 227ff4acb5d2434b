"""Linear layers whose weights bitsandbytes keeps in blocks of 4 bit (NF4: Dettmers et al. 2023, QLoRA), below adapters.

    weight [out, in], dtype  ->  codes uint8 [out in / 2, 1], and beside them one scale for every 64 of them (8 bit
                                 themselves, in blocks of 256)

Promises: what a settled layer computes depends on its input alone, not on mode, device of the moment or whatever ran
before: the weight is read back to the dtype of the hidden states and multiplied, so that a token's output and gradient
are those of a plain layer with the weight `whole_weight` (on a GPU, whose kernel bitsandbytes chooses by the number of
rows, to rounding). Gradients pass for any number of rows: `matmul_4bit` leaves its function of autograd only where no
input asks for one, and runs the same kernels there; the one without gradient, `gemv_4bit`, serves weights packed for
CPUs, which settled ones never are. A settled layer loads what its `state_dict` holds. What would compute otherwise is
refused. bitsandbytes is imported by those who have such layers only.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import BitsAndBytesConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D
from transformers.quantizers.base import get_keys_to_not_convert
from transformers.quantizers.quantizers_utils import should_convert_module

QUANTIZATIONS = ("nf4",)
"""The kinds that are computed exactly; 8 bit of the same package also rounds hidden states, which no tree is exact
to."""
BYTES_EACH = 1 / 2 + 1 / 64 + 4 / (64 * 256)
"""Of an element: its code, and its share of the scales."""
_BESIDE = re.compile(r"(.+\.weight)\.(?:absmax|quant_map|nested_absmax|nested_quant_map|quant_state\..+)")
_SETTLED = "_settled"  # attribute of layers


def quantised_loading(kind: str, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    """Arguments of `from_pretrained` that keep all linear layers but the output projection so.

    Raises:
        ValueError: the dtype has no kernels; bitsandbytes is not installed.
    """
    if dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(f"4 bit are read back to float32 or bfloat16, not to {dtype}; choose one of them")
    try:
        import bitsandbytes  # noqa: F401
    except ImportError as error:
        raise ValueError("4 bit need the package bitsandbytes: pip install -e '.[qlora]'") from error
    config = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type=kind, bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=dtype
    )
    return {"quantization_config": config, "device_map": {"": device}}


def quantised_layers(module: nn.Module) -> dict[str, Any]:
    """The layers in `module` whose own weights are in 4 bit, by name; those that adapters are put on, not what PEFT
    puts there."""
    return {name: part for name, part in module.named_modules() if _class_of_weight(part) == "Params4bit"}


def settle_quantised(model: nn.Module, kind: str | None = None) -> None:
    """Makes all layers in 4 bit compute and load as this file promises; once is enough. `kind`: what they have to be.

    Raises:
        ValueError: layers that do not, and what to do.
    """
    coarse = [name for name, part in model.named_modules() if _class_of_weight(part) == "Int8Params"]
    if coarse:
        raise ValueError(
            f"'{coarse[0]}' is in 8 bit, where hidden states are rounded too, by what else runs beside a token: no tree"
            " computes the same; load the model in 4 bit (nf4) or without quantization"
        )
    head = model.get_output_embeddings() if isinstance(model, PreTrainedModel) else None
    for name, layer in quantised_layers(model).items():
        weight = layer.weight
        if (
            weight.quant_state is None
            or weight.dtype != torch.uint8
            or weight.quant_type != (kind or weight.quant_type)
        ):
            stored = "nothing yet" if weight.quant_state is None else f"{weight.quant_type}, stored as {weight.dtype}"
            raise ValueError(f"'{name}' is in 4 bit as {stored}; load it as {kind or 'nf4'}, stored as torch.uint8")
        if layer is head:
            raise ValueError(f"the output projection '{name}' is in 4 bit; keep it as it is (llm_int8_skip_modules)")
        if name.endswith("indexer.weights_proj"):  # which casts what it is given to the dtype of its weight
            raise ValueError(
                f"'{name}' is in 4 bit, and {type(model).__name__} would round hidden states to the integers its codes"
                " are stored as; use the model without quantization, or keep it and the output projection as they are"
                " (llm_int8_skip_modules)"
            )
        if getattr(layer, "source_cls", None) is Conv1D:
            raise ValueError(f"'{name}' was transformers' Conv1D, transposed in 4 bit; use a model of linear layers")
        if getattr(weight.quant_state, "packing_format_for_cpu", False):
            raise ValueError(
                f"'{name}' was rounded to bfloat16 by a pass in evaluation mode on this CPU; load it again"
            )
        if _SETTLED in vars(layer):
            continue
        # In evaluation mode on some CPUs it would be packed in place, its scales rounded to bfloat16 for good.
        layer.support_avx512bf16_for_cpu = False
        layer.compute_dtype, layer.compute_type_is_set = None, True  # that of the hidden states, whatever it is
        layer.register_load_state_dict_pre_hook(_take_scales)
        setattr(layer, _SETTLED, True)
    if quantised_layers(model) and next(model.parameters()).dtype == torch.float64:
        raise ValueError(
            "layers in 4 bit have no float64: bitsandbytes would compute on memory that is not initialised"
        )


def whole_weight(layer: Any) -> Tensor:
    """[out, in] in the model's dtype: what the layer multiplies by."""
    return _read_back(layer.weight.data, layer.weight.quant_state)


def whole_weights(model: nn.Module) -> Callable[[Iterable[str]], dict[str, Tensor]]:
    """Gets what `model.state_dict()` has under names of `plain_names`, in CPU memory of its own, 4 bit read back."""
    layers = {f"{name}.weight": layer for name, layer in quantised_layers(model).items()}
    state = model.state_dict()

    def fetch(names: Iterable[str]) -> dict[str, Tensor]:
        return {
            name: whole_weight(layers[name]).cpu() if name in layers else state[name].detach().to("cpu", copy=True)
            for name in names
        }

    return fetch


def plain_names(names: Iterable[str]) -> Iterator[str]:
    """Of names in a `state_dict`, those that the model has without quantization, too."""
    return (name for name in names if scaled_by(name) is None)


def scaled_by(name: str) -> str | None:
    """The weight beside which a `state_dict` has `name`, where that belongs to a weight in 4 bit."""
    found = _BESIDE.fullmatch(name)
    return found[1] if found else None


class SavedWeight:
    """A weight in 4 bit as files hold it, without its codes.

    Args:
        beside: what is beside it, by the name behind that of the weight.

    Attributes:
        shape, dtype: of the weight that it stands for.

    Raises:
        ValueError: bitsandbytes is not installed, or `beside` is none of its.
    """

    def __init__(self, beside: dict[str, Tensor]) -> None:
        try:
            from bitsandbytes.functional import QuantState
        except ImportError as error:
            raise ValueError("weights in 4 bit need the package bitsandbytes: pip install -e '.[qlora]'") from error
        self._state = _state_from(QuantState, beside, torch.device("cpu"))
        self.shape, self.dtype = self._state.shape, self._state.dtype

    def read_back(self, codes: Tensor) -> Tensor:
        """uint8 [out in / 2, 1] -> [out, in] in `dtype`."""
        return _read_back(codes, self._state)


def scales(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """What is beside the codes and no parameter or buffer, by name: differs from weight to weight."""
    for name, layer in quantised_layers(module).items():
        state = layer.weight.quant_state
        yield f"{name}.weight.absmax", state.absmax
        if state.nested:
            yield f"{name}.weight.nested_absmax", state.state2.absmax
            yield f"{name}.weight.nested_offset", state.offset


def elements(parameter: Tensor) -> int:
    """How many numbers a parameter stands for."""
    state = getattr(parameter, "quant_state", None)
    return parameter.numel() if state is None else state.shape.numel()


def quantised_bytes(model: PreTrainedModel, element: int) -> int:
    """Of the weights of `model`, which may be without storage, once its linear layers are in 4 bit; `element`: of one
    of the others."""
    kept = get_keys_to_not_convert(model)
    linear = {
        id(part.weight): part.weight.numel()
        for name, part in model.named_modules()
        if type(part) is nn.Linear and should_convert_module(name, kept)
    }
    return sum(int(linear[id(p)] * BYTES_EACH) if id(p) in linear else p.numel() * element for p in model.parameters())


def cast_quantised(module: nn.Module, dtype: torch.dtype) -> None:
    """Weights in 4 bit stand for numbers of this dtype from now on."""
    for layer in quantised_layers(module).values():
        layer.weight.quant_state.dtype = dtype


def _class_of_weight(module: nn.Module) -> str:
    return type(module._parameters.get("weight")).__name__


def _read_back(codes: Tensor, state: Any) -> Tensor:
    from bitsandbytes.functional import dequantize_4bit

    weight: Tensor = dequantize_4bit(codes, state)
    return weight


def _state_from(kind: Any, beside: dict[str, Tensor], device: torch.device) -> Any:
    try:
        state = kind.from_dict(dict(beside), device)
    except Exception as error:  # bytes that are cut or edited fail anywhere in it
        raise ValueError(f"{sorted(beside)} describe no weight in 4 bit") from error
    if state.shape is None or len(state.shape) != 2 or state.quant_type not in QUANTIZATIONS:
        raise ValueError(f"weights as {state.quant_type} of shape {state.shape} are not read, only matrices as nf4")
    return state


def _take_scales(
    layer: Any,
    state_dict: dict[str, Any],
    prefix: str,
    metadata: Any,
    strict: bool,
    missing: list[str],
    unexpected: list[str],
    errors: list[str],
) -> None:
    """Before `layer` loads its codes: what is beside them. bitsandbytes writes it and does not read it."""
    start, weight = f"{prefix}weight.", layer.weight
    beside = {name.removeprefix(start): state_dict.pop(name) for name in list(state_dict) if name.startswith(start)}
    codes = state_dict.get(f"{prefix}weight")
    if codes is None or codes.shape != weight.shape:
        return  # torch says so
    if not beside:
        missing.append(f"{start}absmax")
        return
    try:
        state = _state_from(type(weight.quant_state), beside, weight.device)
    except ValueError as error:
        errors.append(f"{prefix}weight: {error}")
        return
    if state.shape != weight.quant_state.shape:
        errors.append(f"size mismatch for {prefix}weight: {tuple(state.shape)}, not {tuple(weight.quant_state.shape)}")
        return
    state.dtype = weight.quant_state.dtype
    weight.quant_state = layer.quant_state = state
