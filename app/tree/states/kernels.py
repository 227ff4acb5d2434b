"""The kernels of flash-linear-attention and mamba-ssm for scans, wave by wave on CUDA devices: `states="fla"`.

Promises: a package that is not there, a release whose gradients are wrong or that would make the host wait, a signature
that is not the one called here, a device, a dtype or a size that kernels do not take: each is refused by name with the
remedy, before anything runs. Before their first use on a device the kernels are compared with the torch scan on pieces
of 1, 3, 63, 64 and 65 tokens, gradients of states included: rounding in low precision would hide a lost one later.

No GPU has run this yet. On CPUs everything but the kernels themselves is tested: stand-ins with the packages'
signatures (read from fla-core 0.6.0, mamba-ssm 2.3.2.post1 and mamba's later source) get what kernels would.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from packaging.version import Version
from torch import Tensor
from transformers import PreTrainedModel

from app.tree.states.piece_tree import PieceTree
from app.tree.states.scans import TORCH, ByWave, Scans
from app.tree.transfer import on_device

STATES = ("auto", "torch", "fla")
"""What computes scans: kernels where they can and else torch, torch, or kernels."""

LOW = (torch.bfloat16, torch.float16)
LARGEST_KEY = 256
"""Widest keys that flash-linear-attention's kernels take."""
TOLERANCE = 0.02
"""Relative L2 distance that low precision may leave between kernels and the torch scan in float32."""

_BLOCK = 64
_AMPERE, _HOPPER = (8, 0), 9


@dataclass(frozen=True)
class Package:
    """A function of a package: from which release on it is right, and the arguments it has to know.

    `why`: what is wrong before `least`, or with a function that lacks an argument.
    """

    name: str
    least: str
    module: str
    function: str
    arguments: tuple[str, ...]
    why: str

    def find(self) -> Callable[..., Any]:
        """The function.

        Raises:
            ValueError: it cannot be used, and what to do.
        """
        install = f"pip install '{self.name}>={self.least}'"
        try:
            version = importlib.metadata.version(self.name)
        except importlib.metadata.PackageNotFoundError:
            raise ValueError(f"needs the package {self.name}, which is not installed ({install})") from None
        if Version(version) < Version(self.least):
            raise ValueError(
                f"needs {self.name} {self.least} or newer, and {version} is installed: {self.why} ({install})"
            )
        try:
            function: Callable[..., Any] = getattr(importlib.import_module(self.module), self.function)
        except Exception as error:  # Triton is missing, or no driver
            raise ValueError(
                f"cannot import {self.module}.{self.function} of {self.name} {version}: {error}; install it for this"
                " torch and device"
            ) from error
        missing = sorted(set(self.arguments) - inspect.signature(function).parameters.keys())
        if missing:
            raise ValueError(f"cannot use {self.name} {version}: {self.function} takes no {missing[0]}: {self.why}")
        return function


_SCANNED = ("q", "k", "v", "g", "beta", "initial_state", "output_final_state", "use_qk_l2norm_in_kernel", "cu_seqlens")
_FLA = (
    "before, convolutions gave wrong gradients for pieces shorter than their window, and every call made the host wait"
)
PACKAGES = {
    "torch_chunk_gated_delta_rule": Package(
        "fla-core",
        "0.6.0",
        "fla.ops.gated_delta_rule",
        "chunk_gated_delta_rule",
        (*_SCANNED, "chunk_indices"),
        _FLA,
    ),
    "chunk_kimi_delta_attention": Package(
        "fla-core", "0.6.0", "fla.ops.kda", "chunk_kda", (*_SCANNED, "cu_seqlens_cpu"), _FLA
    ),
    "mamba2_chunk_scan": Package(
        "mamba-ssm",
        "2.3.2",
        "mamba_ssm.ops.triton.ssd_combined",
        "mamba_chunk_scan_combined",
        ("x", "dt", "A", "B", "C", "chunk_size", "initial_states", "return_final_states", "state_dtype"),
        "it would round states and their gradients to bf16 at every hand-over; no release up to 2.3.2.post1 can do"
        " otherwise, the source from June 2026 on can",
    ),
}
"""By the function of transformers that a kernel stands for."""


