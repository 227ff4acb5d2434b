"""Every estimator once more, in plain Python, token by token: a list of the advantages of each episode's tokens."""

from __future__ import annotations

import math
import statistics
from typing import Any

from tests.modules.advantages.batches import Play

Tokens = list[list[float]]


def _std(values: list[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 else 0.0


def _same(play: Play, value: float) -> list[float]:
    return [value for _, answer in play.turns for _ in answer]


def _peers(plays: list[Play], play: Play, over: str) -> list[float]:
    return [other.reward for other in plays if over == "batch" or other.group == play.group]


def grpo_of(plays: list[Play], play: Play, mean: str = "group", std: str = "group", eps: float = 1e-6) -> float:
    value = play.reward - (0.0 if mean == "none" else statistics.fmean(_peers(plays, play, mean)))
    return value if std == "none" else value / (_std(_peers(plays, play, std)) + eps)


def grpo(plays: list[Play], **options: Any) -> Tokens:
    return [_same(play, grpo_of(plays, play, **options)) for play in plays]


def dr_grpo(plays: list[Play]) -> Tokens:
    return grpo(plays, std="none")


def rloo(plays: list[Play]) -> Tokens:
    out = []
    for i, play in enumerate(plays):
        others = [other.reward for j, other in enumerate(plays) if other.group == play.group and i != j]
        out.append(_same(play, play.reward - statistics.fmean(others) if others else 0.0))
    return out


def reward(plays: list[Play]) -> Tokens:
    return [_same(play, play.reward) for play in plays]


def discounted(plays: list[Play], gamma: float = 0.9, **options: Any) -> Tokens:
    out = []
    for play in plays:
        base, last = grpo_of(plays, play, **options), len(play.turns) - 1
        out.append([base * gamma ** (last - k) for k, (_, answer) in enumerate(play.turns) for _ in answer])
    return out


def distill(plays: list[Play], task: float = 0.0, std: str = "none") -> Tokens:
    return [[own + task * grpo_of(plays, play, std=std) for own in play.flat_rewards] for play in plays]


def _whiten(rows: Tokens, eps: float = 1e-8) -> Tokens:
    flat = [x for row in rows for x in row]
    mean = statistics.fmean(flat)
    scale = _std(flat) + eps if len(flat) > 1 else 1.0
    return [[(x - mean) / scale for x in row] for row in rows]


def _gae(rewards: list[float], values: list[float], gamma: float, lam: float) -> list[float]:
    out, following, next_value = [0.0] * len(rewards), 0.0, 0.0
    for t in reversed(range(len(rewards))):
        delta = rewards[t] + gamma * next_value - values[t]
        following = out[t] = delta + gamma * lam * following
        next_value = values[t]
    return out


def gae(
    plays: list[Play], gamma: float = 1.0, lam: float = 0.95, value_lam: float | None = None, whiten: bool = True
) -> tuple[Tokens, Tokens]:
    advantages, returns = [], []
    for play in plays:
        rewards, values = play.flat_rewards, play.flat_values
        rewards[-1] += play.reward
        advantages.append(_gae(rewards, values, gamma, lam))
        targets = _gae(rewards, values, gamma, lam if value_lam is None else value_lam)
        returns.append([a + v for a, v in zip(targets, values)])
    return _whiten(advantages) if whiten else advantages, returns


def gae_turn(plays: list[Play], gamma: float = 1.0, lam: float = 0.95, whiten: bool = True) -> tuple[Tokens, Tokens]:
    """Returns: one a turn."""
    per_turn, returns = [], []
    for play in plays:
        rewards, values = [sum(r) for r in play.token_rewards], [v[0] for v in play.values]
        rewards[-1] += play.reward
        per_turn.append(_gae(rewards, values, gamma, lam))
        returns.append([a + v for a, v in zip(per_turn[-1], values)])
    rows = _whiten(per_turn) if whiten else per_turn
    return [[a for a, (_, answer) in zip(row, play.turns) for _ in answer] for row, play in zip(rows, plays)], returns


def reinforce_pp(plays: list[Play], baseline: str = "none", gamma: float = 1.0) -> Tokens:
    rows = []
    for play in plays:
        rewards = play.flat_rewards
        rewards[-1] += play.reward
        if baseline == "group":
            rewards[-1] -= statistics.fmean(_peers(plays, play, "group"))
        rows.append([sum(gamma ** (u - t) * rewards[u] for u in range(t, len(rewards))) for t in range(len(rewards))])
    return _whiten(rows)


def tree(plays: list[Play], std: str = "none", eps: float = 1e-6) -> Tokens:
    """By comparing every two histories in full."""

    def history(play: Play, turns: int, with_answer: bool) -> tuple[int, ...]:
        said = [token for said, answer in play.turns[:turns] for token in (*said, *answer)]
        return tuple(said + list(play.turns[turns][0]) + (list(play.turns[turns][1]) if with_answer else []))

    def below(play: Play, turn: int, with_answer: bool) -> list[float]:
        mine = history(play, turn, with_answer)
        return [
            other.reward
            for other in plays
            if other.group == play.group
            and any(history(other, k, with_answer) == mine for k in range(len(other.turns)))
        ]

    out = []
    for play in plays:
        scale = _std(_peers(plays, play, "group")) + eps if std == "group" else 1.0
        row = []
        for k, (_, answer) in enumerate(play.turns):
            after, credit = below(play, k, True), 0.0
            for back in range(k, -1, -1):
                before = below(play, back, False)
                if len(before) > len(after):
                    credit = statistics.fmean(after) - statistics.fmean(before)
                    break
            row += [credit / scale for _ in answer]
        out.append(row)
    assert all(math.isfinite(x) for row in out for x in row)
    return out
