"""Agents on a real Ray cluster of two nodes, through the door and into training sequences; nodes that are killed."""

from __future__ import annotations

import asyncio
import json
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from app.batch import Trajectory
from datamodules.inference.protocol import GenerationRequest
from datamodules.pending import Pending
from datamodules.pipeline.player import EpisodeError, EpisodePlayer, Pause
from datamodules.processes.calls import CallFailed
from datamodules.prompts.base import Prompt
from datamodules.workflows.gateway import AgentWorkflow, RayExecutor
from tests.datamodules.workflows.adapters import ray_agents
from tests.datamodules.workflows.scripted_engine import WITH_CALLS, Pool, ScriptedEngine, generated, stands_still_until
from tests.helpers.recorded_samples import byte_tokenizer

os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
os.environ |= {"RAY_health_check_period_ms": "500"}  # a killed node is dead after five checks in vain
cluster_utils = pytest.importorskip("ray.cluster_utils", reason="pip install -e '.[ray]' brings it")

TOKENIZER = byte_tokenizer(WITH_CALLS)
STORE_BYTES = 80_000_000
SECRETS = {"SOME_API_KEY": "k", "SOME_TOKEN": "t"}


class TwoNodes:
    """A head and another node with a CPU each. They know their names."""

    def __init__(self, scratch: Path) -> None:
        self._cluster = cluster_utils.Cluster()
        self._scratch = str(scratch)
        self.address = ""
        self.folder = Path()
        self._nodes: dict[str, Any] = {}
        self.add("head")
        self.add("other")

    def add(self, name: str, ip: str = "127.0.0.2") -> None:  # for 127.0.0.1 Ray takes another address of the machine
        options = {"num_cpus": 1, "include_dashboard": False, "object_store_memory": STORE_BYTES}
        options |= {"env_vars": {"NODE": name, "TMPDIR": self._scratch, **SECRETS}}
        for left in (2, 1, 0):  # a node has half a minute to start, which a busy machine may not keep
            try:
                self._nodes[name] = self._cluster.add_node(node_ip_address=ip, **options)
                break
            except Exception as error:
                if not left or "timed out during startup" not in str(error):
                    raise
        if name == "head":
            self.address = self._cluster.address
            self.folder = Path(self._nodes[name].get_session_dir_path())

    def kill(self, name: str) -> None:
        """As a machine that loses its power."""
        self._cluster.remove_node(self._nodes.pop(name), allow_graceful=False)

    def leave(self, name: str) -> None:
        """As a machine that is no longer wanted: the others know at once."""
        self._cluster.remove_node(self._nodes.pop(name), allow_graceful=True)

    def close(self) -> None:
        self._cluster.shutdown()
        shutil.rmtree(self.folder, ignore_errors=True)


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TwoNodes]:
    found = TwoNodes(tmp_path_factory.mktemp("nodes"))
    yield found
    found.close()


def counted() -> Callable[[GenerationRequest], str]:
    """Replies that are told apart."""
    number = iter(range(1000))
    return lambda request: f"reply {next(number)}"


def task(name: str, folder: Path | str = "") -> Prompt:
    return Prompt(id=name, text=f"{name}?", metadata={"folder": str(folder)})


def play(
    nodes: TwoNodes | None,
    agent: Any,
    *tasks: Prompt,
    meanwhile: Callable[[], None] | None = None,
    episode_s: float = 120.0,
    logs: Path | None = None,
    executor: dict[str, Any] | None = None,
    **options: Any,
) -> tuple[ScriptedEngine, list[Any]]:
    """The tasks' episodes, played at once: trajectories, or what an episode raised."""
    engine = ScriptedEngine(TOKENIZER, counted())
    there = RayExecutor(nodes and nodes.address, **executor or {})
    workflow = AgentWorkflow(agent, **{"max_new_tokens": 200, "workers": 2, "executor": there, **options})
    player = EpisodePlayer(workflow, engine, TOKENIZER, Pool(lambda prompt, text: 1.0), episode_s)  # type: ignore[arg-type]

    async def episodes() -> list[Any]:
        given = [replace(one, tokens=workflow.encode(one)) for one in tasks]
        playing = asyncio.gather(*(player.play(one, name=one.id, seed="s") for one in given), return_exceptions=True)
        if meanwhile is not None:
            await asyncio.to_thread(meanwhile)
        return list(await playing)

    try:
        if logs is not None:
            workflow.log_to(logs)
        workflow.prepare(TOKENIZER)
        return engine, asyncio.run(episodes())
    finally:
        workflow.close()


