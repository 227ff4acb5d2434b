"""Training with parameters in shards, and its checkpoints (importable, hence not in a test file)."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch import Tensor

from app.batch import RolloutBatch
from app.strategies import DTAStrategy
from app.strategies.muon import Muon
from app.strategies.pieces import load_whole
from callbacks import SavePretrained, WeightSync
from callbacks.base import policy_in_parts
from datamodules.inference.embedded import EmbeddedEngine
from datamodules.inference.protocol import GenerationError, GenerationRequest, ServerEngine
from datamodules.inference.sglang.weights.forms import HostWeights
from datamodules.inference.weight_files import WeightFiles
from modules import ActorCriticModule, ModelSource, PolicyModule, build_model
from modules.algorithm import Regulariser
from modules.models import Refresh, inner_model
from tests.datamodules.inference.engine_suite import assert_parity
from tests.helpers.tiny_policy import Batches, Metrics, make_batch, parameters, sgd, source, trainer

RATE = 0.02
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
Layout = tuple[int, int, bool]
"""Ranks, ranks of a group, whether parameters are sharded."""


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=RATE, weight_decay=0.1)


def muon(params: Any) -> torch.optim.Optimizer:
    return Muon(params, lr=RATE, weight_decay=0.1)


def adapted(base: Path | None) -> ModelSource:
    """A new adapter on the model in `base`, or a whole model where there is none."""
    targets = ["q_proj", "v_proj", "down_proj"]
    return ModelSource(path=str(base), adapter={"r": 2, "target_modules": targets}) if base else source(**HEADS)


FOLLOWING: dict[str, Any] = {"reference": "initial", "regularisers": [Regulariser("kl", 0.1)]}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "norm_topk_prob": True}
ROUTED = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "first_k_dense_replace": 1}
ROUTED |= {"n_shared_experts": 1, "n_group": 1, "topk_group": 1}
SHARING = {
    "num_hidden_layers": 4,
    "num_kv_shared_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}
SHARING |= {"sliding_window": 4, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 17, "laurel_rank": 4}
SCANS = {
    **dict(layer_types=["linear_attention", "full_attention"], linear_num_key_heads=2, linear_num_value_heads=4),
    **dict(linear_key_head_dim=8, linear_value_head_dim=8),
}
KINDS: dict[str, dict[str, Any]] = {
    "grpo": {},
    "gspo": {"objective": "gspo"},
    "average": {**FOLLOWING, "reference_refresh": Refresh(2, ema=0.5)},
    "copied": {**FOLLOWING, "reference_refresh": Refresh(2)},
    "shared critic": {"critic": "shared"},
    "critic": {"critic": "initial", "critic_lr": 0.03},
    "experts": {"model": source(**HEADS, **EXPERTS, model_type="qwen3_moe")},
    "float32 router": {"model": source(**HEADS, **ROUTED, model_type="glm4_moe"), "optimizer": sgd},
    "keys of other layers": {"model": source(**HEADS, **SHARING, model_type="gemma3n_text")},
    "states": {"model": source(**HEADS, **SCANS, model_type="qwen3_5_text"), "optimizer": sgd},
    "untied": {"model": source(**HEADS, tie_word_embeddings=False)},
    "small chunks": {"chunk_tokens": 8, "live_tokens": 16},
}
"""Options of the module by what is trained."""


def fit(
    layout: Layout,
    steps: int,
    directory: Path | None = None,
    start: Path | None = None,
    precision: str = "32-true",
    base: Path | None = None,
    kind: str = "grpo",
    optimizer: Callable[[Any], torch.optim.Optimizer] = adamw,
) -> dict[str, Any]:
    """`steps` optimizer steps with clipping and a schedule, from the beginning or from the checkpoint `start`; the last
    one's is written to `directory`. Of an adapter on the model in `base`, where that is given."""
    torch.manual_seed(0)
    ranks, size, sharded = layout
    chosen = {"model": adapted(base), "optimizer": optimizer, **KINDS[kind]}
    made = ActorCriticModule if "critic" in chosen else PolicyModule
    module = made(
        **chosen,
        lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5),
    )
    metrics = Metrics()
    saved: list[Callback] = []
    if directory is not None:
        saved = [ModelCheckpoint(directory, filename="{step}", every_n_train_steps=steps), SavePretrained()]
        saved += [SavePretrained("merged", merge=True)] if base is not None else []
    strategy = DTAStrategy(group_size=size, shard_parameters=sharded, calibrate=False)
    run = trainer(
        metrics,
        *saved,
        devices=ranks,
        strategy=strategy,
        max_epochs=-1,
        max_steps=steps,
        precision=precision,
        gradient_clip_val=0.5,
        enable_checkpointing=bool(saved),
        default_root_dir=directory,
    )
    run.fit(module, Batches([make_batch(k, version=k) for k in range(5)]), ckpt_path=start)
    return {
        "parameters": parameters(module),
        "grad_norm": [step["grad_norm"] for step in metrics.steps if "grad_norm" in step],
        "held": sum(local(p).numel() for p in module.parameters()),
        "state": sum(v.numel() for s in run.optimizers[0].state.values() for v in s.values() if v.dim()),
    }


