"""Carries the policy's weights to the inference engine after every policy version.

    on_train_batch_end          the version rose: tensors under the names of a checkpoint (`inference/export.py`)
      engine.update_weights     of SGLangEngine (`sglang/engine.py`), onto the event loop that talks to the servers
        Fleet.update            all servers at once (`sglang/fleet.py`); one that fails is brought up to date later
          ServerWeights.bring   pause, broadcast or load from disk, flush caches, continue (`sglang/weights`)
          SendingRank           other ranks' broadcasts, to the servers that were dealt to them
      data.publish              the gate admits groups of the new version

Promises: rollouts and validation start with the trainer's (restored) weights; when `on_train_batch_end` returns
the engine serves the version the trainer has, and the staleness gate knows it. Only global rank 0 talks to the engine;
by method "distributed" other ranks send beside it, as many in all as there are servers. Where parameters are sharded it
gathers them with the ranks of its group, one tensor at a time, and never has all: a layer after another goes into
files, which methods "distributed" and "tensor" send in buckets, or into the embedded engine's own copy (nothing for an
adapter alone, which every rank has). So do weights in 4 bit, read back: engines then generate with the numbers that the
trainer computes with.

A version is one set of weights, so the engine never serves those in the middle of a batch of several steps. Validation
there would score other weights than a checkpoint saves with that score: it is refused when training starts.

Servers that share the trainer's GPUs (`Launch.in_turns`) stand still from the start of a batch to its last step, and
have given up their memory there; each rank frees what torch only caches before they come back with the new version.

A version that does not reach the engine (a full disk, no server that takes it) stops the run with an error that says
why; where the engine refused it, and no rank sends beside rank 0, after the run was saved. Training on would be no
remedy: the gate counts in versions the engine serves, so rollouts would grow older than `max_staleness` allows without
anyone noticing. Where some of several servers fail, the engine takes them out, goes on with the others and brings them
up to date later; where all that served ended in the update, rollouts wait for the first that is back, with the version.
"""

from __future__ import annotations

import logging
import math
import os
import time
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.utilities import rank_zero_warn

from app import checks, interruption
from app.strategies.ranks.listening import LOOPBACK, listen
from app.tree import quantised_layers
from callbacks.base import comes_in_parts, policy_in_parts, run_dir
from callbacks.validate_ends import nearest_multiples
from datamodules.inference.export import WeightParts, base_model, checkpoint_weights, merged_weights, num_bytes
from datamodules.inference.protocol import GenerationError, RolloutData, ServerEngine, WeightSenders, WeightUpdate
from datamodules.inference.weight_files import WeightFiles

_log = logging.getLogger(__name__)
_PATIENCE_S = 1800.0  # what ranks wait for each other in a collective by default; rank 0 may write files first
_SENT = ("distributed", "tensor")  # from here, in buckets
_METHODS = ("memory", "disk", *_SENT, "adapter")


