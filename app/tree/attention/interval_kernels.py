"""Attention of a chunk over [path | itself] as three Triton kernels: forward, gradient of queries, gradients of keys.

Promises: a program holds one block of queries (or of keys) and runs one softmax over the path's keys and then over the
chunk's, of which it visits the blocks that some query of it sees, so that output and log-sum-exp are merged in
registers; blocks all of which all its queries see are computed without a mask; the gradients of the path's keys and
values are added to their buffers in place, by the one program that owns a block of keys (no atomic operations: sums
repeat bit for bit); grouped-query heads are not repeated. Scores, softmax and sums are float32 (float64 for float64),
products are of the inputs' dtype.

Key j of the chunk is visible to query i when j <= i < ends[j]; a key of the path to all; with a window, where their
depths are less than it apart. Shapes: q [1, Hq, n, d], k and v [1, Hk, n, d], path_k and path_v [1, Hk, p, d], with
d contiguous; Hq a multiple of Hk. Imported where there is Triton alone; on CPUs it runs in Triton's interpreter
(TRITON_INTERPRET=1), for tests. The operators are torch's custom operators, so that traces without values
(FakeTensorMode) see their shapes.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime.interpreter import InterpretedFunction

_NOTHING = tl.constexpr(-1e30)
"""A maximum before any score: finite, so that what is hidden, 2^(-inf - it), is 0 and never NaN."""
_LOG2_E = tl.constexpr(1.4426950408889634)
_LN_2 = tl.constexpr(0.6931471805599453)


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
def _tile(  # type: ignore[no-untyped-def]
    address, first, rows, step, WHOLE: tl.constexpr, HEAD: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Rows [first, first + BLOCK) of [rows, HEAD], 0 beyond (of a WHOLE block, none is): [BLOCK, WIDTH]."""
    places = _places(address, first, step, WIDTH, BLOCK)
    if WHOLE and HEAD == WIDTH:
        return tl.load(places)
    return tl.load(places, mask=_there(first, rows, HEAD, WIDTH, BLOCK), other=0.0)


@triton.jit
def _listed(bounds, here):  # type: ignore[no-untyped-def]
    """Of the listed blocks, this one's: where its whole ones begin, where those with a mask do, and their end."""
    at = bounds + 2 * here
    return tl.load(at), tl.load(at + 1), tl.load(at + 2)


@triton.jit
def _product(a, b, MULTIPLIED: tl.constexpr, SUM: tl.constexpr):  # type: ignore[no-untyped-def]
    return tl.dot(a.to(MULTIPLIED), b.to(MULTIPLIED), input_precision="ieee", out_dtype=SUM)


@triton.jit
def _scores(  # type: ignore[no-untyped-def]
    query, key, SCALE: tl.constexpr, SOFTCAP: tl.constexpr, MULTIPLIED: tl.constexpr, SUM: tl.constexpr
):
    """Scores [queries, keys] before the mask, still without `SCALE`; softcap * tanh(score / softcap) where that is not
    0. Times UNIT they are powers of two: one multiply-add with the maximum, where powers of e take three operations."""
    score = _product(query, tl.trans(key), MULTIPLIED, SUM)
    if SOFTCAP != 0.0:
        score = SOFTCAP - 2.0 * SOFTCAP / (tl.exp2(score * (2.0 * _LOG2_E * SCALE / SOFTCAP)) + 1.0)
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
def _first_masked(row, depth, rows, path, WINDOW: tl.constexpr, KEYS: tl.constexpr):  # type: ignore[no-untyped-def]
    """The first key of the path that needs a mask. Those before it all these queries see where there is no window,
    and none where there is one."""
    masked = path // KEYS * KEYS
    if WINDOW > 0:
        lowest = tl.min(tl.where(row < rows, depth, 1 << 30), 0)
        masked = tl.maximum(lowest - (WINDOW - 1), 0) // KEYS * KEYS
    return masked