class Kernels:
    """Kernels for pieces that continue nothing but a start each; `found`: functions by name in `PACKAGES`."""

    name = "fla"

    def __init__(self, found: dict[str, Callable[..., Any]]) -> None:
        self.found = found

    def delta_rule(self, query, key, value, g, beta, unit_length, starts, tree, wanted):  # type: ignore[no-untyped-def]
        bounds, bounds_host, blocks = _bounds(tree, value.device)
        dtype = _low(value)
        given: dict[str, Any] = {"cu_seqlens": bounds}
        if g.dim() == 2:
            kernel = self.found["torch_chunk_gated_delta_rule"]
            given["chunk_indices"] = blocks
        else:  # makes indices of its own, on the host, and keeps those of the last few waves
            kernel = self.found["chunk_kimi_delta_attention"]
            given["cu_seqlens_cpu"] = bounds_host
        out, ends = kernel(
            q=query.to(dtype)[None],
            k=key.to(dtype)[None],
            v=value.to(dtype)[None],
            g=g.float()[None],
            beta=beta.to(dtype)[None],
            initial_state=starts,
            output_final_state=True,
            use_qk_l2norm_in_kernel=unit_length,
            **given,
        )
        return out[0], ends

    def state_space(self, x, dt, A, B, C, starts, tree, wanted):  # type: ignore[no-untyped-def]
        kernel, dtype = self.found["mamba2_chunk_scan"], _low(x)
        outs, ends = [], []
        groups, order, place = _padded(tree, x.device)
        for pieces, rows, inside, places in groups:
            out, end = kernel(
                x=x.to(dtype)[rows],
                dt=dt.float()[rows] * inside,  # a step of 0 leaves a state as it is
                A=A.float(),
                B=B.to(dtype)[rows],
                C=C.to(dtype)[rows],
                chunk_size=_BLOCK,
                initial_states=starts.index_select(0, pieces).mT.contiguous(),
                return_final_states=True,
                state_dtype=torch.float32,
            )
            outs.append(out.flatten(0, 1).index_select(0, places))
            ends.append(end.mT)
        return torch.cat(outs).index_select(0, order), torch.cat(ends).index_select(0, place)


def choose_scans(name: str, model: PreTrainedModel, functions: Iterable[str], sizes: tuple[int, int, int]) -> Scans:
    """What computes the scans of a model that calls these `functions` of transformers. `sizes`: heads, key and value
    dim of its scans.

    "auto" takes kernels for bf16 and float16 (autocast counts) on CUDA devices from compute capability 8.0 on where the
    packages are installed and agree with the torch scan, and torch elsewhere; it warns where an installed one is not
    taken.

    Raises:
        ValueError: a name that is not in `STATES`, or "fla" where kernels cannot run, with the reason.
    """
    if name not in STATES:
        raise ValueError(f"states must be one of {STATES}, got {name!r}")
    needed = tuple(sorted(PACKAGES.keys() & set(functions)))
    if name == "fla" and not needed:
        raise ValueError(f"states='fla' has no effect: no layer of {type(model).__name__} scans; leave it at 'auto'")
    if name == "torch" or not needed:
        return TORCH
    parameter = next(model.parameters())
    device, dtype = parameter.device, parameter.dtype
    if torch.is_autocast_enabled(device.type):
        dtype = torch.get_autocast_dtype(device.type)
    refusal = refused_by(device, dtype, sizes[1], needed)
    here = refusal is None
    if refusal is None:
        found, refusal = _found(needed)
        if refusal is None:
            refusal = _disagreement(needed, device, dtype, sizes)
        if refusal is None:
            return ByWave(Kernels(found))
    if name == "fla":
        raise ValueError(f"states='fla' {refusal}; or use states='torch' (or 'auto')")
    if here and any(_installed(PACKAGES[function].name) for function in needed):
        _warn_once(f"states='auto' takes the torch scan, not kernels: 'fla' {refusal}")
    return TORCH


