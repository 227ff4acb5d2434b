"""Importers: checkouts in the published formats become the documented files; broken entries are reported by name."""

from __future__ import annotations

import argparse
import ast
import gzip
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from datamodules.conversations import importers
from datamodules.conversations.chat import load_transcripts
from datamodules.conversations.tokens import RecordedDataError, load_npz
from datamodules.conversations.tools import tau2_tools
from datamodules.recorded import RecordedDataModule
from tests.helpers.recorded_samples import byte_tokenizer, line, real_file


def run(*argv: str | Path) -> None:
    parser = argparse.ArgumentParser()
    importers.add_arguments(parser)
    importers.run(parser.parse_args([str(one) for one in argv]))


def openai_message(message: dict[str, Any]) -> dict[str, Any]:
    """Our message as chat APIs return it: null content, nested calls with arguments as text."""
    result: dict[str, Any] = {"role": message["role"], "content": message["content"]}
    if message.get("tool_calls"):
        result["content"] = message["content"] or None
        result["tool_calls"] = [
            {
                "id": call["id"],
                "type": "function",
                "function": {"name": call["name"], "arguments": json.dumps(call["arguments"])},
            }
            for call in message["tool_calls"]
        ]
    if message["role"] == "tool":
        result |= {"tool_call_id": message["id"], "name": "any"}
    return result


def tau_checkout(root: Path, lines: list[dict[str, Any]], system: str, tools: list[dict[str, Any]]) -> Path:
    """A tau-bench checkout that holds these conversations as gpt-4o on airline."""
    entries = [
        {
            "task_id": int(one["task_id"]),
            "reward": one["reward"],
            "info": {"task": {}},
            "traj": [{"role": "system", "content": system}, *map(openai_message, one["messages"])],
            "trial": one["trial"],
        }
        for one in lines
    ]
    (root / "historical_trajectories").mkdir(parents=True)
    (root / "historical_trajectories" / "gpt-4o-airline.json").write_text(json.dumps(entries, indent=1))
    (root / "LICENSE").write_text("the licence")
    folder = root / "tau_bench" / "envs" / "airline" / "tools"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("raise RuntimeError('must not run')\n")
    for tool in tools:
        source = f"class T(Tool):\n    @staticmethod\n    def get_info():\n        return {tool!r}\n"
        (folder / f"{tool['function']['name']}.py").write_text("raise RuntimeError('must not run')\n" + source)
    return root


TOOLS = [{"type": "function", "function": {"name": "cancel", "description": "Cancels.", "parameters": {}}}]


def airline(task: int, trial: int, **changes: Any) -> dict[str, Any]:
    one = {
        **line(str(task), trial, reward=float(trial), answer=f"Done {task}."),
        "domain": "airline",
        "model": "gpt-4o",
    }
    return {**one, **changes}


def read_lines(path: Path) -> list[dict[str, Any]]:
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return [json.loads(one) for one in file]


