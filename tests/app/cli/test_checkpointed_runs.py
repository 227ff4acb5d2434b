"""Whole runs through the command line, in this process: training that diverges, and going on from what does not fit."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import yaml

from app.cli import main
from app.strategies.checkpoint.trainer_state import put_together
from tests.helpers.doubles import conversations
from tests.helpers.tiny_model import TINY_MODEL

CONFIG = Path(__file__).resolve().parents[3] / "configs" / "tau_recorded.yaml"
EVERY_STEP = {
    "class_path": "lightning.pytorch.callbacks.ModelCheckpoint",
    "init_args": {"dirpath": "saved", "every_n_train_steps": 1, "filename": "{step}", "save_last": True},
}
KEY = "--model.init_args.model.config"


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run of two steps: `saved/step=2.ckpt` and `saved/last.ckpt`."""
    tmp_path = tmp_path_factory.mktemp("run")
    overlay = {
        "model": {"init_args": {"model": {"config": TINY_MODEL}}},
        "trainer": {
            "accelerator": "cpu",
            "max_epochs": 20,
            "enable_checkpointing": True,
            "callbacks": [EVERY_STEP],
        },
        "data": {"init_args": {"path": str(conversations(tmp_path / "made.npz")), "tasks": None}},
    }
    before = dict(os.environ)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        patch.setattr(sys, "argv", ["arborist"])
        Path("tiny.yaml").write_text(yaml.safe_dump(overlay))
        main(run("--trainer.max_steps=2"))
    os.environ.clear()
    os.environ.update(before)
    return tmp_path


@pytest.fixture(autouse=True)
def workplace(finished: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(finished)
    monkeypatch.setattr(sys, "argv", ["arborist"])
    monkeypatch.delenv("ARBORIST_DEBUG", raising=False)
    return finished


def run(*flags: str) -> list[str]:
    return ["fit", "--config", str(CONFIG), "--config", "tiny.yaml", *flags]


def refused(capsys: pytest.CaptureFixture[str], *flags: str) -> str:
    """The one line a run ends with; it ends with code 2."""
    with pytest.raises(SystemExit) as caught:
        main(run(*flags))
    printed = capsys.readouterr().err
    assert caught.value.code == 2 and "Traceback" not in printed, printed
    [line] = [line for line in printed.splitlines() if line.startswith("error: ")]
    return line


def test_a_learning_rate_that_destroys_the_model_ends_the_run(
    workplace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(run("--trainer.max_steps=2"))
    scheduler = "--model.lr_scheduler"
    line = refused(
        capsys,
        *("--trainer.max_steps=60", "--ckpt_path=saved/last.ckpt", "--trainer.strategy.init_args.max_skipped_steps=4"),
        *(f"{scheduler}=torch.optim.lr_scheduler.LambdaLR", f"{scheduler}.lr_lambda=tests.helpers.doubles.exploding"),
    )
    assert "the gradients of 4 steps in a row (from step 6 on" in line and "max_skipped_steps=4" in line, line
    assert "grad_norm=nan" in line and "learning rate=1e+26" in line, line
    assert put_together(workplace / "saved" / "last.ckpt")["global_step"] == 4, "the last before it exploded"


@pytest.mark.parametrize("coef", [".nan", ".inf"])
def test_coefficients_are_numbers(capsys: pytest.CaptureFixture[str], coef: str) -> None:
    line = refused(capsys, "--trainer.max_steps=2", f"--model.regularisers=[{{name: entropy, coef: {coef}}}]")
    assert f"regularisers.coef: {coef[1:]} is not finite" in line


LINEAR = "{class_path: modules.regularisers.LinearCoef, init_args: {start: 0.1, end: 0.0"


@pytest.mark.parametrize(
    ("coef", "words"),
    [
        (LINEAR + "}}", "arguments are required: steps"),
        (LINEAR + ", stps: 3}}", "Did you mean 'steps'? LinearCoef accepts: start, end, steps"),
        (LINEAR.replace("Coef", "Coeff") + "}}", "did you mean 'modules.regularisers.LinearCoef'?"),
        (LINEAR + ", steps: 0}}", "regularisers: coef: LinearCoef: steps: 0"),
        ("much", 'Parser key "coef"'),
    ],
)
def test_rules_of_coefficients_are_checked(capsys: pytest.CaptureFixture[str], coef: str, words: str) -> None:
    with pytest.raises(SystemExit):
        main(run("--trainer.max_steps=2", f"--model.regularisers=[{{name: entropy, coef: {coef}}}]"))
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (
            [f"{KEY}.hidden_size=32"],
            "'policy.model.embed_tokens.weight' has shape (100, 16) in the checkpoint and (100, 32) in this run;"
            " policy's hidden_size is 16 there and 32 here. Resume with the model that wrote it (model.model)",
        ),
        ([f"{KEY}.num_hidden_layers=2"], "is in this run only (and 10 more are on one side only); policy's num_hidden"),
        (
            ["--model.init_args.model.freeze=[model.embed_tokens]"],
            "they differ in policy.model.embed_tokens.weight. What is trained was changed: set model.model.freeze,"
            " model.model.adapter and model.model.train_tower (or your own configure_optimizers) back to what they"
            " were, or start from the checkpoint's weights alone (arborist export, then model.model.path)",
        ),
        (["--model.optimizer=torch.optim.SGD"], "holds the state of torch.optim.adamw.AdamW, this run's optimizer is"),
        (["--trainer.max_steps=1"], "trainer.max_steps=1: the checkpoint"),
        (["--model=modules.SFTModule"], "the checkpoint is of modules.PolicyModule, and this run trains SFTModule"),
    ],
)
def test_going_on_with_something_else(capsys: pytest.CaptureFixture[str], flags: list[str], words: str) -> None:
    line = refused(capsys, "--trainer.max_steps=4", "--ckpt_path=saved/last.ckpt", *flags)
    assert words in line


def test_a_schedule_does_not_go_on_as_one_of_another_class(capsys: pytest.CaptureFixture[str]) -> None:
    steady = "--model.lr_scheduler=torch.optim.lr_scheduler.ConstantLR"
    scheduled = ["--trainer.callbacks=[]", "--run_dir=scheduled"]
    main(run("--trainer.max_steps=2", *scheduled, steady))
    other = ["--model.lr_scheduler=torch.optim.lr_scheduler.ExponentialLR", "--model.lr_scheduler.gamma=0.5"]
    line = refused(capsys, "--trainer.max_steps=4", *scheduled, "--ckpt_path=last", *other)
    assert "ExponentialLR cannot go on with the state of torch.optim.lr_scheduler.ConstantLR" in line, line
    assert "set model.lr_scheduler to null" in line
