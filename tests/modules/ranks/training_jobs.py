"""What ranks run in the tests here (importable, hence not in a test file)."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

from app.batch import RolloutBatch
from app.routes import BatchRoutes
from app.strategies import DTAStrategy
from modules import ActorCriticModule, PolicyModule, Regulariser, RewardModule, SFTModule, ranks, step
from tests.helpers.tiny_policy import Batches, Metrics, make_batch, make_twins, parameters, sgd, source, trainer
from tests.modules.held_out import Sets

KL = Regulariser("kl", 0.1)
Result = tuple[dict[str, Tensor], list[dict[str, float]], dict[str, float]]


def data(kind: str) -> list[RolloutBatch]:
    """Ordinary batches, three ("groups") or two ("two"), one of a single group, so that some steps have one sequence
    ("one"), pairs of episodes ("pairs"), equal sequences whose teachers see different prompts ("twins"), or experts on
    record, of which sequences that share a token say different things ("experts")."""
    if kind == "experts":
        return [with_experts(make_batch(k, version=max(0, k - 1)), k) for k in range(2)]
    if kind == "pairs":
        return [make_batch(k, groups=4, episodes=2, version=max(0, k - 1)) for k in range(2)]
    if kind == "twins":
        return [make_twins(k) for k in range(2)]
    if kind == "one":
        return [make_batch(0, groups=1, episodes=2)]
    return [make_batch(k, version=max(0, k - 1)) for k in range(3 if kind == "groups" else 2)]


EXPERTS: dict[str, Any] = dict(
    model_type="qwen3_moe", num_experts=8, num_experts_per_tok=2, moe_intermediate_size=8, initializer_range=0.2
)


def with_experts(batch: RolloutBatch, seed: int) -> RolloutBatch:
    random, layers = np.random.default_rng(seed), source().config["num_hidden_layers"]  # type: ignore[index]
    table = random.random((batch.num_tokens, layers, 8)).argsort(-1)[..., :2].astype(np.uint8)
    index = np.where(random.random(batch.num_tokens) < 0.2, -1, random.permutation(batch.num_tokens))
    routes = BatchRoutes(torch.from_numpy(index.astype(np.int32)), torch.from_numpy(table))
    batch.routes = routes.pointing(routes.index)
    return batch


def train(
    devices: int,
    kind: str,
    module: str = "policy",
    group_size: int = 1,
    sharded: bool = False,
    model: dict[str, Any] | None = None,
    **options: Any,
) -> Result:
    """Parameters, metrics of every step, and validation metrics. `model` lays over the tiny one."""
    torch.manual_seed(0)
    make = {"policy": PolicyModule, "critic": ActorCriticModule, "sft": SFTModule, "reward": RewardModule}[module]
    made = make(source(**model or {}), optimizer=sgd, **options)
    metrics = Metrics()
    held_out: list[RolloutBatch | None] = [make_batch(7), make_batch(8, groups=1)]
    run = trainer(metrics, devices=devices, strategy=DTAStrategy(group_size=group_size, shard_parameters=sharded))
    run.fit(made, Batches(data(kind), held_out))
    assert made.policy_version == len(data(kind))
    validation = {name: float(v) for name, v in run.callback_metrics.items() if name.startswith("val/")}
    return parameters(made), metrics.steps, validation


def resumed(devices: int, directory: str) -> list[Result]:
    """Two batches of two steps, with a checkpoint after every step; the same, going on in the middle of the first."""

    def run(*callbacks: Callback, ckpt_path: Path | None = None, **settings: Any) -> Result:
        torch.manual_seed(0)
        options: dict[str, Any] = {"proximal": "recomputed", "regularisers": [KL], "reference": "initial"}
        made = PolicyModule(source(), optimizer=adamw, minibatches=2, **options)
        metrics = Metrics()
        ours = trainer(metrics, *callbacks, devices=devices, strategy=DTAStrategy(calibrate=False), **settings)
        ours.fit(made, Batches([make_batch(), make_batch(1)]), ckpt_path=ckpt_path)
        assert (made.policy_version, made.steps_done) == (2, 0)
        return parameters(made), metrics.steps, {}

    every = ModelCheckpoint(directory, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    return [run(every, enable_checkpointing=True), run(ckpt_path=Path(directory) / "step=1.ckpt")]


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.02, weight_decay=0.1)


def validate(devices: int) -> dict[str, float]:
    """What is logged of two named sets."""
    torch.manual_seed(0)
    run = trainer(devices=devices, strategy=DTAStrategy())
    run.validate(PolicyModule(source(), optimizer=sgd), Sets(), verbose=False)
    return {name: float(value) for name, value in run.callback_metrics.items()}


def plain_ddp() -> None:
    """Several processes under a strategy that averages gradients."""
    run = trainer(devices=2, strategy="ddp")
    run.fit(PolicyModule(source(), optimizer=sgd), Batches(data("one")))


def broken() -> None:
    """Rank 0 owns a batch that cannot be trained on; every rank has to hear of it."""
    batch = make_batch()
    batch.loss_mask[:] = False
    trainer(devices=2, strategy=DTAStrategy()).fit(PolicyModule(source(), optimizer=sgd), Batches([batch]))


def fail_in_prepare() -> None:
    """Rank 0 fails after a forward pass that all ranks took part in."""
    module = PolicyModule(source(), optimizer=sgd, advantage=no_credit, regularisers=[KL], reference="initial")
    trainer(devices=2, strategy=DTAStrategy()).fit(module, Batches([make_batch()]))


def no_credit(batch: RolloutBatch) -> Tensor:
    raise ValueError(f"no credit for {batch.prompt_ids[0]}")


def fail_in_a_forward_pass(rank: int) -> None:
    """The reference runs out of memory on one rank."""

    class Fails(PolicyModule):
        def engine_for(self, name: str) -> Any:
            if self.trainer.global_rank == rank:
                raise MemoryError(f"no memory for the {name}")
            return super().engine_for(name)

    module = Fails(source(), optimizer=sgd, regularisers=[KL], reference="initial")
    trainer(devices=2, strategy=DTAStrategy()).fit(module, Batches([make_batch()]))


Sequences = list[tuple[int, ...]]


def what_a_rank_sees(devices: int, **options: Any) -> tuple[list[Sequences], list[Sequences], list[float]]:
    """The sequences of each batch that exists here, those of each tree that is built here to be run, in that order; MB
    that rank 0 sent in each step."""
    torch.manual_seed(0)
    held: list[Sequences] = []
    run: list[Sequences] = []
    sent: list[float] = []
    make, build = RolloutBatch.__init__, ranks.build_tree

    def counted(batch: RolloutBatch, **fields: Any) -> None:
        make(batch, **fields)
        held.append([tuple(tokens.tolist()) for tokens in batch.sequences()])

    def noted(batch: RolloutBatch, share: str, indices: Any = None) -> Any:
        if indices is None:  # otherwise to be cut
            run.append([tuple(tokens.tolist()) for tokens in batch.sequences()])
        return build(batch, share, indices)

    class Sent(Callback):
        def on_train_batch_end(self, trainer: Trainer, *unused: Any) -> None:
            sent.append(trainer.strategy.step_metrics()["strategy/share_mb"])  # type: ignore[attr-defined]

    batch = make_batch(groups=6, episodes=4)
    module = PolicyModule(source(), optimizer=sgd, regularisers=[KL], reference="initial", **options)
    with (
        patch.object(RolloutBatch, "__init__", counted),
        patch.object(ranks, "build_tree", noted),
        patch.object(step, "build_tree", noted),
    ):
        trainer(Sent(), devices=devices, strategy=DTAStrategy()).fit(module, Batches([batch]))
    return held, run, sent
