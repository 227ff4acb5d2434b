"""npm's `openai`, unmodified, through the door: a command of another language."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.datamodules.workflows.gateway.clients.door import QUESTION, door
from tests.helpers import npm

AGENT = Path(__file__).with_name("shopper.mjs")
PACKAGES = Path(__file__).parents[5] / "examples" / "agents" / "javascript" / "package.json"
WAIT_S = 60.0


@pytest.fixture(scope="module")
def agent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Beside its packages."""
    folder = tmp_path_factory.mktemp("javascript")
    for one in (AGENT, PACKAGES):
        shutil.copy(one, folder)
    npm.install(folder)
    return folder / AGENT.name


@pytest.mark.parametrize("how", ["whole", "streamed"])
@pytest.mark.parametrize("protocol", ["chat", "responses"])
def test_a_conversation_with_tools(agent: Path, protocol: str, how: str) -> None:
    with door() as there:
        ended = subprocess.run(
            ["node", str(agent), protocol, how, QUESTION],
            env={**os.environ, "OPENAI_BASE_URL": there.v1, "OPENAI_API_KEY": there.key},
            capture_output=True,
            text=True,
            timeout=WAIT_S,
        )
        assert ended.returncode == 0, ended.stderr
        there.check_one_path()
    assert ended.stdout.strip() == "It is 6."
