"""Drawing tokens so that a draw depends on its request alone.

Promises: token number t of a request is a pure function of (key of the request, t, logits), whatever runs beside
it and however often the request was interrupted; no random generator of torch, numpy or Python is read or moved, so
the trainer's streams stay its own. Tokens come from the whole vocabulary (no top-k, no top-p): the log-probability
returned is the one a trainer computes for the same weights. Requests with a `Shaping` alone are drawn otherwise, and
change nothing for those beside them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from datamodules.inference.protocol import Shaping

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX = ((30, np.uint64(0xBF58476D1CE4E5B9)), (27, np.uint64(0x94D049BB133111EB)))
_BLOCK_ELEMENTS = 1 << 24  # [rows x vocabulary] cells turned into probabilities at once


def _mix(state: np.ndarray) -> np.ndarray:
    for shift, factor in _MIX:
        state = (state ^ (state >> np.uint64(shift))) * factor
    return state ^ (state >> np.uint64(31))


def request_key(seed: int, stream: int = 0) -> int:
    """Key of a request from a seed and the number of its stream (both taken modulo 2^64): 64 well-mixed bits."""
    mask = (1 << 64) - 1
    mixed = _mix(np.array([seed & mask], dtype=np.uint64)) + np.array([stream & mask], dtype=np.uint64)
    return int(_mix(mixed * _GOLDEN + _GOLDEN)[0])


def uniforms(keys: Sequence[int], draws: Sequence[int]) -> Tensor:
    """float64 [n] in [0, 1): output number `draws[i]` of the SplitMix64 generator that starts at `keys[i]`.

    Counter-based (Steele, Lea, Flood 2014), hence no state to keep, save or restore. 52 bits, so that
    `uniform * total < total` holds after rounding too.
    """
    states = np.array(keys, dtype=np.uint64) + (np.array(draws, dtype=np.uint64) + np.uint64(1)) * _GOLDEN
    return torch.from_numpy((_mix(states) >> np.uint64(12)).astype(np.float64) * 2.0**-52)


def shaped(logits: Tensor, temperature: float, shaping: Shaping, reply: Sequence[int]) -> Tensor:
    """Logits to draw from: penalties and biases added, -inf where the token is not kept.

    Args:
        logits: [V], any floating dtype.
        temperature: of the draw; 0.0 for greedy.
        reply: token ids sampled so far, which penalties look at.

    Returns:
        float32 [V].
    """
    scores = logits.float().clone()
    if reply:
        said = torch.tensor(reply, device=scores.device)
        counts = torch.bincount(said, minlength=scores.shape[0])
        scores -= shaping.frequency_penalty * counts + shaping.presence_penalty * (counts > 0)
        scores = RepetitionPenaltyLogitsProcessor(shaping.repetition_penalty)(said[None], scores[None])[0]
    for token, bias in shaping.logit_bias:
        scores[token] += bias
    warpers = LogitsProcessorList()
    if shaping.top_k > 0:
        warpers.append(TopKLogitsWarper(min(shaping.top_k, scores.shape[0])))
    if shaping.top_p < 1.0:
        warpers.append(TopPLogitsWarper(shaping.top_p))
    if shaping.min_p > 0.0:
        warpers.append(MinPLogitsWarper(shaping.min_p))
    kept = warpers(torch.empty(1, 0, dtype=torch.int64), scores[None] / (temperature or 1.0))[0]
    return scores.masked_fill(kept == -torch.inf, -torch.inf)


def sample(
    logits: Tensor, temperatures: Tensor, uniform: Tensor, drawn_from: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """One token a row, by inverting the cumulative distribution.

    Args:
        logits: [n, V], any floating dtype; computed in float32.
        temperatures: float32 [n]; rows of 0.0 take the most likely token, with its log-probability at temperature 1.
        uniform: float64 [n] in [0, 1).
        drawn_from: [n, V], in place of `logits` for the draw alone; None for `logits`.

    Returns:
        tokens int64 [n], and their log-probabilities float32 [n] in nats under softmax(logits / temperature).
    """
    rows = max(1, _BLOCK_ELEMENTS // logits.shape[-1])
    if logits.shape[0] > rows:
        others = [None] * -(-len(logits) // rows) if drawn_from is None else drawn_from.split(rows)
        blocks = zip(logits.split(rows), temperatures.split(rows), uniform.split(rows), others)
        parts = [sample(*block) for block in blocks]
        return torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])
    greedy = temperatures == 0
    scale = torch.where(greedy, 1.0, temperatures)
    logprobs = torch.log_softmax(logits.float() / scale[:, None], dim=-1)
    odds = logprobs if drawn_from is None else torch.log_softmax(drawn_from.float() / scale[:, None], dim=-1)
    cumulative = odds.exp().double().cumsum(-1)
    targets = uniform[:, None] * cumulative[:, -1:]
    # right=True finds the first cell whose mass passes the target: a token of probability zero is never drawn.
    drawn = torch.searchsorted(cumulative, targets, right=True).clamp_(max=logits.shape[-1] - 1)
    tokens = torch.where(greedy[:, None], odds.argmax(-1, keepdim=True), drawn)
    return tokens[:, 0], logprobs.gather(1, tokens)[:, 0]
