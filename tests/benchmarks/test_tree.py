"""`arborist bench tree` and its companions at toy size: figures are there, counted right, and the same gradients."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from app.cli import main as arborist
from benchmarks.common.memory import peak_bytes
from benchmarks.common.systems import NAMES
from benchmarks.tree import __main__ as tree
from benchmarks.tree import error as tree_error
from benchmarks.tree import memory as tree_memory

LLAMA = {
    "model_type": "llama",
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "bos_token_id": 100_000,
}


@pytest.fixture(scope="module", autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def read(folder: Path, name: str) -> dict[str, Any]:
    return json.loads((folder / f"{name}.json").read_text())


@pytest.fixture(scope="module")
def reported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with the report of one workload, made by the command."""
    folder = tmp_path_factory.mktemp("report")
    arborist(["bench", "tree", "--toy", "--workloads", "turns", "--repeats", "2", "--out", str(folder)])
    return folder


def test_every_system_is_measured_and_computes_the_same_gradients(reported: Path) -> None:
    report = read(reported, "tree")
    assert report["commands"] == ["arborist bench tree --workloads turns --repeats 2 --toy"]
    assert report["unfinished"] == [] and report["left_out"] == {}
    (case,) = report["cases"]
    rows = case["systems"]
    assert case["case"] == "turns 1x2" and case["source"] == "synthetic" and case["repeats"] == 2
    assert tuple(rows) == NAMES
    for name, row in rows.items():
        assert row["tokens"] > 0 and row["pairs"] >= row["tokens"] and row["flops"] >= row["least_flops"] > 0
        assert 0 < row["measured_share"] <= 1 and row["peak_bytes"] > 0
        for clock in ("cpu_seconds", "wall_seconds"):
            assert row[clock]["min"] <= row[clock]["median"] <= row[clock]["max"] and len(row[clock]["runs"]) == 2
        assert name == "dense" or row["gradient_error"]["largest"] < 2e-6
    tokens = {name: row["tokens"] for name, row in rows.items()}
    assert tokens["dense"] > tokens["dense-leaf"] > tokens["ours"] == tokens["sparse"] == tokens["path-at-a-time"]
    for ratios in case["against_ours"].values():
        assert set(ratios) == set(NAMES) - {"ours"}
        assert all(r["of_limit"] == pytest.approx(r["ratio"] / r["flop_limit"]) for r in ratios.values())
    text = (reported / "tree.md").read_text()
    assert "| path-at-a-time |" in text and report["environment"]["torch"] in text and "| turns 1x2 |" in text
    assert (reported / "tree.png").stat().st_size > 1000


