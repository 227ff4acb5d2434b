"""The site: it builds with every link leading somewhere, its options are those of the classes, and every function that
an algorithm can name is explained on it."""

from __future__ import annotations

import ast
import html
import importlib.util
import inspect
import logging
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from callbacks import Coach, Report, WeightSync
from datamodules import RolloutDataModule
from datamodules.inference import EmbeddedEngine
from modules import PolicyModule, TreeModule
from modules.advantages import ADVANTAGES
from modules.algorithm import ADVANTAGE_INPUTS, CORRECTION_INPUTS, REWARD_INPUTS, STEP_INPUTS, TOKEN_INPUTS, Regulariser
from modules.corrections import CORRECTIONS
from modules.objectives import AGGREGATIONS, OBJECTIVES, traits_of
from modules.regularisers import REGULARISERS

ROOT = Path(__file__).resolve().parents[2]
TABLES: dict[str, Any] = {  # of the functions that options name, and what these are called with
    "advantage": (ADVANTAGES, set(ADVANTAGE_INPUTS)),
    "objective": (OBJECTIVES, {*TOKEN_INPUTS, *STEP_INPUTS}),
    "regularisers": (REGULARISERS, {*TOKEN_INPUTS, *REWARD_INPUTS}),
    "correction": (CORRECTIONS, set(CORRECTION_INPUTS)),
}


@pytest.fixture(scope="module")
def pages() -> Any:
    spec = importlib.util.spec_from_file_location("site_pages", ROOT / "docs" / "site" / "pages.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclasses look there
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def functions_page(pages: Any) -> str:
    """Half a second each time it is made."""
    return str(pages.functions_page())


@pytest.mark.slow
def test_it_builds_and_every_link_leads_somewhere(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    site = tmp_path / "site"
    assert "Two commands" in (site / "index.html").read_text()
    assert 'id="gspo"' in (site / "algorithms.html").read_text()  # what is made follows what is written
    runs = [path for room in ("configs", "examples") for path in (ROOT / room).rglob("*.yaml")]
    assert len(list((site / "recipes").glob("*.html"))) == len(runs) + 1
    for file in site.rglob("*.html"):
        text = re.sub(r"<(pre|code).*?</\1>", "", file.read_text(), flags=re.DOTALL)
        assert not re.findall(r'(?:src|<link[^>]*href)="https?:', text), f"{file} fetches something from elsewhere"


def test_options_are_those_of_the_classes(pages: Any) -> None:
    found = {one.node.name: one for ones in pages.options().values() for one in ones}
    for kind in (PolicyModule, RolloutDataModule, EmbeddedEngine, WeightSync, Coach, Report):
        taken = list(inspect.signature(kind).parameters)
        if kind is PolicyModule:  # `**tree_options` are those of what it inherits from
            taken = [*taken[:-1], *(name for name in inspect.signature(TreeModule).parameters if name not in taken)]
        assert [one.name for one in found[kind.__name__].parameters] == taken, kind
    assert {"RLVRWorkflow", "JsonlPrompts", "NoSignal", "DTAStrategy", "SFTModule"} <= found.keys()
    assert not {"Producer", "StalenessGate"} & found.keys() and not [name for name in found if name.startswith("_")]


@pytest.mark.parametrize("key", TABLES)
def test_every_function_that_an_option_names_is_explained(pages: Any, functions_page: str, key: str) -> None:
    table, inputs = TABLES[key]
    found, text = pages.functions(key), functions_page
    assert list(found) == list(table)
    for name, function in table.items():
        (section,) = re.findall(rf"^### {name}\n(.*?)(?=^##)", text, flags=re.MULTILINE | re.DOTALL)
        told = html.unescape(section)
        assert all(line.strip() in told for line in (inspect.getdoc(function) or "no docstring").splitlines())
        signature = pages.signature(*found[name])
        assert signature in section
        (shown,) = ast.parse(f"def {signature}: ...").body
        assert isinstance(shown, ast.FunctionDef)
        real = inspect.signature(function).parameters
        assert [arg.arg for arg in shown.args.args] == list(real)
        assert [arg.arg for arg in shown.args.args if arg.annotation is None] == [x for x in real if x in inputs]
        defaults = [ast.literal_eval(one) for one in shown.args.defaults]
        assert defaults == [x.default for x in real.values() if x.default is not inspect.Parameter.empty]
        if key == "objective":
            assert f"| `{name}` | `{traits_of(function).aggregation}` |" in text


@pytest.mark.parametrize("key", TABLES)
def test_help_and_overview_name_every_function(key: str) -> None:
    overview = (ROOT / "docs" / "algorithms.md").read_text()
    (row,) = re.findall(rf"^\| `model\.{key}`.*$", overview, flags=re.MULTILINE)
    texts = [_argument(PolicyModule, key)] + ([_argument(Regulariser, "name")] if key == "regularisers" else [])
    for name in TABLES[key][0]:
        assert f"`{name}`" in row and all(re.search(rf"\b{name}\b", text) for text in texts), name
    assert "docs/algorithms.md" in _argument(PolicyModule, "advantage")


def test_default_aggregations_are_told(functions_page: str) -> None:
    text = _argument(PolicyModule, "aggregation")
    assert all(f'"{name}"' in text and f'"{name}"' in functions_page for name in AGGREGATIONS)
    rows = re.findall(r"^\| `(\w+)` \| 1 / .* \| (.*) \|$", (ROOT / "docs/algorithms.md").read_text(), re.MULTILINE)
    assert [name for name, _ in rows] == list(AGGREGATIONS)
    others = {name: traits_of(one).aggregation for name, one in OBJECTIVES.items()}
    for mode, of in rows[1:3]:
        names = re.findall(r"`(\w+)`", of)
        assert names == [name for name in sorted(others) if others[name] == mode]
        assert f'"{mode}" of {" and ".join(names)}' in text
    assert rows[0][1].startswith("all others") and '"token_mean" of all others' in text


def _argument(kind: type, name: str) -> str:
    """What the docstring of a class says of one of its arguments, on one line."""
    told = re.findall(rf"^ {{4}}{name}: (.*?)(?=^ {{0,4}}\w|\Z)", inspect.getdoc(kind) or "", re.MULTILINE | re.DOTALL)
    return " ".join(told[0].split())


def test_a_link_to_nothing_is_said(pages: Any, caplog: pytest.LogCaptureFixture) -> None:
    pages._origin["there.md"] = "docs/there.md"
    page: Any = SimpleNamespace(file=SimpleNamespace(src_uri="there.md"))
    with caplog.at_level(logging.WARNING, logger="mkdocs.hooks.pages"):
        kept = pages.on_page_markdown("[a](no/such.md)\n\n```\n[b](neither.md)\n```\n", page, None, None)
    assert "[a](no/such.md)" in kept and "its link to no/such.md leads to nothing" in caplog.text
    assert "neither" not in caplog.text
