"""The coach: one sentence about what holds a run back, with the number it is judged by and what to change.

A rule is a function of `(History, Facts)` that returns an `Advice` or nothing; its docstring says where its threshold
comes from. `RULES` lists them, what makes a run worthless before what makes it slow. Promises: no rule without a
remedy, silence when all is well; a sentence is said when it becomes true, and again only every `repeat` steps;
`coach.jsonl` in the run directory has a line whenever what holds changes, with the evidence. Only global rank 0 speaks.
Nothing is changed: options stay as they were configured.
"""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from lightning.pytorch import LightningModule, Trainer

from app import checks
from callbacks.base import StepMetrics, run_dir
from datamodules.inference.protocol import RolloutData, ServerEngine

_LONG = 4  # windows that count as the past


@dataclass(frozen=True)
class Advice:
    """What a rule found.

    Attributes:
        rule: its name.
        finding: what is so, with the number, as the beginning of a sentence.
        remedy: what to change, naming options.
        evidence: metrics by name, as the rule saw them.
    """

    rule: str
    finding: str
    remedy: str
    evidence: dict[str, float]

    def __str__(self) -> str:
        return f"{self.finding}: {self.remedy}"


@dataclass(frozen=True)
class Facts:
    """What the rules know of a run besides its metrics. None: the run has no such thing, or it cannot be told.

    Attributes:
        servers: servers that generate; 0 with an engine in the trainer's process.
        max_staleness, batch_size, group_size: of the datamodule; batch_size in groups.
        filtered: a filter drops groups before training.
        corrected: the module weighs tokens by how the sampler differs.
        clip_norm: trainer.gradient_clip_val; 0 without.
        passes: optimizer steps a rollout batch.
    """

    servers: int | None = None
    max_staleness: int | None = None
    batch_size: int | None = None
    group_size: int | None = None
    filtered: bool = False
    corrected: bool = False
    clip_norm: float = 0.0
    passes: int = 1

    @classmethod
    def of(cls, trainer: Trainer, module: Any) -> Facts:
        """Those of a `fit` that begins."""
        data: Any = trainer.datamodule
        rolls_out = isinstance(data, RolloutData)
        algorithm = getattr(module, "algorithm", None)
        return cls(
            servers=_servers(data.engine) if rolls_out else None,
            max_staleness=getattr(getattr(data, "gate", None), "max_staleness", None),
            batch_size=getattr(data, "batch_size", None) if rolls_out else None,
            group_size=getattr(data, "group_size", None),
            filtered=getattr(data, "filter", None) is not None,
            corrected=getattr(algorithm, "correction", None) is not None,
            clip_norm=float(trainer.gradient_clip_val or 0.0),
            passes=int(getattr(module, "steps_per_batch", 1)),
        )


def _servers(engine: Any) -> int | None:
    if not isinstance(engine, ServerEngine):
        return 0
    launch = getattr(engine, "launch", None)
    return len(getattr(engine, "urls", ())) or getattr(launch, "replicas", None)


class History:
    """Metrics of the last steps, and of the first ones.

    Args:
        window: steps that count as now; four rollout batches at least.
        passes: optimizer steps a rollout batch. Metrics of rollouts come with its first alone.
    """

    def __init__(self, window: int, passes: int = 1) -> None:
        self.window, self._passes = max(window, 4 * passes), passes
        self._rows: deque[Mapping[str, float]] = deque(maxlen=_LONG * self.window + 1)
        self._first: list[Mapping[str, float]] = []
        self.steps = 0

    def add(self, metrics: Mapping[str, float]) -> None:
        """One step's; those that are not numbers are taken as not measured."""
        row = {name: value for name, value in metrics.items() if math.isfinite(value)}
        self.steps += 1
        self._rows.append(row)
        if len(self._first) < self.window:
            self._first.append(row)

    def now(self, name: str) -> list[float]:
        """Of the last `window` steps, where it was measured."""
        return _values(list(self._rows)[-self.window :], name)

    def past(self, name: str) -> list[float]:
        """Of the steps before `now`, four windows with it at most."""
        return _values(list(self._rows)[: -self.window], name)

    def first(self, name: str) -> list[float]:
        """Of the first `window` steps of this launch."""
        return _values(self._first, name)

    def mean(self, name: str) -> float | None:
        """Of `now`; None when it was measured in less than half of these steps, or batches."""
        values = self.now(name)
        return sum(values) / len(values) if 2 * len(values) >= self.due(name) else None

    def due(self, name: str) -> int:
        """How often it is measured in a window."""
        return self.window // self._passes if name.startswith("rollouts/") else self.window

    def gained(self, name: str) -> float:
        """What a counter grew by over `now`; 0 for one that is not there."""
        values = _values(list(self._rows)[-self.window - 1 :], name)
        return values[-1] - values[0] if values else 0.0


