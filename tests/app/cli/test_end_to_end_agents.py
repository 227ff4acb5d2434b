"""Whole runs through the command line with episodes of several turns, on the embedded engine: an agent with tools, a
second try, recorded conversations again. The sampler's log-probabilities must be the trainer's, or the ids, masks and
columns of such episodes are not what was served.
"""

from __future__ import annotations

import csv
import json
import logging
import math
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from app.cli import main
from modules import ModelSource, build_model
from tests.app.cli.test_end_to_end import CONFIGS, HYBRID, MODEL, WITHOUT_VALIDATION, workplace  # noqa: F401 - an autouse fixture
from tests.datamodules.workflows.adapters.openenv_wire import again, echoed
from tests.datamodules.workflows.scripted_engine import CHATML
from tests.helpers.doubles import conversations
from tests.helpers.recorded_samples import byte_tokenizer

PAGE = (CONFIGS.parent / "docs" / "agents.md").read_text()
LOGGED = "--trainer.callbacks=[{class_path: callbacks.RewardLogger,init_args: {every_n_batches: 1, samples: 100}}]"


def fit(config: str, model: dict[str, Any], *flags: str) -> tuple[dict[str, list[float]], list[dict[str, Any]]]:
    """Two steps with this model and no validation: what was logged, and every training sequence as text."""
    overlay = {"model": {"init_args": {"model": {"path": None, "config": model}}}, "trainer": {"accelerator": "cpu"}}
    Path("model.yaml").write_text(yaml.safe_dump(overlay))
    main(
        ["fit", "--config", config, "--config", "model.yaml", LOGGED, "--trainer.max_steps=2", "--run_dir=run", *flags]
    )
    with Path("run/metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    logged = {name: [float(row[name]) for row in rows if row[name]] for name in rows[0]}
    samples = [json.loads(line) for line in Path("run/samples.jsonl").read_text().splitlines()]
    return logged, samples


def fit_bytes(
    data: dict[str, Any], model: dict[str, Any] = MODEL
) -> tuple[dict[str, list[float]], list[dict[str, Any]]]:
    """`fit` of a byte-level chat model: 2 prompts a step, 3 samples of each or as `data` says, synchronous."""
    byte_tokenizer(CHATML).save_pretrained("bytes")
    more = {"tokenizer": "bytes", "validation": {"prompts": None}, "batch_size": 2, "max_staleness": 0}
    Path("data.yaml").write_text(yaml.safe_dump({"data": {"init_args": {"group_size": 3} | data | more}}))
    flags = [flag for flag in WITHOUT_VALIDATION if "callbacks" not in flag]
    model = {**model, "vocab_size": 260, "max_position_embeddings": 2048}
    return fit(str(CONFIGS / "quickstart.yaml"), model, "--config=data.yaml", *flags)


def assert_trained(logged: dict[str, list[float]]) -> None:
    assert len(logged["loss"]) == 2 and all(math.isfinite(value) for value in logged["loss"])
    assert max(logged["logprob_diff_max"]) < 1e-4 and min(logged["grad_norm"]) > 0


def test_an_agent_with_tools(tmp_path: Path) -> None:
    problems = [json.dumps({"question": f"{i}+{i}?", "answer": str(2 * i)}) for i in range(8)]
    Path("sums.jsonl").write_text("\n".join(problems))
    rewards = {
        "long": "tests.datamodules.rewards.reward_functions.length",
        "form": {"class_path": "datamodules.rewards.RegexMatch", "init_args": {"pattern": ".*e.*"}},
    }
    data = {
        "prompts": {
            "class_path": "datamodules.prompts.JsonlPrompts",
            "init_args": {"path": "sums.jsonl", "chat": True, "shuffle": False},
        },
        "workflow": {
            "class_path": "datamodules.workflows.ToolWorkflow",
            "init_args": {
                "tools": {
                    "class_path": "datamodules.workflows.FunctionTools",
                    "init_args": {"functions": ["tests.datamodules.workflows.tool_functions.count"]},
                },
                # A random model calls no tools: whatever it says is taken for a call.
                "parser": "tests.datamodules.workflows.toolboxes.every_reply_counts",
                "stop": ["\n"],
                "max_turns": 3,
                "max_new_tokens": 400,
            },
        },
        "reward": {
            "class_path": "datamodules.rewards.WeightedSum",
            "init_args": {"rewards": rewards, "weights": {"long": 0.01}},
        },
        "reward_options": {"retries": 1, "cache": 100, "on_failure": 0.0, "memory_mb": 2000},
    }
    logged, samples = fit_bytes(data)
    assert_trained(logged)
    assert {"reward/long", "reward/form"} <= set(logged)
    expected = [0.01 * long + form for long, form in zip(logged["reward/long"], logged["reward/form"], strict=True)]
    assert logged["reward"] == pytest.approx(expected, abs=1e-4)
    assert len(samples) == 12 and any(one["metadata"].get("tool_calls") for one in samples)
    for one in samples:
        calls = one["metadata"].get("tool_calls", 0)
        assert '"name": "count"' in one["prompt"]  # the tools are shown
        assert one["completion"].count("one more") == calls
        assert one["metadata"]["turns"] == calls + 1 or one["finish_reason"] == "length"


def test_a_second_try(caplog: pytest.LogCaptureFixture) -> None:
    flags = ["--data.group_size=4", "--data.batch_size=4", "--data.max_staleness=0", "--data.filter=null"]
    reward = ["--data.reward=tests.datamodules.rewards.reward_functions.length"]
    with caplog.at_level(logging.WARNING):
        logged, samples = fit(
            str(CONFIGS / "multi_turn.yaml"), MODEL | {"vocab_size": 16}, *flags, *reward, "--data.workflow.success=4"
        )
    assert_trained(logged)
    assert len(samples) == 32 and not [r for r in caplog.records if "group dropped" in r.getMessage()]
    for one in samples:
        replies = one["metadata"]["replies"]
        assert one["metadata"]["turns"] == len(replies)
        assert one["reward"] == pytest.approx(len(replies[-1]) * 0.8 ** (len(replies) - 1), abs=1e-5)
    assert {len(one["metadata"]["replies"]) for one in samples} >= {2, 3}


def test_recorded_conversations_again(tmp_path: Path) -> None:
    made = conversations(tmp_path / "made.npz")
    flags = [f"--data.prompts.path={made}", "--data.prompts.tasks=[0,1,2,3]", "--data.prompts.vocab_size=100"]
    flags += ["--data.batch_size=2", "--data.workflow.tool_latency_s=0.01", "--data.workflow.max_turns=99"]
    logged, samples = fit(str(CONFIGS / "tau_replay.yaml"), MODEL, *flags)
    assert_trained(logged)
    assert logged["reward"] == [0.5, 0.5]  # the recorded ones
    assert logged["tokens/dense"] == [8 * 40, 8 * 40] and logged["tokens/tree"][0] < 8 * 40
    assert sorted(one["metadata"]["trial"] for one in samples) == sorted([0, 1, 2, 3] * 4)
    assert {one["metadata"]["turns"] for one in samples} == {3}


@pytest.mark.parametrize("model", [MODEL, HYBRID], ids=["attention", "hybrid"])
def test_an_agent_of_the_openai_package(model: dict[str, Any]) -> None:
    Path("tasks.jsonl").write_text("\n".join(json.dumps({"question": f"say {i}"}) for i in range(4)))
    data = {
        "prompts": {
            "class_path": "datamodules.prompts.JsonlPrompts",
            "init_args": {"path": "tasks.jsonl", "answer_field": None, "shuffle": False},
        },
        "workflow": {
            "class_path": "datamodules.workflows.gateway.AgentWorkflow",
            "init_args": {
                "agent": "tests.datamodules.workflows.gateway.agents.twice",
                "max_new_tokens": 20,
                "workers": 1,
            },
        },
        "reward": None,
        "group_size": 2,  # each episode is a process that imports the package
    }
    logged, samples = fit_bytes(data, model)
    assert_trained(logged)  # what the trainer computes for these ids is what the sampler did
    assert len(samples) == 16 and all(one["metadata"]["turns"] == 2 for one in samples)
    assert logged["tokens/tree"][0] < logged["tokens/leaf"][0] < logged["tokens/dense"][0]


def test_the_configuration_for_an_agent_of_ones_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the agent that docs/agents.md has, beside the configuration nothing but a model, a reward and tasks."""
    monkeypatch.delitem(sys.modules, "my_agent", raising=False)  # another test's
    (agent,) = re.findall(r"^# my_agent\.py\n.*?(?=^```$)", PAGE, flags=re.MULTILINE | re.DOTALL)
    reward = "\n\ndef right(prompt, answer):\n    return float(len(answer) + len(prompt.answer))\n"
    Path("my_agent.py").write_text(agent + reward)
    Path("my_data").mkdir()
    for name in ("train", "test"):
        lines = [json.dumps({"question": f"say {i}", "answer": str(i)}) for i in range(64)]
        Path(f"my_data/{name}.jsonl").write_text("\n".join(lines))
    tiny = {**MODEL, "vocab_size": 260, "max_position_embeddings": 2048}
    build_model(ModelSource(config=tiny)).save_pretrained("my_model")
    byte_tokenizer(CHATML).save_pretrained("my_model")
    config = CONFIGS / "agent.yaml"
    assert len(config.read_text().splitlines()) < 40
    small = [
        "--data.batch_size=2",
        "--data.group_size=2",
        "--data.workflow.workers=2",
        "--data.workflow.max_new_tokens=8",
    ]
    small += ["--data.validation.prompts.size=2", "--trainer.max_steps=2", "--trainer.val_check_interval=2"]
    main(["fit", "--config", str(config), "--run_dir=run", "--trainer.accelerator=cpu", *small])
    with Path("run/metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    logged = {name: [float(row[name]) for row in rows if row[name]] for name in rows[0]}
    assert_trained(logged)
    assert logged["val/accuracy"] and min(logged["reward"]) > 0
    assert Path("run/model/config.json").exists()


@pytest.mark.parametrize("rewards", ["sum", "steps"])
def test_an_environment_of_openenv(rewards: str) -> None:
    """As docs/agents.md has it."""
    (block,) = re.findall(r"^# my_environment\.yaml\n.*?(?=^```$)", PAGE, flags=re.MULTILINE | re.DOTALL)
    data = yaml.safe_load(block)["data"]["init_args"]
    Path("tasks.jsonl").write_text("\n".join(json.dumps({"task": f"Say {i}.", "seed": i}) for i in range(4)))
    with again("echo", most=3, answer=echoed) as server:
        # A random model is cut off before it ends a reply by itself.
        more = {"url": server.url, "sessions": 3, "stop": list("etaoin shrdlu"), "max_new_tokens": 100}
        more |= {"rewards": rewards, "sequences": "turns" if rewards == "steps" else "whole"}
        data["workflow"]["init_args"] |= more
        logged, samples = fit_bytes({**data, "filter": None})
    assert_trained(logged)
    assert server.held == 3 and any(one["metadata"]["done"] for one in samples)
    for one in samples:
        turns, steps = one["metadata"]["turns"], one["metadata"]["steps"]
        assert turns == steps or (turns == steps + 1 and not one["metadata"]["done"])  # the last reply was cut off
        if rewards == "steps":  # a step's reward is that of its own reply
            assert ("call_reward" in one["metadata"]) is (one["finish_reason"] == "stop")
    earned = [one["reward"] for one in samples]  # of the episode, with those of its steps
    assert max(earned) > 0 and min(earned) >= 0
    assert len(samples) == 12 if rewards == "sum" else len(samples) > 12
