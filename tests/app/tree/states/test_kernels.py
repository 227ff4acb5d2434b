"""Scans by wave: the same function as over blocks, through packages' signatures; what cannot run is refused by name.

No kernel runs here: `package_kernels` stands for them.
"""

from __future__ import annotations

import ast
import importlib.metadata
import inspect
import sys
import warnings
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from app.tree import PrefixTree, TreeEngine
from app.tree.states import kernels
from app.tree.states.kernels import PACKAGES, TOLERANCE, Kernels, choose_scans
from app.tree.states.piece_tree import PieceTree
from app.tree.states.scans import TORCH, ByWave
from tests.app.tree import models
from tests.app.tree.states import hybrids
from tests.app.tree.states.package_kernels import FOUND
from tests.app.tree.states.test_piece_tree import trees, walk

LENGTHS = (1, 3, 63, 64, 65)
SIZES = (4, 8, 6)
FAMILIES = {
    "qwen3_5_text": "torch_chunk_gated_delta_rule",
    "kimi_linear": "chunk_kimi_delta_attention",
    "nemotron_h": "mamba2_chunk_scan",
}


@given(tree=trees())
def test_waves_hold_every_piece_below_its_parent(tree: PieceTree) -> None:
    seen: dict[int, int] = {}
    for number, wave in enumerate(tree.waves):
        for place, piece in enumerate(wave.pieces.tolist()):
            parent, above = int(tree.parents[piece]), int(wave.above[place])
            assert above == -1 - parent if parent < 0 else int(tree.waves[number - 1].pieces[above]) == parent
            seen[piece] = number
        rows = [row for piece in wave.pieces.tolist() for row in walk(tree, piece)[1][-int(tree.lengths[piece]) :]]
        assert wave.rows.tolist() == rows and wave.tree.lengths.tolist() == tree.lengths[wave.pieces].tolist()
    assert sorted(seen) == list(range(len(tree.lengths)))


@given(tree=trees(), kind=st.sampled_from(["delta", "delta a channel", "state space"]), data=st.data())
def test_by_wave_is_the_scan_over_blocks(tree: PieceTree, kind: str, data: st.DataObject) -> None:
    """Outputs, wanted ends and all gradients, to float64's rounding."""
    pieces = len(tree.lengths)
    wanted = np.array(data.draw(st.lists(st.integers(0, pieces - 1), unique=True)), np.int64)
    heads, shared, dk, dv, n = 4, 2, 3, 5, tree.rows
    random = torch.Generator().manual_seed(n)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=random, dtype=torch.float64)

    starts = draw(tree.starts, heads, dk, dv)
    if kind == "state space":
        inputs = [
            draw(n, heads, dv),
            draw(n, heads).abs(),
            -draw(heads).abs(),
            draw(n, shared, dk),
            draw(n, shared, dk),
        ]
    else:
        g = -draw(n, heads, *((dk,) if kind == "delta a channel" else ())).abs()
        inputs = [draw(n, shared, dk), draw(n, shared, dk), draw(n, heads, dv), g, draw(n, heads).sigmoid()]
    leaves = [x.requires_grad_() for x in (*inputs, starts)]
    results = []
    for scans in (TORCH, ByWave(TORCH)):
        if kind == "state space":
            out, ends = scans.state_space(*inputs, starts, tree, wanted)
        else:
            out, ends = scans.delta_rule(*inputs, True, starts, tree, wanted)
        results.append((out, ends, *torch.autograd.grad(out.square().sum() + ends.pow(3).sum(), leaves)))
    for ours, right in zip(*results, strict=True):
        torch.testing.assert_close(ours, right, atol=1e-11, rtol=1e-11)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bf16"])
@pytest.mark.parametrize("function", PACKAGES)
def test_kernels_get_what_they_take(function: str, dtype: torch.dtype) -> None:
    """Through the packages' own signatures, every result is the torch scan's, within the inputs' rounding."""
    distances = kernels.compare(ByWave(Kernels(FOUND)), [function], LENGTHS, SIZES, torch.empty(0, dtype=dtype))
    assert {f"{function} dstarts", f"{function} ends", function} <= distances.keys()
    assert max(distances.values()) < (2e-5 if dtype == torch.float32 else TOLERANCE), distances


@pytest.mark.parametrize("lost", ["the gradient of a start", "the start"])
@pytest.mark.parametrize("function", PACKAGES)
def test_a_state_or_a_gradient_that_a_kernel_loses_is_seen_in_bf16(function: str, lost: str) -> None:
    name = "initial_states" if function == "mamba2_chunk_scan" else "initial_state"

    def broken(**given: Any) -> Any:
        state = given.pop(name)
        return FOUND[function](**given, **{name: state.detach() if "gradient" in lost else torch.zeros_like(state)})

    found = {**FOUND, function: broken}
    distances = kernels.compare(
        ByWave(Kernels(found)), [function], LENGTHS, SIZES, torch.empty(0, dtype=torch.bfloat16)
    )
    assert not max(np.nan_to_num(list(distances.values()), nan=np.inf)) <= 5 * TOLERANCE


