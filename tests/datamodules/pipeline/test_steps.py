"""Batches of several steps can be left after every step: resumed runs and abandoned iterations train what an
uninterrupted run trains."""

from __future__ import annotations

import signal
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lightning.pytorch.callbacks import ModelCheckpoint

from app import interruption
from app.batch import BatchError, StepHandle, Trajectory
from callbacks.interruption import Interruption
from callbacks.validate_ends import ValidateEnds
from callbacks.weight_sync import WeightSync
from datamodules.conversations.tokens import Conversation, save_npz
from datamodules.files.recording import read_batch, versions
from datamodules.groups import to_batch
from datamodules.inference.embedded import EmbeddedEngine
from datamodules.pipeline.limits import Limits
from datamodules.pipeline.loaders import Position, StepLoader
from datamodules.pipeline.validation import Validation
from datamodules.prompts import ArithmeticPrompts
from datamodules.prompts.base import Prompt
from datamodules.recorded import RecordedDataModule
from datamodules.rollout import RolloutDataModule
from datamodules.workflows import RLVRWorkflow
from datamodules.workflows.base import to_trajectory
from modules import ActorCriticModule, ModelSource, PolicyModule, Regulariser
from tests.datamodules.test_pairs import pairs
from tests.datamodules.test_rollout import CHAR, count_step
from tests.helpers.tiny_policy import CONFIG, parameters
from tests.helpers.tiny_policy import trainer as tiny_trainer

Step = tuple[int, int, list[list[int]]]
"""Policy version, index, and the sequences of a batch."""


class CountingWorkflow(RLVRWorkflow):
    """Rewards itself: no worker processes."""

    async def run(self, engine: Any, prompt: Prompt) -> list[Trajectory]:
        request = self._options.request(prompt.tokens)
        trajectory = to_trajectory(prompt, request, await engine.generate(request))
        trajectory.reward = float(trajectory.tokens.sum() % 3)
        return [trajectory]


class Steps(L.Callback):
    """What every step that was done trained."""

    def __init__(self) -> None:
        self.done: list[Step] = []

    def on_train_batch_start(self, trainer: L.Trainer, module: Any, batch: StepHandle, *unused: Any) -> None:
        self._step = (module.policy_version, batch.index, [one.tolist() for one in batch.batch.sequences()])

    def on_train_batch_end(self, *unused: Any) -> None:
        self.done.append(self._step)


class Weights(L.Callback):
    """Those after every step."""

    def __init__(self) -> None:
        self.after: list[dict[str, torch.Tensor]] = []

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, *unused: Any) -> None:
        self.after.append(parameters(module))


def module(kind: Any = PolicyModule, **options: Any) -> Any:
    torch.manual_seed(0)
    return kind(
        ModelSource(config={**CONFIG, "vocab_size": 16}),
        optimizer=lambda params: torch.optim.AdamW(params, lr=0.02, weight_decay=0.1),
        **{"minibatches": 2, "epochs": 2, "self_check": "skip", "chunk_tokens": 64, "live_tokens": 256, **options},
    )


def rollouts(path: Path, **options: Any) -> RolloutDataModule:
    return RolloutDataModule(
        **{
            "prompts": ArithmeticPrompts(digits=1),
            "workflow": CountingWorkflow(max_new_tokens=3),
            "engine": EmbeddedEngine(kv_cache_tokens=1024),
            "tokenizer": CHAR,
            "batch_size": 2,
            "group_size": 3,
            "max_staleness": 0,
            "batches_per_epoch": 1,
            "limits": Limits(collect_deadline_s=20.0),
            **options,
        }
    )


def recorded(path: Path, **options: Any) -> RecordedDataModule:
    file = path / "x.npz"
    if not file.exists():
        tokens = np.random.default_rng(0).integers(2, 16, (12, 9))
        turns = np.array([3, 6]), np.array([5, 9])
        save_npz(
            file,
            [
                Conversation(f"t{i // 3}", i % 3, "m", float(i % 2), "made", tokens[i], *turns, np.array([1, 2]))
                for i in range(12)
            ],
        )
    return RecordedDataModule(str(file), **{"tasks_per_batch": 2, "seed": 1, "batches_per_epoch": 1, **options})


