"""docs/metrics.md has every metric that runs log, and none that no run could log."""

from __future__ import annotations

import csv
import re
import sys
from pathlib import Path

import pytest
import yaml

from app.cli import main
from modules.algorithm import Algorithm, Regulariser
from modules.corrections import CORRECTIONS
from modules.objectives import OBJECTIVES
from modules.regularisers import REGULARISERS
from tests.docs.test_house import PRODUCT

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "metrics.md").read_text()
NAMES = [name for row in re.findall(r"^\| (`[^|]*) \|", PAGE, re.MULTILINE) for name in re.findall(r"`([^`]+)`", row)]
MODEL = yaml.safe_load((ROOT / "configs" / "quickstart_sft.yaml").read_text())["model"]["init_args"]["model"]["config"]
SMALL = [
    f"--model.model.config={MODEL}",
    "--trainer.accelerator=cpu",
    "--trainer.max_steps=2",
    "--trainer.val_check_interval=2",
]
SMALL += ["--trainer.callbacks=[]", "--data.batch_size=4", "--data.group_size=2", "--data.validation.prompts.size=4"]
JUDGE = {
    "class_path": "benchmarks.learning.noisy_judge.NoisyRubric",
    "init_args": {"error": 0.2, "seed": 0, "repeats": 2},
}
GRPO = [
    "--model.correction=masked",
    "--model.regularisers=[{name: kl, coef: 0.01}, {name: forward_kl, coef: 0.01, options: {k: 3}}]",
    "--model.reference=initial",
    "--data.max_staleness=1",
    f"--data.reward={JUDGE}",
]
LINEAR = "{class_path: modules.regularisers.LinearCoef, init_args: {start: 0.02, end: 0.01, steps: 9}}"
STEPPED = "{class_path: modules.regularisers.SteppedCoef, init_args: {target: 1.0}}"
PPO = [
    "--model.class_path=modules.ActorCriticModule",
    "--model.advantage=gae",
    "--model.value_clip=0.2",
    "--model.reference=initial",
    f"--model.regularisers=[{{name: kl, coef: {LINEAR}, where: reward}}, {{name: entropy, coef: {STEPPED}}}]",
    "--data.validation.samples=2",
    "--data.validation.temperature=1.0",
    "--data.validation.ks=[1, 2]",
]


def pattern(name: str) -> str:
    return re.sub(r"<\w+>", r"[^/,]+", re.escape(name).replace(r"\<", "<").replace(r"\>", ">"))


@pytest.mark.parametrize("flags", [GRPO, PPO], ids=["grpo", "ppo"])
def test_what_a_run_logs_is_explained(flags: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["arborist"])
    main(["fit", "--config", str(ROOT / "configs/quickstart.yaml"), *SMALL, *flags, f"--run_dir={tmp_path / 'run'}"])
    with (tmp_path / "run" / "metrics.csv").open() as file:
        columns = set(next(csv.reader(file))) - {"step", "epoch"}
    assert len(columns) > 40
    judged = {
        "rollouts/judge_calls",
        "reward/right",
        "reward/disagreement",
        "reward/drift",
        "forward_kl",
        "teacher_mass",
    }
    assert judged <= columns or flags is PPO
    assert [one for one in sorted(columns) if not any(re.fullmatch(pattern(name), one) for name in NAMES)] == []


def test_what_functions_of_the_package_report_is_explained() -> None:
    made = [Algorithm(objective=name) for name in OBJECTIVES] + [Algorithm(correction=name) for name in CORRECTIONS]
    made += [Algorithm(regularisers=[Regulariser(name, 0.1)]) for name in REGULARISERS if name != "overlong"]
    length = {"max_tokens": 3, "buffer_tokens": 2}
    made += [Algorithm(regularisers=[Regulariser("overlong", 0.1, where="reward", options=length)])]
    told = {name for one in made for name in (*one.metrics, *one.penalties)} - {"correction_square"}  # see `derive`
    assert len(told) > 10
    assert [one for one in sorted(told) if not any(re.fullmatch(pattern(name), one) for name in NAMES)] == []


def test_what_is_explained_is_logged_somewhere() -> None:
    code = "\n".join(path.read_text() for folder in PRODUCT for path in sorted((ROOT / folder).rglob("*.py")))
    parts = {part for name in NAMES for part in re.split(r"/|<\w+>", name) if part}
    assert len(NAMES) > 60 and [part for part in sorted(parts) if not re.search(rf"\b{part.rstrip('@')}\b", code)] == []