def _values(rows: list[Mapping[str, float]], name: str) -> list[float]:
    return [row[name] for row in rows if name in row]


Rule = Callable[[History, Facts], Advice | None]


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


def rewards_fail(history: History, facts: Facts) -> Advice | None:
    """More than one group in twenty lost to failures. Each costs its whole generation, and those that fail are seldom
    like the others, so what is left is biased."""
    failed, admitted = history.gained("rollouts/failed"), history.gained("rollouts/admitted")
    if not admitted or failed / admitted <= 0.05:
        return None
    return Advice(
        "rewards_fail",
        f"{failed / admitted:.0%} of the groups fail in their workflow or reward and are dropped",
        "the log names the last reason; what they printed is in reward_workers/ and agents/ of the run directory",
        {"rollouts/failed": failed, "rollouts/admitted": admitted},
    )


def prompts_too_long(history: History, facts: Facts) -> Advice | None:
    """More than one prompt in twenty left out since it leaves no room for a reply."""
    skipped, admitted = history.gained("rollouts/skipped"), history.gained("rollouts/admitted")
    if not admitted or skipped / admitted <= 0.05:
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
    solved, unsolved = history.mean("rollouts/solved") or 0.0, history.mean("rollouts/unsolved") or 0.0
    if solved >= unsolved:
        remedy = "most prompts are solved every time, so take harder ones, or end here"
    else:
        remedy = "hardly any prompt is solved, so take easier ones, warm-start the model, or raise data.group_size"
    if not facts.filtered:
        remedy += "; data.filter: datamodules.filters.NoSignal trains on the others alone"
    evidence = {"rollouts/flat": flat, "rollouts/solved": solved, "rollouts/unsolved": unsolved}
    return Advice("no_signal", f"{flat:.0%} of the groups have one reward for all episodes", remedy, evidence)


def gradient_jumps(history: History, facts: Facts) -> Advice | None:
    """A gradient ten times the median of the steps before, which nothing bounds. AdamW forgets one such step only
    after some hundred (beta2 0.99 to 0.999)."""
    past, now = history.past("grad_norm"), history.now("grad_norm")
    if facts.clip_norm or len(past) < history.window or not now or max(now) <= 10 * median(past):
        return None
    usual = median(past)
    return Advice(
        "gradient_jumps",
        f"the gradient's norm jumped to {max(now):.3g}, {max(now) / max(usual, 1e-12):.0f} times its median",
        f"trainer.gradient_clip_val: {2 * usual:.2g} bounds it at twice the usual",
        {"grad_norm": max(now), "grad_norm/median": usual},
    )


def clip_decides(history: History, facts: Facts) -> Advice | None:
    """Every gradient of the window far above the clip: the step's length is the clip's, not the gradient's, so all
    batches count alike. A factor of 10 is far from the 1 to 3 of runs that clip now and then."""
    now = history.now("grad_norm")
    if not facts.clip_norm or len(now) < history.window or min(now) <= 10 * facts.clip_norm:
        return None
    return Advice(
        "clip_decides",
        f"every gradient is cut, from {median(now):.3g} to trainer.gradient_clip_val: {facts.clip_norm:g}",
        f"raise it to {median(now):.2g}, or lower the learning rate if the loss does not fall",
        {"grad_norm": median(now)},
    )


