"""What `benchmarks.gpu_suite` checks before it measures: the torch on this machine, attention kernels, gradients.

Promises: inputs are drawn fresh from the seed; truths are computed in float64 on the CPU by plain torch, without the
code under test; a NaN is never within a tolerance.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoConfig, AutoModelForCausalLM

from app.tree import TreeEngine
from app.tree.attention import BACKENDS, flash, kernels, packages
from app.tree.attention.chunk_attention import LayerCall
from app.tree.model.projections import add_product
from benchmarks.common.failures import described
from benchmarks.common.systems import NAMES, Settings, gradient_error, gradients, make_systems, qwen3
from benchmarks.common.workloads import Case

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
EXACT = {torch.float64: 1e-12, torch.float32: 1e-5}
"""Largest relative error (norm) of kernels in these dtypes; matrix products must not run in TF32."""
HALF_KERNEL, HALF_MODEL = 2.0, 1.1
"""Low precision: error against the float64 truth, over that of torch's own dense attention (one call, so it rounds
once where parts round several times) and of the dense model."""
TINY = {"vocab_size": 512, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
TINY |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 1024}
TINY |= {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {},
    "mistral": {"sliding_window": 70},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64},
}
SHAPES = ((4, 4, 64), (8, 2, 128), (6, 1, 64))
LENGTHS = ((37, 50), (130, 391))


def check_torch(device: torch.device) -> list[dict[str, Any]]:
    """`grad_dtype`, and the ATen operators the kernels of this device call."""
    found = [{"check": "grad_dtype: float32 gradients of bf16 parameters", **_attempt(lambda: _grad_dtype(device))}]
    found.append({"check": "addmm.dtype_out: a product of bf16 added in float32", **_attempt(lambda: _product(device))})
    source = inspect.getsource(kernels) + inspect.getsource(flash)
    for name in sorted(set(re.findall(r"_aten\.(\w+)", source))):
        if name.endswith(("_for_cpu", "_for_cpu_backward")) == (device.type == "cpu"):
            found.append({"check": f"aten::{name}", **_attempt(lambda name=name: _operator(name))})
    return found


def _attempt(check: Callable[[], Any]) -> dict[str, Any]:
    try:
        check()
    except Exception as error:  # whatever this torch raises is the finding
        return {"ok": False, "error": described(error)}
    return {"ok": True}


def _grad_dtype(device: torch.device) -> None:
    """Two backward passes accumulate into a float32 view of a flat buffer."""
    layer = nn.Linear(8, 8, bias=False, dtype=torch.bfloat16, device=device)
    flat = torch.zeros(64, device=device)
    layer.weight.grad_dtype = torch.float32
    layer.weight.grad = flat.view(8, 8)
    for _ in range(2):
        layer(torch.ones(3, 8, dtype=torch.bfloat16, device=device)).sum().backward()
    if layer.weight.grad.dtype != torch.float32 or layer.weight.grad.data_ptr() != flat.data_ptr():
        raise RuntimeError(f"gradient is {layer.weight.grad.dtype} outside the buffer")
    if not bool((flat == 6).all()):
        raise RuntimeError(f"gradients add up to {flat[0].item()}, expected 6")


def _product(device: torch.device) -> None:
    """In place, as layers and heads sum their weights' gradients; CPUs have no product of mixed dtypes."""
    for rows, columns, inner in ((64, 64, 64), (1, 64, 64), (64, 64, 1)):  # a gate's only row, a chunk of one token
        one = torch.ones(inner, rows, dtype=torch.bfloat16 if device.type == "cuda" else torch.float32, device=device)
        total = torch.ones(rows, columns, device=device)
        add_product(total, one, one.new_ones(inner, columns))
        if not bool((total == 1 + inner).all()):
            raise RuntimeError(f"1 + {inner} is {total.min().item()} to {total.max().item()}, of [{rows}, {columns}]")


def _operator(name: str) -> None:
    if not hasattr(torch.ops.aten, name):
        raise RuntimeError("this torch has no such operator")