def compare(scans: Scans, functions: Iterable[str], lengths: tuple[int, ...], sizes: tuple[int, int, int], like: Tensor
) -> dict[str, float]:  # fmt: skip
    """Relative L2 distances of outputs, end states and each input's gradient from those of the torch scan in float32.

    Args:
        scans: what is compared. lengths: of pieces; each continues the one before it, and a second of its length hangs
            beside it. sizes: heads, key and value dim. like: its device, and the dtype inputs are rounded to.
    """
    found: dict[str, float] = {}
    last = len(lengths) - 1
    tree = PieceTree([n for n in lengths for _ in range(2)], [-1, -1, *(2 * (k // 2) for k in range(2 * last))])
    for function in functions:
        inputs, run = _example(function, tree, sizes, like)
        results = [_gradients(run, each, tree, inputs) for each in (scans, TORCH)]
        for (name, mine), (_, right) in zip(*results, strict=True):
            key = f"{function} {name}" if name else function
            found[key] = float((mine.double() - right.double()).norm() / right.double().norm().clamp(min=1e-30))
    return found


def _example(
    function: str, tree: PieceTree, sizes: tuple[int, int, int], like: Tensor
) -> tuple[dict[str, Tensor], Any]:
    heads, k, v = sizes
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int, round_to: torch.dtype | None = None) -> Tensor:
        values = torch.randn(tree.rows if not shape[0] else shape[0], *shape[1:], generator=generator)
        return values.to(like.device).to(round_to or like.dtype)

    starts = draw(tree.starts, heads, k, v, round_to=torch.float32)
    if function == "mamba2_chunk_scan":
        dt = torch.nn.functional.softplus(draw(0, heads, round_to=torch.float32) - 1)
        A = -draw(heads, round_to=torch.float32).exp()
        inputs = {"x": draw(0, heads, v), "dt": dt, "A": A, "B": draw(0, 1, k), "C": draw(0, 1, k), "starts": starts}
        return inputs, lambda scans, x, own, wanted: scans.state_space(*x, own, wanted)
    channels = (k,) if function == "chunk_kimi_delta_attention" else ()
    g = torch.nn.functional.logsigmoid(draw(0, heads, *channels, round_to=torch.float32) + 3)
    inputs = {"q": draw(0, heads, k), "k": draw(0, heads, k), "v": draw(0, heads, v), "g": g}
    inputs |= {"beta": draw(0, heads).sigmoid(), "starts": starts}
    return inputs, lambda scans, x, own, wanted: scans.delta_rule(*x[:-1], True, x[-1], own, wanted)


def _gradients(run: Any, scans: Scans, tree: PieceTree, inputs: dict[str, Tensor]) -> list[tuple[str, Tensor]]:
    exact = scans is TORCH
    leaves = {name: (x.float() if exact else x).detach().clone().requires_grad_() for name, x in inputs.items()}
    own = PieceTree(tree.lengths, tree.parents, tree.starts)
    out, ends = run(scans, tuple(leaves.values()), own, np.arange(len(tree.lengths)))
    generator = torch.Generator().manual_seed(1)
    loss = sum((x.float() * torch.randn(x.shape, generator=generator).to(x.device)).sum() for x in (out, ends))
    assert isinstance(loss, Tensor)
    grads = torch.autograd.grad(loss, list(leaves.values()), materialize_grads=True)
    named = zip(leaves, grads, strict=True)
    return [("", out.detach()), ("ends", ends.detach()), *((f"d{name}", grad) for name, grad in named)]


@cache
def _disagreement(
    functions: tuple[str, ...], device: torch.device, dtype: torch.dtype, sizes: tuple[int, int, int]
) -> str | None:
    found, _ = _found(functions)
    try:
        with torch.inference_mode(False), torch.enable_grad():  # the first to ask may be a scoring pass
            like = torch.empty(0, device=device, dtype=dtype)
            distances = compare(ByWave(Kernels(found)), functions, (1, 3, 63, 64, 65), sizes, like)
    except torch.OutOfMemoryError:
        raise  # says nothing of the kernels, and is not kept
    except Exception as error:  # a compiler's or a driver's
        return f"failed on a small example: {type(error).__name__}: {error}"
    worst = max(distances, key=lambda name: np.nan_to_num(distances[name], nan=np.inf))
    if distances[worst] <= TOLERANCE:
        return None
    return (
        f"disagrees with the torch scan on a small example: {worst} by {distances[worst]:.2g} of its norm, where"
        f" {TOLERANCE:g} is allowed; install another release of the package, or another Triton"
    )


def _found(functions: tuple[str, ...]) -> tuple[dict[str, Callable[..., Any]], str | None]:
    try:
        return {function: PACKAGES[function].find() for function in functions}, None
    except ValueError as error:
        return {}, str(error)


def refused_by(device: torch.device, dtype: torch.dtype, key_dim: int, functions: Iterable[str]) -> str | None:
    """Why kernels for these functions cannot run on a device."""
    if device.type != "cuda":
        return f"needs a CUDA device, and the model is on '{device.type}'"
    capability = torch.cuda.get_device_capability(device)
    if capability < _AMPERE:
        return "needs a GPU of compute capability 8.0 (Ampere) or newer"
    if capability[0] == _HOPPER and "torch_chunk_gated_delta_rule" in functions and _installed("triton"):
        version = Version(importlib.metadata.version("triton"))
        if Version("3.4") <= version < Version("3.7.1"):
            return (
                f"needs Triton 3.7.1 or newer on this GPU, and this is {version}: from 3.4 on it gave the gated delta"
                " rule wrong gradients there (flash-linear-attention's issue 640)"
            )
    if dtype not in LOW:
        return f"computes bfloat16 and float16, not {dtype}"
    if key_dim > LARGEST_KEY:
        return f"takes keys of at most {LARGEST_KEY} channels, not {key_dim}"
    return None


def _installed(package: str) -> bool:
    try:
        return bool(importlib.metadata.version(package))
    except importlib.metadata.PackageNotFoundError:
        return False


@cache
def _warn_once(words: str) -> None:
    warnings.warn(words, stacklevel=4)


def _low(value: Tensor) -> torch.dtype:
    """The dtype kernels compute in; float32 stays where nothing says otherwise, as in tests."""
    if value.dtype not in LOW and torch.is_autocast_enabled(value.device.type):
        return torch.get_autocast_dtype(value.device.type)
    return value.dtype


def _bounds(tree: PieceTree, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Where pieces begin and the end, on the device and on the host; piece and number within it of every block."""
    if ("bounds", device) not in tree.kept:
        bounds = np.concatenate([[0], np.cumsum(tree.lengths)])
        counts = -(-tree.lengths // _BLOCK)
        piece = np.repeat(np.arange(len(counts)), counts)
        within = np.arange(len(piece)) - (np.cumsum(counts) - counts)[piece]
        blocks = np.stack([piece, within], 1)
        tree.kept["bounds", device] = (on_device(bounds, device), torch.from_numpy(bounds), on_device(blocks, device))
    found: tuple[Tensor, Tensor, Tensor] = tree.kept["bounds", device]
    return found


def _padded(tree: PieceTree, device: torch.device) -> tuple[list[tuple[Tensor, ...]], Tensor, Tensor]:
    """Pieces in groups of lengths within a factor of two, as batches: of each its pieces [p], rows [p, longest] (some
    row where there is none), whether there is one [p, longest, 1], and the places of rows in the batch laid flat; then
    where each row and each piece stands in the groups' results laid end to end."""
    if ("padded", device) not in tree.kept:
        size = np.ceil(np.log2(tree.lengths)).astype(np.int64)
        groups, rows_of, pieces_of = [], [], []
        for each in np.unique(size):
            pieces = np.flatnonzero(size == each)
            at = np.arange(tree.lengths[pieces].max())
            inside = at < tree.lengths[pieces][:, None]
            rows = np.where(inside, tree.first[pieces][:, None] + at, 0)
            groups.append((pieces, rows, inside[..., None].astype(np.float32), np.flatnonzero(inside)))
            rows_of.append(rows[inside])
            pieces_of.append(pieces)
        there = [tuple(on_device(x, device) for x in group) for group in groups]
        order, place = (on_device(np.argsort(np.concatenate(x)), device) for x in (rows_of, pieces_of))
        tree.kept["padded", device] = (there, order, place)
    found: tuple[list[tuple[Tensor, ...]], Tensor, Tensor] = tree.kept["padded", device]
    return found