@pytest.mark.parametrize("name", FAMILIES)
def test_a_model_through_kernels_has_the_same_gradients(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In chunks that hand states on, kept and run twice."""
    random = np.random.default_rng(0)
    stem = random.integers(0, 31, 7)
    sequences = [np.concatenate([stem[:k], random.integers(0, 31, n)]) for k, n in ((7, 9), (7, 1), (4, 12), (7, 50))]
    tree, chosen, grads = PrefixTree.build(sequences), [], []

    def choose(given: str, model: Any, functions: frozenset[str], sizes: Any) -> Any:
        assert FAMILIES[name] in functions and min(sizes) > 0
        chosen.append(given)
        return TORCH if given == "torch" else ByWave(Kernels(FOUND))

    monkeypatch.setattr("app.tree.engine.choose_scans", choose)
    for states in ("torch", "fla"):
        model = hybrids.make(name)
        TreeEngine(model, 8, 20, states=states, self_check=False).backward(tree, lambda out, i: out.logprobs.sum())
        grads.append({key: p.grad for key, p in model.named_parameters() if p.grad is not None})
    assert chosen == ["torch", "fla"] and grads[0].keys() == grads[1].keys()
    for key, right in grads[0].items():
        assert float((grads[1][key] - right).norm()) <= 2e-4 * float(right.norm()) + 1e-6, key


# ---- what is chosen, and what is refused


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    """A device that kernels take, with packages that can be imported; their versions can be changed."""
    versions = {"fla-core": "0.6.0", "mamba-ssm": "2.4.0"}
    real = importlib.metadata.version

    def version(name: str) -> str:
        if name in ("fla-core", "mamba-ssm"):
            if name not in versions:
                raise importlib.metadata.PackageNotFoundError(name)
            return versions[name]
        return real(name)

    for function, package in PACKAGES.items():
        module = ModuleType(package.module)
        setattr(module, package.function, FOUND[function])
        monkeypatch.setitem(sys.modules, package.module, module)
    monkeypatch.setattr(importlib.metadata, "version", version)
    monkeypatch.setattr(kernels, "refused_by", lambda *_: None)
    for cached in (kernels._disagreement, kernels._warn_once):
        cached.cache_clear()
    yield versions
    for cached in (kernels._disagreement, kernels._warn_once):
        cached.cache_clear()


@pytest.mark.parametrize("function", PACKAGES)
def test_kernels_are_taken_where_they_can(function: str, machine: dict[str, str]) -> None:
    model = hybrids.make("qwen3_5_text", dtype=torch.bfloat16)
    for name in ("auto", "fla"):
        scans = choose_scans(name, model, {function, "causal_conv1d_fn"}, SIZES)
        assert isinstance(scans, ByWave) and scans.name == "fla"
    assert choose_scans("torch", model, {function}, SIZES) is TORCH


def test_what_kernels_cannot_is_refused_and_auto_goes_without(machine: dict[str, str]) -> None:
    model = hybrids.make("qwen3_5_text", dtype=torch.bfloat16)
    gated, mamba = {"torch_chunk_gated_delta_rule"}, {"mamba2_chunk_scan"}
    machine["fla-core"] = "0.5.2"
    with pytest.raises(ValueError, match=r"states='fla' needs fla-core 0\.6\.0 or newer, and 0\.5\.2 is .*wrong grad"):
        choose_scans("fla", model, gated, SIZES)
    with pytest.warns(UserWarning, match=r"states='auto' takes the torch scan.*0\.5\.2"):
        assert choose_scans("auto", model, gated, SIZES) is TORCH
    del machine["fla-core"]
    with pytest.raises(
        ValueError, match=r"needs the package fla-core, which is not installed \(pip install 'fla-core>="
    ):
        choose_scans("fla", model, gated, SIZES)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert choose_scans("auto", model, gated, SIZES) is TORCH, "an absent package is nothing to warn of"

    def published(x, dt, A, B, C, chunk_size, initial_states=None, return_final_states=False):  # type: ignore[no-untyped-def]
        """mamba-ssm 2.3.2.post1: without state_dtype."""

    sys.modules[PACKAGES["mamba2_chunk_scan"].module].mamba_chunk_scan_combined = published
    machine["mamba-ssm"] = "2.3.2.post1"
    with pytest.raises(ValueError, match=r"mamba_chunk_scan_combined takes no state_dtype: it would round states"):
        choose_scans("fla", model, mamba, SIZES)
    sys.modules[PACKAGES["mamba2_chunk_scan"].module] = None  # type: ignore[assignment]
    with pytest.raises(ValueError, match=r"cannot import mamba_ssm\.ops.* of mamba-ssm 2\.3\.2\.post1: import of"):
        choose_scans("fla", model, mamba, SIZES)


def test_kernels_that_disagree_are_refused(machine: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    model = hybrids.make("qwen3_5_text", dtype=torch.bfloat16)
    package = PACKAGES["torch_chunk_gated_delta_rule"]

    def lossy(q, k, v, g, beta, initial_state, output_final_state, use_qk_l2norm_in_kernel, cu_seqlens, chunk_indices):  # type: ignore[no-untyped-def]
        return FOUND["torch_chunk_gated_delta_rule"](
            q, k, v, g, beta, None, initial_state.detach(), True, use_qk_l2norm_in_kernel,
            cu_seqlens=cu_seqlens, chunk_indices=chunk_indices,
        )  # fmt: skip

    monkeypatch.setattr(sys.modules[package.module], package.function, lossy)
    with pytest.raises(ValueError, match=r"disagrees with the torch scan on a small example: .* d\w+ by "):
        choose_scans("fla", model, {"torch_chunk_gated_delta_rule"}, SIZES)
    with pytest.warns(UserWarning, match="takes the torch scan, not kernels: 'fla' disagrees"):
        assert choose_scans("auto", model, {"torch_chunk_gated_delta_rule"}, SIZES) is TORCH


def test_devices_dtypes_and_models_without_scans_are_named() -> None:
    hybrid = hybrids.make("qwen3_5_text")
    with pytest.raises(ValueError, match=r"states='fla' needs a CUDA device, and the model is on 'cpu'; or use"):
        TreeEngine(hybrid, states="fla").forward(PrefixTree.build([[1, 2]]))
    with pytest.raises(ValueError, match="states='fla' has no effect: no layer of Qwen3ForCausalLM scans"):
        TreeEngine(models.make("qwen3"), states="fla").forward(PrefixTree.build([[1, 2]]))
    with pytest.raises(ValueError, match=r"states must be one of \('auto', 'torch', 'fla'\), got 'triton'"):
        TreeEngine(hybrid, states="triton")
    device = torch.device("cuda")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
        mamba = ["mamba2_chunk_scan"]
        assert kernels.refused_by(device, torch.bfloat16, 128, mamba) is None
        assert "bfloat16 and float16, not torch.float32" in str(kernels.refused_by(device, torch.float32, 128, mamba))
        assert "at most 256 channels, not 512" in str(
            kernels.refused_by(device, torch.bfloat16, 512, ["mamba2_chunk_scan"])
        )
        patch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
        for version, refused in (("3.3.1", False), ("3.6.0", True), ("3.7.1", False)):
            patch.setattr(kernels.importlib.metadata, "version", lambda _, version=version: version)
            told = kernels.refused_by(device, torch.bfloat16, 128, ["torch_chunk_gated_delta_rule"])
            assert ("3.7.1 or newer" in str(told) and version in str(told)) == refused == (told is not None)
            assert kernels.refused_by(device, torch.bfloat16, 128, mamba) is None
        patch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 5))
        assert "Ampere" in str(kernels.refused_by(device, torch.bfloat16, 128, mamba))


@pytest.mark.parametrize("function", PACKAGES)
def test_stand_ins_have_the_packages_signatures(function: str) -> None:
    """Where a package's files are there, importable (Triton) or not: the same names in the same order."""
    package = PACKAGES[function]
    assert set(package.arguments) <= inspect.signature(FOUND[function]).parameters.keys()
    spec = find_spec(package.module.partition(".")[0])
    if spec is None or spec.origin is None:
        pytest.skip(f"{package.name} is not installed")
    root = Path(spec.origin).parents[1]
    found = [
        node
        for file in (root / package.module.replace(".", "/")).parent.rglob("*.py")
        if f"def {package.function}(" in file.read_text()
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.FunctionDef) and node.name == package.function
    ]
    names = [argument.arg for argument in found[0].args.args]
    ours = [p.name for p in inspect.signature(FOUND[function]).parameters.values() if p.kind is not p.VAR_KEYWORD]
    assert names == ours


def test_the_first_to_ask_may_be_a_scoring_pass(machine: dict[str, str]) -> None:
    """Without gradients; what was found out then holds for training too."""
    model = hybrids.make("qwen3_5_text", dtype=torch.bfloat16)
    for without in (torch.no_grad, torch.inference_mode):
        kernels._disagreement.cache_clear()
        with without():
            assert choose_scans("fla", model, {"torch_chunk_gated_delta_rule"}, SIZES).name == "fla"
