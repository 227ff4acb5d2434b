"""What `benchmarks.gpu_suite` checks and measures of hybrid models: scans by kernels, no waiting, Qwen3.5 shapes.

Promises: a package that is not installed leaves its rows out by name, with the reason; where there is no GPU the same
code runs with the torch scan in the kernels' place.
"""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3_5TextConfig

from app.tree import SCAN_PACKAGES, PrefixTree, TreeEngine
from app.tree.states.kernels import TOLERANCE, Kernels, compare, refused_by
from app.tree.states.scans import TORCH, ByWave
from benchmarks.common.failures import described
from benchmarks.common.systems import attach_gradients
from benchmarks.common.workloads import Case

PIECES = (1, 3, 63, 64, 65)
"""Tokens of a piece around what kernels are sensitive to: a convolution's window, a block."""

SHAPES: dict[str, dict[str, Any]] = {
    "4B": {"hidden_size": 2560, "intermediate_size": 9216, "tie_word_embeddings": True},
    "9B": {"tie_word_embeddings": False},
}
"""Qwen3.5: what differs from transformers' default: 32 layers, scans of 32 heads of 128 x 128 in three of four."""

_TOY: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
ANSWERS, SAMPLES, PROMPT = (64, 128, 1024), 8, 16_384


def build(size: str, toy: bool, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    """A Qwen3.5 text model with random weights, in training mode, with zeroed gradients in float32."""
    fields = {**(_TOY if toy else SHAPES[size]), "pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
    config = Qwen3_5TextConfig(**fields, max_position_embeddings=PROMPT + max(ANSWERS))
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=dtype)
    model.train()
    attach_gradients(model)
    return model


def case(answer: int, vocabulary: int, toy: bool) -> Case:
    """One prompt and `SAMPLES` answers of so many tokens, all scored, whose first tokens differ."""
    random, shrink = np.random.default_rng(answer), 64 if toy else 1
    prompt, length = random.integers(0, vocabulary, PROMPT // shrink), max(2, answer // shrink)
    answers = [np.concatenate([[k], random.integers(0, vocabulary, length - 1)]) for k in range(SAMPLES)]
    sequences = tuple(np.concatenate([prompt, one]) for one in answers)
    scored = tuple(np.arange(len(one)) >= len(prompt) for one in sequences)
    return Case(
        f"prompt {len(prompt)}, answers {length}",
        0,
        0,
        "drawn",
        sequences,
        scored,
        random.normal(size=SAMPLES) / (SAMPLES * length),
    )


def check_states(device: torch.device, every: bool = True) -> list[dict[str, Any]]:
    """Kernels against the torch scan in float32, outputs, end states and gradients, by length of the pieces; then that
    a pass of a small model waits for the device once, for its loss. Without `every` those of the suite's own models
    alone: others take minutes to compile."""
    rows: list[dict[str, Any]] = []
    low = torch.empty(0, device=device, dtype=torch.bfloat16)
    for function, package in SCAN_PACKAGES.items():
        scans = ByWave(TORCH)
        if device.type == "cuda":
            refusal = refused_by(device, low.dtype, 128, [function])
            if not every and function != "torch_chunk_gated_delta_rule":
                refusal = "takes minutes to compile: --checks all"
            if refusal is not None:
                rows.append({"function": function, "left_out": refusal, "ok": True})
                continue
            try:
                scans = ByWave(Kernels({function: package.find()}))
            except ValueError as error:
                rows.append({"function": function, "left_out": str(error), "ok": True})
                continue
            except Exception as error:  # installed, and broken
                rows.append({"function": function, "error": described(error), "ok": False})
                continue
        for lengths in ((1,), (3,), (63,), (64,), (65,), PIECES):
            row = {"function": function, "scans": scans.name, "pieces": list(lengths), "limit": TOLERANCE}
            try:
                distances = compare(scans, [function], lengths, (4, 128, 128), low)
                worst = max(distances.values(), key=lambda x: np.nan_to_num(x, nan=np.inf))
                rows.append(row | {"worst": worst, "distances": distances, "ok": bool(worst <= TOLERANCE)})
            except Exception as error:  # a compiler's or a driver's
                rows.append(row | {"error": described(error), "ok": False})
    try:
        return [*rows, _waits(device)]
    except Exception as error:
        return [*rows, {"check": "waits of a pass", "error": described(error), "ok": False}]


def _waits(device: torch.device) -> dict[str, Any]:
    if device.type != "cuda":
        return {"check": "waits of a pass", "left_out": "needs a GPU", "ok": True}
    row: dict[str, Any] = {"check": "waits of a pass", "limit": 1}
    model, one = build("", True, torch.bfloat16, device), case(1024, 512, True)
    try:
        engine = TreeEngine(model, 64, 96, states="fla", self_check=False)
    except ValueError as error:
        return row | {"left_out": str(error), "ok": True}

    def run() -> None:
        tree = PrefixTree.build(one.sequences, one.scored)
        engine.backward(tree, lambda out, _: out.logprobs.square().sum(), batched=True)

    try:
        run()  # kernels are compiled and compared
    except ValueError as error:
        return row | {"left_out": str(error), "ok": True}
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    waits = [f"{one.filename}:{one.lineno}" for one in found if "synchroniz" in str(one.message)]
    return row | {"waits": waits, "ok": len(waits) <= 1}