@triton.jit
def _add_to_softmax(  # type: ignore[no-untyped-def]
    most, total, sums, query, row, depth, k, v, start, k_row, v_row, depths, ends, rows, keys,
    PATH: tl.constexpr, WHOLE: tl.constexpr,
    SCALE: tl.constexpr, UNIT: tl.constexpr, SOFTCAP: tl.constexpr, WINDOW: tl.constexpr,
    HEAD: tl.constexpr, WIDTH: tl.constexpr, KEYS: tl.constexpr, MULTIPLIED: tl.constexpr, SUM: tl.constexpr,
):  # fmt: skip
    """A running softmax (maximum as a power of two, sum of powers, weighted sum of values) over one more block of keys,
    which has a mask where it is not WHOLE."""
    key = _tile(k, start, keys, k_row, WHOLE, HEAD, WIDTH, KEYS)
    value = _tile(v, start, keys, v_row, WHOLE, HEAD, WIDTH, KEYS)
    score = _scores(query, key, SCALE, SOFTCAP, MULTIPLIED, SUM)
    if not WHOLE:
        column = start + tl.arange(0, KEYS)
        visible = _visible(row, depth, column, depths, ends, rows, keys, PATH, WINDOW)
        score = tl.where(visible, score, float("-inf"))
    higher = tl.maximum(most, tl.max(score, 1) * UNIT)
    before, weight = tl.exp2(most - higher), tl.exp2(score * UNIT - higher[:, None])
    total = before * total + tl.sum(weight, 1)
    sums = sums * before[:, None] + _product(weight.to(value.dtype), value, MULTIPLIED, SUM)
    return higher, total, sums


@triton.jit(do_not_specialize=["rows", "path"])
def _forward_kernel(  # type: ignore[no-untyped-def]
    q, k, v, path_k, path_v, sinks, depths, ends, bounds, blocks, out, lse,
    rows, path, q_head, q_row, k_head, k_row, v_head, v_row, path_k_head, path_k_row, path_v_head, path_v_row,
    out_head, out_row,
    SINKS: tl.constexpr, SCALE: tl.constexpr, UNIT: tl.constexpr, SOFTCAP: tl.constexpr, WINDOW: tl.constexpr,
    GROUPS: tl.constexpr, HEAD: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    MULTIPLIED: tl.constexpr, SUM: tl.constexpr,
):  # fmt: skip
    here, head = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(1).to(tl.int64)  # the longest begin first
    key_head = head // GROUPS
    row = here * ROWS + tl.arange(0, ROWS)
    query = _tile(q + head * q_head, here * ROWS, rows, q_row, False, HEAD, WIDTH, ROWS)
    depth = tl.load(depths + row, mask=row < rows, other=0)
    most = tl.full([ROWS], _NOTHING, SUM)
    total = tl.zeros([ROWS], SUM)
    sums = tl.zeros([ROWS, WIDTH], SUM)
    if SINKS:  # a score without a value
        most = tl.zeros([ROWS], SUM) + tl.load(sinks + head).to(SUM) * _LOG2_E
        total += 1.0
    k, path_k = k + key_head * k_head, path_k + key_head * path_k_head
    v, path_v = v + key_head * v_head, path_v + key_head * path_v_head
    masked = _first_masked(row, depth, rows, path, WINDOW, KEYS)
    if WINDOW == 0:
        for start in range(0, masked, KEYS):
            most, total, sums = _add_to_softmax(
                most, total, sums, query, row, depth, path_k, path_v, start, path_k_row, path_v_row,
                depths, ends, rows, path, True, True, SCALE, UNIT, SOFTCAP, WINDOW, HEAD, WIDTH, KEYS, MULTIPLIED, SUM,
            )  # fmt: skip
    for start in range(masked, path, KEYS):
        most, total, sums = _add_to_softmax(
            most, total, sums, query, row, depth, path_k, path_v, start, path_k_row, path_v_row,
            depths, ends, rows, path, True, False, SCALE, UNIT, SOFTCAP, WINDOW, HEAD, WIDTH, KEYS, MULTIPLIED, SUM,
        )  # fmt: skip
    first, masked, stop = _listed(bounds, here)
    for index in range(first, masked):
        most, total, sums = _add_to_softmax(
            most, total, sums, query, row, depth, k, v, tl.load(blocks + index) * KEYS, k_row, v_row,
            depths, ends, rows, rows, False, True, SCALE, UNIT, SOFTCAP, WINDOW, HEAD, WIDTH, KEYS, MULTIPLIED, SUM,
        )  # fmt: skip
    for index in range(masked, stop):
        most, total, sums = _add_to_softmax(
            most, total, sums, query, row, depth, k, v, tl.load(blocks + index) * KEYS, k_row, v_row,
            depths, ends, rows, rows, False, False, SCALE, UNIT, SOFTCAP, WINDOW, HEAD, WIDTH, KEYS, MULTIPLIED, SUM,
        )  # fmt: skip
    total = tl.where(row < rows, total, 1.0)
    place = _places(out + head * out_head, here * ROWS, out_row, WIDTH, ROWS)
    there = _there(here * ROWS, rows, HEAD, WIDTH, ROWS)
    tl.store(place, (sums / total[:, None]).to(out.dtype.element_ty), mask=there)
    tl.store(lse + head * rows + row, (most + tl.log2(total)) * _LN_2, mask=row < rows)


