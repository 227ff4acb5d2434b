"""docs/extending.md: its file runs as it stands, all parts in one fit."""

from __future__ import annotations

import csv
import re
import shutil
import sys
from pathlib import Path

import pytest
import yaml

from app.cli import main
from modules import PolicyModule
from tests.docs.test_readme import ROOT, SMALL, save_model
from tests.helpers.tiny_policy import make_batch, source

PAGE = (ROOT / "docs" / "extending.md").read_text()


def blocks(language: str) -> list[str]:
    fenced = re.findall(r"^```(\w*)\n(.*?)^```$", PAGE, flags=re.MULTILINE | re.DOTALL)
    return [text for name, text in fenced if name == language]


def test_its_parts_train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["arborist"])
    shutil.copytree(ROOT / "configs", tmp_path / "configs")
    (tmp_path / "my_parts.py").write_text("\n\n".join(blocks("python")))
    (config,) = blocks("yaml")
    (tmp_path / "my_parts.yaml").write_text(config)
    save_model(tmp_path / "model", "char:0123456789+-*=", [])
    (command,) = blocks("")
    model = "runs/quickstart/<time>/warm_start/model"
    flags = command.strip().removeprefix("python -m app ").replace(model, "model").split()
    main([*flags, "--run_dir", "run", "--data.batch_size=4", *SMALL])
    used = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    assert used["model"]["init_args"]["objective"] == "my_parts.squared_ratio"
    with (tmp_path / "run" / "metrics.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["reward"]]
    assert len(rows) == 2 and [float(row["lr"]) for row in rows] == pytest.approx([0.0005, 0.001])
    assert used["model"]["init_args"]["optimizer"]["class_path"] == "my_parts.SignOfMean"
    best = re.search(r"step 1: the best reward so far, (\S+)", "".join(capsys.readouterr()))
    assert best is not None and float(best[1]) == pytest.approx(float(rows[0]["reward"]), abs=1e-3)
    two = PolicyModule(source(), optimizer=sys.modules["my_parts"].TwoRates)
    two.configure_model()
    groups = two.configure_optimizers().param_groups
    assert [(group["lr"], group["param_names"][:1]) for group in groups] == [
        (1e-5, ["policy.model.layers.0.self_attn.q_proj.weight"]),
        (1e-6, ["policy.model.embed_tokens.weight"]),
    ]
    whole = PolicyModule(source(), objective="my_parts.of_one_scale")
    assert whole.algorithm.whole_step and whole.aggregation_mode == "sequence_mean"
    batch = make_batch()
    batch.finish_reasons[1] = "length"
    first, cut, last = batch.split(sys.modules["my_parts"].of_whole_replies(batch))[:3]
    assert float(cut.abs().max()) == 0 and min(float(one.abs().min()) for one in (first, last)) > 0
    for row in rows:  # its statistics are logged by name
        assert float(row["reward/digits"]) >= 0 and float(row["moved"]) >= 0 and float(row["certainty"]) >= 0
