"""Is there anything to learn: rewards of groups, and lengths of replies.

Promises: every reason comes with its number and a remedy; shares come with an interval.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from app.cli.check.findings import Episode, Level, Part, Reason, Rollouts
from app.statistics import ROUNDING, equal, mean_interval, pass_at_k, share_interval

_ENOUGH_GROUPS = 12
_NEARLY_ALL = 0.9  # solved
_HARDLY_ANY = 0.1  # groups with different rewards


def signal(rollouts: Rollouts, solved_at: float) -> Part:
    """Rewards of groups and lengths of replies: text, figures, reasons.

    Raises:
        ValueError: no prompt has two episodes.
    """
    groups = [group for group in rollouts.groups if len(group) > 1]
    if not groups:
        raise ValueError("WHAT: no prompt has two episodes or more, and advantages come from their differences;"
                         " record with data.group_size 2 or more")  # fmt: skip
    n = len(groups)
    rewards = [[one.reward for one in group] for group in groups]
    different = sum(not equal(each) for each in rewards)
    counts = [sum(r >= solved_at - ROUNDING for r in each) for each in rewards]
    shares = [count / len(each) for count, each in zip(counts, rewards)]
    k = statistics.median_low(len(each) for each in rewards)  # trials of recorded conversations differ
    any_ = statistics.fmean(pass_at_k(len(r), count, k) for r, count in zip(rewards, counts) if len(r) >= k)
    first, (least, most) = statistics.fmean(shares), mean_interval(shares)
    share, (low, high) = different / n, share_interval(different, n)
    every = [reward for each in rewards for reward in each]
    episodes = [one for group in rollouts.groups for one in group]
    tokens = sorted(one.tokens for one in episodes)
    said = [one.cut for one in episodes if one.cut is not None]
    cut = sum(said) / len(said) if said else None
    fewest, largest = (end(len(each) for each in rewards) for end in (min, max))
    lines = [
        f"{n:,} groups of {k if fewest == largest else f'{fewest} to {largest}'} episodes,"
        f" rewards from {min(every):.3g} to {max(every):.3g}, mean {statistics.fmean(every):.3f}",
        "groups with different rewards: not told, the run's data.filter left groups out before they were recorded"
        if rollouts.filtered
        else f"groups with different rewards: {different:,} ({share:.0%}; 95% interval {low:.0%} to {high:.0%})",
        f"pass@1 {first:.3f}{f' (95% interval {least:.3f} to {most:.3f})' if n > 1 else ''}, pass@{k} {any_:.3f}"
        f" (a reward of {solved_at:g} or more)",
        f"generated tokens an episode: median {tokens[len(tokens) // 2]:,}, 9 of 10 below"
        f" {tokens[min(len(tokens) - 1, 9 * len(tokens) // 10)]:,}, longest {tokens[-1]:,}"
        + ("" if cut is None else f"; {cut:.0%} cut by the limit"),
    ]
    figures: dict[str, Any] = {
        "groups": n,
        "group_size": k,
        "pass@1": first,
        **({"pass@1_interval": [least, most]} if n > 1 else {}),
        f"pass@{k}": any_,
        "reward": statistics.fmean(every),
        "tokens_median": tokens[len(tokens) // 2],
        "tokens_mean": statistics.fmean(tokens),
        "cut": cut,
    }
    reasons = _of_length(episodes, cut, rollouts)
    if rollouts.filtered:
        remedy = "the share of groups with different rewards is not judged; check the run's YAML, which rolls out anew"
        return lines, figures, [Reason("note", "data.filter left groups out of the recording", remedy), *reasons]
    figures |= {"different": share, "different_interval": [low, high]}
    data = rollouts.settings.get("data", {}).get("init_args") or {}
    is_filtering = "NoSignal" in str(data.get("filter"))
    partial = max(every) < solved_at - ROUNDING
    flat = [solved for each, solved in zip(rewards, shares) if equal(each)]
    is_solved = sum(solved == 1 for solved in flat) > len(flat) / 2
    reasons = [*_of_signal(n, share, (low, high), first, any_, k, partial, is_solved, is_filtering), *reasons]
    return lines, figures, reasons


def _of_signal(
    n: int,
    share: float,
    interval: tuple[float, float],
    first: float,
    any_: float,
    k: int,
    partial: bool,
    is_solved: bool,
    is_filtering: bool,
) -> list[Reason]:
    """`partial`: no episode is solved, so rewards are degrees (or the task is out of reach). `is_solved`: where no
    episode is better than another, most are solved. `is_filtering`: the run has the filter that would be
    recommended."""
    reasons = []
    if n < _ENOUGH_GROUPS or (share == 0 and interval[1] >= _HARDLY_ANY):
        few = f"only {n} groups" + ("" if share else f": up to {interval[1]:.0%} of others may have different rewards")
        reasons.append(Reason("note", few, "roll out more (--episodes) before trusting this"))
    if interval[1] < _HARDLY_ANY or share == 0:
        if first > 0.5:
            finding = f"pass@1 is {first:.2f} and {share:.0%} of the groups have different rewards"
            reasons.append(Reason("no-go", finding, "the model can do this already: take harder prompts"))
        else:
            remedy = (
                "no sample shows what is better: take easier prompts, or warm-start the model on demonstrations"
                " (SFTModule on a RecordedDataModule: imitate.yaml in docs/agents.md)"
            )
            reasons.append(Reason("no-go", f"{share:.0%} of the groups have different rewards", remedy))
    elif share < 0.5:
        remedy = f"data.filter trains on the others alone, at {1 / share:.1f} rollouts for each that counts"
        if first < 0.1 and not partial:
            remedy += f"; larger groups find more of pass@{k} {any_:.2f}"
        if is_solved:
            enough = f"take harder prompts, or stop if pass@1 {first:.2f} will do"
            remedy = f"most of them are solved every time: {enough}; {remedy}"
        keep = {"class_path": "datamodules.filters.NoSignal"}
        overlay = {} if is_filtering else {"data": {"init_args": {"filter": keep}}}
        finding = f"{1 - share:.0%} of the groups have one reward for all episodes and teach nothing"
        now_and_then = not partial and any_ >= 2 * first
        if now_and_then:
            finding += f", but {any_:.0%} of the prompts are solved in one of {k} tries"
            remedy = (
                f"go all the same: what an answer looks like is often learnt first, and then many more differ; {remedy}"
            )
            remedy += "; if rollouts/flat has not fallen after some twenty steps, take easier prompts"
        level: Level = "slow" if now_and_then else "note" if is_filtering else "change"
        reasons.append(Reason(level, finding, remedy, overlay))
    if not partial and share >= 0.1 and any_ - first > 0.02:
        finding = f"{any_ - first:.2f} lies between pass@1 and pass@{k}"
        remedy = "what the model finds now and then; the first gains come from there"
        if first >= _NEARLY_ALL:
            remedy = "what the model still misses now and then; these prompts have little more to teach"
        reasons.append(Reason("note", finding, remedy))
    return reasons


def _of_length(episodes: Sequence[Episode], cut: float | None, rollouts: Rollouts) -> list[Reason]:
    """More room helps where replies that end by themselves do better than those that are cut."""
    if cut is None or cut <= 0.1:
        return []
    workflow = rollouts.settings.get("data", {}).get("init_args", {}).get("workflow", {})
    limit = (workflow.get("init_args") or {}).get("max_new_tokens")
    named = "max_new_tokens of the workflow" if limit is None else f"max_new_tokens, {limit} now"
    mean = statistics.fmean(one.reward for one in episodes)
    ended, stopped = ([one.reward > mean for one in episodes if one.cut is was] for was in (False, True))
    if sum(ended) + sum(stopped) and ended and share_interval(sum(ended), len(ended))[0] <= statistics.fmean(stopped):
        finding = f"{cut:.0%} of the episodes are cut, but those that end by themselves are hardly better"
        finding += f" ({statistics.fmean(ended):.0%} above the mean reward, of the cut {statistics.fmean(stopped):.0%})"
        return [Reason("note", finding, f"the limit is not what is missing; should replies grow, raise {named}")]
    overlay = {}
    if isinstance(limit, int):
        overlay = {"data": {"init_args": {"workflow": {"init_args": {"max_new_tokens": 2 * limit}}}}}
    return [Reason("change", f"{cut:.0%} of the episodes are cut before their end", f"raise {named}", overlay)]
