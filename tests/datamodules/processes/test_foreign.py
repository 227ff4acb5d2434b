"""Where a failure of users' code is said to have been raised."""

from __future__ import annotations

import linecache
import sys
from pathlib import Path

import pytest

from datamodules.processes.foreign import place


def raised(file: Path, code: str) -> Exception:
    try:
        exec(compile(code, str(file), "exec"))
    except Exception as error:
        return error
    raise AssertionError("it raises")


def test_users_code_may_be_below_pythons_prefix_and_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    file = Path(sys.base_prefix, "src", "app", "reward.py")
    errors = [raised(file, "\nint('a')"), raised(file, "import json\n\njson.loads('a')")]  # which is Python's own
    with monkeypatch.context() as patched:
        for name in ("getline", "checkcache"):
            patched.setattr(linecache, name, None)
        places = [place(one) for one in errors]
    assert places == [" at reward.py:2", " at reward.py:3"]


def test_what_is_installed_is_not_the_users() -> None:
    assert Path(__file__).name in place(raised(Path(pytest.__file__), "int('a')"))