@triton.jit
def _gradient_of_scores(  # type: ignore[no-untyped-def]
    query, key, given, value, row, depth, column, normaliser, delta, depths, ends, rows, keys,
    PATH: tl.constexpr, WHOLE: tl.constexpr,
    SCALE: tl.constexpr, UNIT: tl.constexpr, SOFTCAP: tl.constexpr, WINDOW: tl.constexpr,
    MULTIPLIED: tl.constexpr, SUM: tl.constexpr,
):  # fmt: skip
    """Probabilities, and the gradient of the scores as they were before soft-capping. `normaliser`: log-sum-exp, as a
    power of two."""
    score = _scores(query, key, SCALE, SOFTCAP, MULTIPLIED, SUM)
    seen = score
    if not WHOLE:
        visible = _visible(row, depth, column, depths, ends, rows, keys, PATH, WINDOW)
        seen = tl.where(visible, score, float("-inf"))
    probability = tl.exp2(seen * UNIT - normaliser[:, None])
    slope = probability * (_product(given, tl.trans(value), MULTIPLIED, SUM) - delta[:, None])
    if SOFTCAP != 0.0:
        capped = score * (1.0 / SOFTCAP)
        slope = slope * (1.0 - capped * capped)
    return probability, slope


@triton.jit
def _add_to_queries(  # type: ignore[no-untyped-def]
    sums, query, given, row, depth, normaliser, delta, k, v, start, k_row, v_row, depths, ends, rows, keys,
    PATH: tl.constexpr, WHOLE: tl.constexpr,
    SCALE: tl.constexpr, UNIT: tl.constexpr, SOFTCAP: tl.constexpr, WINDOW: tl.constexpr,
    HEAD: tl.constexpr, WIDTH: tl.constexpr, KEYS: tl.constexpr, MULTIPLIED: tl.constexpr, SUM: tl.constexpr,
):  # fmt: skip
    """Gradients of a block of queries (without SCALE), with what one more block of keys gives them."""
    key = _tile(k, start, keys, k_row, WHOLE, HEAD, WIDTH, KEYS)
    value = _tile(v, start, keys, v_row, WHOLE, HEAD, WIDTH, KEYS)
    column = start + tl.arange(0, KEYS)
    _, slope = _gradient_of_scores(
        query, key, given, value, row, depth, column, normaliser, delta, depths, ends, rows, keys,
        PATH, WHOLE, SCALE, UNIT, SOFTCAP, WINDOW, MULTIPLIED, SUM,
    )  # fmt: skip
    return sums + _product(slope.to(key.dtype), key, MULTIPLIED, SUM)


