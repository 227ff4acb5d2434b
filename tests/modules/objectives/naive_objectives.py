"""Every objective, correction and regulariser once more, in Python floats, token by token.

A `Case` holds sequences as lists. Each function returns the loss (weight, cost) of every trained token, by sequence.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import Any

import torch

Rows = list[list[float]]


@dataclass
class Case:
    """Lists of numbers of the trained tokens, a list a sequence; and numbers a sequence."""

    logprobs: Rows
    old: Rows
    behavior: Rows
    reference: Rows
    advantages: Rows
    entropy: Rows
    groups: list[int]
    episodes: list[int]
    rewards: list[float]
    padding: list[int]  # tokens before each sequence's trained ones

    def inputs(self, dtype: torch.dtype = torch.float64) -> dict[str, torch.Tensor]:
        """What functions are called with; junk on tokens that are not trained."""
        lengths = [pad + len(row) for pad, row in zip(self.padding, self.logprobs)]
        made = {}
        for name in ("logprobs", "old", "behavior", "reference", "advantages", "entropy"):
            rows = getattr(self, name)
            made[name] = torch.tensor(
                [x for pad, row in zip(self.padding, rows) for x in [9.0 * (name == "old")] * pad + row], dtype=dtype
            )
        mask = torch.tensor([x for pad, row in zip(self.padding, self.logprobs) for x in [0] * pad + [1] * len(row)])
        return {
            **made,
            "mask": mask.bool(),
            "cu_seqlens": torch.tensor([0, *lengths]).cumsum(0),
            "groups": torch.tensor(self.groups),
            "episodes": torch.tensor(self.episodes),
            "turns": torch.tensor([self.episodes[:i].count(e) for i, e in enumerate(self.episodes)]),
            "rewards": torch.tensor(self.rewards, dtype=dtype),
        }


def random_case(seed: int, drift: float = 0.3) -> Case:
    """Four groups of two episodes, of one to three sequences of one to four trained tokens; one sequence has none."""
    rng = random.Random(seed)
    groups, episodes, rewards = [], [], []
    for group in range(4):
        for episode in range(2):
            for _ in range(rng.randint(1, 3)):
                groups.append(5 * group)
                episodes.append(2 * group + episode)
                rewards.append(float(episode) if group % 2 else 0.5 - episode)
    sizes = [rng.randint(1, 4) for _ in groups]
    sizes[next(i for i, e in enumerate(episodes) if episodes.count(e) > 1)] = 0
    base = [[-3 * rng.random() - 0.1 for _ in range(n)] for n in sizes]

    def near(scale: float) -> Rows:
        return [[x + rng.gauss(0, scale) for x in row] for row in base]

    return Case(
        logprobs=base,
        old=near(drift),
        behavior=near(drift),
        reference=near(0.5),
        advantages=[
            [rng.gauss(0, 1)] * n if rng.random() < 0.5 else [rng.gauss(0, 1) for _ in range(n)] for n in sizes
        ],
        entropy=[[rng.random() for _ in range(n)] for n in sizes],
        groups=groups,
        episodes=episodes,
        rewards=rewards,
        padding=[rng.randint(1, 3) for _ in sizes],
    )


def _tokens(case: Case, f: Any, *names: str) -> Rows:
    return [[f(*values) for values in zip(*rows)] for rows in zip(*(getattr(case, name) for name in names))]


def ppo_clip(case: Case, clip_low: float = 0.2, clip_high: float = 0.2, dual_clip: float | None = None) -> Rows:
    def one(logp: float, old: float, a: float) -> float:
        ratio = math.exp(logp - old)
        gain = min(ratio * a, min(max(ratio, 1 - clip_low), 1 + clip_high) * a)
        if dual_clip is not None and a < 0:
            gain = max(gain, dual_clip * a)
        return -gain

    return _tokens(case, one, "logprobs", "old", "advantages")


def dapo(case: Case) -> Rows:
    return ppo_clip(case, 0.2, 0.28)


def decoupled_ppo(case: Case, weight_cap: float | None = 5.0, over_cap: str = "mask") -> Rows:
    rows = []
    for losses, olds, behaviors in zip(ppo_clip(case), case.old, case.behavior):
        row = []
        for loss, old, behavior in zip(losses, olds, behaviors):
            weight = math.exp(old - behavior)
            if weight_cap is not None and weight > weight_cap:
                weight = 0.0 if over_cap == "mask" else weight_cap
            row.append(loss * weight)
        rows.append(row)
    return rows


def gspo(case: Case, clip_low: float = 3e-4, clip_high: float = 4e-4) -> Rows:
    rows = []
    for logps, olds, advantages in zip(case.logprobs, case.old, case.advantages):
        drift = [a - b for a, b in zip(logps, olds)]
        ratio = math.exp(sum(drift) / len(drift)) if drift else 1.0
        rows.append([-min(ratio * a, min(max(ratio, 1 - clip_low), 1 + clip_high) * a) for a in advantages])
    return rows


def cispo(case: Case, clip_low: float | None = None, clip_high: float = 4.0) -> Rows:
    def one(logp: float, old: float, a: float) -> float:
        weight = min(math.exp(logp - old), 1 + clip_high)
        return -(weight if clip_low is None else max(weight, 1 - clip_low)) * a * logp

    return _tokens(case, one, "logprobs", "old", "advantages")


def sapo(case: Case, tau_pos: float = 1.0, tau_neg: float = 1.05) -> Rows:
    def one(logp: float, old: float, a: float) -> float:
        tau = tau_pos if a > 0 else tau_neg
        return -4 / tau / (1 + math.exp(-tau * (math.exp(logp - old) - 1))) * a

    return _tokens(case, one, "logprobs", "old", "advantages")


def m2po(case: Case, tokens: str = "harmful", cap: float | None = None, **options: Any) -> Rows:
    return _m2po_all(case, **options) if tokens == "all" else _m2po_harmful(case, cap, **options)


def m2po_cap(case: Case, threshold: float = 0.04, **unused: Any) -> float:
    """By halving: the cap on |log r| of the tokens that move further out, with which the mean square is `threshold`."""
    moved = [
        abs(logp - old)
        for rows in zip(case.logprobs, case.old, case.advantages)
        for logp, old, a in zip(*rows)
        if (a > 0 and logp > old) or (a < 0 and logp < old)
    ]

    def moment(cap: float) -> float:
        return sum(min(x, cap) ** 2 for x in moved) / max(len(moved), 1)

    if moment(math.inf) <= threshold:
        return math.inf
    low, high = 0.0, max(moved)
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if moment(middle) < threshold else (low, middle)
    return high


def _m2po_harmful(
    case: Case, cap: float | None, threshold: float = 0.04, clip_low: float = 0.3, clip_high: float = 0.5
) -> Rows:
    cap = m2po_cap(case, threshold) if cap is None else cap
    lowest, highest = min(math.exp(-cap), 1 - clip_low), max(math.exp(cap), 1 + clip_high)
    return ppo_clip(case, 1 - lowest, highest - 1)


def _m2po_all(case: Case, threshold: float = 0.04) -> Rows:
    """Drops the largest until the mean of those left is within the threshold."""
    left = sorted((logp - old) ** 2 for pair in zip(case.logprobs, case.old) for logp, old in zip(*pair))
    while left and sum(left) / len(left) > threshold:
        left.pop()
    most = left[-1] if left else -1.0

    def one(logp: float, old: float, a: float) -> float:
        return -math.exp(logp - old) * a if (logp - old) ** 2 <= most else 0.0

    return _tokens(case, one, "logprobs", "old", "advantages")


def reinforce(case: Case) -> Rows:
    return _tokens(case, lambda logp, a: -a * logp, "logprobs", "advantages")


def sft(case: Case) -> Rows:
    return _tokens(case, lambda logp: -logp, "logprobs")


def _drifts(case: Case) -> dict[int, float]:
    """Episode -> log pi - log ref of all its tokens."""
    found: dict[int, float] = dict.fromkeys(case.episodes, 0.0)
    for episode, logps, refs in zip(case.episodes, case.logprobs, case.reference):
        found[episode] += sum(logps) - sum(refs)
    return found


def tba(case: Case, beta: float = 0.05) -> Rows:
    drifts, reward, group = _drifts(case), dict(zip(case.episodes, case.rewards)), dict(zip(case.episodes, case.groups))
    loss = {}
    for episode in drifts:
        peers = [other for other in drifts if group[other] == group[episode]]
        log_z = sum(reward[other] / beta - drifts[other] for other in peers) / len(peers)
        loss[episode] = (log_z + drifts[episode] - reward[episode] / beta) ** 2
    return [[loss[episode]] * len(row) for episode, row in zip(case.episodes, case.logprobs)]


def dpo(case: Case, beta: float = 0.1, label_smoothing: float = 0.0) -> Rows:
    drifts, reward, group = _drifts(case), dict(zip(case.episodes, case.rewards)), dict(zip(case.episodes, case.groups))
    loss = {}
    for number in set(case.groups):
        one, other = (episode for episode in drifts if group[episode] == number)
        chosen, rejected = (one, other) if reward[one] > reward[other] else (other, one)
        margin = beta * (drifts[chosen] - drifts[rejected])
        right, wrong = (math.log(1 / (1 + math.exp(-m))) for m in (margin, -margin))
        loss[number] = -(1 - label_smoothing) * right - label_smoothing * wrong
    return [[loss[number]] * len(row) for number, row in zip(case.groups, case.logprobs)]


def _ratios(case: Case, level: str) -> Rows:
    rows = []
    for olds, behaviors in zip(case.old, case.behavior):
        logs = [a - b for a, b in zip(olds, behaviors)]
        if level == "sequence":
            logs = [sum(logs)] * len(logs)
        elif level == "geometric" and logs:
            logs = [sum(logs) / len(logs)] * len(logs)
        rows.append([math.exp(x) for x in logs])
    return rows


def truncated(case: Case, level: str = "token", cap: float = 2.0) -> Rows:
    return [[min(x, cap) for x in row] for row in _ratios(case, level)]


def masked(case: Case, level: str = "token", low: float = 0.5, high: float = 5.0) -> Rows:
    return [[x if low <= x <= high else 0.0 for x in row] for row in _ratios(case, level)]


def kl(case: Case, estimator: str = "k3") -> Rows:
    def one(logp: float, ref: float) -> float:
        log_ratio = logp - ref
        return {"k1": log_ratio, "k2": log_ratio**2 / 2, "k3": math.exp(-log_ratio) - 1 + log_ratio}[estimator]

    return _tokens(case, one, "logprobs", "reference")


def kl_weighted(case: Case) -> Rows:
    def one(logp: float, ref: float, old: float) -> float:
        return (math.exp(ref - logp) - 1 + logp - ref) * math.exp(logp - old)

    return _tokens(case, one, "logprobs", "reference", "old")


def entropy(case: Case) -> Rows:
    return _tokens(case, lambda h: -h, "entropy")


def overlong(case: Case, max_tokens: int, buffer_tokens: int) -> Rows:
    rows = [[0.0] * len(row) for row in case.logprobs]
    for episode in set(case.episodes):
        own = [row for row, e in zip(rows, case.episodes) if e == episode and row]
        length, start = sum(map(len, own)), max_tokens - buffer_tokens
        cost = 0.0 if length <= start else 1.0 if length > max_tokens else (length - start) / buffer_tokens
        if own:
            own[-1][-1] = cost
    return rows
