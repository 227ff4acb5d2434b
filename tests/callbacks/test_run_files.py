"""What a run leaves behind: metrics, samples, summary, pictures, exported model; validation at both ends."""

from __future__ import annotations

import csv
import json
import time
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging
from lightning.pytorch.loggers import CSVLogger, WandbLogger
from PIL import Image
from transformers import AutoModelForCausalLM, Qwen3Config

from app.batch import StepHandle
from callbacks import (
    Coach,
    Pictures,
    Report,
    RewardLogger,
    SavePretrained,
    Summary,
    Throughput,
    ValidateEnds,
    WeightSync,
    figures,
)
from callbacks.base import append_lines, last_line
from callbacks.pictures import read_metrics
from modules import ModelSource
from tests.helpers.recorded_samples import byte_tokenizer
from tests.helpers.tiny_model import TINY_MODEL
from tests.helpers.tiny_run import TinyData, TinyModule, trainer


def test_run_directory_is_complete(tmp_path: Path) -> None:
    run = tmp_path / "toy" / "now"
    module = TinyModule()
    callbacks = [WeightSync(), ValidateEnds(), RewardLogger(2, 2), Throughput(), Summary(), Pictures()]
    trainer(run, *callbacks, max_epochs=2).fit(module, datamodule=TinyData(batches=3))

    summary = json.loads((run / "summary.json").read_text())
    seconds = summary.pop("seconds")
    assert 0 < seconds < 120
    assert summary == {
        "accuracy_before": 0.0,
        "accuracy_after": 6.0,
        "steps": 6,
        "dense_tokens": 24,
        "leaf_tokens": 18,
        "tree_tokens": 12,
    }
    for name in ("reward_curve.png", "step_time.png", "tree.png"):
        with Image.open(run / name) as picture:
            assert min(picture.size) > 300, name

    series = read_metrics(run / "metrics.csv")
    assert series["reward"] == ([1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 6])
    assert series["val/accuracy"] == ([0, 6], [0.0, 6.0])


def test_validation_between_steps_is_placed_at_its_step(tmp_path: Path) -> None:
    run = tmp_path / "run"
    trainer(run, ValidateEnds(), val_check_interval=2).fit(TinyModule(), datamodule=TinyData(batches=5))
    assert read_metrics(run / "metrics.csv")["val/accuracy"] == ([0, 2, 4, 5], [0, 2, 4, 5])
    rows = csv.DictReader((run / "metrics.csv").read_text().splitlines())
    assert [int(row["step"]) for row in rows if row["val/accuracy"]] == [0, 1, 3, 4], "for loggers: the step before it"


def test_last_step_is_not_validated_twice(tmp_path: Path) -> None:
    run = tmp_path / "run"
    trainer(run, ValidateEnds(), val_check_interval=2).fit(TinyModule(), datamodule=TinyData(batches=4))
    assert read_metrics(run / "metrics.csv")["val/accuracy"][0] == [0, 2, 4]


def test_resumed_run_is_not_validated_at_its_start(tmp_path: Path) -> None:
    first = trainer(tmp_path / "a", max_steps=2)
    first.fit(TinyModule(), datamodule=TinyData(batches=5))
    first.save_checkpoint(tmp_path / "two.ckpt")
    summary = Summary()
    second = trainer(tmp_path / "b", ValidateEnds(), summary, max_epochs=-1, max_steps=5)
    second.fit(TinyModule(), datamodule=TinyData(batches=5), ckpt_path=tmp_path / "two.ckpt", weights_only=False)
    assert read_metrics(tmp_path / "b" / "metrics.csv")["val/accuracy"] == ([5], [5])
    written = json.loads((tmp_path / "b" / "summary.json").read_text())
    assert (written["steps"], written["accuracy_before"], written["accuracy_after"]) == (3, None, 5.0)


def test_validate_ends_without_data_says_so(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"ValidateEnds.*validation.prompts"):
        trainer(tmp_path / "run", ValidateEnds()).fit(TinyModule(), datamodule=TinyData(validate=False))


def test_samples_hold_lowest_and_highest_reward(tmp_path: Path) -> None:
    run = tmp_path / "run"
    data = TinyData(batches=3, count=2)
    trainer(run, RewardLogger(every_n_batches=2, samples=2), ValidateEnds()).fit(TinyModule(2), datamodule=data)
    rows = [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]
    train = [row for row in rows if row["set"] == "train"]
    assert [(row["step"], row["prompt_id"], row["reward"]) for row in train] == [
        (1, "prompt-0", 0.0),
        (1, "prompt-1", 1.0),
        (5, "prompt-20", 0.0),
        (5, "prompt-21", 1.0),
    ]
    assert train[0]["prompt"] == [1, 2] and train[0]["completion"] == [3, 10]  # ids: this datamodule has no tokenizer
    assert train[0]["version"] == 6 and train[0]["turn"] == 0 and train[0]["tokens"] == 4
    assert [row["step"] for row in rows if row["set"] == "held-out"] == [0, 0, 6, 6]


