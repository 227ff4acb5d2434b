"""Backends of packages that need a GPU: our side of them, over stand-ins that compute what the kernels do.

Signatures are read from the published files: flash-attn 2.8.3.post2 (FlashAttention-2, and 3 in its hopper/), and
FlashAttention-3 as it is since windows became two arguments. cuDNN's operators are ATen's, whose shapes a trace checks.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from app.tree.attention import BACKENDS, flash, packages
from app.tree.attention.chunk_attention import LayerCall
from app.tree.attention.function import choose_backend
from app.tree.attention.kernels import Math
from tests.app.tree import models
from tests.app.tree.attention.backends import LoopSquares
from tests.app.tree.attention.test_backends import check
from tests.app.tree.parity import masked_block

F64 = torch.float64
ran: list[str] = []


def heads_first(x: Tensor) -> Tensor:
    assert x.stride(-1) == 1
    return (x if x.dim() == 4 else x.unsqueeze(0)).transpose(1, 2)


def bounds_of(bounds: Tensor | None, longest: int | None) -> list[int]:
    assert bounds is not None and bounds.dtype == torch.int32
    found = bounds.tolist()
    assert longest == max(b - a for a, b in pairwise(found))
    return found


def run(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool, bounds: list[int] | None) -> tuple[Tensor, Tensor]:
    assert causal == (bounds is not None) and (bounds is None) == (q.dim() == 4)
    kernel: Any = Math() if bounds is None else LoopSquares(bounds, None)
    out, lse, _ = kernel.forward(*(heads_first(x) for x in (q, k, v)), causal, None, scale)
    return (out.transpose(1, 2), lse) if bounds is None else (out.transpose(1, 2)[0], lse[0])


def back(rows: Any, lse: Tensor, grads: Any, scale: float, causal: bool, bounds: list[int] | None) -> None:
    assert lse.is_contiguous() and all(x.is_contiguous() for x in grads)
    kernel: Any = Math() if bounds is None else LoopSquares(bounds, None)
    grad, q, k, v, out = (heads_first(x) for x in rows)
    found = kernel.backward(grad, q, k, v, out, lse.view(q.shape[:3]), None, causal, None, scale)
    for to, x in zip(grads, found, strict=True):
        to.copy_(x.transpose(1, 2).view(to.shape))


class Flash2:
    """flash_attn.flash_attn_interface."""

    @staticmethod
    def _flash_attn_forward(
        q, k, v, dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes,
        return_softmax,
    ):  # fmt: skip
        assert (dropout_p, window_size_left, window_size_right, softcap, alibi_slopes) == (0, -1, -1, 0, None)
        ran.append("dense")
        return *run(q, k, v, softmax_scale, causal, None), None, torch.tensor(7)

    @staticmethod
    def _flash_attn_varlen_forward(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal,
        window_size_left=-1, window_size_right=-1, softcap=0.0, alibi_slopes=None, return_softmax=False,
        block_table=None, leftpad_k=None, seqused_k=None, zero_tensors=False,
    ):  # fmt: skip
        assert cu_seqlens_q is cu_seqlens_k and max_seqlen_q == max_seqlen_k and dropout_p == 0
        ran.append("squares")
        bounds = bounds_of(cu_seqlens_q, max_seqlen_q)
        return *run(q, k, v, softmax_scale, causal, bounds), None, torch.tensor(7)

    @staticmethod
    def _flash_attn_backward(
        dout, q, k, v, out, softmax_lse, dq, dk, dv, dropout_p, softmax_scale, causal, window_size_left,
        window_size_right, softcap, alibi_slopes, deterministic, rng_state=None,
    ):  # fmt: skip
        assert (dropout_p, window_size_left, window_size_right, softcap, alibi_slopes) == (0, -1, -1, 0, None)
        assert deterministic is False and int(rng_state) == 7
        back((dout, q, k, v, out), softmax_lse, (dq, dk, dv), softmax_scale, causal, None)

    @staticmethod
    def _flash_attn_varlen_backward(
        dout, q, k, v, out, softmax_lse, dq, dk, dv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
        dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes, deterministic,
        rng_state=None, zero_tensors=False,
    ):  # fmt: skip
        assert (dropout_p, window_size_left, window_size_right, softcap, alibi_slopes) == (0, -1, -1, 0, None)
        assert deterministic is False and int(rng_state) == 7 and cu_seqlens_q is cu_seqlens_k
        bounds = bounds_of(cu_seqlens_q, max_seqlen_k)
        back((dout, q, k, v, out), softmax_lse, (dq, dk, dv), softmax_scale, causal, bounds)


class Flash3:
    """hopper/flash_attn_interface; the later one."""

    @staticmethod
    def _flash_attn_forward(
        q, k, v, k_new=None, v_new=None, qv=None, out_=None, cu_seqlens_q=None, cu_seqlens_k=None,
        cu_seqlens_k_new=None, seqused_q=None, seqused_k=None, max_seqlen_q=None, max_seqlen_k=None, page_table=None,
        kv_batch_idx=None, leftpad_k=None, rotary_cos=None, rotary_sin=None, seqlens_rotary=None, q_descale=None,
        k_descale=None, v_descale=None, softmax_scale=None, causal=False, window_size_left=-1, window_size_right=-1,
        attention_chunk=0, softcap=0.0, rotary_interleaved=True, scheduler_metadata=None, num_splits=1, pack_gqa=None,
        sm_margin=0,
    ):  # fmt: skip
        ran.append("dense" if cu_seqlens_q is None else "squares")
        bounds = None if cu_seqlens_q is None else bounds_of(cu_seqlens_k, max_seqlen_k)
        assert cu_seqlens_q is cu_seqlens_k and max_seqlen_q == max_seqlen_k
        return *run(q, k, v, softmax_scale, causal, bounds), torch.empty(0), torch.empty(0)

    @staticmethod
    def _flash_attn_backward(
        dout, q, k, v, out, softmax_lse, cu_seqlens_q=None, cu_seqlens_k=None, sequed_q=None, sequed_k=None,
        max_seqlen_q=None, max_seqlen_k=None, dq=None, dk=None, dv=None, softmax_scale=None, is_causal=False,
        window_size_left=-1, window_size_right=-1, softcap=0.0, deterministic=False, sm_margin=0,
    ):  # fmt: skip
        assert sequed_q is sequed_k is None and cu_seqlens_q is cu_seqlens_k and max_seqlen_q == max_seqlen_k
        bounds = None if cu_seqlens_q is None else bounds_of(cu_seqlens_q, max_seqlen_q)
        back((dout, q, k, v, out), softmax_lse, (dq, dk, dv), softmax_scale, is_causal, bounds)


class Flash3Before(Flash3):
    """As flash-attn 2.8.3.post2 has it: one argument for windows, and `out`."""

    @staticmethod
    def _flash_attn_forward(
        q, k, v, k_new=None, v_new=None, qv=None, out=None, cu_seqlens_q=None, cu_seqlens_k=None,
        cu_seqlens_k_new=None, seqused_q=None, seqused_k=None, max_seqlen_q=None, max_seqlen_k=None, page_table=None,
        kv_batch_idx=None, leftpad_k=None, rotary_cos=None, rotary_sin=None, seqlens_rotary=None, q_descale=None,
        k_descale=None, v_descale=None, softmax_scale=None, causal=False, window_size=(-1, -1), attention_chunk=0,
        softcap=0.0, rotary_interleaved=True, scheduler_metadata=None, num_splits=1, pack_gqa=None, sm_margin=0,
    ):  # fmt: skip
        lengths = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
        lengths |= {"max_seqlen_q": max_seqlen_q, "max_seqlen_k": max_seqlen_k}
        return Flash3._flash_attn_forward(q, k, v, **lengths, softmax_scale=softmax_scale, causal=causal)

    @staticmethod
    def _flash_attn_backward(
        dout, q, k, v, out, softmax_lse, cu_seqlens_q=None, cu_seqlens_k=None, sequed_q=None, sequed_k=None,
        max_seqlen_q=None, max_seqlen_k=None, dq=None, dk=None, dv=None, softmax_scale=None, causal=False,
        window_size=(-1, -1), softcap=0.0, deterministic=False, sm_margin=0,
    ):  # fmt: skip
        lengths = (cu_seqlens_q, cu_seqlens_k, sequed_q, sequed_k, max_seqlen_q, max_seqlen_k)
        Flash3._flash_attn_backward(dout, q, k, v, out, softmax_lse, *lengths, dq, dk, dv, softmax_scale, causal)


class Cudnn:
    """ATen's operators."""

    @staticmethod
    def _scaled_dot_product_cudnn_attention(q, k, v, bias, lse_wanted, dropout, causal, debug, *, scale):
        assert bias is None and lse_wanted and not dropout and not debug and q.shape[2] % packages._QUERY_STEP == 0
        assert k.shape[2] % (packages._QUERY_STEP if causal else packages._KEY_STEP) == 0
        ran.append("causal" if causal else "path")
        out, lse, _ = Math().forward(q, k, v, causal, None, scale)
        return out, lse.unsqueeze(-1), None, None, q.shape[2], k.shape[2], torch.tensor(1), torch.tensor(2), None

    @staticmethod
    def _scaled_dot_product_cudnn_attention_backward(
        grad, q, k, v, out, lse, seed, offset, bias, cum_q, cum_k, max_q, max_k, dropout, causal, *, scale
    ):
        assert (int(seed), int(offset), bias, cum_q, cum_k, dropout) == (1, 2, None, None, None, 0.0)
        assert (max_q, max_k) == (q.shape[2], k.shape[2]) and lse.shape == (*q.shape[:3], 1)
        assert grad.shape == out.shape == q.shape
        return Math().backward(grad, q, k, v, out, lse.squeeze(-1), None, causal, None, scale)


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    ran.clear()
    monkeypatch.setattr(flash, "FlashSquares", lambda bounds, window, device: LoopSquares(bounds, window))
    monkeypatch.setattr(packages, "_aten", Cudnn)
    monkeypatch.setattr(packages, "_QUERY_STEP", 4)
    monkeypatch.setattr(packages, "_KEY_STEP", 3)
    for kind in (packages.PackageBackend, packages.CudnnBackend):
        monkeypatch.setattr(kind, "refusal", lambda self, q, call: None)
    yield