CASES: dict[str, tuple[Callable[[], Any], Callable[[Path], Any]]] = {
    "rollouts, start of the batch, reference": (
        lambda: module(proximal="recomputed", regularisers=[Regulariser("kl", 0.1)], reference="initial"),
        rollouts,
    ),
    "rollouts, critic": (lambda: module(ActorCriticModule, critic="initial", critic_lr=0.05), rollouts),
    "recorded": (module, recorded),
    "pairs": (
        lambda: module(objective="dpo", reference="initial", minibatches=2, epochs=1),
        lambda path: pairs(path, batch_size=2, batches_per_epoch=1),
    ),
}


def fit(trained: Any, data: Any, *callbacks: L.Callback, **options: Any) -> list[Step]:
    """Two epochs of one batch, unless told otherwise."""
    steps = Steps()
    sync = [WeightSync()] if isinstance(data, RolloutDataModule) else []
    resume = {name: options.pop(name) for name in ("ckpt_path",) if name in options}
    ours = tiny_trainer(*sync, steps, *callbacks, **{"max_epochs": 2, **options})
    ours.fit(trained, datamodule=data, weights_only=bool(resume) or None, **resume)
    return steps.done


@pytest.mark.parametrize("case", CASES)
def test_resuming_from_every_step_equals_the_uninterrupted_run(case: str, tmp_path: Path) -> None:
    """Bit for bit. A step later another resumed run takes over; from the first step on the run goes to its end."""
    make_module, make_data = CASES[case]
    whole, weights = make_module(), Weights()
    every = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    steps = fit(whole, make_data(tmp_path), weights, every, enable_checkpointing=True)
    assert [(version, index) for version, index, _ in steps] == [
        (version, index) for version in range(2) for index in range(whole.steps_per_batch)
    ]
    assert len({str(sequences) for _, _, sequences in steps}) == 2
    for done in range(1, len(steps)):
        last = len(steps) if done == 1 else done + 1
        again = make_module()
        rest = fit(again, make_data(tmp_path), ckpt_path=tmp_path / f"step={done}.ckpt", max_steps=last)
        assert rest == steps[done:last], f"from step {done}"
        for name, value in parameters(again).items():
            assert torch.equal(value, weights.after[last - 1][name]), f"from step {done}: {name}"


@pytest.mark.parametrize("older", [False, True], ids=["", "from an older version"])
@pytest.mark.parametrize("kind", ["recorded", "pairs"])
def test_a_run_goes_on_behind_what_was_dealt_with_batches_of_another_size(
    kind: str, older: bool, tmp_path: Path
) -> None:
    """Nothing is left out, and nothing trained twice; a batch under way stays as it is. Of 4 tasks in a pass, which no
    batch goes on behind, and of 8 pairs without a gap between passes."""
    make, option, count = {"recorded": (recorded, "tasks_per_batch", 4), "pairs": (pairs, "batch_size", 8)}[kind]

    def run(size: int, last: int, *callbacks: L.Callback, **options: Any) -> list[list[list[int]]]:
        """What every step was done on, to step `last`; a batch is two."""
        data = make(tmp_path, **{option: size, "batches_per_epoch": 100})
        steps = fit(module(minibatches=1), data, *callbacks, max_epochs=-1, max_steps=last, **options)
        return [sequences for _, _, sequences in steps]

    stream = [one for batch in run(1, 2 * (count + 3))[::2] for one in batch]
    each = len(stream) // (count + 3)

    def examples(first: int, last: int) -> list[list[int]]:
        return stream[first * each : last * each]

    every = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    run(2, 3, every, enable_checkpointing=True)
    for done, under_way in ((2, []), (3, [examples(2, 4)])):
        path = tmp_path / f"step={done}.ckpt"
        if older:
            _as_of_an_older_version(path, batches=1)
        first = 4 if under_way else 2
        for size in (1, 3):
            with pytest.warns(
                UserWarning, match=rf"data\.{option} was 2 and is {size}\. As many examples as were dealt"
            ):
                batches = run(size, done + len(under_way) + 2, ckpt_path=path)
            last = min(first + size, 4) if kind == "recorded" and first < 4 else first + size
            assert batches == [*under_way, *[examples(first, last)] * 2]


def _as_of_an_older_version(path: Path, batches: int) -> None:
    """A checkpoint of data whose stream counted batches."""
    saved = torch.load(path, weights_only=True)
    (state,) = (one for name, one in saved.items() if name.endswith("DataModule"))
    del state["dealt"]
    state.pop("under_way", None)
    state["position"] = batches
    torch.save(saved, path)


