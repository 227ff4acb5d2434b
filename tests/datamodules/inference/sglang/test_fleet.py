"""A fleet's servers change while an update begins, and one that is supervised does what it should not."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from datamodules.inference.protocol import GenerationError
from datamodules.inference.sglang.fleet import Fleet
from datamodules.inference.sglang.loop_thread import cancel_all
from datamodules.inference.sglang.roster import given_servers
from datamodules.inference.sglang.router import PrefixRouter
from datamodules.inference.sglang.server_state import Server, Target
from datamodules.inference.sglang.supervisor import Limits, Supervisor
from datamodules.inference.sglang.weights.forms import AdapterWeights, DiskWeights
from datamodules.inference.sglang.weights.server_weights import SyncFailed
from tests.fuzz.hostile_server import MODEL_INFO, Answer, HostileServer, http, said

LIMITS = Limits(silence_s=60, update_s=60, start_s=60, max_restarts=0)


async def _no_check(server: Server) -> None:
    pass


def test_a_server_found_dirty_as_an_update_begins_is_left_to_its_supervisor() -> None:
    """Its supervisor reconnects it, which closes what an update on the same connection works with."""

    async def run() -> None:
        (server,) = given_servers(["http://127.0.0.1:9"], None, 4)
        fleet = Fleet([server], PrefixRouter(256), _no_check, LIMITS)
        server.enter("serving")
        weights = DiskWeights(1, 0, "/nowhere")
        updating = asyncio.create_task(fleet.update(weights, 60))
        # In the turn of the loop after the update chose its servers, before it begins with them.
        asyncio.get_running_loop().call_soon(server.distrust, "it has version 0 still")
        assert await updating == []
        assert server.state == "dirty" and fleet.target.weights is weights

    asyncio.run(run())


@pytest.mark.parametrize("other", ["serving", "lost"])
def test_weights_wait_for_the_first_that_comes_back_when_all_that_served_ended(
    other: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("datamodules.inference.sglang.fleet._ENDING_S", 0.6)

    async def run() -> None:
        servers = given_servers(["http://127.0.0.1:9", "http://127.0.0.1:10"], None, 4)  # nobody listens there
        fleet = Fleet(servers, PrefixRouter(256), _no_check, LIMITS)
        old, new = DiskWeights(1, 0, "/nowhere"), DiskWeights(2, 0, "/nowhere")
        fleet.target.give(old)
        servers[0].enter("serving")
        servers[1].enter(other, "restarting")
        assert await fleet.update(new, 60) == []
        assert fleet.target.weights is new and not {"serving", "updating"} & {server.state for server in servers}

    asyncio.run(run())


def test_one_that_does_not_answer_an_update_in_time_and_is_there_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may never have them in that time: people are told of the deadline."""
    monkeypatch.setattr("datamodules.inference.sglang.fleet._ENDING_S", 1.2)

    async def run(hostile: HostileServer) -> None:
        hostile.act = lambda path, body: Answer([], closes=False) if path == "/update_weights_from_disk" else None
        servers = given_servers([hostile.url], None, 4)
        fleet = Fleet(servers, PrefixRouter(256), _no_check, LIMITS)
        old, new = DiskWeights(1, 0, "/nowhere"), DiskWeights(2, 0, "/nowhere")
        fleet.target.give(old)
        servers[0].enter("serving")
        with pytest.raises(SyncFailed, match=r"version 2 of the weights did not reach .* within"):
            await fleet.update(new, 1.0)
        assert fleet.target.weights is old and hostile.asked.count("/model_info") >= 2
        await fleet.close()

    with HostileServer() as hostile:
        asyncio.run(run(hostile))


