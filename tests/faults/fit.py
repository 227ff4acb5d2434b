"""A small real `fit` with books of its own: which groups were trained, and what the stream says about all others.

The quickstart's task with a tiny random model: two-digit sums, groups of 4, batches of 2 groups, `max_staleness: 1`.

    python -m tests.faults.fit DIR --urls URL ... [--resume CHECKPOINT]     # the run that is killed and resumed

Promises: a trained group is written down when its optimizer step has ended, beside the stream's own counters, so that
`accounts` compares two records made independently; a run that does not come to its end in time fails by name.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint

from app.strategies import DTAStrategy
from callbacks import RewardLogger, WeightSync
from datamodules import RolloutDataModule
from datamodules.inference.protocol import InferenceEngine
from datamodules.inference.sglang import SGLangEngine
from datamodules.pipeline.gate import unaccounted
from datamodules.pipeline.limits import Limits
from datamodules.pipeline.watchdog import Stall
from datamodules.prompts import ArithmeticPrompts
from datamodules.rewards import RewardOptions
from datamodules.workflows import RLVRWorkflow
from modules import ModelSource, PolicyModule
from tests.faults.rewards import TurnsBad
from tests.helpers.tiny_model import TINY_WITH_ENDS

MODEL = {
    **TINY_WITH_ENDS,
    "vocab_size": 16,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
}
CONTEXT = 96
BATCH, GROUP = 2, 4
UPDATE_S = 20.0
_LIMIT_S = 600.0
_GONE = ("dropped_stale", "dropped_filtered", "failed", "skipped")


@dataclass
class Ledger(Callback):
    """Writes down the groups of every optimizer step when it has ended, in memory and in a file.

    Attributes:
        steps: (time.monotonic(), global step, ids of the groups) of each.
        enough: asked after every step; the run ends when it says so. None runs to `max_steps`.
    """

    file: Path
    enough: Callable[[], bool] | None = None
    steps: list[tuple[float, int, list[int]]] = field(default_factory=list)
    began: float = 0.0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.began = time.monotonic()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        groups = sorted(set(batch.batch.group_ids.tolist()))
        self.steps.append((time.monotonic(), trainer.global_step, groups))
        with self.file.open("a") as file:
            file.write(json.dumps({"step": trainer.global_step, "groups": groups}) + "\n")
        if self.enough is not None and self.enough():
            trainer.should_stop = True
        elif time.monotonic() - self.began > _LIMIT_S:
            raise TimeoutError(f"the run did not recover within {_LIMIT_S:g} s")

    def trained(self) -> list[int]:
        return [index for _, _, groups in self.steps for index in groups]

    def longest_pause(self, since: float) -> float:
        """Seconds between two steps, the longest of those that end after `since` (of time.monotonic())."""
        ends = [self.began, *(ended for ended, _, _ in self.steps)]
        return max((after - before for before, after in itertools.pairwise(ends) if after > since), default=0.0)


class Fit:
    """One run, in this process.

    Args:
        directory: for everything it writes.
        engine: rolls out.
        enough: see `Ledger`.
        reward: None for the well-behaved one.
        weights: directory for weight updates by disk; None lets WeightSync choose its method.
        checkpoints: writes one every step.
        samples: writes samples.jsonl and records the batches.
        max_steps: most optimizer steps.
        seed: of everything.

    Attributes:
        ledger: what was trained.
        state: of the stream, once the run has ended.
    """

    def __init__(
        self,
        directory: Path,
        engine: InferenceEngine,
        enough: Callable[[], bool] | None = None,
        reward: TurnsBad | None = None,
        weights: Path | None = None,
        checkpoints: bool = False,
        samples: bool = False,
        max_steps: int = -1,
        seed: int = 0,
    ) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.engine = engine
        self.ledger = Ledger(directory / "trained.jsonl", enough)
        self.state: dict[str, Any] = {}
        self._seed = seed
        self._module = PolicyModule(ModelSource(config=MODEL), advantage="dr_grpo")
        self.data = RolloutDataModule(
            prompts=ArithmeticPrompts(digits=2, operators="+", seed=seed),
            workflow=RLVRWorkflow(max_new_tokens=64),
            engine=engine,
            tokenizer="char:0123456789+-*=",
            reward=reward or TurnsBad("hang", str(directory / "never")),
            batch_size=BATCH,
            group_size=GROUP,
            max_staleness=1,
            batches_per_epoch=100_000,
            reward_options=RewardOptions(deadline_s=2.0, memory_mb=800.0),
            limits=Limits(collect_deadline_s=200.0),
            stall=Stall(after_s=60.0),
            record="rollouts" if samples else None,
            seed=seed,
        )
        sync = WeightSync(deadline_s=UPDATE_S) if weights is None else WeightSync("disk", str(weights), UPDATE_S)
        callbacks: list[Callback] = [self.ledger, sync]
        if samples:
            callbacks.append(RewardLogger(1, BATCH * GROUP))
        if checkpoints:
            callbacks.append(ModelCheckpoint(directory / "checkpoints", "{step}", save_top_k=-1, every_n_train_steps=1))
        self._trainer = Trainer(
            accelerator="cpu",
            devices=1,
            strategy=DTAStrategy(),
            callbacks=callbacks,
            logger=False,
            default_root_dir=str(directory),
            max_steps=max_steps,
            max_epochs=-1,
            check_val_every_n_epoch=None,
            use_distributed_sampler=False,
            num_sanity_val_steps=0,
            enable_progress_bar=False,
            enable_model_summary=False,
            enable_checkpointing=checkpoints,
        )

    def run(self, resume: Path | None = None) -> Fit:
        """Once. Raises what the run raises; what it started has ended then too."""
        seed_everything(self._seed, verbose=False)
        try:
            self._trainer.fit(self._module, datamodule=self.data, ckpt_path=None if resume is None else str(resume))
        finally:
            self.data.close()
            self.state = self.data.state_dict()
            del self._trainer, self._module, self.data  # with them goes the process group, which has ports and threads
            gc.collect()
            if dist.is_initialized():
                dist.destroy_process_group()
        return self


def last_checkpoint(directory: Path) -> Path | None:
    """The newest complete one of a run."""
    found = (directory / "checkpoints").glob("step=*.ckpt")
    return max(found, key=step_of, default=None)


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.stem.removeprefix("step="))


def accounts(trained: Sequence[int], state: dict[str, Any]) -> dict[str, Any]:
    """Every group from its admission to where it is now, from what was trained and the stream's state at the end.

    Args:
        trained: groups of every optimizer step that counts, in order.
        state: of the datamodule, as in a checkpoint.

    Returns:
        Counts, and `wrong`: what does not balance, in words; empty when all does.
    """
    counters: dict[str, int] = state["counters"]
    ready: list[int] = [group[0] for group in state["ready"].get("groups", [])]
    held: list[int] = [*state["unfinished"], *ready]
    dropped = {name: counters[name] for name in _GONE}
    once = set(trained)
    wrong = []
    if len(once) != len(trained):
        wrong.append(f"trained twice: {sorted(index for index in once if trained.count(index) > 1)}")
    if once & set(held):
        wrong.append(f"trained, and still in the stream: {sorted(once & set(held))}")
    if len(set(held)) != len(held):
        wrong.append(f"twice in the stream: {held}")
    if unaccounted(counters):
        wrong.append(f"{unaccounted(counters)} groups admitted are unaccounted for: {counters}")
    if counters["trained"] + counters["queued"] != len(trained) + len(ready):
        wrong.append(f"{len(trained)} groups trained and {len(ready)} ready, but the counters are {counters}")
    if state["position"] != len(once) + len(held) + sum(dropped.values()):
        lost = state["position"] - len(once) - len(held) - sum(dropped.values())
        wrong.append(f"{lost} of {state['position']} prompts are lost")
    return {
        "admitted": counters["admitted"],
        "trained": len(trained),
        **dropped,
        "requeued": counters["requeued"],
        "running": counters["running"],
        "ready": len(ready),
        "prompts": state["position"],
        "in_stream": len(held),
        "wrong": wrong,
    }


def engine_on(urls: Sequence[str]) -> SGLangEngine:
    """On running servers, impatient."""
    return SGLangEngine(urls, silence_s=8.0, report_tokens=4, request_timeout_s=150.0, start_timeout_s=120.0)


def read_ledger(file: Path, last_step: int | None = None) -> list[int]:
    """Groups trained up to that step, as the file of a run says."""
    rows: Iterable[dict[str, Any]] = map(json.loads, file.read_text().splitlines())
    return [index for row in rows if last_step is None or row["step"] <= last_step for index in row["groups"]]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.faults.fit", description=__doc__.split("\n\n")[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--urls", nargs="+", required=True)
    parser.add_argument("--resume", type=Path)
    parser.add_argument("--steps", type=int, default=-1, help="end at this global step (default: never)")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    fit = Fit(args.directory, engine_on(args.urls), checkpoints=True, max_steps=args.steps, seed=args.seed)
    state = fit.run(args.resume).state
    kept = {key: state[key] for key in ("position", "unfinished", "counters")}
    kept["ready"] = {"groups": state["ready"].get("groups", [])}
    (args.directory / "state.json").write_text(json.dumps(kept))


if __name__ == "__main__":
    main()
