"""What rewards are made of is logged with the batch that has it, and with no later step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import lightning as L
import pytest
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger

from app.batch import CALL_REWARD
from callbacks import RewardLogger
from callbacks.reward_logger import reward_parts
from modules import PolicyModule
from modules.episodes import call_rewards, earned
from tests.helpers.tiny_policy import Batches, make_batch, sgd, source, trainer


def test_parts_of_earlier_batches_are_not_shown_again(tmp_path: Path) -> None:
    class Shown(L.Callback):
        def on_train_batch_end(self, trainer: L.Trainer, *unused: Any) -> None:
            shown.append({name for name in trainer.callback_metrics if name.startswith("reward/")})

    shown: list[set[str]] = []
    first, second = make_batch(0), make_batch(1)
    for metadata in first.metadata:
        metadata |= {"reward_parts": {"form": 1.0}, "reward_failed": "timeout", "reward_unreadable": True}
    run = trainer(RewardLogger(), Shown(), default_root_dir=tmp_path)
    run.fit(PolicyModule(source(), optimizer=sgd, epochs=2), Batches([first, second]))
    assert shown == [{"reward/form", "reward/failed", "reward/unreadable"}, set(), set(), set()]


class Tables(CSVLogger):
    """Takes tables, as W&B's does; knows the step of everything."""

    def __init__(self, directory: Path) -> None:
        super().__init__(str(directory))
        self.steps: list[tuple[str, int | None]] = []

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        self.steps += [(name, step) for name in metrics if name in ("loss", "val/accuracy")]

    def log_table(
        self, key: str, columns: Any = None, data: Any = None, dataframe: Any = None, step: Any = None
    ) -> None:
        self.steps.append((key, step))


def test_tables_have_the_step_of_the_numbers_beside_them(tmp_path: Path) -> None:
    """A run that goes on included. They were a step late."""
    logger, more = Tables(tmp_path / "a"), Tables(tmp_path / "b")
    options: dict[str, Any] = {"val_check_interval": 2, "check_val_every_n_epoch": None, "default_root_dir": tmp_path}
    data = Batches([make_batch(0), make_batch(1)], held_out=[make_batch(2)])
    run = trainer(RewardLogger(every_n_batches=1), logger=logger, **options)
    run.fit(PolicyModule(source(), optimizer=sgd), data)
    run.save_checkpoint(tmp_path / "last.ckpt")
    trained = [("samples/train", 0), ("loss", 0), ("samples/train", 1), ("loss", 1)]
    assert logger.steps == [*trained, ("samples/held-out", 1), ("val/accuracy", 1)]
    run = trainer(RewardLogger(every_n_batches=1), logger=more, max_epochs=2, **options)
    run.fit(PolicyModule(source(), optimizer=sgd), data, ckpt_path=tmp_path / "last.ckpt", weights_only=True)
    assert more.steps == [(name, step + 2) for name, step in logger.steps if step is not None]


def test_episodes_that_no_reward_read_are_told_as_a_share() -> None:
    batch = make_batch(groups=2, episodes=2)  # an episode of each group has three turns
    for metadata, episode in zip(batch.metadata, batch.episode_ids.tolist(), strict=True):
        metadata |= {"reward_failed": "timeout"} if episode else {"reward_unreadable": True}
    assert reward_parts(batch) == {"reward/failed": 0.75, "reward/unreadable": 0.25}


def test_parts_are_of_all_episodes_where_each_group_numbers_its_own() -> None:
    """As the objectives take them, too; the last group alone would speak for all."""
    batch = make_batch(groups=3, episodes=2)
    batch.episode_ids %= 2
    for metadata, group in zip(batch.metadata, batch.group_ids.tolist(), strict=True):
        metadata |= {"reward_parts": {"form": float(group)}}
        metadata |= {} if group else {"reward_failed": "timeout"}
    assert reward_parts(batch) == pytest.approx({"reward/form": 1.0, "reward/failed": 1 / 3})


def test_samples_are_told_with_what_their_episodes_earned(tmp_path: Path) -> None:
    batch = make_batch(0, recorded=False)
    batch.rewards.zero_()
    for index, metadata in enumerate(batch.metadata):
        metadata[CALL_REWARD] = float(index)
    logger = RewardLogger(samples=2)
    run = trainer(logger, default_root_dir=tmp_path)
    run.fit(PolicyModule(source(), optimizer=sgd), Batches([batch]))
    rows = [json.loads(line) for line in next(tmp_path.rglob("samples.jsonl")).read_text().splitlines()]
    rewards, _, _ = earned(batch, call_rewards(batch))
    assert [row["reward"] for row in rows] == [float(rewards.min()), float(rewards.max())] and rewards.max() > 0


@pytest.mark.parametrize("older", [False, True], ids=["", "behind lines of an older version"])
def test_samples_of_steps_that_were_made_again_say_which_launch_they_are_of(older: bool, tmp_path: Path) -> None:
    def launch(steps: int, **resume: Any) -> list[tuple[int, int]]:
        run = trainer(RewardLogger(every_n_batches=1, samples=1), every, **options, max_steps=steps)
        run.fit(PolicyModule(source(), optimizer=sgd), Batches([make_batch(0), make_batch(1)]), **resume)
        run.test(run.lightning_module, Batches([], held_out=[make_batch(2)]), verbose=False)  # of the same launch
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        return [(row.get("launch"), row["step"]) for row in rows if row["set"] == "train"]

    file = tmp_path / "samples.jsonl"
    every = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    options: dict[str, Any] = {"default_root_dir": tmp_path, "max_epochs": -1, "enable_checkpointing": True}
    assert launch(2) == [(0, 1), (0, 2)]
    first: int | None = 0
    if older:
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        file.write_text("".join(json.dumps({k: v for k, v in one.items() if k != "launch"}) + "\n" for one in lines))
        first = None
    again = {"ckpt_path": tmp_path / "step=1.ckpt", "weights_only": True}
    assert launch(3, **again) == [(first, 1), (first, 2), (1, 2), (1, 3)]
    assert launch(2, **again)[-1] == (2, 2)
