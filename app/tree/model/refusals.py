"""Models the tree engine would compute wrongly, refused by name; and the transformers model inside a PEFT wrapper.

Promises: nothing is run; an error says which layer, setting or input is meant, and what to do.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterable
from typing import Any

import numpy as np
import transformers
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PretrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from app.tree.model.language import language_model
from app.tree.model.pictures import tower_parameters
from app.tree.model.positions import refuse_counts
from app.tree.model.sight import KIND_ARGUMENTS, sight_of
from app.tree.prefix_tree import PrefixTree


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


_BY_DISTANCE = (
    "its scores have a bias by the distance of two tokens, made of hidden states and trained (position_bias), of which"
    " no backend of attention gives the gradient"
)
_REFUSED = {
    "zamba2": "its attention layers share one block, which has no layer of its own to keep keys and values for",
    "minimax": "its lightning attention is computed in line, not by a function that a tree can give a state to",
    "mamba2": "it has no layer of attention, by whose heads and keys memory and time are counted",
    "paligemma": "every token of its prompt sees all of the prompt, so a prefix depends on what follows it",
    "modernbert-decoder": "a part of it stands between its layers and its output projection, which a tree leaves out",
    "llama4": "its forward fails in transformers, for want of outputs of pictures; its text model trains, a"
    " Llama4ForCausalLM, which reads the same files and writes its own (from_pretrained, save_pretrained)",
    **dict.fromkeys(("inkling_text", "inkling2_text", "inkling2_loop_text"), _BY_DISTANCE),
    "mllama": "its pictures enter through layers of cross-attention, which have no place in a sequence",
}
"""Model types that cannot run over a tree, and why."""
_UNSEEN = {
    "gemma4_unified": "its forward lets placeholders of a picture see each other in every layer, and its generate() in"
    " those with a window alone, so that replies would be of another model than the one that is trained",
    "ovis2": "it puts features in the place of the tokens around a picture as well (visual_indicator_token_ids), and a"
    " tree gives those of its rows alone",
}
"""Model types that cannot be shown pictures, and why."""


def refuse_by_name(name: str, whole: PretrainedConfig) -> None:
    """Models whose kind is known not to work, whatever their layers look like. `name`: for the message; `whole`: the
    model's configuration."""
    config = whole.get_text_config()
    for kind in (whole.model_type, config.model_type):
        if kind in _REFUSED:
            raise ValueError(f"{name}: {_REFUSED[kind]}; use another model")
    if getattr(whole, "audio_config", None) is not None and getattr(whole, "vision_config", None) is None:
        text = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.model_type, "...ForCausalLM")
        raise ValueError(
            f"{name} takes sound (audio_config), and sequences of a tree are text and pictures; train a text model"
            f" ({text}) that was given the weights of its language model"
        )


def refuse_pictures(model: PreTrainedModel, processor: Any | None) -> None:
    """Models that cannot take pictures from a tree, and what is missing to do so."""
    name, body = type(model).__name__, model.base_model
    if getattr(model.config, "vision_config", None) is None:
        raise ValueError(f"pictures: {name} takes text alone; use a model with a vision_config")
    accepted = inspect.signature(body.forward).parameters
    if not hasattr(body, "get_image_features") or "mm_encoder_outputs" not in accepted:
        raise ValueError(
            f"pictures: {name} takes no features of pictures that were made before (mm_encoder_outputs), as models of"
            f" transformers 5.18 and newer do (this is {transformers.__version__}); use a newer one, or another model"
        )
    if getattr(model.config, "image_token_id", None) is None:
        raise ValueError(
            f"pictures: the configuration of {name} names no image_token_id, the placeholder of their rows; set it to"
            " the tokenizer's, or use another model"
        )
    if model.config.model_type in _UNSEEN:
        raise ValueError(f"pictures: {name}: {_UNSEEN[model.config.model_type]}; use another model, or text alone")
    strange = [one for one in accepted if one.endswith("token_type_ids") and one not in KIND_ARGUMENTS]
    if strange:
        raise ValueError(
            f"pictures: {name} sends tokens of pictures another way than text by {strange[0]}, which a tree does not"
            " give; use another model, or text alone"
        )
    refuse_counts(model)
    sight_of(model)
    if processor is None:
        raise ValueError(
            "pictures: TreeEngine needs image_processor=picture_processor(directory), or whatever else makes arguments"
            " of pixels for the model"
        )
    if any(isinstance(parameter, DTensor) for parameter in tower_parameters(model)):
        raise ValueError(
            f"pictures: parameters of the tower of {name} are sharded, and ranks run it on pictures of their own; shard"
            " the layers of its language model alone (model.get_decoder()), as DTAStrategy(shard_parameters=True) does"
        )


def refuse_group(model: PreTrainedModel, alone: Iterable[nn.Module], on_mismatch: str) -> None:
    """What ranks cannot run together; `alone`: parts that look along sequences, of which each rank has some rows."""
    if on_mismatch != "error":
        raise ValueError(
            f"on_mismatch={on_mismatch!r}: ranks of a group share the rows of tree execution alone; set"
            " on_mismatch='error', or let each rank run a part of its own"
        )
    for part in alone:
        raise ValueError(
            f"{type(model).__name__}: layer {part.layer_idx} ({type(part).__name__}) looks at tokens in a row, which"
            " ranks of a group cannot do together; let each rank run a part of its own (group=None)"
        )