BACKENDS_AND_STANDINS = [
    ("flash2", Flash2, {"dense", "squares"}),
    ("flash3", Flash3, {"dense", "squares"}),
    ("flash3", Flash3Before, {"dense", "squares"}),
    ("cudnn", None, {"causal", "path"}),
]


@pytest.mark.parametrize(("backend", "package", "calls"), BACKENDS_AND_STANDINS)
@pytest.mark.parametrize("window", [None, 5])
def test_float64(
    backend: str, package: Any, calls: set[str], window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forward and backward against dense autograd; windows are left to the kernels that know them."""
    monkeypatch.setattr(packages, "import_module", lambda name: package)
    model = models.make("starcoder2", F64, sliding_window=window)
    model.set_attn_implementation("naive")
    with masked_block(3):
        for budgets in ((4, 9), (9, 20), (1000, 1000)):
            check(model, backend, budgets)
    assert set(ran) == calls if window is None else set(ran) <= calls


def test_auto_takes_flash_3_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """On Hopper, installed; never a package's FlashAttention-2, which is ATen's own."""
    monkeypatch.setattr("app.tree.attention.function._triton_compiles", lambda: True)
    parameter = SimpleNamespace(device=torch.device("cuda"), dtype=torch.bfloat16)
    config = SimpleNamespace(head_dim=128, num_attention_heads=4, num_hidden_layers=2)
    model: Any = SimpleNamespace(
        parameters=lambda: iter([parameter]), config=SimpleNamespace(get_text_config=lambda: config)
    )
    found = {}
    for compute in ((8, 0), (9, 0), (10, 0)):
        for where in ("packages", "kernels", "function"):
            monkeypatch.setattr(f"app.tree.attention.{where}.capability", lambda _, compute=compute: compute)
        for installed in ((), ("flash_attn",), ("flash_attn", "flash_attn_interface")):
            monkeypatch.setattr(packages, "find_spec", lambda name, installed=installed: name in installed or None)
            found[compute, len(installed)] = choose_backend("auto", model).name
    assert found == {
        (compute, n): "flash" if compute != (9, 0) else "triton" if n < 2 else "flash3"
        for compute in ((8, 0), (9, 0), (10, 0))
        for n in range(3)
    }


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    q = torch.empty(1, 4, 3, 64, dtype=torch.bfloat16)
    for name in ("flash2", "flash3", "cudnn"):
        assert "needs a CUDA device" in str(BACKENDS[name].refusal(q, LayerCall(0, 1.0)))
    if packages.find_spec("flash_attn") is None:
        assert "pip install -e '.[flash]'" in str(packages.PACKAGES[1].missing(torch.device("cuda")))
