"""Measures how fast this device is at the kinds of work that plans consist of, for predicted times.

Promises: about a second on a CPU, less on a GPU; nothing of the model is run or changed: its shapes and dtype are used,
on random data; the fastest of a few repeats counts, and on a CPU its time is the thread's own, so that a busy machine
disturbs little. No random generator moves: an engine may be capturing a CUDA graph in another thread, and torch lets
nobody draw from the device's own meanwhile.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional
from transformers import PretrainedConfig, PreTrainedModel

from app.tree.attention.kernels import pick_kernel
from app.tree.model.shape import shape_of
from app.tree.planning.cost import ModelShape
from app.tree.planning.layer_shapes import HeadShape
from app.tree.planning.timing import CPU_RATES, GPU_RATES, Rates


def measure_rates(model: PreTrainedModel, repeats: int = 5) -> Rates:
    """The rates of `model`'s device, for its shapes and its dtype (that of autocast, inside such a context)."""
    parameter = next(model.parameters())
    device, dtype = parameter.device, parameter.dtype
    if torch.is_autocast_enabled(device.type):
        dtype = torch.get_autocast_dtype(device.type)
    return _measure(shape_of(model), device, dtype, repeats)


def device_rates(config: PretrainedConfig, device: str, dtype: str) -> Rates:
    """The same for a model of this configuration that is not there: "cpu" or "cuda", "float32" or "bfloat16"."""
    return _measure(ModelShape.of(config), torch.device(device), getattr(torch, dtype), repeats=5)


def _measure(shape: ModelShape, device: torch.device, dtype: torch.dtype, repeats: int) -> Rates:
    default = GPU_RATES if device.type == "cuda" else CPU_RATES

    def best(run: Callable[[], object]) -> float:
        return _best(run, device, repeats)

    generator = torch.Generator(device).manual_seed(0)

    def drawn(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, device=device, dtype=dtype)

    with torch.no_grad():
        many = 4096 if device.type == "cuda" else 512
        intermediate = max(shape.feed_forward)
        weight = drawn(intermediate, shape.hidden)
        rows = drawn(many, shape.hidden)
        full = best(lambda: functional.linear(rows, weight))
        few = best(lambda: functional.linear(rows[:8], weight))
        each = max(full - few, 0.05 * full) / (many - 8)
        linear = 2.0 * shape.hidden * intermediate / each
        heads = max(shape.attention, key=HeadShape.kept_values)
        q = drawn(1, heads.heads, many, heads.head_dim)
        k, v = drawn(2, 1, heads.key_value_heads, 4 * many, heads.head_dim).unbind()
        kernel = pick_kernel(q, None, None)
        scale = heads.head_dim**-0.5

        def attend(queries: int, keys: int) -> float:
            return best(lambda: kernel.forward(q[:, :, :queries], k[:, :, :keys], v[:, :, :keys], False, None, scale))

        large, small = attend(many, 4 * many), attend(16, 16)
        flops = 4.0 * heads.heads * heads.head_dim * (4 * many * many - 256)
        data = torch.zeros(2**25, device=device)  # far more than caches hold
        adding = best(lambda: data.add_(1.0))
        tiny, other = torch.zeros(16, device=device), torch.zeros(16, device=device)
        launch = best(lambda: [tiny + other for _ in range(32)]) / 32
    return Rates(
        linear=linear,
        attention=flops / max(large - small, 0.05 * large),
        idle_rows=max(0.0, few / each - 8),
        layer=_LAUNCHES_A_LAYER[device.type == "cuda"] * launch,
        call=max(small, default.call / 10) + 6 * launch,
        memory=2 * 4 * len(data) / adding,
    )


_LAUNCHES_A_LAYER = (250, 60)
"""What a decoder layer's forward takes beside matrix products and attention, in times of the smallest operator: about
60 operators (norms, rotary embedding, activations, reshapes), and on a CPU, whose operators are short, the Python
between them (fitted to plans of small chunks)."""


def _best(run: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Seconds of the fastest run after one to warm up; on a CPU this thread's own, where others may have the core."""
    fastest, now = float("inf"), time.perf_counter if device.type == "cuda" else time.thread_time
    for attempt in range(repeats + 1):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        begin = now()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        if attempt:
            fastest = min(fastest, now() - begin)
    return fastest
