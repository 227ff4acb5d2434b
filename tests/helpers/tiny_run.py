"""A real Trainer run in a fraction of a second: a two-parameter "policy", ready-made batches, an engine in memory."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.loggers import CSVLogger

from app.batch import EvalHandle, RolloutBatch, StepHandle, Trajectory
from app.tree import PrefixTree
from callbacks import run_dir
from datamodules.inference.protocol import WeightUpdate


def make_batch(rewards: list[float], first_id: int = 0) -> RolloutBatch:
    """Sequences [1, 2, 3, 10 + i], the last two tokens trained, reward i as given."""
    return RolloutBatch.from_trajectories(
        Trajectory(
            tokens=torch.tensor([1, 2, 3, 10 + i]),
            loss_mask=torch.tensor([False, False, True, True]),
            behavior_logprobs=torch.zeros(4),
            versions=torch.tensor([-1, -1, 5, 6]),
            reward=reward,
            group_id=0,
            episode_id=i,
            prompt_id=f"prompt-{first_id + i}",
        )
        for i, reward in enumerate(rewards)
    )


class TinyModule(LightningModule):
    """`weight` falls by 1 a step; logs the step number as reward, and 4, 3, 2 tokens a step."""

    def __init__(self, steps_per_batch: int = 1) -> None:
        super().__init__()
        self.policy = torch.nn.Linear(1, 1, bias=False)
        torch.nn.init.zeros_(self.policy.weight)
        self.steps_per_batch = steps_per_batch
        self.policy_version = 0
        self.step_seconds: dict[str, float] = {}
        self.last_tree: PrefixTree | None = None

    def training_step(self, handle: StepHandle, batch_idx: int) -> torch.Tensor:
        self.step_seconds = {"prepare": 0.001, "tree": 0.002}
        if handle.batch is not None:
            self.last_tree = PrefixTree.build(handle.batch.sequences())
        self.policy_version += handle.index == handle.count - 1
        return self.policy.weight.sum()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log_dict(
            {
                "reward": float(self.global_step),
                "tokens/dense": 4.0,
                "tokens/leaf": 3.0,
                "tokens/tree": 2.0,
            },
            batch_size=1,
        )

    def validation_step(self, handle: EvalHandle, batch_idx: int) -> None:
        self.log("val/accuracy", -self.policy.weight.sum(), batch_size=1, sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1.0)


class CopyingEngine:
    """The part of an inference engine WeightSync talks to; remembers what it served, and when."""

    update_methods = ("memory",)

    def __init__(self) -> None:
        self.version = -1
        self.weight = float("nan")
        self.served: list[tuple[int, float]] = []

    def begin(self, policy: torch.nn.Linear, version: int) -> None:
        self._serve(version, policy.weight)

    def update_weights(self, update: WeightUpdate) -> float:
        assert update.version > self.version and update.state_dict is not None
        time.sleep(0.01)
        self._serve(update.version, update.state_dict["weight"])
        return 0.01

    def _serve(self, version: int, weight: torch.Tensor) -> None:
        self.version, self.weight = version, weight.item()
        self.served.append((version, self.weight))


class _Stream:
    def __init__(self, data: TinyData) -> None:
        self.data = data

    def __len__(self) -> int:
        return self.data.batches * self.data.count

    def __iter__(self) -> Iterator[StepHandle]:
        return self.data.steps()


class _HeldOut:
    def __len__(self) -> int:
        return 1

    def __iter__(self) -> Iterator[EvalHandle]:
        yield EvalHandle(make_batch([0.0, 1.0]), "held-out")


class TinyData(LightningDataModule):
    """Per epoch `batches` rollout batches of three sequences; the gate's side of WeightSync."""

    def __init__(self, batches: int = 3, count: int = 1, validate: bool = True) -> None:
        super().__init__()
        self.batches, self.count, self.validate = batches, count, validate
        self.engine = CopyingEngine()
        self.val_sets = ()
        self.published: list[int] = []

    def start(self, model: Any, version: int) -> None:
        if self.engine.version < 0:
            self.engine.begin(model, version)

    def publish(self, version: int) -> None:
        self.published.append(version)

    def counters(self) -> dict[str, int]:
        return {"accepted": 3 * len(self.published), "failed": 1}

    def tally(self) -> dict[str, float]:
        return {}

    def diagnose(self) -> str:
        return "nothing rolls out"

    def train_dataloader(self) -> _Stream:
        return _Stream(self)

    def steps(self) -> Iterator[StepHandle]:
        """An epoch; tests have others."""
        for number in range(self.batches):
            batch = make_batch([0.0, 1.0, 0.5], first_id=10 * number)
            for index in range(self.count):
                yield StepHandle(batch, index, self.count)

    def val_dataloader(self) -> Any:
        return _HeldOut() if self.validate else []


def trainer(directory: Path, *callbacks: Callback, **options: Any) -> Trainer:
    """A quiet one-process Trainer that writes into `directory`."""
    settings: dict[str, Any] = {
        "accelerator": "cpu",
        "logger": CSVLogger(str(directory.parent), name="", version=directory.name, flush_logs_every_n_steps=1),
        "default_root_dir": str(directory),
        "callbacks": list(callbacks),
        "log_every_n_steps": 1,
        "num_sanity_val_steps": 0,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
        "max_epochs": 1,
        "check_val_every_n_epoch": None,
        "val_check_interval": 1000,
    }
    return Trainer(**{**settings, **options})


class RememberingModule(TinyModule):
    """Saves its hyper-parameters, as Lightning users' modules do, and tells which ones it runs with."""

    def __init__(self, note: str = "none") -> None:
        super().__init__()
        self.save_hyperparameters()

    def on_fit_start(self) -> None:
        directory = run_dir(self.trainer)
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "note.txt").write_text(self.hparams["note"])
