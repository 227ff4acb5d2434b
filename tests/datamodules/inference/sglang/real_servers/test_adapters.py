"""A policy's LoRA alone, version after version, on real servers: every token is of the adapter that its stamp says."""

from __future__ import annotations

import asyncio
import copy
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from datamodules.inference.export import ExportError
from datamodules.inference.protocol import GenerationError, WeightUpdate
from datamodules.inference.sglang import Launch, SGLangEngine
from datamodules.inference.weight_files import WeightFiles
from modules import ModelSource, build_model
from tests.datamodules.inference.engine_suite import generate_all, tiny_policy
from tests.datamodules.inference.sglang.real_servers.servers import START_S
from tests.datamodules.inference.sglang.real_servers.silence import standing_still
from tests.datamodules.inference.weight_updates import generate_through_updates, requests_of, worst_difference

VERSIONS, ADAPTER_PARAMETERS = 100, 5760
KILLED, LOST = 30, 60  # versions at which the first server is killed, and at which the second misses its update


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = str(tmp_path_factory.mktemp("base"))
    tiny_policy().save_pretrained(path)
    return path


def policies(base: str, versions: int) -> dict[int, Any]:
    """By version: the same model with another LoRA on all its linear layers, far from nothing."""
    first: Any = build_model(ModelSource(path=base, adapter={"r": 4, "lora_alpha": 8})).eval()
    found = {}
    for version in range(versions + 1):
        policy = found[version] = copy.deepcopy(first)
        generator = torch.Generator().manual_seed(version)
        for name, parameter in policy.named_parameters():
            if "lora_B" in name:
                parameter.data.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    return found


def launched(**options: Any) -> SGLangEngine:
    launch = Launch(replicas=2, device="cpu", dtype="float32", kv_cache_tokens=16384, num_threads=1)
    return SGLangEngine(launch=launch, start_timeout_s=START_S, report_tokens=4, adapters=4, **options)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_hundred_versions_a_killed_server_and_a_lost_update(base: str, tmp_path: Path) -> None:
    models = policies(base, VERSIONS)
    files, engine = WeightFiles(tmp_path, adapter=True), launched(silence_s=20.0)

    def update(version: int) -> Callable[[], WeightUpdate]:
        def made() -> WeightUpdate:
            path, size = files.write(models[version], version)
            assert size == 4 * ADAPTER_PARAMETERS
            files.prune(keep=version)  # what is under way has its adapter already
            servers = engine._running_fleet().servers
            if version == KILLED:
                os.kill(servers[0].process.pid, signal.SIGKILL)
            return WeightUpdate(version, path=str(path), deadline_s=60.0)

        return made

    engine.start(models[0], version=0, seed=3)
    try:
        assert engine.update_methods == ("adapter",) and engine.version == 0
        requests = requests_of(120)
        before = [update(version) for version in range(1, LOST)]
        responses, downtimes = generate_through_updates(engine, requests[:60], before, together=6)
        assert set(downtimes) == {0.0}
        until = time.monotonic() + START_S
        while not all(server["state"] == "serving" for server in engine.health()["servers"]):
            assert time.monotonic() < until, engine.health()
            time.sleep(0.2)
        second = engine._running_fleet().servers[1]
        with standing_still(second.process.pid):
            path, _ = files.write(models[LOST], LOST)
            engine.update_weights(WeightUpdate(LOST, path=str(path), deadline_s=3.0))
        after = [update(version) for version in range(LOST + 1, VERSIONS + 1)]
        found, downtimes = generate_through_updates(engine, requests[60:], after, together=6)
        responses += found
        assert set(downtimes) == {0.0}
        last = asyncio.run(generate_all(engine, requests[:8]))
        assert {version for response in last for version in response.versions} == {VERSIONS}
        assert worst_difference(models, requests[:8], last) < 1e-4
        health = engine.health()
        assert {server["version"] for server in health["servers"]} == {VERSIONS}
        assert health["servers"][0]["restarts"] == 1
    finally:
        engine.close()
    assert worst_difference(models, requests, responses) < 1e-4
    whole = [response for response in responses if len(set(response.versions)) == 1]
    assert len({response.versions[0] for response in whole}) > VERSIONS / 10  # as many as the pace of both allows
    assert len(whole) > 0.8 * len(responses)  # the others moved to another server


def test_what_servers_would_ignore_is_refused(base: str, tmp_path: Path) -> None:
    files = WeightFiles(tmp_path, adapter=True)
    for options, word in (
        ({"use_rslora": True}, "use_rslora"),
        ({"use_dora": True}, "use_dora"),
        ({"bias": "all"}, "bias"),
        ({"rank_pattern": {"q_proj": 2}}, "rank_pattern"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
    ):
        policy = build_model(ModelSource(path=base, adapter={"r": 4, **options}))
        with pytest.raises(ExportError, match=f"would ignore its {word} in silence.*SGLangEngine.adapters to null"):
            files.write(policy, 1)
    with pytest.raises(ExportError, match=r"the policy has 0 adapters, and servers take one: set model\.adapter"):
        files.write(tiny_policy(), 1)
    assert not list(tmp_path.iterdir())


def test_an_engine_of_adapters_takes_nothing_else(base: str) -> None:
    with pytest.raises(ValueError, match="adapters"):
        SGLangEngine(urls=["http://127.0.0.1:1"], adapters=1)
    engine = SGLangEngine(urls=["http://127.0.0.1:1"], adapters=2, start_timeout_s=1.0, control_timeout_s=1.0)
    with pytest.raises(ExportError, match="the policy has 0 adapters"):
        engine.start(tiny_policy(), 0, 0)
    with pytest.raises(GenerationError, match="not running"):
        engine.version  # noqa: B018