def test_tau_bench_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [airline(task, trial) for trial in (1, 0) for task in (10, 2)]
    checkout = tau_checkout(tmp_path / "clone", lines, "Be kind.", TOOLS)
    byte_tokenizer().save_pretrained(tmp_path / "tokenizer")
    run("import-tau", checkout, "--out", tmp_path / "data", "--tokenizer", tmp_path / "tokenizer")
    tau = tmp_path / "data" / "tau"
    assert sorted(path.name for path in tau.iterdir()) == [
        "airline_gpt-4o_2x2.jsonl.gz",
        "airline_system.json",
        "airline_tokens.npz",
    ]
    assert (tmp_path / "data" / "LICENSES" / "tau-bench.txt").read_text() == "the licence"
    assert f"export ARBORIST_DATA={tmp_path / 'data'}" in capsys.readouterr().out
    written = read_lines(tau / "airline_gpt-4o_2x2.jsonl.gz")
    assert written == [airline(task, trial) for task in (2, 10) for trial in (0, 1)]
    system = json.loads((tau / "airline_system.json").read_text())
    assert system == {"policy": "Be kind.", "system_prompt": "Be kind.", "tools": TOOLS}

    # The token arrays are what the same text gives when tokenized on the fly.
    arrays = RecordedDataModule(path=str(tau / "airline_tokens.npz"), shuffle=False)
    text = RecordedDataModule(
        path=str(tau / "airline_gpt-4o_2x2.jsonl.gz"),
        tokenizer=str(tmp_path / "tokenizer"),
        system=str(tau / "airline_system.json"),
        shuffle=False,
    )
    for data in (arrays, text):
        data.setup()
    for position in range(2):
        one, other = arrays.batch(position), text.batch(position)
        for name, values in one.tensors().items():
            assert values.equal(other.tensors()[name]), name
        assert one.prompt_ids == other.prompt_ids

    before = {path.name: path.read_bytes() for path in tau.iterdir() if path.suffix != ".npz"}
    run("import-tau", checkout, "--out", tmp_path / "data")
    assert before == {path.name: path.read_bytes() for path in tau.iterdir() if path.suffix != ".npz"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda e: e.pop("reward"), r"\[1\]: 'reward' must be int or float, got nothing"),
        (lambda e: e.update(reward=float("nan")), r"\[1\]: reward must be a finite number"),
        (lambda e: e.update(trial=None), r"\[1\]: 'trial' must be int, got NoneType"),
        (lambda e: e.update(traj=[]), r"\[1\]: traj\[0\] must be the system message"),
        (lambda e: e["traj"][0].update(content="else"), r"\[1\]: traj\[0\]\.content differs"),
        (lambda e: e["traj"][2].pop("role"), r"\[1\]: traj\[2\]: 'role' must be str"),
        (
            lambda e: e["traj"][4]["tool_calls"][0]["function"].update(arguments="{"),
            r"\[1\]: traj\[4\]\.tool_calls\[0\]\.function\.arguments: not valid JSON",
        ),
        (lambda e: e.update(trial=0), r"\[1\]: task 0 has trial 0 already"),
    ],
)
def test_a_broken_entry_costs_itself_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], change: Any, message: str
) -> None:
    checkout = tau_checkout(tmp_path / "clone", [airline(0, trial) for trial in range(3)], "Be kind.", TOOLS)
    results = checkout / "historical_trajectories" / "gpt-4o-airline.json"
    entries = json.loads(results.read_text())
    change(entries[1])
    results.write_text(json.dumps(entries))
    with pytest.raises(SystemExit, match="1 entries were refused"):
        run("import-tau", checkout, "--out", tmp_path / "data")
    printed = capsys.readouterr().err
    assert "gpt-4o-airline.json" in printed and re.search(message, printed)
    written = read_lines(tmp_path / "data" / "tau" / "airline_gpt-4o_1x2.jsonl.gz")
    assert [one["trial"] for one in written] == [0, 2]


def test_unreadable_results_name_file_and_line(tmp_path: Path) -> None:
    checkout = tau_checkout(tmp_path / "clone", [airline(0, 0)], "Be kind.", TOOLS)
    (checkout / "historical_trajectories" / "gpt-4o-airline.json").write_text('[\n {"task_id": 0,\n oops\n')
    with pytest.raises(RecordedDataError, match=r"gpt-4o-airline\.json:3: not valid JSON"):
        run("import-tau", checkout, "--out", tmp_path / "data")
    assert not (tmp_path / "data").exists()


def test_wrong_folder_and_wrong_names(tmp_path: Path) -> None:
    with pytest.raises(RecordedDataError, match="is not a folder"):
        run("import-tau", tmp_path / "nowhere")
    with pytest.raises(RecordedDataError, match="neither historical_trajectories"):
        run("import-tau", tmp_path)
    checkout = tau_checkout(tmp_path / "clone", [airline(0, 0)], "Be kind.", TOOLS)
    with pytest.raises(RecordedDataError, match=r"--results: .* it has \['gpt-4o-airline\.json'\]"):
        run("import-tau", checkout, "--results", "other*.json")
    with pytest.raises(RecordedDataError, match=r"grade_school_math/data/train\.jsonl: no such file"):
        run("import-gsm8k", checkout)


