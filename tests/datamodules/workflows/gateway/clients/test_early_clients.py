"""Modules that make their client as they are imported: the trainer, agents' processes and rewards' can import them, and
the agent asks its session by it."""

from __future__ import annotations

import asyncio
import importlib
import os
import sys
from pathlib import Path

import pytest
import yaml

from app.cli import main
from app.cli.reward import configured
from app.clients import no_keys_needed
from datamodules.prompts.base import Prompt
from datamodules.rewards import RewardOptions, RewardPool
from datamodules.workflows.gateway import AgentWorkflow
from tests.datamodules.workflows.gateway.clients.door import TOKENIZER
from tests.datamodules.workflows.scripted_engine import ScriptedEngine, play

MODULE = "tests.datamodules.workflows.gateway.clients.early_client"
TASK = Prompt(id="t", text="What are two apples?", answer="6")


@pytest.fixture(autouse=True)
def not_imported_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, MODULE, raising=False)
    for name in ("OPENAI_API_KEY", "ANTHROPIC_API_KEY"):
        monkeypatch.delenv(name, raising=False)


def play_it(**options: object) -> float:
    workflow = AgentWorkflow(f"{MODULE}.solve", max_new_tokens=20, workers=1, **options)  # type: ignore[arg-type]
    found = play(
        workflow, ScriptedEngine(TOKENIZER, ["It is 6.", "Six."]), TOKENIZER, TASK, lambda _, text: float("6" in text)
    )
    assert len(found) == 2  # a call by each client
    return found[0].reward


def test_an_agents_client_may_be_made_at_the_import() -> None:
    assert play_it() == 1.0
    assert "OPENAI_API_KEY" not in os.environ


def test_it_asks_its_session_where_the_user_has_a_provider_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-mine")
    monkeypatch.setenv("OPENAI_BASE_URL", "http://127.0.0.1:9/v1")  # where nobody is
    assert play_it(keep_environment=["OPENAI_API_KEY"]) == 1.0
    assert os.environ["OPENAI_API_KEY"] == "sk-mine"


def test_a_reward_may_stand_beside_it() -> None:
    async def judged() -> float:
        await pool.open()
        return await pool.score(TASK, "It is 6.")

    with no_keys_needed():
        right = importlib.import_module(MODULE).right
    pool = RewardPool(right, RewardOptions(workers=1, deadline_s=10.0))
    try:
        assert asyncio.run(judged()) == 1.0
    finally:
        pool.close()


def test_that_reward_may_be_tried(tmp_path: Path) -> None:
    path = tmp_path / "judged.yaml"
    path.write_text(f"reward: {MODULE}.right")
    made, _ = configured(path)
    assert made(TASK, "It is 6.") == 1.0
    assert "OPENAI_API_KEY" not in os.environ


def test_a_configuration_may_name_both(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["arborist"])
    workflow = {"class_path": "datamodules.workflows.gateway.AgentWorkflow", "init_args": {"agent": f"{MODULE}.solve"}}
    flags = [f"--data.workflow={yaml.safe_dump(workflow, default_flow_style=True)}", f"--data.reward={MODULE}.right"]
    with pytest.raises(SystemExit) as ended:
        main(["fit", "--config", "configs/quickstart.yaml", *flags, "--print_config"])
    assert ended.value.code == 0, capsys.readouterr().err
    assert f"reward: {MODULE}.right" in capsys.readouterr().out
    assert "OPENAI_API_KEY" not in os.environ
