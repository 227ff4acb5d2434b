"""`arborist look`: runs, runs over each other, recorded batches and conversations, and what is refused."""

from __future__ import annotations

import json
import os
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from app.cli import main
from datamodules.files.recording import RolloutRecorder
from datamodules.groups import Group
from tests.callbacks.report.test_moments import episode
from tests.helpers.recorded_samples import byte_tokenizer

DATA = os.environ.get("ARBORIST_DATA", "")


def data_of(page: Path) -> Any:
    (text,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page.read_text(), re.DOTALL)
    return json.loads(text)


def made_run(path: Path, reward: float) -> Path:
    path.mkdir(parents=True)
    (path / "metrics.csv").write_text(f"epoch,reward,step\n0,{reward},0\n0,{reward},1\n")
    return path


@pytest.fixture(autouse=True)
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_runs_alone_and_over_each_other(capsys: pytest.CaptureFixture[str]) -> None:
    for name, reward in (("a", 0.2), ("b", 0.7)):
        made_run(Path("runs", name), reward)
    main(["look", "runs/a"])
    main(["look", "runs/a", "runs/b"])
    assert "runs/a/report.html" in capsys.readouterr().out
    both = Path("runs/look/a.html").read_text()
    assert "runs/a training" in both and "runs/b training" in both
    assert len(data_of(Path("runs/look/a.html"))["charts"]) == 1


def test_batches_that_a_run_recorded() -> None:
    byte_tokenizer().save_pretrained("tokenizer")
    recorder = RolloutRecorder(Path("run/rollouts"))
    for version in range(5):
        flat = [episode([1, 2, 60 + i], 1.0, 1, i) for i in (8, 9)]
        good = [episode([1, 2, 60 + i], float(i <= version), 0, i) for i in range(4)]
        recorder.write(version, [Group(0, "p0", version, good), Group(1, "p1", version, flat)])
    main(["look", "run/rollouts", "--tokenizer", "tokenizer", "--out", "page.html"])
    found = data_of(Path("page.html"))
    (run,) = found["runs"]
    assert [one["label"] for one in run["batches"]] == [f"version {v}" for v in (0, 1, 3, 4)]
    assert run["batches"][0]["credit"] == "reward less its group's mean" and len(found["charts"]) == 4
    assert "token ids are shown" not in Path("page.html").read_text()
    main(["look", "run/rollouts", "--out", "ids.html"])
    assert "token ids are shown" in Path("ids.html").read_text()


@pytest.mark.skipif(not DATA, reason="ARBORIST_DATA names no folder of recorded data")
def test_recorded_conversations() -> None:
    main(["look", f"{DATA}/tau/airline_tokens.npz", "--out", "page.html"])
    (run,) = data_of(Path("page.html"))["runs"]
    tasks = [list(map(int, re.findall(r"\d+", one["label"]))) for one in run["batches"]]
    assert tasks[0][0] == 1 and tasks[-1][1:] == [50, 50]  # all are shown
    assert all(here[0] == before[1] + 1 for before, here in pairwise(tasks))
    assert sum(one["sequences"] for one in run["batches"]) == 200


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["nowhere"], "PATH: there is no 'nowhere'"),
        (["runs/a", "--tokenizer", "x"], "--tokenizer: has no effect on run directories"),
        (["runs/empty"], "nothing was logged"),
        (["runs/begun"], "runs/begun: nothing was logged or recorded yet; try again later"),
        (["runs"], "runs: no recorded batches (batch_*.safetensors) in it; name another directory"),
        (
            ["runs/mine.yaml"],
            "path: 'runs/mine.yaml' is neither conversations (.jsonl, .jsonl.gz, .npz) nor a directory",
        ),
    ],
)
def test_mistakes(args: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    made_run(Path("runs/a"), 0.5)
    made_run(Path("runs/empty"), 0.5).joinpath("metrics.csv").write_text("")
    Path("runs/mine.yaml").write_text("")
    Path("runs/begun").mkdir()
    Path("runs/begun/config.yaml").write_text("")
    with pytest.raises(SystemExit) as ended:
        main(["look", *args])
    printed = capsys.readouterr().err
    assert ended.value.code == 2 and said in printed and "Traceback" not in printed
