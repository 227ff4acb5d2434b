"""Rules about rollouts: groups that are lost, that teach nothing, and replies of the wrong length."""

from __future__ import annotations

import math
from statistics import median

from app.statistics import share_interval
from callbacks.coach.facts import Advice, Facts
from callbacks.coach.history import History


def rewards_fail(history: History, facts: Facts) -> Advice | None:
    """More than one group in twenty lost to failures. Each costs its whole generation, and those that fail are seldom
    like the others, so what is left is biased."""
    failed, admitted = history.gained("rollouts/failed"), _admitted(history)
    if not _exceeds(failed, admitted, 0.05):
        return None
    return Advice(
        "rewards_fail",
        f"{failed / admitted:.0%} of the groups fail in their workflow or reward and are dropped",
        "the log names the last reason; what they printed is in reward_workers/ and agents/ of the run directory",
        {"rollouts/failed": failed, "rollouts/admitted": admitted},
    )


def prompts_too_long(history: History, facts: Facts) -> Advice | None:
    """More than one prompt in twenty left out since it leaves no room for a reply."""
    skipped, admitted = history.gained("rollouts/skipped"), _admitted(history)
    if not _exceeds(skipped, admitted, 0.05):
        return None
    return Advice(
        "prompts_too_long",
        f"{skipped / admitted:.0%} of the prompts are left out, the model's context has no room for their replies",
        "shorten them, lower max_new_tokens of the workflow, or take a model with a longer context",
        {"rollouts/skipped": skipped, "rollouts/admitted": admitted},
    )


def no_signal(history: History, facts: Facts) -> Advice | None:
    """More than four groups in five with one reward for all episodes: their advantages are 0 (DAPO, Yu et al. 2025,
    section 3.2), and a batch is a fifth of what it seems."""
    flat = history.mean("rollouts/flat")
    if flat is None or flat <= 0.8 or (facts.group_size or 2) < 2:
        return None
    groups = len(history.now("rollouts/flat")) * (facts.batch_size or 0)
    if groups and flat < 1 and not _exceeds(flat * groups, groups, 0.8):
        return None
    solved, unsolved = history.mean("rollouts/solved") or 0.0, history.mean("rollouts/unsolved") or 0.0
    if solved >= unsolved:
        remedy = "most prompts are solved every time, so take harder ones, or end here"
    else:
        remedy = "hardly any prompt is solved, so take easier ones, warm-start the model, or raise data.group_size"
    if not facts.filtered:
        remedy += "; data.filter: datamodules.filters.NoSignal trains on the others alone"
    elif not facts.rests:
        remedy += "; data.limits.rest: 7 plays prompts that come again and again without a signal less often"
    evidence = {"rollouts/flat": flat, "rollouts/solved": solved, "rollouts/unsolved": unsolved}
    return Advice("no_signal", f"{flat:.0%} of the groups have one reward for all episodes", remedy, evidence)


def nothing_trained(history: History, facts: Facts) -> Advice | None:
    """A step whose groups each have one reward for all episodes, and whose gradient is 0 for that: `no_signal` would be
    sure of it a window later, when whoever looks at a first run has wondered for minutes."""
    if history.last("rollouts/flat") != 1 or history.last("grad_norm") != 0 or (facts.group_size or 2) < 2:
        return None
    reward, solved = history.last("rollouts/reward"), history.last("rollouts/solved") or 0.0
    remedy = "take harder prompts" if solved > 0.5 else "take easier prompts, or warm-start the model"
    told = "" if reward is None else f" (the mean is {reward:.3g})"
    return Advice(
        "nothing_trained",
        f"nothing was trained in this step, every group has one reward for all its episodes{told}",
        f"one step says little; if it goes on, {remedy}, or raise data.group_size",
        {"rollouts/flat": 1.0, "grad_norm": 0.0, "rollouts/solved": solved},
    )


def replies_cut(history: History, facts: Facts) -> Advice | None:
    """More than one episode in five ended by max_new_tokens: their answers are missing, and the reward says wrong to
    what was only long (DAPO, section 3.4)."""
    finished = history.gained("rollouts/accepted") + history.gained("rollouts/dropped_stale")
    size = facts.group_size or 1
    episodes = (finished + history.gained("rollouts/dropped_filtered")) * size
    cut = history.gained("rollouts/truncated")
    if not _exceeds(cut / size, episodes / size, 0.2):  # those of a prompt are alike
        return None
    return Advice(
        "replies_cut",
        f"{cut / episodes:.0%} of the episodes end where their tokens do, without an answer",
        "raise max_new_tokens of the workflow, or let the regulariser overlong charge for length before the end",
        {"rollouts/truncated": cut, "rollouts/episodes": episodes},
    )


def length_runs_away(history: History, facts: Facts) -> Advice | None:
    """Replies twice as long as at the start for no more reward. Longer replies that earn more are what reasoning looks
    like; a length that only grows is a reward for length somewhere (Liu et al. 2025, "Understanding R1-Zero-like
    training", on the bias of sequence means)."""
    first, now = history.first("rollouts/length"), history.mean("rollouts/length")
    before, reward = history.first("rollouts/reward"), history.mean("rollouts/reward")
    if now is None or reward is None or not first or not before or history.steps < 2 * history.window:
        return None
    if now <= 2 * median(first) or reward > median(before) + _spread(before):
        return None
    return Advice(
        "length_runs_away",
        f"replies grew from {median(first):.0f} to {now:.0f} tokens, the reward did not ({reward:.3g})",
        "the regulariser overlong, model.aggregation: token_mean, or a look at what long replies are rewarded for",
        {"rollouts/length": now, "rollouts/length/first": median(first), "rollouts/reward": reward},
    )


def dropped_as_stale(history: History, facts: Facts) -> Advice | None:
    """One group in ten generated for nothing. They are the slow ones, so what is trained leans to short replies."""
    dropped, admitted = history.gained("rollouts/dropped_stale"), _admitted(history)
    if not _exceeds(dropped, admitted, 0.1) or facts.max_staleness is None:
        return None
    return Advice(
        "dropped_as_stale",
        f"{dropped / admitted:.0%} of the groups are dropped, older than data.max_staleness: {facts.max_staleness}",
        f"data.max_staleness: {facts.max_staleness + 1} with an objective for it (decoupled_ppo), or shorter episodes",
        {"rollouts/dropped_stale": dropped, "rollouts/admitted": admitted},
    )


def _exceeds(groups: float, of: float, share: float) -> bool:
    """Whether more than `share` of the groups, by more than chance: a window of small batches has sixteen, one of which
    is 6%, and every step of a run has its window."""
    return of > 0 and share_interval(min(groups, of), of)[0] > share


def _spread(values: list[float]) -> float:
    """Standard deviation: [n] -> scalar."""
    mean = sum(values) / len(values)
    return math.sqrt(sum((value - mean) ** 2 for value in values) / len(values))


def _admitted(history: History) -> float:
    """Groups whose prompts were to be played: those at rest were not."""
    return history.gained("rollouts/admitted") - history.gained("rollouts/rested")
