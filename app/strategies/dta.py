"""`DTAStrategy`: data parallelism for tree training, with ZeRO-1, as a Lightning strategy.

    trainer:
      strategy: {class_path: app.strategies.DTAStrategy}
      devices: 2

Promises: Lightning's automatic optimization works as its users expect (LR schedulers, `global_step`, `ModelCheckpoint`,
`gradient_clip_val`, callbacks) on one process and on many; gradients are SUMMED over ranks, so a loss divides by the
global count of its optimizer step; a rank without work contributes zeros and keeps nobody waiting; a gradient that is
not finite costs that step only, on all ranks together, and too many in a row end the run (`divergence.py`). What is not
supported is refused by name at the start of fit. Checkpoints are directories, written in the background.

There is no DDP wrapper: a tree takes many backwards, and its gradients are complete only when its root is done. They
are one reduce-scatter a bucket (see `zero1.py`), begun inside the last backward of a step (`sums.py`) unless a hook
named `on_after_backward` may want them. From then on `param.grad` is None until the next `zero_grad`: read `grad_norm`.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from app import interruption
from app.strategies import refusals
from app.strategies.checkpoint.checkpoints import CheckpointError, CheckpointWriter, pack
from app.strategies.checkpoint.loading import load_weights, read
from app.strategies.checkpoint.optimizer_state import load_sharded, load_whole, save_sharded
from app.strategies.checkpoint.trainer_state import take_apart
from app.strategies.divergence import Divergence
from app.strategies.pieces import Piece, load_pieces
from app.strategies.precision import keep_default_dtype
from app.strategies.ranks.balance import Calibration
from app.strategies.ranks.collectives import Communicator
from app.strategies.ranks.groups import GroupRanks
from app.strategies.ranks.listening import LOOPBACK, gloo_on_loopback, is_local
from app.strategies.ranks.rendezvous import join, leave_at_exit
from app.strategies.ranks.sharing import SharedRanks
from app.strategies.ranks.watch import RankWatch
from app.strategies.shards import refuse_shards, shard_models
from app.strategies.sums import read_after_backward
from app.strategies.zero1 import ShardedOptimizer
from app.tree import scales

_SIGNS = 3.0  # seconds to look for a rank that died behind a failed checkpoint
_LAST_WORDS = 30.0  # seconds a run that failed waits for a checkpoint already begun


class DTAStrategy(DDPStrategy):
    """Data parallelism without a wrapper, gradients summed, optimizer state sharded (ZeRO-1).

    Args:
        timeout: how long a rank waits for the others in one collective before the run ends with an error. It must
            outlast the longest time rank 0 alone is busy (waiting for rollouts, preparing a batch, validating). Finite
            by rule.
        max_skipped_steps: steps in a row whose gradient is not finite, and that therefore change nothing, which end the
            run. After such a step no checkpoint is written, and none deleted, until a step has an effect again.
        background_checkpoints: write checkpoints while training goes on; otherwise training waits for the disk.
        death_timeout: how long a rank may give no sign of life before the run ends on all ranks, naming it. Deaths on
            the same machine are seen within seconds.
        calibrate: balance ranks by the times this run measures, every ten steps. Off, the cut depends on the batch
            alone, and a seeded run on several ranks repeats: bit for bit on CPUs; on GPUs, whose plans follow rates
            that each start measures, up to rounding.
        max_tokens_per_rank: most dense tokens of one rank (or group) in one step, where per-token columns are what
            fills memory.
        offload_optimizer: keep optimizer state and masters in CPU memory and step there; for CUDA devices.
        bucket_cap_mb: most MiB of float32 gradients in one reduce-scatter (a larger parameter has a bucket of its own).
        group_size: ranks that run one plan together, a share of its rows and attention heads each, and so compute no
            prefix twice among them: the GPUs of a node, where links are fast. The tree is cut for groups instead of
            ranks. It must divide the number of ranks and of attention heads.
        shard_parameters: the ranks of a group hold each layer's parameters, gradients and optimizer state in shards
            (torch's FSDP2), gathered while the layer runs. See docs/scaling.md.
        process_group_backend: "gloo" or "nccl"; by default nccl on CUDA devices, gloo on CPUs.
        accelerator, parallel_devices, cluster_environment, checkpoint_io, precision_plugin: set by the Trainer.

    Attributes:
        optimizer_seconds: wall seconds after the last step's backward: of sums, clipping, optimizer step, all-gather.
        skipped_steps: optimizer steps of this fit without effect because the gradient was not finite.
        grad_norm: global 2-norm of the last gradient, before clipping; nan before the first step.
        exchange: what modules use of the ranks; exists as long as the process group does.
    """

    def __init__(
        self,
        timeout: timedelta = timedelta(minutes=30),
        death_timeout: timedelta = timedelta(seconds=60),
        calibrate: bool = True,
        max_tokens_per_rank: int | None = None,
        offload_optimizer: bool = False,
        bucket_cap_mb: int = 256,
        background_checkpoints: bool = True,
        max_skipped_steps: int = 10,
        group_size: int = 1,
        shard_parameters: bool = False,
        process_group_backend: str | None = None,
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
    ) -> None:
        refusals.check_arguments(
            timeout, death_timeout, bucket_cap_mb, max_tokens_per_rank, max_skipped_steps, group_size, shard_parameters
        )
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
            process_group_backend=process_group_backend,
            timeout=timeout,
        )
        self.optimizer_seconds = self._reduce_seconds = 0.0
        self._divergence = Divergence(max_skipped_steps)
        self._bucket_elements = bucket_cap_mb * 2**20 // 4
        self._calibration = Calibration(calibrate)
        self._offload = offload_optimizer
        self._max_tokens, self._group_size = max_tokens_per_rank, group_size
        self.shard_parameters = shard_parameters
        self._group: GroupRanks | None = None
        self._death_timeout, self._background = death_timeout, background_checkpoints
        self._links = self._failed = False
        self._ranks: Communicator | None = None
        self.exchange: SharedRanks
        self._writer: CheckpointWriter | None = None
        self._sharded: ShardedOptimizer | None = None

    # What callbacks and tools use

    @property
    def ranks(self) -> Communicator:
        """The collectives of this run. Exists from the Trainer's `setup_environment` on."""
        if self._ranks is None:
            raise RuntimeError(
                "DTAStrategy has no process group yet: the Trainer creates it when fit or validate begins"
            )
        return self._ranks

    @property
    def grad_norm(self) -> float:
        return self._sharded.grad_norm if self._sharded is not None else float("nan")

    @property
    def skipped_steps(self) -> int:
        return self._divergence.skipped

    @property
    def holds_back(self) -> bool:
        """Whether the last checkpoint asked for was left out; see `divergence.py`."""
        return self._divergence.held_back

    def step_metrics(self) -> dict[str, float]:
        """What ranks cost in the last step, for loggers: shipping its parts (rank 0's seconds of packing and sending;
        MB it sent to every other rank), skipped steps so far, and of the last ten steps the slowest rank's time over
        the mean, and the cost of a pair in tokens."""
        values = {"strategy/skipped_steps": float(self.skipped_steps)}
        if self.ranks.size > 1:
            values |= {"strategy/share_seconds": self.exchange.seconds, "strategy/share_mb": self.exchange.bytes / 1e6}
            values |= {"strategy/imbalance": self._calibration.imbalance, "strategy/pair_cost": self._calibration.ratio}
        return {name: value for name, value in values.items() if not math.isnan(value)}

    # Set-up

    def _configure_launcher(self) -> None:
        if not refusals.is_notebook(self.num_processes * self.num_nodes):  # there is nothing to launch in one
            super()._configure_launcher()

    def setup_distributed(self) -> None:
        self.set_world_ranks()
        refusals.check_group(self._group_size, self.world_size)
        with gloo_on_loopback(is_local(self._address)):
            if not dist.is_initialized():
                assert self.cluster_environment is not None
                backend, limits = self._get_process_group_backend(), (self._timeout, self._death_timeout)
                join(self.cluster_environment, self._address, backend, self.root_device, *limits)
            super().setup_distributed()  # leaves a group that exists alone
            gloo = dist.get_backend() == "gloo"
            control = None if gloo else dist.new_group(backend="gloo", timeout=self._timeout)
            # The writer's threads talk while training does, in an order of their own: not in the group for control.
            group = dist.new_group(backend="gloo", timeout=self._timeout)
            self._ranks = Communicator(dist.group.WORLD, self.root_device, control, self._timeout.total_seconds())
            self._group = GroupRanks(self._ranks, self._group_size, self._timeout) if self._group_size > 1 else None
        norm = lambda: self.grad_norm  # noqa: E731
        self.exchange = SharedRanks(self._ranks, self._calibration, self._max_tokens, norm, self._group)
        leave_at_exit(self._ranks)
        self._start_watch(self._ranks)
        watch = self._ranks.watch
        explain = lambda: watch.explain(_SIGNS) if watch is not None else ""  # noqa: E731
        self._writer = CheckpointWriter(group, self._timeout.total_seconds(), explain, self.root_device)
        self._failed = False

    @property
    def _address(self) -> str:
        """Where rank 0 is reached: loopback when all ranks share a machine, whatever the cluster calls it."""
        assert self.cluster_environment is not None
        address = self.cluster_environment.main_address
        alone = self.num_nodes == 1 and self.cluster_environment.world_size() == self.num_processes
        return LOOPBACK if alone or is_local(address) else address

    def _start_watch(self, ranks: Communicator) -> None:
        if ranks.size == 1:
            return
        seconds = (self._timeout.total_seconds(), self._death_timeout.total_seconds())
        watch = RankWatch(ranks.rank, ranks.size, self._address, ranks.progress, *seconds)
        watch.start(ranks.broadcast_(watch.invitation(), "the store of the ranks' watch"))
        ranks.watch = watch

    # Lightning's own collectives

    def barrier(self, name: str | None = None) -> None:
        if self._ranks is None:
            return super().barrier(name)
        self._ranks.barrier(f"barrier {name or ''}".strip())

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        if self._ranks is None:
            return super().broadcast(obj, src)
        return self._ranks.broadcast_object(obj, src, f"broadcast of {type(obj).__name__}")

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        if self._ranks is None or group is not None or not isinstance(tensor, Tensor):
            return super().reduce(tensor, group, reduce_op)
        with self._ranks.control_traffic("reduction of a metric"):
            return super().reduce(tensor.cpu(), self._ranks.control, reduce_op).to(tensor.device)

    def setup(self, trainer: pl.Trainer) -> None:
        assert self.lightning_module is not None
        refusals.check_trainer(trainer, self.lightning_module, str(self.precision_plugin.precision))
        if self._offload:
            refusals.check_offload(self.root_device)
        if self.shard_parameters:
            refusals.check_sharded(self.lightning_module, self._offload)
        self._divergence = Divergence(self._divergence.limit, Path(trainer.ckpt_path) if trainer.ckpt_path else None)
        self.optimizer_seconds = 0.0
        # A link is made as soon as `save_checkpoint` returns: what it points to must be there by then.
        self._links = any(getattr(callback, "save_last", None) == "link" for callback in trainer.checkpoint_callbacks)
        super().setup(trainer)

    @property
    def _cuts_up(self) -> bool:
        module = self.lightning_module
        return self.shard_parameters and module is not None and module.trainer.state.fn == TrainerFn.FITTING

    @property
    def _gets_weights(self) -> bool:
        """Whether this rank's models have none of their own until they are cut up."""
        return self._cuts_up and not self.is_global_zero

    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        """Models to be cut up are built in rank 0's CPU memory, and on the others without storage."""
        with super().tensor_init_context(empty_init), ExitStack() as inner:
            if self._cuts_up:
                inner.enter_context(torch.device("meta" if self._gets_weights else "cpu"))
            yield

    def model_to_device(self) -> None:
        if not self._cuts_up:
            super().model_to_device()

    def configure_ddp(self) -> None:
        """No wrapper: the module stays what it is. Ranks start from rank 0's parameters and buffers."""
        assert self.lightning_module is not None
        refuse_shards(self.lightning_module)
        module = self.lightning_module
        # A function: what it returns would stay whole.
        tensors = lambda: (*module.named_parameters(), *module.named_buffers(), *scales(module))  # noqa: E731
        self.ranks.require_equal(
            "\n".join(f"{name} {tuple(tensor.shape)} {tensor.dtype}" for name, tensor in tensors()),
            "parameters and buffers of the module",
            "build the same model on every rank",
        )
        if not self._cuts_up:
            for name, tensor in tensors():
                self.ranks.broadcast_weights_(tensor, name)
            return
        assert self._group is not None, "refused without groups"
        shard_models(self.lightning_module, self._group, self.ranks.broadcast_weights_)

    def setup_optimizers(self, trainer: pl.Trainer) -> None:
        super().setup_optimizers(trainer)
        assert self.lightning_module is not None
        if len(self.optimizers) != 1:
            raise MisconfigurationException(
                f"configure_optimizers returned {len(self.optimizers)} optimizers, DTAStrategy shards exactly one: use"
                " one optimizer with parameter groups"
            )
        self._sharded = ShardedOptimizer(
            self.optimizers[0], self.lightning_module, self.ranks, self._bucket_elements, self._offload, self._group
        )
        self.exchange.completed = None if read_after_backward(trainer) else self._sharded.sums.completing

    @property
    def precision_plugin(self) -> Precision:
        return super().precision_plugin

    @precision_plugin.setter
    def precision_plugin(self, plugin: Precision | None) -> None:
        self._precision_plugin = keep_default_dtype(plugin)

    def setup_precision_plugin(self) -> None:
        super().setup_precision_plugin()
        # Every precision plugin clips through this method, over the optimizer's parameters: here shards, whose own
        # norms say nothing. (Clipping by value works on shards as it is.)
        self.precision_plugin.clip_grad_by_norm = self._clip_grad_by_norm

    # One step

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.exchange.reset()
        assert self.lightning_module is not None
        trainer = self.lightning_module.trainer
        self._divergence.begin_step(lambda: trainer.callback_metrics, self.lightning_module)

    def block_backward_sync(self) -> NoReturn:
        """Lightning enters this only to accumulate batches (a scheduler callback can ask for it after set-up)."""
        raise MisconfigurationException(refusals.accumulation("> 1"))

    def post_backward(self, closure_loss: Tensor) -> None:
        """Sums gradients over ranks; all ranks learn together whether they are finite.

        Raises:
            Diverged: they were not in `max_skipped_steps` steps in a row.
        """
        assert self._sharded is not None and self.lightning_module is not None
        if self.root_device.type == "cuda":  # for backward alone: sums that began are on streams of their own
            torch.cuda.current_stream(self.root_device).synchronize()
        start = time.perf_counter()
        if self._sharded.reduce():
            self._divergence.worked()
        else:
            rate = max(group["lr"] for group in self._sharded.optimizer.param_groups)
            step = self.lightning_module.trainer.global_step + 1
            self._divergence.failed(step, self._sharded.grad_norm, float(rate), self._sharded.bad_parameter())
        self._reduce_seconds = time.perf_counter() - start

    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: pl.LightningModule | Module | None = None,
        **kwargs: Any,
    ) -> Any:
        """Runs the closure (the module's step and backward), the stock optimizer on the shards, and the all-gather."""
        assert self._sharded is not None
        closure_end = 0.0

        def timed_closure() -> Any:
            nonlocal closure_end
            result = closure()
            closure_end = time.perf_counter()
            return result

        output = super().optimizer_step(optimizer, timed_closure, model, **kwargs)
        if self._sharded.finite:
            self._sharded.gather_parameters()
        self._synchronize()
        self.optimizer_seconds = self._reduce_seconds + time.perf_counter() - closure_end
        return output

    def _clip_grad_by_norm(self, optimizer: Optimizer, clip_val: float) -> None:
        assert self._sharded is not None
        self._sharded.clip_grad_norm_(clip_val)

    def _synchronize(self) -> None:
        """Waits for the device, so that seconds are charged to who spent them."""
        self.ranks.settle()
        if self.root_device.type == "cuda":
            torch.cuda.current_stream(self.root_device).synchronize()  # the device's would break an engine's captures

    # Checkpoints

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Description and this rank's pieces of the optimizer state; see `optimizer_state.save_sharded`."""
        assert self._sharded is not None
        description, pieces = save_sharded(self._sharded)
        return {"description": description, "pieces": pieces}

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any = None) -> None:
        """Collective: writes a checkpoint directory (see `checkpoint/checkpoints.py`), in the background while `fit`
        runs; none while training seems to have diverged (see `divergence.py`)."""
        if storage_options is not None:
            raise TypeError(
                "Trainer.save_checkpoint(storage_options=...) has no effect under DTAStrategy: leave it out"
            )
        assert self.lightning_module is not None and self._writer is not None
        path, trainer = Path(filepath), self.lightning_module.trainer
        bad = self._sharded.bad_parameter() if self._sharded is not None else None
        forced = trainer.state.status == TrainerStatus.FINISHED  # a user's own call: the last chance
        # Where there is no good one nothing can be lost, and what is linked to must be there.
        forced |= self._divergence.last_good is None and (bad is None or self._links)
        if self._divergence.holds_back(path, bad, forced):
            if self._links and self.is_global_zero:
                self._divergence.link(path)
            return
        error: Exception | None = None
        packed = None
        pieces: dict[str, Piece] = {}
        try:
            contents, pieces = take_apart(checkpoint, self.lightning_module, self.ranks)
            packed = pack(contents) if self.is_global_zero else None
        except Exception as failure:
            error = failure
        self.ranks.raise_together(error, f"checkpoint {filepath}")
        self._writer.save(path, packed, pieces)
        for old in self._divergence.written(path):
            self._writer.remove(old)
        running = trainer.state.fn == TrainerFn.FITTING and trainer.state.status == TrainerStatus.RUNNING
        # SLURM's signal handler ends the job when this returns.
        if not running or not self._background or self._links or path.name.startswith("hpc_ckpt"):
            self.finish_checkpoints()

    def finish_checkpoints(self) -> None:
        """Returns when those that were begun are on the disk. Raises CheckpointError: one could not be written."""
        if self._writer is not None:
            self._writer.wait(self._timeout.total_seconds())

    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        """Collective: a checkpoint directory, or a file of another strategy. Only tensors and primitives are unpickled.

        Raises:
            CheckpointError: it is damaged, or no checkpoint.
            MisconfigurationException: `trainer.max_steps` is below its step.
        """
        file = super().load_checkpoint
        contents = read(
            Path(checkpoint_path), self.ranks, lambda: file(checkpoint_path, weights_only=True), not self._gets_weights
        )
        if self.lightning_module is not None:
            refusals.check_steps(self.lightning_module.trainer, contents)
        return contents

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Collective. Raises CheckpointMismatch, naming a parameter and what the models differ in, where the weights do
        not fit."""
        assert self.lightning_module is not None
        load = super().load_model_state_dict
        own = None if self._gets_weights else lambda: load(checkpoint, strict)
        load_weights(own, checkpoint, self.lightning_module, self.ranks)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Collective: every rank takes its shard, whatever number of ranks wrote the checkpoint."""
        assert self._sharded is not None
        state = checkpoint["optimizer_states"][0]
        if "description" in state:
            load_sharded(self._sharded, state["description"], lambda pieces: load_pieces(pieces, state["path"]))
        else:
            load_whole(self._sharded, state)

    def remove_checkpoint(self, filepath: str | Path) -> None:
        """Rank 0 deletes it after the checkpoints that were begun before are complete, and good."""
        assert self._writer is not None
        if not self._divergence.keeps(Path(filepath)):
            self._writer.remove(Path(filepath))

    def on_exception(self, exception: BaseException) -> None:
        if interruption.end_of(exception) is not None:
            return  # on all ranks together
        self._failed = True
        if self._ranks is not None and self._ranks.watch is not None:
            self._ranks.watch.fail(exception)

    def teardown(self) -> None:
        if self._writer is not None:
            try:
                self._writer.wait(_LAST_WORDS if self._failed else self._timeout.total_seconds())
            except CheckpointError as error:
                if not self._failed:
                    raise
                warnings.warn(str(error), stacklevel=1)  # the run ends with the error that came first
            finally:
                self._writer.close()
        if self._ranks is not None and self._ranks.watch is not None:
            if not self._failed:
                self.barrier("end of the run")  # a rank that has left is no longer watched
            self._ranks.watch.close()
        if self._sharded is not None:
            self._sharded.release_gradients()
        super().teardown()
