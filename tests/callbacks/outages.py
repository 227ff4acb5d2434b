"""A run whose episodes need no model, and whose environment is down for some of its prompts (importable by YAML)."""

from __future__ import annotations

import asyncio
import hashlib
import os
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, redirect_stderr
from pathlib import Path
from typing import Any

import torch
import yaml
from lightning.pytorch import Callback, LightningModule, Trainer

from app.batch import Trajectory
from app.cli import main
from datamodules.inference.embedded import EmbeddedEngine
from datamodules.inference.protocol import GenerationError, WeightUpdate
from datamodules.prompts import ArithmeticPrompts
from datamodules.prompts.base import Prompt
from datamodules.workflows.base import EpisodeEngine
from tests.helpers.tiny_model import TINY_WITH_ENDS

STEPS = 5
CHAR = "char:0123456789+-*="
DOWN = "the environment does not answer"
SOURCE = {"digits": 3, "size": 50}
PROMPTS = ArithmeticPrompts(**SOURCE)


class Environment:
    """Plays what prompt and sample alone decide, so that runs can be compared to the bit; raises, or hangs, for the
    prompts from `first` to before `last`, and raises for held-out ones at version `held_out`."""

    max_new_tokens = 4

    def __init__(self, first: int = 0, last: int = 0, hangs: bool = False, held_out: int | None = None) -> None:
        self.down = {PROMPTS.deal(index).id for index in range(first, last)}
        self.hangs, self.held_out = hangs, held_out

    async def run(self, engine: EpisodeEngine, prompt: Prompt) -> list[Trajectory]:
        if engine.is_held_out:
            if engine.version == self.held_out:
                raise ConnectionError(DOWN)
        elif prompt.id in self.down:
            if self.hangs:
                await asyncio.sleep(3600)
            raise ConnectionError(DOWN)
        drawn = hashlib.sha256(f"{prompt.id} {engine.sample}".encode()).digest()
        made = [2 + byte % 14 for byte in drawn[:3]]
        tokens = [*prompt.tokens, *made]
        mask = torch.arange(len(tokens)) >= len(prompt.tokens)
        return [
            Trajectory(
                tokens=torch.tensor(tokens),
                loss_mask=mask,
                behavior_logprobs=torch.where(mask, -1.0, 0.0),
                versions=torch.where(mask, 0, -1),
                reward=float(drawn[3] % 5),
                group_id=0,
                episode_id=0,
                prompt_id=prompt.id,
            )
        ]


class Refuses(EmbeddedEngine):
    """Does not take version `version`, after a part of it where it comes in parts."""

    def __init__(self, version: int) -> None:
        super().__init__(kv_cache_tokens=256)
        self.refused = version

    def update_weights(self, update: WeightUpdate) -> float:
        if update.version == self.refused:
            if update.parts is not None:
                next(update.parts.merged())
            raise GenerationError("no server takes the weights")
        return super().update_weights(update)


class InTheMiddle(Callback):
    """Raises in a step, when its gradients are there and `step` steps are done."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        if trainer.global_step == self.step:
            raise RuntimeError("out of memory in the middle of a step")


@contextmanager
def full_disk() -> Iterator[None]:
    """No file of this process can be larger than half a checkpoint."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def configuration(ranks: int = 1, sharded: bool = False, environment: Any = None, **data: Any) -> dict[str, Any]:
    """A run of `STEPS` steps of two groups each, in prompt order.

    Args:
        environment: options of `Environment`. data: of the datamodule.
    """
    strategy = {"calibrate": False, "group_size": 2 if sharded else 1, "shard_parameters": sharded}
    model = {**TINY_WITH_ENDS, "vocab_size": 16, "hidden_size": 64, "intermediate_size": 256}
    return {
        "seed_everything": 1,
        "model": {
            "class_path": "modules.PolicyModule",
            "init_args": {
                "model": {"config": model},
                "optimizer": {"class_path": "torch.optim.AdamW", "init_args": {"lr": 0.02}},
                "self_check": "skip",
            },
        },
        "data": {
            "class_path": "datamodules.RolloutDataModule",
            "init_args": {
                "prompts": {"class_path": "datamodules.prompts.ArithmeticPrompts", "init_args": SOURCE},
                "workflow": {
                    "class_path": "tests.callbacks.outages.Environment",
                    "init_args": environment or {},
                },
                "engine": {
                    "class_path": "datamodules.inference.embedded.EmbeddedEngine",
                    "init_args": {"kv_cache_tokens": 256},
                },
                "tokenizer": CHAR,
                "batch_size": 2,
                "group_size": 2,
                "max_staleness": 0,
                "limits": {"max_failures": 3},
                **data,
            },
        },
        "trainer": {
            "accelerator": "cpu",
            "devices": ranks,
            "max_steps": STEPS,
            "strategy": {"class_path": "app.strategies.DTAStrategy", "init_args": strategy},
            "enable_progress_bar": False,
        },
    }


def command(directory: Path, config: dict[str, Any], *flags: str, full: bool = False) -> tuple[Any, str]:
    """Runs `fit` in `directory`, on a `full` disk; its exit code, or an error that is no user's mistake and its notes,
    and what it said."""
    os.chdir(directory)
    sys.argv = ["arborist"]
    rank = os.environ.get("RANK", "0")
    name = f"{rank}.yaml"
    Path(name).write_text(yaml.safe_dump(config))
    with Path(f"said_{rank}").open("w+") as said, redirect_stderr(said):
        code: Any = 0
        try:
            with full_disk() if full else nullcontext():
                main(["fit", "--config", name, "--run_dir", "here", *flags])
        except SystemExit as end:
            code = end.code
        except Exception as error:
            code = [f"{type(error).__name__}: {error}", *getattr(error, "__notes__", [])]
        said.seek(0)
        return code, said.read()
