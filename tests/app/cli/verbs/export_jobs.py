"""What ranks run in the tests of export: apart from the other jobs, because it imports transformers."""

from __future__ import annotations

import json
from pathlib import Path

import peft
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from app.strategies.checkpoint.checkpoints import pack
from app.strategies.checkpoint.trainer_state import take_apart
from tests.app.strategies.checkpoint.checkpoint_jobs import SECONDS, writer
from tests.app.strategies.zero1_jobs import communicator


def save_language_model(
    path: Path,
    adapters: bool,
    smuggled: dict[str, str] | None = None,
    fields: dict[str, object] | None = None,
    apart: bool = False,
    scores: bool = False,
) -> dict[str, Tensor]:
    """Saves a module with a tiny language model, or one that `scores`, as `policy`, and the weights it computes with.
    `smuggled`: files added
    to its configurations, `fields` to its config.json. `apart`: its output projection is another tensor than its
    embedding, against its configuration."""
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
    if scores:
        config.num_labels, config.pad_token_id = 1, 0
    kind = AutoModelForSequenceClassification if scores else AutoModelForCausalLM
    holder.policy = kind.from_config(config, dtype=torch.bfloat16)
    if apart:
        holder.policy.lm_head.weight = nn.Parameter(-holder.policy.lm_head.weight.detach())
    if not scores:
        holder.policy.generation_config.update(do_sample=True, temperature=0.7)
    if adapters:
        settings = peft.LoraConfig(
            r=4,
            target_modules=["q_proj", "down_proj"],
            init_lora_weights=False,
            task_type="SEQ_CLS" if scores else None,
        )
        holder.policy = peft.get_peft_model(holder.policy, settings)
    save(holder, path, smuggled or {}, fields or {})
    merged = holder.policy.merge_and_unload() if adapters else holder.policy
    return {name: tensor.clone() for name, tensor in merged.state_dict().items()}


def save_routed_model(path: Path) -> dict[str, Tensor]:
    """Saves a module with a tiny mixture of experts in float32 as `policy`; its weights."""
    holder = nn.Module()
    torch.manual_seed(3)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 16}
    experts = {"moe_intermediate_size": 8, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    config = AutoConfig.for_model("glm4_moe", **sizes, **experts, **heads, topk_group=1, first_k_dense_replace=1)
    holder.policy = AutoModelForCausalLM.from_config(config)
    gate = holder.policy.model.layers[1].mlp.gate
    nn.init.normal_(gate.e_score_correction_bias)
    save(holder, path, {}, {})
    return {name: tensor.clone() for name, tensor in holder.policy.state_dict().items()}


def save_large_model(path: Path) -> int:
    """Saves a module with 230 MB of float32 as `policy`; its bytes."""
    holder = nn.Module()
    sizes = {"vocab_size": 512, "hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 14, "head_dim": 64}
    config = AutoConfig.for_model("qwen3", **sizes, num_attention_heads=8, num_key_value_heads=8)
    with torch.device("meta"):
        holder.policy = AutoModelForCausalLM.from_config(config)
    holder.policy.to_empty(device="cpu")
    for number, parameter in enumerate(holder.policy.parameters()):
        parameter.detach().fill_(number)
    save(holder, path, {}, {})
    return sum(parameter.nbytes for parameter in holder.policy.parameters())


def save(holder: nn.Module, path: Path, smuggled: dict[str, str], fields: dict[str, object]) -> None:
    contents, pieces = take_apart({"state_dict": holder.state_dict()}, holder, communicator())
    files = contents["transformers_models"]["policy"]
    files["config.json"] = json.dumps(json.loads(files["config.json"]) | fields)
    files |= smuggled
    saving = writer()
    saving.save(path, pack(contents), pieces)
    saving.wait(SECONDS)
