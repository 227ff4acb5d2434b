"""Environments of OpenEnv as episodes and as tools: on a real server of the package where there is one, and always on
what such a server said, recorded (`openenv_wire.py`)."""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("aiohttp")

from aiohttp import web

from app.batch import CALL_REWARD, Trajectory
from app.cli import main
from datamodules.pipeline.player import EpisodePlayer
from datamodules.prompts.base import Prompt
from datamodules.workflows import ToolWorkflow
from datamodules.workflows.adapters.openenv import EnvironmentLost, StepRefused, _outcome
from datamodules.workflows.adapters.openenv_tools import OpenEnvTools
from datamodules.workflows.adapters.openenv_workflow import OpenEnvWorkflow
from datamodules.workflows.tools import ToolsLost
from tests.datamodules.workflows.adapters.openenv_wire import ASKED, RECORDING, again, echoed, real, record
from tests.datamodules.workflows.scripted_engine import WITH_CALLS, ScriptedEngine, generated, play
from tests.datamodules.workflows.test_tools import a_call
from tests.helpers.recorded_samples import byte_tokenizer

ROOT = Path(__file__).parents[4]
PYTHON = os.environ.get("ARBORIST_OPENENV_PYTHON", "")
REASON = "ARBORIST_OPENENV_PYTHON names no Python with openenv-core, whose client wants older libraries than training"
REAL = pytest.param("real", marks=pytest.mark.skipif(not PYTHON, reason=REASON))
TOKENIZER = byte_tokenizer(WITH_CALLS)
TASK = Prompt(id="t", text="Play.", metadata={"seed": 4})
WAIT_S = 60.0


@pytest.fixture(scope="module", params=["recorded", REAL])
def servers(request: pytest.FixtureRequest) -> Iterator[dict[str, str]]:
    """Addresses by kind of environment."""
    if request.param == "real":
        with real(PYTHON, "guess", 4) as guess, real(PYTHON, "tools", 4) as tools:
            yield {"guess": guess, "tools": tools}
    else:
        with again("guess") as guessing, again("tools") as calling:
            yield {"guess": guessing.url, "tools": calling.url}


def workflow(url: str, **options: Any) -> OpenEnvWorkflow:
    given = {"action": "number", "observation": "{hint}", "reset_fields": ["seed"], "max_new_tokens": 60, **options}
    return OpenEnvWorkflow(url, **given)


def guesses(url: str, replies: list[Any], **options: Any) -> tuple[ScriptedEngine, list[Trajectory]]:
    engine = ScriptedEngine(TOKENIZER, replies)
    return engine, play(workflow(url, **options), engine, TOKENIZER, TASK)


def told(engine: ScriptedEngine) -> list[str]:
    """What the model was told before each reply."""
    shown, before = [], 0
    for one, reply in zip(engine.seen, engine.responses):
        shown.append(TOKENIZER.decode(one.tokens[before:]))
        before = len(one.tokens) + len(reply.tokens)
    return shown


@pytest.mark.skipif(not PYTHON, reason=REASON)
@pytest.mark.parametrize("kind", list(ASKED))
def test_the_recording_is_what_a_real_server_says(kind: str) -> None:
    """Later versions say more: that is left out of the comparison, as are their numbers and what MCP says of itself."""

    def holds(said: Any, recorded: Any) -> bool:
        if isinstance(recorded, dict):
            names = [name for name in recorded if name not in ("version", "url", "meta")]
            return isinstance(said, dict) and all(name in said and holds(said[name], recorded[name]) for name in names)
        if isinstance(recorded, list):
            return isinstance(said, list) and len(said) == len(recorded) and all(map(holds, said, recorded))
        return bool(said == recorded)

    def read(answer: str | None) -> Any:
        return None if answer is None else json.loads(answer)

    with real(PYTHON, kind, 1) as url:
        said = asyncio.run(record(url, kind))
    recorded = json.loads(RECORDING.read_text())[kind]
    assert said["full"] == recorded["full"] and holds(read(said["schema"]), read(recorded["schema"]))
    for now, before in zip(said["sessions"], recorded["sessions"], strict=True):
        for (asked, answer), (_, wanted) in zip(now, before, strict=True):
            assert holds(read(answer), read(wanted)), (asked, answer, wanted)


