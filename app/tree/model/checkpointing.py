"""Activation checkpointing of single forwards: layers keep their inputs and run again in backward.

Promises: works through transformers' own checkpointing layers, in training and evaluation mode alike, and leaves every
flag as it was; a model that cannot be checkpointed safely is said to be so, never changed in silence.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from app.tree.model.language import language_model

_FLAGS = ("gradient_checkpointing", "_gradient_checkpointing_func", "training")


def checkpointable(model: PreTrainedModel) -> bool:
    """Whether `checkpointed` saves memory on this model without changing what it computes.

    It does not where layers are checkpointed by the user's own setting already, where a layer is not of transformers'
    checkpointing kind, and where the configuration has dropout or a router's noise: a layer checkpoints in training
    mode only, and switching that on in evaluation mode would switch dropout on.
    """
    layers = _layers(model)
    config = model.config.get_text_config()
    dropout = any(
        isinstance(rate, float) and rate > 0
        for key, rate in config.to_dict().items()
        if "dropout" in key or "jitter" in key or key.endswith("pdrop")
    )
    return (
        len(layers) == config.num_hidden_layers > 1
        and not dropout
        and not any(layer.gradient_checkpointing and layer.training for layer in layers)
    )


def checkpoints_itself(model: PreTrainedModel) -> bool:
    """Whether the user's own setting checkpoints the model's layers."""
    return any(layer.gradient_checkpointing and layer.training for layer in _layers(model))


def refuse_reentrant(model: PreTrainedModel) -> None:
    """Raises ValueError where the user's own setting runs layers without a graph first: what one gives beside its
    output, as the states that branches continue, would have no gradient."""
    for layer in _layers(model):
        options = getattr(getattr(layer, "_gradient_checkpointing_func", None), "keywords", {})
        if layer.gradient_checkpointing and layer.training and options.get("use_reentrant"):
            raise ValueError(
                f"{type(model).__name__} checkpoints its layers with use_reentrant=True, in which states that branches"
                " continue have no gradient; set use_reentrant=False, or leave checkpointing to TreeEngine"
            )


@contextmanager
def checkpointed(model: PreTrainedModel, on: bool) -> Iterator[None]:
    """Forwards of `model` inside are checkpointed layer by layer when `on`; their backward may come later."""
    before: list[tuple[Any, dict[str, Any]]] = []
    try:
        for layer in _layers(model) if on else []:
            before.append((layer, {name: layer.__dict__[name] for name in _FLAGS if name in layer.__dict__}))
            layer.gradient_checkpointing = True
            layer._gradient_checkpointing_func = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)
            layer.training = True  # of this module alone: its submodules stay in their modes
        yield
    finally:
        for layer, flags in before:
            for name in _FLAGS:
                layer.__dict__.pop(name, None)
            layer.__dict__.update(flags)


def _layers(model: PreTrainedModel) -> list[Any]:
    return [module for module in language_model(model).modules() if isinstance(module, GradientCheckpointingLayer)]