TAU2_AGENT = '''
raise RuntimeError("must not run")
AGENT_INSTRUCTION = """
Help the customer.
""".strip()
SYSTEM_PROMPT = """
[{agent_instruction}]
[{domain_policy}]
""".strip()
'''

TAU2_TOOLS = '''
raise RuntimeError("must not run")
class ShopTools(Base):
    def _get(self, order_id: str) -> Order:
        """Not a tool."""

    @is_tool(ToolType.WRITE)
    def cancel(self, order_id: str, item_ids: List[str], when: Moment, note: Optional[str] = None) -> Order:
        """Cancel an order.
        Ask first:
         - twice

        Args:
            order_id: The order, such as '#7'.
            item_ids: The items,
                      each of them once.
            when: Some time.

        Returns:
            The order.
        """

    @is_tool(ToolType.READ)
    def list_all(self) -> str:
        """
        List everything.

        Returns:
            str: All.
        """
'''


def tau2_checkout(root: Path, simulations: list[dict[str, Any]]) -> Path:
    results = {
        "info": {
            "agent_info": {"implementation": "llm_agent", "llm": "lab/model-1"},
            "environment_info": {"domain_name": "shop", "policy": "Never {lie}.", "tool_defs": None},
        },
        "tasks": [],
        "simulations": simulations,
    }
    for name, text in (
        ("data/tau2/results/final/model-1_shop.json", json.dumps(results)),
        ("src/tau2/agent/llm_agent.py", TAU2_AGENT),
        ("src/tau2/domains/shop/tools.py", TAU2_TOOLS),
    ):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def simulation(task: str, trial: int, reward_info: Any) -> dict[str, Any]:
    """Our sample conversation with what tau2-bench records beside it, a user's own tool call included."""
    recorded = []
    for k, message in enumerate(line()["messages"]):
        one: dict[str, Any] = {**message, "turn_idx": k, "cost": None}
        one["tool_calls"] = [{**call, "requestor": "assistant"} for call in message.get("tool_calls", [])] or None
        one["content"] = message["content"] or None
        recorded.append({**one, "requestor": "assistant"} if message["role"] == "tool" else one)
    own = [
        {"role": "user", "content": None, "tool_calls": [{"id": "u", "name": "look", "arguments": {}}]},
        {"role": "tool", "content": "seen", "id": "u", "requestor": "user"},
    ]
    return {
        "task_id": task,
        "trial": trial,
        "reward_info": reward_info,
        "termination_reason": "user_stop",
        "messages": recorded[:2] + own + recorded[2:],
    }


def test_tau2_bench_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkout = tau2_checkout(
        tmp_path / "clone", [simulation("b", 0, {"reward": 1.0}), simulation("a", 0, {"reward": 0.0})]
    )
    run("import-tau", checkout, "--out", tmp_path / "data")
    tau = tmp_path / "data" / "tau"
    written = read_lines(tau / "shop_lab-model-1.jsonl.gz")
    expected = {**line(), "domain": "shop", "model": "lab/model-1", "termination": "user_stop"}
    assert written == [{**expected, "task_id": "b", "reward": 1.0}, {**expected, "task_id": "a", "reward": 0.0}]
    assert [t.task for t in load_transcripts(tau / "shop_lab-model-1.jsonl.gz")] == ["b", "a"]
    system = json.loads((tau / "shop_system.json").read_text())
    assert system["policy"] == "Never {lie}."
    assert system["system_prompt"] == "[Help the customer.]\n[Never {lie}.]"
    assert [tool["function"]["name"] for tool in system["tools"]] == ["cancel", "list_all"]
    assert "cancel(when): 'Moment' is written as any JSON value" in capsys.readouterr().err


