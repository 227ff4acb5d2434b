"""`PolicyModule`: policy optimisation of a language model on rollouts, as its `Algorithm` says (GRPO with a clipped
token-level objective unless told otherwise).

Promises: statistics of a group are over its episodes; every denominator counts the whole optimizer step over all ranks;
one rollout batch takes minibatches x epochs steps, all prepared at index 0; an objective that couples sequences sees
all of a step's, however they are cut into chunks and ranks: on rank 0, which alone holds the batch. Forward passes are
run only for what is read.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from app import checks
from app.batch import TEACHER_PROMPT, EvalHandle, RolloutBatch
from app.tree import FlatOutputs, TreeEngine, on_device
from modules.advantages import Estimate
from modules.advantages.teacher import TAUGHT, TeacherServer, as_taught, asked, share_taught, soft_targets, teach
from modules.algorithm import STEP_INPUTS, Algorithm, LossInputs, Proximal, Regulariser, with_rewards
from modules.episodes import episodes, group_sizes, taking_part
from modules.evaluation import EvaluationMetrics, comparable, compare
from modules.metrics import NamedMetrics, TokenSums, episode_reward
from modules.models import ModelSource, ReferencePolicy, Refresh, WithoutAdapters
from modules.objectives import Aggregation
from modules.ranks import TEACHERS_VIEW, likeliest_columns, split_minibatches
from modules.refusals.settings import (
    check_aggregation,
    check_groups,
    check_likeliest,
    check_proximal,
    check_reference,
    check_same_tokens,
    check_sharded_reference,
    not_finite_in_step,
    note_aggregation,
    refuse_not_finite,
    refuse_quantised,
)
from modules.regularisers import k3
from modules.step import TreeStep
from modules.tree_module import CHANGED_ROUTES, TOKEN_COUNTS, TreeModule, objects_among

_COLUMNS = ("proximal", "reference", TAUGHT, "advantages")  # of a batch that losses read
_LOGPROBS = {"policy": "proximal", "reference": "reference"}  # log-probabilities by engine, as columns of the batch


class PolicyModule(TreeModule):
    """Trains `policy` on the rollout batches of its datamodule.

    The loss of an optimizer step is the weighted sum over its trained tokens (`aggregation` gives the weights) of
    objective x correction + the regularisers' coef x cost. Functions are named: one of the package, or the import path
    of your own. docs/algorithms.md says what each computes, takes and is called with: on the site, `make docs`, of all
    of them; in the checkout it leads to their files, whose heads do.

    Args:
        model: the policy's weights or configuration.
        advantage: credit of tokens: grpo (the default), dr_grpo, rloo, reinforce_pp, reward, discounted, distill, tree,
            high_entropy; with a critic gae (its default), gae_turn; or your own. Explained, as those of the next
            options are, on the site (`make docs`; docs/algorithms.md) and in the files of modules/advantages.
        advantage_options: of that function, by name.
        objective: loss of tokens: ppo_clip, decoupled_ppo, dapo, gspo, cispo, sapo, m2po, tba, reinforce, sft, dpo (the
            files of modules/objectives); or your own.
        objective_options: of that function, by name.
        regularisers: costs in the loss or in the reward: kl, kl_weighted, forward_kl, entropy, overlong (the files of
            modules/regularisers); or your own.
        correction: weights for a sampler that differs from the trainer: truncated, masked (the files of
            modules/corrections); or your own.
        correction_options: of that function, by name.
        proximal: the policy that ratios are taken against (`old`). "sampler" (the default): the log-probabilities
            recorded while sampling. "recomputed" (the default with a correction or a decoupled objective): the policy
            at the start of the batch; an extra pass, except with one step a batch. "interpolated": between sampler and
            current policy, log-linearly by version: behavior + (v - s) / (v + 1 - s) x (current - behavior) for a token
            that version s sampled, in a batch that begins at version v, the current policy counting as version v + 1;
            never an extra pass (AReaL); with one step a batch it is refused, "recomputed" being exact and free there.
            Tokens that carry no log-probabilities (version -1) always take the policy at the start of the batch.
        aggregation: what losses of tokens are averaged over: "token_mean", "sequence_mean", "episode_mean" or
            "constant" (`token_weights` in modules/objectives/aggregation.py). Default: the objective's own, which is
            "sequence_mean" of gspo and sapo, "episode_mean" of dpo and tba, "token_mean" of all others.
        aggregation_constant: tokens, the divisor of aggregation "constant".
        reference: "initial", a frozen copy of the weights this run starts from, or where else it comes from. A copy is
            part of the checkpoint, so a resumed run keeps it. "base": the policy with its adapters off, which takes no
            memory and is what "initial" is for adapters that begin at nothing, as LoRA's do. `TeacherServer`: an SGLang
            server has it, and is asked.
        reference_refresh: lets the reference follow the policy every so many rollout batches.
        reference_offload: keep the reference in CPU memory between its passes.
        minibatches: optimizer steps one pass over a rollout batch takes, which deal its groups among them, each whole.
            More than the data says that a batch holds are refused. Where one holds fewer all the same (the last of a
            pass over recorded tasks; replayed batches, of which nothing is said beforehand), single episodes are dealt,
            or with dpo, tba and whatever else asks for `groups`, `episodes` or `rewards`, whole groups still. What then
            gets nothing is a step that moves no weights. A run may stop and go on after each of them; validation falls
            between batches.
        epochs: passes over a rollout batch; each shuffles anew.
        seed: of that shuffling; None for that of `seed_everything` (in a script of your own: 0).
        tree_options: see `TreeModule`.

    Logs, every optimizer step, over all ranks: reward (the mean over the batch's episodes: what is left after the
    datamodule's filter, so no learning curve with one; `rollouts/reward` is), loss, entropy, what objective, correction
    and regularisers report, their coef/* that change, approx_kl (`old` against the policy, by k3), grad_norm, lr,
    staleness and staleness_max (versions between sampling and training, of tokens that have one), tokens/*, tokens/s
    (dense tokens of all ranks by rank 0's wall seconds of the step, its wait for the batch included, whichever passes
    it ran); with a correction correction_weight and correction_ess, the effective share of the samples; at index 0,
    where the batch has not moved the weights yet, penalty/* (an episode) and coef/penalty/*, with hints taught (the
    share of trained tokens whose teacher was shown one), and on tokens that the current version sampled only:
    mismatch_kl (by k3) and logprob_diff_max (sampler against trainer; left out when there are none, as in asynchronous
    runs once rollouts are ahead).
    Validation and test: `val/accuracy`, `test/accuracy`, the mean reward over episodes; `val/mismatch_kl` and
    `val/logprob_diff_max`, the same comparison on a sample of their episodes; `val/pass@k` and so on, behind a set's
    name `val/<set>/` where sets have names: see `modules.evaluation`.

    Raises:
        ValueError: an option out of range, or one that has no effect, naming it and the remedy.
    """

    want: tuple[str, ...] = ("logprobs", "entropy")
    has_critic = False
    may_idle = True  # where all episodes of a batch that have trained tokens are left out of training
    default_advantage = "grpo"

    def __init__(
        self,
        model: ModelSource,
        advantage: str | Callable | None = None,
        advantage_options: dict[str, Any] | None = None,
        objective: str | Callable = "ppo_clip",
        objective_options: dict[str, Any] | None = None,
        regularisers: list[Regulariser] | None = None,
        correction: str | Callable | None = None,
        correction_options: dict[str, Any] | None = None,
        proximal: Proximal | None = None,
        aggregation: Aggregation | None = None,
        aggregation_constant: float | None = None,
        reference: ModelSource | TeacherServer | Literal["initial", "base"] | None = None,
        reference_refresh: Refresh | None = None,
        reference_offload: bool = False,
        minibatches: int = 1,
        epochs: int = 1,
        seed: int | None = None,
        **tree_options: Any,
    ) -> None:
        super().__init__(model, **tree_options)
        self.save_hyperparameters()
        self.save_hyperparameters(ignore=objects_among(self.hparams))
        self.algorithm = Algorithm(
            advantage=advantage,
            default_advantage=self.default_advantage,
            advantage_options=advantage_options,
            objective=objective,
            objective_options=objective_options,
            regularisers=regularisers or [],
            correction=correction,
            correction_options=correction_options,
            proximal=proximal,
        )
        checks.at_least(1, {"minibatches": minibatches, "epochs": epochs})
        checks.at_least(0, {"seed": seed})
        check_proximal(self.algorithm.proximal, minibatches * epochs)
        check_reference(self.algorithm, reference, reference_refresh, reference_offload, self.has_critic)
        self.aggregation_mode: Aggregation = aggregation or self.algorithm.traits.aggregation
        self.aggregation_constant = aggregation_constant
        check_aggregation(self.aggregation_mode, aggregation_constant)
        note_aggregation(self.algorithm, aggregation, self.aggregation_mode)
        self.reference_source = reference
        self._reference_options = (reference_refresh, reference_offload)
        self.minibatches, self.epochs, self.seed = minibatches, epochs, seed or 0
        self.steps_per_batch = minibatches * epochs
        self.reference: ReferencePolicy | WithoutAdapters | None = None
        self.why_not_finite = partial(not_finite_in_step, algorithm=self.algorithm)  # `DTAStrategy` asks
        self._penalties: dict[str, float] = {}
        self._sums = TokenSums((), self.device)
        self._peak = torch.zeros(())
        self._likely = likeliest_columns(self.algorithm.likeliest)
        own = [*(["approx_kl"] if self._has_old else []), *(["teacher_mass"] if self._likely else [])]
        self._token_metrics = ("entropy", *own, *self.algorithm.metrics)
        self.want = (*self.want, *(["soft"] if self._likely else []))
        others = ("staleness", "mismatch_kl", CHANGED_ROUTES, TAUGHT)
        means = ("reward", *self._token_metrics, *others, *self.algorithm.penalties, *self.algorithm.coefs.logged)
        self.train_metrics = NamedMetrics(means, ("loss", *TOKEN_COUNTS), ("staleness_max", "logprob_diff_max"))
        self.eval_metrics = EvaluationMetrics()
        self._compared: set[str] = set()  # sets of held-out prompts, in this validation

    @property
    def _has_old(self) -> bool:
        return "old" in self.algorithm.needs

    def configure_model(self) -> None:
        super().configure_model()
        assert self.policy is not None
        check_likeliest(self.algorithm.likeliest, self.policy.config.get_text_config().vocab_size)
        if self.reference_source is None or self.reference is not None:
            return
        if isinstance(self.reference_source, TeacherServer):
            return
        if self.reference_source == "base":
            self.reference = WithoutAdapters(self.policy, lambda: self.engine)
            return
        self.reference = ReferencePolicy(self.reference_source, self.policy, self.engine_over, *self._reference_options)

    def aggregation(self) -> tuple[Aggregation, float | None]:
        return self.aggregation_mode, self.aggregation_constant

    def setup(self, stage: str) -> None:
        super().setup(stage)
        other = self.reference_source
        refuse_quantised(self.trainer, "reference", other)
        if isinstance(other, ModelSource | TeacherServer):
            tokenizer = getattr(getattr(self.trainer, "datamodule", None), "tokenizer", None)
            path = other.tokenizer if isinstance(other, TeacherServer) else other.path
            check_same_tokens(tokenizer, self.model_source, path)
        if getattr(self.trainer.strategy, "shard_parameters", False):
            source = other if isinstance(other, ModelSource) else self.model_source
            rounded = source.dtype == "bfloat16" or self.trainer.precision == "bf16-true"
            check_sharded_reference(*self._reference_options, rounded)
        if stage == "fit":
            check_groups(self.minibatches, self.algorithm, getattr(self.trainer, "datamodule", None))

    def engine_for(self, name: str) -> AbstractContextManager[TreeEngine]:
        if name == "reference":
            assert self.reference is not None
            return self.reference.engine(self.device)
        return super().engine_for(name)

    # Rank 0, on the whole batch

    def prepare(self, batch: RolloutBatch) -> None:
        batch.columns.pop("proximal", None)  # of another version, where a datamodule yields a batch again
        passes = self.passes(batch)
        for engine, outputs in (self.ranks.outputs(batch, passes) if passes else {}).items():
            for name, column in outputs.items():
                batch.add_column(_LOGPROBS[engine] if name == "logprobs" else name, column)
        algorithm, known = self.algorithm, "reference" in passes
        teach(batch, self.reference_source, known, algorithm.advantage, algorithm.likeliest, self.ranks.outputs)
        for name in (_LOGPROBS["reference"], "values", "entropy", *(("proximal",) if algorithm.reward_costs else ())):
            if name in batch.columns:  # what is computed from them would be called not finite instead
                refuse_not_finite(name, batch.columns[name], batch)
        self._credit(batch)

    def passes(self, batch: RolloutBatch) -> dict[str, tuple[str, ...]]:
        """Forward passes at the start of the batch. With one step a batch the policy at its start is the policy of the
        step: no extra pass."""
        unrecorded = bool((batch.loss_mask & (batch.versions < 0)).any())
        # Of tokens without a record the policy at the start of the batch is `behavior` as well.
        compared = self._has_old or "behavior" in self.algorithm.needs
        anchored = (unrecorded and compared) or (self._has_old and self.algorithm.proximal == "recomputed")
        in_reward = unrecorded and any("logprobs" in choice.needs for _, choice in self.algorithm.reward_costs)
        first = ["logprobs"] if (anchored and self.steps_per_batch > 1) or in_reward else []
        if self.algorithm.advantage is not None and "entropy" in self.algorithm.advantage.needs:
            first += ["entropy"]
        passes = {"policy": tuple(first)} if first else {}
        if self.reference is not None and not any(TEACHER_PROMPT in one for one in batch.metadata):
            passes["reference"] = ("logprobs", *self._likely)
        return passes

    def _credit(self, batch: RolloutBatch) -> None:
        """Rewards to advantages."""
        columns, sampled = batch.columns, batch.behavior_logprobs.masked_fill(~batch.loss_mask, 0.0)
        if "proximal" in columns:
            sampled = torch.where(batch.versions >= 0, sampled, columns["proximal"])
        inputs = {"logprobs": sampled, "mask": batch.loss_mask, "cu_seqlens": batch.cu_seqlens}
        if (reference := as_taught(columns, sampled)) is not None:
            inputs["reference"] = reference
        token_rewards, self._penalties = self.algorithm.token_rewards(batch, inputs)
        batch.add_column("token_rewards", token_rewards)
        if self.algorithm.traits.compares_episodes:  # here, as a step may hold a lone group by chance
            group_sizes(batch, episodes(batch)[1], self.algorithm.objective.name)
        if self.algorithm.advantage is None:
            return
        credit = self.algorithm.credit(batch, token_rewards, columns)
        batch.add_column("advantages", credit.advantages if isinstance(credit, Estimate) else credit)
        if isinstance(credit, Estimate):
            batch.add_column("returns", credit.returns)
            batch.add_column("value_mask", credit.value_mask)

    def step_sequences(self, batch: RolloutBatch, index: int) -> list[int]:
        epoch, part = divmod(index, self.minibatches)
        objective = self.algorithm.objective
        couples = bool(set(STEP_INPUTS) & objective.needs)  # the episodes of a group
        parts = split_minibatches(batch, self.minibatches, (self.seed, self.policy_version, epoch), couples)
        return taking_part(batch, parts[part], objective.name if couples else "")

    def step_plan(self) -> dict[str, int]:
        return {"minibatches": self.minibatches, "epochs": self.epochs, "seed": self.seed}

    def step_columns(self, batch: RolloutBatch, indices: list[int]) -> dict[str, Tensor]:
        columns = super().step_columns(batch, indices)
        if self.algorithm.whole_step:
            columns["gradient"] = self._couple(batch, indices, columns["weights"])
        names = (*_COLUMNS, *self._likely, TEACHERS_VIEW)
        return columns | {name: batch.columns[name] for name in names if name in batch.columns}

    # One step

    def begin_step(self, step: TreeStep, index: int) -> None:
        counted = self.algorithm.objective_metrics if self.algorithm.whole_step else ()
        names = (*(name for name in self._token_metrics if name not in counted), "mismatch_kl")
        self._sums = TokenSums(names, self.device)
        self._peak = torch.full((), -torch.inf, dtype=torch.float64, device=self.device)
        batch = step.batch
        if self._likely:
            step.soft = soft_targets(step, self._likely)
        if batch is None:
            return
        step.columns |= self._token_columns(batch)
        current = batch.loss_mask & (batch.versions == self.policy_version)
        if index == 0 and bool(current.any()):
            step.columns["current"] = current

    def _token_columns(self, batch: RolloutBatch) -> dict[str, Tensor]:
        """[T] tensors that `_loss_inputs` reads."""
        mask, recorded = batch.loss_mask, batch.versions >= 0
        columns = {"mask": mask, "behavior": batch.behavior_logprobs.masked_fill(~mask, 0.0)}
        columns |= {name: batch.columns[name] for name in _COLUMNS if name in batch.columns}
        if self.algorithm.proximal == "interpolated":
            # What the current policy counts in `old`: it will be one version further when the batch is done.
            age = (self.policy_version - batch.versions).clamp(min=0)
            columns["current_share"] = age.float() / (age + 1)
        if not bool((recorded | ~mask).all()):
            columns["recorded"] = recorded
        return columns

    def _loss_inputs(self, out: FlatOutputs, columns: dict[str, Tensor]) -> LossInputs:
        """Of some sequences of a step. `columns`: theirs, of `_token_columns` and `step_columns`."""
        assert out.logprobs is not None
        now = out.logprobs.detach()
        anchor = columns.get("proximal", now)
        behavior = columns["behavior"].to(now)
        if self.algorithm.proximal == "recomputed":
            old = anchor
        elif self.algorithm.proximal == "interpolated":
            old = behavior + columns["current_share"].to(now) * (now - behavior)
        else:
            old = behavior
        if "recorded" in columns:
            old = torch.where(columns["recorded"], old, anchor.to(now))
            behavior = torch.where(columns["recorded"], behavior, old)
        return LossInputs(
            logprobs=out.logprobs,
            entropy=out.entropy,
            old=old,
            behavior=behavior,
            reference=as_taught(columns, now),
            soft=out.soft,
            teacher_soft=columns.get("teacher_soft"),
            advantages=columns.get("advantages"),
            mask=columns["mask"],
            cu_seqlens=on_device(out.cu_seqlens.numpy(), now.device),
        )

    def loss(self, out: FlatOutputs, columns: dict[str, Tensor]) -> Tensor:
        inputs = self._loss_inputs(out, columns)
        assert inputs.old is not None and inputs.behavior is not None and inputs.entropy is not None
        now = inputs.logprobs.detach()
        costs, stats = self.algorithm.costs(inputs)
        if "gradient" in columns:  # of the objective on the whole step; its value was counted there
            losses = costs * columns["weights"] + columns["gradient"] * (inputs.logprobs - now)
        else:
            losses, more = self.algorithm.losses(inputs)
            losses, stats = (losses + costs) * columns["weights"], {**stats, **more}
        stats["entropy"] = inputs.entropy.detach()
        if "teacher_mass" in columns:
            self._sums.add({"teacher_mass": columns["teacher_mass"]}, asked(inputs.mask, columns))
        stats["approx_kl"] = k3(inputs.old, now)
        self._sums.add(stats, inputs.mask)
        if "current" in columns:
            current = columns["current"]
            self._sums.add({"mismatch_kl": k3(inputs.behavior, now)}, current)
            difference = (now - inputs.behavior).abs().masked_fill(~current, -torch.inf)
            self._peak = torch.maximum(self._peak, difference.max().to(self._peak))
        return losses.sum()

    def _couple(self, batch: RolloutBatch, indices: list[int], weights: Tensor) -> Tensor:
        """Rank 0: the gradient of the step's objective by the log-probability of each token, float32 [T] of the whole
        batch. The ranks run their shares forward; the arithmetic on all of it is done here."""
        part = batch.select(indices)
        scored = self.ranks.outputs(batch, {"policy": ("logprobs",)}, indices)["policy"]["logprobs"]
        logprobs = scored[batch.flat_index(indices)].requires_grad_()
        inputs = self._loss_inputs(FlatOutputs(part.cu_seqlens, logprobs=logprobs), self._token_columns(part))
        if set(STEP_INPUTS) & self.algorithm.objective.needs:
            rewards = with_rewards(part, part.columns["token_rewards"]).rewards
            inputs = replace(inputs, groups=part.group_ids, episodes=part.episode_ids, rewards=rewards)
        at = batch.flat_index(indices)
        with torch.enable_grad():
            losses, stats = self.algorithm.losses(inputs)
            loss = (losses * weights[at]).sum()
        gradient = torch.zeros(batch.num_tokens, dtype=torch.float32)  # whatever the Trainer's precision
        if loss.requires_grad:
            loss.backward()
            assert logprobs.grad is not None
            gradient[at] = logprobs.grad
        # What is said of pairs and episodes weighs as their losses do, and not by how long they are.
        coupled = bool(set(STEP_INPUTS) & self.algorithm.objective.needs)
        share = (weights[at] if coupled else part.loss_mask).double()
        sums = TokenSums(tuple(stats), torch.device("cpu"))
        sums.add({name: value.double() * share for name, value in stats.items()}, part.loss_mask)
        self.train_metrics.update(sums.means(share.sum()), sums={"loss": loss.detach()})
        return gradient

    def end_step(self, step: TreeStep) -> None:
        means: dict[str, tuple[Any, Any]] = {}
        if self.batch is not None:  # rank 0 counts for all
            assert self._handle is not None
            total, episodes = episode_reward(self.batch)
            means["reward"] = (total, episodes)
            first, applied = self._handle.index == 0, self.algorithm.coefs.logged.items()
            # From its second step on a batch has the next one's in the reward.
            means |= {name: (coef, 1) for name, coef in applied if first or not name.startswith("coef/penalty/")}
            if first:
                means |= {name: (penalty, episodes) for name, penalty in self._penalties.items()}
                if TAUGHT in self.batch.columns:
                    means[TAUGHT] = share_taught(self.batch)
        if step.batch is not None:
            mask, versions = step.batch.loss_mask, step.batch.versions
            means |= self._sums.means(int(mask.sum()))
            if "mismatch_kl" in means:
                means["mismatch_kl"] = (means["mismatch_kl"][0], step.columns.get("current", torch.zeros(1)).sum())
            if "teacher_mass" in means:
                means["teacher_mass"] = (means["teacher_mass"][0], asked(mask, step.columns).sum())
            ages = self.policy_version - versions[mask & (versions >= 0)]
            if len(ages):
                means["staleness"] = (ages.sum(), len(ages))
                self.train_metrics.update(maxima={"staleness_max": ages.max()})
        self.train_metrics.update(means, maxima={"logprob_diff_max": self._peak})
        coefs = self.algorithm.coefs
        if coefs.logged:  # here, so that checkpoints of this step have the next one's
            found, costs = self.train_metrics.compute(), (choice.name for _, choice in self.algorithm.loss_costs)
            coefs.step({name: float(found[name]) if name in found else None for name in costs})
            assert self._handle is not None
            if self._handle.index == 0:  # costs in the reward are of a batch, and rank 0's
                coefs.step(self.algorithm.measured)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_save_checkpoint(checkpoint)
        checkpoint["coefs"] = self.algorithm.coefs.state_dict()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_load_checkpoint(checkpoint)
        self.algorithm.coefs.load_state_dict(checkpoint.get("coefs", {}))

    def derive(self, values: dict[str, Any]) -> dict[str, Any]:
        square = values.pop("correction_square", None)
        if square is not None:
            values["correction_ess"] = values["correction_weight"] ** 2 / square.clamp(min=1e-30)
        return values

    def end_batch(self) -> None:
        if self.reference is not None:
            assert self.policy is not None
            self.reference.follow(self.policy, self.policy_version)

    def begin_evaluation(self) -> None:
        super().begin_evaluation()
        self._compared.clear()

    def evaluate(self, handle: EvalHandle) -> None:
        self.eval_metrics.update(handle)
        # Inside of a batch the engine serves other weights. Alike on all ranks.
        if not self.steps_done and handle.name not in self._compared:
            self._compared.add(handle.name)
            self._compare(handle)

    def _compare(self, handle: EvalHandle) -> None:
        """The sampler's log-probabilities with the policy's, on a sample of held-out episodes."""
        version, differences = self.policy_version, list[tuple[float, int, float]]()

        def work(handle: EvalHandle) -> None:
            part = comparable(handle.batch, version) if handle.batch is not None else None
            if part is not None:
                logprobs = self.ranks.outputs(part, {"policy": ("logprobs",)})["policy"]["logprobs"]
                differences.append(compare(part, logprobs, version))

        with torch.inference_mode(False), torch.no_grad():  # what engines keep must serve training too
            self.ranks.lead(handle, work)
        for one in differences:
            self.eval_metrics.compared(*one)