def test_one_that_is_lost_for_a_moment_in_an_update_has_the_weights_by_another_try() -> None:
    async def run(hostile: HostileServer) -> None:
        servers = given_servers([hostile.url], None, 4)
        fleet = Fleet(servers, PrefixRouter(256), _no_check, LIMITS)
        await fleet.start(DiskWeights(1, 0, "/nowhere"))
        breaks = [Answer([])]
        hostile.act = lambda path, body: breaks.pop() if path == "/update_weights_from_disk" and breaks else None
        new = DiskWeights(2, 0, "/nowhere")
        try:
            assert await fleet.update(new, 60) == []
            assert not breaks and fleet.target.weights is new
            assert (servers[0].state, servers[0].version) == ("serving", 2)
        finally:
            await fleet.close()

    with HostileServer() as hostile:
        asyncio.run(run(hostile))


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Supervisors look every few milliseconds."""
    for name, value in {"_TICK_S": 0.01, "_PROBE_EVERY_S": 0.05, "_BACKOFF_S": (0.05,)}.items():
        monkeypatch.setattr(f"datamodules.inference.sglang.supervisor.{name}", value)


def test_a_start_that_waits_for_servers_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        servers = given_servers(["http://127.0.0.1:9", "http://127.0.0.1:10"], None, 4)  # nobody listens there
        fleet = Fleet(servers, PrefixRouter(256), _no_check, replace(LIMITS, start_s=2.5))
        try:
            with pytest.raises(GenerationError, match=r"no server up within start_timeout_s = 2\.5 s"):
                await fleet.start(None)
        finally:
            await fleet.close()

    asyncio.run(run())
    (said_of_it,) = [message for message in caplog.messages if "waiting" in message]
    assert "up to 2.5 s" in said_of_it and "start_timeout_s" in said_of_it and "SGLangEngine.urls" in said_of_it


@pytest.mark.parametrize(
    "at_first",
    [Answer([], closes=False), Answer([http(b"", "503 Service Unavailable")])],
    ids=["says nothing", "is not ready"],
)
def test_a_server_that_comes_up_is_found_in_a_short_start(at_first: Answer, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was asked again after `silence_s`, or half a minute, however short the start was to be."""
    monkeypatch.setattr("datamodules.inference.sglang.supervisor._BACKOFF_S", (60.0,))

    async def run(hostile: HostileServer) -> None:
        hostile.act = lambda path, body: at_first if len(hostile.asked) == 1 else None
        servers = given_servers([hostile.url], None, 4)
        fleet = Fleet(servers, PrefixRouter(256), _no_check, replace(LIMITS, start_s=30.0))
        try:
            await fleet.start(None)
            assert servers[0].state == "ready"
        finally:
            await fleet.close()

    with HostileServer() as hostile:
        asyncio.run(run(hostile))


def test_a_busy_server_is_given_longer_to_answer_each_time_it_is_asked() -> None:
    async def run(hostile: HostileServer) -> None:
        ordinary = http(json.dumps({**MODEL_INFO, "weight_version": "0"}).encode())
        slowly = Answer([ordinary[:20], ordinary[20:]], pause_s=0.8)
        hostile.act = lambda path, body: slowly if path == "/model_info" else None
        servers = given_servers([hostile.url], None, 4)
        fleet = Fleet(servers, PrefixRouter(256), _no_check, replace(LIMITS, start_s=4.0))  # 0.5 s at first
        try:
            await fleet.start(None)
            assert servers[0].state == "ready" and hostile.asked.count("/model_info") >= 2
        finally:
            await fleet.close()

    with HostileServer() as hostile:
        asyncio.run(run(hostile))


