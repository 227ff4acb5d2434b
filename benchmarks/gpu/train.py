"""Whole optimizer steps on one device, for `benchmarks.gpu_suite --train`: DTAStrategy, bf16-true, AdamW.

Promises: a Lightning fit as users run it, whose every step trains on other conversations, so that trees, paths and
chunks change in size; seconds and memory of each step, told after it, from which a plateau (or none) shows. Rewards are
drawn from a seed and behaviour log-probabilities are those of a uniform sampler: what is learned means nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import lightning as L
import numpy as np
import torch

from app.batch import RolloutBatch, StepHandle, Trajectory
from app.strategies import DTAStrategy
from benchmarks.common.workloads import Case, make_case
from datamodules.conversations.tokens import Conversation
from modules import ModelSource, PolicyModule

STEPS, TASKS, TRIALS = 10, 2, 4


def train(
    shape: dict[str, Any],
    vocabulary: int,
    source: str,
    recorded: Sequence[Conversation],
    device: torch.device,
    toy: bool,
    told: Callable[[dict[str, Any]], None] = lambda found: None,
) -> dict[str, Any]:
    """Seconds, tokens and bytes of `STEPS` steps (three at toy size) of a Qwen3 of this shape; `told`: is given after
    each what there is until then."""
    steps, trials = (3, 2) if toy else (STEPS, TRIALS)
    tasks = list(dict.fromkeys(one.task for one in recorded))
    batches = []
    for k in range(steps):
        chosen = {tasks[(k * TASKS + j) % len(tasks)] for j in range(1 if toy else 1 + k % TASKS)}
        some = [one for one in recorded if one.task in chosen]
        batches.append(_batch(make_case(source, some, "turns", len(chosen), trials, vocabulary), k))
    config = {
        "model_type": "qwen3",
        "vocab_size": vocabulary,
        "hidden_size": shape["hidden"],
        "intermediate_size": shape.get("intermediate") or 3 * shape["hidden"],
        "num_hidden_layers": shape["layers"],
        "num_attention_heads": shape["heads"],
        "num_key_value_heads": shape["key_value_heads"],
        "head_dim": shape.get("head_dim", 128),
        "max_position_embeddings": 65_536,
        "tie_word_embeddings": shape.get("tied", False),
    }
    budgets: dict[str, Any] = {"chunk_tokens": 64, "live_tokens": 96} if toy else {}
    fused = device.type == "cuda"
    module = PolicyModule(
        ModelSource(config=config),
        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-6, fused=fused),
        **budgets,
    )
    watch = _Watch(device, told)
    trainer = L.Trainer(
        accelerator="gpu" if fused else "cpu",
        devices=1,
        strategy=DTAStrategy(),
        precision="bf16-true",
        max_epochs=1,
        callbacks=[watch],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    trainer.fit(module, _Batches(batches))
    return watch.found


def _batch(case: Case, seed: int) -> RolloutBatch:
    """The case's sequences as episodes of one turn, a group a task, with rewards of 0 and 1."""
    random, uniform = np.random.default_rng(seed), -float(np.log(1 + max(int(s.max()) for s in case.sequences)))
    size = len(case.sequences) // max(1, case.tasks)
    trajectories = []
    for i, (tokens, scored) in enumerate(zip(case.sequences, case.scored, strict=True)):
        mask = torch.from_numpy(scored.copy())
        mask[0] = False
        trajectories.append(
            Trajectory(
                tokens=torch.from_numpy(tokens),
                loss_mask=mask,
                behavior_logprobs=uniform * mask.float(),
                versions=torch.where(mask, seed, -1),
                reward=float(random.integers(2)),
                group_id=i // size,
                episode_id=i,
                turn_index=0,
                prompt_id=str(i // size),
            )
        )
    return RolloutBatch.from_trajectories(trajectories)


class _Batches(L.LightningDataModule):
    def __init__(self, batches: list[RolloutBatch]) -> None:
        super().__init__()
        self.batches = batches

    def train_dataloader(self) -> Any:
        return self

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[StepHandle]:
        for batch in self.batches:
            yield StepHandle(batch if self.trainer.is_global_zero else None, 0, 1)


class _Watch(L.Callback):
    """Seconds of each step, and on a GPU the most bytes allocated in it and those reserved after it."""

    def __init__(self, device: torch.device, told: Callable[[dict[str, Any]], None]) -> None:
        self.found: dict[str, Any] = {"ranks": 0, "steps": []}
        self._told = told
        self._cuda = device.type == "cuda"
        self._begin = 0.0

    def on_train_batch_start(self, trainer: L.Trainer, *unused: Any) -> None:
        if self._cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        self._begin = time.perf_counter()

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, *unused: Any) -> None:
        if self._cuda:
            torch.cuda.synchronize()
        row = {"seconds": time.perf_counter() - self._begin, "tree_tokens": module.last_tree.num_tokens}
        if self._cuda:
            row |= {"peak_bytes": torch.cuda.max_memory_allocated(), "reserved_bytes": torch.cuda.memory_reserved()}
        self.found["ranks"] = trainer.world_size
        self.found["steps"].append(row)
        self._told(self.found)