def check_kernels(device: torch.device) -> list[dict[str, Any]]:
    """Every kernel that serves this device, in every dtype it serves: parts of one softmax, merged, against truth."""
    rows = []
    for dtype in DTYPES:
        for kernel, own in _served(device, dtype):
            for heads, key_heads, width in SHAPES:
                for n, path in LENGTHS:
                    row = {
                        "kernel": type(kernel).__name__,
                        "dtype": str(dtype).removeprefix("torch."),
                        "part": own,
                        "shape": f"{heads}/{key_heads} heads of {width}, {n} queries over {path} + {n} keys",
                    }
                    try:
                        rows.append(row | _kernel(kernel, dtype, device, own, heads, key_heads, width, n, path))
                    except Exception as error:
                        rows.append(row | {"ok": False, "error": described(error)})
    return rows


def _served(device: torch.device, dtype: torch.dtype) -> Iterator[tuple[Any, str]]:
    """(kernel, what the chunk sees of itself) for what `pick_kernel` would choose, for the plain kernel, which serves
    everything, and for the packed squares of the `flash` backend."""
    q = torch.empty(1, 1, 1, 64, dtype=dtype, device=device)
    for own in ("causal", "masked"):
        chosen = kernels.pick_kernel(q, q.new_zeros(1, 1) if own == "masked" else None)
        yield chosen, own
        if not isinstance(chosen, kernels.Math):
            yield kernels.Math(), own
    if kernels.flash_refusal(device, dtype, q.shape[-1]) is None:
        yield kernels.pick_kernel(q, None), "squares"
        yield packages.CudnnKernel(), "causal"
        for package in packages.PACKAGES:
            if package.missing(device) is None:
                yield package.dense(), "causal"
                yield package.dense(), "squares"


