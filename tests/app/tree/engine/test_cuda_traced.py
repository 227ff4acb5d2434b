"""What the engine would run on a CUDA device, traced without one: devices, arguments, shapes and waiting.

The device is a C++ file of fifty lines; the tracing runs in a process of its own, because torch must not know better.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.cpp_extension import include_paths, library_paths

HERE = Path(__file__).parent / "fake_cuda"
EFFICIENT = {"_scaled_dot_product_efficient_attention", "_scaled_dot_product_efficient_attention_backward"}
"""With masks too: whether the kernel is right under one is asked on a device that has values."""
LOSS = "engine.py backward"  # the value of the loss, at the very end
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]  # FlexAttention compiles for half a minute

COMPILER = shutil.which("c++") or shutil.which("g++")


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    if torch.version.cuda is not None:
        pytest.skip("a build of torch with CUDA has its own device; tests marked gpu use it")
    if COMPILER is None:
        pytest.skip("needs a C++ compiler")
    device = tmp_path_factory.mktemp("fake_cuda") / "device.so"
    command = [COMPILER, "-O0", "-shared", "-fPIC", "-std=c++20", str(HERE / "device.cpp"), "-o", str(device)]
    command += [f"-I{path}" for path in include_paths()]
    command += [f"-L{path}" for path in library_paths()] + ["-lc10", "-ltorch_cpu"]
    subprocess.run(command, check=True, timeout=300)
    run = [sys.executable, "-m", "tests.app.tree.engine.fake_cuda.run", str(device)]
    done = subprocess.run(run, cwd=HERE.parents[4], capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, f"{done.stdout[-500:]}\n{done.stderr[-3000:]}"
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def test_every_case_runs_and_waits_for_the_loss_alone(traced: list[dict[str, Any]]) -> None:
    assert len([one for one in traced if one["backend"] != "triton"]) == 37
    assert {(one["case"], one["backend"]): one["waits"] for one in traced if one["waits"] != [LOSS]} == {}


def test_low_precision_runs_on_flash_kernels(traced: list[dict[str, Any]]) -> None:
    dense = {"_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_backward"}
    packed = {"_flash_attention_forward", "_flash_attention_backward"}
    found = {(one["case"], one["backend"]): set(one["operators"]) for one in traced}
    assert found["bf16", "sdpa"] == dense | EFFICIENT and found["autocast", "sdpa"] == dense | EFFICIENT
    cudnn = {f"_scaled_dot_product_cudnn_attention{suffix}" for suffix in ("", "_backward")}
    assert found["bf16", "cudnn"] == dense | packed | cudnn and found["window", "cudnn"] >= packed
    assert found["bf16", "flash"] == dense | packed and found["window", "flash"] >= packed
    assert found["sections", "flash"] == dense | packed
    assert not found["float64", "sdpa"] and not found["soft-capping", "sdpa"]


def test_heads_too_wide_for_flash_kernels_are_computed_beside_the_others(traced: list[dict[str, Any]]) -> None:
    found = {one["backend"]: set(one["operators"]) for one in traced if one["case"] == "widths"}
    assert found["auto"] >= EFFICIENT | {"_flash_attention_forward", "_flash_attention_backward"}
    assert found["sdpa"] > EFFICIENT


def test_what_was_chosen_runs_on_the_kernel_that_takes_masks(traced: list[dict[str, Any]]) -> None:
    cases = {"chosen tokens", "chosen tokens, again", "compressed", "compressed, again", "compressed, autocast"}
    found = {one["case"]: set(one["operators"]) for one in traced if one["case"] in cases}
    assert found == dict.fromkeys(cases, EFFICIENT)


@pytest.mark.skipif(find_spec("triton") is None, reason="needs the package triton")
def test_one_kernel_over_path_and_chunk(traced: list[dict[str, Any]]) -> None:
    """In low precision, with windows, sections, soft-capping, sinks, autocast and checkpointing: no other runs."""
    found = {one["case"]: set(one["operators"]) for one in traced if one["backend"] == "triton"}
    kernels = {"arborist.interval_attention", "arborist.interval_attention_backward"}
    assert set(found) == {
        *("bf16", "float16", "autocast", "checkpointing"),
        *("window", "sections", "soft-capping", "sinks"),
    }
    assert all(operators == kernels for operators in found.values())


def test_float32_and_older_gpus_have_a_kernel_that_starts_at_once(traced: list[dict[str, Any]]) -> None:
    """The memory-efficient one; bf16, which GPUs before Ampere do not compute, by plain operators."""
    found = {(one["case"], one["backend"]): set(one["operators"]) for one in traced}
    assert found["float32", "sdpa"] == found["auto", "auto"] == EFFICIENT
    assert found["older GPU", "auto"] == found["older GPU", "sdpa"] == EFFICIENT
    assert not found["older GPU, bf16", "auto"]


def test_heads_run_on_their_kernels_and_sum_in_place(traced: list[dict[str, Any]]) -> None:
    """One product with float32 output a block; kernels where Triton is, from Ampere on."""
    kernels = (
        {"arborist.softmax_outputs.default", "arborist.softmax_gradient_.default"} if find_spec("triton") else set()
    )
    product = {"aten.addmm.dtype_out"}
    found = {(one["case"], one["backend"]): set(one["heads"]) for one in traced}
    for case in ("bf16", "entropy", "autocast", "window"):
        assert found[case, "sdpa"] == product | kernels
    assert found["temperatures", "flash"] == found["checkpointing", "flash"] == product | kernels
    assert found["float32", "sdpa"] == kernels and not found["float64", "sdpa"] | found["soft-capping", "sdpa"]
    assert found["older GPU", "sdpa"] == product


def test_layers_sum_their_weight_gradients_in_place(traced: list[dict[str, Any]]) -> None:
    """Every projection of the layers, in low precision with float32 output; nothing under autocast."""
    found = {(one["case"], one["backend"]): {tuple(shape) for shape in one["projections"]} for one in traced}
    qwen3 = {(64, 16), (32, 16), (16, 64), (24, 16), (16, 24)}
    for case in ("bf16", "entropy", "float32"):
        assert found[case, "sdpa"] == qwen3
    assert found["checkpointing", "flash"] == found["older GPU", "sdpa"] == qwen3
    assert found["window", "flash"] and found["float64", "sdpa"]
    assert not found["autocast", "sdpa"] | found["autocast", "flash"]
