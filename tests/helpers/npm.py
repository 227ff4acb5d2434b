"""Packages of npm, for agents in JavaScript; the test is skipped where there is no node, no npm or no registry."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

_INSTALL_S = 180.0


def install(folder: Path) -> None:
    """What the `package.json` of `folder` asks for, into it."""
    if shutil.which("node") is None or shutil.which("npm") is None:
        pytest.skip("node or npm is missing")
    command = ["npm", "install", "--no-audit", "--no-fund", "--silent"]
    try:
        subprocess.run(command, cwd=folder, check=True, capture_output=True, timeout=_INSTALL_S)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        pytest.skip(f"npm cannot install the openai package here: {error}")
