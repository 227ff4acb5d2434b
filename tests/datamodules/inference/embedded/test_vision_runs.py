"""A model that sees is trained from prompts to checkpoint: what was sampled is what is trained on, recorded or not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.loggers import CSVLogger

from app.batch import BatchError
from callbacks.pictures import read_metrics
from callbacks.save_pretrained import SavePretrained
from callbacks.weight_sync import WeightSync
from datamodules.files.recording import read_batch
from datamodules.groups import to_batch
from datamodules.inference import EmbeddedEngine
from datamodules.prompts import SquaresPrompts
from datamodules.replay import ReplayDataModule
from datamodules.supervised import SupervisedDataModule
from datamodules.workflows import VisionRLVRWorkflow
from examples.vision.make_model import write
from modules import ModelSource, PolicyModule, SFTModule
from modules.ranks import build_tree
from modules.supervised.reward_model import with_scores
from tests.datamodules.rewards.reward_functions import length
from tests.datamodules.test_rollout import rollouts, tiny_model, trainer
from tests.helpers import tiny_layouts
from tests.helpers.pictured import pictured_batch
from tests.helpers.selection import SEES, skip_without, some


@pytest.fixture(scope="module", params=["Qwen3-VL", "Idefics3", "Gemma 4, shared keys", "Gemma 4, large", "Gemma 3"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    """With pictures of a grid, in tiles, and as many patches at their places; one that sees itself."""
    skip_without(SEES)
    directory = tmp_path_factory.mktemp("model")
    if request.param == "Qwen3-VL":
        write(directory, hidden=32, tower=16)
    else:
        tiny_layouts.write(directory, request.param, sharp=1.0)
    return str(directory)


def policy(model: str, tower: bool) -> PolicyModule:
    return PolicyModule(
        ModelSource(path=model, train_tower=tower),
        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-2),
        chunk_tokens=64,
        live_tokens=256,
        self_check="skip",
    )


def seen(model: str, **options: Any) -> Any:
    made = {"prompts": SquaresPrompts(seed=1), "workflow": VisionRLVRWorkflow(max_new_tokens=3), "tokenizer": model}
    engine = EmbeddedEngine(kv_cache_tokens=2048, num_threads=1)
    return rollouts(**made, engine=engine, reward=length, batch_size=3, max_staleness=0, batches_per_epoch=2, **options)


def moved(module: Any, model: str) -> tuple[bool, bool]:
    """Whether the tower has, and the language model."""
    started = policy(model, True)
    started.configure_model()
    before = dict(started.policy.named_parameters())  # type: ignore[union-attr]
    changed = {name for name, p in module.policy.named_parameters() if not torch.equal(p, before[name])}
    tower = {name for name in changed if not any(part in name for part in ("language_model", "text_model", "lm_head"))}
    return bool(tower), bool(changed - tower)


@pytest.mark.parametrize("tower", some([True, False], [True]), ids=["tower trained", "tower frozen"])
def test_what_is_sampled_is_what_is_trained(tmp_path: Path, model: str, tower: bool) -> None:
    module = policy(model, tower)
    log = CSVLogger(str(tmp_path), name="", version="", flush_logs_every_n_steps=1)
    callbacks = [WeightSync(), SavePretrained()]
    options: dict[str, Any] = {"max_epochs": 1, "log_every_n_steps": 1, "logger": log, "callbacks": callbacks}
    trainer(tmp_path, **options).fit(module, datamodule=seen(model, record="rollouts"))
    assert max(read_metrics(tmp_path / "metrics.csv")["logprob_diff_max"][1]) < 1e-5
    assert moved(module, model) == (tower, True)
    batches = [to_batch(read_batch(tmp_path / "rollouts", version)) for version in range(2)]
    assert [len(batch.pictures) for batch in batches] == [1, 1]  # three questions about it
    assert build_tree(batches[0], "tree").num_tokens < build_tree(batches[0], "leaf").num_tokens / 2
    again = policy(model, tower)
    trainer(tmp_path / "again", callbacks=[], max_epochs=1).fit(
        again, datamodule=ReplayDataModule(f"{tmp_path}/rollouts")
    )
    mine, theirs = module.state_dict(), again.state_dict()
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)
    assert (tmp_path / "model" / "preprocessor_config.json").is_file()  # and is taken from there:
    data = SupervisedDataModule(SquaresPrompts(seed=2), str(tmp_path / "model"), batch_size=6)
    imitated = SFTModule(ModelSource(path=str(tmp_path / "model")), self_check="skip")
    trainer(tmp_path / "sft", callbacks=[], max_steps=1).fit(imitated, datamodule=data)
    assert len(data.batch(0).pictures) == 2


def test_a_tower_that_is_not_there_cannot_be_trained(tmp_path: Path) -> None:
    tiny_model().save_pretrained(tmp_path)
    module = PolicyModule(ModelSource(path=str(tmp_path), train_tower=True))
    with pytest.raises(ValueError, match=r"model.train_tower has no effect: a qwen3 sees no pictures"):
        module.configure_model()


def test_scores_of_sequences_with_pictures_keep_them() -> None:
    batch = pictured_batch()
    scored = with_scores(batch)
    assert scored.images is not None and [one.key for one in scored.pictures] == [one.key for one in batch.pictures]
    for mine, theirs in zip(scored.split(scored.images), batch.split(batch.images), strict=True):  # type: ignore[arg-type]
        assert mine.tolist() == [*theirs.tolist(), -1]
    with pytest.raises(BatchError, match="a picture ends after"):
        batch.images[1] = -1  # type: ignore[index]
        batch.select([0, 1])
