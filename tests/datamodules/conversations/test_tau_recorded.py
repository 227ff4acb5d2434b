"""`configs/tau_recorded.yaml` end to end: real conversations, the real vocabulary, the token counts of the data."""

from __future__ import annotations

import csv
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from benchmarks.tree.token_ratios import count
from datamodules.conversations.tokens import load_npz
from tests.helpers.recorded_samples import real_file

ROOT = Path(__file__).parents[3]
CONFIG = ROOT / "configs" / "tau_recorded.yaml"


def fit(*flags: str, data: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"ARBORIST_DATA": data}
    command = [sys.executable, "-m", "app", "fit", "--config", str(CONFIG), *flags]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=500)


def test_the_config_is_the_promised_workload() -> None:
    config = yaml.safe_load(CONFIG.read_text())
    data, model = config["data"]["init_args"], config["model"]["init_args"]["model"]["config"]
    assert data["workload"] == "turns" and data["tasks_per_batch"] == 1 and data["trials"] == 4
    assert len(data["tasks"]) >= 5  # one optimizer step each
    assert model["model_type"] == "qwen3" and model["vocab_size"] == 151_936


@pytest.mark.slow
def test_two_steps_on_real_conversations(tmp_path: Path) -> None:
    """The two smallest tasks of the config; every step logs the counts that follow from the data."""
    npz = real_file("tau/airline_tokens.npz")
    flags = [
        "--data.init_args.tasks",
        "[44,41]",
        "--data.init_args.shuffle",
        "false",
        "--run_dir",
        str(tmp_path / "run"),
    ]
    done = fit(*flags, data=str(npz.parents[1]))
    assert done.returncode == 0, done.stderr[-2000:]
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss < 8 * 2**20  # KiB: 8 GiB
    rows = list(csv.DictReader((tmp_path / "run" / "metrics.csv").open()))
    assert len(rows) == 2
    conversations = load_npz(npz)
    for row, task in zip(rows, ("41", "44"), strict=True):
        group = [c for c in conversations if c.task == task]
        counts = count(group, "turns")
        logged = [float(row[f"tokens/{name}"]) for name in ("dense", "leaf", "tree")]
        assert logged == [counts.dense_tokens, counts.leaf_tokens, counts.tree_tokens]
        assert float(row["reward"]) == sum(c.reward for c in group) / 4
        assert float(row["approx_kl"]) == 0.0  # no recorded sampler: the policy itself is the old one
        assert "mismatch_kl" not in row or row["mismatch_kl"] == ""
    assert float(rows[0]["grad_norm"]) > 0
    pictures = {path.name for path in (tmp_path / "run").glob("*.png")}
    assert {"reward_curve.png", "tree.png"} <= pictures
