"""The benchmark of a hybrid that learns: its configurations are the quickstart's, its figures are read off the runs."""

from __future__ import annotations

from pathlib import Path

import jsonargparse
import pytest
import torch
import yaml
from lightning import LightningDataModule, LightningModule
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.learning import hybrid
from benchmarks.learning.__main__ import ROOT


@pytest.mark.parametrize("family", hybrid.FAMILIES)
def test_both_families_have_the_quickstarts_widths(family: str) -> None:
    given = yaml.safe_load((ROOT / "configs/quickstart_sft.yaml").read_text())["model"]["init_args"]["model"]["config"]
    config = hybrid.warm_config(family, 100)
    fields = config["model"]["init_args"]["model"]["config"]
    assert {name: fields[name] for name in given if name != "model_type"} == {
        name: value for name, value in given.items() if name != "model_type"
    }
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**fields))
    assert model.config.model_type == family and 0.5e6 < model.num_parameters() < 0.9e6
    assert config["trainer"]["max_steps"] == round(100 * hybrid.WARM[family])


def test_the_second_part_is_the_quickstarts(tmp_path: Path) -> None:
    config, given = hybrid.rl_config(1, tmp_path, 50), yaml.safe_load((ROOT / "configs/quickstart.yaml").read_text())
    assert config["data"]["init_args"]["engine"] == given["data"]["init_args"]["engine"]
    assert config["model"]["init_args"]["optimizer"] == given["model"]["init_args"]["optimizer"]
    parser = jsonargparse.ArgumentParser(exit_on_error=False)
    parser.add_subclass_arguments(LightningModule, "model")
    parser.add_subclass_arguments(LightningDataModule, "data")
    made = parser.instantiate(parser.parse_object({"model": config["model"], "data": config["data"]}))
    assert made.data.batch_size * made.data.group_size == 512


def test_figures_are_read_off_a_run(tmp_path: Path) -> None:
    rows = ["step,reward,val/accuracy", "0,,0.25"]
    rows += [f"{k},{k / 20}," for k in range(20)] + ["20,,0.75"]
    (tmp_path / "metrics.csv").write_text("\n".join(rows) + "\n")
    found = hybrid.result("qwen3", 0, tmp_path, 9.0)
    assert found["reward_first"] == pytest.approx(0.025) and found["reward_last"] == pytest.approx(0.925)
    [row] = hybrid.summary([found])
    assert row["held_out_before"] == 0.25 and row["held_out_after"] == [0.75]
    report = {"command": "x", "hardware": "y", "steps": 20, "warm_steps": dict.fromkeys(hybrid.FAMILIES, 3)}
    assert "| qwen3 | 0.025 | 0.925 | 0.250 | 0.750 | 9 |" in hybrid.markdown(report | {"summary": [row]})
