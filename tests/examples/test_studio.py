"""examples/studio.py: what it would start is what the real SDK takes, and what `fit` understands."""

from __future__ import annotations

import inspect
import json
import re
import shlex
import sys
from typing import Any

import pytest

from app.cli import main
from examples import studio

GIVEN = ["--studio", "us/agents/arborist", "--name", "sums-1", "--machine", "H100_X_8", "--config"]
GIVEN += ["configs/quickstart.yaml", "--run_dir", "/shared/the sums", "--dry_run"]


def started(*more: str, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    studio.main([*GIVEN, *more])
    printed: dict[str, Any] = json.loads(capsys.readouterr().out)
    return printed


def of_fit(job: dict[str, Any]) -> list[str]:
    """The arguments of `fit` in a job's command, as its shell would pass them on."""
    words = shlex.split(job["command"])
    return words[words.index("fit") :]


@pytest.mark.parametrize("machines", [1, 2])
def test_fit_understands_its_part(
    machines: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = ["--machines", str(machines), "--train_gpus", "4", "--", "--trainer.max_steps", "7"]
    job = started(*flags, capsys=capsys)["job"]
    assert job["num_machines"] == machines
    monkeypatch.setattr(sys, "argv", ["arborist"])
    monkeypatch.setenv("LOCAL_RANK", "0")  # as under torchrun, where `last` may be no checkpoint yet
    with pytest.raises(SystemExit) as ended:
        main([*of_fit(job), "--print_config"])
    assert ended.value.code == 0
    assert "max_steps: 7" in (said := capsys.readouterr().out) and f"num_nodes: {machines}" in said
    assert "--nproc-per-node 4" in job["command"] and re.search("devices: .?4", said)


def test_machines_meet_where_the_platform_says(capsys: pytest.CaptureFixture[str]) -> None:
    alone, together = (started("--machines", n, capsys=capsys)["job"]["command"] for n in "12")
    assert "--standalone" in alone and "$" not in alone
    assert '--nnodes 2 --rdzv-backend c10d --rdzv-endpoint "$MASTER_ADDR:$MASTER_PORT" --rdzv-id sums-1' in together
    assert "--standalone" not in together
    assert of_fit({"command": together})[4] == "/shared/the sums"


@pytest.mark.parametrize(
    "wrong",
    [["--studio", "arborist"], ["--machines", "0"], ["--train_gpus", "0"], ["--run_dir", "runs/a"]],
)
def test_errors_name_the_option(wrong: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        studio.main([*GIVEN, *wrong])
    assert f"{wrong[0]}: " in capsys.readouterr().err


def test_the_sdk_takes_these_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    sdk = pytest.importorskip("lightning_sdk", reason="pip install lightning-sdk")
    printed = started("--machines", "2", capsys=capsys)
    inspect.signature(sdk.Studio).bind(**printed["studio"])
    inspect.signature(sdk.Job.run).bind(studio=None, **printed["job"])
    assert printed["studio"] == {"name": "arborist", "teamspace": "us/agents", "create_ok": False}
    assert sdk.Machine.from_str(printed["job"]["machine"]).accelerator_count == 8