def _kernel(
    kernel: Any,
    dtype: torch.dtype,
    device: torch.device,
    part: str,
    heads: int,
    key_heads: int,
    width: int,
    n: int,
    path: int,
) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(n * heads + width)
    sizes = ((n, heads), (path + n, key_heads), (path + n, key_heads), (n, heads))
    drawn = [torch.randn(1, a, b, width, generator=generator).to(dtype).transpose(1, 2) for a, b in sizes]
    own = torch.ones(n, n, dtype=torch.bool).tril()
    if part == "masked":  # a branch that does not see the one before it
        own[n // 2 :, n // 4 : n // 2] = False
    if part == "squares":  # two branches
        own[n // 3 :, : n // 3] = False
    own_kernel, bounds = kernel, [0, n // 3, n]
    if part == "squares":
        packed = isinstance(kernel, packages.PackageKernel)
        own_kernel = kernel.within(bounds, device) if packed else flash.FlashSquares(bounds, None, device)
    visible = torch.cat([torch.ones(n, path, dtype=torch.bool), own], 1)
    scale = width**-0.5

    *exact, grad = [x.double() for x in drawn]
    truth = _dense(*exact, grad, visible, scale)
    there = [x.to(device) for x in drawn]
    mask = own.to(device) if part == "masked" else None
    got = _by_parts((kernel, own_kernel), *there, path, mask, scale)
    errors = [_error(a, b) for a, b in zip(got, truth)]
    row: dict[str, Any] = {"errors": dict(zip(("out", "grad_q", "grad_k", "grad_v"), errors))}
    if dtype in EXACT:
        return row | {"limit": EXACT[dtype], "ok": all(error <= EXACT[dtype] for error in errors)}
    dense = _dense(*there, visible.to(device), scale)
    own_errors = [_error(a, b) for a, b in zip(dense, truth)]
    ratios = [error / other for error, other in zip(errors, own_errors)]
    return row | {"over_dense": ratios, "limit": HALF_KERNEL, "ok": all(ratio <= HALF_KERNEL for ratio in ratios)}


def _dense(q: Tensor, k: Tensor, v: Tensor, grad: Tensor, visible: Tensor, scale: float) -> list[Tensor]:
    """Output and gradients of torch's own attention under a bool mask."""
    leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    repeat = q.shape[1] // k.shape[1]
    keys, values = (x.repeat_interleave(repeat, 1) for x in leaves[1:])
    out = functional.scaled_dot_product_attention(leaves[0], keys, values, attn_mask=visible, scale=scale)
    out.backward(grad)
    return [out.detach(), *(x.grad for x in leaves)]


def _by_parts(
    used: tuple[Any, Any], q: Tensor, k: Tensor, v: Tensor, grad: Tensor, path: int, own: Tensor | None, scale: float
) -> list[Tensor]:
    """Output and gradients from two calls, over the path and over the chunk itself, by a kernel each."""
    wide = torch.promote_types(torch.float32, q.dtype)
    mask = None if own is None else torch.zeros_like(own, dtype=q.dtype).masked_fill(~own, float("-inf"))
    parts = ((slice(0, path), False, None), (slice(path, None), own is None, mask))
    forwards = [
        kernel.forward(q, k[:, :, at], v[:, :, at], causal, m, scale) for kernel, (at, causal, m) in zip(used, parts)
    ]
    lse = torch.logsumexp(torch.stack([f[1].to(wide) for f in forwards]), 0)
    out = sum(f[0].to(wide) * torch.exp(f[1].to(wide) - lse).unsqueeze(-1) for f in forwards).to(q.dtype)
    grad_q = torch.zeros_like(q, dtype=wide)
    grad_k, grad_v = torch.zeros_like(k, dtype=wide), torch.zeros_like(v, dtype=wide)
    for kernel, (at, causal, m), (_, _, saved) in zip(used, parts, forwards):
        part = kernel.backward(
            grad.contiguous(), q, k[:, :, at], v[:, :, at], out, lse.contiguous(), saved, causal, m, scale
        )
        grad_q += part[0]
        grad_k[:, :, at] += part[1]
        grad_v[:, :, at] += part[2]
    return [out, grad_q, grad_k, grad_v]


def _error(got: Tensor, truth: Tensor) -> float:
    got = got.detach().cpu().double()
    return float((got - truth).norm() / truth.norm())


def check_margin(device: torch.device, seeds: int) -> list[dict[str, Any]]:
    """The engine's own self-check in bf16 on models that are right: how far tree and dense execution differ, in times
    of what dense execution differs from itself under rounding. Near `margin` a healthy run would be stopped."""
    rows = []
    for name, options in FAMILIES.items():
        for seed in range(seeds):
            row: dict[str, Any] = {"family": name, "seed": seed}
            try:
                rows.append(row | _margin(device, name, options, seed))
            except Exception as error:
                rows.append(row | {"ok": False, "error": described(error)})
    return rows


def _margin(device: torch.device, name: str, options: dict[str, Any], seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    config = AutoConfig.for_model(name, **TINY, **options)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=torch.bfloat16)
    report = TreeEngine(model.train()).verify(_fork_case(seed).tree())
    assert report is not None, "the case has forks"
    ratios = {"outputs": report.outputs[0] / report.outputs[1]}
    ratios["gradients"] = report.gradients[0] / report.gradients[1]
    return {"ok": report.passed, "margin": report.margin, **ratios}


def check_engine(
    device: torch.device, attentions: Sequence[str] = ("auto",), seed: int = 0, elementwise: str = "eager"
) -> list[dict[str, Any]]:
    """Gradients over a tree with forks at every depth: float32 against the CPU's dense float32, bf16 against the CPU's
    float64 beside the error that the dense model has in bf16 on this device. A small Qwen3, with and without sliding
    windows, by every attention backend of `attentions` in the dtypes that it computes, and for `auto` every benchmark
    system."""
    rows = []
    for window in (None, 70):
        run = functools.partial(_run_engine, _fork_case(seed), window, elementwise)
        cpu = torch.device("cpu")
        expected = {torch.float32: run("auto", torch.float32, cpu, ["dense"])["dense"]}
        expected[torch.bfloat16] = run("auto", torch.float64, cpu, ["dense"])["dense"]
        for attention in attentions:
            usual = attention == "auto" and window is None and elementwise == "eager"
            names = NAMES if usual else ("dense", "ours")
            for dtype, truth in expected.items():
                if not _computes(attention, dtype, device):
                    continue
                row = {"dtype": str(dtype).removeprefix("torch."), "attention": attention}
                row |= {"window": window, "elementwise": elementwise}
                try:
                    found = run(attention, dtype, device, names)
                    rows += [row | one for one in _compared(found, truth, dtype)]
                except Exception as error:
                    rows.append(row | {"ok": False, "error": described(error)})
    return rows


def _computes(attention: str, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether a backend takes what this dtype's queries are there; flash kernels and their kin take low precision."""
    if attention == "auto" or dtype == torch.bfloat16:  # whoever asks for a backend wants one dtype of it at least
        return True
    return BACKENDS[attention].refusal(torch.empty(1, 4, 1, 64, dtype=dtype, device=device), LayerCall(0, 1.0)) is None


def backends(device: torch.device, compiled: bool = True) -> tuple[str, ...]:
    """Attention backends that train on this device; `compiled`: also FlexAttention, which takes minutes to compile."""
    if device.type != "cuda":
        return ("sdpa",)
    flash = kernels.flash_refusal(device, torch.bfloat16, 64) is None
    others = [package.name for package in packages.PACKAGES if flash and package.missing(device) is None]
    triton = ["triton"] if find_spec("triton") is not None and kernels.capability(device) >= kernels.AMPERE else []
    return ("sdpa", *(["flash", "cudnn", *others] if flash else []), *triton, *(["flex"] if compiled else []))


def _run_engine(
    case: Case,
    window: int | None,
    elementwise: str,
    attention: str,
    dtype: torch.dtype,
    device: torch.device,
    names: Sequence[str],
) -> dict[str, dict[str, Tensor] | str]:
    """Gradients by system, or its error, of a model whose weights are the same numbers in every dtype."""
    shape: dict[str, Any] = {"hidden": 128, "layers": 2, "heads": 4, "key_value_heads": 2, "head_dim": 64}
    model = qwen3(**shape, vocabulary=5000, dtype=torch.float64)
    moved = qwen3(**shape, vocabulary=5000, dtype=dtype, device=device, window=window)
    with torch.no_grad():
        for mine, drawn in zip(moved.parameters(), model.parameters(), strict=True):
            mine.copy_(drawn.to(torch.bfloat16).to(dtype))
    systems = make_systems(moved, case, Settings(96, 192, attention=attention, elementwise=elementwise))
    found: dict[str, dict[str, Tensor] | str] = {}
    for system in systems:
        if system.name in names:
            try:
                found[system.name] = gradients(moved, system)
            except Exception as error:
                found[system.name] = described(error)
    return found


def _compared(
    found: dict[str, dict[str, Tensor] | str], expected: dict[str, Tensor] | str, dtype: torch.dtype
) -> Iterator[dict[str, Any]]:
    """A row a system: its distance from what is expected, in low precision in times of the dense model's."""
    if isinstance(expected, str):
        raise RuntimeError(f"the CPU's dense model failed: {expected}")
    errors = {name: one if isinstance(one, str) else gradient_error(one, expected) for name, one in found.items()}
    dense = errors["dense"]
    for name, error in errors.items():
        if isinstance(error, str):
            yield {"system": name, "ok": False, "error": error}
        elif dtype == torch.float32:
            yield {"system": name, **error, "limit": 2e-5, "ok": error["norm"] <= 2e-5}
        elif isinstance(dense, str):
            yield {"system": name, **error, "ok": False, "error": f"nothing to compare with, as dense failed: {dense}"}
        else:
            ratio = error["norm"] / dense["norm"]
            yield {"system": name, **error, "over_dense": ratio, "limit": HALF_MODEL, "ok": ratio <= HALF_MODEL}


def _fork_case(seed: int) -> Case:
    """Twelve sequences of 60 to 400 tokens: forks of forks, a sequence that is another's prefix, and a duplicate."""
    rng = np.random.default_rng(seed)
    sequences = [rng.integers(0, 512, 180)]
    for _ in range(9):
        parent = sequences[rng.integers(len(sequences))]
        cut = int(rng.integers(40, len(parent)))
        sequences.append(np.concatenate([parent[:cut], rng.integers(0, 512, rng.integers(20, 120))]))
    sequences += [sequences[3][:60], sequences[5]]
    scored = tuple(rng.random(len(s)) < 0.5 for s in sequences)
    weights = rng.normal(size=len(sequences)) / 100
    return Case("forks", 1, 1, "synthetic", tuple(sequences), scored, weights)
