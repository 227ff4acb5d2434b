"""Drawing tokens so that a draw depends on its request alone.

Promises: token number t of a request is a pure function of (key of the request, t, logits), whatever runs beside
it and however often the request was interrupted; no random generator of torch, numpy or Python is read or moved, so
the trainer's streams stay its own. Tokens come from the whole vocabulary (no top-k, no top-p): the log-probability
returned is the one a trainer computes for the same weights.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

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


def sample(logits: Tensor, temperatures: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """One token a row, by inverting the cumulative distribution.

    Args:
        logits: [n, V], any floating dtype; computed in float32.
        temperatures: float32 [n]; rows of 0.0 take the most likely token, with its log-probability at temperature 1.
        uniform: float64 [n] in [0, 1).

    Returns:
        tokens int64 [n], and their log-probabilities float32 [n] in nats under softmax(logits / temperature).
    """
    rows = max(1, _BLOCK_ELEMENTS // logits.shape[-1])
    if logits.shape[0] > rows:
        blocks = zip(logits.split(rows), temperatures.split(rows), uniform.split(rows))
        parts = [sample(*block) for block in blocks]
        return torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])
    greedy = temperatures == 0
    scale = torch.where(greedy, 1.0, temperatures)
    logprobs = torch.log_softmax(logits.float() / scale[:, None], dim=-1)
    cumulative = logprobs.exp().double().cumsum(-1)
    targets = uniform[:, None] * cumulative[:, -1:]
    # right=True finds the first cell whose mass passes the target: a token of probability zero is never drawn.
    drawn = torch.searchsorted(cumulative, targets, right=True).clamp_(max=logits.shape[-1] - 1)
    tokens = torch.where(greedy[:, None], logprobs.argmax(-1, keepdim=True), drawn)
    return tokens[:, 0], logprobs.gather(1, tokens)[:, 0]
