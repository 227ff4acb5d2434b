"""Sample transcripts with their rewards, so that a human sees what the reward rewards.

Promises: `samples.jsonl` in the run directory, one JSON object a line, complete lines at any time; the same samples
go to every logger that takes tables (W&B) or text (TensorBoard), at the step of the metrics beside them; no text that a
model, a tool or a data file made can stop it (lone surrogates are written as escapes). Only global rank 0 writes;
nothing is re-tokenized for training, text is decoded for reading only.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from app.batch import RolloutBatch
from app.text import well_formed
from callbacks.base import append_lines, last_line, run_dir
from modules.episodes import call_rewards, earned
from modules.metrics import forget


class RewardLogger(Callback):
    """Logs `samples` sequences of every `every_n_batches`-th rollout batch (of `fit` and of `predict`), and of every
    set of held-out prompts (`validate` and `test`).

    The samples are spread evenly over the batch's rewards, from the lowest to the highest: `launch` (in the file alone:
    0, then one more whenever a run goes on in its directory; of a step that was made again, because a launch was killed
    behind its last checkpoint, the largest counts), `step` (optimizer steps done), `version` (of the newest trained
    token; -1 without one), `set` ("train", "predict" or the prompt set's name), `prompt_id`, `turn`, `reward`,
    `finish_reason`, `tokens` (length of the sequence), `prompt` and `completion` (text before and from the first
    trained token; token ids when the datamodule has no tokenizer) and `metadata`.

    Every training batch also logs, as means over its episodes, what their rewards are made of (`reward/<part>`), and
    which share was scored because their reward failed (`reward/failed`) or took them for wrong because it could not
    read them (`reward/unreadable`), where there are any.

    Args:
        every_n_batches: rollout batches between two logged ones.
        samples: sequences a time.
    """

    def __init__(self, every_n_batches: int = 10, samples: int = 4) -> None:
        for name, value in (("every_n_batches", every_n_batches), ("samples", samples)):
            if value < 1:
                raise ValueError(f"RewardLogger.{name}: {value}, must be at least 1")
        self.every_n_batches = every_n_batches
        self.samples = samples
        self._batches = 0
        self._parts: set[str] = set()  # logged with the last step
        self._path: Path | None = None
        self._launch: int | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._path = run_dir(trainer) / "samples.jsonl"
        self._batches = 0
        if self._launch is None and trainer.is_global_zero:
            self._launch = _next_launch(self._path)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        # One rollout batch may be trained on several times; what is not measured in a step is not logged with it.
        parts = reward_parts(batch.batch) if batch.index == 0 and trainer.is_global_zero else {}
        forget(trainer, "on_train_batch_end", self._parts - parts.keys())
        self._parts = set(parts)
        if batch.index != 0:
            return
        if trainer.is_global_zero:
            pl_module.log_dict(parts, on_step=True, on_epoch=False, batch_size=1, rank_zero_only=True)
        if self._batches % self.every_n_batches == 0:
            self._write(trainer, batch.batch, "train")
        self._batches += 1

    def on_predict_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        if batch_idx % self.every_n_batches == 0:
            self._write(trainer, batch.batch, "predict")

    def on_validation_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        if batch_idx == 0:
            self._write(trainer, batch.batch, batch.name)

    on_test_batch_end = on_validation_batch_end

    def _write(self, trainer: Trainer, batch: RolloutBatch | None, name: str) -> None:
        if not trainer.is_global_zero or batch is None:
            return
        tokenizer = getattr(trainer.datamodule, "tokenizer", None)
        rewards, _, of_sequence = earned(batch, call_rewards(batch))
        by_sequence = rewards[of_sequence]
        rows = [_describe(batch, i, float(by_sequence[i]), tokenizer) for i in _spread(by_sequence, self.samples)]
        rows = [{"step": trainer.global_step, "set": name, **row} for row in rows]
        assert self._path is not None
        told = ({"launch": self._launch, **row} for row in rows)
        append_lines(self._path, (json.dumps(row, ensure_ascii=False, default=str) for row in told))
        _to_loggers(trainer, f"samples/{name}", rows)


def reward_parts(batch: RolloutBatch) -> dict[str, float]:
    """`reward/<part>`: mean over the episodes whose reward has that part; `reward/failed`: share of the episodes whose
    reward failed and was scored instead; `reward/unreadable`: of those that the reward could not read and took for
    wrong. The last two are left out when there are none."""
    episodes = zip(batch.group_ids.tolist(), batch.episode_ids.tolist())  # numbered within a group, where others do so
    of_episode = dict(zip(episodes, batch.metadata, strict=True))
    values: dict[str, list[float]] = {}
    for metadata in of_episode.values():
        for name, part in metadata.get("reward_parts", {}).items():
            values.setdefault(well_formed(name), []).append(part)
    found = {f"reward/{name}": sum(parts) / len(parts) for name, parts in values.items()}
    for name in ("failed", "unreadable"):
        if count := sum(f"reward_{name}" in metadata for metadata in of_episode.values()):
            found[f"reward/{name}"] = count / len(of_episode)
    return found


def _next_launch(path: Path) -> int:
    """One more than that of the last sample in a file; those of an older version, which say none, are of the first."""
    if not (line := last_line(path)):
        return 0
    try:
        return int(json.loads(line).get("launch", 0)) + 1
    except (ValueError, TypeError, AttributeError):  # a line that somebody else wrote
        return 1


def _spread(rewards: Tensor, count: int) -> list[int]:
    """Indices of `count` sequences, evenly spaced in the order of their rewards [N], first and last included."""
    order = rewards.argsort(stable=True).tolist()
    count = min(count, len(order))
    if count == 1:
        return [order[-1]]
    return [order[round(k * (len(order) - 1) / (count - 1))] for k in range(count)]


def _describe(batch: RolloutBatch, index: int, reward: float, tokenizer: Any) -> dict[str, Any]:
    here = slice(int(batch.cu_seqlens[index]), int(batch.cu_seqlens[index + 1]))
    tokens, mask = batch.tokens[here], batch.loss_mask[here]
    trained = mask.nonzero().flatten()
    first = int(trained[0]) if trained.numel() else tokens.numel()

    def read(ids: Any) -> Any:
        return tokenizer.decode(ids.tolist()) if tokenizer is not None else ids.tolist()

    return {
        "version": int(batch.versions[here][mask].max()) if trained.numel() else -1,
        "prompt_id": batch.prompt_ids[index],
        "turn": int(batch.turn_indices[index]),
        "reward": reward,  # what its episode earned, with single calls
        "finish_reason": batch.finish_reasons[index],
        "tokens": tokens.numel(),
        "prompt": read(tokens[:first]),
        "completion": read(tokens[first:]),
        "metadata": batch.metadata[index],
    }


def _to_loggers(trainer: Trainer, key: str, rows: list[dict[str, Any]]) -> None:
    columns = [name for name in rows[0] if name != "metadata"]
    table = [
        [row[name] if isinstance(row[name], int | float) else well_formed(str(row[name])) for name in columns]
        for row in rows
    ]
    step = trainer.fit_loop.epoch_loop._batches_that_stepped  # by which Lightning logs the numbers beside them
    for logger in trainer.loggers:
        experiment: Any = logger.experiment
        if hasattr(logger, "log_table"):
            logger.log_table(key, columns=columns, data=table, step=step)
        elif hasattr(experiment, "add_text"):
            text = "\n\n".join(f"**{row['reward']:g}** {row['prompt']}`{row['completion']}`" for row in rows)
            experiment.add_text(key, well_formed(text), step)