class TestInTurns:
    """Servers on the trainer's GPU."""

    @staticmethod
    def calls(hostile: HostileServer) -> list[str]:
        """What concerns the device, since this was last asked."""
        asked = [path for path in hostile.asked if path not in ("/model_info", "/server_info")]
        hostile.asked.clear()
        return asked

    def test_they_leave_before_the_trainer_computes_and_have_new_weights_before_the_rest_of_their_memory(self) -> None:
        bodies: list[bytes] = []

        async def run(hostile: HostileServer) -> None:
            servers = given_servers([hostile.url], None, 4)
            fleet = Fleet(servers, PrefixRouter(256), _no_check, LIMITS, in_turns=True)
            await fleet.start(DiskWeights(0, 0, "/nowhere"))
            try:
                self.calls(hostile)
                await fleet.pause(60)
                await fleet.pause(60)
                assert self.calls(hostile) == ["/pause_generation", "/release_memory_occupation"]
                await fleet.update(DiskWeights(1, 0, "/nowhere"), 60)
                coming = ["/pause_generation", "/resume_memory_occupation", "/update_weights_from_disk"]
                assert self.calls(hostile) == coming
                await fleet.resume(60)
                await fleet.resume(60)
                assert self.calls(hostile) == ["/resume_memory_occupation", "/continue_generation"]
                await fleet.update(DiskWeights(2, 0, "/nowhere"), 60)  # nothing is away
                assert self.calls(hostile) == ["/pause_generation", "/update_weights_from_disk", "/continue_generation"]
            finally:
                await fleet.close()

        with HostileServer() as hostile:

            def keep(path: str, body: bytes) -> None:
                if "memory" in path:
                    bodies.append(body)

            hostile.act = keep
            asyncio.run(run(hostile))
        told = [json.loads(body).get("tags", []) for body in bodies]
        assert told == [[], ["weights"], ["kv_cache", "cuda_graph"]]

    @pytest.mark.parametrize("coming", ["joining", "dirty"])
    def test_one_that_is_loading_as_the_trainers_turn_begins_leaves_first(self, coming: str) -> None:
        async def run(hostile: HostileServer) -> None:
            (server,) = given_servers([hostile.url], None, 4)
            fleet = Fleet([server], PrefixRouter(256), _no_check, LIMITS, in_turns=True)
            await fleet.start(DiskWeights(0, 0, "/nowhere"))
            try:
                slow = Answer([b"", *said({"success": True}).pieces], pause_s=0.3)
                hostile.act = lambda path, body: slow if path == "/update_weights_from_disk" else None
                self.calls(hostile)
                server.enter("lost") if coming == "joining" else server.distrust("it has other weights")
                await _until(lambda: "/update_weights_from_disk" in hostile.asked)
                assert server.state == coming
                self.calls(hostile)
                await fleet.pause(60)
                assert server.left
                leaving = ["/continue_generation", "/pause_generation", "/release_memory_occupation"]
                assert self.calls(hostile) == leaving
                await asyncio.sleep(0.3)
                assert self.calls(hostile) == [] and server.left  # and stays away
                await fleet.resume(60)
                assert self.calls(hostile) == ["/resume_memory_occupation", "/continue_generation"]
                assert server.state == "serving"
            finally:
                await fleet.close()

        with HostileServer() as hostile:
            asyncio.run(run(hostile))

    def test_one_whose_weights_are_found_wrong_in_the_trainers_turn_stays_away(self) -> None:
        async def run(hostile: HostileServer) -> None:
            (server,) = given_servers([hostile.url], None, 4)
            fleet = Fleet([server], PrefixRouter(256), _no_check, LIMITS, in_turns=True)
            await fleet.start(DiskWeights(0, 0, "/nowhere"))
            try:
                await fleet.pause(60)
                self.calls(hostile)
                server.distrust("it has other weights")
                await asyncio.sleep(0.3)
                assert self.calls(hostile) == [] and server.left
                await fleet.resume(60)
                await _until(lambda: server.state == "serving")
                assert "/update_weights_from_disk" in self.calls(hostile)
            finally:
                await fleet.close()

        with HostileServer() as hostile:
            asyncio.run(run(hostile))

    def test_one_that_does_not_leave_in_time_is_lost_and_waits_for_its_turn(self) -> None:
        async def run(hostile: HostileServer) -> None:
            (server,) = given_servers([hostile.url], None, 4)
            fleet = Fleet([server], PrefixRouter(256), _no_check, LIMITS, in_turns=True)
            await fleet.start(DiskWeights(0, 0, "/nowhere"))
            try:
                hostile.act = lambda path, body: Answer([], closes=False) if path.startswith("/release") else None
                await fleet.pause(1.0)
                assert server.state == "lost" and "/release_memory_occupation: no answer within" in server.error
                hostile.act = lambda path, body: None
                self.calls(hostile)
                await asyncio.sleep(0.3)  # it would have been found again
                assert server.state == "lost" and self.calls(hostile) == []
                await fleet.resume(60)
                await _until(lambda: server.state == "serving")
                anew = ["/end_weight_update", "/pause_generation", "/update_weights_from_disk", "/continue_generation"]
                assert self.calls(hostile) == anew  # one of ours would be a new process
            finally:
                await fleet.close()

        with HostileServer() as hostile:
            asyncio.run(run(hostile))


