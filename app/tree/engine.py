"""Forward and backward of a causal language model over a prefix tree: the public face of `app.tree`.

Promises: for any loss that is a sum over sequences of a differentiable function of that sequence's token
log-probabilities, entropies and values, `backward` accumulates the gradient of running every sequence alone, and for
any differentiable function of all of them `backward_coupled` does, in two passes; memory is bounded by the plan's
budgets; the model is left as it was found (except for `.grad`, and for `grad_dtype` of low-precision parameters, which
makes their gradients accumulate in float32).
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import astuple, replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from app.tree.attention import BACKENDS, choose_backend
from app.tree.attention.chosen.indexers import Indexers
from app.tree.attention.groups import RankGroup
from app.tree.calibrate import measure_rates
from app.tree.executor import Completing, Executor
from app.tree.experts.replay import Replay
from app.tree.heads import Heads, Likeliest, Soft, SoftTargets, refuse_soft
from app.tree.heads.outputs import OUTPUT_NAMES, BatchedLoss, FlatOutputs, LossFn, TreeOutputs, check_scalar, one_by_one
from app.tree.heads.temperatures import sequence_temperatures
from app.tree.memory import Budget, Result, runs_out, tower_graphs_fit
from app.tree.model.checkpointing import checkpointable
from app.tree.model.elementwise import refuse_elementwise
from app.tree.model.picture_check import Entries, entering, entries_over
from app.tree.model.picture_shares import dealt
from app.tree.model.pictures import PicturePass, Tower
from app.tree.model.quantised import settle_quantised
from app.tree.model.refusals import (
    refuse_by_name,
    refuse_dropout,
    refuse_group,
    refuse_lengths,
    refuse_pictures,
    refuse_tokens,
    refuse_unsupported,
    transformers_model,
)
from app.tree.model.shallow import first_layers
from app.tree.model.shape import shape_of
from app.tree.planning.dense import dense_plan
from app.tree.planning.plan import ExecutionPlan
from app.tree.planning.planner import plan
from app.tree.planning.timing import CPU_RATES, Rates, TimeModel
from app.tree.prefix_tree import PrefixTree
from app.tree.self_check import Budgets, CheckReport, SelfCheckError, Subject, compare
from app.tree.states.kernels import STATES, choose_scans
from app.tree.states.layers import StateLayers
from app.tree.states.scans import TORCH, Scans


class TreeEngine:
    """Runs a model over prefix trees.

    Args:
        model: a transformers causal language model whose layers all attend through transformers' attention interface;
            PEFT adapters inside its layers (LoRA and the like) are trained as they are, on 4-bit layers too.
        chunk_tokens: most tokens in one forward; "auto" chooses by device.
        live_tokens: most tokens whose activations are kept at once; "auto" takes what free memory allows.
        attention: attention backend, "auto" or a name in `app.tree.attention.BACKENDS`.
        temperature: > 0; log-probabilities are of softmax(logits / temperature), as the sampler's.
        value_head: maps hidden states [n, H] to values [n] or [n, 1]; default `model.value_head` or `model.score`.
        head_tokens: rows of logits held at a time; "auto": 128 MiB of them on a CPU, thousands of rows on a GPU.
        checkpointing: whether the planner may choose chunks whose layers run again in backward.
        rates: what the planner predicts times with, from `app.tree.calibrate.measure_rates`. By default a GPU's are
            measured at the first plan (a fraction of a second), and a CPU's are constants, so that plans repeat there.
        self_check: whether the first backward also runs a small part of its batch densely and compares; see
            `app.tree.self_check`.
        on_mismatch: what happens when they differ: "error", or "fallback" to dense-leaf execution from then on.
        group: ranks that run every tree together, each a share of its rows (`app.tree.attention.groups`). All of them
            call the same methods with the same trees and losses; outputs and losses are then the same on each, `.grad`
            is what a rank's own rows give, whose sum over the group is the gradient, and budgets in tokens are the
            group's.
        states: what computes the scans of layers that carry a state: "torch", "fla" (kernels of flash-linear-attention
            and mamba-ssm, on CUDA devices), or "auto"; see `app.tree.states.kernels`.
        image_processor: makes the model's arguments of a picture's pixels, for trees with pictures: transformers' own,
            of the PIL backend, or what `picture_processor(directory)` finds.
        elementwise: how norms, rotary embeddings and activations run: "eager", or "compile", fused by torch.compile
            during the first step; see `app.tree.model.elementwise`.

    Attributes:
        dense: whether every leaf sequence runs alone, through the model's own attention (after such a fallback).
        last_plan: of the pass that ran last; None before the first.
        remember: None, or called before a pass that is repeated where a GPU's memory runs out (half the live tokens, a
            warning, losses evaluated again); what it returns undoes what these have recorded.
        completing: None, or called with the roots of a backward pass's last backward, just before it (those of the
            tower's, which follows it, included): gradients of the model that they do not reach are complete then, the
            others as it passes them. Not where pictures go through a trained tower a second time, nor where a GPU's
            memory might run out and the pass be repeated.
        replay: of trees with routes, which sends tokens to the experts on record; None before the first.

    Raises:
        ValueError: an argument out of range, or a model this engine would compute wrongly, naming the layer or setting.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        chunk_tokens: int | str = "auto",
        live_tokens: int | str = "auto",
        attention: str = "auto",
        temperature: float = 1.0,
        value_head: nn.Module | None = None,
        head_tokens: int | str = "auto",
        checkpointing: bool = True,
        rates: Rates | None = None,
        self_check: bool = True,
        on_mismatch: Literal["error", "fallback"] = "error",
        group: RankGroup | None = None,
        states: str = "auto",
        image_processor: Any | None = None,
        elementwise: str = "eager",
    ) -> None:
        for name, budget in (("chunk_tokens", chunk_tokens), ("live_tokens", live_tokens)):
            if budget != "auto" and (isinstance(budget, str) or budget < 1):
                raise ValueError(f"{name} must be 'auto' or at least 1 token, got {budget!r}")
        if attention != "auto" and attention not in BACKENDS:
            raise ValueError(f"attention must be 'auto' or one of {sorted(BACKENDS)}, got {attention!r}")
        if states not in STATES:
            raise ValueError(f"states must be one of {STATES}, got {states!r}")
        refuse_elementwise(elementwise)
        if not temperature > 0:
            raise ValueError(f"temperature must be above 0, got {temperature}")
        if on_mismatch not in ("error", "fallback"):
            raise ValueError(f"on_mismatch must be 'error' or 'fallback', got {on_mismatch!r}")
        if on_mismatch != "error" and not self_check:
            raise ValueError(f"on_mismatch={on_mismatch!r} has no effect without self_check; set self_check=True")
        self.on_mismatch, self.dense = on_mismatch, False
        self._verified = set() if self_check else {False, True}  # without pictures, with pictures
        self.last_plan: ExecutionPlan | None = None
        self.model = transformers_model(model)
        refuse_by_name(type(self.model).__name__, self.model.config)
        settle_quantised(self.model)
        self.state_layers, self.indexers = StateLayers.of(self.model), Indexers.of(self.model)
        refuse_unsupported(self.model, self.state_layers.indices, self.indexers.types)
        if group is not None:
            refuse_group(self.model, [*self.state_layers.alone, *self.indexers.alone], on_mismatch)
        self.group = group
        self.tower = Tower(self.model, image_processor)
        self.budget = Budget(chunk_tokens, live_tokens)
        self.remember: Callable[[], Callable[[], None]] | None = None
        self.completing: Completing | None = None
        self.replay: Replay | None = None
        self.temperature, self.elementwise = temperature, elementwise
        self.attention, self.states, self.checkpointing, self.rates = attention, states, checkpointing, rates
        self.value_head = value_head or getattr(self.model, "value_head", None) or getattr(self.model, "score", None)
        self.heads = Heads(self.model, self.value_head, head_tokens)

    def chosen(self) -> str:
        """What computes a pass here, in one line: attention, scans, logits, and how element-wise parts run."""
        scans = f", scans {self._scans().name}" if self.state_layers.mixers else ""
        heads, attention = self.heads, choose_backend(self.attention, self.model).name
        logits = f", logits {heads.way()} in blocks of {heads.head_tokens:,} rows" if heads.projection else ""
        return f"attention {attention}{scans}{logits}, element-wise parts {self.elementwise}"

    def plan(self, tree: PrefixTree) -> ExecutionPlan:
        """The plan that `forward` and `backward` execute for `tree`: of a few candidates within the budgets, the one
        of least predicted time."""
        if self.dense:
            return dense_plan(tree)
        ranks = 1 if self.group is None else self.group.size
        room = self.heads.head_tokens, ranks, self.tower.least_chunk(tree)
        chunk, live = self.budget.tokens(self.model, tree, *room)
        if self.group is not None:  # by the memory of the one that has least
            chunk, live = (int(min(values)) for values in zip(*self.group.gather((chunk, live))))
        return self._plan(tree, chunk, live)

    def forward(
        self,
        tree: PrefixTree,
        want: Sequence[str] = ("logprobs",),
        temperatures: Any | None = None,
        soft: Soft | None = None,
    ) -> TreeOutputs:
        """Outputs of every sequence, without gradient.

        Args:
            tree: what to run.
            want: any of "logprobs", "entropy", "values", "soft".
            temperatures: float [N], one a sequence, instead of the engine's; sequences that share tokens need
                equal ones (build the tree with `keys`).
            soft: what "soft" is made of, a row a token of all sequences; or a `Likeliest`, which collects beside
                "logprobs" what the model finds likeliest.
        """
        executor = self._executor(tree, want, temperatures, with_grads=False, soft=soft)
        executor.run()
        if isinstance(soft, Likeliest) and executor.group is not None:
            soft.sum_over(executor.group)
        return TreeOutputs(executor.outputs(range(tree.num_sequences)))

    def backward(
        self,
        tree: PrefixTree,
        loss_fn: LossFn,
        want: Sequence[str] = ("logprobs",),
        batched: bool = False,
        temperatures: Any | None = None,
        soft: SoftTargets | None = None,
    ) -> float:
        """Accumulates the gradient of the summed loss into `.grad` and returns that sum.

        Args:
            tree, want, temperatures, soft: as in `forward`.
            loss_fn: `loss_fn(out: SequenceOutputs, i: int) -> scalar` for sequence i; with `batched`,
                `loss_fn(out: FlatOutputs, indices: int64 [n]) -> scalar`, the sum over these sequences.
                Every sequence is passed exactly once.

        Raises:
            SelfCheckError: the first time, when the self-check fails; gradients are as before then.
        """
        self._verify_once(tree, want)
        losses = loss_fn if batched else one_by_one(loss_fn)
        return float(
            self._with_room(lambda: self._executor(tree, want, temperatures, soft=soft).run(losses, self._early()))
        )

    def backward_coupled(
        self,
        tree: PrefixTree,
        loss_fn: Callable[[FlatOutputs], Tensor],
        want: Sequence[str] = ("logprobs",),
        temperatures: Any | None = None,
    ) -> float:
        """Accumulates the gradient of a loss that couples sequences (a statistic of the batch in it, say) into `.grad`
        and returns the loss. Two passes: a forward for all outputs, then `backward_from` their gradients.

        Args:
            tree, want, temperatures: as in `forward`.
            loss_fn: `loss_fn(out: FlatOutputs) -> scalar` of all sequences at once, in the tree's order.
        """
        out = self.forward(tree, want, temperatures).with_gradient()
        with torch.enable_grad():
            loss = loss_fn(out)
            check_scalar(loss, "")
            if loss.requires_grad:
                loss.backward()
        grads = {name: getattr(out, name).grad for name in want}
        used = {name: grad for name, grad in grads.items() if grad is not None}
        if used:
            self.backward_from(tree, used, temperatures)
        return float(loss.detach())

    def backward_grouped(
        self,
        tree: PrefixTree,
        loss_fn: Callable[[FlatOutputs, Tensor], Tensor],
        groups: Any,
        want: Sequence[str] = ("logprobs",),
    ) -> float:
        """Accumulates the gradient of a loss that couples the sequences of a group (it compares them, say) into `.grad`
        and returns the loss. One pass, but for groups whose sequences the plan ends in different chunks: these go
        forward once more before it.

        Args:
            tree, want: as in `forward`; one temperature, the engine's.
            loss_fn: `loss_fn(out: FlatOutputs, indices: int64 [n]) -> scalar`, the sum over groups, all of whose
                sequences are among these. Every group is passed exactly once.
            groups: integers [N], the group of each sequence.
        """
        self._verify_once(tree, want)
        return self._with_room(lambda: self._grouped(tree, loss_fn, groups, want))

    def _grouped(
        self,
        tree: PrefixTree,
        loss_fn: Callable[[FlatOutputs, Tensor], Tensor],
        groups: Any,
        want: Sequence[str],
    ) -> float:
        execution, ids = self.plan(tree), np.unique(np.asarray(groups), return_inverse=True)[1]
        last = execution.tree.sequence_last_needed  # in dense execution another tree than `tree`
        chunk = np.where(last >= 0, execution.token_chunk[last], -1) if execution.tree.num_tokens else last
        lowest, highest = np.full(len(ids), len(execution.chunks)), np.full(len(ids), -1)
        np.minimum.at(lowest, ids, chunk)
        np.maximum.at(highest, ids, chunk)
        apart = torch.from_numpy((lowest < highest)[ids])  # [N]
        if not bool(apart.any()):
            return float(self._executor(tree, want, execution=execution).run(loss_fn, self._early()))
        chosen = apart.nonzero().flatten()
        out = self.forward(tree.select(chosen.tolist()), want).with_gradient()
        with torch.enable_grad():
            before = loss_fn(out, chosen)
            check_scalar(before, "")
            if before.requires_grad:
                before.backward()
        place = torch.full((len(apart),), -1).index_copy(0, chosen, torch.arange(len(chosen)))

        def rest(now: FlatOutputs, indices: Tensor) -> Tensor:
            """Of groups that are not apart the loss; of the others, which is known, the gradient alone."""
            together = (~apart[indices]).nonzero().flatten()
            total = loss_fn(now.select(together), indices[together]) if len(together) else before.new_zeros(())
            there = apart[indices].nonzero().flatten()
            mine, theirs = now.select(there), place[indices[there]]
            for name in want:
                given = getattr(out, name).grad
                if given is not None and len(there):
                    values = getattr(mine, name)
                    known = FlatOutputs(out.cu_seqlens, **{name: given}).select(theirs)
                    total = total + (getattr(known, name) * (values - values.detach())).sum()
            return total

        total = self._executor(tree, want, execution=execution).run(rest, self._early())
        return float(total) + float(before.detach())

    def backward_from(
        self, tree: PrefixTree, grads: Mapping[str, Tensor | Sequence[Tensor]], temperatures: Any | None = None
    ) -> None:
        """Accumulates the gradient of any loss into `.grad`, given its gradients by the outputs of `forward`.

        Args:
            tree, temperatures: those of the forward whose outputs the loss was made of.
            grads: by name of the output: one tensor [sum of L_i], or one [L_i] a sequence.

        Raises:
            ValueError: naming the output whose gradient has the wrong shape.
        """
        flat: dict[str, Tensor] = {}
        for name, given in grads.items():
            grad = given if isinstance(given, Tensor) else torch.cat(list(given)) if len(given) else torch.zeros(0)
            if grad.shape != (tree.num_dense_tokens,):
                raise ValueError(
                    f"grads['{name}']: expected one gradient a token, {tree.num_dense_tokens} in all, got shape"
                    f" {tuple(grad.shape)}; concatenate those of all sequences in the tree's order"
                )
            flat[name] = grad.detach()
        self._verify_once(tree, tuple(flat))

        def run() -> None:
            executor = self._executor(tree, tuple(flat), temperatures)
            executor.set_grads(flat)
            executor.run(completing=self._early())

        self._with_room(run)

    def _with_room(self, run: Callable[[], Result]) -> Result:
        modules = [module for module in (self.model, self.value_head) if module is not None]
        return self.budget.run(run, modules, self.group is not None, self.remember, self._used)

    def _early(self) -> Completing | None:
        """`completing`, unless the pass that was just planned may have to be repeated: its gradients stay here then."""
        repeats = self.group is None and runs_out(self.model) and not self.budget.has_fitted(self._used())
        return None if repeats else self.completing

    def _used(self) -> int | None:
        return None if self.last_plan is None else self.last_plan.peak_live_tokens

    def verify(self, tree: PrefixTree, want: Sequence[str] = ("logprobs",)) -> CheckReport | None:
        """Compares tree with dense execution on a small part of `tree`, and changes nothing. None when there is nothing
        to compare: no sequences, or no trainable parameter. In low precision, where rounding would hide a gradient that
        a state lost, the first layers of a model that carries states are compared in float32 as well, but in shards."""
        # What later losses will use too: heads are compared with the model's own by their log-probabilities.
        want = [name for name in want if name != "soft"]
        if self.heads.projection is not None and "logprobs" not in want:
            want.append("logprobs")
        report = self._compare(tree, want)
        depth = self.state_layers.first_of_each
        if report is None or not (report.passed and depth and report.low_precision):
            return report
        shallow = first_layers(self.model, depth)
        if shallow is None:
            return report
        head = None if self.value_head is None else copy.deepcopy(self.value_head).float()
        device = next(shallow.parameters()).device.type
        with torch.autocast(device, enabled=False):
            options: dict[str, Any] = dict(temperature=self.temperature, image_processor=self.tower.processor)
            found = TreeEngine(shallow, value_head=head, self_check=False, group=self.group, **options)
            again = found.verify(replace(tree, routes=None), want)
        if again is None or again.passed:
            return report
        return replace(again, scope=f" (through its first {depth} layers in float32)")

    def _compare(self, tree: PrefixTree, want: Sequence[str]) -> CheckReport | None:
        self._validate(tree, want)

        def run(small: PrefixTree, loss_fn: BatchedLoss, budgets: Budgets | None) -> None:
            execution = dense_plan(small) if budgets is None else self._plan(small, *budgets)
            self._executor(small, want, execution=execution).run(loss_fn)

        def entries(small: PrefixTree) -> list[Entries]:
            execution = self._plan(small, max(self.tower.least_chunk(small), small.num_tokens // 4), small.num_tokens)
            executor = self._executor(small, want, with_grads=False, execution=execution)
            with entering(self.model) as calls:
                executor.run()
            return entries_over(execution, calls, executor.backend.masked_block, self.group)

        scans = any(kind == "scan" for _, kind in self.state_layers.expected)
        total = None if self.group is None else self.group.sum_
        replay = None if tree.routes is None else self.replay
        subject = Subject(self.model, self.value_head, self.temperature, self.tower, run, scans, total, entries, replay)
        with nullcontext() if replay is None else replay.uncounted():
            return compare(subject, tree, frozenset(want))

    def fall_back(self, findings: str) -> None:
        """From now on every leaf sequence runs alone, through the model's own attention; warns why."""
        warnings.warn(f"{type(self.model).__name__}: {findings}. Falling back to dense-leaf execution", stacklevel=3)
        self.dense = True

    def _verify_once(self, tree: PrefixTree, want: Sequence[str]) -> None:
        """`verify` at the first use that has something to compare, and at the first that has pictures; and what
        `on_mismatch` says when it fails."""
        seen = bool(tree.pictures)
        report = None if seen in self._verified else self.verify(tree, want)
        if report is not None:
            self._verified |= {False, seen}
        if report is None or report.passed:
            return
        if self.on_mismatch == "error" or report.heads:  # every sequence alone has the same heads
            raise SelfCheckError(f"{type(self.model).__name__}: {report}. {report.cause}")
        self.fall_back(str(report))

    def _plan(self, tree: PrefixTree, chunk_tokens: int, live_tokens: int) -> ExecutionPlan:
        shape, parameter = shape_of(self.model), next(self.model.parameters())
        if self.rates is None:
            self.rates = measure_rates(self.model) if parameter.device.type == "cuda" else CPU_RATES
            if self.group is not None:  # one plan for all: by what the first of them measured
                self.rates = Rates(*self.group.gather(astuple(self.rates))[0])
        backend = choose_backend(self.attention, self.model, self.tower.sees_ahead(tree))
        share = shape.checkpoint_share() if self.checkpointing and checkpointable(self.model) else 1.0
        times = TimeModel(shape, self.rates, backend, parameter.element_size())
        return plan(tree, chunk_tokens, live_tokens, times, share, uncut=self.tower.uncut(tree))

    def _executor(
        self,
        tree: PrefixTree,
        want: Sequence[str],
        temperatures: Any | None = None,
        with_grads: bool = True,
        execution: ExecutionPlan | None = None,
        soft: Soft | None = None,
    ) -> Executor:
        self._validate(tree, want)
        refuse_soft(want, soft, self.heads.vocabulary is not None)
        per_sequence = None if temperatures is None else sequence_temperatures(tree, temperatures)
        backend = choose_backend(self.attention, self.model, self.tower.sees_ahead(tree))
        self.last_plan = execution = execution or self.plan(tree)
        scans = TORCH if execution.dense else self._scans()
        return Executor(
            self.model,
            self.heads,
            execution,
            frozenset(want),
            self.temperature,
            per_sequence,
            backend,
            self.state_layers,
            self.indexers,
            with_grads,
            None if execution.dense else self.group,
            scans,
            self._pictures(execution, with_grads),
            soft,
            self.elementwise,
            None if self.replay is None else self.replay.over(execution.tree.routes),
        )

    def _pictures(self, execution: ExecutionPlan, with_grads: bool) -> PicturePass | None:
        tree, group = execution.tree, None if execution.dense else self.group
        if not tree.pictures:
            return None
        owned = dealt(tree, 1 if group is None else group.size)
        own = [tree.pictures[k] for k in owned[0 if group is None else group.rank]]
        graphs = with_grads and self.tower.trained and tower_graphs_fit(self.model, own)
        return PicturePass(self.tower, tree, graphs, owned, group)

    def _scans(self) -> Scans:
        shape = shape_of(self.model).states
        sizes = (0, 0, 0) if shape is None else (shape.heads, shape.key_dim, shape.value_dim)
        return choose_scans(self.states, self.model, self.state_layers.functions, sizes)

    def _validate(self, tree: PrefixTree, want: Sequence[str]) -> None:
        """Refuses input the model cannot compute, naming the output or the sequence."""
        names = frozenset(want)
        if isinstance(want, str) or not names or names - set(OUTPUT_NAMES):
            raise ValueError(f"want: expected a non-empty tuple out of {OUTPUT_NAMES}, got {want!r}")
        if "values" in names and self.value_head is None:
            raise ValueError("want: 'values' needs a value head; pass value_head=... to TreeEngine")
        if names - {"values"} and self.heads.projection is None:
            raise ValueError(f"want: {type(self.model).__name__} has no output projection; use a ...ForCausalLM model")
        if tree.pictures:
            refuse_pictures(self.model, self.tower.processor)
        if tree.routes is not None:
            self.replay = self.replay or Replay(self.model)
            self.replay.refuse(tree.routes)
        refuse_tokens(self.model, tree)
        refuse_lengths(self.model, tree)
        for module in (self.model, self.value_head):
            if module is not None:
                refuse_dropout(module)