def entropy_collapses(history: History, facts: Facts) -> Advice | None:
    """Entropy a tenth of what it was while tasks remain: reward is bought with entropy and ends where it ends (Cui et
    al. 2025, "The entropy mechanism of reinforcement learning"). Where nearly all is solved it has to fall."""
    first, now, solved = history.first("entropy"), history.mean("entropy"), history.mean("rollouts/solved") or 0.0
    if now is None or len(first) < history.window or history.steps < 2 * history.window:
        return None
    if now >= 0.1 * median(first) or solved >= 0.7:
        return None
    return Advice(
        "entropy_collapses",
        f"entropy fell from {median(first):.2g} to {now:.2g} nats a token, with {solved:.0%} of the prompts solved",
        "a lower learning rate, objective_options: {clip_high: 0.28} (DAPO), or a regulariser for entropy",
        {"entropy": now, "entropy/first": median(first), "rollouts/solved": solved},
    )


def replies_cut(history: History, facts: Facts) -> Advice | None:
    """More than one episode in five ended by max_new_tokens: their answers are missing, and the reward says wrong to
    what was only long (DAPO, section 3.4)."""
    finished = history.gained("rollouts/accepted") + history.gained("rollouts/dropped_stale")
    episodes = (finished + history.gained("rollouts/dropped_filtered")) * (facts.group_size or 1)
    cut = history.gained("rollouts/truncated")
    if not episodes or cut / episodes <= 0.2:
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


def clipped_too_often(history: History, facts: Facts) -> Advice | None:
    """Three tokens in ten without a gradient. PPO clips at 0.1 to 0.2 where it works (Huang et al. 2022, "The 37
    implementation details of PPO"; GSPO's paper reports 0.15)."""
    share = history.mean("clip_fraction")
    if share is None or share <= 0.3:
        return None
    fewer = "fewer model.epochs or model.minibatches" if facts.passes > 1 else "a lower data.max_staleness"
    return Advice(
        "clipped_too_often",
        f"{share:.0%} of the tokens are clipped and teach nothing",
        f"a lower learning rate, or {fewer}",
        {"clip_fraction": share},
    )


def dropped_as_stale(history: History, facts: Facts) -> Advice | None:
    """One group in ten generated for nothing. They are the slow ones, so what is trained leans to short replies."""
    dropped, admitted = history.gained("rollouts/dropped_stale"), history.gained("rollouts/admitted")
    if not admitted or dropped / admitted <= 0.1 or facts.max_staleness is None:
        return None
    return Advice(
        "dropped_as_stale",
        f"{dropped / admitted:.0%} of the groups are dropped, older than data.max_staleness: {facts.max_staleness}",
        f"data.max_staleness: {facts.max_staleness + 1} with an objective for it (decoupled_ppo), or shorter episodes",
        {"rollouts/dropped_stale": dropped, "rollouts/admitted": admitted},
    )


def trainer_waits(history: History, facts: Facts) -> Advice | None:
    """A quarter of the step spent waiting for rollouts, where servers could be added; with an engine in the trainer's
    process, which shares its machine, three fifths. What balances: n servers finish a batch in a step of s seconds, of
    which w were waited, so n s / (s - w) finish it in s - w."""
    share = _share(history, "time/wait")
    if facts.servers is None or share <= (0.25 if facts.servers else 0.6):
        return None
    if facts.max_staleness == 0:
        remedy = "data.max_staleness: 1 lets rollouts go on while the model trains"
    elif facts.servers:
        remedy = f"{math.ceil(facts.servers / max(1 - share, 0.01) - 1e-9)} servers in place of"
        remedy += f" {facts.servers} would balance"
    else:
        remedy = "SGLang servers on devices of their own take generation off this process (datamodules.inference)"
    return Advice("trainer_waits", f"the trainer waits for rollouts {share:.0%} of the time", remedy, {"share": share})