def test_a_greeting_that_no_model_said_is_not_trained(tmp_path: Path) -> None:
    greeted, alone = simulation("a", 0, {"reward": 1.0}), simulation("b", 0, {"reward": 1.0})
    greeted["messages"].insert(0, {"role": "assistant", "content": "Hi! How can I help you today?", "tool_calls": None})
    alone["messages"] = [one for one in alone["messages"] if one["role"] != "user"]  # as agents without a user play
    run("import-tau", tau2_checkout(tmp_path / "clone", [greeted, alone]), "--out", tmp_path / "data")
    first, second = (one["messages"] for one in read_lines(tmp_path / "data" / "tau" / "shop_lab-model-1.jsonl.gz"))
    assert first[0] == {"role": "assistant", "content": "Hi! How can I help you today?", "weight": 0}
    assert not any("weight" in one for one in [*first[1:], *second])


def test_every_tau2_tool_is_there_with_all_its_arguments(tmp_path: Path) -> None:
    path = tmp_path / "tools.py"
    path.write_text(
        "class Tools:\n    @is_tool(READ)\n    def a(self, x: str, *, y: int, z: int = 2) -> str:\n        'A.'\n"
        "    @is_tool(READ)\n    async def b(self) -> str:\n        'B.'\n"
        "    if True:\n        @is_tool(READ)\n        def c(self) -> str:\n            'C.'\n"
    )
    tools, _ = tau2_tools(path)
    assert [one["function"]["name"] for one in tools] == ["a", "b", "c"]
    parameters = tools[0]["function"]["parameters"]
    assert parameters["required"] == ["x", "y"] and parameters["properties"]["z"]["default"] == 2
    for arguments in ("self, x: str, /", "self, *xs: str", "self, **more: str"):
        path.write_text(f"class Tools:\n    @is_tool(READ)\n    def a({arguments}) -> str:\n        'A.'\n")
        with pytest.raises(RecordedDataError, match=r"tools.py:3: a\(\w+\): a schema has no arguments that are"):
            tau2_tools(path)


def test_tau2_schema_of_a_tool(tmp_path: Path) -> None:
    (tmp_path / "tools.py").write_text(TAU2_TOOLS)
    (cancel, listing), notes = tau2_tools(tmp_path / "tools.py")
    assert cancel["function"] == {
        "name": "cancel",
        "description": "Cancel an order.\n\nAsk first:\n - twice",
        "parameters": {
            "properties": {
                "order_id": {"description": "The order, such as '#7'.", "title": "Order Id", "type": "string"},
                "item_ids": {
                    "description": "The items,\neach of them once.",
                    "items": {"type": "string"},
                    "title": "Item Ids",
                    "type": "array",
                },
                "when": {"description": "Some time.", "title": "When"},
                "note": {"anyOf": [{"type": "string"}, {"type": "null"}], "default": None, "title": "Note"},
            },
            "required": ["order_id", "item_ids", "when"],
            "title": "parameters",
            "type": "object",
        },
    }
    assert listing["function"]["description"] == "List everything."
    assert listing["function"]["parameters"] == {"properties": {}, "title": "parameters", "type": "object"}
    assert len(notes) == 1


