"""Rules about learning: gradients, entropy, clipping, whether the sampler is the model that learns, and whether what it
learns holds for other prompts.
"""

from __future__ import annotations

import math
from statistics import median

from callbacks.coach.facts import Advice, Facts
from callbacks.coach.history import History


def steps_lost(history: History, facts: Facts) -> Advice | None:
    """Any step without effect. In sound runs there is none: the norm is not finite only after an overflow."""
    lost = history.gained("strategy/skipped_steps")
    if not lost:
        return None
    return Advice(
        "steps_lost",
        f"{lost:.0f} of the last {history.window} optimizer steps had a gradient that is not finite and were skipped",
        "lower the learning rate, set trainer.gradient_clip_val: 1.0, or precision: bf16-mixed instead of bf16-true",
        {"strategy/skipped_steps": lost},
    )


def no_gradient(history: History, facts: Facts) -> Advice | None:
    """A window of gradients that are 0, though episodes of most prompts earned different rewards: single steps may have
    had groups without differences, all of a window's have not. It is the objective's, or an advantage's, as a rule."""
    now, flat = history.now("grad_norm"), history.mean("rollouts/flat")
    if len(now) < history.window or any(now) or flat is None or flat > 0.8:
        return None
    return Advice(
        "no_gradient",
        f"the gradient was 0 for {len(now)} steps, though {1 - flat:.0%} of the groups have different rewards",
        "nothing is trained: see that model.objective depends on logprobs (none of it detached), that model.advantage"
        " is not 0 everywhere, and what the adapter trains",
        {"grad_norm": 0.0, "rollouts/flat": flat},
    )


def sampler_differs(history: History, facts: Facts) -> Advice | None:
    """KL of the sampler from the trainer at equal weights above 0.01 nats a token. Float32 shows 1e-6, bf16 kernels
    against each other 1e-4 to 1e-3; at some 0.01 runs were seen to collapse (Yao et al. 2025, Liu et al. 2025, "When
    speed kills stability")."""
    names = ("mismatch_kl", "val/mismatch_kl")
    found = {name: median(history.now(name)) for name in names if history.now(name)}
    worst = max(found.values(), default=0.0)
    if worst <= 0.01:
        return None
    remedy = "give sampler and trainer one precision, and look whether the server's weights are the trainer's"
    if not facts.corrected:
        remedy += "; model.correction: truncated weighs what remains"
    return Advice(
        "sampler_differs", f"sampler and trainer disagree by {worst:.2g} nats a token at equal weights", remedy, found
    )


def gradient_jumps(history: History, facts: Facts) -> Advice | None:
    """A gradient ten times the median of the steps before, which nothing bounds. AdamW forgets one such step only
    after some hundred (beta2 0.99 to 0.999). Steps whose groups were all flat have a gradient of 0, to which any other
    is a jump: they are no measure."""
    before, now = history.past("grad_norm"), history.now("grad_norm")
    past = [norm for norm in before if norm > 0]
    if facts.clip_norm or len(before) < history.window or 2 * len(past) < history.window or not now:
        return None
    usual = median(past)
    if max(now) <= 10 * usual:
        return None
    return Advice(
        "gradient_jumps",
        f"the gradient's norm jumped to {max(now):.3g}, {max(now) / usual:.0f} times its median",
        f"trainer.gradient_clip_val: {2 * usual:.2g} bounds it at twice the usual",
        {"grad_norm": max(now), "grad_norm/median": usual},
    )


def clip_decides(history: History, facts: Facts) -> Advice | None:
    """Every gradient of the window far above the clip: the step's length is the clip's, not the gradient's, so all
    batches count alike. A factor of 10 is far from the 1 to 3 of runs that clip now and then. Of a clip by value the
    norm tells nothing."""
    now = history.now("grad_norm")
    if not facts.clip_norm or facts.by_value or len(now) < history.window or min(now) <= 10 * facts.clip_norm:
        return None
    return Advice(
        "clip_decides",
        f"every gradient is cut, from {median(now):.3g} to trainer.gradient_clip_val: {facts.clip_norm:g}",
        f"raise it to {median(now):.2g}, or lower the learning rate if the loss does not fall",
        {"grad_norm": median(now)},
    )


def held_out_falls(history: History, facts: Facts) -> Advice | None:
    """The last two validations both below the best before them, prompt by prompt, at a chance of 0.01 that all pairs of
    validations so far share (Bonferroni), since the best of many is above its own mean. Two, for sound runs were seen
    to fall once and come back. Simulated as in tests/callbacks/coach/test_held_out.py: of 1,904 runs of 20 validations
    whose accuracy stays the same, with 64 to 1,000 prompts, it is said in 2."""
    fall = history.held_out.fall
    if fall is None:
        return None
    remedy = "a lower learning rate, the regulariser kl or a larger coef of it, or more kinds of prompts"
    path, accuracy = facts.best_checkpoint or ("", -math.inf)
    if accuracy > (fall.before + fall.now) / 2:  # that of a validation before the first step is kept by nobody
        remedy = f"go on from {path} (val/accuracy {accuracy:.3g}) with {remedy}"
    else:
        remedy += "; a ModelCheckpoint with monitor: val/accuracy, mode: max keeps the best from here on"
    return Advice(
        "held_out_falls",
        f"held-out accuracy fell from {fall.before:.3g} after step {fall.step} to {fall.now:.3g},"
        f" {fall.worse} of {fall.prompts} prompts worse and {fall.better} better",
        remedy,
        {
            "val/accuracy": fall.now,
            "val/accuracy/best": fall.before,
            "prompts": fall.prompts,
            "worse": fall.worse,
            "better": fall.better,
            "p": fall.p,
        },
    )


def entropy_collapses(history: History, facts: Facts) -> Advice | None:
    """Entropy a tenth of what it was while tasks remain: reward is bought with entropy and ends where it ends (Cui et
    al. 2025, "The entropy mechanism of reinforcement learning"). Where nearly all is solved it has to fall."""
    first, now, solved = history.first("entropy"), history.mean("entropy"), history.mean("rollouts/solved") or 0.0
    if now is None or len(first) < history.window or history.steps < 2 * history.window:
        return None
    if now >= 0.1 * median(first) or solved >= 0.7:
        return None
    higher = facts.clip_high is not None and facts.clip_high < 0.28
    return Advice(
        "entropy_collapses",
        f"entropy fell from {median(first):.2g} to {now:.2g} nats a token, with {solved:.0%} of the prompts solved",
        f"a lower learning rate, {'objective_options: {clip_high: 0.28} (DAPO), ' if higher else ''}or the regulariser"
        " entropy",
        {"entropy": now, "entropy/first": median(first), "rollouts/solved": solved},
    )


def clipped_too_often(history: History, facts: Facts) -> Advice | None:
    """Three tokens in ten without a gradient. PPO clips at 0.1 to 0.2 where it works (Huang et al. 2022, "The 37
    implementation details of PPO"; GSPO's paper reports 0.15)."""
    share = history.mean("clip_fraction")
    if share is None or share <= 0.3:
        return None
    fewer = "fewer model.epochs or model.minibatches" if facts.passes > 1 else "a lower data.max_staleness"
    if facts.passes == 1 and facts.max_staleness == 0:  # what the ratio is of then is sampler against trainer
        fewer = "model.proximal: recomputed, since sampler and trainer differ"
    return Advice(
        "clipped_too_often",
        f"{share:.0%} of the tokens are clipped and teach nothing",
        f"a lower learning rate, or {fewer}",
        {"clip_fraction": share},
    )