def routers_within_layers() -> list[tuple[Tensor, Tensor]]:
    """Of a bfloat16 model in shards whose router is float32, as transformers loads it, the router's weight beforehand,
    and where its layer computes with it."""
    torch.manual_seed(0)
    strategy = DTAStrategy(group_size=2, shard_parameters=True)
    module = PolicyModule(
        ModelSource(config=KINDS["float32 router"]["model"].config, dtype="bfloat16"), optimizer=adamw
    )
    found: list[tuple[Tensor, Tensor]] = []

    class Look(Callback):
        def on_fit_start(self, run: Any, module: Any) -> None:
            router = module.policy.model.layers[1].mlp.gate
            before = parameters(module.policy)["model.layers.1.mlp.gate.weight"]
            router.register_forward_pre_hook(lambda *_: found.append((before, router.weight.detach().clone())))

    trainer(Look(), devices=2, strategy=strategy, max_steps=1).fit(module, Batches([make_batch()]))
    return found


def fit_twice() -> None:
    module = PolicyModule(source(**HEADS), optimizer=adamw)
    for _ in range(2):
        strategy = DTAStrategy(group_size=2, shard_parameters=True)
        trainer(devices=2, strategy=strategy, max_steps=1).fit(module, Batches([make_batch()]))


def local(parameter: Any) -> Tensor:
    found: Tensor = parameter.to_local() if hasattr(parameter, "to_local") else parameter
    return found


LARGE = {**HEADS, "hidden_size": 512, "intermediate_size": 2048, "head_dim": 128, "num_hidden_layers": 24}


def most_memory(sharded: bool, directory: Path) -> tuple[int, int, int]:
    """Most bytes that this rank's process had beyond those at the start while a model was built and cut up, and beyond
    those from then on while it was written to `directory` in files of 16 MiB, and read again in buckets as servers are
    sent; the bytes of the model's parameters."""
    found: list[int] = []
    status = Path("/proc/self/status")

    def read(field: str) -> int:
        return next(int(line.split()[1]) << 10 for line in status.read_text().splitlines() if line.startswith(field))

    def begin() -> int:
        Path("/proc/self/clear_refs").write_text("5")  # forgets the highest so far
        return read("VmRSS:")

    class Look(Callback):
        def on_fit_start(self, run: Any, module: Any) -> None:
            found.append(read("VmHWM:") - before)
            here = begin()
            like, parts = policy_in_parts(module.policy, run.is_global_zero)
            size = sum(p.numel() * p.itemsize for p in module.parameters())
            if parts is not None:
                path, written = WeightFiles(directory, 16 << 20).write(like, 1, parts.saved())
                sent = sum(bucket.read().nbytes for bucket in HostWeights.in_files(path, 1, 16 << 20).buckets)
                assert written == sent == size
            found.append(read("VmHWM:") - here)
            found.append(size)

    module = PolicyModule(source(**LARGE), optimizer=adamw)
    before = begin()
    strategy = DTAStrategy(group_size=2, shard_parameters=sharded)
    trainer(Look(), devices=2, strategy=strategy, max_steps=0).fit(module, Batches([make_batch()]))
    return found[0], found[1], found[2]