def test_the_server_of_other_tests_says_what_the_real_one_says() -> None:
    """`echoed` answers whatever a model says (tests/app/cli/test_end_to_end_agents.py)."""
    for session in json.loads(RECORDING.read_text())["echo"]["sessions"]:
        said = [message for message, _ in session]
        for k, (_, answer) in enumerate(session):
            assert echoed(said[: k + 1]) == (None if "VALIDATION_ERROR" in answer else answer)


def test_replies_are_actions_until_the_environment_is_done(servers: dict[str, str]) -> None:
    engine, (found,) = guesses(servers["guess"], ["<think>7?</think>7", "x", "4"])
    first, second, third = told(engine)
    assert "Play.\n\nFind the number from 0 to 9.<|end|>" in first and "Lower.<|end|>" in second
    assert "Error: number: Input should be a valid integer, unable to parse string as an integer<|end|>" in third
    assert generated(found) == [token for one in engine.responses for token in one.tokens]
    assert found.reward == 0.75 and found.finish_reason == "stop"
    counted = {name: found.metadata[name] for name in ("steps", "done", "refused_actions", "turns", "completion")}
    assert counted == {"steps": 2, "done": True, "refused_actions": 1, "turns": 3, "completion": "4"}


def test_rewards_of_steps(servers: dict[str, str]) -> None:
    replies = ["7", "x", "4"]
    assert guesses(servers["guess"], replies, rewards="last")[1][0].reward == 1.0
    _, found = guesses(servers["guess"], replies, rewards="steps", sequences="turns")
    assert [one.reward for one in found] == [0.0] * 3
    assert [one.metadata.get(CALL_REWARD) for one in found] == [-0.25, None, 1.0]
    with pytest.raises(ValueError, match="rewards: steps, which need a sequence a turn; set sequences: turns"):
        workflow(servers["guess"], rewards="steps")


@pytest.mark.parametrize("reward", ["1" + "0" * 400, "1e10", "NaN", "-Infinity", "true", '"1"'])
def test_a_reward_that_no_training_takes_ends_the_session(reward: str) -> None:
    answer = '{"type": "observation", "data": {"observation": {}, "reward": %s}}'
    with pytest.raises(EnvironmentLost, match=r"gave a reward that is no number within 1e\+09"):
        _outcome(answer % reward, "step")
    assert [_outcome(answer % fine, "step").reward for fine in ("-1", "0.5", "null")] == [-1.0, 0.5, None]


def test_an_action_may_be_the_whole_reply_as_json(servers: dict[str, str]) -> None:
    engine, (found,) = guesses(
        servers["guess"], ["7", '{"number": 7}', '{"number": 4}'], action=None, observation=None, sequences="whole"
    )
    assert found.metadata["malformed_actions"] == 1 and found.metadata["steps"] == 2 and found.reward == 0.75
    first, second, third = told(engine)
    assert '"hint": "Find the number from 0 to 9.", "tries": 0}' in first  # behind what later versions say besides
    assert "Error: the reply must be one JSON object, the action (this is a int)" in second
    assert '"hint": "Lower.", "tries": 1}' in third


def test_turns_that_are_over_and_replies_that_are_cut_off(servers: dict[str, str]) -> None:
    _, (found,) = guesses(servers["guess"], ["7"], max_turns=1)
    assert (found.reward, found.finish_reason, found.metadata["done"]) == (-0.25, "max_turns", False)
    _, (found,) = guesses(servers["guess"], ["7" * 99])
    assert (found.reward, found.finish_reason, found.metadata["steps"]) == (0.0, "length", 0)


def test_an_environment_that_fails_costs_the_group_unless_the_model_is_told(servers: dict[str, str]) -> None:
    with pytest.raises(StepRefused, match="unlucky"):
        guesses(servers["guess"], ["13"])
    engine, (found,) = guesses(servers["guess"], ["13", "4"], tell_failures=True)
    assert "Error: unlucky<|end|>" in told(engine)[1] and found.reward == 1.0
    with pytest.raises(ValueError, match="the environment was done after 1 steps and gave no reward"):
        guesses(servers["guess"], ["55"])
    assert guesses(servers["guess"], ["77"], max_turns=1)[1][0].reward == 0.0
    with pytest.raises(EnvironmentLost, match=r"asked to step, did not answer within 0\.5 s \(step_s\)"):
        guesses(servers["guess"], ["99"], step_s=0.5)
    with pytest.raises(
        ValueError, match=r"observation: '\{clue\}' does not fit an observation of the fields .*hint, tries"
    ):
        guesses(servers["guess"], ["4"], observation="{clue}")