class WeightSync(Callback):
    """Starts the datamodule's engine, then sends it each new policy version.

    Args:
        method: "memory" copies tensors within this process (EmbeddedEngine only); "distributed" broadcasts them to each
            SGLang server over a process group of its own, NCCL between GPUs, gloo otherwise; "tensor" puts them, a
            bucket at a time, where SGLang servers on this host read them: into /dev/shm, or the memory of a GPU that
            both see; "disk" writes a directory that the engine loads; "adapter" writes the policy's adapter alone, to
            servers that take it beside others (`SGLangEngine(adapters=...)`); "auto" takes the first that the engine
            offers.
        directory: of methods "disk" and "adapter", seen by all servers under the same path; relative paths are below
            the run directory and None is its `weights`. It holds the version served, and the next one while that is
            written. (So does `weights` for "distributed" and "tensor" where parameters are sharded or in 4 bit.)
        deadline_s: seconds the engine may take for one update; a server that takes longer counts as lost.
        senders: most ranks that send by method "distributed", each to servers of its own; null: as many as there are
            servers, and rank 0 alone where adapters are merged, which takes a copy in each sender's memory. They need
            to reach rank 0, and servers to reach them.

    By other methods a policy with LoRA adapters is sent merged, under its base model's names.

    Logs, every optimizer step (0 where the policy version did not rise): sync/seconds (export and update together),
    sync/bytes (of one copy of the weights), sync/downtime_s (nothing was generated; the longest of all servers).

    Raises:
        ValueError: an option out of range or without effect; (at set-up) the datamodule has no inference engine to
            keep in step, or one that does not take weights that way, or a callback of Lightning's averages weights;
            (when training starts) validation would fall into the middle of a batch.
        ExportError: the weights cannot be exported, for example for want of disk space.
        GenerationError: the engine did not take them.
        RuntimeError: the engine already serves a newer version than the policy's.
    """

    def __init__(
        self,
        method: Literal["auto", "memory", "disk", "distributed", "tensor", "adapter"] = "auto",
        directory: str | None = None,
        deadline_s: float = 300.0,
        senders: int | None = None,
    ) -> None:
        if method not in ("auto", *_METHODS):
            raise ValueError(f"WeightSync.method: {method!r} is not one of auto, {', '.join(_METHODS)}")
        if not 0 < deadline_s < math.inf:
            raise ValueError(f"WeightSync.deadline_s: {deadline_s}, must be above 0 and finite")
        if directory is not None and method in ("memory", *_SENT):
            raise ValueError(_no_effect(directory, method, method))
        checks.at_least(1, {"WeightSync.senders": senders})
        if senders is not None and method not in ("auto", "distributed"):
            raise ValueError(
                f"WeightSync.senders: {senders} has no effect with WeightSync.method: {method}; leave it out"
            )
        self.method = method
        self.directory = directory
        self.deadline_s = deadline_s
        self.senders = senders
        self._sends = False  # this rank, beside rank 0
        self._way = ""  # the method in use
        self._files: WeightFiles | None = None
        self._sent = -1
        self._in_turns = False
        self._still = False  # servers stand still, and the GPUs are the trainer's

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        data: Any = trainer.datamodule
        if not isinstance(data, RolloutData):
            raise ValueError(
                "trainer.callbacks: WeightSync keeps an inference engine up to date and"
                f" {type(data).__name__} has none;"
                " remove WeightSync from trainer.callbacks, or use datamodules.RolloutDataModule as data"
            )
        if not hasattr(pl_module, "policy_version"):
            raise ValueError(
                f"trainer.callbacks: WeightSync needs a model with policy and policy_version, not"
                f" {type(pl_module).__name__}; use modules.PolicyModule as model, or remove WeightSync"
            )
        averaging = [one for one in trainer.callbacks if isinstance(one, WeightAveraging | StochasticWeightAveraging)]
        if averaging and stage == "fit":
            raise ValueError(
                f"trainer.callbacks: {type(averaging[0]).__name__} saves an average of weights, which no engine samples"
                " with, so that validation would score other weights than are saved with its score; remove it, and"
                " average checkpoints afterwards"
            )
        offered: tuple[str, ...] = data.engine.update_methods
        self._way = offered[0] if self.method == "auto" else self.method
        if self._way not in offered:
            raise ValueError(
                f"WeightSync.method: {self.method}, but data.engine, {type(data.engine).__name__}, takes weights by"
                f" {' or '.join(offered)}; set WeightSync.method: auto, or another engine"
            )
        self._files, self._sent, self._still = None, -1, False
        self._in_turns = isinstance(data.engine, ServerEngine) and data.engine.in_turns
        if self._way in ("disk", "adapter"):
            directory = run_dir(trainer) / Path(self.directory or "weights")
            self._files = WeightFiles(directory, adapter=self._way == "adapter")
        elif self.directory is not None:
            raise ValueError(_no_effect(self.directory, self.method, self._way))
        self._sends = False
        if self.senders is not None and self._way != "distributed":
            raise ValueError(
                f"WeightSync.senders: {self.senders} has no effect with WeightSync.method: {self.method}, which is"
                f" {self._way} with this engine; leave senders out"
            )

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        _refuse_validation_inside_batches(trainer, pl_module)
        if self._way == "adapter" and quantised_layers(pl_module):
            rank_zero_warn(
                "WeightSync.method: adapter sends what is trained alone, and the weights below it are in 4 bit here and"
                " whole on servers: mismatch_kl says how far apart both are. To generate with the trainer's numbers set"
                " SGLangEngine.adapters to null, to train on whole ones leave model.quantization out"
            )
        # Here, not in on_fit_start: weights may be restored from a checkpoint between the two.
        self._start(trainer, pl_module)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if self._in_turns and not self._still:
            if trainer.is_global_zero and interruption.failure() is None:  # else the servers may be gone
                data: Any = trainer.datamodule
                data.engine.pause()
            trainer.strategy.barrier("WeightSync")  # no rank computes before servers have left
            self._still = True

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._make_room(trainer, pl_module)
        if interruption.failure() is None:  # else the run ends, with an engine that may have taken no weights
            self._start(trainer, pl_module)
        self._go_on(trainer)

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._start(trainer, pl_module)

    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._start(trainer, pl_module)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        module: Any = pl_module
        seconds, size, downtime_s = 0.0, 0, 0.0
        if module.policy_version != self._sent:
            began = time.perf_counter()
            self._make_room(trainer, module)  # first: other ranks send parts until this one has asked for all
            policy, parts = self._policy(trainer, module)
            if trainer.is_global_zero:
                update = self._update(policy, module.policy_version, parts)
                try:
                    size, downtime_s = self._bring(trainer, *update)
                except GenerationError as error:
                    self._fail(trainer, error, parts)
                seconds = time.perf_counter() - began
                module.step_seconds["sync"] = module.step_seconds.get("sync", 0.0) + seconds
            elif self._sends:
                self._lend(trainer, module)
            self._sent = module.policy_version
            self._go_on(trainer)
        values = {"sync/seconds": seconds, "sync/bytes": float(size), "sync/downtime_s": downtime_s}
        pl_module.log_dict(values, on_step=True, on_epoch=False, batch_size=1, rank_zero_only=True)

    def _fail(self, trainer: Trainer, error: GenerationError, parts: WeightParts | None) -> None:
        """The engine did not take weights that are a whole step's: the run is saved first, where that can be."""
        # Ranks that send beside this one may wait for it until it is gone.
        alone = self._way != "distributed" or trainer.world_size == 1
        if not alone or not interruption.put_off(error):
            raise error
        if parts is not None:
            parts.skip()  # the others give all of them

    def _make_room(self, trainer: Trainer, module: LightningModule) -> None:
        """Servers that stand still in turns may come back when this returns: no rank has gradients or caches."""
        if self._still:
            module.zero_grad()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            trainer.strategy.barrier("WeightSync")

    def _go_on(self, trainer: Trainer) -> None:
        if self._still and trainer.is_global_zero and interruption.failure() is None:
            data: Any = trainer.datamodule
            data.engine.resume()
        self._still = False

    def _start(self, trainer: Trainer, module: Any) -> None:
        new = self._sent != module.policy_version  # otherwise the engine runs, and has them
        policy, parts = self._policy(trainer, module) if new else (module.policy, None)
        self._sent = module.policy_version
        data: Any = trainer.datamodule
        update, serving = None, module.policy_version
        if trainer.is_global_zero:
            in_parts = () if parts is None else (parts,)
            data.start(policy, module.policy_version, *in_parts)
            serving = data.engine.version
            if serving < module.policy_version:  # servers without these weights, or an engine that ran before this fit
                update = self._update(policy, module.policy_version, parts)
            elif parts is not None:
                parts.skip()  # an engine that ran with them has not asked; the other ranks wait
        if new:
            self._deal(trainer, module)  # after the parts, which ranks give one by one
        if update is not None:
            self._bring(trainer, *update)
        if serving <= module.policy_version:
            return
        raise RuntimeError(
            f"WeightSync: the engine serves version {serving}, the policy is at {module.policy_version};"
            " start older weights in a new process"
        )

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._leave(trainer)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._leave(trainer)

    def _leave(self, trainer: Trainer) -> None:
        if self._sends:
            data: Any = trainer.datamodule
            data.engine.senders.leave()
            self._sends = False

    def _deal(self, trainer: Trainer, module: Any) -> None:
        """A collective: asks ranks to send weights beside rank 0, whose engine runs now."""
        data: Any = trainer.datamodule
        engine = data.engine
        if self._way != "distributed" or trainer.world_size == 1 or not isinstance(engine, ServerEngine):
            return
        if engine.senders is None:
            return
        word: Any = None
        if trainer.is_global_zero:
            address = os.environ.get("MASTER_ADDR", LOOPBACK) if trainer.num_nodes > 1 else LOOPBACK
            most = self.senders
            if most is None and hasattr(module.policy, "peft_config") and not comes_in_parts(module.policy):
                most = 1  # each rank would have merged weights in memory
            ranks = (trainer.world_size, trainer.num_devices)
            invitation = engine.senders.invite(*ranks, most, address, partial(listen, address))
            word = invitation, data.engine.version < module.policy_version
        invitation, behind = trainer.strategy.broadcast(word)
        if not trainer.is_global_zero:
            try:
                self._sends = invitation is not None and engine.senders.join(invitation, trainer.global_rank)
            except GenerationError as error:
                self._sends = False
                _log.warning("%s; rank 0 sends in its place", error)
            if self._sends and behind:
                self._lend(trainer, module)

    def _lend(self, trainer: Trainer, module: Any) -> None:
        """Returns when rank 0 has brought the version to the servers, by this rank too."""
        data: Any = trainer.datamodule
        senders: WeightSenders = data.engine.senders
        policy, deadline_s = module.policy, self.deadline_s + _PATIENCE_S
        in_files = comes_in_parts(policy)
        senders.lend(module.policy_version, None if in_files else lambda: checkpoint_weights(policy), deadline_s)

    def _policy(self, trainer: Trainer, module: Any) -> tuple[Any, WeightParts | None]:
        """A collective: on rank 0 the policy, which is without storage where ranks have shards of it or its weights are
        in 4 bit, and its weights then."""
        if self._way != "adapter" and comes_in_parts(module.policy):
            if self._files is None and self._way in _SENT:
                self._files = WeightFiles(run_dir(trainer) / "weights")
            return policy_in_parts(module.policy, trainer.is_global_zero)
        return module.policy, None

    def _bring(self, trainer: Trainer, update: WeightUpdate, size: int) -> tuple[int, float]:
        """Bytes sent, and seconds in which nothing was generated."""
        data: Any = trainer.datamodule
        downtime_s: float = data.engine.update_weights(update)
        data.publish(update.version)
        if self._files is not None:
            try:
                self._files.prune(keep=update.version)
            except OSError as error:  # space lost, nothing else
                _log.warning("WeightSync.directory: older weights could not be removed: %s", error)
        return size, downtime_s

    def _update(self, policy: Any, version: int, parts: WeightParts | None) -> tuple[WeightUpdate, int]:
        """And its bytes. `parts`: the weights, where `policy` has none."""
        shared = self._way == "tensor"
        if self._files is not None:
            path, size = self._files.write(policy, version, None if parts is None else parts.saved())
            read_here = self._way in _SENT
            update = WeightUpdate(
                version, path=str(path), deadline_s=self.deadline_s, read_here=read_here, shared=shared
            )
            return update, size
        if parts is not None:
            size = sum(parameter.nbytes for parameter in base_model(policy).parameters())
            return WeightUpdate(version, parts=parts, deadline_s=self.deadline_s), size
        weights = merged_weights(policy) if self._way == "memory" else checkpoint_weights(policy)
        update = WeightUpdate(version, state_dict=weights, deadline_s=self.deadline_s, shared=shared)
        return update, num_bytes(weights)