def said(found: list[Trajectory]) -> list[str]:
    """The replies that are trained."""
    return [TOKENIZER.decode(generated(one), skip_special_tokens=True) for one in found]


def files(folder: Path, pattern: str) -> dict[str, dict[str, Any]]:
    return {path.name: json.loads(path.read_text()) for path in folder.glob(pattern) if path.suffix != ".part"}


def eventually(what: Callable[[], Any], seconds: float = 60.0) -> Any:
    ends = time.monotonic() + seconds
    while not (found := what()):
        assert time.monotonic() < ends, "it did not happen in time"
        time.sleep(0.05)
    return found


def children() -> list[int]:
    return [one.pid for one in psutil.Process().children(recursive=True) if one.status() != psutil.STATUS_ZOMBIE]


def no_longer(pids: list[int]) -> bool:
    return bool(eventually(lambda: not any(map(psutil.pid_exists, pids)), 30))


def both_started(folder: Path) -> dict[str, dict[str, Any]]:
    """Which task runs where."""
    found: dict[str, dict[str, Any]] = eventually(lambda: len(all_ := files(folder, "* on *")) == 2 and all_, 110)
    return {name.split(" on ")[1]: {"task": name.split(" on ")[0], **one} for name, one in found.items()}


@pytest.mark.slow
def test_agents_run_on_both_nodes(nodes: TwoNodes, tmp_path: Path) -> None:
    def let_go() -> None:
        assert set(both_started(tmp_path)) == {"head", "other"}  # at once, with a CPU each
        for name in ("head", "other"):
            (tmp_path / f"go {name}").touch()

    _, found = play(nodes, ray_agents.held, task("a", tmp_path), task("b", tmp_path), meanwhile=let_go)
    for episode in found:
        first, second = said(episode)
        assert first != second and episode[0].metadata["completion"].split(": ")[1] == second
        assert "lost_attempts" not in episode[0].metadata and {one.reward for one in episode} == {1.0}
    assert {one[0].metadata["completion"].split(": ")[0] for one in found} == {"head", "other"}
    pids = [pid for one in files(tmp_path, "* on *").values() for pid in one["pids"]]
    assert no_longer(pids)


