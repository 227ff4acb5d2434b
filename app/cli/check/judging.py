"""How much of the rewards is the judge's noise: replies that were rolled out are judged a second time.

A verdict is what the reply is worth plus noise, so two verdicts of one reply differ by two noises, and the variance of
their differences is twice that of one. Its share of the variance within groups is what advantages learn from chance.
Promises: verdicts kept on disk are not taken for second ones; a reply whose second verdict is refused is counted.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from app.cli.check.findings import Part, Reason, Rollouts

_NOISY, _SHARE = 0.5, 0.25


def judged_again(rollouts: Rollouts, arguments: argparse.Namespace) -> Part:
    """Text, figures, reasons; nothing where no judge gave the rewards.

    Raises:
        ValueError: the configuration's judge or tokenizer cannot be used.
    """
    from app.cli.reward import configured, judged, recorded
    from datamodules.rewards.judges.base import Judge
    from datamodules.rewards.judges.model import JudgeModel
    from datamodules.rewards.judges.pool import reward_pool

    data = rollouts.settings.get("data", {}).get("init_args") or {}
    if rollouts.recorded is None or not isinstance(data.get("reward"), dict) or not arguments.judge_again:
        return [], {}, []
    judge, options = configured(rollouts.recorded.parent / "config.yaml")
    model = getattr(judge, "model", None)
    if not isinstance(judge, Judge) or not isinstance(model, JudgeModel):
        return ["the judge is not asked again: its verdicts are no answers of a model behind a URL"], {}, []
    judge.model = replace(model, cache=None)
    rows = _whole_groups(recorded(rollouts.recorded, arguments.tokenizer or data["tokenizer"]), arguments.judge_again)
    pool = reward_pool(judge, options)
    try:
        found = asyncio.run(judged(pool, rows))
    finally:
        pool.close()
    groups: dict[str, list[tuple[float, float]]] = {}
    for row, again in zip(rows, found):
        if not isinstance(again, Exception) and not again.failed:
            groups.setdefault(row.prompt.id, []).append((row.label, again.value))
    return agreement([group for group in groups.values() if len(group) > 1], len(rows))


def _whole_groups(rows: Sequence[Any], least: int) -> list[Any]:
    """The first groups that make up `least` replies."""
    ids = list(dict.fromkeys(row.prompt.id for row in rows))
    chosen: list[Any] = []
    for one in ids:
        if len(chosen) >= least:
            break
        chosen += [row for row in rows if row.prompt.id == one]
    return chosen


def agreement(groups: Sequence[Sequence[tuple[float, float]]], asked: int) -> Part:
    """`groups`: both verdicts of each reply. `asked`: replies that were to be judged again."""
    pairs = [pair for group in groups for pair in group]
    if not pairs:
        return [f"{asked} replies were judged again, and no group has two second verdicts: see the judge's log"], {}, []
    noise = statistics.fmean((first - second) ** 2 for first, second in pairs) / 2
    within = _within(groups)
    ordered = [
        0.5 if a[1] == b[1] else float((a[0] > b[0]) == (a[1] > b[1]))
        for group in groups
        for at, a in enumerate(group)
        for b in group[:at]
        if a[0] != b[0]
    ]
    same = statistics.fmean(abs(first - second) < 1e-6 for first, second in pairs)
    figures: dict[str, Any] = {"judged_again": len(pairs), "judge_same": same, "judge_noise": noise**0.5}
    line = f"judged again: {len(pairs)} of {asked} replies, {same:.0%} with the same verdict, noise {noise**0.5:.3g}"
    if ordered:
        figures["judge_order"] = statistics.fmean(ordered)
        line += f"; of two that differ, {figures['judge_order']:.0%} in the same order (chance: 50%)"
    if within <= 0:
        return [line], figures, []
    share = figures["judge_noise_share"] = min(1.0, noise / within)
    reasons = []
    if share > _SHARE:
        # The mean of n verdicts has an n-th of the noise; as many as bring its share to a quarter.
        true = within - noise
        repeats = None if true <= 0 else max(2, math.ceil(noise * (1 - _SHARE) / (_SHARE * true)))
        finding = f"{share:.0%} of the variance within groups is the judge's noise"
        remedy = "fewer points a criterion, a better judge, or comparing replies (RankingJudge)"
        if repeats is not None and repeats <= 8:
            remedy = f"{repeats} verdicts a reply (`repeats` of the judge) bring it to {_SHARE:.0%}; or {remedy}"
        reasons.append(Reason("change" if share > _NOISY else "note", finding, remedy))
    return [line], figures, reasons


def _within(groups: Sequence[Sequence[tuple[float, float]]]) -> float:
    """Variance of a verdict within groups: unbiased, pooled over groups and both verdicts."""
    squares = degrees = 0.0
    for group in groups:
        for reading in (0, 1):
            values = [pair[reading] for pair in group]
            squares += statistics.variance(values) * (len(values) - 1)
            degrees += len(values) - 1
    return squares / degrees
