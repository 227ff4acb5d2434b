"""An update reaches one of two servers: the run goes on with that one, and the other serves again when up to date."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from datamodules.inference.export import checkpoint_weights
from datamodules.inference.protocol import GenerationError, GenerationRequest, WeightUpdate
from datamodules.inference.sglang import SGLangEngine
from datamodules.inference.sglang.launcher import ServerProcess
from datamodules.inference.weight_files import WeightFiles
from tests.datamodules.inference.engine_suite import generate_all, prompts_of, reference_logprobs, tiny_policy
from tests.datamodules.inference.sglang import sender_jobs
from tests.datamodules.inference.sglang.real_servers.servers import KEY, START_S, options
from tests.datamodules.inference.sglang.real_servers.silence import standing_still
from tests.datamodules.inference.weight_updates import requests_of, update_of, worst_difference
from tests.helpers.rank_pool import RankPool

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def second(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    directory: Path = tmp_path_factory.mktemp("second")
    path, _ = WeightFiles(directory).write(tiny_policy(seed=98), version=0)
    process = ServerProcess(options(str(path)), directory / "server.log", KEY)
    asyncio.run(process.ready(START_S))
    yield process
    process.stop(0.0)


def update(version: int, method: str, directory: Path) -> WeightUpdate:
    policy, deadline_s = tiny_policy(seed=version), 4.0 if version in (2, 3) else 60.0
    made = update_of(policy, version, directory if method == "disk" else None, checkpoint_weights, deadline_s)
    return replace(made, shared=method == "tensor")


def states(engine: SGLangEngine) -> dict[str, tuple[str, int]]:
    return {server["url"]: (server["state"], server["version"]) for server in engine.health()["servers"]}


def wait_for(engine: SGLangEngine, wanted: dict[str, tuple[str, int]]) -> None:
    deadline = time.monotonic() + 120
    while states(engine) != wanted:
        assert time.monotonic() < deadline, f"not {wanted} within 120 s: {engine.health()}"
        time.sleep(0.05)


async def own_logprobs(server: ServerProcess, prompt: list[int]) -> tuple[list[int], torch.Tensor, str]:
    """Asks that server, not the engine: tokens, their log-probabilities, the version it says it has."""
    client = server.client()
    sampling = {"max_new_tokens": 20, "temperature": 1.0}
    body = {"input_ids": prompt, "sampling_params": sampling, "return_logprob": True}
    try:
        answer = await client.post("/generate", body, 60.0)
    finally:
        await client.close()
    meta = answer["meta_info"]
    return answer["output_ids"], torch.tensor([e[0] for e in meta["output_token_logprobs"]]), meta["weight_version"]


@pytest.mark.parametrize("method", SGLangEngine.update_methods)
def test_one_of_two_misses_an_update(server, second, method, tmp_path) -> None:
    engine = SGLangEngine(urls=[server.url, second.url], control_timeout_s=30.0)
    engine.start(tiny_policy(), version=1, seed=1)
    try:
        engine.update_weights(update(1, method, tmp_path))
        wait_for(engine, {server.url: ("serving", 1), second.url: ("serving", 1)})
        requests = requests_of(64)
        with standing_still(second.pid):
            assert engine.update_weights(update(2, method, tmp_path)) > 0
            assert engine.version == 2 and states(engine)[server.url] == ("serving", 2)
            assert states(engine)[second.url][0] not in ("serving", "updating")
            (error,) = (s["error"] for s in engine.health()["servers"] if s["url"] == second.url)
            assert f"version 2 of the weights did not reach {second.url}" in error
            responses = asyncio.run(generate_all(engine, requests))
            assert {version for response in responses for version in response.versions} == {2}
            assert worst_difference({2: tiny_policy(seed=2)}, requests, responses) < 1e-5
        wait_for(engine, {server.url: ("serving", 2), second.url: ("serving", 2)})
        (prompt,) = prompts_of([9])
        tokens, logprobs, version = asyncio.run(own_logprobs(second, prompt))
        assert version.startswith("v2-")
        expected = reference_logprobs(tiny_policy(seed=2), prompt, tokens, 1.0)
        torch.testing.assert_close(logprobs, expected, atol=1e-5, rtol=0)

        # None takes version 3: that is an error, and version 2 goes on.
        with standing_still(server.pid), standing_still(second.pid):
            with pytest.raises(GenerationError, match=r"version 3 of the weights did not reach"):
                engine.update_weights(update(3, method, tmp_path))
            assert engine.version == 2
        wait_for(engine, {server.url: ("serving", 2), second.url: ("serving", 2)})
        responses = asyncio.run(generate_all(engine, requests))
        assert worst_difference({2: tiny_policy(seed=2)}, requests, responses) < 1e-5
        engine.update_weights(update(4, method, tmp_path))
        response = asyncio.run(engine.generate(GenerationRequest(prompt, 5)))
        assert set(response.versions) == {4}
    finally:
        engine.close()


def test_each_is_sent_weights_by_a_rank_of_its_own(server, second, two_ranks: RankPool) -> None:
    urls = [server.url, second.url]
    report = two_ranks.run(sender_jobs.send_versions, 170.0, urls=urls, versions=3, key=KEY)[0]
    assert [(one["servers"], one["error"]) for one in report] == [(1, "")] and report[0]["bytes"] > 0
    (prompt,) = prompts_of([9])
    for one in (server, second):
        tokens, logprobs, version = asyncio.run(own_logprobs(one, prompt))
        assert version.startswith("v3-")
        expected = reference_logprobs(tiny_policy(seed=3), prompt, tokens, 1.0)
        torch.testing.assert_close(logprobs, expected, atol=1e-5, rtol=0)
