"""Backward passes of the engine on a CUDA device that is not there: `python run.py device.so`, a JSON line a case.

Tensors have shapes, dtypes and devices but no values (torch's FakeTensorMode), and operators check these as the real
ones do. Found are tensors left on the wrong device, wrong arguments and shapes of CUDA operators, and what would make
the host wait for the device. Whether results are right it cannot see.
"""

from __future__ import annotations

import ctypes
import json
import sys
import traceback
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

_torch = find_spec("torch")
assert _torch is not None and _torch.origin is not None
_LIB = Path(_torch.origin).parent / "lib"
ctypes.CDLL(str(_LIB / "libtorch_global_deps.so"), ctypes.RTLD_GLOBAL)
ctypes.CDLL(str(_LIB / "libtorch_cpu.so"))
ctypes.CDLL(sys.argv[1])

import numpy as np  # noqa: E402
import torch  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from app.tree import PrefixTree, TreeEngine, routed  # noqa: E402
from app.tree.attention import kernels, packages  # noqa: E402
from app.tree.planning.timing import GPU_RATES  # noqa: E402
from tests.app.tree import models  # noqa: E402
from tests.app.tree.cases import VOCABULARY  # noqa: E402
from tests.app.tree.engine import families  # noqa: E402
from tests.app.tree.states import hybrids  # noqa: E402

BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
ENGINE = str(Path(kernels.__file__).parents[1])  # the folder app/tree; the tests' own has the same name
SHARED = list(range(20))
SEQUENCES = [np.array(SHARED + [i] * count) for i, count in ((3, 5), (4, 7), (5, 30), (3, 2))]
WIDE = dict(head_dim=16)  # the smallest that FlexAttention compiles
CAPPED = dict(attn_implementation="eager", head_dim=16, sliding_window=4, attn_logit_softcapping=2.0)
SINKS = dict(attn_implementation="eager", head_dim=16, sliding_window=4, num_local_experts=4, num_experts_per_tok=2)
WIDTHS = dict(WIDE, global_head_dim=264, layer_types=["sliding_attention", "full_attention"], sliding_window=5)
WIDTHS |= dict(hidden_size_per_layer_input=0)
CHOSEN = {**families.INDEXED, "first_k_dense_replace": 2}  # without experts, of which each asks the device
COMPRESSED = {**hybrids.OPTIONS["deepseek_v4"], "head_dim": 512, "index_head_dim": 64, "partial_rotary_factor": 0.125}
BATCHED = dict(experts_implementation="batched_mm")  # grouped products take no float32 there
MIXED = dict(WIDE, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=8)
# label, model, its options, dtype, options of `backward` and of the device, backends
CASES: list[tuple[str, str, dict[str, Any], torch.dtype, dict[str, Any], str]] = [
    ("bf16", "qwen3", WIDE, BF16, {}, "sdpa flash flex cudnn triton"),
    ("entropy", "qwen3", WIDE, BF16, {"want": ("logprobs", "entropy")}, "sdpa flash"),
    ("temperatures", "qwen3", WIDE, BF16, {"temperatures": [1.0, 0.5, 1.0, 0.5]}, "flash"),
    ("autocast", "qwen3", WIDE, F32, {"autocast": True}, "sdpa flash triton"),
    ("checkpointing", "qwen3", WIDE, BF16, {"checkpointing": True}, "flash triton"),
    ("float16", "qwen3", WIDE, F16, {}, "triton"),
    ("float32", "qwen3", WIDE, F32, {}, "sdpa"),
    ("float64", "starcoder2", {}, F64, {}, "sdpa"),
    ("window", "mistral", {"head_dim": 16, "sliding_window": 5}, BF16, {}, "sdpa flash cudnn triton"),
    ("sections", "llama4_text", {**families.SECTIONS, **WIDE}, BF16, {}, "sdpa flash flex cudnn triton"),
    ("soft-capping", "gemma2", CAPPED, BF16, {}, "sdpa flex triton"),
    ("sinks", "gpt_oss", SINKS, BF16, {}, "triton"),
    ("recorded experts", "qwen3_moe", MIXED, BF16, {"routed": True}, "sdpa flash"),
    ("recorded experts, again", "qwen3_moe", MIXED, BF16, {"routed": True, "checkpointing": True}, "flash"),
    ("older GPU", "qwen3", WIDE, F16, {"capability": (7, 5)}, "auto sdpa"),
    ("older GPU, bf16", "qwen3", WIDE, BF16, {"capability": (7, 5)}, "auto"),
    ("auto", "qwen3", WIDE, F32, {}, "auto"),
    ("widths", "gemma4_text", WIDTHS, BF16, {}, "auto sdpa"),
    ("chosen tokens", "deepseek_v32", CHOSEN, BF16, {}, "auto sdpa"),
    ("chosen tokens, again", "deepseek_v32", CHOSEN, F32, {"checkpointing": True}, "sdpa"),
    ("compressed", "deepseek_v4", COMPRESSED, BF16, {}, "auto sdpa"),
    ("compressed, again", "deepseek_v4", COMPRESSED, BF16, {"checkpointing": True}, "sdpa"),
    ("compressed, autocast", "deepseek_v4", {**COMPRESSED, **BATCHED}, F32, {"autocast": True}, "sdpa"),
]


