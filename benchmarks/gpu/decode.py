"""What `benchmarks.gpu_suite` checks and measures of decoding in the trainer's process: with CUDA graphs and without.

Promises: both answer the same requests with the same seeds; a pass before those that are timed captures what they
replay; where there is no GPU the same padded steps run uncaptured.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from benchmarks.common.failures import described, noted
from benchmarks.common.measure import spread
from benchmarks.gpu import hybrids
from benchmarks.gpu.parity import FAMILIES, TINY

BATCHES, PROMPT, REPLY, PASSES = (1, 16, 128), 128, 256, 3
TOLERANCE = 1e-4
"""Of log-probabilities in float32; matrix products must not run in TF32."""


def check_decoding(device: torch.device) -> list[dict[str, Any]]:
    """Log-probabilities and tokens of small float32 models, each with graphs and without, by family."""
    return [_check(name, device) for name in (*FAMILIES, "qwen3_5")]


def _check(name: str, device: torch.device) -> dict[str, Any]:
    row: dict[str, Any] = {"check": f"decoding: {name}", "limit": TOLERANCE}
    try:
        found = []
        for graphs in (False, True):
            # Experts of float32 wait for the device: with null they go on without, and the row says so.
            told = None if graphs and device.type == "cuda" else graphs
            replies, decoding, _ = answers(_small(name, device), told, 24, 60, 24)
            found.append(replies)
        worst = max(float(np.abs(np.array(a[1]) - np.array(b[1])).max()) for a, b in zip(*found, strict=True))
        same = all(a[0] == b[0] for a, b in zip(*found, strict=True))
        done = decoding == "padded" or decoding.endswith("CUDA graphs")
        done |= "waits for the device" in decoding and "num_experts" in FAMILIES.get(name, {})
    except ImportError as error:
        return row | {"left_out": f"for want of the module {error.name or described(error)}", "ok": True}
    except Exception as error:  # a driver's, a kernel's
        return row | {"error": described(error), "ok": False}
    return row | {"decoding": decoding, "worst": worst, "same_tokens": same, "ok": done and same and worst <= TOLERANCE}


def _small(name: str, device: torch.device) -> PreTrainedModel:
    torch.manual_seed(0)
    if name == "qwen3_5":
        return hybrids.build("", True, torch.float32, device).eval()
    config = AutoConfig.for_model(name, **{**TINY, "initializer_range": 0.1}, **FAMILIES[name])
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config).eval()


def add_decoding(
    make: Callable[[], PreTrainedModel], toy: bool, report: dict[str, Any], write: Callable[[], object]
) -> None:
    """Decoding with CUDA graphs and without: rows of `measure_decoding`, in `report`, which is written after each."""
    report["decoding"] = []
    with noted(report["failed"], report["model"]):
        for row in measure_decoding(make().eval(), toy):
            report["decoding"].append(row)
            print(f"\n{json.dumps(row)}", flush=True)
            write()
    write()


def measure_decoding(model: PreTrainedModel, toy: bool) -> Iterator[dict[str, Any]]:
    """Tokens a second of so many requests at a time, with graphs and without; raises where a GPU had no graphs."""
    prompt, reply = (PROMPT // 16, REPLY // 32) if toy else (PROMPT, REPLY)
    for batch in BATCHES:
        row: dict[str, Any] = {"requests": batch, "prompt": prompt, "reply": reply}
        for name, graphs in (("eager", False), ("graphs", True)):
            _, row["decoding"], seconds = answers(model, graphs, batch, prompt, reply, PASSES)
            row[f"{name}_first_s"] = seconds[0]  # captures included
            row[f"{name}_tokens_per_s"] = batch * reply / spread(seconds[1:])["median"]
        row["ratio"] = row["graphs_tokens_per_s"] / row["eager_tokens_per_s"]
        yield row
        if model.device.type == "cuda" and not row["decoding"].endswith("CUDA graphs"):
            raise RuntimeError(f"{batch} requests decode {row['decoding']}")


def answers(
    model: PreTrainedModel, graphs: bool | None, count: int, prompt: int, reply: int, passes: int = 1
) -> tuple[list[tuple[list[int], list[float]]], str, list[float]]:
    """Tokens and log-probabilities of `count` replies to prompts of about so many tokens, how they were decoded, and
    the seconds of each pass."""
    from datamodules.inference.embedded import EmbeddedEngine  # not every image carries what it imports
    from datamodules.inference.protocol import GenerationRequest

    random = np.random.default_rng(0)
    vocabulary = model.get_input_embeddings().num_embeddings
    sizes = random.integers(max(1, prompt // 2), prompt * 3 // 2, count)
    prompts = [random.integers(0, vocabulary, size).tolist() for size in sizes]
    engine = EmbeddedEngine(kv_cache_tokens=count * 2 * (prompt + reply) + 64, cuda_graphs=graphs)
    engine.start(model, version=0, seed=1)
    seconds = []

    async def together(number: int) -> list[Any]:
        requests = [GenerationRequest(one, reply, seed=count * number + k) for k, one in enumerate(prompts)]
        return list(await asyncio.gather(*(engine.generate(one) for one in requests)))

    try:
        for number in range(passes):
            begin = time.perf_counter()
            responses = asyncio.run(together(number))
            seconds.append(time.perf_counter() - begin)
        decoding = engine.health()["decoding"]
    finally:
        engine.close()
    return [(one.tokens, one.logprobs) for one in responses], decoding, seconds
