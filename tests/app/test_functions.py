"""Names that lead nowhere: whether the module, the function in it, or what the module itself imports is missing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from app.functions import choose

FILES = {
    "mine_good.py": "def above(batch):\n    return batch\n\n\nclass Keeps:\n    __call__ = above\n",
    "mine_lacks.py": "import math\nimport scipyy\n",
    "mine_stale.py": "from datamodules.prompts import NoSuchThing\n",
    "mine_typo.py": "import math\n\nROOT = math.sqroot(2)\n",
    "mine_syntax.py": "def f(:\n",
    "mine_through.py": "import mine_lacks\n",
}


@pytest.fixture(autouse=True)
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))


def chosen(given: Any) -> Any:
    return choose("advantage", given, None, {"grpo": len}, ["batch"])


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("gro", r"^advantage: no function 'gro'; name one of grpo, or give an import path of your own$"),
        ("no.such.thing", r"^advantage: no function .*: there is no module 'no' to import .*; name one of grpo"),
        ("mine_good.deeper.f", r"there is no module 'mine_good\.deeper' to import"),
        ("mine_good.abov", r"module 'mine_good' \(.*mine_good\.py\) has no 'abov'; did you mean 'mine_good\.above'\?"),
        ("mine_good.zzz", r"module 'mine_good' \(.*\) has no 'zzz'; name one of grpo"),
        (
            "mine_lacks.f",
            r"importing 'mine_lacks' failed in .*mine_lacks\.py, line 2 \(import scipyy\): .*'scipyy'; mend",
        ),
        ("mine_through.f", r"importing 'mine_through' failed in .*mine_lacks\.py, line 2 \(import scipyy\)"),
        (
            "mine_stale.f",
            r"failed in .*mine_stale\.py, line 1 \(from .*\): ImportError: cannot import name 'NoSuchThing'",
        ),
        ("mine_typo.f", r"failed in .*mine_typo\.py, line 3 \(ROOT = .*\): AttributeError: .*'sqroot'"),
        ("mine_syntax.f", r"importing 'mine_syntax' failed: SyntaxError: .*\(mine_syntax\.py, line 1\)"),
        ("mine_good.Keeps", r"'mine_good\.Keeps' is a class, .*: write \{class_path: mine_good\.Keeps, init_args: "),
    ],
)
def test_what_is_missing_is_told(given: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        chosen(given)


def test_what_is_there_is_taken() -> None:
    made = chosen("mine_good.above")
    assert (made.name, made.needs) == ("above", {"batch"}) and made({"batch": 3}) == 3
