"""Recorded rollouts: read back bit for bit, trained on to the same parameters, and refused when broken."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from safetensors.torch import load_file, save_file

from app.batch import Trajectory
from callbacks.pictures import Pictures, read_metrics
from callbacks.reward_logger import RewardLogger
from callbacks.weight_sync import WeightSync
from datamodules.files.picture_files import write_png
from datamodules.files.recording import AlreadyRecorded, RecordingError, RolloutRecorder, read_batch, versions
from datamodules.groups import Group, pack, to_batch, unpack
from datamodules.prompts import Prompt, PromptSource
from datamodules.replay import ReplayDataModule
from datamodules.rollout import RolloutDataModule
from datamodules.workflows import RLVRWorkflow
from modules import ModelSource, PolicyModule
from tests.datamodules.files.half_rewards import half_reward
from tests.datamodules.test_rollout import rollouts, tiny_model, trainer
from tests.helpers.links import without_links
from tests.helpers.pictured import picture, pictured


def some_groups(first: int = 0) -> list[Group]:
    def turn(index: int, sample: int, number: int) -> Trajectory:
        rng = torch.Generator().manual_seed(100 * index + 10 * sample + number)
        length = 5 + number
        return Trajectory(
            tokens=torch.randint(0, 1000, (length,), generator=rng),
            loss_mask=torch.arange(length) > 2,
            behavior_logprobs=-torch.rand(length, generator=rng),
            versions=torch.where(torch.arange(length) > 2, 3, -1),
            reward=sample / 3,
            group_id=index,
            episode_id=index * 2 + sample,
            turn_index=number,
            prompt_id=f"prompt \u00e9 {index}",
            finish_reason="length" if number else "stop",
            temperature=0.7,
            metadata={"answer": [1, None, "x"], "nested": {"a": 0.1}},
        )

    return [
        Group(index, f"prompt \u00e9 {index}", 2, [turn(index, s, t) for s in range(2) for t in range(1 + s)])
        for index in range(first, first + 2)
    ]


@pytest.mark.parametrize("has_hard_links", [True, False])
def test_what_another_process_has_written_is_not_overwritten(
    has_hard_links: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if not has_hard_links:
        monkeypatch.setattr(os, "link", without_links)
    path = RolloutRecorder(tmp_path).write(3, some_groups())
    written = path.read_bytes()
    with pytest.raises(AlreadyRecorded, match=r"batch_00000003.safetensors is there already"):
        RolloutRecorder(tmp_path).write(3, some_groups(7))
    assert path.read_bytes() == written and [one.name for one in tmp_path.iterdir()] == [path.name]


@pytest.fixture(scope="module")
def initial(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    tiny_model().save_pretrained(path)
    return path


def policy(initial: Path, **options: Any) -> PolicyModule:
    return PolicyModule(
        ModelSource(path=str(initial)),
        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-2),
        tree_training_mode="dta",
        chunk_tokens=64,  # fixed, as free memory is not: the same chunks, the same rounding
        live_tokens=256,
        **options,
    )


def parameters(module: L.LightningModule) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


# ---- files


def test_what_is_written_is_read_back_bit_for_bit(tmp_path: Path) -> None:
    recorder = RolloutRecorder(tmp_path / "new")
    for version in (3, 12):
        recorder.write(version, some_groups(version))
    assert versions(tmp_path / "new") == [3, 12]
    for version in (3, 12):
        read = read_batch(tmp_path / "new", version)
        assert [(one.index, one.prompt_id, one.admitted_at, len(one.trajectories)) for one in read] == [
            (version, f"prompt \u00e9 {version}", 2, 3),
            (version + 1, f"prompt \u00e9 {version + 1}", 2, 3),
        ]
        mine, theirs = to_batch(read), to_batch(some_groups(version))
        assert same(mine.tensors(), theirs.tensors())
        for name in ("prompt_ids", "finish_reasons", "metadata"):
            assert getattr(mine, name) == getattr(theirs, name)
    assert [path.suffix for path in (tmp_path / "new").iterdir()] == [".safetensors"] * 2


def test_broken_files_are_refused_by_name(tmp_path: Path) -> None:
    path = RolloutRecorder(tmp_path).write(1, some_groups())
    whole = path.read_bytes()
    for broken in (b"", whole[:-10], whole[: len(whole) // 3], b"{" + whole[1:], b"\x80\x04." + whole):
        path.write_bytes(broken)
        with pytest.raises(RecordingError, match=re.escape(f"{path}: not a whole recorded batch")):
            read_batch(tmp_path, 1)
    path.write_bytes(whole)
    tensors = load_file(path)
    save_file(tensors, path, metadata={"format": "other"})
    with pytest.raises(RecordingError, match="of format 'other', expected 'arborist-rollouts-2'"):
        read_batch(tmp_path, 1)
    with pytest.raises(RecordingError, match=r"no batch that was trained at version 2 .it holds versions 1 to 1"):
        read_batch(tmp_path, 2)


def test_a_changed_bit_is_refused_by_name(tmp_path: Path) -> None:
    path = RolloutRecorder(tmp_path).write(1, some_groups())
    whole = path.read_bytes()
    for at in range(len(whole) - 400, len(whole), 7):  # rewards, temperatures: numbers as good as others
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        with pytest.raises(RecordingError, match=re.escape(f"{path}: damaged, its contents are not those of its SHA-")):
            read_batch(tmp_path, 1)
    path.write_bytes(whole)
    path.rename(tmp_path / "batch_00000002.safetensors")
    with pytest.raises(RecordingError, match=r"batch_00000002\.safetensors: holds the batch of version 1"):
        read_batch(tmp_path, 2)


def test_long_texts_do_not_fill_the_header(tmp_path: Path) -> None:
    """safetensors takes headers of at most 100 MB."""
    groups = some_groups()
    groups[0].trajectories[0].metadata["completion"] = "long " * 100_000 + "\ud83d"
    path = RolloutRecorder(tmp_path).write(1, groups)
    assert int.from_bytes(path.read_bytes()[:8], "little") < 5_000
    assert to_batch(read_batch(tmp_path, 1)).metadata == to_batch(groups).metadata


def pictured_groups(first: int = 0) -> list[Group]:
    """Of two pictures each, one of which all of them show."""
    shared = picture(0, height=7, width=5)
    groups = []
    for index in range(first, first + 2):
        own = picture(index + 1)
        layouts = ([1, shared, 2, own, 3], [1, own, 2], [4, 5])
        shown = [pictured(list(layout), group_id=index, episode_id=index * 3 + i) for i, layout in enumerate(layouts)]
        groups.append(Group(index, "shown", 2, shown))
    return groups


def assert_pictures_equal(mine: list[Group], theirs: list[Group]) -> None:
    one, other = to_batch(mine), to_batch(theirs)
    assert same(one.tensors(), other.tensors()) and len(one.pictures) == 3
    for a, b in zip(one.pictures, other.pictures, strict=True):
        assert (a.key, a.tokens, a.pixels.shape) == (b.key, b.tokens, b.pixels.shape)
        assert a.pixels.tobytes() == b.pixels.tobytes()


def test_pictures_are_recorded_once_a_folder_and_read_back_bit_for_bit(tmp_path: Path) -> None:
    recorder = RolloutRecorder(tmp_path)
    recorder.write(0, pictured_groups())
    shown = {path: path.stat().st_mtime_ns for path in (tmp_path / "pictures").iterdir()}
    recorder.write(1, pictured_groups())
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "pictures").iterdir()} == shown and len(shown) == 3
    recorder.write(2, pictured_groups(1))
    assert len(list((tmp_path / "pictures").iterdir())) == 4
    recorder.write(3, some_groups())
    for version, groups in enumerate((pictured_groups(), pictured_groups(), pictured_groups(1))):
        assert_pictures_equal(read_batch(tmp_path, version), groups)
    assert to_batch(read_batch(tmp_path, 3)).pictures == ()
    assert max(path.stat().st_size for path in tmp_path.glob("*.safetensors")) < 10_000


def test_recorded_pictures_that_are_damaged_or_gone_are_refused_by_name(tmp_path: Path) -> None:
    RolloutRecorder(tmp_path).write(0, pictured_groups())
    path = next(iter(sorted((tmp_path / "pictures").iterdir())))
    whole = path.read_bytes()
    for broken in (b"", whole[:40], whole[:-30], b"GIF89a", whole.replace(b"IDAT", b"IDAX")):
        path.write_bytes(broken)
        with pytest.raises(
            RecordingError, match=rf"{path}: cannot be read as a PNG file .*copy pictures/ with"
        ) as told:
            read_batch(tmp_path, 0)
        assert "\n" not in str(told.value)
    other = picture(77)
    path.unlink()
    with pytest.raises(RecordingError, match=rf"{path}: cannot be read as a PNG file"):
        read_batch(tmp_path, 0)
    write_png(path, other.pixels)
    with pytest.raises(RecordingError, match=rf"{path}: damaged, its pixels are not those that were recorded"):
        read_batch(tmp_path, 0)


def test_pictures_are_in_the_state_of_a_stream_once(tmp_path: Path) -> None:
    packed = pack(pictured_groups())
    assert len(packed["pictures"]) == 3 and "pictures" not in pack(some_groups())
    torch.save(packed, tmp_path / "state")
    loaded = torch.load(tmp_path / "state", weights_only=True)
    assert_pictures_equal(unpack(loaded), pictured_groups())


def in_the_format_before(**changes: Any) -> dict[str, Any]:
    packed = pack(some_groups()) | changes
    tensors = packed.pop("tensors")
    metadata = {"format": "arborist-rollouts-1", "version": "1", "batch": json.dumps(packed)}
    return {"tensors": tensors, "metadata": metadata}


def test_recordings_of_the_format_before_are_read(tmp_path: Path) -> None:
    path = tmp_path / "batch_00000001.safetensors"
    save_file(**in_the_format_before(), filename=path)
    assert same(to_batch(read_batch(tmp_path, 1)).tensors(), to_batch(some_groups()).tensors())
    for broken in (
        {"groups": [[0, "p", 2, 3]]},
        {"groups": [[0, "p", 2, 7], [1, "q", 2, -1]]},
        {"groups": [[None, "p", 2, 6]]},
        {"groups": [[0, "p", 2]]},
        {"prompt_ids": [7] * 6},
        {"metadata": "[" * 100_000},
        {"metadata": "[1, 2, 3, 4, 5, 6]"},
    ):
        save_file(**in_the_format_before(**broken), filename=path)
        with pytest.raises(RecordingError, match=r"batch_00000001.safetensors: not a recorded batch .*; record it"):
            read_batch(tmp_path, 1)


def test_a_recording_is_never_overwritten_and_a_full_disk_is_said(tmp_path: Path) -> None:
    recorder = RolloutRecorder(tmp_path)
    recorder.write(4, some_groups())
    recorder.begin(5, goes_on=False)
    with pytest.raises(RecordingError, match="already holds batches of versions 4 to 4, of another run"):
        recorder.begin(4, goes_on=False)
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    with pytest.raises(RecordingError, match=r"the batch of version 0 could not be written to .*file"):
        RolloutRecorder(blocked / "deeper").write(0, some_groups())
    with pytest.raises(RecordingError, match=r"^record: .*file is no directory; name another"):
        RolloutRecorder(blocked / "deeper").begin(0, goes_on=False)  # before anything is rolled out


# ---- training


class HalfCharacters(PromptSource):
    """Prompts in which everything but what the model reads holds half an emoji."""

    size = None

    def deal(self, index: int) -> Prompt:
        half = f"{index} \ud83d"
        return Prompt(id=half, text="1+1=", answer=half, solution=half, metadata={half: [half]})


class SaysHalf(RLVRWorkflow):
    async def run(self, engine: Any, prompt: Prompt) -> list[Trajectory]:
        trajectories = await super().run(engine, prompt)
        for one in trajectories:
            one.metadata |= {"tool": "\udc00", **prompt.metadata}
        return trajectories


def half_rollouts(**options: Any) -> RolloutDataModule:
    made = {"prompts": HalfCharacters(), "workflow": SaysHalf(max_new_tokens=2), "reward": half_reward}
    return rollouts(max_staleness=1, **made, **options)


@pytest.mark.slow
def test_half_characters_go_through_a_run_and_its_files(tmp_path: Path, initial: Path) -> None:
    data = half_rollouts(batches_per_epoch=2, record="rollouts")
    log = CSVLogger(str(tmp_path), name="", version="", flush_logs_every_n_steps=1)
    checkpoint = ModelCheckpoint(tmp_path / "ckpt", every_n_train_steps=1, save_top_k=-1)
    callbacks = [WeightSync(), RewardLogger(1, 12), checkpoint, Pictures()]
    options = {
        "callbacks": callbacks,
        "max_epochs": 1,
        "enable_checkpointing": True,
        "logger": log,
        "log_every_n_steps": 1,
    }
    trainer(tmp_path, **options).fit(policy(initial), datamodule=data)
    assert versions(tmp_path / "rollouts") == [0, 1]
    rows = [json.loads(one) for one in (tmp_path / "samples.jsonl").read_text(encoding="utf-8").splitlines()]
    assert len(rows) == 24 and all("ud83d" in row["metadata"]["answer"] for row in rows)
    assert "reward/f\\ud83d" in read_metrics(tmp_path / "metrics.csv")
    for group in read_batch(tmp_path / "rollouts", 1):
        assert all("tool" in one.metadata for one in group.trajectories)
    resumed = policy(initial)
    options |= {"callbacks": [WeightSync(), RewardLogger(1, 12)], "max_epochs": 2, "logger": False}
    checkpoint_path = next((tmp_path / "ckpt").glob("*step=1.ckpt"))
    trainer(tmp_path / "on", **options).fit(
        resumed, datamodule=half_rollouts(batches_per_epoch=2), ckpt_path=checkpoint_path, weights_only=True
    )
    assert resumed.policy_version == 4


def test_training_from_the_recording_ends_with_the_same_parameters(tmp_path: Path, initial: Path) -> None:
    """Asynchronous rollouts, two steps a batch: what no seed could repeat, a recording does."""
    recorded = policy(initial, minibatches=2, epochs=1)
    data = rollouts(max_staleness=2, batches_per_epoch=5, record="rollouts")
    checkpoint = ModelCheckpoint(tmp_path / "ckpt", every_n_train_steps=3, save_top_k=-1, filename="{step}")
    options = {"max_epochs": 1, "enable_checkpointing": True}
    trainer(tmp_path, callbacks=[WeightSync(), checkpoint], **options).fit(recorded, datamodule=data)
    directory = tmp_path / "rollouts"
    assert versions(directory) == [0, 1, 2, 3, 4]
    assert not same(parameters(recorded), parameters(started := started_policy(initial))), started

    replayed = policy(initial, minibatches=2, epochs=1)
    again = trainer(tmp_path, callbacks=[], max_epochs=20)  # ends with the recording, not after 20 epochs
    again.fit(replayed, datamodule=ReplayDataModule(str(directory)))
    assert again.global_step == 10 and replayed.policy_version == 5
    assert same(parameters(replayed), parameters(recorded))

    resumed = policy(initial, minibatches=2, epochs=1)  # from the recorded run's own checkpoint, within a batch
    resume = {"ckpt_path": tmp_path / "ckpt" / "step=3.ckpt", "weights_only": True}
    trainer(tmp_path, callbacks=[], max_epochs=20).fit(resumed, datamodule=ReplayDataModule(str(directory)), **resume)
    assert resumed.policy_version == 5 and same(parameters(resumed), parameters(recorded))

    finished = trainer(tmp_path, callbacks=[], max_epochs=20)
    with pytest.raises(RecordingError, match="ends with the batch of version 4, and the policy is at 5 already"):
        finished.fit(replayed, datamodule=ReplayDataModule(str(directory)))


def started_policy(initial: Path) -> PolicyModule:
    module = policy(initial)
    module.configure_model()
    return module


def test_a_run_that_was_killed_goes_on_and_sets_aside_what_it_plays_again(
    tmp_path: Path, initial: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def fit(batches: int, **options: Any) -> None:
        data = rollouts(max_staleness=1, batches_per_epoch=batches, record="rollouts")
        checkpoint = ModelCheckpoint(tmp_path / "ckpt", every_n_train_steps=1, save_top_k=-1, filename="{step}")
        callbacks = {"callbacks": [WeightSync(), checkpoint], "enable_checkpointing": True, "max_epochs": 1}
        trainer(tmp_path, **callbacks).fit(policy(initial), datamodule=data, **options)

    def held(directory: Path) -> dict[int, bytes]:
        return {
            version: (directory / f"batch_{version:08d}.safetensors").read_bytes() for version in versions(directory)
        }

    directory = tmp_path / "rollouts"
    fit(3)  # killed now, the last checkpoint that is whole being that of step 1
    first = held(directory)
    with caplog.at_level("WARNING"):
        fit(2, ckpt_path=tmp_path / "ckpt" / "step=1.ckpt", weights_only=True)
    assert list(first) == [0, 1, 2] and held(directory / "superseded_0") == {k: first[k] for k in (1, 2)}
    assert list(held(directory)) == [0, 1] and held(directory)[0] == first[0]
    assert f"versions 1 to 2, recorded after that checkpoint, are set aside in {directory}/superseded_0" in caplog.text
    replayed = policy(initial)
    trainer(tmp_path, callbacks=[], max_epochs=9).fit(replayed, datamodule=ReplayDataModule(str(directory)))
    assert replayed.policy_version == 2

    before = held(directory)
    fit(1)  # killed before its first checkpoint: `--ckpt_path last` begins anew in the same run directory
    assert list(held(directory)) == [0] and held(directory / "superseded_1") == before


def test_rolling_out_only_trains_nothing_and_can_be_trained_on(tmp_path: Path, initial: Path) -> None:
    module = policy(initial)
    data = rollouts(max_staleness=1, batches_per_epoch=4, record="only", batch_size=3)
    numbers = trainer(tmp_path).predict(module, datamodule=data)
    assert [(one["prompts"], one["episodes"]) for one in numbers] == [(3, 9)] * 4
    assert same(parameters(module), parameters(started_policy(initial)))
    batches = [read_batch(tmp_path / "only", version) for version in versions(tmp_path / "only")]
    assert len(batches) == 4 and len({group.index for batch in batches for group in batch}) == 12
    assert all(
        set(one.versions[one.loss_mask].tolist()) == {0} for batch in batches for g in batch for one in g.trajectories
    )
    assert data.counters()["trained"] == 12
    trained = policy(initial)
    trainer(tmp_path, callbacks=[]).fit(trained, datamodule=ReplayDataModule(str(tmp_path / "only")))
    assert trained.policy_version == 4 and not same(parameters(trained), parameters(module))


def test_rolling_out_a_checkpoint_has_samples_of_its_weights_alone(tmp_path: Path, initial: Path) -> None:
    """Those of older weights that its run still had to train on are played again."""
    trained = policy(initial, minibatches=2, epochs=1)
    checkpoint = ModelCheckpoint(tmp_path / "ckpt", every_n_train_steps=1, save_top_k=-1, filename="{step}")
    callbacks = {"callbacks": [WeightSync(), checkpoint], "enable_checkpointing": True, "max_epochs": 1}
    trainer(tmp_path, **callbacks).fit(trained, datamodule=rollouts(max_staleness=1, batches_per_epoch=2))
    for step, version in ((2, 1), (3, 1)):  # between two batches, and within one
        data = rollouts(max_staleness=1, batches_per_epoch=2, record=f"from_{step}")
        loaded = {"ckpt_path": tmp_path / "ckpt" / f"step={step}.ckpt", "weights_only": True}
        trainer(tmp_path).predict(policy(initial, minibatches=2, epochs=1), datamodule=data, **loaded)
        batches = [read_batch(tmp_path / f"from_{step}", at) for at in versions(tmp_path / f"from_{step}")]
        played = [one for batch in batches for group in batch for one in group.trajectories]
        assert len(batches) == 2 and {int(at) for one in played for at in one.versions[one.loss_mask]} == {version}


def test_replay_refuses_by_name(tmp_path: Path, initial: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"data\.path: there is no directory '.*nowhere'"):
        trainer(tmp_path, callbacks=[]).fit(policy(initial), datamodule=ReplayDataModule(str(tmp_path / "nowhere")))
    with pytest.raises(RecordingError, match="holds no recorded batches"):
        trainer(tmp_path, callbacks=[]).fit(policy(initial), datamodule=ReplayDataModule(str(tmp_path)))
    RolloutRecorder(tmp_path).write(2, some_groups())
    with pytest.raises(RecordingError, match="no batch that was trained at version 0"):
        trainer(tmp_path, callbacks=[]).fit(policy(initial), datamodule=ReplayDataModule(str(tmp_path)))
    with pytest.raises(ValueError, match="WeightSync"):
        trainer(tmp_path).fit(policy(initial), datamodule=ReplayDataModule(str(tmp_path)))