class Books(L.Callback):
    """At the end of every batch as many groups were trained as the version says."""

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, *unused: Any) -> None:
        if not module.steps_done:
            data: Any = trainer.datamodule
            assert data.counters()["trained"] == module.policy_version * data.batch_size
            data._producer.stream.check()


@pytest.mark.parametrize(
    ("cut", "staleness"),
    [
        ({"limit_train_batches": 3}, 0),
        ({"limit_train_batches": 3}, 1),
        ({"limit_train_batches": 0.3}, 0),
        ({"overfit_batches": 1}, 0),
    ],
    ids=["a number", "a number, stale", "a share", "overfit"],
)
def test_epochs_that_end_in_the_middle_of_a_batch_go_on_with_it(
    cut: dict[str, Any], staleness: int, tmp_path: Path
) -> None:
    def run(**options: Any) -> list[Step]:
        data = rollouts(tmp_path, max_staleness=staleness, batches_per_epoch=2)
        return fit(module(epochs=1), data, Books(), max_epochs=-1, max_steps=6, **options)

    steps = run(**cut)
    assert [(version, index) for version, index, _ in steps] == [(v, i) for v in range(3) for i in range(2)]
    assert all(steps[k][2] == steps[k + 1][2] for k in range(0, 6, 2))
    if not staleness:
        assert steps == run()


def test_a_second_fit_goes_on_in_the_middle_of_a_batch(tmp_path: Path) -> None:
    for make in (rollouts, recorded):
        steps = fit(module(), make(tmp_path), max_epochs=-1, max_steps=4)
        halved, data = module(), make(tmp_path)
        assert fit(halved, data, max_epochs=-1, max_steps=2) == steps[:2]
        assert fit(halved, data, max_epochs=-1, max_steps=2) == steps[2:]


def test_a_run_that_stops_while_it_waits_for_a_batch_loses_nothing(tmp_path: Path) -> None:
    """What a checkpoint holds that is written between two batches, from inside `collect`."""
    steps = fit(module(), rollouts(tmp_path))
    path = tmp_path / "interrupted.ckpt"

    class Save(L.Callback):
        def on_exception(self, trainer: L.Trainer, *unused: Any) -> None:
            trainer.save_checkpoint(path)

    data = rollouts(tmp_path)
    collect = data.collect

    def interrupted() -> Any:
        if data.gate.version == 1:
            raise KeyboardInterrupt
        return collect()

    data.collect = interrupted  # type: ignore[method-assign]
    with pytest.raises(SystemExit):
        fit(module(), data, Save())
    assert fit(module(), rollouts(tmp_path), ckpt_path=path) == steps[4:]


@pytest.mark.parametrize("done", [1, 4])
def test_an_interrupted_run_goes_on_behind_its_last_step(done: int, tmp_path: Path) -> None:
    class Ask(L.Callback):
        def on_train_batch_start(self, trainer: L.Trainer, *unused: Any) -> None:
            if trainer.global_step == done - 1:
                interruption.request(signal.SIGTERM)

    steps = fit(module(), rollouts(tmp_path))
    callbacks = [Ask(), Interruption(), ModelCheckpoint(tmp_path / "checkpoints")]
    with interruption.listening(), pytest.raises(interruption.Interrupted) as end:
        fit(module(), rollouts(tmp_path), *callbacks, enable_checkpointing=True, default_root_dir=tmp_path)
    told = interruption.end_of(end.value)
    assert told is not None and told.steps == done
    assert fit(module(), rollouts(tmp_path), ckpt_path=told.checkpoint) == steps[done:]


def test_the_rest_of_a_batch_is_not_joined_to_another_one(tmp_path: Path) -> None:
    every = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=3, save_top_k=-1)
    fit(module(), recorded(tmp_path), every, enable_checkpointing=True, max_epochs=1)
    path = tmp_path / "step=3.ckpt"
    for options, said in (
        (
            {"minibatches": 1, "epochs": 1},
            "3 steps were done with minibatches=2, epochs=2, and this run has",
        ),
        ({"seed": 1}, "go on with seed=0, or from a checkpoint written at the end of a batch"),
    ):
        with pytest.raises(ValueError, match=said):
            fit(module(**options), recorded(tmp_path), ckpt_path=path)
    other = recorded(tmp_path)
    other.seed = 2
    with pytest.raises(BatchError, match="the datamodule offers another batch than the one that is under way"):
        fit(module(), other, ckpt_path=path)


