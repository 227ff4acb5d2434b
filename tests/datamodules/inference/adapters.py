"""Tiny policies with adapters whose effect cannot be overlooked."""

from __future__ import annotations

from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import PreTrainedModel


def with_lora(model: PreTrainedModel, seed: int = 7, **options: Any) -> PeftModel:
    """`model` inside adapters of random weights (peft's own start would leave the outputs as they are)."""
    settings = {
        "r": 4,
        "lora_alpha": 8,
        "target_modules": ["q_proj", "v_proj", "down_proj"],
        "init_lora_weights": False,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return get_peft_model(model, LoraConfig(**(settings | options))).eval()