class Waits(TorchDispatchMode):
    """Notes where the host would wait for the device, and which operators of attention and of heads ran."""

    def __init__(self) -> None:
        super().__init__()
        self.places: list[str] = []
        self.operators: set[str] = set()
        self.heads: set[str] = set()
        self.projections: set[tuple[int, ...]] = set()  # shapes of layers' weight gradients that are summed in place

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, str(func)
        if "attention" in name:
            self.operators.add(name.removeprefix("aten.").removesuffix(".default"))
        summed = {"aten.addmm.dtype_out": kwargs.get("out"), "aten.addmm_.default": args[0] if args else None}.get(name)
        if summed is not None and len(summed) != VOCABULARY:
            self.projections.add(tuple(summed.shape))
        elif name.startswith(("arborist.softmax", "aten.addmm.dtype_out")):
            self.heads.add(name)
        if name.startswith("aten._pin_memory"):  # fake tensors know no pinning
            return args[0]
        if name.startswith("aten._local_scalar_dense"):
            if args[0].device.type == "cuda":
                self.places.append(_place())
            return 0.5
        if name.startswith("aten._to_copy") and not kwargs.get("non_blocking"):
            there = torch.device(kwargs.get("device") or args[0].device)
            if {there.type, args[0].device.type} == {"cpu", "cuda"}:
                self.places.append(_place())
        return func(*args, **kwargs)


def _place() -> str:
    return ["outside of app.tree", *_places(traceback.extract_stack())][-1]


def _places(stack: traceback.StackSummary) -> list[str]:
    return [f"{Path(f.filename).name} {f.name}" for f in stack if f.filename.startswith(ENGINE)]


def moved(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """On the fake device: `Module.to` cannot exchange real parameters for fake ones."""
    there: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:  # tied ones stay one
                made = nn.Parameter(parameter.detach().to("cuda", dtype))
                module._parameters[name] = there.setdefault(id(parameter), made)
        for name, buffer in module._buffers.items():
            module._buffers[name] = None if buffer is None else buffer.to("cuda")
    return model


def run(label: str, name: str, options: dict[str, Any], dtype: torch.dtype, how: dict[str, Any], backend: str) -> None:
    model, waits = models.make(name, **options), Waits()
    how = dict(how)
    temperatures, want = how.pop("temperatures", None), how.pop("want", ("logprobs",))
    compute = how.pop("capability", (9, 0))
    kernels.capability.cache_clear()
    torch.cuda.get_device_capability = lambda *args: compute  # type: ignore[assignment]
    gpu = SimpleNamespace(major=compute[0], minor=compute[1], total_memory=80 * 2**30)
    torch.cuda.get_device_properties = lambda *args: gpu  # type: ignore[assignment]
    with FakeTensorMode(allow_non_fake_inputs=True):
        moved(model, dtype)
        if how.pop("checkpointing", False):
            models.checkpoint(model)
        is_routed = how.pop("routed", False)
        precision = torch.autocast("cuda", BF16) if how.pop("autocast", False) else nullcontext()
        assert not how
        engine = TreeEngine(
            model, chunk_tokens=16, live_tokens=40, attention=backend, rates=GPU_RATES, self_check=False
        )
        keys = None if temperatures is None else [int(2 * t) for t in temperatures]
        tree = PrefixTree.build(SEQUENCES, keys=keys)
        if is_routed:
            tree = routed(tree, np.arange(sum(map(len, SEQUENCES))) % 9 - 1, np.zeros((8, 2, 2), np.uint8))

        def loss(out: Any, _: Tensor) -> Tensor:
            return torch.stack([getattr(out, one).sum() for one in want]).sum()

        # Compiled functions take no dispatch mode: there, fake tensors themselves stop at the first question.
        with nullcontext() if backend == "flex" else waits, precision:
            try:
                engine.backward(tree, loss, batched=True, want=want, temperatures=temperatures)
            except DataDependentOutputException:
                waits.places += _places(traceback.extract_tb(sys.exc_info()[2]))[-1:]
    report = {"case": label, "backend": backend, "waits": waits.places}
    report |= {"operators": sorted(waits.operators), "heads": sorted(waits.heads)}
    report["projections"] = sorted(waits.projections)
    print(json.dumps(report), flush=True)


def main() -> None:
    cases = [(*case[:-1], backend) for case in CASES for backend in case[-1].split()]
    if find_spec("triton") is None:
        cases = [case for case in cases if case[-1] != "triton"]
    compiled: Any = torch.compile
    torch.compile = lambda f, **options: compiled(f, **(options | {"backend": "aot_eager"}))  # no Triton needed
    torch.Tensor.pin_memory = lambda self: self  # type: ignore[method-assign,assignment]
    torch.amp.autocast_mode.torch.cuda.amp.common.amp_definitely_not_available = lambda: False
    packages._QUERY_STEP = packages._KEY_STEP = 4  # chunks here are far shorter than what is worth a plan of cuDNN's
    kernels.takes_masks = lambda *args: True  # type: ignore[assignment]  # values say whether, and there are none
    torch.cuda.is_bf16_supported = lambda *args: True  # type: ignore[assignment]
    for case in cases:
        run(*case)


if __name__ == "__main__":
    main()