@triton.jit(do_not_specialize=["rows", "path"])
def _query_gradient_kernel(  # type: ignore[no-untyped-def]
    q, k, v, path_k, path_v, out, grad, lse, depths, ends, bounds, blocks, grad_q, deltas,
    rows, path, q_head, q_row, k_head, k_row, v_head, v_row, path_k_head, path_k_row, path_v_head, path_v_row,
    out_head, out_row, grad_head, grad_row, grad_q_head, grad_q_row,
    SCALE: tl.constexpr, UNIT: tl.constexpr, SOFTCAP: tl.constexpr, WINDOW: tl.constexpr,
    GROUPS: tl.constexpr, HEAD: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    MULTIPLIED: tl.constexpr, SUM: tl.constexpr,
):  # fmt: skip
    """Also writes `deltas` [Hq, n], the product of every row's output and its gradient, for the keys' kernel."""
    here, head = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(1).to(tl.int64)
    key_head = head // GROUPS
    row = here * ROWS + tl.arange(0, ROWS)
    query = _tile(q + head * q_head, here * ROWS, rows, q_row, False, HEAD, WIDTH, ROWS)
    given = _tile(grad + head * grad_head, here * ROWS, rows, grad_row, False, HEAD, WIDTH, ROWS)
    result = _tile(out + head * out_head, here * ROWS, rows, out_row, False, HEAD, WIDTH, ROWS)
    delta = tl.sum(given.to(SUM) * result.to(SUM), 1)
    tl.store(deltas + head * rows + row, delta, mask=row < rows)
    normaliser = tl.load(lse + head * rows + row, mask=row < rows, other=float("inf")) * _LOG2_E
    depth = tl.load(depths + row, mask=row < rows, other=0)
    sums = tl.zeros([ROWS, WIDTH], SUM)
    k, path_k = k + key_head * k_head, path_k + key_head * path_k_head
    v, path_v = v + key_head * v_head, path_v + key_head * path_v_head
    masked = _first_masked(row, depth, rows, path, WINDOW, KEYS)
    if WINDOW == 0:
        for start in range(0, masked, KEYS):
            sums = _add_to_queries(
                sums, query, given, row, depth, normaliser, delta, path_k, path_v, start, path_k_row, path_v_row,
                depths, ends, rows, path, True, True, SCALE, UNIT, SOFTCAP, WINDOW, HEAD, WIDTH, KEYS, MULTIPLIED, SUM,
            )  # fmt: skip
    for start in range(masked, path, KEYS):
        sums = _add_to_queries(
            sums, query, given, row, depth, normaliser, delta, path_k, path_v, start, path_k_row, path_v_row,
            depths, ends, rows, path, True, False, SCALE, UNIT, SOFTCAP, WINDOW, HEAD, WIDTH, KEYS, MULTIPLIED, SUM,
        )  # fmt: skip
    first, masked, stop = _listed(bounds, here)
    for index in range(first, masked):
        sums = _add_to_queries(
            sums, query, given, row, depth, normaliser, delta, k, v, tl.load(blocks + index) * KEYS, k_row, v_row,
            depths, ends, rows, rows, False, True, SCALE, UNIT, SOFTCAP, WINDOW, HEAD, WIDTH, KEYS, MULTIPLIED, SUM,
        )  # fmt: skip
    for index in range(masked, stop):
        sums = _add_to_queries(
            sums, query, given, row, depth, normaliser, delta, k, v, tl.load(blocks + index) * KEYS, k_row, v_row,
            depths, ends, rows, rows, False, False, SCALE, UNIT, SOFTCAP, WINDOW, HEAD, WIDTH, KEYS, MULTIPLIED, SUM,
        )  # fmt: skip
    place = _places(grad_q + head * grad_q_head, here * ROWS, grad_q_row, WIDTH, ROWS)
    there = _there(here * ROWS, rows, HEAD, WIDTH, ROWS)
    tl.store(place, (sums * SCALE).to(grad_q.dtype.element_ty), mask=there)


@triton.jit
def _add_to_keys(  # type: ignore[no-untyped-def]
    sums_k, sums_v, key, value, column, q, grad, lse, deltas, start, q_row, grad_row, depths, ends, rows, keys,
    PATH: tl.constexpr, WHOLE: tl.constexpr, COLUMNS: tl.constexpr,
    SCALE: tl.constexpr, UNIT: tl.constexpr, SOFTCAP: tl.constexpr, WINDOW: tl.constexpr,
    HEAD: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, MULTIPLIED: tl.constexpr, SUM: tl.constexpr,
):  # fmt: skip
    """Gradients of a block of keys (without SCALE) and values, with what one more block of queries gives them; as
    COLUMNS where Triton from 3.4 to 3.7.0 makes wrong code of products whose first factor is another one's transposed
    result (Hopper; flash-linear-attention's issue 640)."""
    row = start + tl.arange(0, ROWS)
    query = _tile(q, start, rows, q_row, WHOLE, HEAD, WIDTH, ROWS)
    given = _tile(grad, start, rows, grad_row, WHOLE, HEAD, WIDTH, ROWS)
    normaliser = tl.load(lse + row, mask=row < rows, other=float("inf")) * _LOG2_E
    delta = tl.load(deltas + row, mask=row < rows, other=0.0)
    depth = tl.load(depths + row, mask=row < rows, other=0)
    probability, slope = _gradient_of_scores(
        query, key, given, value, row, depth, column, normaliser, delta, depths, ends, rows, keys,
        PATH, WHOLE, SCALE, UNIT, SOFTCAP, WINDOW, MULTIPLIED, SUM,
    )  # fmt: skip
    if COLUMNS:
        sums_v += _product(tl.trans(given), probability.to(given.dtype), MULTIPLIED, SUM)
        sums_k += _product(tl.trans(query), slope.to(query.dtype), MULTIPLIED, SUM)
    else:
        sums_v += _product(tl.trans(probability.to(given.dtype)), given, MULTIPLIED, SUM)
        sums_k += _product(tl.trans(slope.to(query.dtype)), query, MULTIPLIED, SUM)
    return sums_k, sums_v


