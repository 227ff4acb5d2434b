"""Ranks that send over limited links, at toy size: every server has the weights, and the shares of links add up."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.rollouts import senders

pytestmark = pytest.mark.slow


def test_each_rank_sends_its_share(tmp_path: Path) -> None:
    if shutil.which("tc") is None or subprocess.run(["unshare", "--net", "--mount", "true"], check=False).returncode:
        pytest.skip("no network namespaces here: they need iproute2 and root")
    options = ["--servers", "2", "--ranks", "1", "2", "--megabytes", "0.5", "--mbit", "50", "--repeats", "1"]
    command = [sys.executable, "-m", senders.__name__, *options, "--out", str(tmp_path)]
    subprocess.run(command, check=True, timeout=300)
    alone, together = json.loads((tmp_path / "senders.json").read_text())["rows"]
    assert alone["exact"] and together["exact"]
    for row, copies in ((alone, 2), (together, 1)):
        assert copies <= row["most_sent"] / row["bytes"] < copies + 0.3
    assert "| 2 | 2 | " in (tmp_path / "senders.md").read_text()