@pytest.mark.slow
def test_an_episode_whose_node_dies_is_played_again_from_the_start(
    nodes: TwoNodes, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    running: dict[str, dict[str, Any]] = {}

    def kill() -> None:
        running.update(both_started(tmp_path))
        nodes.kill("other")
        assert no_longer(running["other"]["pids"])
        (tmp_path / "go head").touch()

    try:
        engine, found = play(nodes, ray_agents.held, task("a", tmp_path), task("b", tmp_path), meanwhile=kill)
    finally:
        nodes.add("other")
    by_task = dict(zip(("a", "b"), found, strict=True))
    kept, again = by_task[running["head"]["task"]], by_task[running["other"]["task"]]
    assert "lost_attempts" not in kept[0].metadata
    assert [one.metadata["lost_attempts"] for one in again] == [1, 1]
    assert again[0].metadata["completion"].startswith("head: ")
    assert len(engine.seen) == 5 and len(kept) == len(again) == 2  # the fifth was the first attempt's
    assert running["other"]["first"] not in said(again) and running["other"]["first"] not in said(kept)
    assert "its episode is played again" in caplog.text and "was lost with its node" in caplog.text


@pytest.mark.slow
def test_an_episode_that_is_lost_too_often_fails(nodes: TwoNodes, tmp_path: Path) -> None:
    def kill() -> None:
        both_started(tmp_path)
        nodes.kill("other")
        (tmp_path / "go head").touch()

    try:
        _, found = play(
            nodes,
            ray_agents.held,
            task("a", tmp_path),
            task("b", tmp_path),
            meanwhile=kill,
            executor={"max_retries": 0},
        )
    finally:
        nodes.add("other")
    (failed,) = (one for one in found if not isinstance(one, list))
    assert isinstance(failed, CallFailed)
    assert re.search(r"the agent was lost with its node .*; 1 times \(executor\.max_retries\)", str(failed))


COMMAND = """
import json, os, subprocess, sys, time, urllib.request
sys.path.insert(0, sys.argv[1])
from tests.datamodules.workflows.adapters.ray_agents import ask, tell
"""
HERE = str(Path(__file__).parents[4])


def command(*lines: str) -> list[str]:
    return [sys.executable, "-c", COMMAND + "\n".join(lines), HERE, "{folder}"]


@pytest.mark.slow
def test_a_command_answers_and_its_keys_are_nowhere_else(nodes: TwoNodes, tmp_path: Path) -> None:
    keys: list[str] = []

    def look() -> None:
        told = eventually(lambda: files(tmp_path, "running")["running"] if (tmp_path / "running").exists() else None)
        keys.append(told["key"])
        shown = list[int]()
        for process in psutil.process_iter():
            try:
                assert told["key"] not in " ".join(process.cmdline())
                if told["key"] in process.environ().values():
                    shown.append(process.pid)
            except (psutil.AccessDenied, psutil.NoSuchProcess, psutil.ZombieProcess):
                continue
        assert shown == [told["pid"]]
        (tmp_path / "go").touch()

    lines = [
        "folder = sys.argv[2]",
        "tell(folder, 'running', key=os.environ['OPENAI_API_KEY'], pid=os.getpid())",
        "while not os.path.exists(folder + '/go'): time.sleep(0.05)",
        "print(len(ask('x')))",
    ]
    _, (found,) = play(nodes, command(*lines), task("a", tmp_path), meanwhile=look)
    assert found[0].metadata["completion"] == str(len("reply 0"))
    logs = [path for path in nodes.folder.parent.rglob("*") if path.is_file()]
    assert any(path.name.startswith("raylet") for path in logs) and len(keys[0]) > 30
    assert [path for path in logs if keys[0].encode() in path.read_bytes()] == []


@pytest.mark.slow
def test_what_a_failed_agent_printed_comes_back(nodes: TwoNodes, tmp_path: Path) -> None:
    lines = ["ask('x')", "print('first')", "print('no such fruit', file=sys.stderr)", "sys.exit(3)"]
    _, (failed,) = play(nodes, command(*lines), task("a"), logs=tmp_path)
    assert isinstance(failed, CallFailed)
    assert re.search(r"exited with code 3; it printed, at the end, .*no such fruit", str(failed))
    kept = Path(str(failed).split("all of it: ")[1].split(")")[0])
    assert kept.parent == tmp_path and "first" in kept.read_text()


@pytest.mark.slow
def test_a_deadline_ends_what_an_agent_started_on_its_node(
    nodes: TwoNodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stands_still_until(tmp_path / "hanging", monkeypatch)
    _, (failed,) = play(nodes, ray_agents.hangs, task("a", tmp_path), logs=tmp_path / "logs", deadline_s=1.0)
    assert isinstance(failed, CallFailed)
    assert re.search(r"was not over after 1 s; no call reached .*; it printed, at the end, 'I hang'", str(failed))
    assert no_longer(files(tmp_path, "hanging")["hanging"]["pids"])


@pytest.mark.slow
@pytest.mark.parametrize("is_still", [True, False])
def test_a_node_does_not_count_what_the_engine_stands_still(
    nodes: TwoNodes, is_still: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_still:
        monkeypatch.setattr(ScriptedEngine, "still_s", property(lambda self: time.monotonic()), raising=False)
    _, (found,) = play(nodes, ray_agents.slow, task("a"), deadline_s=1.0)
    if is_still:
        assert isinstance(found, list), found
    else:
        assert "the agent was not over after 1 s" in str(found)


@pytest.mark.slow
def test_an_episode_that_is_given_up_ends_its_agent(
    nodes: TwoNodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stands_still_until(tmp_path / "hanging", monkeypatch)
    _, (failed,) = play(nodes, ray_agents.hangs, task("a", tmp_path), episode_s=1.0)
    assert isinstance(failed, EpisodeError)
    assert no_longer(files(tmp_path, "hanging")["hanging"]["pids"])


@pytest.mark.slow
def test_variables_that_look_like_secrets_stay_on_the_node_unless_they_are_kept(nodes: TwoNodes) -> None:
    _, (hidden,) = play(nodes, ray_agents.sees, task("a"))
    _, (kept,) = play(nodes, ray_agents.sees, task("a"), keep_environment=["SOME_TOKEN"])
    assert (hidden[0].metadata["completion"], kept[0].metadata["completion"]) == ("", "SOME_TOKEN")


@pytest.mark.slow
def test_an_agent_has_a_limit_of_memory(nodes: TwoNodes) -> None:
    _, (failed,) = play(nodes, ray_agents.greedy, task("a"), memory_mb=300)
    assert isinstance(failed, CallFailed) and re.search(r"MB of 300 MB", str(failed))


@pytest.mark.slow
def test_a_wait_for_a_node_says_what_for(nodes: TwoNodes) -> None:
    wants = {"num_gpus": 1, "resources": {"seat": 2}, "wait_s": 1.0}
    _, (failed,) = play(nodes, ray_agents.quick, task("a"), executor=wants)
    assert isinstance(failed, CallFailed)
    says = r"waited 1 s \(executor\.wait_s\) for a node with CPU 1, GPU 1, seat 2 \(no node has so much; nodes: CPU 1,"
    assert re.search(says, str(failed))


@pytest.mark.slow
def test_validation_waits_for_no_cpu_that_training_holds(nodes: TwoNodes) -> None:
    """Both nodes' CPUs belong to agents of training, whose calls are held until validation is over."""
    executor = RayExecutor(nodes.address, wait_s=20.0)
    workflow = AgentWorkflow(ray_agents.quick, max_new_tokens=20, workers=2, executor=executor)
    engine = ScriptedEngine(TOKENIZER, counted())
    player = EpisodePlayer(workflow, engine, TOKENIZER, Pool(lambda prompt, text: 1.0), 120.0)  # type: ignore[arg-type]

    async def run() -> None:
        first, second, held_out = (replace(one := task(x), tokens=workflow.encode(one)) for x in ("a", "b", "v"))
        unpaused, tables = asyncio.Event(), [Pending("a"), Pending("b")]
        training = [
            asyncio.create_task(player.play(one, name=one.id, seed="s", pause=Pause(unpaused), pending=table))
            for one, table in zip((first, second), tables, strict=True)
        ]
        async with asyncio.timeout(100):
            while not all(any(one.what == "resume" for one in table.waits.values()) for table in tables):
                await asyncio.sleep(0.05)
        assert len(await player.play(held_out, name="v", seed="v", temperature=1.0)) == 1
        assert not any(one.done() for one in training)
        unpaused.set()
        assert [len(one) for one in await asyncio.gather(*training)] == [1, 1]

    try:
        workflow.prepare(TOKENIZER)
        asyncio.run(run())
        seats = RayExecutor(nodes.address, resources={"seat": 1.0}, wait_s=1.0)
        seats.open("127.0.0.1")
        calls = seats.calls({"f": ray_agents.quick}, 1, held_out=True)
        with pytest.raises(CallFailed, match=r"a node with seat 1 \(.*; agents of training, held until validation is"):
            asyncio.run(calls.call("f", (task("a"),), {}, 60.0))
    finally:
        workflow.close()


@pytest.mark.slow
def test_nodes_that_cannot_reach_the_gateway_are_named(nodes: TwoNodes) -> None:
    nodes.add("stranger", ip="127.0.0.3")
    try:
        with pytest.raises(
            ValueError, match=r"AgentWorkflow\.host: agents on 127\.0\.0\.3 cannot reach .* 127\.0\.0\.1"
        ):
            play(nodes, ray_agents.quick, task("a"))
    finally:
        nodes.leave("stranger")
    executor = RayExecutor(nodes.address)
    with pytest.raises(OSError):
        executor.open("no-such-host.invalid")
    with pytest.raises(CallFailed, match="Ray has been left"):
        executor.check_reach()


# A run that ends while the loop of its rollouts stands still, and with it a call.
CLOSED = """
import asyncio, pathlib, sys, threading, time
from datamodules.prompts.base import Prompt
from datamodules.workflows.gateway import RayExecutor
from tests.datamodules.workflows.adapters import ray_agents

async def play():
    call = asyncio.create_task(calls.call("f", (Prompt(id="a", metadata={"folder": sys.argv[2]}),), {}, 100.0))
    while not pathlib.Path(sys.argv[2], "hanging").exists():
        await asyncio.sleep(0.05)
    still.set()
    closed.wait(100)
    print(await asyncio.gather(call, return_exceptions=True))

executor = RayExecutor(sys.argv[1])
executor.open("127.0.0.1")
calls = executor.calls({"f": ray_agents.hangs}, 1)
still, closed = threading.Event(), threading.Event()
rollouts = threading.Thread(target=lambda: asyncio.run(play()))
rollouts.start()
still.wait(100)
calls.stop()
executor.close()
closed.set()
rollouts.join()
executor.close()
print("the end")
"""


@pytest.mark.slow
def test_a_call_under_way_ends_no_run(nodes: TwoNodes, tmp_path: Path) -> None:
    words = [sys.executable, "-c", CLOSED, nodes.address, str(tmp_path)]
    done = subprocess.run(words, cwd=HERE, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    assert "CallFailed('was stopped, as were all calls beside it')" in done.stdout and "the end" in done.stdout
    assert "Ray is left when this process ends: 1 calls" in done.stderr
    assert no_longer(files(tmp_path, "hanging")["hanging"]["pids"])


@pytest.mark.slow
def test_signals_stay_the_runs(nodes: TwoNodes) -> None:
    heard: list[int] = []
    before = signal.getsignal(signal.SIGINT), signal.signal(signal.SIGTERM, lambda number, frame: heard.append(number))
    try:
        _, (found,) = play(nodes, ray_agents.quick, task("a"), meanwhile=lambda: os.kill(os.getpid(), signal.SIGTERM))
    finally:
        after = signal.getsignal(signal.SIGINT), signal.signal(signal.SIGTERM, before[1])
    assert said(found) == ["reply 0"] and heard == [signal.SIGTERM] and after[0] is before[0]
    # Ray's own handler sets an alarm of a few seconds and aborts when it rings; this test's own limit is minutes away.
    left, _ = signal.getitimer(signal.ITIMER_REAL)
    assert left == 0 or left > 60


@pytest.mark.slow
def test_ray_on_this_machine_alone(tmp_path: Path) -> None:
    before = children()
    _, (found,) = play(None, command("print(ask('x'))"), task("a", tmp_path))
    assert found[0].metadata["completion"] == "reply 0"
    assert no_longer([one for one in children() if one not in before])


def test_a_cluster_that_is_not_there() -> None:
    workflow = AgentWorkflow(ray_agents.quick, executor=RayExecutor("127.0.0.1:9"))
    with pytest.raises(
        ValueError, match=r"RayExecutor\.address: '127\.0\.0\.1:9' is no Ray cluster that can be joined"
    ):
        workflow.prepare(TOKENIZER)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"address": "ray://head:10001"}, r"RayExecutor\.address: .* is Ray's client"),
        ({"num_cpus": -1.0}, r"RayExecutor\.num_cpus: -1\.0, must be at least 0"),
        ({"resources": {"GPU": 1.0}}, r"RayExecutor\.resources: GPU has options of its own"),
        ({"resources": {"seat": 0.0}}, r"RayExecutor\.resources\.seat: 0\.0, must be above 0"),
        ({"wait_s": 0.0}, r"RayExecutor\.wait_s: 0\.0, must be above 0"),
        ({"runtime_env": {"env_vars": {"MY_API_KEY": "k"}}}, r"env_vars: MY_API_KEY looks like a secret"),
        ({"runtime_env": {"env_vars": {"X": "http://me:word@h"}}}, r"env_vars: X looks like a secret"),
        ({"runtime_env": {"env_vars": None}}, r"RayExecutor\.runtime_env\.env_vars: a NoneType, must be texts"),
        ({"runtime_env": {"env_vars": {"X": 1}}}, r"RayExecutor\.runtime_env\.env_vars\.X: must be a text, write"),
        ({"num_gpus": 1.5}, r"RayExecutor\.num_gpus: 1\.5, must be a whole number, or a part of one"),
        ({"num_cpus": 1e-5}, r"RayExecutor\.num_cpus: 1e-05, must be 0, or at least 0\.0001"),
        ({"num_cpus": float("inf")}, r"RayExecutor\.num_cpus: inf, must be at most"),
        ({"resources": {"seat": 1e-6}}, r"RayExecutor\.resources\.seat: 1e-06, must be at least 0\.0001"),
    ],
)
def test_options_that_cannot_be(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        RayExecutor(**options)


def test_a_service_runs_where_it_is() -> None:
    with pytest.raises(ValueError, match=r"AgentWorkflow\.agent: executor has no effect on an agent service"):
        AgentWorkflow("http://127.0.0.1:9/solve", executor="ray")


@pytest.mark.slow
def test_ray_is_imported_only_when_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    program = (
        "import sys; from datamodules.workflows.gateway import AgentWorkflow, RayExecutor;"
        "AgentWorkflow('echo x', executor=RayExecutor()); sys.exit('ray' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], cwd=HERE, timeout=500).returncode == 0
    monkeypatch.setattr("datamodules.prompts.extras.find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"RayExecutor needs the library ray, .* pip install -e '\.\[ray\]'"):
        AgentWorkflow("echo x", executor="ray")