@triton.jit(do_not_specialize=["rows", "keys"])
def _key_gradient_kernel(  # type: ignore[no-untyped-def]
    q, k, v, grad, lse, deltas, depths, ends, bounds, blocks, grad_k, grad_v,
    rows, keys, q_head, q_row, k_head, k_row, v_head, v_row, grad_head, grad_row,
    grad_k_head, grad_k_row, grad_v_head, grad_v_row,
    PATH: tl.constexpr, LISTED: tl.constexpr, COLUMNS: tl.constexpr,
    SCALE: tl.constexpr, UNIT: tl.constexpr, SOFTCAP: tl.constexpr, WINDOW: tl.constexpr,
    GROUPS: tl.constexpr, HEAD: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    MULTIPLIED: tl.constexpr, SUM: tl.constexpr,
):  # fmt: skip
    """A block of keys over all queries of its group of heads: those of the listed blocks, or of all. Adds to what
    `grad_k` and `grad_v` hold."""
    here, key_head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    column = here * KEYS + tl.arange(0, KEYS)
    key = _tile(k + key_head * k_head, here * KEYS, keys, k_row, False, HEAD, WIDTH, KEYS)
    value = _tile(v + key_head * v_head, here * KEYS, keys, v_row, False, HEAD, WIDTH, KEYS)
    shape: tl.constexpr = (WIDTH, KEYS) if COLUMNS else (KEYS, WIDTH)
    sums_k, sums_v = tl.zeros(shape, SUM), tl.zeros(shape, SUM)
    first, masked, stop = 0, rows // ROWS, tl.cdiv(rows, ROWS)
    if LISTED:
        first, masked, stop = _listed(bounds, here)
    for member in range(GROUPS):
        head = key_head * GROUPS + member
        for index in range(first, masked):
            at = index * ROWS
            if LISTED:
                at = tl.load(blocks + index) * ROWS
            sums_k, sums_v = _add_to_keys(
                sums_k, sums_v, key, value, column, q + head * q_head, grad + head * grad_head,
                lse + head * rows, deltas + head * rows, at, q_row, grad_row, depths, ends, rows, keys,
                PATH, True, COLUMNS, SCALE, UNIT, SOFTCAP, WINDOW, HEAD, WIDTH, ROWS, MULTIPLIED, SUM,
            )  # fmt: skip
        for index in range(masked, stop):
            at = index * ROWS
            if LISTED:
                at = tl.load(blocks + index) * ROWS
            sums_k, sums_v = _add_to_keys(
                sums_k, sums_v, key, value, column, q + head * q_head, grad + head * grad_head,
                lse + head * rows, deltas + head * rows, at, q_row, grad_row, depths, ends, rows, keys,
                PATH, False, COLUMNS, SCALE, UNIT, SOFTCAP, WINDOW, HEAD, WIDTH, ROWS, MULTIPLIED, SUM,
            )  # fmt: skip
    there = _there(here * KEYS, keys, HEAD, WIDTH, KEYS)
    to_k = _places(grad_k + key_head * grad_k_head, here * KEYS, grad_k_row, WIDTH, KEYS)
    to_v = _places(grad_v + key_head * grad_v_head, here * KEYS, grad_v_row, WIDTH, KEYS)
    if COLUMNS:
        to_k, to_v, there = tl.trans(to_k), tl.trans(to_v), tl.trans(there)
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
    blocks: list[int],
    scale: float,
    window: int,
    softcap: float,
) -> tuple[Tensor, Tensor]:
    """Output like q, and log-sum-exp float32 (float64) [1, Hq, n].

    `sinks` [Hq]: a score a head without a value. `intervals`: `depths` and `ends` int32 [n], then blocks of keys that
    each block of queries sees, as int32 bounds [2 blocks + 1] (of those that all of it see, then of others) and
    indices; more is not read. `blocks`: `interval.Blocks.flat`. `window`, `softcap`: 0 for none.
    """
    out, lse = _outputs(q)
    depths, ends, bounds, listed = intervals[:4]
    keys, values = (k, v) if path_k is None or path_v is None else (path_k, path_v)
    rows, path = q.shape[2], 0 if path_k is None else path_k.shape[2]
    constants = _constants(q, k, blocks[:4], scale, window, softcap)
    with torch.cuda.device_of(q):  # Triton launches on the current device, whatever its arguments' is
        _forward_kernel[(triton.cdiv(rows, blocks[0]), q.shape[1])](
            q, k, v, keys, values, lse if sinks is None else sinks, depths, ends, bounds, listed, out, lse, rows, path,
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
    blocks: list[int],
    scale: float,
    window: int,
    softcap: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, in its dtype, and of k and v, in float32 (float64); those of the path's keys and values are added
    to `path_grad_k` and `path_grad_v` [1, Hk, p, d], which are float32 (float64).

    `intervals`: as in the forward, then the same for blocks of the gradients of queries, blocks of queries that see
    each block of keys, and with a window that ends inside the path those that see each block of the path's keys.
    """
    depths, ends, _, _, bounds, listed, key_bounds, key_listed, *path_listed = intervals
    rows, (grad_q, grad_k, grad_v), deltas = q.shape[2], _gradients(q, k, v), torch.empty_like(lse)
    keys, values = (k, v) if path_k is None or path_v is None else (path_k, path_v)
    path = 0 if path_k is None else path_k.shape[2]
    constants = _constants(q, k, blocks[4:8], scale, window, softcap)
    by_keys = _constants(q, k, blocks[8:12], scale, window, softcap) | {"COLUMNS": bool(blocks[12])}
    grad_k.zero_()
    grad_v.zero_()
    with torch.cuda.device_of(q):
        _query_gradient_kernel[(triton.cdiv(rows, blocks[4]), q.shape[1])](
            q, k, v, keys, values, out, grad, lse, depths, ends, bounds, listed, grad_q, deltas, rows, path,
            *_strides(q, k, v, keys, values, out, grad, grad_q), **constants,
        )  # fmt: skip
        _key_gradient_kernel[(triton.cdiv(rows, blocks[9]), k.shape[1])](
            q, k, v, grad, lse, deltas, depths, ends, key_bounds, key_listed, grad_k, grad_v, rows, rows,
            *_strides(q, k, v, grad, grad_k, grad_v), PATH=False, LISTED=True, **by_keys,
        )  # fmt: skip
        if path_grad_k is not None and path_grad_v is not None:
            bounds, some = path_listed or (bounds, listed)
            _key_gradient_kernel[(triton.cdiv(path, blocks[9]), k.shape[1])](
                q, keys, values, grad, lse, deltas, depths, ends, bounds, some, path_grad_k, path_grad_v, rows, path,
                *_strides(q, keys, values, grad, path_grad_k, path_grad_v),
                PATH=True, LISTED=bool(path_listed), **by_keys,
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


def _constants(q: Tensor, k: Tensor, shape: list[int], scale: float, window: int, softcap: float) -> dict[str, Any]:
    """What a kernel is compiled for. `shape`: `interval.Shape`."""
    sums, multiplied = _KINDS[torch.promote_types(torch.float32, q.dtype)], _KINDS[q.dtype]
    if multiplied == tl.bfloat16 and INTERPRETED:  # whose products take bf16 numbers for integers
        multiplied = tl.float32
    return {
        "SCALE": scale,
        "UNIT": (1.0 if softcap else scale) * math.log2(math.e),
        "SOFTCAP": softcap,
        "WINDOW": window,
        "GROUPS": q.shape[1] // k.shape[1],
        "HEAD": q.shape[3],
        "WIDTH": max(16, triton.next_power_of_2(q.shape[3])),
        "ROWS": shape[0],
        "KEYS": shape[1],
        "MULTIPLIED": multiplied,
        "SUM": sums,
        "num_warps": shape[2],
        "num_stages": shape[3],
    }


_KINDS = {torch.float64: tl.float64, torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
INTERPRETED = isinstance(_forward_kernel, InterpretedFunction)
"""Whether the kernels run in Triton's interpreter, on any device, instead of being compiled for a GPU."""