def test_a_report_takes_further_cases_of_the_same_model_only(
    reported: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--toy", "--repeats", "1", "--check", "0", "--out", str(reported), "--append"]
    tree.main([*options, "--workloads", "whole"])
    report = read(reported, "tree")
    assert [case["case"] for case in report["cases"]] == ["turns 1x2", "whole 1x2"] and len(report["commands"]) == 2
    whole = report["cases"][1]["systems"]["ours"]
    assert whole["gradient_error"] is None and whole["peak_bytes"] is None
    assert " resident |" in (reported / "tree.md").read_text()
    with pytest.raises(SystemExit):
        tree.main(["--dtype", "bfloat16", *options])
    assert "is of another model; choose another --name" in capsys.readouterr().err


def test_any_configuration_and_any_recorded_file(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    prompt = rng.integers(0, 1000, 30)
    rows = [np.concatenate([prompt, rng.integers(0, 1000, n)]) for n in (9, 12, 20)]
    lines = [{"tokens": row.tolist(), "loss_mask": [0] * 30 + [1] * (len(row) - 30)} for row in rows]
    (tmp_path / "mine.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    options = ["--data", str(tmp_path / "mine.jsonl"), "--first", "2", "--repeats", "1", "--chunk", "16"]
    tree.main([*options, "--model", str(tmp_path), "--threads", "1", "--out", str(tmp_path / "out")])
    report = read(tmp_path / "out", "tree")
    assert report["model"]["type"] == "llama" and report["model"]["vocabulary"] == 300
    (case,) = report["cases"]
    assert (case["case"], case["source"], case["sequences"]) == ("recorded", "mine.jsonl", 2)
    assert case["systems"]["dense"]["tokens"] == 39 + 42 and case["systems"]["ours"]["tokens"] == 30 + 9 + 12
    assert all(row["gradient_error"]["largest"] < 2e-6 for n, row in case["systems"].items() if n != "dense")


def test_what_does_not_fit_the_time_is_left_out_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tree.main(["--toy", "--workloads", "think", "--minutes", "0.0001", "--out", str(tmp_path)])
    assert "think 1x2 is left out: it needs about" in capsys.readouterr().err
    report = read(tmp_path, "tree")
    assert report["cases"] == [] and list(report["left_out"]) == ["think 1x2"]
    assert "think 1x2 is left out" in (tmp_path / "tree.md").read_text()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--repeats", "0"], "--repeats must be at least 1, got 0"),
        (["--minutes", "0"], "--minutes must be above 0"),
        (["--toy", "--model", "x"], "--model has no effect with --toy"),
        (["--toy", "--chunk", "8"], "--chunk and --live have no effect with --toy"),
        (["--toy", "--append"], "--append has no effect without --out"),
        (["--toy", "--size", "9x2"], "--size: size 9x2: synthetic has 8 tasks"),
        (["--toy", "--first", "3"], "--first is for files of sequences"),
        (["--data", "rows.jsonl", "--size", "1x2"], "--size chooses among recorded conversations"),
        (["--data", "nowhere.jsonl"], "--data: there is no file 'nowhere.jsonl'"),
        (["--data", "rows.jsonl", "--model", "nowhere.json"], "--model: nowhere.json is no readable JSON"),
        (["--data", "rows.jsonl", "--vocabulary", "1"], "--vocabulary must be at least 2, got 1"),
        (["--data", "rows.jsonl"], "rows.jsonl:1: 'loss_mask' must hold 0 or 1"),
    ],
)
def test_mistakes_name_the_option(
    options: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text('{"tokens": [1, 2, 3], "loss_mask": [0, 1]}\n')
    with pytest.raises(SystemExit) as caught:
        arborist(["bench", "tree", *options])
    printed = capsys.readouterr().err
    assert caught.value.code == 2 and message in printed and "Traceback" not in printed


def test_peak_memory_is_counted_exactly() -> None:
    def run() -> None:
        first = torch.empty(1 << 20, dtype=torch.uint8)
        second = torch.empty(3 << 20, dtype=torch.uint8)
        del first
        del second
        torch.empty(2 << 20, dtype=torch.uint8)

    assert peak_bytes(run, torch.device("cpu")) == 4 << 20
    assert peak_bytes(lambda: None, torch.device("cpu")) == 0


@pytest.mark.slow
def test_memory_falls_with_the_budget_and_does_not_follow_the_batch(tmp_path: Path) -> None:
    tree_memory.main(["--toy", "--sizes", "1x2", "3x2", "--out", str(tmp_path)])
    report = read(tmp_path, "tree_memory")
    points = report["curve"]["points"]
    assert points[0]["fraction"] is None and points[0]["extra_forward_tokens"] == 0
    assert [p["live_tokens"] for p in points] == sorted((p["live_tokens"] for p in points), reverse=True)
    assert all(p["peak_live_tokens"] <= p["live_tokens"] for p in points)
    assert points[-1]["peak_bytes"] < 0.5 * points[0]["peak_bytes"] and points[-1]["extra_forward_tokens"] > 0
    small, large = report["working_sets"][0]["rows"]
    assert large["tree_tokens"] > 2 * small["tree_tokens"]
    assert large["working_set_bytes"] < 1.1 * small["working_set_bytes"]
    full, narrow = report["windows"]["rows"]
    assert full["rows"] == full["longest_path"] > narrow["rows"] and narrow["path"] < 0.9 * full["path"]
    assert (tmp_path / "tree_memory.png").exists() and "| turns 3x2 |" in (tmp_path / "tree_memory.md").read_text()


def test_errors_are_within_their_limits_and_not_zero(tmp_path: Path) -> None:
    tree_error.main(["--toy", "--out", str(tmp_path)])
    found = read(tmp_path, "tree_error")["errors"]
    assert found["ok"] and 0 < found["float32"]["largest"] <= 2e-6
    assert 1e-3 < found["bfloat16"]["dense"]["norm"] < 0.1 and found["over_dense"] <= 1.1
    assert found["bfloat16"]["ours against dense"]["norm"] > 1e-4
    assert "against float64" in (tmp_path / "tree_error.md").read_text()