def _refuse_validation_inside_batches(trainer: Trainer, module: Any) -> None:
    steps = getattr(module, "steps_per_batch", 1)
    data: Any = trainer.datamodule
    validates = trainer.enable_validation and data.val_sets
    if steps == 1 or not validates or trainer.fast_dev_run:
        return
    inside = f"a batch of {steps} steps (model.minibatches x model.epochs), whose weights no engine serves there"
    if trainer._val_check_time_interval is not None:
        raise ValueError(
            f"trainer.val_check_interval: {trainer._val_check_time_interval:g} seconds may end in the middle of"
            f" {inside}: set a number of steps, a multiple of {steps}, and trainer.check_val_every_n_epoch: null"
        )
    every, epoch = trainer.val_check_batch, trainer.num_training_batches
    if trainer.check_val_every_n_epoch is not None and epoch % steps:
        raise ValueError(
            f"trainer.limit_train_batches: {trainer.limit_train_batches} makes epochs of {epoch} steps, so that"
            f" validation falls in the middle of {inside}: set limit_train_batches to"
            f" {nearest_multiples(int(epoch), steps)}, or trainer.check_val_every_n_epoch: null and"
            f" val_check_interval to a multiple of {steps}"
        )
    assert every is not None  # it is only where a time is given
    if every % steps:
        given = f" ({every} steps)" if every != trainer.val_check_interval else ""
        raise ValueError(
            f"trainer.val_check_interval: {trainer.val_check_interval}{given} ends in the middle of {inside}: set it to"
            f" {nearest_multiples(int(every), steps)} steps"
        )


def _no_effect(directory: str, method: str, way: str) -> str:
    meaning = f", which is {way} with this engine" if method == "auto" else ""
    return (
        f"WeightSync.directory: {directory} has no effect with WeightSync.method: {method}{meaning};"
        " set method: disk, or remove directory"
    )
