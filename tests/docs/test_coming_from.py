"""docs/coming_from.md: every option it names of this project and of TRL exists."""

from __future__ import annotations

import ast
import inspect
import re
from dataclasses import fields
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import transformers

from datamodules import RolloutDataModule
from datamodules.prompts import Prompt
from modules import ModelSource, PolicyModule
from modules.tree_module import TreeModule

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "coming_from.md").read_text()
ROWS = [
    [cell.strip() for cell in re.split(r" \| ", line.strip("| \n"))]
    for line in PAGE.splitlines()
    if line.startswith("| ")
][1:]


def options(of: Any) -> set[str]:
    return set(inspect.signature(of).parameters)


def test_every_row_says_something_of_everybody() -> None:
    assert {len(row) for row in ROWS} == {6} and all(cell for row in ROWS for cell in row)


def test_options_of_this_project() -> None:
    homes = {"model": options(PolicyModule) | options(TreeModule), "data": options(RolloutDataModule)}
    homes |= {"trainer": options(pl.Trainer), "model.model": options(ModelSource)}
    named = [key for row in ROWS for key in re.findall(r"`((?:model|data|trainer)\.[\w.]+)", row[1])]
    assert len(named) > 30
    assert [key for key in named if key.rpartition(".")[2] not in homes[key.rpartition(".")[0]]] == []


def test_options_of_trl() -> None:
    spec = find_spec("trl")
    assert spec is not None and spec.origin is not None
    source = Path(spec.origin).parent / "trainer"
    files = [source / f"{name}.py" for name in ("grpo_config", "base_config", "grpo_trainer")]
    names = {
        found
        for file in files
        for node in ast.walk(ast.parse(file.read_text()))
        for found in (
            [node.target.id]
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
            else [one.arg for one in node.args.args]
            if isinstance(node, ast.FunctionDef)
            else []
        )
    }
    names |= {field.name for field in fields(transformers.TrainingArguments)}
    named = [key for row in ROWS for key in re.findall(r"`(\w+)", row[2])]
    assert len(named) > 25 and [key for key in named if key not in names] == []


def correctness(prompts: list[Any], completions: list[Any], answer: list[str], level: list[int]) -> list[float]:
    said = [one if isinstance(one, str) else one[0]["content"] for one in completions]
    asked = [one if isinstance(one, str) else one[-1]["content"] for one in prompts]
    return [float(text == right) + n * len(task) for text, right, n, task in zip(said, answer, level, asked)]


def test_a_reward_function_of_trls() -> None:
    (code,) = re.findall(r"^```python\n(.*?)^```$", PAGE, flags=re.MULTILINE | re.DOTALL)
    made: dict[str, Any] = {}
    exec(code, made)
    score = made["FromTRL"](f"{__name__}.correctness")
    told: tuple[dict[str, Any], ...] = ({"role": "user", "content": "1+1="},)
    for prompt in (
        Prompt("a", text="1+1=", answer="2", metadata={"level": 2}),
        Prompt("a", messages=told, answer="2", metadata={"level": 2}),
    ):
        assert (score(prompt, "2"), score(prompt, "3")) == (9.0, 8.0)