def private_memory(path: Path) -> tuple[int, int]:
    """Most bytes of its own, pages of files left out, that this rank's process had beyond those at the start while the
    model in `path` was loaded and cut up (looked at every 2 ms); the bytes of the model's parameters."""
    status, highest, ended = Path("/proc/self/status"), [0], threading.Event()

    def anonymous() -> int:
        lines = status.read_text().splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon:"))

    def look() -> None:
        while not ended.wait(0.002):
            highest[0] = max(highest[0], anonymous())

    class Stop(Callback):
        def on_fit_start(self, run: Any, module: Any) -> None:
            ended.set()

    module = PolicyModule(ModelSource(path=str(path)), optimizer=adamw)
    before, watch = anonymous(), threading.Thread(target=look, daemon=True)
    watch.start()
    strategy = DTAStrategy(group_size=2, shard_parameters=True)
    trainer(Stop(), devices=2, strategy=strategy, max_steps=0).fit(module, Batches([make_batch()]))
    watch.join()
    return highest[0] - before, sum(p.numel() * p.itemsize for p in module.parameters())


def contents(path: Path) -> dict[str, Tensor]:
    """Every tensor of a checkpoint, whole."""
    return load_whole(path, lambda name: True)


def again(layout: Layout, start: Path, directory: Path, precision: str, base: Path | None = None) -> None:
    """Loads a checkpoint and writes it as it is."""
    torch.manual_seed(0)
    ranks, size, sharded = layout
    module = PolicyModule(adapted(base), optimizer=adamw)
    strategy = DTAStrategy(group_size=size, shard_parameters=sharded, calibrate=False)

    class AtOnce(ModelCheckpoint):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            trainer.save_checkpoint(directory / "again.ckpt")
            trainer.should_stop = True

    run = trainer(
        AtOnce(directory, save_top_k=0),
        devices=ranks,
        strategy=strategy,
        max_steps=100,
        precision=precision,
        enable_checkpointing=True,
    )
    run.fit(module, Batches([make_batch(k, version=k) for k in range(5)]), ckpt_path=start)


class Served(Batches):
    """Batches, and an engine in this process that rank 0 starts, as `RolloutDataModule` does."""

    val_sets = ()

    def __init__(self, batches: list[RolloutBatch]) -> None:
        super().__init__(batches)
        self.engine = EmbeddedEngine()

    def start(self, model: Any, version: int, parts: Any = None) -> None:
        if not self.engine.health()["alive"]:
            self.engine.start(model, version, 1, parts)

    def publish(self, version: int) -> None:
        assert self.engine.version == version

    def counters(self) -> dict[str, int]:
        return {}

    def tally(self) -> dict[str, float]:
        return {}

    def diagnose(self) -> str:
        return ""


class ServesWhatIsTrained(Callback):
    """After `WeightSync`: what the engine samples is of the weights that all ranks together have."""

    def __init__(self, source: ModelSource) -> None:
        self.source, self.versions = source, []

    def on_train_batch_end(self, run: Any, module: Any, *unused: Any) -> None:
        weights = parameters(module.policy)
        if run.is_global_zero:
            request = GenerationRequest([3, 1, 4, 1, 5], 12)
            response = asyncio.run(run.datamodule.engine.generate(request))
            model = build_model(self.source)
            model.load_state_dict(weights, strict=False)
            inner_model(model).tie_weights()
            assert_parity({module.policy_version: model}, request, response, 1e-5)
            self.versions.append(module.policy_version)


class InTurns(EmbeddedEngine, ServerEngine):
    """Stands still while the trainer computes."""

    in_turns, owns_servers = True, False

    def where(self, request_id: str) -> str:
        return ""

    def restart(self, server: str) -> None:
        raise GenerationError("there is none")


def serve(layout: Layout, base: Path | None = None, directory: Path | None = None, in_turns: bool = False) -> list[int]:
    """The versions that were served with the weights they are of, which went through files in `directory` or memory."""
    torch.manual_seed(0)
    ranks, size, sharded = layout
    module = PolicyModule(adapted(base), optimizer=adamw)
    data, seen = Served([make_batch(k, version=k) for k in range(2)]), ServesWhatIsTrained(adapted(base))
    if in_turns:
        data.engine = InTurns()
    strategy = DTAStrategy(group_size=size, shard_parameters=sharded)
    sync = WeightSync("memory" if directory is None else "disk", directory and str(directory))
    try:
        trainer(sync, seen, devices=ranks, strategy=strategy).fit(module, data)
    finally:
        data.engine.close()
    return seen.versions