class StrictLogger(CSVLogger):
    """Takes tables as W&B does, and what UTF-8 can express alone."""

    tables: ClassVar[list[Any]] = []

    def log_table(self, key: str, columns: list[str], data: list[list[Any]], step: int) -> None:
        self.tables.append(json.dumps(data, ensure_ascii=False).encode())


class HalfCharacters(TinyData):
    """Half an emoji in everything that a data file, a tool or a workflow can name."""

    def train_dataloader(self) -> Any:
        for handle in super().train_dataloader():
            batch = handle.batch
            for texts in (batch.prompt_ids, batch.finish_reasons):
                texts[:] = [f"{text} \ud83d" for text in texts]
            half = {"answer": "\ud83d", "\ude00": ["\ud83d"], "reward_parts": {"f\ud83d": 1.0}}
            batch.metadata[:] = [dict(half) for _ in batch.metadata]
            yield handle


def test_half_characters_do_not_end_a_run(tmp_path: Path) -> None:
    run = tmp_path / "run"
    StrictLogger.tables.clear()
    options = {"logger": StrictLogger(str(tmp_path), name="", version="run"), "max_steps": 3}
    trainer(run, RewardLogger(1, 2), Pictures(), **options).fit(TinyModule(), datamodule=HalfCharacters())
    rows = [json.loads(line) for line in (run / "samples.jsonl").read_text(encoding="utf-8").splitlines()]
    assert len(rows) == 6 and len(StrictLogger.tables) == 3
    assert {row["metadata"]["answer"] for row in rows} == {"\ud83d"}  # an escape in the file, itself when read
    assert "reward/f\\ud83d" in read_metrics(run / "metrics.csv")


@pytest.mark.parametrize("name", ["every_n_batches", "samples"])
def test_reward_logger_refuses_zero(name: str) -> None:
    with pytest.raises(ValueError, match=f"RewardLogger.{name}"):
        RewardLogger(**{name: 0})


def test_pictures_need_metrics(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="CSVLogger"):
        trainer(tmp_path, Pictures(), logger=False).fit(TinyModule(), datamodule=TinyData())


def test_a_development_run_draws_nothing(tmp_path: Path) -> None:
    logger = CSVLogger(str(tmp_path), name="", version="run")
    trainer(tmp_path, Pictures(), logger=logger, fast_dev_run=True).fit(TinyModule(), datamodule=TinyData())
    assert not list(tmp_path.rglob("*.png"))


