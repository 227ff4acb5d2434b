"""The agents of examples/agents: they do their task through the gateway, and their configurations are understood."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from app.cli import main
from datamodules.prompts.base import Prompt
from datamodules.workflows.gateway import AgentWorkflow, Budget
from tests.datamodules.workflows.scripted_engine import WITH_CALLS, ScriptedEngine, play
from tests.helpers import npm
from tests.helpers.recorded_samples import byte_tokenizer

ROOT = Path(__file__).parents[2]
AGENTS = ROOT / "examples" / "agents"
TOKENIZER = byte_tokenizer(WITH_CALLS)
TASK = Prompt(id="t", text="What is 6 * 7?", answer="42")


def call(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


CALCULATE = call("calculate", '{"expression": "6 * 7"}')
SAID: dict[str, list[str]] = {  # by the model, in each example
    "plain_openai": [CALCULATE, call("calculate", '{"expression": "open(1)"}'), "It is 42."],
    "langgraph_react": [CALCULATE, "It is 42."],
    "command": ["It may be 42.", "It is\n42."],
    "javascript": [call("multiply", '{"a": 6, "b": 7}'), "It is\n42."],
}


def options(name: str) -> dict[str, Any]:
    config = yaml.safe_load((AGENTS / name / "agent.yaml").read_text())["data"]["init_args"]["workflow"]
    assert config["class_path"] == "datamodules.workflows.gateway.AgentWorkflow"
    return {**config["init_args"], "workers": 1}


def prepared(name: str, tmp_path: Path) -> list[str]:
    """The command of an example, with what is here in place of what a user has."""
    words: list[str] = options(name)["agent"]
    if words[0] == "python3":
        return [sys.executable, *words[1:]]
    folder = shutil.copytree(AGENTS / name, tmp_path / name)
    npm.install(folder)
    return [words[0], str(folder / Path(words[1]).name), *words[2:]]


@pytest.mark.parametrize("name", sorted(SAID))
def test_an_example_does_its_task(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.syspath_prepend(str(ROOT))
    if name == "langgraph_react":
        pytest.importorskip("langgraph.graph", reason="langgraph is not installed")
        pytest.importorskip("langchain_openai", reason="langchain-openai is not installed")
    given = options(name)
    if isinstance(given["agent"], list):
        given["agent"] = prepared(name, tmp_path)
    engine = ScriptedEngine(TOKENIZER, SAID[name])
    workflow = AgentWorkflow(**given)
    workflow.log_to(tmp_path / "logs")
    found = play(workflow, engine, TOKENIZER, TASK, lambda prompt, text: float(prompt.answer in text))
    assert len(found) == len(SAID[name]) and {one.reward for one in found} == {1.0}
    last = TOKENIZER.decode(engine.seen[-1].tokens)
    assert TASK.text in last and found[0].metadata["completion"] in ("It is 42.",)
    if name != "command":
        assert "<tool>\n42\n</tool>" in TOKENIZER.decode(engine.seen[1].tokens)
    if name == "plain_openai":
        assert "error: ValueError: Call is not allowed" in last


@pytest.mark.parametrize("name", ["plain_openai", "langgraph_react"])
def test_a_model_that_calls_without_end_is_scored(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.syspath_prepend(str(ROOT))
    if name == "langgraph_react":
        pytest.importorskip("langgraph.graph", reason="langgraph is not installed")
        pytest.importorskip("langchain_openai", reason="langchain-openai is not installed")
    wrong = call("calculate", '{"number": 6}')  # which has no expression
    engine = ScriptedEngine(TOKENIZER, [wrong] * 9)
    found = play(AgentWorkflow(**options(name)), engine, TOKENIZER, TASK, lambda prompt, text: float(text != ""))
    assert len(found) == 6 and {one.reward for one in found} == {0.0}
    assert "rror" in TOKENIZER.decode(engine.seen[-1].tokens)  # the model is told what was wrong


@pytest.mark.slow
@pytest.mark.parametrize(("program", "tool"), [("claude", "Bash"), ("codex", "exec_command")])
@pytest.mark.parametrize(("does", "worth"), [("sed -i s/red/blue/ notes.txt", 1.0), ("rm notes.txt", 0.0)])
def test_a_coding_agent_is_worth_what_it_left(
    program: str, tool: str, does: str, worth: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    if shutil.which(program) is None:
        pytest.skip("npm install -g @anthropic-ai/claude-code @openai/codex brings it")
    monkeypatch.chdir(ROOT)
    written = json.dumps({"command": does, "description": "do"} if program == "claude" else {"cmd": does})
    engine = ScriptedEngine(TOKENIZER, [call(tool, written), "Done."], max_context=1 << 20)
    given = {**options("coding"), "budget": Budget(**options("coding")["budget"])}
    words = {"python3": sys.executable, "claude": program}
    workflow = AgentWorkflow(**{**given, "agent": [words.get(word, word) for word in given["agent"]]})
    task = json.loads((AGENTS / "coding" / "tasks.jsonl").read_text())
    found = play(workflow, engine, TOKENIZER, Prompt("t", task.pop("task"), metadata=task))
    assert [one.reward for one in found] == [worth, worth]
    before = found[0].tokens.tolist()
    assert found[1].tokens.tolist()[: len(before)] == before


def test_tasks_of_coding_agents_are_checked_in_the_folder(tmp_path: Path) -> None:
    for line in (AGENTS / "coding" / "tasks.jsonl").read_text().splitlines():
        folder = ROOT / json.loads(line)["folder"]
        copy = shutil.copytree(folder / "files", tmp_path / folder.name)
        assert subprocess.run([sys.executable, folder / "check.py"], cwd=copy, capture_output=True).returncode == 1
        (copy / "notes.txt").write_text("colour: blue\nsize: 3\n")
        assert subprocess.run([sys.executable, folder / "check.py"], cwd=copy).returncode == 0


def test_every_example_has_what_it_needs() -> None:
    folders = sorted(path.name for path in AGENTS.iterdir() if path.is_dir() and "__" not in path.name)
    assert folders == sorted([*SAID, "coding"])
    for name in folders:
        said = (AGENTS / name / "README.md").read_text()
        assert f"--config examples/agents/{name}/agent.yaml" in said and len(said.splitlines()) < 20
        assert os.access(AGENTS / name / "agent.yaml", os.R_OK)


def test_an_example_is_laid_over_a_run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", ["arborist"])
    flags = ["--config", "configs/quickstart.yaml", "--config", "examples/agents/command/agent.yaml", "--print_config"]
    with pytest.raises(SystemExit) as ended:
        main(["fit", *flags])
    assert ended.value.code == 0
    printed = yaml.safe_load(capsys.readouterr().out)["data"]["init_args"]["workflow"]["init_args"]
    assert printed["agent"] == ["python3", "examples/agents/command/agent.py", "{text}"]
