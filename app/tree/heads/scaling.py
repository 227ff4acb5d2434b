"""What a model's own forward does to the logits of its output projection.

Promises: a number of the configuration counts where that forward reads it alone: Granite divides its logits by
`logits_scaling`, and LLaVA-NeXT around a Granite, whose configuration says it as well, does not.
"""

from __future__ import annotations

import inspect
from typing import Any

from transformers import PreTrainedModel


def logits_scaling(model: PreTrainedModel) -> tuple[float | None, float | None, float | None]:
    """What its logits are divided by, what they are multiplied by then, and what caps them at last."""
    config = model.config.get_text_config()
    scaling, times = _read(model, config, "logits_scaling"), config.model_type == "hyperclovax"
    own = [scaling if times else None, _read(model, config, "lm_head_multiplier")]  # HyperCLOVAX, Falcon-H1
    own.append(_read(model, config, "output_multiplier"))  # Muse
    own.append(getattr(model, "logit_scale", None))  # Cohere; not Aya Vision, whose configuration says it as well
    multiply = next((value for value in own if value is not None), None)
    divide = None if times else scaling  # Granite
    return divide, multiply, _read(model, config, "final_logit_softcapping")  # Gemma 2


def _read(model: PreTrainedModel, config: Any, name: str) -> float | None:
    """A number of the configuration; None where no forward of the model's class, or of what it is made of, names it."""
    forwards = [inspect.unwrap(vars(kind)["forward"]) for kind in type(model).__mro__ if "forward" in vars(kind)]
    named = any(name in one.__code__.co_names for one in forwards if hasattr(one, "__code__"))
    found: float | None = getattr(config, name, None) if named else None
    return found