def five_at_once(url: str, places: int) -> list[float]:
    """The rewards of episodes that are begun together."""
    made = workflow(url, sessions=places)
    made.prepare(TOKENIZER)
    task = Prompt(**{**vars(TASK), "tokens": made.encode(TASK)})

    async def all_of_them() -> list[list[Trajectory]]:
        engines = [ScriptedEngine(TOKENIZER, ["7", "x", "4"]) for _ in range(5)]
        players = [EpisodePlayer(made, one, TOKENIZER, None, deadline_s=WAIT_S) for one in engines]
        return await asyncio.gather(*(one.play(task, name="e", seed="s", sample=k) for k, one in enumerate(players)))

    return [one.reward for (one,) in asyncio.run(all_of_them())]


@pytest.mark.parametrize("places", [1, 2])
def test_episodes_wait_for_a_session(places: int) -> None:
    with again("guess", most=places) as server:
        assert five_at_once(server.url, places) == [0.75] * 5 and server.held == places
        server.most = 0
        with pytest.raises(EnvironmentLost, match=r"no session left .* lower sessions, or .*max_concurrent_envs"):
            guesses(server.url, ["7"])


@pytest.mark.skipif(not PYTHON, reason=REASON)
def test_a_real_servers_only_session_is_free_when_an_episode_has_ended() -> None:
    with real(PYTHON, "guess", 1) as url:
        assert five_at_once(url, 1) == [0.75] * 5


def test_what_cannot_be_played_is_refused_by_name(servers: dict[str, str]) -> None:
    for url, options, says in (
        ("localhost:1", {}, "url: 'localhost:1' does not begin with http"),
        ("http://127.0.0.1:9", {}, "no OpenEnv server answers at http://127.0.0.1:9"),
        (f"{servers['guess']}/x", {}, "/x/schema gives no schema of actions .*404"),
        (servers["guess"], {"action": "move"}, "action: .* has no field 'move', but metadata, number"),
        (servers["tools"], {"action": "move"}, "its actions are tools: use OpenEnvTools"),
        (servers["guess"], {"header_variables": {"x": "NOT_SET"}}, "the environment variable NOT_SET is not set"),
        (servers["guess"], {"reset_fields": ["level"]}, "no field 'level', which OpenEnvWorkflow.reset_fields names"),
        (servers["guess"], {"step_s": 0.0}, "OpenEnvWorkflow.step_s"),
    ):
        with pytest.raises(ValueError, match=says):
            guesses(url, ["4"], **options)
    with pytest.raises(ValueError, match="leave the data's reward out"):
        play(workflow(servers["guess"]), ScriptedEngine(TOKENIZER, ["4"]), TOKENIZER, TASK, lambda prompt, reply: 1.0)
    with pytest.raises(ValueError, match=r"tools at|has no tools|lists no tools"):
        OpenEnvTools(servers["guess"]).prepare()
    with pytest.raises(ValueError, match="allow: there is no tool 'divide'; there are add, fail"):
        OpenEnvTools(servers["tools"], allow=["divide"]).prepare()


def test_its_tools_are_an_agents(servers: dict[str, str]) -> None:
    replies = [a_call("add", a=2, b=3), a_call("fail"), a_call("add", a=1, b=1), a_call("add", a=1, b=1), "5"]
    engine = ScriptedEngine(TOKENIZER, replies)
    made = ToolWorkflow(OpenEnvTools(servers["tools"]), max_new_tokens=200)
    (found,) = play(made, engine, TOKENIZER, Prompt(id="p", text="2+3?"))
    shown = told(engine)
    assert '"name": "add"' in shown[0] and '"required": ["a", "b"]' in shown[0]
    assert "\n5\n" in shown[1] and "no such order" in shown[2] and "\n2\n" in shown[3]
    assert "the environment's episode is over; answer without a call" in shown[4]
    assert found.reward == 2.0 and (found.metadata["tool_calls"], found.metadata["failed_calls"]) == (4, 2)

    own = ToolWorkflow(OpenEnvTools(servers["tools"], rewards="configured", allow=["add"]), max_new_tokens=200)
    engine = ScriptedEngine(TOKENIZER, [replies[0], "5"])
    (found,) = play(own, engine, TOKENIZER, Prompt(id="p", text="2+3?"), lambda prompt, reply: 0.5)
    assert found.reward == 0.5 and '"name": "fail"' not in told(engine)[0]


