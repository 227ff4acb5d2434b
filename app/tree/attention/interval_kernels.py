"""Attention of a chunk over [path | itself] as three Triton kernels: forward, gradient of queries, gradients of keys.

Promises: a program holds one block of queries (or of keys) and runs one softmax over the path's keys and then over the
chunk's, of which it visits the blocks that some query of it sees, so that output and log-sum-exp are merged in
registers; the gradients of the path's keys and values are added to their buffers in place, by the one program that owns
a block of keys (no atomic operations: sums repeat bit for bit); grouped-query heads are not repeated. Scores, softmax
and sums are float32 (float64 for float64), products are of the inputs' dtype.

Key j of the chunk is visible to query i when j <= i < ends[j]; a key of the path to all; with a window, where their
depths are less than it apart. Shapes: q [1, Hq, n, d], k and v [1, Hk, n, d], path_k and path_v [1, Hk, p, d], with
d contiguous; Hq a multiple of Hk. Imported where there is Triton alone; on CPUs it runs in Triton's interpreter
(TRITON_INTERPRET=1), for tests. The operators are torch's custom operators, so that traces without values
(FakeTensorMode) see their shapes.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime.interpreter import InterpretedFunction

_NOTHING = tl.constexpr(-1e30)
"""A maximum before any score: finite, so that what is hidden, exp(-inf - it), is 0 and never NaN."""


@triton.jit
def _places(address, first, step, WIDTH: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Addresses of rows [first, first + BLOCK), `step` numbers apart: [BLOCK, WIDTH]. Where a block begins may be
    further than int32 counts (131,072 rows of 128 heads of 128), within it nothing is."""
    row, column = tl.arange(0, BLOCK), tl.arange(0, WIDTH)
    return address + tl.cast(first, tl.int64) * step + (row[:, None] * step + column[None, :])


