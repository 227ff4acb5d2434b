"""Dotted flags reach into every part of a YAML file (sweeps live on them); plain user classes fit where they may."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from app.cli import main

QUICKSTART = Path(__file__).parents[3] / "configs" / "quickstart.yaml"


class PlainWorkflow:
    """A user's workflow: inherits nothing, annotates nothing of `run`."""

    def __init__(self, max_new_tokens: int = 4) -> None:
        self.max_new_tokens = max_new_tokens

    async def run(self, engine, prompt):  # type: ignore[no-untyped-def]
        return []


def parsed(capsys: pytest.CaptureFixture[str], *flags: str) -> dict:
    with pytest.raises(SystemExit) as end:
        main(["fit", "--config", str(QUICKSTART), *flags, "--print_config"])
    assert not end.value.code
    return yaml.safe_load(capsys.readouterr().out)["data"]["init_args"]


@pytest.mark.parametrize(
    ("part", "option", "value"),
    [
        ("engine", "num_threads", 2),
        ("workflow", "max_new_tokens", 7),
        ("prompts", "digits", 1),
        ("validation.prompts", "size", 9),
    ],
)
def test_a_flag_changes_one_option_and_keeps_its_neighbours(
    capsys: pytest.CaptureFixture[str], part: str, option: str, value: int
) -> None:
    written = yaml.safe_load(QUICKSTART.read_text())["data"]["init_args"]
    got = parsed(capsys, f"--data.{part}.init_args.{option}", str(value))
    for key in part.split("."):
        written, got = written[key], got[key]
    assert got["class_path"] == written["class_path"]
    assert got["init_args"].items() >= {**written["init_args"], option: value}.items()


def test_records_of_options_merge_key_by_key(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Of two files and the flags, each changes what it names, at any depth, and null takes a value away."""
    (tmp_path / "one.yaml").write_text(
        "data: {init_args: {validation: {temperature: 1.0, samples: 2}, limits: {max_failures: 5, max_concurrent: 9}}}"
    )
    (tmp_path / "two.yaml").write_text("data: {init_args: {validation: {ks: [1, 2]}, limits: {max_failures: 6}}}")
    files = [f"--config={tmp_path / name}.yaml" for name in ("one", "two")]
    flags = ["--data.validation.samples", "4", "--data.validation.prompts.init_args.size=9", "--data.stall.after_s=60"]
    got = parsed(capsys, *files, *flags, "--data.limits.max_concurrent=null", "--data.reward_options={cache: 7}")
    prompts = yaml.safe_load(QUICKSTART.read_text())["data"]["init_args"]["validation"]["prompts"]
    assert got["validation"] == {
        "prompts": {**prompts, "init_args": got["validation"]["prompts"]["init_args"]},
        "samples": 4,
        "temperature": 1.0,
        "batch_size": 256,
        "solved_at": 1.0,
        "ks": [1, 2],
        "answer": None,
    }
    assert got["validation"]["prompts"]["init_args"].items() >= {**prompts["init_args"], "size": 9}.items()
    assert (got["limits"]["max_failures"], got["limits"]["max_concurrent"]) == (6, None)
    assert got["stall"] == {"after_s": 60.0, "action": "warn", "max_requeues": None}
    assert got["reward_options"]["cache"] == 7 and got["reward_options"]["deadline_s"] == 15.0
    assert parsed(capsys, *files, "--data.validation.prompts=null")["validation"]["prompts"] is None


def test_a_plain_class_is_a_workflow(capsys: pytest.CaptureFixture[str]) -> None:
    name = f"{__name__}.{PlainWorkflow.__name__}"
    got = parsed(capsys, "--data.workflow", name, "--data.workflow.max_new_tokens", "9")["workflow"]
    assert got == {"class_path": name, "init_args": {"max_new_tokens": 9}}


@pytest.mark.slow
def test_the_console_script_finds_classes_beside_the_user(tmp_path: Path) -> None:
    (tmp_path / "beside_me.py").write_text(
        "class Mine:\n    max_new_tokens = 3\n    async def run(self, engine, prompt):\n        return []\n"
    )
    script = Path(sys.executable).with_name("arborist")
    command = [script, "fit", "--config", QUICKSTART, "--data.workflow", "beside_me.Mine", "--print_config"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "beside_me.Mine" in done.stdout, done.stderr