def test_labels_of_weights_long_gone_are_forgotten() -> None:
    target, first = Target(), DiskWeights(0, 0, "/m")
    target.give(first)
    given = [DiskWeights(version, 0, "/m") for version in range(1, 10_001)]
    for weights in given:
        target.give(weights)
    assert target.versions == {weights.label: weights.version for weights in given}


class TestSupervisor:
    """One server that answers as SGLang does. Its silence is made up: no machine stands still for as long."""

    @staticmethod
    def watch(act: Callable[[HostileServer, Server, Target], None], states: list[str]) -> str:
        """The last error of a server that serves, meets `act`, and then has to go through `states`."""

        async def run(hostile: HostileServer) -> str:
            (server,) = given_servers([hostile.url], None, 4)
            target, seen, errors = Target(), list[str](), [""]
            target.give(DiskWeights(1, 0, "/m"))
            enter = server.enter

            def noted(state: Any, error: str = "") -> None:
                enter(state, error)
                seen.append(state)
                errors.append(error or errors[-1])

            server.enter = noted
            task = asyncio.create_task(Supervisor(server, target, LIMITS, _no_check, lambda _: None).run())
            try:
                await _until(lambda: server.state == "serving")
                seen.clear()
                act(hostile, server, target)
                await _until(lambda: seen == states)
                await asyncio.sleep(0.3)
                assert seen == states
            finally:
                await cancel_all([task])
                await server.disconnect()
            return errors[-1]

        with HostileServer() as hostile:
            return asyncio.run(run(hostile))

    def test_one_that_answers_a_probe_with_other_weights_is_loaded_anew(self) -> None:
        def act(hostile: HostileServer, server: Server, target: Target) -> None:
            hostile.version = "7"

        assert "it serves weights '7', which this run did not give it" in self.watch(act, ["dirty", "serving"])

    def test_one_that_answers_a_probe_with_weights_of_another_run_is_left_to_it(self) -> None:
        def act(hostile: HostileServer, server: Server, target: Target) -> None:
            hostile.version = DiskWeights(1, 0, "/of/another/run").label

        assert "which another run gave it: a server belongs to one run at a time" in self.watch(act, ["gone"])

    def test_one_whose_model_below_an_adapter_was_changed_joins_anew(self) -> None:
        def act(hostile: HostileServer, server: Server, target: Target) -> None:
            server.holds = AdapterWeights(1, 0, "/an/adapter")
            server.meet("other")
            server.holds = None

        assert "which are not those below its adapters" in self.watch(act, ["lost", "joining", "serving"])

    def test_one_that_does_not_answer_a_probe_in_time_is_lost_and_found_again(self) -> None:
        def act(hostile: HostileServer, server: Server, target: Target) -> None:
            mute = iter([True])

            def unanswered(path: str, body: bytes) -> Answer | None:
                if not next(mute, False):
                    return None
                server.answered -= 3600.0
                return Answer([], closes=False)

            hostile.act = unanswered

        assert "silent for 3600 s" in self.watch(act, ["lost", "joining", "serving"])

    def test_one_whose_connection_broke_goes_on_when_it_answers(self) -> None:
        self.watch(lambda hostile, server, target: server.suspect("a connection broke"), ["suspect", "serving"])

    def test_one_whose_connection_broke_is_lost_when_it_does_not_answer(self) -> None:
        def act(hostile: HostileServer, server: Server, target: Target) -> None:
            hostile.act = lambda path, body: Answer([]) if server.state == "suspect" else None
            server.suspect("a connection broke")

        assert "/model_info" in self.watch(act, ["suspect", "lost", "joining", "serving"])

    @pytest.mark.parametrize("paused", [True, False])
    def test_requests_that_stand_still_are_silence_unless_all_is_paused(self, paused: bool) -> None:
        def act(hostile: HostileServer, server: Server, target: Target) -> None:
            target.paused = paused
            flight = server.open("r")
            flight.task = asyncio.create_task(asyncio.sleep(60.0))
            flight.task.add_done_callback(lambda _: server.flights.discard(flight))
            server.progressed -= 3600.0

        error = self.watch(act, [] if paused else ["lost", "joining", "serving"])
        assert error == "" if paused else "with 1 requests running" in error


async def _until(done: Callable[[], bool], seconds: float = 60.0) -> None:
    async with asyncio.timeout(seconds):
        while not done():
            await asyncio.sleep(0.01)
