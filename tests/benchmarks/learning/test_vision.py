"""The benchmark of models that see: its configurations are understood and fit the model that is made for them."""

from __future__ import annotations

from pathlib import Path

import jsonargparse
import pytest
from lightning import LightningDataModule, LightningModule

from benchmarks.learning import vision
from datamodules.prompts import EasyVqaPrompts
from datamodules.workflows.adapters.minigrid_workflow import MiniGridWorkflow
from examples.vision.make_model import write


@pytest.mark.parametrize("task", vision.SHAPES)
def test_both_parts_are_understood(task: str, tmp_path: Path) -> None:
    write(tmp_path, **vision.SHAPES[task])
    parser = jsonargparse.ArgumentParser(exit_on_error=False)
    parser.add_subclass_arguments(LightningModule, "model")
    parser.add_subclass_arguments(LightningDataModule, "data")
    for config in (vision.warm_config(task, 1, tmp_path), vision.rl_config(task, 1, tmp_path, 8)):
        made = parser.instantiate(parser.parse_object({"model": config["model"], "data": config["data"]}))
        assert isinstance(made.data.prompts, EasyVqaPrompts) == (task == "easy_vqa")
    assert made.data.validation.prompts.size == len(vision.dealt(vision.held_out(task)))
    if task == "navigation":
        assert isinstance(made.data.workflow, MiniGridWorkflow)
    else:
        longest = max(len(prompt.answer or "") for prompt in vision.dealt(vision.held_out(task)))
        assert made.data.workflow.max_new_tokens > longest, "an answer and its end"


@pytest.mark.parametrize(
    ("task", "least", "most"), [("squares", 0.3, 0.4), ("easy_vqa", 0.3, 0.4), ("navigation", 0.08, 0.16)]
)
def test_what_needs_no_eyes_is_not_much(task: str, least: float, most: float) -> None:
    assert least < vision.blind(task) < most
