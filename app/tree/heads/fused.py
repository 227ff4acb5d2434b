"""One pass over a block of logits, and one from logits to their gradient, as Triton kernels.

Promises: logits are read in their own dtype and softmax statistics are kept in float32; the gradient is written over
the logits, so a block exists once; a row is one program, whose second reading finds it in the cache. Nothing but the
loops over the vocabulary is here: matrix products are torch's. Imported where there is Triton alone; on CPUs it runs
in Triton's interpreter (TRITON_INTERPRET=1), for tests.

The operators are torch's custom operators, so that traces without values (FakeTensorMode) see their shapes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK, _WARPS = 2048, 8


@triton.jit
def _statistics(logits, row, temperature, vocabulary, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Of a row's logits / temperature: the largest m, l = sum of exp(s - m), and the sum of exp(s - m) (s - m). A lane
    keeps its own until the end: a reduction over the program in every step would cost more than reading does."""
    most = tl.full([BLOCK], -1e30, tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    moment = tl.zeros([BLOCK], tl.float32)
    for start in range(0, vocabulary, BLOCK):
        column = start + tl.arange(0, BLOCK)
        here = column < vocabulary
        score = tl.load(logits + row * vocabulary + column, mask=here, other=0.0).to(tl.float32) / temperature
        score = tl.where(here, score, -1e30)
        higher = tl.maximum(most, score)
        before, now = tl.exp(most - higher), tl.where(here, tl.exp(score - higher), 0.0)
        moment = before * (moment + (most - higher) * total) + now * (score - higher)
        total = before * total + now
        most = higher
    highest = tl.max(most, 0)
    share = tl.exp(most - highest)
    moment = tl.sum(share * (moment + (most - highest) * total), 0)
    return highest, tl.sum(share * total, 0), moment


@triton.jit
def _outputs_kernel(  # type: ignore[no-untyped-def]
    logits, targets, temperatures, logprobs, entropies, vocabulary, ENTROPY: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperatures + row)
    most, total, moment = _statistics(logits, row, temperature, vocabulary, BLOCK)
    target = tl.load(targets + row)
    score = tl.load(logits + row * vocabulary + target).to(tl.float32) / temperature
    tl.store(logprobs + row, score - most - tl.log(total))
    if ENTROPY:
        tl.store(entropies + row, tl.log(total) - moment / total)


@triton.jit
def _gradient_kernel(  # type: ignore[no-untyped-def]
    logits,
    targets,
    temperatures,
    grad_logprobs,
    grad_entropies,
    vocabulary,
    LOGPROBS: tl.constexpr,
    ENTROPY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """By s = logits / temperature, with p = softmax(s): d logprob = 1[target] - p, d entropy = -p (log p + H)."""
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperatures + row)
    most, total, moment = _statistics(logits, row, temperature, vocabulary, BLOCK)
    normaliser = most + tl.log(total)
    entropy = tl.log(total) - moment / total
    target = tl.load(targets + row)
    by_logprob = tl.load(grad_logprobs + row) if LOGPROBS else 0.0
    by_entropy = tl.load(grad_entropies + row) if ENTROPY else 0.0
    for start in range(0, vocabulary, BLOCK):
        column = start + tl.arange(0, BLOCK)
        here = column < vocabulary
        place = logits + row * vocabulary + column
        logp = tl.load(place, mask=here, other=0.0).to(tl.float32) / temperature - normaliser
        grad = -tl.exp(logp) * (by_logprob + by_entropy * (logp + entropy))
        grad += tl.where(column == target, by_logprob, 0.0)
        tl.store(place, (grad / temperature).to(logits.dtype.element_ty), mask=here)


@torch.library.custom_op("arborist::softmax_outputs", mutates_args=())
def softmax_outputs(logits: Tensor, targets: Tensor, temperatures: Tensor, entropy: bool) -> tuple[Tensor, Tensor]:
    """Log-probabilities of `targets` int64 [n] and (with `entropy`, else zeros) entropies, float32 [n], under
    softmax(logits / temperatures); logits [n, V] contiguous, temperatures float32 [n]."""
    logprobs = logits.new_empty(len(logits), dtype=torch.float32)
    entropies = torch.zeros_like(logprobs)
    with torch.cuda.device_of(logits):  # Triton launches on the current device, whatever its arguments' is
        _outputs_kernel[(len(logits),)](
            logits,
            targets,
            temperatures,
            logprobs,
            entropies,
            logits.shape[1],
            ENTROPY=entropy,
            BLOCK=_BLOCK,
            num_warps=_WARPS,
        )
    return logprobs, entropies


@softmax_outputs.register_fake
def _(logits: Tensor, targets: Tensor, temperatures: Tensor, entropy: bool) -> tuple[Tensor, Tensor]:
    shape = logits.new_empty(len(logits), dtype=torch.float32)
    return shape, torch.empty_like(shape)


@torch.library.custom_op("arborist::softmax_gradient_", mutates_args=("logits",))
def softmax_gradient_(
    logits: Tensor,
    targets: Tensor,
    temperatures: Tensor,
    grad_logprobs: Tensor | None,
    grad_entropies: Tensor | None,
) -> None:
    """Writes over `logits` [n, V] (contiguous) their gradient, given those of the outputs, float32 [n] each."""
    with torch.cuda.device_of(logits):
        _gradient_kernel[(len(logits),)](
            logits,
            targets,
            temperatures,
            temperatures if grad_logprobs is None else grad_logprobs,  # an address that is not read
            temperatures if grad_entropies is None else grad_entropies,
            logits.shape[1],
            LOGPROBS=grad_logprobs is not None,
            ENTROPY=grad_entropies is not None,
            BLOCK=_BLOCK,
            num_warps=_WARPS,
        )
