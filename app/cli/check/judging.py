"""How much of the rewards is the judge's noise: replies that were rolled out are judged a second time.

A verdict is what the reply is worth plus noise, so two verdicts of one reply differ by two noises, and the variance of
their differences, within groups, is twice that of one: what all replies of a group gain or lose the second time reaches
no advantage. Its share of the variance within groups is what advantages learn from chance.

Promises: both verdicts are of one question; where that cannot be had the judge is not asked, or the report says what
differs. Neither verdicts kept on disk are taken for second ones, nor scores of replies whose judging failed for first
ones; a reply whose second verdict is refused is counted.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import pkgutil
import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from app.cli.check.findings import Part, Reason, Rollouts
from app.clients import no_keys_needed

if TYPE_CHECKING:  # imported where they are used: torch takes seconds
    from app.cli.reward import Labelled
    from datamodules.groups import Group
    from datamodules.prompts.base import Prompt
    from datamodules.rewards.judges.base import Judge

_NOISY, _SHARE = 0.5, 0.25
_MOST_REPEATS = 8


class _NotAsked(Exception):
    """Why the judge is not asked again, in words that follow a colon."""


def judged_again(rollouts: Rollouts, arguments: argparse.Namespace) -> Part:
    """Text, figures, reasons; nothing where no judge gave the rewards."""
    data = rollouts.settings.get("data", {}).get("init_args") or {}
    if rollouts.recorded is None or not isinstance(data.get("reward"), dict) or not arguments.judge_again:
        return [], {}, []
    try:
        if not _is_judge(data["reward"]):
            return [], {}, []
        return _judged_again(rollouts.recorded, data, arguments)
    except (_NotAsked, ValueError, OSError, ImportError) as error:
        return [f"the judge is not asked again: {' '.join(str(error).split())}"], {}, []


def _judged_again(recorded: Path, data: dict[str, Any], arguments: argparse.Namespace) -> Part:
    """As `judged_again`. Raises _NotAsked, ValueError, OSError, ImportError: why the judge cannot be asked."""
    from app.cli.reward import configured, judged
    from datamodules.rewards.judges.base import Judge
    from datamodules.rewards.judges.model import JudgeModel
    from datamodules.rewards.judges.pool import reward_pool

    workflow = (data.get("workflow") or {}).get("init_args") or {}
    if workflow.get("judged") == "transcript":
        raise _NotAsked("it was shown the transcripts (judged: transcript), and answers alone are recorded")
    if workflow.get("turn_discount", 1) != 1:
        raise _NotAsked("its verdicts are recorded less the discount of their turns (turn_discount)")
    tokenizer = arguments.tokenizer or data.get("tokenizer")
    if not tokenizer:
        raise _NotAsked("the run's configuration names no tokenizer; set --tokenizer")
    judge, options = configured(recorded.parent / "config.yaml")
    model = getattr(judge, "model", None)
    if not isinstance(judge, Judge) or not isinstance(model, JudgeModel):
        raise _NotAsked("its verdicts are no answers of a model behind a URL")
    judge.model = replace(model, cache=None)
    rows, lines = _first_verdicts(recorded, tokenizer, data, judge.is_relative, arguments.judge_again)
    if not rows:
        return [*lines, "the judge is not asked again: no group has two verdicts of it"], {}, []
    pool = reward_pool(judge, options)
    try:
        found = asyncio.run(judged(pool, rows))
    finally:
        pool.close()
    groups: dict[str, list[tuple[float, float]]] = {}
    for row, again in zip(rows, found):
        if not isinstance(again, Exception) and not again.failed:
            groups.setdefault(row.prompt.id, []).append((row.label, again.value))
    said, figures, reasons = agreement([group for group in groups.values() if len(group) > 1], len(rows), judge)
    return [*lines, *said], figures, reasons


def _is_judge(reward: dict[str, Any]) -> bool:
    """Whether a judge is configured. Raises _NotAsked: nobody can tell, since the class is not to be had here."""
    from datamodules.rewards.judges.base import Judge

    path = str(reward.get("class_path"))
    try:
        with no_keys_needed():
            found = pkgutil.resolve_name(path)
    except Exception as error:  # a user's module may fail in any way while it is imported
        raise _NotAsked(f"data.reward: {path} cannot be imported here ({error})") from error
    return isinstance(found, type) and issubclass(found, Judge)


def _first_verdicts(
    recorded: Path, tokenizer: str, data: dict[str, Any], is_relative: bool, least: int
) -> tuple[list[Labelled], list[str]]:
    """Replies with the verdicts they got, of the first groups that make up `least`, whole ones for a judge that
    compares; and what is to be said of them."""
    from app.cli.reward import recorded_groups

    prompts = _Prompts(data.get("prompts"))
    chosen: list[Labelled] = []
    failed = 0
    for group, rows in recorded_groups(recorded, tokenizer):
        verdicts = [row for row in rows if row.is_verdict]
        failed += len(rows) - len(verdicts)
        if len(verdicts) < 2 or (is_relative and len(verdicts) < len(rows)):
            continue
        if (prompt := prompts.of(group)) is not None:
            verdicts = [replace(row, prompt=replace(prompt, id=row.prompt.id)) for row in verdicts]
        chosen += verdicts
        if len(chosen) >= least:
            break
    lines = []
    if failed:
        groups = ", and their groups, which are compared" if is_relative else ""
        lines.append(f"not judged again: {failed} replies{groups}, whose reward stands for a verdict that failed")
    if prompts.missing:
        lines.append(
            "the judge is shown prompts as their tokens spell them, a chat template's marks included:"
            f" {prompts.missing}"
        )
    return chosen, lines


class _Prompts:
    """The prompts of a run, dealt again.

    Args:
        configured: `data.prompts` of the run.

    Attributes:
        missing: why there was none, the last time; "" where all were dealt.
    """

    def __init__(self, configured: Any) -> None:
        from jsonargparse import ArgumentParser

        from datamodules.prompts.base import PromptSource

        self.missing = ""
        self._source: PromptSource | None = None
        parser = ArgumentParser(exit_on_error=False)
        parser.add_argument("--prompts", type=PromptSource)
        try:
            self._source = parser.instantiate(parser.parse_object({"prompts": configured})).prompts
        except Exception as error:  # sources are users' code too
            self.missing = f"data.prompts cannot be made here ({type(error).__name__})"
        if configured is None:
            self.missing = "the run's configuration has no data.prompts"

    def of(self, group: Group) -> Prompt | None:
        """What the episodes of a recorded group were asked."""
        if self._source is None:
            return None
        try:
            prompt = self._source.deal(group.index)
        except Exception as error:
            self.missing = f"data.prompts deals no prompt {group.index} ({type(error).__name__})"
            return None
        if prompt.id == group.prompt_id:
            return prompt
        self.missing = f"data.prompts deals '{prompt.id}' now where it dealt '{group.prompt_id}'"
        return None


def agreement(groups: Sequence[Sequence[tuple[float, float]]], asked: int, judge: Judge | None = None) -> Part:
    """Text, figures, reasons.

    Args:
        groups: both verdicts of each reply, two replies or more a group.
        asked: replies that were to be judged again.
        judge: which one, for what can be done; None where that is not known.
    """
    pairs = [pair for group in groups for pair in group]
    if not pairs:
        return [f"{asked} replies were judged again, and no group has two second verdicts: see the judge's log"], {}, []
    noise = _pooled([[first - second for first, second in group] for group in groups]) / 2
    within = _pooled([[pair[reading] for pair in group] for group in groups for reading in (0, 1)])
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
        finding = f"{share:.0%} of the variance within groups is the judge's noise"
        reasons.append(Reason("change" if share > _NOISY else "note", finding, _remedy(judge, noise, within - noise)))
    return [line], figures, reasons


def _remedy(judge: Judge | None, noise: float, true: float) -> str:
    """What to do about `noise` beside `true`, both variances within groups."""
    if judge is not None and judge.is_relative:
        return "clearer criteria, or a better judge"
    if judge is None or judge.repeats is None:
        return "a better judge, or comparing replies (RankingJudge)"
    remedy = "fewer points a criterion, a better judge, or comparing replies (RankingJudge)"
    # The mean of n times as many verdicts has an n-th of the noise; as many as bring its share to a quarter.
    needed = math.inf if true <= 0 else judge.repeats * noise * (1 - _SHARE) / (_SHARE * true)
    if needed > _MOST_REPEATS:
        return remedy
    verdicts = math.ceil(round(needed, 6))  # a rounding error is not worth another one
    warm = " and a temperature above 0" if judge.model.temperature == 0 else ""
    return f"{verdicts} verdicts a reply (`repeats` of the judge{warm}) bring it to {_SHARE:.0%}; or {remedy}"


def _pooled(samples: Sequence[Sequence[float]]) -> float:
    """The unbiased variance within samples, all together; each has two values or more."""
    degrees = sum(len(values) - 1 for values in samples)
    return sum(statistics.variance(values) * (len(values) - 1) for values in samples) / degrees