def test_a_batch_under_way_is_recorded_once_in_every_run_directory(tmp_path: Path) -> None:
    every = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    first, other = tmp_path / "first", tmp_path / "other"
    options = {"epochs": 1}
    fit(module(**options), rollouts(tmp_path, record=str(first)), every, enable_checkpointing=True, max_steps=1)
    for directory in (first, other):
        data = rollouts(tmp_path, record=str(directory))
        fit(module(**options), data, ckpt_path=tmp_path / "step=1.ckpt")
        assert versions(directory) == [0, 1]
    assert torch.equal(*(to_batch(read_batch(directory, 0)).tokens for directory in (first, other)))


class Numbers(Position):
    """A stream of batches of one example, that hands out its number instead."""

    batches_per_epoch = 3

    def __init__(self, trained: Any) -> None:
        super().__init__(lambda first: first + 1)
        self.trainer = SimpleNamespace(lightning_module=trained)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 4), st.lists(st.tuples(st.integers(0, 12), st.booleans()), max_size=8))
def test_iterations_and_runs_that_end_anywhere_train_every_step_once(count: int, parts: list[tuple[int, bool]]) -> None:
    """`parts`: after how many steps an iteration is abandoned, and whether the run ends there and goes on from its
    checkpoint, with another loader."""
    trained = SimpleNamespace(steps_per_batch=count, policy_version=0, steps_done=0)
    stream, done = Numbers(trained), list[tuple[Any, int]]()
    for length, resumed in parts:
        for handle in islice(StepLoader(stream), length):  # type: ignore[arg-type]
            done.append((handle.batch.start, handle.index))
            count_step(trained, handle)
        if resumed:
            state = stream.state_dict(trained.policy_version)
            stream = Numbers(trained)
            stream.load_state_dict(state, int)
    assert done == [divmod(step, count) for step in range(len(done))]
    assert len(done) == sum(min(length, 3 * count) for length, _ in parts)


# ---- validation, which the engine plays, and minibatches


def validated(path: Path, **options: Any) -> RolloutDataModule:
    validation = Validation(ArithmeticPrompts(split="validation", size=2))
    return rollouts(path, validation=validation, batches_per_epoch=4, **options)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"val_check_interval": 3, "check_val_every_n_epoch": None},
            r"trainer\.val_check_interval: 3 ends in the middle of a batch of 2 steps .* set it to 2 or 4 steps",
        ),
        ({"val_check_interval": 0.4}, r"trainer\.val_check_interval: 0\.4 \(3 steps\) ends .* set it to 2 or 4 steps"),
        (
            {"val_check_interval": "00:00:10:00", "check_val_every_n_epoch": None},
            r"trainer\.val_check_interval: 600 seconds may end in the middle .* a multiple of 2",
        ),
        ({"limit_train_batches": 5}, r"trainer\.limit_train_batches: 5 makes epochs of 5 steps, .* to 4 or 6, or"),
        ({"max_steps": 3, "callbacks": [ValidateEnds()]}, r"trainer\.max_steps: 3 ends .* set it to 2 or 4, or"),
    ],
)
def test_validation_inside_of_a_batch_is_refused(options: dict[str, Any], said: str, tmp_path: Path) -> None:
    callbacks = options.pop("callbacks", [])
    with pytest.raises(ValueError, match=said):
        fit(module(epochs=1), validated(tmp_path), *callbacks, **options)


def test_a_run_that_is_asked_to_stop_in_a_batch_ends_and_validates_behind_it(tmp_path: Path) -> None:
    class Stop(L.Callback):
        scored: tuple[int, int] | None = None

        def on_train_batch_end(self, trainer: L.Trainer, *unused: Any) -> None:
            trainer.should_stop = trainer.global_step == 3

        def on_validation_end(self, trainer: L.Trainer, module: Any) -> None:
            self.scored = module.policy_version, module.steps_done

    stop = Stop()
    steps = fit(module(epochs=1), validated(tmp_path), stop, check_val_every_n_epoch=None, val_check_interval=100)
    assert len(steps) == 4 and stop.scored == (2, 0)


def test_more_minibatches_than_groups_are_refused(tmp_path: Path) -> None:
    for data, option in (
        (rollouts(tmp_path), "batch_size"),
        (recorded(tmp_path), "tasks_per_batch"),
        (pairs(tmp_path, batch_size=2), "batch_size"),
    ):
        with pytest.raises(ValueError, match=rf"minibatches: 3, but data\.{option}: 2 groups a batch"):
            fit(module(minibatches=3), data)
