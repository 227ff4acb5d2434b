"""Stand-ins for the kernels of flash-linear-attention and mamba-ssm: their signatures, over transformers' own torch.

Signatures are of fla-core 0.6.0 (chunk_gated_delta_rule, chunk_kda) and of mamba's source from June 2026 on
(mamba_chunk_scan_combined; mamba-ssm 2.3.2.post1 is the same without `state_dtype`), read from the published files. A
stand-in checks what it gets as the kernel would: batches of one, a float32 state a sequence, indices that are those of
the bounds.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers.models.bamba import modeling_bamba
from transformers.models.kimi_linear import modeling_kimi_linear
from transformers.models.qwen3_5 import modeling_qwen3_5

MAMBA, GATED, KIMI = (
    getattr(function, "__wrapped__", function)
    for function in (
        modeling_bamba.mamba2_chunk_scan,
        modeling_qwen3_5.torch_chunk_gated_delta_rule,
        modeling_kimi_linear.chunk_kimi_delta_attention,
    )
)


def _by_sequence(run, rows, starts, bounds, unit_length):  # type: ignore[no-untyped-def]
    assert all(x.shape[0] == 1 and x.shape[1] == bounds[-1] for x in rows) and bounds.dtype == torch.int64
    assert starts.dtype == torch.float32 and starts.shape[0] == len(bounds) - 1
    outs, ends = [], []
    for k, (begin, end) in enumerate(zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True)):
        out, last = run(
            *(x[:, begin:end] for x in rows),
            initial_state=starts[k : k + 1],
            output_final_state=True,
            use_qk_l2norm_in_kernel=unit_length,
        )
        outs.append(out)
        ends.append(last)
    return torch.cat(outs, 1), torch.cat(ends)


def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale=None,
    initial_state=None,
    output_final_state=False,
    use_qk_l2norm_in_kernel=False,
    use_beta_sigmoid_in_kernel=False,
    allow_neg_eigval=False,
    state_v_first=False,
    cu_seqlens=None,
    cu_seqlens_cpu=None,
    chunk_indices=None,
    cp_context=None,
    **kwargs,
):  # type: ignore[no-untyped-def]
    expected = [
        [piece, block]
        for piece, length in enumerate(cu_seqlens.diff().tolist())
        for block in range((length + 63) // 64)
    ]
    assert chunk_indices.tolist() == expected and chunk_indices.dtype == cu_seqlens.dtype
    assert output_final_state and not kwargs and q.dtype == k.dtype == v.dtype == beta.dtype and g.dim() == 3
    return _by_sequence(GATED, (q, k, v, g, beta), initial_state, cu_seqlens, use_qk_l2norm_in_kernel)


def chunk_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale=None,
    initial_state=None,
    output_final_state=False,
    use_qk_l2norm_in_kernel=False,
    use_gate_in_kernel=False,
    use_beta_sigmoid_in_kernel=False,
    allow_neg_eigval=False,
    safe_gate=False,
    lower_bound=None,
    disable_recompute=False,
    return_intermediate_states=False,
    state_v_first=False,
    cu_seqlens=None,
    cu_seqlens_cpu=None,
    cp_context=None,
    use_graph=False,
    max_num_seqs=None,
    **kwargs,
):  # type: ignore[no-untyped-def]
    assert cu_seqlens_cpu.tolist() == cu_seqlens.tolist() and cu_seqlens_cpu.device.type == "cpu" and g.dim() == 4
    assert output_final_state and not kwargs and q.dtype == k.dtype == v.dtype == beta.dtype
    return _by_sequence(KIMI, (q, k, v, g, beta), initial_state, cu_seqlens, use_qk_l2norm_in_kernel)


def mamba_chunk_scan_combined(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    D=None,
    z=None,
    dt_bias=None,
    initial_states=None,
    seq_idx=None,
    cu_seqlens=None,
    dt_softplus=False,
    dt_limit=(0.0, float("inf")),
    return_final_states=False,
    return_varlen_states=False,
    state_dtype=None,
):  # type: ignore[no-untyped-def]
    assert state_dtype == initial_states.dtype == dt.dtype == torch.float32 and return_final_states
    assert initial_states.shape == (*x.shape[:1], *x.shape[2:], B.shape[3]) and x.dtype == B.dtype == C.dtype
    out, ends = MAMBA(x, dt, A, B, C, chunk_size, initial_states=initial_states, return_final_states=True)
    return out.to(x.dtype), ends


FOUND = {
    "torch_chunk_gated_delta_rule": chunk_gated_delta_rule,
    "chunk_kimi_delta_attention": chunk_kda,
    "mamba2_chunk_scan": mamba_chunk_scan_combined,
}
"""By the function of transformers they stand for, as `app.tree.states.kernels.PACKAGES`."""
