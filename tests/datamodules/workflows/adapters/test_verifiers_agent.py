"""Environments of verifiers, played by verifiers, on the scripted engine and through the gateway."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from app.batch import Trajectory
from datamodules.pipeline.player import EpisodePlayer
from datamodules.processes.calls import CallFailed
from datamodules.prompts.base import Prompt
from datamodules.workflows.adapters import verifiers_agent
from datamodules.workflows.gateway import AgentWorkflow
from tests.datamodules.workflows.scripted_engine import WITH_CALLS, ScriptedEngine
from tests.helpers.recorded_samples import byte_tokenizer

HERE = Path(__file__).parent
TOKENIZER = byte_tokenizer(WITH_CALLS)
PYTHON = os.environ.get("ARBORIST_VERIFIERS_PYTHON", "")
REASON = "ARBORIST_VERIFIERS_PYTHON names no Python with verifiers>=0.4 and uv, which pin versions of their own"
pytestmark = pytest.mark.skipif(not PYTHON, reason=REASON)

COMMAND = [PYTHON, verifiers_agent.__file__, "verifiers_sums"]


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The taskset can be imported, and verifiers finds uv."""
    monkeypatch.setenv("PYTHONPATH", str(HERE))
    monkeypatch.setenv("PATH", f"{Path(PYTHON).parent}{os.pathsep}{os.environ['PATH']}")


def run(replies: list[Any], row: int) -> tuple[ScriptedEngine, list[Trajectory]]:
    engine = ScriptedEngine(TOKENIZER, replies)
    workflow = AgentWorkflow([*COMMAND, "{row}"], max_new_tokens=200, workers=1)
    workflow.prepare(TOKENIZER)
    task = Prompt(id="t", text="1+1?", metadata={"row": row})
    given = Prompt(**{**vars(task), "tokens": workflow.encode(task)})
    # verifiers starts a program and a server of tools for each episode.
    player = EpisodePlayer(workflow, engine, TOKENIZER, None, deadline_s=280.0)
    try:
        return engine, asyncio.run(player.play(given, name="e", seed="s", sample=0))
    finally:
        workflow.close()


def test_the_tasks_are_the_tasksets() -> None:
    done = subprocess.run([*COMMAND, "--tasks", "--most", "2"], capture_output=True, check=True, timeout=500)
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert rows == [{"row": 0, "question": "0+1?"}, {"row": 1, "question": "1+1?"}]


def test_tasks_of_harbor_are_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if subprocess.run([PYTHON, "-c", "import harbor"], capture_output=True, timeout=500).returncode:
        pytest.skip("ARBORIST_VERIFIERS_PYTHON has no harbor, which needs Python 3.12: pip install 'verifiers[harbor]'")
    monkeypatch.setenv("HOME", str(tmp_path))  # where it keeps what it downloads
    task = tmp_path / "tasks" / "greet"
    for name, text in {
        "task.toml": 'version = "1.0"\n[environment]\ndocker_image = "python:3.12-slim"\n',
        "instruction.md": "Write hello into /app/hello.txt",
        "tests/test.sh": "grep -q hello /app/hello.txt && echo 1 > /logs/verifier/reward.txt",
    }.items():
        (task / name).parent.mkdir(parents=True, exist_ok=True)
        (task / name).write_text(text)
    git = ["git", "-C", str(task.parent), "-c", "user.name=a", "-c", "user.email=a@example.org"]
    for words in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "tasks"]):
        subprocess.run([*git, *words], check=True, timeout=500)
    commit = subprocess.run([*git, "rev-parse", "HEAD"], check=True, timeout=500, capture_output=True, text=True).stdout
    at = {"name": "greet", "git_url": f"file://{task.parent}", "git_commit_id": commit.strip(), "path": "greet"}
    registry = tmp_path / "registry.json"
    registry.write_text(json.dumps([{"name": "mine", "version": "1", "description": "", "tasks": [at]}]))
    config = {
        "taskset": {"dataset": "mine", "registry_path": str(registry)},
        "agent": {"harness": {"id": "bash"}, "runtime": {"type": "docker"}},
    }
    command = [PYTHON, verifiers_agent.__file__, "harbor", "--tasks", "--config", json.dumps(config)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout) == {"row": 0, "question": "Write hello into /app/hello.txt"}


def test_verifiers_plays_with_its_tools_and_scores() -> None:
    call = '<tool_call>\n{"name": "calculator_add", "arguments": {"a": 1, "b": 1}}\n</tool_call>'
    engine, found = run([call, "2"], row=1)
    assert {one.reward for one in found} == {1.0}
    trained = [token for one in found for token in one.tokens[one.loss_mask].tolist()]
    assert trained == [token for one in engine.responses for token in one.tokens]
    second = TOKENIZER.decode(engine.seen[1].tokens)
    assert "1+1?" in second and second.rindex("2") > second.rindex("</tool_call>")
    assert '"name": "calculator_add"' in TOKENIZER.decode(engine.seen[0].tokens)


def test_a_task_that_is_not_there_fails() -> None:
    with pytest.raises(CallFailed, match="exited with code 2"):
        run(["2"], row=99)
