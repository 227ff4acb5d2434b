"""Finds the interpreter that runs SGLang: its dependencies and the trainer's exclude each other.

Promises: never builds or changes anything; an interpreter that cannot be used is an error that says how to get one.
"""

from __future__ import annotations

import os
from pathlib import Path

VARIABLE = "ARBORIST_SGLANG_PYTHON"
API_KEY_VARIABLE = "ARBORIST_SGLANG_API_KEY"
ROOT = Path(__file__).resolve().parents[3]
DEFAULT = ROOT / ".venv-sglang"


class NoServerEnvironment(RuntimeError):
    """There is no interpreter with SGLang; the message says how to get one."""


def server_python() -> Path:
    """The interpreter that ARBORIST_SGLANG_PYTHON names, else the one that `make sglang` built.

    Raises:
        NoServerEnvironment: there is neither.
    """
    named = os.environ.get(VARIABLE)
    if named:
        python = Path(named)
        if not (python.is_file() and os.access(python, os.X_OK)):
            raise NoServerEnvironment(f"{VARIABLE}: '{named}' is no interpreter; name bin/python of an environment")
        return python.absolute()  # not resolved: bin/python is a link, and its place names the environment
    if not (DEFAULT / ".installed").exists():
        raise NoServerEnvironment(
            f"no environment with SGLang: run `make sglang` (CPU), or set {VARIABLE} to the python of an environment"
            " with sglang installed (GPU)"
        )
    return DEFAULT / "bin" / "python"
