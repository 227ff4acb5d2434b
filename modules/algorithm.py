"""`Algorithm`: advantage x objective x regularisers x correction, composed from their names.

Promises: pure arithmetic on tensors; it knows no tree, no rank, no model and no execution mode. What cannot be
composed, or would have no effect, is refused when it is made, by an error that names the keys. How its functions are
named, and what they are called with: `app.functions`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from app import checks
from app.batch import BatchError, RolloutBatch, Trajectory
from app.functions import Choice, Function, choose
from modules.advantages import ADVANTAGES, Estimate, is_of_ones_own
from modules.corrections import CORRECTIONS
from modules.episodes import call_rewards, earned, episodes, taking_part
from modules.objectives import OBJECTIVES, traits_of
from modules.objectives.calls import check_alone, check_untrained, marked, shaped, with_stats
from modules.regularisers import LIKELIEST, REGULARISERS, Coef, Coefs

Proximal = Literal["sampler", "recomputed", "interpolated"]
PROXIMAL = ("sampler", "recomputed", "interpolated")


@dataclass(eq=False, kw_only=True)
class LossInputs:
    """What the functions of a loss are called with: T tokens of n sequences, concatenated. None: nobody asks for it.

    Attributes:
        logprobs: [T], with gradient, nats: of the policy being trained.
        entropy: [T], with gradient, nats: of the distribution each token was drawn from.
        old: [T], nats: of the policy the ratio is taken against; `proximal` of `PolicyModule` says which.
        behavior: [T], nats: of the sampler.
        reference: [T], nats: of the reference policy.
        soft: [T], with gradient, nats: sum over the reference's likeliest tokens of its probability x the policy's
            log-probability; of costs in the loss alone.
        teacher_soft: [T], nats: the same sum with the reference's own log-probabilities.
        advantages: [T], units of (normalised) reward.
        mask: bool [T], trained tokens; what other tokens hold is arbitrary, but finite.
        cu_seqlens: int64 [n + 1]: sequence k is tokens `cu_seqlens[k]` to `cu_seqlens[k + 1]`.
        groups, episodes: int64 [n], of each sequence, where the objective sees a whole step.
        rewards: float32 [n], there too: of each sequence's episode, with the rewards of its single calls and less what
            regularisers in the reward cost.
    """

    logprobs: Tensor
    entropy: Tensor | None = None
    old: Tensor | None = None
    behavior: Tensor | None = None
    reference: Tensor | None = None
    soft: Tensor | None = None
    teacher_soft: Tensor | None = None
    advantages: Tensor | None = None
    mask: Tensor
    cu_seqlens: Tensor
    groups: Tensor | None = None
    episodes: Tensor | None = None
    rewards: Tensor | None = None


STEP_INPUTS = ("groups", "episodes", "rewards")
TOKEN_INPUTS = tuple(one.name for one in fields(LossInputs) if one.name not in STEP_INPUTS)
SOFT_INPUTS = ("soft", "teacher_soft")
SEQUENCE_INPUTS = ("episodes", "turns")  # of costs in the reward, from the batch itself
REWARD_INPUTS = ("logprobs", "reference", "mask", "cu_seqlens", *SEQUENCE_INPUTS)
CORRECTION_INPUTS = ("old", "behavior", "mask", "cu_seqlens")
ADVANTAGE_INPUTS = ("batch", "values", "entropy", "token_rewards")
LOGGED = (
    *("step", "epoch", "loss", "reward", "entropy", "approx_kl", "teacher_mass", "grad_norm", "lr"),
    *("staleness", "staleness_max", "mismatch_kl", "logprob_diff_max", "taught", "routing/changed"),
    *("correction_weight", "correction_square", "correction_ess"),
    *("value_loss", "value_clip_fraction", "explained_variance"),
    *("tokens/dense", "tokens/leaf", "tokens/tree", "tokens/s"),
)
"""Names under which modules and loggers have numbers of their own in a step."""
_EQUAL_REWARDS = "mind groups whose rewards are all equal"
_BAD_COST = "a cost in the reward must be a finite number: correct the function"


@dataclass
class Regulariser:
    """One cost of tokens.

    Attributes:
        name: kl, kl_weighted, forward_kl, entropy or overlong (docs/algorithms.md, the files of modules/regularisers);
            or the import path of your own.
        coef: its weight, above 0: the cost is made small; or a rule by which that changes (`Coef`).
        where: "loss" adds coef x cost to each token's loss; "reward" takes it from the reward before advantages are
            computed.
        options: of the function.

    Raises:
        ValueError: another place.
    """

    name: Function
    coef: float | Coef
    where: Literal["loss", "reward"] = "loss"
    options: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        checks.one_of("regularisers: where", self.where, ("loss", "reward"))


class Algorithm:
    """What is maximised.

    Args:
        advantage, objective, correction: names, import paths or functions; advantage None is `default_advantage`.
        advantage_options, objective_options, correction_options: of these functions.
        regularisers: costs in the loss and in the reward.
        proximal: what the ratio is taken against (`old`); see `PolicyModule`.

    Attributes:
        whole_step: the objective sees all sequences of an optimizer step at once.
        objective_metrics: names of what `losses` returns to be logged. metrics: those and what `costs` adds.
        penalties: names of the episode means that `token_rewards` returns.
        coefs: by regulariser and penalty. measured: by penalty, the mean cost over tokens that the last batch trains.

    Raises:
        ValueError: naming the key and the remedy.
    """

    def __init__(
        self,
        advantage: Function | None = None,
        default_advantage: Function = "grpo",
        advantage_options: dict[str, Any] | None = None,
        objective: Function = "ppo_clip",
        objective_options: dict[str, Any] | None = None,
        regularisers: Sequence[Regulariser] = (),
        correction: Function | None = None,
        correction_options: dict[str, Any] | None = None,
        proximal: Proximal | None = None,
    ) -> None:
        inputs = [name for name in (*TOKEN_INPUTS, *STEP_INPUTS) if name not in SOFT_INPUTS]
        self.objective = choose("objective", objective, objective_options, OBJECTIVES, inputs)
        self.traits = traits_of(self.objective.function)
        self.whole_step = self.traits.whole_step or bool(self.objective.needs & set(STEP_INPUTS))
        self.advantage: Choice | None = None
        if "advantages" in self.objective.needs:
            self.advantage = choose(
                "advantage", advantage or default_advantage, advantage_options, ADVANTAGES, ADVANTAGE_INPUTS
            )
        self.correction: Choice | None = None
        if correction is not None:
            self.correction = choose("correction", correction, correction_options, CORRECTIONS, CORRECTION_INPUTS)
            self.correction = _at_level_of(self.correction, self.traits.sequence_ratio)
        self.loss_costs = [(r, self._cost(r)) for r in regularisers if r.where == "loss"]
        self.reward_costs = [(r, self._cost(r)) for r in regularisers if r.where == "reward"]
        self.penalties = tuple(f"penalty/{choice.name}" for _, choice in self.reward_costs)
        in_reward = {name: r.coef for name, (r, _) in zip(self.penalties, self.reward_costs)}
        self.coefs = Coefs({choice.name: r.coef for r, choice in self.loss_costs} | in_reward, ["entropy"])
        self.measured: dict[str, float | None] = {}
        given = {"advantage": advantage, "advantage_options": advantage_options}
        self._check(given, correction_options, regularisers, proximal)
        weighs = self.correction is not None or {"old", "behavior"} <= self.objective.needs
        self.proximal: Proximal = proximal or ("recomputed" if weighs else "sampler")
        self.objective_metrics = self._probe()
        costs = (choice.name for _, choice in self.loss_costs if choice.name != "entropy")  # is logged as it is
        self.metrics = (*self.objective_metrics, *costs)

    def check_group_size(self, option: str, episodes: int) -> None:
        """Raises ValueError for a group size, the data's `option`, that advantage or objective have nothing to say of.
        (A user's own advantage is not asked.)"""
        asked: list[tuple[str, Choice, Callable[[], Any]]] = []
        if self.advantage is not None and self._is_ours(self.advantage):
            asked.append(("advantage", self.advantage, lambda: self._try_advantage(episodes)))
        if set(STEP_INPUTS) & self.objective.needs and self._is_ours(self.objective):
            asked.append(("objective", self.objective, lambda: self.losses(_example_tokens(episodes))))
        if self.traits.compares_episodes and episodes == 1:
            raise self._lone(option, "objective", self.objective)
        for key, choice, attempt in asked:
            try:
                attempt()
            except BatchError as error:
                if episodes == 1:
                    raise self._lone(option, key, choice) from None
                raise ValueError(f"data.{option}: {episodes}, but {error}") from None

    @staticmethod
    def _lone(option: str, key: str, choice: Choice) -> ValueError:
        return ValueError(
            f"data.{option}: 1, but {key}={choice.name} compares the episodes of a group: set it to at least 2, or"
            f" choose another {key}"
        )

    @staticmethod
    def _is_ours(choice: Choice) -> bool:
        return bool(choice.function.__module__.startswith("modules.") and not is_of_ones_own(choice))

    def _try_advantage(self, episodes: int = 2) -> None:
        assert self.advantage is not None
        batch = _example_batch(episodes)
        zeros = torch.zeros(batch.num_tokens)
        self.advantage({"batch": batch, "values": zeros, "entropy": zeros, "token_rewards": zeros})

    @property
    def needs(self) -> frozenset[str]:
        """Inputs that any of the functions asks for."""
        chosen = [self.objective, self.advantage, self.correction, *(c for _, c in self.loss_costs + self.reward_costs)]
        return frozenset().union(*(choice.needs for choice in chosen if choice is not None))

    @property
    def likeliest(self) -> int:
        """How many of the reference's likeliest tokens costs in the loss compare with; 0 where none does. Those without
        an option `k` take what the others do.

        Raises:
            ValueError: two of them say otherwise; the reference is asked once.
        """
        soft = [choice for _, choice in self.loss_costs if choice.needs & set(SOFT_INPUTS)]
        takes = {c.name: (c, inspect.signature(c.function).parameters) for c in soft}
        said = {name: c.options.get("k", given["k"].default) for name, (c, given) in takes.items() if "k" in given}
        if len(set(said.values())) > 1:
            told = " and ".join(f"{count} of {name}" for name, count in said.items())
            raise ValueError(f"regularisers: options: k: {told}, and the reference is asked once: set the same in each")
        return next(iter(said.values()), LIKELIEST if soft else 0)

    # Before the optimizer steps, on the whole batch

    def token_rewards(self, batch: RolloutBatch, inputs: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, float]]:
        """What the regularisers take from the reward, and the rewards of single calls.

        Args:
            inputs: REWARD_INPUTS of the whole batch, as far as they are needed and not SEQUENCE_INPUTS.

        Returns:
            float32 [T], 0 on tokens that are not trained; the sum of each penalty over the batch, by metric name.
        """
        total, sums = call_rewards(batch), {}
        own = batch.flat_index(taking_part(batch, list(range(len(batch))), ""))
        if self.reward_costs:
            inputs = {**inputs, "episodes": episodes(batch)[2], "turns": batch.turn_indices}
        for name, (_, choice) in zip(self.penalties, self.reward_costs):
            cost = shaped(choice(inputs), batch.tokens, choice)
            cost = _finite(cost, batch.loss_mask, batch, f"regularisers.{choice.name}", _BAD_COST)
            total -= self.coefs[name] * cost
            sums[name] = self.coefs[name] * float(cost.sum(dtype=torch.float64))
            self.measured[name] = float(cost[own][batch.loss_mask[own]].mean(dtype=torch.float64)) if len(own) else None
        return total, sums

    def credit(
        self, batch: RolloutBatch, token_rewards: Tensor, columns: Mapping[str, Tensor] | None = None
    ) -> Estimate | Tensor:
        """Advantages (from an estimator for a critic also the returns), finite on trained tokens and 0 elsewhere.

        Args:
            token_rewards: float32 [T]; added to the episodes' rewards where the estimator does not take them apart.
            columns: float32 [T] by name, `values` and `entropy` where the estimator asks for them.

        Raises:
            BatchError: the estimator returned another shape, or numbers that are not finite, or wrote into the batch.
        """
        assert self.advantage is not None, "asked for by the objective"
        if "token_rewards" not in self.advantage.needs and bool(token_rewards.any()):
            batch = with_rewards(batch, token_rewards)
        given = {name: one for name, one in (columns or {}).items() if name in self.advantage.needs}
        given["token_rewards"] = token_rewards
        read = {f"batch.{name}": tensor for name, tensor in batch.tensors().items()} | given
        # Of code that is not ours. Copies, since no counter knows of what is written by way of numpy; routes, the
        # largest, are no estimator's.
        kept = () if self._is_ours(self.advantage) else read.keys() - {"batch.route_table"}
        before = {name: read[name].clone() for name in kept}
        credit = self.advantage({"batch": batch, "values": None, **given})
        same = partial(torch.allclose, rtol=0, atol=0, equal_nan=True)
        if written := next((name for name, tensor in before.items() if not same(read[name], tensor)), None):
            raise BatchError(
                f"advantage: {self.advantage.name} writes into {written}, which metrics and later steps read: make new"
                " tensors (no -=, no method that ends in _; of what numpy() gives a copy)"
            )
        what = f"advantage={self.advantage.name}"
        if isinstance(credit, Estimate):
            advantages = _finite(credit.advantages, batch.loss_mask, batch, what)
            returns = _finite(credit.returns, credit.value_mask, batch, f"{what}: returns")
            return Estimate(advantages, returns, credit.value_mask)
        return _finite(credit, batch.loss_mask, batch, what)

    # In an optimizer step, on some sequences

    def losses(self, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
        """The objective's loss of each token [T], corrected, and tensors [T] whose means are logged."""
        losses, stats = with_stats(self.objective(vars(inputs)), inputs.mask, self.objective)
        if self.correction is not None:
            weights, more = with_stats(self.correction(vars(inputs)), inputs.mask, self.correction)
            weights = weights.detach()
            losses = losses * weights
            stats = {**stats, "correction_weight": weights, "correction_square": weights**2, **more}
        return marked(losses, inputs.logprobs), stats

    def costs(self, inputs: LossInputs) -> tuple[Tensor | float, dict[str, Tensor]]:
        """coef x cost of the regularisers in the loss, summed: [T], or 0.0 without any; and each cost [T] by name."""
        total: Tensor | float = 0.0
        stats = {}
        for _, choice in self.loss_costs:
            cost = shaped(choice(vars(inputs)), inputs.mask, choice)
            if coef := self.coefs[choice.name]:
                total = total + coef * cost
            stats[choice.name] = cost.detach()
        return total if isinstance(total, float) else marked(total, inputs.logprobs), stats

    # Checks

    def _cost(self, regulariser: Regulariser) -> Choice:
        if regulariser.name == "forward_kl" and regulariser.where == "reward":
            raise ValueError(
                "regularisers.forward_kl: compares whole distributions, which no sampled token earns: set where: loss,"
                " or take kl for the reward"
            )
        inputs = (*TOKEN_INPUTS, *SEQUENCE_INPUTS) if regulariser.where == "loss" else REWARD_INPUTS
        choice = choose(
            "regularisers", regulariser.name, regulariser.options, REGULARISERS, inputs, "regularisers.options"
        )
        if regulariser.where == "loss":
            if not choice.needs & {"logprobs", "entropy", "soft"}:
                raise ValueError(
                    f"regularisers.{choice.name} has no gradient, so it has no effect in the loss: set where: reward"
                )
            if choice.needs & {*SEQUENCE_INPUTS}:
                raise ValueError(
                    f"regularisers.{choice.name} asks for {' and '.join(SEQUENCE_INPUTS)}, which costs in the loss are"
                    " not given: set where: reward"
                )
            if choice.name == "kl" and choice.options.get("estimator") == "k1":
                raise ValueError(
                    "regularisers.kl: the gradient of k1 is zero in expectation, so it cannot be a loss: set estimator"
                    " to k2 or k3, or where: reward"
                )
        return choice

    def _check(
        self,
        given: dict[str, Any],
        correction_options: dict[str, Any] | None,
        regularisers: Sequence[Regulariser],
        proximal: str | None,
    ) -> None:
        objective, needs = self.objective.name, self.objective.needs
        for key, value in given.items():
            if value is not None and self.advantage is None:
                raise ValueError(
                    f"{key} has no effect with objective={objective}, which takes no advantages; remove it"
                )
        if correction_options is not None and self.correction is None:
            raise ValueError("correction_options has no effect without a correction; name one")
        if self.correction is not None and self.advantage is None:
            raise ValueError(f"correction has no effect on objective={objective}, which weighs no samples; remove it")
        if self.correction is not None and {"old", "behavior"} <= needs:
            raise ValueError(f"correction: objective={objective} weighs by exp(old - behavior) itself; use one of them")
        if self.whole_step and "entropy" in needs:
            raise ValueError(f"objective={objective}: one for whole steps has no entropy; use the regulariser entropy")
        if self.reward_costs and not needs & {"advantages", "rewards"}:
            raise ValueError(f"regularisers: where=reward has no effect with objective={objective}; use where: loss")
        if self.advantage is not None and self.advantage.name == "distill":
            own = [choice for _, choice in self.reward_costs if choice.function not in REGULARISERS.values()]
            by_teacher = [c for _, c in self.reward_costs if c.name == "kl" and c.options.get("estimator") == "k1"]
            if not own and not by_teacher and not self.likeliest:
                raise ValueError(
                    "advantage=distill takes what each token earns by itself, and no teacher says what that is: set"
                    " regularisers: [{name: kl, coef: 1.0, where: reward, options: {estimator: k1}}], with the teacher"
                    " as reference: {path: DIR}"
                )
        places = [(choice.name, r.where) for r, choice in self.loss_costs + self.reward_costs]
        for place in places:
            if places.count(place) > 1:
                raise ValueError(f"regularisers: {place[0]} is given twice in the {place[1]}; add their coefficients")
        if proximal is not None:
            checks.one_of("proximal", proximal, PROXIMAL)
        if proximal is not None and "old" not in self.needs and self.correction is None:
            raise ValueError(
                f"proximal has no effect: neither objective={objective} nor a correction or a regulariser takes `old`"
            )
        if proximal == "sampler" and (self.correction is not None or "behavior" in needs):
            what = "the correction" if self.correction is not None else f"objective={objective}"
            raise ValueError(
                f"proximal=sampler makes every weight of {what} 1: set proximal to recomputed or interpolated"
            )

    def _probe(self) -> tuple[str, ...]:
        """Calls every function once, on four tokens, so that mistakes show now; names of what `losses` reports."""
        with torch.enable_grad():
            inputs = _example_tokens()
            self._check_names(inputs)
            value = with_stats(self.objective(vars(inputs)), inputs.mask, self.objective)[0]
            if not value.requires_grad and (bool(value.any()) or not self.loss_costs):
                rest = ", or of zeros for the regularisers alone" if self.loss_costs else ""
                raise ValueError(
                    f"objective: {self.objective.name} has no gradient, so it would train nothing: make it of logprobs,"
                    f" none of it detached{rest}"
                )
            losses, stats = self.losses(inputs)
            check_untrained("objective", self.objective, losses, vars(inputs))
            for regulariser, choice in self.loss_costs + self.reward_costs:
                cost = shaped(choice({**vars(inputs), "turns": torch.tensor([0, 0])}), inputs.mask, choice)
                if regulariser.where == "loss":  # in the reward it is masked
                    check_untrained("regularisers", choice, cost, vars(inputs))
            written = [name for name, one in vars(inputs).items() if isinstance(one, Tensor) and one._version]
            if written:
                raise ValueError(
                    f"objective, correction or regularisers: one writes into its {written[0]}, which other functions"
                    " and later steps read: return new tensors (no +=, no method that ends in _)"
                )
            self._check_alone()
        if self.advantage is not None and self._is_ours(self.advantage):
            self._try_advantage()
        return tuple(stats)

    def _check_alone(self) -> None:
        """Raises ValueError for what depends on the sequences that a chunk happens to hold."""
        whole = (
            "decorate the objective with @traits(whole_step=True) of modules.objectives, or have it ask for groups: it"
            " is then called once, with all of an optimizer step (which costs a forward pass)"
        )
        for key, one in () if self.whole_step else (("objective", self.objective), ("correction", self.correction)):
            if one is not None:
                check_alone(key, one, whole)
        for _, one in self.loss_costs:
            check_alone("regularisers", one, "make it of each sequence alone, or set where: reward, which sees a batch")

    def _check_names(self, inputs: LossInputs) -> None:
        """Raises ValueError where what a function reports would take the place of another number in the metrics."""
        reported: list[tuple[Choice, str]] = []
        for one in (self.objective, self.correction):
            stats = {} if one is None else with_stats(one(vars(inputs)), inputs.mask, one)[1]
            reported += [(one, name) for name in stats if one is not None]
        reported += [(c, c.name) for _, c in self.loss_costs if c.function is not REGULARISERS["entropy"]]
        reported += [(choice, f"penalty/{choice.name}") for _, choice in self.reward_costs]
        owners = dict.fromkeys((*LOGGED, *self.coefs.logged), "the run")
        for choice, name in reported:
            if name in owners:
                raise ValueError(
                    f"{choice.name}: reports '{name}', a name by which {owners[name]} reports another number: choose"
                    " another (a regulariser's is its function's)"
                )
            owners[name] = choice.name


def with_rewards(batch: RolloutBatch, token_rewards: Tensor) -> RolloutBatch:
    """A view of `batch` whose episodes' rewards include their tokens' [T]."""
    rewards, _, of_sequence = earned(batch, token_rewards)
    return batch.with_rewards(rewards[of_sequence].float())


def _at_level_of(correction: Choice, sequence_ratio: bool) -> Choice:
    """With an objective whose ratio is a sequence's, corrections are by default too: as the ratio, the mean of the
    logarithms. (With weights of single tokens the gradient would not be that of the weighted loss.)"""
    takes_level = "level" in inspect.signature(correction.function).parameters
    if not sequence_ratio or not takes_level or "level" in correction.options:
        return correction
    return replace(correction, options={**correction.options, "level": "geometric"})


def _finite(values: Tensor, mask: Tensor, batch: RolloutBatch, what: str, remedy: str = _EQUAL_REWARDS) -> Tensor:
    if not isinstance(values, Tensor):
        raise BatchError(f"{what}: expected a tensor of shape {tuple(mask.shape)}, got {type(values).__name__}")
    if values.shape != mask.shape:
        raise BatchError(f"{what}: expected shape {tuple(mask.shape)}, one a token, got {tuple(values.shape)}")
    bad = mask & ~torch.isfinite(values)
    if bool(bad.any()):
        i = int(torch.searchsorted(batch.cu_seqlens, bad.nonzero()[0], right=True)) - 1
        raise BatchError(
            f"{what}: not finite on a trained token of sequence {i} (prompt '{batch.prompt_ids[i]}'); {remedy}"
        )
    return values.float().masked_fill(~mask, 0.0)


def _example_tokens(episodes: int = 2) -> LossInputs:
    """What `_example_batch` is to an objective."""
    values, order = [0.0, -1.0] + [0.0, -2.0] * (episodes - 1), torch.arange(episodes)
    tokens: dict[str, Any] = {
        name: torch.tensor(values, requires_grad=name in ("logprobs", "entropy", "soft")) for name in TOKEN_INPUTS
    }
    tokens |= {"mask": torch.tensor([False, True] * episodes), "cu_seqlens": torch.arange(0, 2 * episodes + 1, 2)}
    return LossInputs(**tokens, groups=torch.zeros_like(order), episodes=order, rewards=order.float())


def _example_batch(episodes: int = 2) -> RolloutBatch:
    """The smallest there is to try a function on: one group of episodes of one turn, two tokens each, rewards 0, 1 and
    so on."""
    return RolloutBatch.from_trajectories(
        Trajectory(
            tokens=torch.tensor([1, 2 + episode]),
            loss_mask=torch.tensor([False, True]),
            behavior_logprobs=torch.tensor([0.0, -1.0], dtype=torch.float32),
            versions=torch.tensor([-1, 0]),
            reward=float(episode),
            group_id=0,
            episode_id=episode,
            prompt_id="example",
        )
        for episode in range(episodes)
    )