@triton.jit
def _there(first, rows, HEAD: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Which of these rows and columns there are in [rows, HEAD]."""
    return (first + tl.arange(0, BLOCK) < rows)[:, None] & (tl.arange(0, WIDTH) < HEAD)[None, :]


@triton.jit
def _tile(address, first, rows, step, HEAD: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Rows [first, first + BLOCK) of [rows, HEAD], 0 beyond: [BLOCK, WIDTH]."""
    places = _places(address, first, step, WIDTH, BLOCK)
    return tl.load(places, mask=_there(first, rows, HEAD, WIDTH, BLOCK), other=0.0)


@triton.jit
def _product(a, b, MULTIPLIED: tl.constexpr, SUM: tl.constexpr):  # type: ignore[no-untyped-def]
    return tl.dot(a.to(MULTIPLIED), b.to(MULTIPLIED), input_precision="ieee", out_dtype=SUM)


@triton.jit
def _scores(  # type: ignore[no-untyped-def]
    query, key, SCALE: tl.constexpr, SOFTCAP: tl.constexpr, MULTIPLIED: tl.constexpr, SUM: tl.constexpr
):
    """Scores [queries, keys] before the mask; softcap * tanh(score / softcap) where it is not 0."""
    score = _product(query, tl.trans(key), MULTIPLIED, SUM) * SCALE
    if SOFTCAP != 0.0:
        score = SOFTCAP * (2.0 * tl.sigmoid(score * (2.0 / SOFTCAP)) - 1.0)
    return score


@triton.jit
def _visible(  # type: ignore[no-untyped-def]
    row, depth, column, depths, ends, rows, keys, PATH: tl.constexpr, WINDOW: tl.constexpr
):
    """Which keys each query sees; rows beyond the last see nothing of the chunk."""
    if PATH:
        visible = (row >= 0)[:, None] & (column < keys)[None, :]
        if WINDOW > 0:
            visible = visible & (depth[:, None] - column[None, :] < WINDOW)
    else:
        end = tl.load(ends + column, mask=column < rows, other=0)
        visible = (column[None, :] <= row[:, None]) & (row[:, None] < end[None, :])
        if WINDOW > 0:
            key_depth = tl.load(depths + column, mask=column < rows, other=0)
            visible = visible & (depth[:, None] - key_depth[None, :] < WINDOW)
    return visible


@triton.jit
def _add_to_softmax(  # type: ignore[no-untyped-def]
    most, total, sums, score, visible, value, MULTIPLIED: tl.constexpr, SUM: tl.constexpr
):
    """A running softmax (maximum, sum of exponentials, weighted sum of values) over more keys."""
    score = tl.where(visible, score, float("-inf"))
    higher = tl.maximum(most, tl.max(score, 1))
    before, weight = tl.exp(most - higher), tl.exp(score - higher[:, None])
    total = before * total + tl.sum(weight, 1)
    sums = sums * before[:, None] + _product(weight.to(value.dtype), value, MULTIPLIED, SUM)
    return higher, total, sums


@triton.jit
def _gradient_of_scores(  # type: ignore[no-untyped-def]
    score, visible, lse, delta, grad, value, SOFTCAP: tl.constexpr, MULTIPLIED: tl.constexpr, SUM: tl.constexpr
):
    """Probabilities, and the gradient of the scores as they were before soft-capping."""
    probability = tl.exp(tl.where(visible, score, float("-inf")) - lse[:, None])
    slope = probability * (_product(grad, tl.trans(value), MULTIPLIED, SUM) - delta[:, None])
    if SOFTCAP != 0.0:
        capped = score * (1.0 / SOFTCAP)
        slope = slope * (1.0 - capped * capped)
    return probability, slope


@triton.jit
def _first_seen(row, depth, rows, WINDOW: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """The first key of the path, at the beginning of a block of keys, that any of these queries sees."""
    first = 0
    if WINDOW > 0:
        lowest = tl.min(tl.where(row < rows, depth, 1 << 30), 0)
        first = tl.maximum(lowest - (WINDOW - 1), 0) // BLOCK * BLOCK
    return first


@triton.jit(do_not_specialize=["rows", "path"])
def _forward_kernel(  # type: ignore[no-untyped-def]
    q, k, v, path_k, path_v, sinks, depths, ends, bounds, blocks, out, lse,
    rows, path, q_head, q_row, k_head, k_row, v_head, v_row, path_k_head, path_k_row, path_v_head, path_v_row,
    out_head, out_row,
    SINKS: tl.constexpr, SCALE: tl.constexpr, SOFTCAP: tl.constexpr, WINDOW: tl.constexpr, GROUPS: tl.constexpr,
    HEAD: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, MULTIPLIED: tl.constexpr, SUM: tl.constexpr,
):  # fmt: skip
    here, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    key_head = head // GROUPS
    row = here * BLOCK + tl.arange(0, BLOCK)
    query = _tile(q + head * q_head, here * BLOCK, rows, q_row, HEAD, WIDTH, BLOCK)
    depth = tl.load(depths + row, mask=row < rows, other=0)
    most = tl.full([BLOCK], _NOTHING, SUM)
    total = tl.zeros([BLOCK], SUM)
    sums = tl.zeros([BLOCK, WIDTH], SUM)
    if SINKS:  # a score without a value
        most = tl.zeros([BLOCK], SUM) + tl.load(sinks + head).to(SUM)
        total += 1.0
    for start in range(_first_seen(row, depth, rows, WINDOW, BLOCK), path, BLOCK):
        key = _tile(path_k + key_head * path_k_head, start, path, path_k_row, HEAD, WIDTH, BLOCK)
        value = _tile(path_v + key_head * path_v_head, start, path, path_v_row, HEAD, WIDTH, BLOCK)
        score = _scores(query, key, SCALE, SOFTCAP, MULTIPLIED, SUM)
        visible = _visible(row, depth, start + tl.arange(0, BLOCK), depths, ends, rows, path, True, WINDOW)
        most, total, sums = _add_to_softmax(most, total, sums, score, visible, value, MULTIPLIED, SUM)
    for index in range(tl.load(bounds + here), tl.load(bounds + here + 1)):
        start = tl.load(blocks + index) * BLOCK
        key = _tile(k + key_head * k_head, start, rows, k_row, HEAD, WIDTH, BLOCK)
        value = _tile(v + key_head * v_head, start, rows, v_row, HEAD, WIDTH, BLOCK)
        score = _scores(query, key, SCALE, SOFTCAP, MULTIPLIED, SUM)
        visible = _visible(row, depth, start + tl.arange(0, BLOCK), depths, ends, rows, rows, False, WINDOW)
        most, total, sums = _add_to_softmax(most, total, sums, score, visible, value, MULTIPLIED, SUM)
    total = tl.where(row < rows, total, 1.0)
    place = _places(out + head * out_head, here * BLOCK, out_row, WIDTH, BLOCK)
    there = _there(here * BLOCK, rows, HEAD, WIDTH, BLOCK)
    tl.store(place, (sums / total[:, None]).to(out.dtype.element_ty), mask=there)
    tl.store(lse + head * rows + row, most + tl.log(total), mask=row < rows)


@triton.jit(do_not_specialize=["rows", "path"])
def _query_gradient_kernel(  # type: ignore[no-untyped-def]
    q, k, v, path_k, path_v, out, grad, lse, depths, ends, bounds, blocks, grad_q, deltas,
    rows, path, q_head, q_row, k_head, k_row, v_head, v_row, path_k_head, path_k_row, path_v_head, path_v_row,
    out_head, out_row, grad_head, grad_row, grad_q_head, grad_q_row,
    SCALE: tl.constexpr, SOFTCAP: tl.constexpr, WINDOW: tl.constexpr, GROUPS: tl.constexpr,
    HEAD: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, MULTIPLIED: tl.constexpr, SUM: tl.constexpr,
):  # fmt: skip
    """Also writes `deltas` [Hq, n], the product of every row's output and its gradient, for the keys' kernel."""
    here, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    key_head = head // GROUPS
    row = here * BLOCK + tl.arange(0, BLOCK)
    query = _tile(q + head * q_head, here * BLOCK, rows, q_row, HEAD, WIDTH, BLOCK)
    given = _tile(grad + head * grad_head, here * BLOCK, rows, grad_row, HEAD, WIDTH, BLOCK)
    result = _tile(out + head * out_head, here * BLOCK, rows, out_row, HEAD, WIDTH, BLOCK)
    delta = tl.sum(given.to(SUM) * result.to(SUM), 1)
    tl.store(deltas + head * rows + row, delta, mask=row < rows)
    normaliser = tl.load(lse + head * rows + row, mask=row < rows, other=float("inf"))
    depth = tl.load(depths + row, mask=row < rows, other=0)
    sums = tl.zeros([BLOCK, WIDTH], SUM)
    for start in range(_first_seen(row, depth, rows, WINDOW, BLOCK), path, BLOCK):
        key = _tile(path_k + key_head * path_k_head, start, path, path_k_row, HEAD, WIDTH, BLOCK)
        value = _tile(path_v + key_head * path_v_head, start, path, path_v_row, HEAD, WIDTH, BLOCK)
        score = _scores(query, key, SCALE, SOFTCAP, MULTIPLIED, SUM)
        visible = _visible(row, depth, start + tl.arange(0, BLOCK), depths, ends, rows, path, True, WINDOW)
        _, slope = _gradient_of_scores(score, visible, normaliser, delta, given, value, SOFTCAP, MULTIPLIED, SUM)
        sums += _product(slope.to(key.dtype), key, MULTIPLIED, SUM)
    for index in range(tl.load(bounds + here), tl.load(bounds + here + 1)):
        start = tl.load(blocks + index) * BLOCK
        key = _tile(k + key_head * k_head, start, rows, k_row, HEAD, WIDTH, BLOCK)
        value = _tile(v + key_head * v_head, start, rows, v_row, HEAD, WIDTH, BLOCK)
        score = _scores(query, key, SCALE, SOFTCAP, MULTIPLIED, SUM)
        visible = _visible(row, depth, start + tl.arange(0, BLOCK), depths, ends, rows, rows, False, WINDOW)
        _, slope = _gradient_of_scores(score, visible, normaliser, delta, given, value, SOFTCAP, MULTIPLIED, SUM)
        sums += _product(slope.to(key.dtype), key, MULTIPLIED, SUM)
    place = _places(grad_q + head * grad_q_head, here * BLOCK, grad_q_row, WIDTH, BLOCK)
    there = _there(here * BLOCK, rows, HEAD, WIDTH, BLOCK)
    tl.store(place, (sums * SCALE).to(grad_q.dtype.element_ty), mask=there)


@triton.jit(do_not_specialize=["rows", "keys"])
def _key_gradient_kernel(  # type: ignore[no-untyped-def]
    q, k, v, grad, lse, deltas, depths, ends, bounds, blocks, grad_k, grad_v,
    rows, keys, q_head, q_row, k_head, k_row, v_head, v_row, grad_head, grad_row,
    grad_k_head, grad_k_row, grad_v_head, grad_v_row,
    PATH: tl.constexpr, LISTED: tl.constexpr,
    SCALE: tl.constexpr, SOFTCAP: tl.constexpr, WINDOW: tl.constexpr, GROUPS: tl.constexpr,
    HEAD: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, MULTIPLIED: tl.constexpr, SUM: tl.constexpr,
):  # fmt: skip
    """A block of keys over all queries of its group of heads: those of the listed blocks, or of all. Adds to what
    `grad_k` and `grad_v` hold."""
    here, key_head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    start = here * BLOCK
    column = start + tl.arange(0, BLOCK)
    key = _tile(k + key_head * k_head, start, keys, k_row, HEAD, WIDTH, BLOCK)
    value = _tile(v + key_head * v_head, start, keys, v_row, HEAD, WIDTH, BLOCK)
    sums_k = tl.zeros([BLOCK, WIDTH], SUM)
    sums_v = tl.zeros([BLOCK, WIDTH], SUM)
    first, stop = 0, tl.cdiv(rows, BLOCK)
    if LISTED:
        first, stop = tl.load(bounds + here), tl.load(bounds + here + 1)
    for member in range(GROUPS):
        head = key_head * GROUPS + member
        for index in range(first, stop):
            at = index * BLOCK
            if LISTED:
                at = tl.load(blocks + index) * BLOCK
            row = at + tl.arange(0, BLOCK)
            query = _tile(q + head * q_head, at, rows, q_row, HEAD, WIDTH, BLOCK)
            given = _tile(grad + head * grad_head, at, rows, grad_row, HEAD, WIDTH, BLOCK)
            normaliser = tl.load(lse + head * rows + row, mask=row < rows, other=float("inf"))
            delta = tl.load(deltas + head * rows + row, mask=row < rows, other=0.0)
            depth = tl.load(depths + row, mask=row < rows, other=0)
            score = _scores(query, key, SCALE, SOFTCAP, MULTIPLIED, SUM)
            visible = _visible(row, depth, column, depths, ends, rows, keys, PATH, WINDOW)
            probability, slope = _gradient_of_scores(
                score, visible, normaliser, delta, given, value, SOFTCAP, MULTIPLIED, SUM
            )
            sums_v += _product(tl.trans(probability.to(given.dtype)), given, MULTIPLIED, SUM)
            sums_k += _product(tl.trans(slope.to(query.dtype)), query, MULTIPLIED, SUM)
    there = _there(start, keys, HEAD, WIDTH, BLOCK)
    to_k = _places(grad_k + key_head * grad_k_head, start, grad_k_row, WIDTH, BLOCK)
    to_v = _places(grad_v + key_head * grad_v_head, start, grad_v_row, WIDTH, BLOCK)
    tl.store(to_k, tl.load(to_k, mask=there, other=0.0) + sums_k * SCALE, mask=there)
    tl.store(to_v, tl.load(to_v, mask=there, other=0.0) + sums_v, mask=there)


@torch.library.custom_op("arborist::interval_attention", mutates_args=())
def interval_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    path_k: Tensor | None,
    path_v: Tensor | None,
    sinks: Tensor | None,
    intervals: list[Tensor],
    block: int,
    scale: float,
    window: int,
    softcap: float,
) -> tuple[Tensor, Tensor]:
    """Output like q, and log-sum-exp float32 (float64) [1, Hq, n].

    `sinks` [Hq]: a score a head without a value. `intervals`: `depths` and `ends` int32 [n], then blocks of keys that
    each block of queries sees, as int32 bounds [blocks + 1] and indices; more is not read. `window`, `softcap`: 0
    where there is none.
    """
    out, lse = _outputs(q)
    depths, ends, bounds, blocks = intervals[:4]
    keys, values = (k, v) if path_k is None or path_v is None else (path_k, path_v)
    rows, path = q.shape[2], 0 if path_k is None else path_k.shape[2]
    constants = _constants(q, k, block, scale, window, softcap)
    _forward_kernel[(triton.cdiv(rows, block), q.shape[1])](
        q, k, v, keys, values, lse if sinks is None else sinks, depths, ends, bounds, blocks, out, lse, rows, path,
        *_strides(q, k, v, keys, values, out), SINKS=sinks is not None, **constants,
    )  # fmt: skip
    return out, lse


@interval_attention.register_fake
def _(q: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return _outputs(q)


@torch.library.custom_op("arborist::interval_attention_backward", mutates_args=("path_grad_k", "path_grad_v"))
def interval_attention_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    path_k: Tensor | None,
    path_v: Tensor | None,
    path_grad_k: Tensor | None,
    path_grad_v: Tensor | None,
    out: Tensor,
    lse: Tensor,
    intervals: list[Tensor],
    block: int,
    scale: float,
    window: int,
    softcap: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, in its dtype, and of k and v, in float32 (float64); those of the path's keys and values are added
    to `path_grad_k` and `path_grad_v` [1, Hk, p, d], which are float32 (float64).

    `intervals`: as in the forward, then blocks of queries that see each block of keys, and with a window that ends
    inside the path those that see each block of the path's keys.
    """
    depths, ends, bounds, blocks, key_bounds, key_blocks, *listed = intervals
    rows, (grad_q, grad_k, grad_v), deltas = q.shape[2], _gradients(q, k, v), torch.empty_like(lse)
    keys, values = (k, v) if path_k is None or path_v is None else (path_k, path_v)
    path = 0 if path_k is None else path_k.shape[2]
    constants = _constants(q, k, block, scale, window, softcap)
    _query_gradient_kernel[(triton.cdiv(rows, block), q.shape[1])](
        q, k, v, keys, values, out, grad, lse, depths, ends, bounds, blocks, grad_q, deltas, rows, path,
        *_strides(q, k, v, keys, values, out, grad, grad_q), **constants,
    )  # fmt: skip
    grad_k.zero_()
    grad_v.zero_()
    _key_gradient_kernel[(triton.cdiv(rows, block), k.shape[1])](
        q, k, v, grad, lse, deltas, depths, ends, key_bounds, key_blocks, grad_k, grad_v, rows, rows,
        *_strides(q, k, v, grad, grad_k, grad_v), PATH=False, LISTED=True, **constants,
    )  # fmt: skip
    if path_grad_k is not None and path_grad_v is not None:
        bounds, blocks = listed or (bounds, blocks)
        _key_gradient_kernel[(triton.cdiv(path, block), k.shape[1])](
            q, keys, values, grad, lse, deltas, depths, ends, bounds, blocks, path_grad_k, path_grad_v, rows, path,
            *_strides(q, keys, values, grad, path_grad_k, path_grad_v), PATH=True, LISTED=bool(listed), **constants,
        )  # fmt: skip
    return grad_q, grad_k, grad_v


@interval_attention_backward.register_fake
def _(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return _gradients(q, k, v)


def _outputs(q: Tensor) -> tuple[Tensor, Tensor]:
    """Room for the output, as a model reads it on ([1, n, Hq, d] contiguous), and the log-sum-exp."""
    lse = torch.empty(q.shape[:3], dtype=torch.promote_types(torch.float32, q.dtype), device=q.device)
    return _by_row(q, q.dtype), lse


def _gradients(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    dtype = torch.promote_types(torch.float32, q.dtype)
    return _by_row(q, q.dtype), _by_row(k, dtype), _by_row(v, dtype)


def _by_row(like: Tensor, dtype: torch.dtype) -> Tensor:
    """[1, H, n, d] whose memory is [1, n, H, d]."""
    _, heads, rows, width = like.shape
    return torch.empty((1, rows, heads, width), dtype=dtype, device=like.device).transpose(1, 2)


def _strides(*tensors: Tensor) -> list[int]:
    """From head to head and from row to row of each."""
    return [stride for x in tensors for stride in (x.stride(1), x.stride(2))]


def _constants(q: Tensor, k: Tensor, block: int, scale: float, window: int, softcap: float) -> dict[str, Any]:
    """What the kernels are compiled for; four warps a block of 64 rows of 64 numbers, eight for wider ones."""
    sums, multiplied = _KINDS[torch.promote_types(torch.float32, q.dtype)], _KINDS[q.dtype]
    if multiplied == tl.bfloat16 and INTERPRETED:  # whose products take bf16 numbers for integers
        multiplied = tl.float32
    return {
        "SCALE": scale,
        "SOFTCAP": softcap,
        "WINDOW": window,
        "GROUPS": q.shape[1] // k.shape[1],
        "HEAD": q.shape[3],
        "WIDTH": max(16, triton.next_power_of_2(q.shape[3])),
        "BLOCK": block,
        "MULTIPLIED": multiplied,
        "SUM": sums,
        "num_warps": 4 if q.shape[3] <= 64 else 8,
        "num_stages": 2,
    }


_KINDS = {
    torch.float64: tl.float64,
    torch.float32: tl.float32,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
}
INTERPRETED = isinstance(_forward_kernel, InterpretedFunction)
"""Whether the kernels run in Triton's interpreter, on any device, instead of being compiled for a GPU."""