def test_tools_that_are_lost_cost_the_group() -> None:
    with again("tools") as server:
        made = ToolWorkflow(OpenEnvTools(server.url, step_s=0.5), max_new_tokens=200)
        for answer in (None, "{"):  # late; no answer of the protocol
            server.answers |= dict.fromkeys((key for key in server.answers if '"add"' in key), answer)
            with pytest.raises(ToolsLost, match=r"did not answer within 0\.5 s|no answer of OpenEnv"):
                play(made, ScriptedEngine(TOKENIZER, [a_call("add", a=2, b=3)]), TOKENIZER, Prompt(id="p", text="x"))
        server.most = 0
        with pytest.raises(ValueError, match=r"lists no tools: .* no session left"):
            play(made, ScriptedEngine(TOKENIZER, [a_call("add", a=2, b=3)]), TOKENIZER, Prompt(id="p", text="x"))


ROOMS: list[int] = []


async def rooms(request: web.Request) -> web.WebSocketResponse:
    """A server whose tool says which room was looked into; the third pays, the 99th takes its time."""
    socket = web.WebSocketResponse()
    await socket.prepare(request)
    async for message in socket:
        asked = json.loads(message.data)
        answer: dict[str, Any] = {"observation": {}, "reward": None, "done": False}
        if asked["type"] == "close":
            break
        if asked["data"].get("type") == "list_tools":
            schema = {"type": "object", "properties": {"k": {"type": "integer"}}}
            answer["observation"] = {"tools": [{"name": "look", "input_schema": schema}]}
        elif asked["type"] == "step":
            room = asked["data"]["arguments"]["k"]
            ROOMS.append(room)
            await asyncio.sleep(3.0 if room == 99 else 0.02)
            answer |= {"observation": {"result": f"room {room}"}, "reward": float(room == 3)}
        await socket.send_str(json.dumps({"type": "observation", "data": answer}))
    return socket


@pytest.fixture
def house() -> Iterator[str]:
    loop, started = asyncio.new_event_loop(), threading.Event()
    address: list[str] = []

    async def serve() -> None:
        app = web.Application()
        app.router.add_get("/ws", rooms)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        address.append(f"http://127.0.0.1:{runner.addresses[0][1]}")
        started.set()

    loop.create_task(serve())
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    assert started.wait(WAIT_S)
    ROOMS.clear()
    yield address[0]
    loop.call_soon_threadsafe(loop.stop)
    thread.join()


def test_calls_of_one_reply_have_each_its_own_answer(house: str) -> None:
    replies = [a_call("look", k=1) + a_call("look", k=2), a_call("look", k=3), a_call("look", k=4), "done"]
    engine = ScriptedEngine(TOKENIZER, replies)
    made = ToolWorkflow(OpenEnvTools(house, rewards="last"), max_new_tokens=300)
    (found,) = play(made, engine, TOKENIZER, Prompt(id="p", text="x"))
    assert ROOMS == [1, 2, 3, 4] and found.reward == 0.0 and not found.metadata.get("failed_calls")
    assert [re.findall(r"room \d", shown) for shown in told(engine)[1:]] == [
        ["room 1", "room 2"],
        ["room 3"],
        ["room 4"],
    ]


def test_a_call_past_its_deadline_is_not_answered_by_the_next_one(house: str) -> None:
    engine = ScriptedEngine(TOKENIZER, [a_call("look", k=99), "done"])
    made = ToolWorkflow(OpenEnvTools(house, rewards="last"), max_new_tokens=300, tool_deadline_s=0.2)
    with pytest.raises(ToolsLost, match="a call passed its deadline"):
        play(made, engine, TOKENIZER, Prompt(id="p", text="x"))
    engine = ScriptedEngine(TOKENIZER, [a_call("look", k=99), a_call("look", k=3), "done"])
    with pytest.raises(ToolsLost, match="is over"):
        play(made, engine, TOKENIZER, Prompt(id="p", text="x"))


def test_the_pages_configuration_is_understood(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["arborist"])
    page = (ROOT / "docs" / "agents.md").read_text()
    (block,) = re.findall(r"^```yaml\n(# my_environment\.yaml\n.*?)^```$", page, flags=re.MULTILINE | re.DOTALL)
    (tmp_path / "my_environment.yaml").write_text(block)
    config = ["--config", str(ROOT / "configs" / "quickstart.yaml"), "--config", str(tmp_path / "my_environment.yaml")]
    with pytest.raises(SystemExit) as ended:
        main(["fit", *config, "--print_config"])
    assert ended.value.code == 0 and "openenv_workflow.OpenEnvWorkflow" in capsys.readouterr().out
