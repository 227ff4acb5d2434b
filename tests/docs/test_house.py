"""Rules of the house that no linter knows, over the product's syntax trees; `[tool.importlinter]` has the others."""

from __future__ import annotations

import ast
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PRODUCT = ("app", "modules", "datamodules", "callbacks")

MOST_LINES = 500
MOST_ENTRIES = 17
MOST_PARAMETERS = 17
MOST_METHODS = 25

LARGE_CLASSES = {"TreeModule", "DTAStrategy"}  # Lightning's hooks


@cache
def files() -> dict[str, ast.Module]:
    """Syntax trees of the product by path."""
    paths = (path for folder in PRODUCT for path in sorted((ROOT / folder).rglob("*.py")))
    return {path.relative_to(ROOT).as_posix(): ast.parse(path.read_text()) for path in paths}


def imports(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """(module, name) of every import from, those for types only and those inside functions included."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            yield from ((node.module or "", alias.name) for alias in node.names)


def classes() -> Iterator[tuple[str, ast.ClassDef, list[ast.FunctionDef | ast.AsyncFunctionDef]]]:
    """(name, class, its methods) of every class of the product."""
    for tree in files().values():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                methods = [one for one in node.body if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef)]
                yield node.name, node, methods


def is_dataclass(node: ast.ClassDef) -> bool:
    return any("dataclass" in ast.unparse(decorator) for decorator in node.decorator_list)


def test_files_are_short() -> None:
    lines = {path: (ROOT / path).read_text().count("\n") for path in files()}
    assert {path: count for path, count in lines.items() if count > MOST_LINES} == {}


def test_private_names_stay_in_their_file() -> None:
    taken = [
        f"{path}: {module}.{name}"
        for path, tree in files().items()
        for module, name in imports(tree)
        if module.split(".")[0] in PRODUCT and (name.startswith("_") or "._" in module)
    ]
    assert taken == []


def test_no_file_imports_a_package_it_lies_in() -> None:
    """That circle goes through the package's face, where the linter sees none."""
    circles = [
        f"{path}: {module}"
        for path, tree in files().items()
        for module, name in imports(tree)
        if path.startswith(module.replace(".", "/") + "/")
        and not (ROOT / module.replace(".", "/") / f"{name}.py").exists()
    ]
    assert circles == []


def test_folders_show_few_entries() -> None:
    shown: dict[str, int] = {}
    for folder in (*PRODUCT, "benchmarks", "tests", "configs", "docs"):
        for path in [ROOT / folder, *(ROOT / folder).rglob("*")]:
            if path.is_dir() and "__pycache__" not in path.parts:
                entries = {one.stem for one in path.iterdir() if one.name != "__pycache__"}  # x.json, x.md: one result
                shown[path.relative_to(ROOT).as_posix()] = len(entries)
    assert {folder for folder, count in shown.items() if count > MOST_ENTRIES} == set()


def test_constructors_take_few_parameters() -> None:
    counts: dict[str, int] = {}
    for name, node, methods in classes():
        for method in methods:
            if method.name == "__init__":
                given = method.args
                counts[name] = len(given.posonlyargs) + len(given.args) + len(given.kwonlyargs) - 1
        if is_dataclass(node):
            counts[name] = sum(isinstance(one, ast.AnnAssign) for one in node.body)
    assert {name for name, count in counts.items() if count > MOST_PARAMETERS} == set()


def test_classes_have_few_methods() -> None:
    counts = {name: len(methods) for name, _, methods in classes()}
    assert {name for name, count in counts.items() if count > MOST_METHODS} == LARGE_CLASSES


def test_no_file_is_ignored() -> None:
    """A new file in a folder that .gitignore names is in no commit, and its tests pass where it was written."""
    paths = "\n".join([*files(), *(path.relative_to(ROOT).as_posix() for path in (ROOT / "tests").rglob("*.py"))])
    command = ["git", "-C", str(ROOT), "check-ignore", "--no-index", "--stdin"]
    found = subprocess.run(command, input=paths, capture_output=True, text=True)
    assert found.returncode in (1, 128) and found.stdout == "", found.stdout  # 128: no checkout
