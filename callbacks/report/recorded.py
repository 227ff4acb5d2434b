"""Recorded rollouts as the report shows them: batches that a run recorded, version by version, or recorded
conversations, task by task.

Promises: every group is in a tree, or counted as not shown; what cannot be read is refused by file and field.
"""

from __future__ import annotations

from pathlib import Path

import yaml

from app.batch import RolloutBatch
from app.statistics import equal
from callbacks.report.moments import MOST_TOKENS, batch_moment, trained_tree
from callbacks.report.runs import RunData
from datamodules.conversations.sessions import no_batches
from datamodules.conversations.tokens import Workload
from datamodules.files.recording import read_batch, versions
from datamodules.groups import to_batch
from datamodules.prompts.tokenizers import load_tokenizer
from datamodules.recorded import RecordedDataModule
from modules.episodes import call_rewards, earned


def read_recorded(
    path: Path, workload: Workload = "whole", tokenizer: str | None = None, system: Path | None = None
) -> RunData:
    """What is recorded at `path`: a directory of `batch_*.safetensors`, or conversations (`RecordedDataModule`).

    Args:
        workload: how conversations are cut. tokenizer: directory, for text and to read token ids by; of batches by
            default the one their run was configured with. system: `*_system.json`, for conversations as text.

    Raises:
        ValueError: a file or option that cannot be used, naming it.
    """
    if path.is_dir() and versions(path):
        return _batches(path, tokenizer)
    if path.is_dir():
        raise no_batches(path)
    data = RecordedDataModule(
        str(path),
        workload,
        tokenizer=None if path.suffix == ".npz" else tokenizer,  # of token arrays it reads nothing
        system=None if system is None else str(system),
        unrewarded="keep",
        shuffle=False,
    )
    data.setup("fit")
    decoder = None if tokenizer is None else load_tokenizer(tokenizer)
    found = RunData(path.name)
    each = max(trained_tree(data.batch(i)).num_tokens for i in range(data.num_tasks))
    data.tasks_per_batch = min(data.num_tasks, max(1, MOST_TOKENS // each))
    for part in range(data.batches_per_pass):
        batch, first = data.batch(part), part * data.tasks_per_batch
        if decoder is not None and int(batch.tokens.max()) >= len(decoder):
            raise ValueError(
                f"--tokenizer: {tokenizer} has {len(decoder):,} ids, {path} holds {int(batch.tokens.max())}"
            )
        last = first + len(batch.group_ids.unique())
        found.batches.append(
            {
                "step": part + 1,
                "label": f"tasks {first + 1} to {last} of {data.num_tasks}",
                **batch_moment(batch, decoder),
            }
        )
    return found


def _batches(path: Path, tokenizer: str | None) -> RunData:
    found = RunData(f"{path.absolute().parent.name}/{path.name}")
    config = path.parent / "config.yaml"
    if config.exists():
        found.config = yaml.safe_load(config.read_text("utf-8")) or {}
    spec = tokenizer or ((found.config.get("data") or {}).get("init_args") or {}).get("tokenizer")
    decoder = load_tokenizer(spec) if spec and (spec.startswith("char:") or Path(spec).is_dir()) else None
    if decoder is None:
        found.notes.append("no tokenizer is known (--tokenizer DIR names one): token ids are shown")
    known = versions(path)
    for number, version in enumerate(known, 1):
        batch = to_batch(read_batch(path, version))
        for name, value in _numbers(batch).items():
            steps, values = found.series.setdefault(name, ([], []))
            steps.append(float(version + 1))
            values.append(value)
        if number & (number - 1) == 0 or number == len(known):
            found.batches.append({"step": version + 1, "label": f"version {version}", **batch_moment(batch, decoder)})
    return found


def _numbers(batch: RolloutBatch) -> dict[str, float]:
    """The metrics that a batch itself tells, by the names they have in a run."""
    rewards, groups, _ = earned(batch, call_rewards(batch))
    of_group: dict[int, list[float]] = {}
    for group, reward in zip(groups.tolist(), rewards.tolist(), strict=True):
        of_group.setdefault(group, []).append(reward)
    flat = [equal(one) for one in of_group.values()]
    tree = trained_tree(batch)
    return {
        "reward": float(rewards.mean()),
        "rollouts/flat": sum(flat) / len(flat),
        "rollouts/length": float(batch.loss_mask.sum()) / len(rewards),
        "tokens/dense": float(tree.num_dense_tokens),
        "tokens/leaf": float(tree.num_leaf_tokens),
        "tokens/tree": float(tree.num_tokens),
    }