def refuse_tokens(model: PreTrainedModel, tree: PrefixTree) -> None:
    """Ids beyond the vocabulary; and placeholders that belong to no picture, such as one that was sampled: beside
    pictures a model takes every one for a row of theirs."""
    vocabulary = model.get_input_embeddings().weight.shape[0]
    text = np.where(tree.picture_rows < 0, tree.tokens, 0) if tree.pictures else tree.tokens
    if tree.num_tokens and int(text.max()) >= vocabulary:
        i, position, token = _find_token(tree, int(np.argmax(text >= vocabulary)))
        raise ValueError(
            f"sequences[{i}]: token id {token} at position {position} is outside the model's vocabulary of"
            f" {vocabulary}; use the tokenizer that belongs to the model"
        )
    ids = [getattr(model.config, name, None) for name in ("image_token_id", "video_token_id")] if tree.pictures else []
    found = np.isin(tree.tokens, [one for one in ids if one is not None])
    if found.any():
        i, position, token = _find_token(tree, int(found.argmax()))
        raise ValueError(
            f"sequences[{i}]: token id {token} at position {position} is a placeholder that belongs to no picture; say"
            " so in images, or leave the sequence out"
        )


def refuse_lengths(model: PreTrainedModel, tree: PrefixTree) -> None:
    """Sequences longer than the model's positions; and those for which it would rotate all tokens otherwise than for
    shorter ones (LongRoPE), so that a prefix would depend on what follows it."""
    if not tree.num_sequences:
        return
    config = model.config.get_text_config()
    i = int(tree.sequence_length.argmax())
    length = int(tree.sequence_length[i])
    limit = getattr(config, "max_position_embeddings", None)
    if limit is not None and length > limit:
        raise ValueError(
            f"sequences[{i}] has {length} tokens, more than the model's max_position_embeddings of {limit}; shorten it"
            " or raise the model's limit"
        )
    limit = _long_rope(config)
    if limit is not None and length > limit:
        raise ValueError(
            f"sequences[{i}] has {length} tokens, and beyond original_max_position_embeddings of {limit} this model"
            " rotates every token of a sequence by other angles (rope_type 'longrope'), so that what a prefix is"
            f" depends on what follows it; shorten sequences to {limit} tokens, or use another model"
        )


def most_tokens(config: PretrainedConfig) -> int:
    """Of a sequence that trains, by the configuration of a model or of its text."""
    text = config.get_text_config()
    limits = text.max_position_embeddings, _long_rope(text), _in_masks(text)
    return min(limit for limit in limits if limit is not None)


def _long_rope(config: PretrainedConfig) -> int | None:
    """Tokens from which on a model with LongRoPE rotates all of a sequence otherwise; None for others."""
    rope = getattr(config, "rope_parameters", None) or {}
    parts = [rope, *(one for one in rope.values() if isinstance(one, dict))]
    limits = [part.get("original_max_position_embeddings") for part in parts if part.get("rope_type") == "longrope"]
    return min((limit for limit in limits if limit is not None), default=None)


def _in_masks(config: PretrainedConfig) -> int | None:
    """Tokens up to which no window counts that layers do not pass to attention: from the last, nothing is predicted."""
    kinds, window = getattr(config, "layer_types", None), getattr(config, "sliding_window", None)
    windowed = config.model_type == "phimoe" and not kinds
    windowed |= config.model_type in ("phimoe", "qwen2_moe") and "sliding_attention" in (kinds or ())
    return window + 1 if windowed and window is not None else None


def _find_token(tree: PrefixTree, token: int) -> tuple[int, int, int]:
    """A sequence that holds a tree token, with the position and the id."""
    for i in range(tree.num_sequences):
        found = np.flatnonzero(tree.sequence_tokens([i]) == token)
        if len(found):
            return i, int(found[0]), int(tree.tokens[token])
    raise AssertionError("every tree token belongs to a sequence")


def refuse_unsupported(model: PreTrainedModel, stateful: Collection[int], types: Collection[str]) -> None:
    """Layers whose state cannot be carried over a tree; `stateful`: those whose state can; `types`: of layers that can
    be run in this model, beside those of all."""
    config = model.config.get_text_config()
    kinds = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None) or []
    known = {"full_attention", "sliding_attention", "chunked_attention", "attention", "mlp", "moe", *types}
    strange = [(i, kind) for i, kind in enumerate(kinds) if kind not in known and i not in stateful]
    if strange:
        raise ValueError(
            f"{type(model).__name__}: layer {strange[0][0]} is '{strange[0][1]}'; tree training needs layers with"
            " attention, or with a state that it can carry from piece to piece"
        )
    if (
        not stateful
        and not types
        and not any(getattr(part, "_supports_attention_backend", False) for part in (model, language_model(model)))
    ):
        raise ValueError(
            f"{type(model).__name__} does not attend through transformers' attention interface, which tree training"
            " hooks into; use a model that does (Llama, Qwen, Mistral, ...)"
        )
    if getattr(config, "output_router_logits", False):
        raise ValueError("output_router_logits: auxiliary router losses are not supported; set it to False")


_NOT_IN_LAYERS = ("classifier", "summary")
_NOISE = ("dropout", "pdrop", "layerdrop", "drop_path", "jitter")


def refuse_dropout(model: nn.Module) -> None:
    """Dropout, of numbers or of layers, and the noise of a router would differ between the runs of one token.
    Functional ones show in the configuration."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Dropout) and module.training and module.p > 0:
            raise ValueError(f"dropout of {module.p} at '{name}' in training mode; set it to 0 or call eval()")
    if not model.training or not isinstance(model, PreTrainedModel):
        return
    vision = getattr(model.config, "vision_config", None)
    rates = [part.to_dict() for part in (model.config.get_text_config(), vision) if part is not None]
    for key, rate in (item for part in rates for item in part.items()):
        named = any(noise in key for noise in _NOISE) and not key.startswith(_NOT_IN_LAYERS)
        if named and isinstance(rate, float) and rate > 0:
            raise ValueError(
                f"{key} of {rate} in training mode; set it to 0 in the model's configuration or call eval()"
            )
