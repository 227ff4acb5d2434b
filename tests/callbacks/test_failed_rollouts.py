"""Runs that their rollouts end, through the command line: what is saved, what is said, and that going on loses nothing.

Truth is a run that the same outage does not end.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from app.strategies.checkpoint.trainer_state import put_together
from app.strategies.pieces import load_whole
from tests.callbacks.outages import DOWN, STEPS, command, configuration
from tests.helpers.rank_pool import RankPool

OUTAGE = {"first": 4, "last": 7}  # in the third batch of two prompts
GO_ON = "go on with: python -m app fit --config here/config.yaml --run_dir here --ckpt_path last"
LAST = Path("here/checkpoints/last.ckpt")


@pytest.fixture(autouse=True)
def _in_an_empty_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["arborist"])


def contents(checkpoint: Path) -> dict[str, Tensor]:
    """Weights and state of the optimizer."""
    return load_whole(checkpoint, lambda name: True)


def assert_equal(checkpoint: Path, expected: dict[str, Tensor]) -> None:
    found = contents(checkpoint)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def books(checkpoint: Path) -> dict[str, int]:
    counters: dict[str, int] = put_together(checkpoint)["RolloutDataModule"]["counters"]
    return {name: counters[name] for name in ("trained", "failed")}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[int, bool], Path]:
    """Last checkpoints of runs that the outage does not end, by ranks and whether parameters are sharded; made when
    they are asked for."""
    directory = tmp_path_factory.mktemp("undisturbed")
    return {key: directory / str(number) for number, key in enumerate([(1, False), (2, False), (2, True)])}


def expected(undisturbed: dict[tuple[int, bool], Path], pool: RankPool | None = None, sharded: bool = False) -> Path:
    directory = undisturbed[1 if pool is None else pool.size, sharded]
    if not directory.exists():
        directory.mkdir()
        ends = run(directory, pool, sharded, environment=OUTAGE, limits={"max_failures": 32})
        assert [code for code, _ in ends] == [0] * len(ends), ends
    return directory / LAST


def run(
    directory: Path,
    pool: RankPool | None = None,
    sharded: bool = False,
    flags: tuple[str, ...] = (),
    full: bool = False,
    trainer: dict[str, Any] | None = None,
    **data: Any,
) -> list[tuple[Any, str]]:
    """What every rank ended with, and said."""
    config = configuration(1 if pool is None else pool.size, sharded, **data)
    config["trainer"] |= trainer or {}
    if pool is None:
        before = os.getcwd()
        try:
            return [command(directory, config, *flags, full=full)]
        finally:
            os.chdir(before)
    return pool.run(run_on_rank, directory=directory, config=config, flags=flags, full=full)


def run_on_rank(directory: Path, config: dict[str, Any], flags: tuple[str, ...], full: bool) -> tuple[Any, str]:
    return command(directory, config, *flags, full=full)


def test_what_was_trained_is_saved_and_going_on_loses_and_repeats_nothing(
    tmp_path: Path, undisturbed: dict[tuple[int, bool], Path]
) -> None:
    [(code, said)] = run(tmp_path, environment=OUTAGE)
    assert code == 2 and "Traceback" not in said
    lines = said.splitlines()
    assert lines[-5].startswith("error: 3 groups in a row (limits.max_failures) were dropped, the last one of prompt")
    assert DOWN in lines[-5] and lines[-3] == f"ended after step 2, saved as {LAST}"
    assert lines[-2] == "run directory: here, report: here/report.html" and lines[-1] == GO_ON
    assert Path("here/report.html").exists() and put_together(LAST)["global_step"] == 2
    assert books(LAST)["trained"] == 4 and books(LAST)["failed"] == 3
    [(code, said)] = run(tmp_path, flags=("--ckpt_path", "last"), environment=OUTAGE)
    assert code == 0 and "group dropped" not in said
    whole = expected(undisturbed)
    assert_equal(LAST, contents(whole))
    assert books(LAST) == books(whole)


def test_failures_are_counted_anew_by_a_run_that_goes_on(tmp_path: Path) -> None:
    """What is still down ends it again, after as many; there is nothing new to save, and the same command goes on."""
    options = {"environment": {"first": 4, "last": 50}}
    flags = ("--ckpt_path", "last")
    for part, told in enumerate([f"saved as {LAST}", "nothing new was saved"]):
        [(code, said)] = run(tmp_path, flags=flags if part else (), **options)
        assert code == 2 and "error: 3 groups in a row" in said
        assert f"ended after step 2, {told}\n" in said and said.splitlines()[-1] == GO_ON
    failed = books(LAST)["failed"]
    [(code, said)] = run(tmp_path, flags=flags)
    assert code == 0 and put_together(LAST)["global_step"] == STEPS
    assert books(LAST) == {"trained": 2 * STEPS, "failed": failed}


def test_before_the_first_step_nothing_is_said_of_checkpoints(tmp_path: Path) -> None:
    [(code, said)] = run(tmp_path, environment={"first": 0, "last": 50})
    assert code == 2 and "error: 3 groups in a row" in said
    assert "ended" not in said and "go on" not in said and not Path("here/checkpoints").exists()


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        ({"stall": {"after_s": 4.0, "action": "stop"}}, "error: nothing has arrived for"),
        ({"limits": {"collect_deadline_s": 6.0}}, "TimeoutError: 0 of 2 groups are ready after 6 s"),
    ],
)
def test_a_wait_that_does_not_end(tmp_path: Path, options: dict[str, Any], kind: str) -> None:
    [(code, said)] = run(tmp_path, environment={**OUTAGE, "hangs": True}, **options)
    told = said if isinstance(code, int) else "\n".join(code)  # as its traceback ends
    assert kind in told and told.splitlines()[-1] == GO_ON and f"ended after step 2, saved as {LAST}" in told
    [(code, said)] = run(tmp_path, flags=("--ckpt_path", "last"))  # the environment is up again
    assert code == 0 and books(LAST)["trained"] == 10 and books(LAST)["failed"] == 0


@pytest.mark.parametrize("at", [2, STEPS])
def test_a_validation_that_fails(tmp_path: Path, undisturbed: dict[tuple[int, bool], Path], at: int) -> None:
    """Between two steps, and after the last one, where the model is written and there is nothing to go on with."""
    held_out = {"class_path": "datamodules.prompts.ArithmeticPrompts", "init_args": {"split": "validation", "size": 4}}
    options: dict[str, Any] = {"validation": {"prompts": held_out}, "limits": {"max_failures": 32}}
    options["trainer"] = {"val_check_interval": 2, "check_val_every_n_epoch": None}
    options["trainer"]["callbacks"] = ["callbacks.SavePretrained"]
    [(code, said)] = run(tmp_path, environment={**OUTAGE, "held_out": at}, **options)
    assert code == 2 and "error: validation: 4 of 4 episodes failed" in said
    assert f"ended after step {at}, saved as {LAST}\n" in said and Path("here/model").exists() == (at == STEPS)
    last = said.splitlines()[-1]
    assert "score the model with: python -m app validate" in last if at == STEPS else last == GO_ON
    if at < STEPS:
        [(code, _)] = run(tmp_path, flags=("--ckpt_path", "last"), environment=OUTAGE, **options)
        assert code == 0
    assert_equal(LAST, contents(expected(undisturbed)))


def test_an_engine_that_takes_no_weights(tmp_path: Path, undisturbed: dict[tuple[int, bool], Path]) -> None:
    options: dict[str, Any] = {"environment": OUTAGE, "limits": {"max_failures": 32}}
    refuses = {"class_path": "tests.callbacks.outages.Refuses", "init_args": {"version": 3}}
    [(code, said)] = run(tmp_path, engine=refuses, **options)
    assert code == 2 and "error: no server takes the weights\n" in said
    assert f"ended after step 3, saved as {LAST}" in said and said.splitlines()[-1] == GO_ON
    assert len(Path("here/metrics.csv").read_text().splitlines()) == 4  # that of the step, too
    [(code, _)] = run(tmp_path, flags=("--ckpt_path", "last"), **options)
    assert code == 0
    assert_equal(LAST, contents(expected(undisturbed)))


def test_a_step_that_fails_saves_nothing(tmp_path: Path) -> None:
    fails = {"class_path": "tests.callbacks.outages.InTheMiddle", "init_args": {"step": 2}}
    [(code, _)] = run(tmp_path, trainer={"callbacks": [fails]})
    assert code == ["RuntimeError: out of memory in the middle of a step"] and not LAST.exists()


@pytest.mark.parametrize("earlier", [False, True])
def test_a_full_disk_hides_no_error(tmp_path: Path, earlier: bool) -> None:
    """With a checkpoint of an earlier step, which stays, and without one."""
    if earlier:
        run(tmp_path, environment={"first": 2, "last": 5})
        assert put_together(LAST)["global_step"] == 1
    flags = ("--ckpt_path", "last") if earlier else ()
    down = {"first": 7, "last": 10} if earlier else OUTAGE
    [(code, said)] = run(tmp_path, environment=down, flags=flags, full=True)
    assert code == 2 and "error: 3 groups in a row" in said
    [told] = [line for line in said.splitlines() if line.startswith("ended after step 2, nothing new was saved; ")]
    assert "last.ckpt does not fit: it needs" in told and "Free space there" in told
    assert (said.splitlines()[-1] == GO_ON) == earlier and LAST.exists() == earlier
    assert not list(Path("here").glob("checkpoints/.*"))


def test_whoever_wants_no_checkpoints_gets_none(tmp_path: Path) -> None:
    [(code, said)] = run(tmp_path, environment=OUTAGE, trainer={"enable_checkpointing": False})
    assert code == 2 and "error: 3 groups in a row" in said and "go on with" not in said
    assert "ended after step 2, nothing new was saved; trainer.enable_checkpointing is false\n" in said
    assert not Path("here/checkpoints").exists()


@pytest.mark.parametrize("every", [1, 50])
def test_a_checkpoint_callback_of_ones_own_decides_where(tmp_path: Path, every: int) -> None:
    options = {"dirpath": "elsewhere", "every_n_train_steps": every, "save_last": True}
    own = {"class_path": "lightning.pytorch.callbacks.ModelCheckpoint", "init_args": options}
    [(code, said)] = run(tmp_path, environment=OUTAGE, trainer={"callbacks": [own]})
    place = Path("elsewhere/last.ckpt").resolve()
    assert code == 2 and f"ended after step 2, saved as {place}\n" in said and said.splitlines()[-1] == GO_ON
    assert put_together(place)["global_step"] == 2 and not LAST.exists()


@pytest.mark.parametrize("sharded", [False, True])
def test_two_ranks_save_the_same_step(
    two_ranks: RankPool, tmp_path: Path, undisturbed: dict[tuple[int, bool], Path], sharded: bool
) -> None:
    first, second = run(tmp_path, two_ranks, sharded, environment=OUTAGE)
    assert first[0] == 2 and f"ended after step 2, saved as {LAST}\n" in first[1]
    assert first[1].splitlines()[-1] == GO_ON
    assert second[0] == 2 and "error: rank 0 failed: RuntimeError: the rollout producer failed: 3 groups" in second[1]
    assert "this run ends, because" not in first[1] + second[1]  # nobody was missed
    assert put_together(LAST)["global_step"] == 2
    for code, _ in run(tmp_path, two_ranks, sharded, flags=("--ckpt_path", "last"), environment=OUTAGE):
        assert code == 0
    assert_equal(LAST, contents(expected(undisturbed, two_ranks, sharded)))


@pytest.mark.slow
def test_ranks_whose_engine_takes_a_part_of_the_weights(
    two_ranks: RankPool, tmp_path: Path, undisturbed: dict[tuple[int, bool], Path]
) -> None:
    options: dict[str, Any] = {"environment": OUTAGE, "limits": {"max_failures": 32}}
    refuses = {"class_path": "tests.callbacks.outages.Refuses", "init_args": {"version": 3}}
    first, second = run(tmp_path, two_ranks, True, engine=refuses, **options)
    assert first[0] == 2 and f"ended after step 3, saved as {LAST}\n" in first[1]
    assert second[0] == 2 and "rank 0 failed: GenerationError: no server takes the weights" in second[1]
    for code, _ in run(tmp_path, two_ranks, True, flags=("--ckpt_path", "last"), **options):
        assert code == 0
    assert_equal(LAST, contents(expected(undisturbed, two_ranks, True)))


@pytest.mark.slow
def test_ranks_with_nothing_to_save_or_no_room_for_it(two_ranks: RankPool, tmp_path: Path) -> None:
    first, second = run(tmp_path, two_ranks, environment={"first": 0, "last": 50})
    assert first[0] == second[0] == 2 and "ended" not in first[1] and not Path("here/checkpoints").exists()
    first, second = run(tmp_path, two_ranks, environment=OUTAGE, flags=("--run_dir", "there"), full=True)
    assert first[0] == second[0] == 2 and "error: 3 groups in a row" in first[1]
    assert "ended after step 2, nothing new was saved; " in first[1] and "last.ckpt does not fit" in first[1]


@pytest.mark.slow
def test_the_ranks_of_one_command(tmp_path: Path) -> None:
    """Started by Lightning: what rank 0 says is the last that is said, and its exit code that of the command."""
    command(tmp_path, configuration(2, environment=OUTAGE), "--print_config")  # writes the file
    root = str(Path(__file__).parents[2])
    words = [sys.executable, "-m", "app", "fit", "--config", "0.yaml", "--run_dir", "here"]
    environment = {**os.environ, "PYTHONPATH": root, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    ended = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 2 and "Traceback" not in ended.stderr
    assert ended.stderr.count("error: ") == 1 and ended.stderr.splitlines()[-1] == GO_ON
    assert put_together(LAST)["global_step"] == 2
    again = [sys.executable, *shlex.split(GO_ON.removeprefix("go on with: "))[1:]]
    assert subprocess.run(again, env=environment, capture_output=True, timeout=300).returncode == 0
    assert put_together(LAST)["global_step"] == STEPS
