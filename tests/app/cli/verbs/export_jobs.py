"""What ranks run in the tests of export: apart from the other jobs, because it imports transformers."""

from __future__ import annotations

import json
from pathlib import Path

import peft
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from app.strategies.checkpoint.checkpoints import pack
from app.strategies.checkpoint.trainer_state import take_apart
from tests.app.strategies.checkpoint.checkpoint_jobs import SECONDS, writer
from tests.app.strategies.zero1_jobs import communicator


def save_language_model(
    path: Path, adapters: bool, smuggled: dict[str, str] | None = None, fields: dict[str, object] | None = None
) -> dict[str, Tensor]:
    """Saves a module with a tiny language model as `policy`, and the weights it computes with. `smuggled`: files added
    to its configurations, `fields` to its config.json."""
    holder = nn.Module()
    torch.manual_seed(3)
    config = AutoConfig.for_model(
        "qwen3",
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        tie_word_embeddings=True,
    )
    holder.policy = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    holder.policy.generation_config.update(do_sample=True, temperature=0.7)
    if adapters:
        settings = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
        holder.policy = peft.get_peft_model(holder.policy, settings)
    contents, pieces = take_apart({"state_dict": holder.state_dict()}, holder, communicator())
    files = contents["transformers_models"]["policy"]
    files["config.json"] = json.dumps(json.loads(files["config.json"]) | (fields or {}))
    files |= smuggled or {}
    saving = writer()
    saving.save(path, pack(contents), pieces)
    saving.wait(SECONDS)
    merged = holder.policy.merge_and_unload() if adapters else holder.policy
    return {name: tensor.clone() for name, tensor in merged.state_dict().items()}
