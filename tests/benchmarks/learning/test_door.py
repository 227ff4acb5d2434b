"""An agent and its workflow twin: the same conversations, token by token; and the benchmark that trains both."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonargparse
import pytest
from lightning import LightningDataModule, LightningModule

from app.batch import Trajectory
from benchmarks.learning import door
from benchmarks.learning.calculator import CALL, CALLED, StepClock, SumQuestions, chat_tokenizer, demonstrations
from datamodules.conversations.chat import ChatEncoder, load_transcripts
from datamodules.pipeline.player import EpisodePlayer
from datamodules.rewards import exact_match
from datamodules.workflows.gateway import AgentWorkflow
from tests.datamodules.workflows.scripted_engine import Pool, ScriptedEngine, generated

TOKENIZER = chat_tokenizer()
TASK = SumQuestions(seed=4).deal(0)
RIGHT = f"{CALL}{TASK.id}{CALLED}"


# What the model says, its reward, and how the first thing begins that the tool tells it.
SAID: dict[str, tuple[list[str], float, str | None]] = {
    "right": ([RIGHT, TASK.answer], 1.0, TASK.answer),
    "wrong in the end": ([RIGHT, TASK.answer + "0"], 0.0, TASK.answer),
    "asks again": ([f"{CALL}1+1{CALLED}", RIGHT, TASK.answer], 1.0, "2"),
    "two calls at once": ([RIGHT + RIGHT, TASK.answer], 1.0, TASK.answer),
    "what cannot be worked out": ([f"{CALL}1++{CALLED}", TASK.answer], 1.0, "error: SyntaxError: invalid syntax"),
    "no call": ([TASK.answer], 1.0, None),
    "a call without an end is text": ([f"{CALL}{TASK.id}"], 0.0, None),
    "a token that does not belong there": ([f"{TASK.answer}<|user|>"], 0.0, None),
    "one call too many": ([RIGHT] * 6, 0.0, TASK.answer),
}
Played = dict[str, tuple[ScriptedEngine, list[Trajectory]]]


async def played(workflow: Any) -> Played:
    """Each of these episodes, by one workflow, as the producer plays them."""
    workflow.prepare(TOKENIZER)
    task = replace(TASK, tokens=workflow.encode(TASK))
    found: Played = {}
    for name, (replies, _, _) in SAID.items():
        engine = ScriptedEngine(TOKENIZER, replies)
        player = EpisodePlayer(workflow, engine, TOKENIZER, Pool(exact_match), deadline_s=60.0)  # type: ignore[arg-type]
        found[name] = engine, await player.play(task, name="e", seed="s")
    return found


@pytest.fixture(scope="module")
def of_ways() -> dict[str, Played]:
    """By the workflows that the benchmark configures."""
    found = {}
    for way in door.WAYS:
        parser = jsonargparse.ArgumentParser(exit_on_error=False)
        parser.add_subclass_arguments(LightningDataModule, "data")
        given = door.rl_config(way, 0, Path("none"), door.options(["--quick"]))["data"]
        workflow = parser.instantiate(parser.parse_object({"data": given})).data.workflow
        try:
            found[way] = asyncio.run(played(workflow))
        finally:
            if hasattr(workflow, "close"):
                workflow.close()
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", SAID)
def test_agent_and_workflow_play_the_same(name: str, of_ways: dict[str, Played]) -> None:
    replies, reward, shown = SAID[name]
    (agent, of_agent), (workflow, of_workflow) = (of_ways[way][name] for way in ("agent", "workflow"))
    assert len(agent.seen) == len(replies)
    for field in ("tokens", "seed", "temperature", "max_new_tokens", "stop_token_ids"):
        assert [getattr(one, field) for one in agent.seen] == [getattr(one, field) for one in workflow.seen], field
    assert {one.reward for one in of_agent} == {one.reward for one in of_workflow} == {reward}
    (whole,) = of_workflow  # one sequence an episode, where the agent has one a call
    assert [token for one in of_agent for token in generated(one)] == generated(whole)
    assert of_agent[-1].tokens.tolist() == whole.tokens.tolist()
    told = TOKENIZER.decode(whole.tokens).split("<|tool|>")[1:]
    assert (told == []) if shown is None else told[0].startswith(shown)


def test_the_agent_is_the_example_and_has_a_process_of_its_own() -> None:
    import examples.agents.plain_openai.agent as example

    assert door.WAYS["agent"]["init_args"]["agent"] == f"{example.__name__}.solve"
    lines = Path(example.__file__).read_text().splitlines()
    imported = {line.split()[1] for line in lines if line.startswith(("import ", "from "))}
    assert imported == {"__future__", "ast", "json", "operator", "typing", "openai"}
    assert door.WAYS["agent"]["class_path"] == f"{AgentWorkflow.__module__.rsplit('.', 1)[0]}.AgentWorkflow"


def test_a_demonstration_is_the_conversation_that_is_played(tmp_path: Path) -> None:
    (tmp_path / "one.jsonl").write_text(json.dumps(next(demonstrations(1, seed=4, careless=0.0))))
    (transcript,) = load_transcripts(tmp_path / "one.jsonl")
    encoded = ChatEncoder(TOKENIZER).encode(transcript)
    question = SumQuestions(seed=4).deal(0)
    assert transcript.messages[0]["content"] == question.text
    said = f"<|user|>{question.text}<|end|><|assistant|>{CALL}{question.id}{CALLED}<|end|>"
    answer = f"<|tool|>{question.answer}<|end|><|assistant|>{question.answer}<|end|>"
    text = TOKENIZER.decode(encoded.tokens)
    assert text.startswith("<|system|>[{") and text.endswith(said + answer)
    assert len(encoded.tokens) < 50
    trained = [TOKENIZER.decode(encoded.tokens[a:b]) for a, b in zip(encoded.starts, encoded.ends)]
    assert trained == [f"{CALL}{question.id}{CALLED}<|end|>", f"{question.answer}<|end|>"]


def test_held_out_questions_are_not_trained_on() -> None:
    numbers = [
        {tuple(sorted(one.id.split("+"))) for one in source.first(2000)}
        for source in (SumQuestions("validation", size=256, seed=3), SumQuestions(seed=1000), SumQuestions(seed=1))
    ]
    assert not numbers[0] & numbers[1] and not numbers[0] & numbers[2]
    one = SumQuestions(seed=4).deal(0)
    assert one.text == "What is the sum of {}, {} and {}?".format(*one.id.split("+"))
    assert int(one.answer) == sum(map(int, one.id.split("+")))


@pytest.mark.parametrize("way", ["warm", *door.WAYS])
def test_every_configuration_is_accepted(way: str, tmp_path: Path) -> None:
    given = door.options([])
    config = door.warm_config(tmp_path, 0.4, 5) if way == "warm" else door.rl_config(way, 1, tmp_path, given)
    parser = jsonargparse.ArgumentParser(exit_on_error=False)
    parser.add_subclass_arguments(LightningModule, "model")
    parser.add_subclass_arguments(LightningDataModule, "data")
    made = parser.instantiate(parser.parse_object({"model": config["model"], "data": config["data"]}))
    if way != "warm":
        assert made.data.batch_size == given.batch_size and made.data.validation.prompts.size == given.held_out


def result(way: str, seed: int, end: float) -> dict[str, Any]:
    counts = {"wall_s": 1.0, "cpu_s": 2.0, "sequences": 1024.0, "dense": 4e4, "leaf": 3e4, "tree": 1e4, "failed": 0.0}
    return {"way": way, "seed": seed, "curve": [[0, 0.4], [10, end]], **counts}


@pytest.mark.parametrize(("workflow", "equal"), [((0.85, 0.91, 0.9), True), ((0.5, 0.51, 0.52), False)])
def test_what_is_equal_is_worked_out(workflow: tuple[float, ...], equal: bool, tmp_path: Path) -> None:
    results = [result("agent", seed, end) for seed, end in enumerate((0.9, 0.86, 0.88))]
    results += [result("workflow", seed, end) for seed, end in enumerate(workflow)]
    found = door.summary(results)
    assert found["equal"] is equal and found["ways"]["agent"]["after"] == 0.88
    shape = {"held_out": 256, "steps": 10, "batch_size": 16, "group_size": 8, "every": 5}
    text = door.markdown({"command": "x", "shape": shape, "summary": found, "results": results})
    assert "| agent | 0.400 | 0.880 | 0.900, 0.860, 0.880 | 1.00 | 2.00 | 1,024 | 40,000 | 10,000 | 0 |" in text
    assert (": equal within" in text) is equal and (": not equal within" in text) is not equal
    door.picture(results, tmp_path / "door.png")
    assert (tmp_path / "door.png").stat().st_size > 5000


@pytest.mark.slow
def test_a_try_trains_both_and_goes_on(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    flags = ["--quick", "--out", str(tmp_path / "out"), "--runs", str(tmp_path / "runs")]
    door.main([*flags, "--only", "workflow"])
    report = door.main(flags)  # makes only what is missing
    assert capfd.readouterr().out.count("'way': 'workflow'") == 1
    assert [one["way"] for one in report["results"]] == ["agent", "workflow"]
    for one in report["results"]:
        assert [step for step, _ in one["curve"]] == [0, 2] and one["cpu_s"] > 0 and one["failed"] == 0
    written = json.loads((tmp_path / "out" / "door.json").read_text())
    assert written["summary"]["ways"].keys() == door.WAYS.keys()
    assert written["results"][0]["curve"][0] == written["results"][1]["curve"][0]  # the same start


def test_the_clock_counts_processes_that_began_and_ended_between_two_looks() -> None:
    clock = StepClock()
    begin = clock._now()
    spends = "import time\nwhile time.process_time() < 0.5: pass"
    subprocess.run(
        [sys.executable, "-c", f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {spends!r}])"]
    )
    assert clock._now()[1] - begin[1] >= 0.5
