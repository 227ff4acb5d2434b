"""The site: it builds with every link leading somewhere, and its options are those of the classes."""

from __future__ import annotations

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

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def pages() -> Any:
    spec = importlib.util.spec_from_file_location("site_pages", ROOT / "docs" / "site" / "pages.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclasses look there
    spec.loader.exec_module(module)
    return module


def test_it_builds_and_every_link_leads_somewhere(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    site = tmp_path / "site"
    assert "Two commands" in (site / "index.html").read_text()
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


def test_a_link_to_nothing_is_said(pages: Any, caplog: pytest.LogCaptureFixture) -> None:
    pages._origin["there.md"] = "docs/there.md"
    page: Any = SimpleNamespace(file=SimpleNamespace(src_uri="there.md"))
    with caplog.at_level(logging.WARNING, logger="mkdocs.hooks.pages"):
        kept = pages.on_page_markdown("[a](no/such.md)\n\n```\n[b](neither.md)\n```\n", page, None, None)
    assert "[a](no/such.md)" in kept and "its link to no/such.md leads to nothing" in caplog.text
    assert "neither" not in caplog.text