def servers_idle(history: History, facts: Facts) -> Advice | None:
    """In seven steps of eight a whole batch lay ready and nothing was generated when the trainer took its own: servers
    stand still for what the gate does not let through."""
    running, queued = history.now("rollouts/running"), history.now("rollouts/queued")
    if not facts.servers or not facts.batch_size or len(running) < history.due("rollouts/running"):
        return None
    idle = sum(r == 0 and q >= facts.batch_size for r, q in zip(running, queued, strict=True)) / len(running)
    if idle < 0.875:
        return None
    fewer = f"{facts.servers - 1} of {facts.servers} servers, or " if facts.servers > 1 else ""
    bound = (facts.max_staleness or 0) + 1
    return Advice(
        "servers_idle",
        "servers wait for the trainer, with whole batches ready",
        f"{fewer}data.max_staleness: {bound} with an objective for it, larger batches, or more training devices",
        {"rollouts/idle_share": idle},
    )


def sync_takes_long(history: History, facts: Facts) -> Advice | None:
    """A fifth of the step spent on sending weights."""
    share = _share(history, "time/sync")
    if share <= 0.2:
        return None
    remedy = "more episodes a step (data.batch_size)"
    if facts.servers:
        remedy += ", WeightSync's method distributed instead of disk, or a LoRA with SGLangEngine's adapters"
    return Advice("sync_takes_long", f"{share:.0%} of the time goes into sending weights", remedy, {"share": share})


RULES: tuple[Rule, ...] = (
    steps_lost,
    sampler_differs,
    rewards_fail,
    prompts_too_long,
    gradient_jumps,
    clip_decides,
    no_signal,
    entropy_collapses,
    replies_cut,
    length_runs_away,
    clipped_too_often,
    dropped_as_stale,
    trainer_waits,
    servers_idle,
    sync_takes_long,
)
"""In order of importance: what is said when several hold."""


def advise(history: History, facts: Facts) -> list[Advice]:
    """What holds now, the most important first; nothing within the first window of a launch."""
    if history.steps < history.window:
        return []
    found = (rule(history, facts) for rule in RULES)
    return [one for one in found if one is not None]


def _share(history: History, name: str) -> float:
    """Of the time of steps, in that half of the window where it is smaller: one long step is no bottleneck."""
    whole, part = history.now("time/step"), history.now(name)
    if len(whole) < history.window or len(part) != len(whole):
        return 0.0
    middle = len(whole) // 2
    halves = (slice(None, middle), slice(middle, None))
    return min(sum(part[half]) / (sum(whole[half]) or math.inf) for half in halves)


def _spread(values: list[float]) -> float:
    """Standard deviation: [n] -> scalar."""
    mean = sum(values) / len(values)
    return math.sqrt(sum((value - mean) ** 2 for value in values) / len(values))


class Coach(StepMetrics):
    """Says the most important advice when it changes, and writes all of it to `coach.jsonl`.

    Args:
        window: optimizer steps that are looked at together, at least 4, and at least those of four rollout batches.
        repeat: steps after which a sentence that still holds is said again.
    """

    def __init__(self, window: int = 8, repeat: int = 100) -> None:
        checks.at_least(4, {"Coach.window": window})
        checks.at_least(1, {"Coach.repeat": repeat})
        self.window, self.repeat = window, repeat
        self._path: Path | None = None
        self._history = History(window)
        self._facts = Facts()
        self._holding: set[str] = set()
        self._said = ("", 0)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        self._path = run_dir(trainer) / "coach.jsonl"
        self._facts = Facts.of(trainer, pl_module)
        self._history = History(self.window, self._facts.passes)
        self._holding, self._said = set(), ("", 0)

    def on_step_metrics(self, trainer: Trainer, step: int) -> None:
        if not trainer.is_global_zero:
            return
        self._history.add({name: float(value) for name, value in trainer.callback_metrics.items()})
        advice = advise(self._history, self._facts)
        holding = {one.rule for one in advice}
        if holding != self._holding:
            self._write(step, advice, sorted(self._holding - holding))
            self._holding = holding
        rule, at = self._said
        if advice and (advice[0].rule != rule or step - at >= self.repeat):
            self._said = (advice[0].rule, step)
            trainer.lightning_module.print(f"step {step}: {advice[0]}")

    def _write(self, step: int, advice: list[Advice], over: list[str]) -> None:
        assert self._path is not None
        line = {"step": step, "advice": [asdict(one) for one in advice], "over": over}
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a") as file:
            file.write(json.dumps(line) + "\n")