@pytest.mark.parametrize(("given", "drawn"), [(None, [1.0, 2.0, 3.0]), ("reward", [0.5, 0.5, 0.5])])
def test_the_reward_curve_is_of_all_that_was_played(
    given: Any, drawn: list[float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Logs(TinyModule):
        def on_train_batch_end(self, *unused: Any) -> None:
            self.log_dict({"rollouts/reward": float(self.trainer.global_step), "reward": 0.5})

    draw, seen = figures.reward_curve, list[list[float]]()
    monkeypatch.setattr(figures, "reward_curve", lambda *given: seen.append(list(given[1])) or draw(*given))
    trainer(tmp_path / "run", Pictures(reward=given)).fit(Logs(), datamodule=TinyData(batches=3))
    assert seen[-1] == drawn


def test_pictures_name_what_they_cannot_draw(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with pytest.warns(UserWarning, match="step_time.png not drawn.*Throughput"):
        trainer(run, Pictures()).fit(TinyModule(), datamodule=TinyData())
    assert (run / "reward_curve.png").exists() and not (run / "step_time.png").exists()


class LanguageModelModule(TinyModule):
    def __init__(self) -> None:
        super().__init__()
        config = Qwen3Config(**{**TINY_MODEL, "tie_word_embeddings": False})
        self.policy = AutoModelForCausalLM.from_config(config)

    def training_step(self, handle: StepHandle, batch_idx: int) -> torch.Tensor:
        return self.policy.lm_head.weight.sum()


def test_export_loads_in_transformers_with_the_trained_weights(tmp_path: Path) -> None:
    module = LanguageModelModule()
    before = module.policy.lm_head.weight.detach().clone()
    trainer(tmp_path / "run", SavePretrained("hf"), max_steps=1).fit(module, datamodule=TinyData(validate=False))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "hf").state_dict()
    assert torch.equal(loaded["lm_head.weight"], before - 1)
    assert all(torch.equal(loaded[name], value) for name, value in module.policy.state_dict().items())


def test_an_export_in_front_of_the_average_of_weights_is_refused(tmp_path: Path) -> None:
    average = EMAWeightAveraging(decay=0.5)
    with pytest.raises(ValueError, match=r"SavePretrained stands before EMAWeightAveraging.* name it behind"):
        trainer(tmp_path, SavePretrained(), average).fit(LanguageModelModule(), datamodule=TinyData(validate=False))
    module = LanguageModelModule()
    run = trainer(tmp_path / "run", average, SavePretrained("hf"), max_steps=2)
    begun = module.policy.lm_head.weight.detach().clone()
    run.fit(module, datamodule=TinyData(validate=False))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "hf").state_dict()
    torch.testing.assert_close(loaded["lm_head.weight"], begun - 1.5)  # of begun - 1 and begun - 2


def test_an_export_is_kept_in_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import wandb

    monkeypatch.setenv("WANDB_SILENT", "true")
    data, callback = TinyData(validate=False), SavePretrained(artifact="the_export")
    with pytest.raises(ValueError, match=r"SavePretrained\.artifact: the_export .*WandbLogger"):
        trainer(tmp_path / "none", callback, max_steps=1).fit(LanguageModelModule(), datamodule=data)
    fit = trainer(tmp_path / "run", callback, max_steps=1)
    fit.loggers.append(WandbLogger(offline=True, save_dir=tmp_path))
    fit.fit(LanguageModelModule(), datamodule=data)
    wandb.finish()
    (file,) = tmp_path.rglob("*.wandb")  # what would be sent; its writer is a process that may close it later
    wanted, end = (b"the_export", b"config.json", b"model.safetensors"), time.monotonic() + 120.0
    while missing := [name for name in wanted if name not in logged(file.read_bytes())]:
        assert time.monotonic() < end, missing
        time.sleep(0.1)


def logged(data: bytes) -> bytes:
    """What W&B's file holds, one record after the other: it is a log of LevelDB's kind, whose blocks cut records."""
    found, at, block, header = b"", 7, 2**15, 7
    while at + header <= len(data):
        if (room := block - at % block) < header:
            at += room
            continue
        size = int.from_bytes(data[at + 4 : at + 6], "little")
        found += data[at + header : at + header + size]
        at += header + size
    return found


def test_export_brings_the_tokenizer_of_the_model_it_began_with(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    module: Any = LanguageModelModule()
    byte_tokenizer().save_pretrained(tmp_path / "began")
    for began, says in (("began", False), ("nowhere", True)):
        module.model_source = ModelSource(path=str(tmp_path / began))
        fit = trainer(tmp_path / began / "run", SavePretrained("hf"), max_steps=1)
        fit.fit(module, datamodule=TinyData(validate=False))
        saved = (tmp_path / began / "run" / "hf" / "tokenizer.json").exists()
        assert saved is not says and ("no tokenizer beside the weights" in caplog.text) is says


HALF = '{"step": 1, "set": "train", "prompt": "half'


@pytest.mark.parametrize("before", ["", '{"step": 1}\n', f'{{"step": 1, "text": "{"long " * 50_000}"}}\n'])
def test_what_a_kill_left_of_a_line_does_not_spoil_the_next(tmp_path: Path, before: str) -> None:
    file = tmp_path / "made" / "rows.jsonl"
    append_lines(file, [])
    file.write_text(before + HALF * 4_000)
    append_lines(file, ['{"step": 2}', '{"step": 3, "text": "\ud83d"}'])
    assert file.read_text() == before + '{"step": 2}\n{"step": 3, "text": "\\ud83d"}\n'


@pytest.mark.parametrize(
    ("written", "last"),
    [
        ("", ""),
        ("half", ""),
        ("\n", ""),
        ("a\n", "a"),
        ("a\nb\nhalf", "b"),
        (f"a\n{'b' * 200_000}\n{HALF}", "b" * 200_000),
    ],
)
def test_the_last_line_is_the_last_whole_one(tmp_path: Path, written: str, last: str) -> None:
    assert last_line(tmp_path / "rows.jsonl") == b""
    (tmp_path / "rows.jsonl").write_text(written)
    assert last_line(tmp_path / "rows.jsonl").decode() == last


def test_files_of_lines_are_readable_after_a_kill(tmp_path: Path) -> None:
    names = ("samples.jsonl", "report.jsonl", "coach.jsonl")
    for name in names:
        (tmp_path / name).write_text(HALF)
    trainer(tmp_path, ValidateEnds(), RewardLogger(1, 2), Report()).fit(TinyModule(), datamodule=TinyData(batches=2))
    coach = Coach()
    coach._path = tmp_path / "coach.jsonl"
    coach._write(2, [], ["flat"])
    for name in names:
        rows = [json.loads(line) for line in (tmp_path / name).read_text().splitlines()]
        assert rows and all("step" in row for row in rows), name


def test_a_disk_that_is_full_is_told_with_the_file(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left") as caught:
        append_lines(tmp_path / "rows.jsonl", ["{}"])
    assert caught.value.filename == str(tmp_path / "rows.jsonl")
