"""Models the tree engine would compute wrongly, refused by name; and the transformers model inside a PEFT wrapper.

Promises: nothing is run; an error says which layer, setting or input is meant, and what to do.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from torch import nn
from transformers import PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES


def transformers_model(model: Any) -> PreTrainedModel:
    """The model itself, or the one inside a PEFT wrapper, with its adapters in place.

    Raises:
        ValueError: adapters that add tokens or keys of their own to a sequence, which a tree does not carry.
    """
    if not hasattr(model, "get_base_model"):
        return model
    for name, config in model.peft_config.items():
        if config.is_prompt_learning:
            raise ValueError(
                f"PEFT adapter '{name}' ({config.peft_type}) puts tokens or keys of its own before a sequence, which"
                " tree training does not carry; use one inside the layers, such as LoRA"
            )
    return model.get_base_model()


_REFUSED = {
    "zamba2": "its attention layers share one block, which has no layer of its own to keep keys and values for",
    "qwen4_exp_text": "it keeps the last token ids and a dilated convolution's tail beside its states, in line",
    "minimax": "its lightning attention is computed in line, not by a function that a tree can give a state to",
}
"""Model types whose state cannot be carried over a tree, and why."""


def refuse_by_name(model: PreTrainedModel) -> None:
    """Models whose kind is known not to work, whatever their layers look like."""
    config = model.config.get_text_config()
    if config.model_type in _REFUSED:
        raise ValueError(f"{type(model).__name__}: {_REFUSED[config.model_type]}; use another model")
    for name in ("vision_config", "audio_config"):
        if getattr(model.config, name, None) is not None:
            text = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.model_type)
            remedy = "train a text model (...ForCausalLM) with the weights of its language model"
            raise ValueError(
                f"{type(model).__name__} takes images or sound ({name}), and sequences of a tree are text alone; "
                + (remedy if text is None else f"load its language model alone, as {text}.from_pretrained(...) does")
            )


def refuse_unsupported(model: PreTrainedModel, stateful: Collection[int]) -> None:
    """Layers whose state cannot be carried over a tree; `stateful`: those whose state can."""
    config = model.config.get_text_config()
    kinds = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None) or []
    known = {"full_attention", "sliding_attention", "attention", "mlp", "moe"}
    strange = [(i, kind) for i, kind in enumerate(kinds) if kind not in known and i not in stateful]
    if strange:
        raise ValueError(
            f"{type(model).__name__}: layer {strange[0][0]} is '{strange[0][1]}'; tree training needs layers with"
            " attention, or with a state that it can carry from piece to piece"
        )
    if not stateful and not getattr(model, "_supports_attention_backend", False):
        raise ValueError(
            f"{type(model).__name__} does not attend through transformers' attention interface, which tree training"
            " hooks into; use a model that does (Llama, Qwen, Mistral, ...)"
        )
    if getattr(config, "output_router_logits", False):
        raise ValueError("output_router_logits: auxiliary router losses are not supported; set it to False")


def refuse_dropout(model: nn.Module) -> None:
    """Dropout would differ between the runs of one token. Functional dropout shows in the configuration."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Dropout) and module.training and module.p > 0:
            raise ValueError(f"dropout of {module.p} at '{name}' in training mode; set it to 0 or call eval()")
    if not model.training or not isinstance(model, PreTrainedModel):
        return
    for key, rate in model.config.get_text_config().to_dict().items():
        named = ("dropout" in key or key.endswith("pdrop")) and not key.startswith(("classifier", "summary"))
        if named and isinstance(rate, float) and rate > 0:
            raise ValueError(
                f"{key} of {rate} in training mode; set it to 0 in the model's configuration or call eval()"
            )