def test_tau2_simulation_without_reward(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkout = tau2_checkout(tmp_path / "clone", [simulation("a", 0, None), simulation("a", 1, {"reward": 1})])
    with pytest.raises(SystemExit):
        run("import-tau", checkout, "--out", tmp_path / "data")
    assert "simulations[0]: 'reward_info' must be dict, got NoneType" in capsys.readouterr().err
    assert len(read_lines(tmp_path / "data" / "tau" / "shop_lab-model-1.jsonl.gz")) == 1


def gsm8k_checkout(root: Path, train: str) -> Path:
    folder = root / "grade_school_math" / "data"
    folder.mkdir(parents=True)
    (folder / "train.jsonl").write_text(train)
    (folder / "test.jsonl").write_text('{"question": "2+2?", "answer": "#### 4"}\n')
    return root


def test_gsm8k_files(tmp_path: Path) -> None:
    text = '{"question": "1+1?", "answer": "1+1=<<1+1=2>>2\\n#### 2"}\n' * 3
    checkout = gsm8k_checkout(tmp_path / "clone", text)
    run("import-gsm8k", checkout, "--out", tmp_path / "data")
    assert (tmp_path / "data" / "gsm8k" / "train.jsonl").read_text() == text
    assert sorted(path.name for path in (tmp_path / "data" / "gsm8k").iterdir()) == ["test.jsonl", "train.jsonl"]


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        ("{", "not valid JSON"),
        ('{"question": "x"}', "'answer' must be a string"),
        ('{"question": "x", "answer": "4"}', "no final answer after '####'"),
    ],
)
def test_gsm8k_broken_line(tmp_path: Path, broken: str, message: str) -> None:
    good = '{"question": "1+1?", "answer": "#### 2"}\n'
    checkout = gsm8k_checkout(tmp_path / "clone", good + broken + "\n" + good)
    with pytest.raises(RecordedDataError, match=rf"train\.jsonl:2: .*{message}"):
        run("import-gsm8k", checkout, "--out", tmp_path / "data")
    assert not (tmp_path / "data" / "gsm8k" / "train.jsonl").exists()


def test_real_gsm8k_files_are_accepted(tmp_path: Path) -> None:
    folder = tmp_path / "clone" / "grade_school_math" / "data"
    folder.mkdir(parents=True)
    for name in ("train.jsonl", "test.jsonl"):
        (folder / name).write_bytes(real_file(f"gsm8k/{name}").read_bytes())
    run("import-gsm8k", tmp_path / "clone", "--out", tmp_path / "data")
    for name in ("train.jsonl", "test.jsonl"):
        assert (tmp_path / "data" / "gsm8k" / name).read_bytes() == real_file(f"gsm8k/{name}").read_bytes()


@pytest.mark.slow
def test_real_airline_conversations_survive_the_import_unchanged(tmp_path: Path) -> None:
    """The recorded conversations, put back into tau-bench's format and imported, give the recorded file again."""
    recorded = read_lines(real_file("tau/airline_gpt-4o_50x4.jsonl.gz"))
    system = json.loads(real_file("tau/airline_system.json").read_text())
    checkout = tau_checkout(tmp_path / "clone", recorded, system["system_prompt"], system["tools"])
    byte_tokenizer().save_pretrained(tmp_path / "tokenizer")
    run("import-tau", checkout, "--out", tmp_path / "data", "--tokenizer", tmp_path / "tokenizer")
    tau = tmp_path / "data" / "tau"
    with (
        gzip.open(tau / "airline_gpt-4o_50x4.jsonl.gz") as ours,
        gzip.open(real_file("tau/airline_gpt-4o_50x4.jsonl.gz")) as theirs,
    ):
        assert ours.read() == theirs.read()
    assert json.loads((tau / "airline_system.json").read_text()) == system
    # Another tokenizer, so other ids: everything but positions must be that of the recorded arrays.
    made, real = load_npz(tau / "airline_tokens.npz"), load_npz(real_file("tau/airline_tokens.npz"))
    assert [(c.task, c.trial, c.model, c.reward) for c in made] == [(c.task, c.trial, c.model, c.reward) for c in real]
    assert all(np.array_equal(a.steps, b.steps) for a, b in zip(made, real, strict=True))
    with np.load(real_file("tau/airline_tokens.npz")) as theirs, np.load(tau / "airline_tokens.npz") as ours:
        for name in ours.files:
            assert ours[name].dtype.kind == theirs[name].dtype.kind, name
            if name != "reward" and ours[name].dtype.kind != "U":  # older files hold rewards in half the bytes
                assert ours[name].dtype == theirs[name].dtype, name


def test_importers_run_no_foreign_code() -> None:
    """The schema readers parse source; nothing in them imports or evaluates it."""
    for name in ("tools.py", "tau.py"):
        tree = ast.parse((Path(importers.__file__).parent / name).read_text())
        called = {n.func.id for n in ast.walk(tree) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)}
        assert not called & {"eval", "exec", "compile", "__import__"}
