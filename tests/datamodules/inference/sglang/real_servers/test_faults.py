"""Servers that die, hang and come late while requests run: every request ends, its log-probabilities right."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedModel

from datamodules.inference.export import checkpoint_weights
from datamodules.inference.protocol import GenerationError, GenerationRequest, GenerationResponse, WeightUpdate
from datamodules.inference.sglang import Launch, SGLangEngine, supervisor
from datamodules.inference.sglang.launcher import ServerProcess
from datamodules.inference.sglang.server import leftovers
from datamodules.inference.weight_files import WeightFiles
from tests.datamodules.inference.engine_suite import (
    CONTEXT,
    VOCABULARY,
    assert_parity,
    generate_all,
    prompts_of,
    tiny_policy,
    wait_until_generating,
)
from tests.datamodules.inference.sglang.real_servers.proxy import Proxy
from tests.datamodules.inference.sglang.real_servers.servers import KEY, START_S

TOLERANCE = 1e-5


def long_requests(count: int) -> list[GenerationRequest]:
    prompts = prompts_of([3 + (7 * i) % 30 for i in range(count)])
    return [GenerationRequest(prompt, CONTEXT - 40, request_id=f"r{i}") for i, prompt in enumerate(prompts)]


def server_states(engine: SGLangEngine) -> list[str]:
    return [server["state"] for server in engine.health()["servers"]]


def wait_for(what: Callable[[], bool], engine: SGLangEngine, seconds: float) -> None:
    ends = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < ends, f"not within {seconds:g} s: {engine.health()}"
        time.sleep(0.05)


def while_generating(
    engine: SGLangEngine, requests: list[GenerationRequest], act: Callable[[], Any]
) -> list[GenerationResponse]:
    """Responses to `requests`; `act` is called in a thread once servers work on them."""

    async def run() -> list[GenerationResponse]:
        def then() -> None:
            wait_until_generating(engine, 0.2)
            act()

        acting = asyncio.get_running_loop().run_in_executor(None, then)
        responses = await generate_all(engine, requests)
        await acting
        return responses

    return asyncio.run(run())


def check(models: dict[int, Any], requests: list[GenerationRequest], responses: list[GenerationResponse]) -> None:
    assert len(responses) == len(requests)
    for request, response in zip(requests, responses):
        assert len(response.tokens) == request.max_new_tokens and response.finish_reason == "length"
        assert_parity(models, request, response, TOLERANCE)


EOS = 5  # of the model; requests name their own


def with_eos(seed: int = 0) -> PreTrainedModel:
    model = tiny_policy(seed)
    model.config.eos_token_id = model.generation_config.eos_token_id = EOS
    return model


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SGLangEngine]:
    launch = Launch(
        replicas=2,
        device="cpu",
        dtype="float32",
        kv_cache_tokens=16384,
        num_threads=1,
        log_dir=str(tmp_path_factory.mktemp("logs")),
    )
    engine = SGLangEngine(launch=launch, max_concurrent=16, report_tokens=8, load_tokens=8, start_timeout_s=START_S)
    engine.start(with_eos(), version=0, seed=1)
    yield engine
    groups = [server.process.pid for server in engine._fleet.servers]
    engine.close()
    assert not any(leftovers.members(group) for group in groups)


@pytest.mark.slow
class TestOwnServers:
    """Two servers of our own. The tests are one story, in this order: they share the servers."""

    def test_both_serve_with_the_models_weights(self, own: SGLangEngine) -> None:
        assert (own.version, own.vocab_size, own.max_context) == (0, VOCABULARY, CONTEXT)
        requests = long_requests(24)
        seen: set[str] = set()
        responses = while_generating(own, requests, lambda: seen.update(own.where(r.request_id) for r in requests))
        check({0: tiny_policy()}, requests, responses)
        assert {"server 0", "server 1"} <= seen
        assert server_states(own) == ["serving", "serving"]

    def test_the_models_own_end_of_sequence_does_not_end_a_request_that_does_not_name_it(
        self, own: SGLangEngine
    ) -> None:
        requests = [GenerationRequest(prompt, 100, stop_token_ids=(7,)) for prompt in prompts_of([4] * 24)]
        responses = asyncio.run(generate_all(own, requests))
        for request, response in zip(requests, responses):
            assert_parity({0: tiny_policy()}, request, response, TOLERANCE)
            assert response.tokens[-1] == 7 if response.finish_reason == "stop" else len(response.tokens) == 100
        assert any(EOS in response.tokens[:-1] for response in responses)

    def test_a_group_finds_its_prompt_cached(self, own: SGLangEngine) -> None:
        before = dict(own.health())
        for prompt in prompts_of([100] * 6, seed=7):  # samples of a prompt side by side, prompt after prompt
            asyncio.run(generate_all(own, [GenerationRequest(prompt, 4)]))
            asyncio.run(generate_all(own, [GenerationRequest(prompt, 4) for _ in range(7)]))
        after = own.health()
        cached, sent = (after[key] - before[key] for key in ("cached_tokens", "prompt_tokens"))
        assert sent == 6 * 8 * 100 and cached / sent > 0.8, f"{cached} of {sent} prompt tokens were cached"

    def test_killed_in_mid_generation_then_back_with_newer_weights(
        self, own: SGLangEngine, caplog: pytest.LogCaptureFixture
    ) -> None:
        models = {0: tiny_policy(), 1: tiny_policy(seed=1)}
        first = own._fleet.servers[0]
        wait_for(lambda: server_states(own) == ["serving", "serving"], own, START_S)
        restarts = first.restarts
        requests = long_requests(32)
        kept: list[int] = []

        def reported() -> bool:
            return any(one.output._certain for one in tuple(own._pending) if one.flight in tuple(first.flights))

        def kill() -> None:
            wait_for(reported, own, 60)
            kept.append(len(first.flights))
            os.kill(first.process.pid, signal.SIGKILL)

        check(models, requests, while_generating(own, requests, kill))
        assert kept[0] > 0, "nothing ran on the server that was killed"
        assert own.health()["moved"] > 0 and own.health()["kept_tokens"] > 0
        # It is away: the other one takes the update alone, and this one comes back with it.
        own.update_weights(WeightUpdate(1, state_dict=checkpoint_weights(models[1])))
        wait_for(lambda: server_states(own) == ["serving", "serving"], own, START_S)
        assert first.restarts == restarts + 1 and first.version == 1
        requests = long_requests(32)
        where: set[str] = set()
        responses = while_generating(own, requests, lambda: where.update(own.where(r.request_id) for r in requests))
        check(models, requests, responses)
        assert "server 0" in where and all(set(response.versions) == {1} for response in responses)
        *lost, back = [one for one in caplog.messages if one.startswith("server 0")]
        assert lost and back.startswith("server 0 is serving, version 1"), "people hear of both"

    def test_its_key_is_nobodys_and_nowhere(self, own: SGLangEngine) -> None:
        key = own._fleet.servers[0].process._key
        assert key and key not in repr(own.health())
        for server in own._fleet.servers:
            assert key not in server.process.log_file.read_text()
            assert key not in Path(f"/proc/{server.process.pid}/cmdline").read_text()

    def test_a_hung_process_is_restarted_on_request(self, own: SGLangEngine) -> None:
        with pytest.raises(GenerationError, match="not launched by this engine"):
            own.restart("http://127.0.0.1:1")
        before = own._fleet.servers[1].process.pid
        for member in leftovers.members(before):
            os.kill(member, signal.SIGSTOP)
        own.restart("server 1")
        assert own._fleet.servers[1].process.pid != before and not leftovers.members(before)
        assert server_states(own) == ["serving", "serving"]


@pytest.fixture(scope="module")
def single() -> Iterator[SGLangEngine]:
    launch = Launch(device="cpu", dtype="float32", kv_cache_tokens=16384, num_threads=1)
    engine = SGLangEngine(launch=launch, max_concurrent=16, report_tokens=8, start_timeout_s=START_S)
    engine.start(tiny_policy(), version=0, seed=1)
    yield engine
    engine.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("version", "method", "whole"), [(1, "disk", True), (2, "distributed", False), (3, "tensor", True)]
)
def test_the_only_server_ends_in_an_update(
    single: SGLangEngine, tmp_path: Path, version: int, method: str, whole: bool
) -> None:
    """It is started again and has the update then, while requests wait. One whose scheduler ended ends after it."""
    (server,) = single._fleet.servers
    wait_for(lambda: server.state == "serving", single, START_S)
    newer, restarts, group = tiny_policy(seed=version), server.restarts, server.process.pid
    update = WeightUpdate(version, state_dict=checkpoint_weights(newer), shared=method == "tensor")
    if method == "disk":
        update = WeightUpdate(version, path=str(WeightFiles(tmp_path).write(newer, version)[0]))
    members = leftovers.members(group)
    schedulers = [pid for pid in members if b"scheduler" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    assert schedulers
    for member in members:  # so that it does not end too early
        os.kill(member, signal.SIGSTOP)

    def end() -> None:
        wait_for(lambda: server.state == "updating", single, 60)
        for member in [group] if whole else schedulers:
            os.kill(member, signal.SIGKILL)
        for member in leftovers.members(group):
            os.kill(member, signal.SIGCONT)

    with ThreadPoolExecutor() as pool:
        ending = pool.submit(end)
        assert single.update_weights(update) == 0.0
        ending.result()
    assert single.version == version
    requests = long_requests(4)
    check({version: newer}, requests, asyncio.run(generate_all(single, requests)))
    assert server.restarts == restarts + 1 and server.version == version


@pytest.mark.slow
class TestUnreliableNetwork:
    """The shared server, beside addresses that do not do what they should."""

    @pytest.fixture
    def proxy(self, server: ServerProcess) -> Iterator[Proxy]:
        proxy = Proxy(server.url)
        yield proxy
        proxy.close()

    @pytest.fixture
    def make(self, server: ServerProcess, tmp_path: Path) -> Iterator[Callable[..., SGLangEngine]]:
        engines = []

        def make(urls: list[str], **settings: Any) -> SGLangEngine:
            engine = SGLangEngine(urls, **({"start_timeout_s": 60.0, "request_timeout_s": 120.0} | settings))
            engines.append(engine)
            engine.start(tiny_policy(), version=0, seed=1)
            path, _ = WeightFiles(tmp_path).write(tiny_policy(), 0)
            engine.update_weights(WeightUpdate(0, path=str(path)))
            return engine

        yield make
        for engine in engines:
            engine.close()

    def test_one_that_accepts_and_never_answers_is_left_out(self, make, server) -> None:
        mute = Proxy(server.url).start()
        mute.set("hang")
        try:
            engine = make([server.url, mute.url], silence_s=8.0)
            assert mute.seen and server_states(engine) == ["serving", "lost"]
            requests = long_requests(8)
            check({0: tiny_policy()}, requests, asyncio.run(generate_all(engine, requests)))
        finally:
            mute.close()

    def test_one_that_falls_silent_is_found_out_and_its_requests_go_on(self, make, proxy) -> None:
        """A network that hangs in mid-generation, and heals: no error, no token lost or wrong."""
        engine = make([proxy.start().url], silence_s=6.0, report_tokens=4)
        states: list[str] = []

        def hang() -> None:
            proxy.set("hang")
            wait_for(lambda: server_states(engine) == ["lost"], engine, 120)
            states.append(engine.health()["servers"][0]["error"])
            proxy.set("forward")

        requests = long_requests(8)
        check({0: tiny_policy()}, requests, while_generating(engine, requests, hang))
        assert "silent for" in states[0]
        wait_for(lambda: server_states(engine) == ["serving"], engine, 120)
        assert engine.health()["moved"] > 0 and engine.health()["kept_tokens"] > 0

    def test_broken_connections_cost_no_request(self, make, proxy) -> None:
        engine = make([proxy.start().url], report_tokens=4)

        def cut() -> None:
            proxy.set("refuse")
            wait_for(lambda: server_states(engine) != ["serving"], engine, 60)
            proxy.set("forward")

        requests = long_requests(8)
        check({0: tiny_policy()}, requests, while_generating(engine, requests, cut))
        assert engine.health()["moved"] > 0

    def test_one_that_is_overloaded_is_asked_again_when_it_has_time(self, make, proxy) -> None:
        engine = make([proxy.start().url])
        proxy.set("overload")
        requests, said = long_requests(8), []

        async def run() -> list[GenerationResponse]:
            def then() -> None:
                wait_for(lambda: server_states(engine) != ["serving"], engine, 60)
                said.append(engine.health()["servers"][0]["error"])
                proxy.set("forward")

            acting = asyncio.get_running_loop().run_in_executor(None, then)
            responses = await generate_all(engine, requests)
            await acting
            return responses

        check({0: tiny_policy()}, requests, asyncio.run(run()))
        assert "HTTP 503: too much load" in said[0]
        wait_for(lambda: server_states(engine) == ["serving"], engine, 120)

    def test_one_that_comes_late_joins_with_the_current_weights(self, make, server, tmp_path) -> None:
        early, late = Proxy(server.url).start(), Proxy(server.url)
        port = Proxy(server.url).start().port + 1
        try:
            engine = make([early.url, f"http://127.0.0.1:{port}"])
            assert server_states(engine) == ["serving", "lost"]
            newer = tiny_policy(seed=4)
            engine.update_weights(WeightUpdate(1, path=str(WeightFiles(tmp_path).write(newer, 1)[0])))
            late.start(port)
            wait_for(lambda: server_states(engine) == ["serving", "serving"], engine, 90)
            assert [one["version"] for one in engine.health()["servers"]] == [1, 1]
            early.set("refuse")  # now the late one is alone
            requests = long_requests(4)
            check({1: newer}, requests, asyncio.run(generate_all(engine, requests)))
        finally:
            early.close()
            late.close()

    def test_a_server_started_anew_behind_its_address_is_given_the_weights_again(self, make, server, tmp_path) -> None:
        """Somebody loads other weights: they are found out by their label, and no token of theirs comes through."""
        engine = make([server.url])
        other, _ = WeightFiles(tmp_path / "other").write(tiny_policy(seed=8), 0)

        async def meddle() -> None:
            client = server.client()
            body = {"model_path": str(other), "weight_version": "default", "flush_cache": True}
            await client.post("/update_weights_from_disk", body, 30)
            await client.close()

        asyncio.run(meddle())
        requests = long_requests(4)
        check({0: tiny_policy()}, requests, asyncio.run(generate_all(engine, requests)))

    def test_a_server_belongs_to_one_run_at_a_time(self, make, server, tmp_path) -> None:
        """Two runs at the same version name one server: the second waits while the first has requests there, and when
        it has none and the second gives the server its weights, the first leaves it, with no token of them."""
        engine, other = make([server.url]), SGLangEngine([server.url], start_timeout_s=3.0)
        path, _ = WeightFiles(tmp_path / "other").write(tiny_policy(seed=8), 0)
        requests = long_requests(8)

        def wait_for_the_other() -> None:
            engine.pause()  # so that they are there as long as this takes
            with pytest.raises(GenerationError, match=r"of another run, which has [1-8] requests there"):
                other.start(tiny_policy(seed=8), version=0, seed=2)
            engine.resume()

        check({0: tiny_policy()}, requests, while_generating(engine, requests, wait_for_the_other))
        other.start(tiny_policy(seed=8), version=0, seed=2)
        try:
            other.update_weights(WeightUpdate(0, path=str(path)))
            with pytest.raises(GenerationError, match=r"no server is left: .* which another run gave it"):
                asyncio.run(generate_all(engine, requests))
            check({0: tiny_policy(seed=8)}, requests, asyncio.run(generate_all(other, requests)))
        finally:
            other.close()
        assert not engine.health()["alive"]

    def test_a_server_that_a_killed_run_left_paused_is_taken(self, make, server, monkeypatch, tmp_path) -> None:
        """In the middle of an update: the server would count its requests, whose client is gone, for ever."""
        monkeypatch.setattr(supervisor, "_LEFT_S", 0.5)
        make([server.url]).close()  # its weights stay

        async def killed() -> None:
            client = server.client()
            sampling = {"max_new_tokens": CONTEXT - 40, "ignore_eos": True}
            body = {"input_ids": [5, 6, 7], "sampling_params": sampling, "stream": True}
            replies = [client.generate(body) for _ in range(3)]
            for reply in replies:
                await anext(reply)
            await client.pause(30.0)
            await client.close()

        asyncio.run(killed())
        other = make([server.url])
        requests = long_requests(2)
        check({0: tiny_policy()}, requests, asyncio.run(generate_all(other, requests)))

    def test_no_server_at_all_is_an_error_in_time(self, server) -> None:
        engine = SGLangEngine(["http://127.0.0.1:9"], start_timeout_s=3.0)
        with pytest.raises(GenerationError, match=r"no server up within start_timeout_s = 3 s.*127\.0\.0\.1:9"):
            engine.start(tiny_policy(), version=0, seed=1)
        assert not engine.health()["alive"] and threading.active_count() < 50

    def test_a_missing_key_is_named(self, server, monkeypatch) -> None:
        monkeypatch.delenv("ARBORIST_SGLANG_API_KEY")
        engine = SGLangEngine([server.url], start_timeout_s=3.0)
        with pytest.raises(GenerationError, match="wants an API key, see api_key_env") as error:
            engine.start(tiny_policy(), version=0, seed=1)
        assert KEY not in str(error.value)
