"""`TreeModule`, under all other modules: it owns policy and tree engine, and makes an optimizer step of a `StepHandle`.

Promises: Lightning's automatic optimization works as usual, the forward and backward passes being the tree pass inside
`backward`; rank 0, which owns the batch, checks and prepares it once, at index 0, and cuts every optimizer step
into the shares of the ranks (`ranks.py`), whose losses are divided by counts of the whole step; `policy_version`
rises once a batch, after its last optimizer step; a step without sequences moves no weights and no state of the
optimizer, though the schedule of the learning rate goes on, and its metrics say loss 0.0 (with `DTAStrategy` grad_norm
0.0 too); one whose sequences have no gradient, as where the rewards of each group are equal, is a step like any other,
in which the optimizer's momentum and weight decay move the weights. A checkpoint may be written after any step: it
holds the version, how far the batch under way is and what was prepared of it (`step.py`).

One optimizer step, in call order; what a subclass says is marked *:

    hook                       ranks   does                                       may touch
    on_train_batch_start       all     starts the clock
    training_step              all     returns a placeholder for a loss           `train_metrics`
      _cut_step                0       index 0: arrange*, check_batch, prepare*;  columns of the batch; runs passes on
                                       later: take_up; step_sequences*,           all ranks by `ranks.outputs`
                                       step_columns*
      begin_step*              all     adds to this rank's columns                `step.columns`
    backward                   all
      ranks.verify_together    all     first step: tree against dense execution   the engines: all may fall back, and
                                                                                  the step begins anew
      tree_pass*               all     loss* of each group of sequences           gradients, until they are complete
    (the strategy)             all     sums gradients over ranks; may begin in the last backward of the tree pass
    on_before_optimizer_step   all     their norm; none where no rank has work    gradients
      end_step*                all     counts                                     `train_metrics`
    (clipping, the optimizer)  all     moves parameters
    optimizer_step, its end    all     counts the step, or the batch; end_batch*  `steps_done`, `policy_version`
    on_train_batch_end         all     derive*, logs                              metrics

Works under a plain Trainer on one process, where a gradient that is not finite ends the run (`DTAStrategy` skips its
step); on several it needs `DTAStrategy`, which sums gradients.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Literal

import torch
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau
from transformers import PreTrainedModel

from app.batch import BatchError, EvalHandle, RolloutBatch, StepHandle
from app.exchange import ranks_of
from app.functions import Shared
from app.tree import FlatOutputs, PrefixTree, RankGroup, TreeEngine
from modules.evaluation import EvaluatedModule
from modules.metrics import NamedMetrics, log_alone, remembered
from modules.models import ModelSource, build_model, image_processor_of
from modules.objectives import Aggregation
from modules.ranks import RankWork, Step, build_tree, settle_routes
from modules.refusals.going_on import check_schedules, check_states, tell_changes
from modules.refusals.settings import (
    check_own_tokens,
    note_logging,
    refuse_frozen,
    refuse_narrow,
    refuse_optimizer,
    refuse_options,
    refuse_quantised,
    refuse_trainer,
)
from modules.step import State, TreeStep, check_batch, check_plan, state_of, take_up, token_loss_weights, with_names

_log = logging.getLogger(__name__)

TreeTrainingMode = Literal["disabled", "sparse", "dta"]
TokenBudget = int | Literal["auto"]
SelfCheck = Literal["error", "fallback", "skip"]
CHANGED_ROUTES = "routing/changed"
TOKEN_COUNTS = ("tokens/dense", "tokens/leaf", "tokens/tree")


def adamw(params: Any) -> Optimizer:
    return torch.optim.AdamW(params, lr=1e-5, weight_decay=0.0)


class TreeModule(EvaluatedModule):
    """A causal language model trained over prefix trees.

    Args:
        model: the policy's weights or configuration.
        optimizer: called with the policy's trainable parameters. Default: torch's AdamW, lr 1e-5, weight_decay 0.
        lr_scheduler: called with the optimizer, stepped once an optimizer step. Default: the learning rate stays.
        tree_training_mode: same loss and gradients, another execution. "dta": the planner, within both budgets.
            "sparse": the whole tree in chunks as large as `live_tokens`. "disabled": every sequence on its own
            (only sequences that others extend are dropped, their losses attached to the longer one), packed into
            chunks as large as `live_tokens`.
        chunk_tokens: most tokens in one forward; mode "dta" only.
        live_tokens: most tokens whose activations are kept at once; "auto" takes what fits half of the free memory.
        attention: attention backend of the tree engine.
        states: what computes the scans of layers that carry a state: "torch", "fla" (kernels of flash-linear-attention
            and mamba-ssm, on CUDA devices), or "auto".
        elementwise: how norms, rotary embeddings and activations of the layers run in the tree engine: "eager", or
            "compile", fused by torch.compile.
        self_check: the first step also runs a small part of its batch densely, one sequence at a time. When tree and
            dense execution differ by more than rounding, "error" ends the run, "fallback" goes on densely (on all
            ranks); "skip" does not check.

    Attributes:
        policy: the model, from `configure_model` on.
        ranks: how rank 0 has all ranks work, from `setup` on.
        steps_per_batch: optimizer steps a rollout batch takes; datamodules yield it so many times.
        policy_version: how many rollout batches the policy has been trained on.
        steps_done: optimizer steps of the batch under way, below `steps_per_batch`; 0 between batches.
        step_seconds: wall seconds of the last training step by part: "prepare" and "tree", to which callbacks add
            ("wait", for the batch, comes before the step begins, and counts in tokens/s).
        last_tree: the prefix tree of the last training step's sequences, those of all ranks together, whatever the
            mode; on rank 0, None elsewhere.
        batch: the rollout batch being trained on; on rank 0, None elsewhere.

    Raises:
        ValueError: an option out of range or without effect, naming it.
    """

    steps_per_batch: int = 1
    want: tuple[str, ...] = ("logprobs",)
    """Outputs of the tree pass that `loss` reads."""
    keeps_groups: bool = False
    """Whether a rank runs the sequences of a group together, for losses that compare them."""
    may_idle: bool = False
    """Whether a step may be without sequences though a batch takes one step."""

    def __init__(
        self,
        model: ModelSource,
        optimizer: OptimizerCallable = adamw,
        lr_scheduler: LRSchedulerCallable | None = None,
        tree_training_mode: TreeTrainingMode = "dta",
        chunk_tokens: TokenBudget = "auto",
        live_tokens: TokenBudget = "auto",
        attention: str = "auto",
        states: str = "auto",
        elementwise: str = "eager",
        self_check: SelfCheck = "error",
    ) -> None:
        super().__init__()
        refuse_options(tree_training_mode, chunk_tokens, self_check)
        refuse_frozen("model", model)
        refuse_optimizer(optimizer, lr_scheduler)
        self.model_source = model
        self.make_optimizer = Shared(optimizer)
        self.make_lr_scheduler = None if lr_scheduler is None else Shared(lr_scheduler)
        self.share_mode = "leaf" if tree_training_mode == "disabled" else "tree"
        # The planner caps chunks at live_tokens, so without a limit of their own they are as large as that.
        self._engine_options: dict[str, Any] = {
            "chunk_tokens": chunk_tokens if tree_training_mode == "dta" else sys.maxsize,
            "live_tokens": live_tokens,
            "attention": attention,
            "states": states,
            "elementwise": elementwise,
            "self_check": False,  # done here, where ranks can agree
        }
        self.elementwise, self.self_check = elementwise, self_check
        # Kinds of batches, without pictures and with them, whose first is still to be checked.
        self._unchecked = set[bool]() if self_check == "skip" else {False, True}
        self._fell_back = False
        self.ranks: RankWork  # from `setup` on
        self.policy: PreTrainedModel | None = None
        self._group: RankGroup | None = None
        self._engines: dict[nn.Module, TreeEngine] = {}
        self.policy_version = 0
        self.steps_done = 0
        self.step_seconds: dict[str, float] = {}
        self.last_tree: PrefixTree | None = None
        self.batch: RolloutBatch | None = None
        self.train_metrics = NamedMetrics((CHANGED_ROUTES,), ("loss", *TOKEN_COUNTS))
        self._restored: State | None = None  # of the batch under way, until it is offered again
        self._handle: StepHandle | None = None
        self._step: TreeStep | None = None
        self._idle = False  # no rank has a sequence in this step
        self._stop_asked = False
        self._step_start = 0.0
        self._grad_norm: float | None = None
        self._rate: float | None = None  # an optimizer may find its own
        self._logged: set[str] = set()

    # What subclasses define

    def arrange(self, batch: RolloutBatch) -> RolloutBatch:
        """Rank 0: what is trained of a batch that the datamodule hands out, before it is checked."""
        return batch

    def prepare(self, batch: RolloutBatch) -> None:
        """Rank 0, index 0: forward passes (`ranks.outputs`) and advantages of a checked batch, as its columns."""

    def step_sequences(self, batch: RolloutBatch, index: int) -> list[int]:
        """Rank 0: the sequences of optimizer step `index`, over all ranks."""
        return list(range(len(batch)))

    def step_plan(self) -> dict[str, int]:
        """What `step_sequences` depends on besides batch, index and policy version, by option."""
        return {"steps_per_batch": self.steps_per_batch}

    def step_columns(self, batch: RolloutBatch, indices: list[int]) -> dict[str, Tensor]:
        """Rank 0: what the loss of a step on the sequences `indices` (one at least) needs, float32 [T] of the whole
        batch. "weights": what each token's loss counts, 0 where not trained."""
        return {"weights": token_loss_weights(batch, indices, *self.aggregation())}

    def begin_step(self, step: TreeStep, index: int) -> None:
        """Every rank, whose part of `step_columns` are `step.columns`: may add to them. A rank without sequences has no
        columns and `step.batch` None, and `loss` is not called."""

    def loss(self, out: FlatOutputs, columns: dict[str, Tensor]) -> Tensor:
        """Scalar: the loss of some sequences, `out` and `columns` being [T] tensors of their tokens, concatenated."""
        raise NotImplementedError

    @property
    def completes_gradients(self) -> bool:
        """Whether a backward pass of an engine completes the gradients of its model, so that ranks may begin to sum
        them in it: not where the same model runs twice in `tree_pass`, or gradients are changed afterwards. A class
        that overrides `tree_pass` or `backward` without saying is taken not to."""
        order = type(self).__mro__
        passes = next(one for one in order if {"tree_pass", "backward"} & vars(one).keys())
        says = next(one for one in order if "completes_gradients" in vars(one))
        return order.index(says) <= order.index(passes)

    def end_step(self, step: TreeStep) -> None:
        """After gradients were summed: adds to `train_metrics`."""

    def end_batch(self) -> None:
        """After the last optimizer step of a rollout batch, before checkpoints: `policy_version` has risen."""

    def derive(self, values: dict[str, Any]) -> dict[str, Any]:
        """The metrics of a step from what `train_metrics` computed."""
        return values

    def aggregation(self) -> tuple[Aggregation, float | None]:
        """How token losses are weighted: see `modules.objectives.token_weights`."""
        return "token_mean", None

    # Set-up

    def configure_model(self) -> None:
        if self.policy is None:
            self.policy = build_model(self.model_source)

    def engine_over(self, model: PreTrainedModel, value_head: nn.Module | None = None) -> TreeEngine:
        """The tree engine over `model`, with this module's budgets. Made when first used: parameters may move or change
        dtype before training starts."""
        engine = self._engines.get(model)
        if engine is None or engine.group is not self._group:
            self._engine_options.setdefault("image_processor", image_processor_of(self.model_source))
            engine = TreeEngine(model, value_head=value_head, group=self._group, **self._engine_options)
            engine.remember = lambda: remembered(self)
            engine.completing = partial(self._completing, engine)
            engine.dense = self._fell_back
            self._engines[model] = engine
        return engine

    def value_head(self) -> nn.Module | None:
        """A head on the policy's hidden states, run in the policy's own pass."""
        return None

    def parameter_groups(self) -> list[Any]:
        """What the optimizer is called with: trainable parameters, or dictionaries of them."""
        assert self.policy is not None, "configure_model builds the policy"
        return [p for p in self.policy.parameters() if p.requires_grad]

    @property
    def engine(self) -> TreeEngine:
        """The policy's."""
        assert self.policy is not None, "configure_model builds the policy"
        return self.engine_over(self.policy, self.value_head())

    def configure_optimizers(self) -> Any:
        optimizer = self.make_optimizer(with_names(self.parameter_groups(), self))
        if self.make_lr_scheduler is None:
            return optimizer
        scheduler = self.make_lr_scheduler(optimizer)
        if isinstance(scheduler, ReduceLROnPlateau):
            raise ValueError("lr_scheduler: ReduceLROnPlateau follows a metric, which is not supported: choose another")
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def setup(self, stage: str) -> None:
        exchange = ranks_of(self.trainer)
        refuse_trainer(self.trainer, stage, exchange, self.self_check)
        refuse_quantised(self.trainer, "model", self.model_source)
        check_own_tokens(getattr(getattr(self.trainer, "datamodule", None), "tokenizer", None), self.model_source)
        self._group = exchange.group
        self.ranks = RankWork(exchange, self.share_mode, self.engine_for)
        for metrics in self.modules():  # left alone, torchmetrics talks where gradients travel
            if isinstance(metrics, NamedMetrics):
                metrics.dist_sync_fn = exchange.gather

    def engine_for(self, name: str) -> AbstractContextManager[TreeEngine]:
        """What runs the forward passes that `ranks.outputs` is asked for under `name`."""
        return nullcontext(self.engine)

    # One step

    def on_train_start(self) -> None:
        self._stop_asked = False
        refuse_narrow(self.parameters(), self.trainer, self.ranks.exchange)
        check_schedules(self.trainer)
        note_logging(self.trainer, self.steps_per_batch)
        with self.trainer.precision_plugin.forward_context():  # autocast counts
            self.print(f"tree engine: {self.engine.chosen()}")

    def on_train_batch_start(self, batch: StepHandle, batch_idx: int) -> None:
        self._step_start = time.perf_counter()
        # Lightning counts one too many where the end of a run was a validation's turn and the run goes on.
        self.trainer.fit_loop.epoch_loop._batches_that_stepped = self.trainer.global_step

    def training_step(self, handle: StepHandle, batch_idx: int) -> Tensor:
        """Prepares this rank's tree; the loss is a placeholder, `backward` does the work."""
        start = time.perf_counter()
        if handle.count != self.steps_per_batch:
            raise BatchError(
                f"StepHandle.count: the datamodule yields a batch {handle.count} times, the module takes"
                f" {self.steps_per_batch} steps: its loader must read trainer.lightning_module.steps_per_batch"
            )
        self._handle = handle
        if handle.index == 0 and self.steps_done:
            _log.warning("the datamodule begins a new batch; of the last one only %d steps were done", self.steps_done)
            self.steps_done = 0
        self._begin(handle)
        self.step_seconds = {"prepare": time.perf_counter() - start}
        return torch.zeros((), requires_grad=True, device=self.device)

    def _begin(self, handle: StepHandle) -> None:
        """Everything of a step that comes before its tree pass."""
        self.train_metrics.reset()
        part = self.ranks.lead(handle, self._cut_step)
        self._step = TreeStep.build(part, self.share_mode, self.last_tree)
        self._idle = (self.may_idle or self.steps_per_batch > 1) and not bool(
            self.ranks.exchange.sum(torch.tensor(part is not None).long())
        )
        self.begin_step(self._step, handle.index)
        self._step.columns = {name: column.to(self.device) for name, column in self._step.columns.items()}

    def _cut_step(self, handle: StepHandle) -> Step | None:
        """Rank 0: prepares a new batch, or takes up the one under way; the parts of the step."""
        assert self.policy is not None
        if handle.index == 0:
            self.batch = self.checked_batch(handle)
            self.prepare(self.batch)
        elif self.batch is None or handle.batch is not self.batch:
            self.batch = take_up(self.checked_batch(handle), self.batch, self._restored)
        self._restored = None
        indices = self.step_sequences(self.batch, handle.index)
        # Ranks compute shared prefixes again and other modes share less, so token counts need a tree of their own.
        self.last_tree = build_tree(self.batch, "tree", indices)
        if not indices:
            return None
        columns = self.step_columns(self.batch, indices)
        return Step(self.batch, indices, columns, self.last_tree, self.keeps_groups)

    def checked_batch(self, handle: StepHandle | EvalHandle) -> RolloutBatch:
        """Rank 0: the batch of a handle as it is trained. Raises BatchError as `check_batch`."""
        assert self.policy is not None
        arranged = None if handle.batch is None else self.arrange(handle.batch)
        batch = check_batch(arranged, repr(handle), self.policy.config, self.policy_version)
        settle_routes(batch)
        return batch

    def tree_pass(self, step: TreeStep) -> None:
        """Accumulates this rank's gradients of one optimizer step."""
        total = self.engine.backward(
            step.tree,
            lambda out, indices: self.loss(out, step.gather(indices)),
            want=self.want,
            batched=True,
            temperatures=step.temperatures,
            soft=step.soft,
        )
        self.train_metrics.update(sums={"loss": total})

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """The tree pass. Lightning leaves the precision context after `training_step`, so it is entered again."""
        start = time.perf_counter()
        assert self._step is not None, "training_step comes first"
        with self.trainer.precision_plugin.forward_context():
            if self._unchecked:
                self._check(self._step)
            step = self._step
            self.tree_pass(step)
        if self.engine.replay is not None:
            replayed, other = self.engine.replay.take_counts().tolist()
            self.train_metrics.update(means={CHANGED_ROUTES: (other, replayed)})
        tree = self.last_tree
        if tree is not None:  # rank 0 counts for all
            counts = (tree.num_dense_tokens, tree.num_leaf_tokens, tree.num_tokens)
            self.train_metrics.update(sums=dict(zip(TOKEN_COUNTS, counts, strict=True)))
        self.step_seconds["tree"] = time.perf_counter() - start

    def _completing(self, engine: TreeEngine, roots: Sequence[Tensor]) -> None:
        if self.completes_gradients:
            modules = (engine.model, engine.value_head)
            self.ranks.exchange.completing([p for m in modules if m is not None for p in m.parameters()], roots)

    def _check(self, step: TreeStep) -> None:
        """Collective: compares tree and dense execution, once there is something to compare, and once there are
        pictures. After a fallback all models run densely, the reference and the critic too, and the step begins anew:
        its columns were of the tree."""
        falls_back, unchecked = self.self_check == "fallback", self._unchecked
        self._unchecked = self.ranks.verify_together(self.engine, step.tree, self.want, falls_back, unchecked)
        if self.engine.dense and not self._fell_back:
            self._fell_back = True
            for engine in self._engines.values():
                engine.dense = True
            assert self._handle is not None, "training_step comes first"
            self._begin(self._handle)

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        step = self._step
        assert step is not None, "training_step comes first"
        self.ranks.exchange.observe(step.tree.num_tokens, step.tree.num_attention_pairs, self.step_seconds["tree"])
        self.end_step(step)
        if self._idle:  # None, not zeros: momentum and weight decay would move the parameters
            for group in optimizer.param_groups:
                for param in group["params"]:
                    param.grad = None
        self._grad_norm = self.ranks.exchange.grad_norm(optimizer, self.trainer.global_step + 1)
        self._rate = optimizer.param_groups[0]["lr"]  # a schedule has gone on when the step is logged

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        super().optimizer_step(*args, **kwargs)
        assert self._handle is not None, "the closure inside ran training_step"
        if self._handle.index < self._handle.count - 1:
            self.steps_done = self._handle.index + 1
        else:
            self.policy_version += 1  # first: with it, whatever interrupts, the batch is no longer under way
            self.steps_done = 0
            self.end_batch()

    def on_train_batch_end(self, outputs: Any, batch: StepHandle, batch_idx: int) -> None:
        values: dict[str, Any] = self.derive(self.train_metrics.compute())
        if self._grad_norm is not None:
            values["grad_norm"] = self._grad_norm
        if self._rate is not None:
            values["lr"] = self._rate
        seconds = time.perf_counter() - self._step_start + self.step_seconds.get("wait", 0.0)
        values["tokens/s"] = values["tokens/dense"] / seconds
        tensors = {name: torch.as_tensor(value, dtype=torch.float32) for name, value in values.items()}
        self._logged = log_alone(self, "on_train_batch_end", tensors, self._logged, ("reward",), batch_size=1)
        self._step = None
        if batch.index == batch.count - 1:
            self.batch = None
            self.ranks.exchange.forget()
        self._stop_between_batches()

    def _stop_between_batches(self) -> None:
        """Lightning validates where it is asked to stop: in the middle of a batch it would score weights that no engine
        serves, so the run then stops at the end of the batch."""
        if self.steps_done and self.trainer.should_stop and self.trainer.enable_validation:
            self._stop_asked, self.trainer.should_stop = True, False
        elif self._stop_asked and not self.steps_done:
            self._stop_asked, self.trainer.should_stop = False, True

    # Checkpoints

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["policy_version"] = self.policy_version
        if self.steps_done:  # on ranks but 0 without what rank 0 holds; its checkpoint counts
            state = state_of(self.batch, self.steps_done, self.step_plan())
            checkpoint["batch_under_way"] = self._restored or state

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if "policy_version" not in checkpoint:
            raise ValueError("ckpt_path: the checkpoint has no policy_version, so no module of this project wrote it")
        self.policy_version = checkpoint["policy_version"]
        state = checkpoint.get("batch_under_way")
        self.steps_done = 0 if state is None else state["steps_done"]
        if state is not None and self._trainer is not None:
            if self.trainer.state.fn == TrainerFn.FITTING:
                check_plan(state, self.step_plan())
            state = state if self.trainer.is_global_zero else None
        self.batch, self._restored = None, state
        if self._trainer is not None and self.trainer.state.fn == TrainerFn.FITTING:
            check_states(checkpoint, self.hparams, type(self))
            tell_changes(checkpoint, self.hparams, getattr(self.trainer.datamodule, "hparams", {}))


def objects_among(hparams: Mapping[str, Any]) -> list[str]:
    """Names of the hyper-parameters that a checkpoint could not load safely: objects (callables, sources). From the
    command line hyper-parameters are the YAML itself, and there are none."""
    return [name for name, value in hparams.items() if not _is_plain(value)]


def _is_plain(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(_is_plain(key) and _is_plain(v) for key, v in value.items())
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str)
