"""One real server brought to version after version: by every method, after every kind of failure.

The log-probabilities are the server's own; they are compared with transformers' forward pass of the trainer's model.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from datamodules.inference.export import checkpoint_weights
from datamodules.inference.protocol import WeightUpdate
from datamodules.inference.sglang.launcher import ServerProcess
from datamodules.inference.sglang.weights.forms import (
    Bucket,
    DiskWeights,
    HostWeights,
    SharedWeights,
    Weights,
    weights_of,
)
from datamodules.inference.sglang.weights.server_weights import ServerWeights, SyncFailed
from datamodules.inference.weight_files import WeightFiles
from tests.datamodules.inference.adapters import with_lora
from tests.datamodules.inference.engine_suite import prompts_of, reference_logprobs, tiny_policy
from tests.datamodules.inference.sglang.real_servers.silence import standing_still

pytestmark = pytest.mark.slow  # test_engine.py updates a real server's weights

DEADLINE_S = 60.0
METHODS = ("disk", "distributed", "tensor")
PROMPTS = prompts_of([3, 17, 40, 40, 5])


def shared(copy: HostWeights) -> SharedWeights:
    return SharedWeights(copy.version, copy.nbytes, copy.buckets, copy.device)


class Kept:
    """A server and what keeps its weights, for one test, on one event loop."""

    def __init__(self, server: ServerProcess, directory: Path) -> None:
        self.client = server.client()
        self.weights = ServerWeights(self.client)
        self.directory = directory

    def of(self, policy: Any, version: int, method: str, bucket_bytes: int = 30_000) -> Weights:
        """The policy's weights, in several buckets or shards."""
        if method != "disk":
            copy = HostWeights.copy_of(checkpoint_weights(policy), version, bucket_bytes)
            return copy if method == "distributed" else shared(copy)
        path, _ = WeightFiles(self.directory, shard_bytes=bucket_bytes).write(policy, version)
        return weights_of(WeightUpdate(version, path=str(path)))

    async def bring(self, policy: Any, version: int, method: str, **options: Any) -> None:
        synced = await self.weights.bring(self.of(policy, version, method), DEADLINE_S, **options)
        assert synced.version == version
        assert 0 < synced.update_s <= synced.downtime_s <= synced.seconds

    async def generate(self, prompt: list[int], new_tokens: int = 12) -> dict[str, Any]:
        sampling = {"max_new_tokens": new_tokens, "temperature": 1.0}
        body = {"input_ids": prompt, "sampling_params": sampling, "return_logprob": True}
        return await self.client.post("/generate", body, DEADLINE_S)

    async def worst(self, policy: PreTrainedModel, version: int) -> float:
        """Largest distance of the server's log-probabilities from the policy's; every token is of `version`."""
        answers = await asyncio.gather(*(self.generate(prompt) for prompt in PROMPTS))
        worst = 0.0
        for prompt, answer in zip(PROMPTS, answers):
            tokens = answer["output_ids"]
            got = torch.tensor([entry[0] for entry in answer["meta_info"]["output_token_logprobs"]])
            spans = answer["meta_info"]["weight_versions"]
            assert [(span["start"], span["end"]) for span in spans] == [(0, len(tokens))]
            assert spans[0]["version"].startswith(f"v{version}-")
            worst = max(worst, float((got - reference_logprobs(policy, prompt, tokens, 1.0)).abs().max()))
        return worst

    async def close(self) -> None:
        await self.weights.close()
        await self.client.close()


@pytest.fixture
def on_server(server: ServerProcess, tmp_path: Path) -> Callable[[Callable[[Kept], Awaitable[None]]], None]:
    """Runs a coroutine function with the server."""

    def run(body: Callable[[Kept], Awaitable[None]]) -> None:
        async def main() -> None:
            kept = Kept(server, tmp_path)
            try:
                await body(kept)
            finally:
                await kept.close()

        asyncio.run(asyncio.wait_for(main(), 150))

    return run


@pytest.mark.parametrize("adapters", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("method", METHODS)
def test_log_probabilities_are_the_trainers_before_and_after(on_server, method, adapters) -> None:
    """To 1e-5 in float32, through three versions."""

    async def body(kept: Kept) -> None:
        for version in (1, 2, 3):
            policy = tiny_policy(seed=version)
            if adapters:
                policy = with_lora(policy, seed=version)
            await kept.bring(policy, version, method)
            assert await kept.worst(policy, version) < 1e-5
            assert await kept.worst(tiny_policy(seed=9), version) > 0.1  # the comparison can tell them apart

    on_server(body)


def test_untied_tensors_of_several_dtypes_arrive_in_buckets_of_one() -> None:
    tensors = {
        "a": torch.randn(3, 5),
        "b": torch.randn(7).bfloat16(),
        "c": torch.randn(4, 4),
        "d": torch.arange(6).view(2, 3),
    }
    weights = HostWeights.copy_of(tensors, 3, bucket_bytes=64)
    assert weights.nbytes == sum(tensor.nbytes for tensor in tensors.values())
    seen = {}
    for bucket in weights.buckets:
        dtype, offset = getattr(torch, bucket.dtype), 0
        for name, shape in zip(bucket.names, bucket.shapes, strict=True):
            size = tensors[name].nbytes
            seen[name] = bucket.data[offset : offset + size].view(dtype).view(shape)
            offset += size
        assert offset == bucket.data.nbytes
    assert seen.keys() == tensors.keys()
    assert all(torch.equal(seen[name], tensor) and seen[name].dtype == tensor.dtype for name, tensor in tensors.items())
    tensors["a"].zero_()
    assert seen["a"].any()  # a copy


def test_the_host_copy_does_not_follow_the_trainer(on_server) -> None:
    async def body(kept: Kept) -> None:
        policy = tiny_policy(seed=1)
        weights = kept.of(policy, 1, "distributed")
        with torch.no_grad():
            for parameter in policy.parameters():
                parameter.mul_(1.5)
        await kept.weights.bring(weights, DEADLINE_S)
        assert await kept.worst(tiny_policy(seed=1), 1) < 1e-5

    on_server(body)


@pytest.mark.parametrize("method", METHODS)
def test_a_pause_on_purpose_stays(on_server, method) -> None:
    async def body(kept: Kept) -> None:
        policy = tiny_policy(seed=2)
        await kept.bring(policy, 2, method, stay_paused=True)
        waiting = asyncio.create_task(kept.worst(policy, 2))
        await asyncio.sleep(0.3)
        assert not waiting.done()
        await kept.client.post("/continue_generation", {}, DEADLINE_S)
        assert await waiting < 1e-5

    on_server(body)


def broken(weights: Weights) -> Weights:
    """One that no server can load; broadcasts fail in the middle, after the first buckets are in."""
    if isinstance(weights, DiskWeights):
        return replace(weights, path=f"{weights.path}-nowhere")
    *good, last = weights.buckets
    name, size = last.names[-1], last.shapes[-1][0] // 2  # the last norm: not every layer of SGLang checks shapes
    half = replace(last, names=[name], shapes=[[size]], data=last.data[: size * getattr(torch, last.dtype).itemsize])
    return replace(weights, buckets=(*good, half))


@pytest.mark.parametrize("method", ["disk", "distributed"])  # at tensors that do not fit it ends: test_shared_tensors
@pytest.mark.parametrize("again", METHODS)
def test_a_server_that_refuses_is_named_stands_still_and_can_be_reloaded(on_server, method, again) -> None:
    async def body(kept: Kept) -> None:
        url = kept.client.url
        await kept.bring(tiny_policy(seed=1), 1, method)
        with pytest.raises(
            SyncFailed,
            match=rf"version 2 of the weights did not reach {url}: {url}/update_weights_from.*; if it serves",
        ):
            await kept.weights.bring(broken(kept.of(tiny_policy(seed=2), 2, method)), DEADLINE_S)
        waiting = asyncio.create_task(kept.generate(PROMPTS[0]))
        await asyncio.sleep(0.3)
        assert not waiting.done()  # its weights may be mixed: it generates nothing
        policy = tiny_policy(seed=3)
        await kept.bring(policy, 3, again)
        assert (await waiting)["meta_info"]["weight_version"].startswith("v3-")
        assert await kept.worst(policy, 3) < 1e-5

    on_server(body)


def sending_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "weights"]


@pytest.mark.parametrize("method", METHODS)
def test_a_server_that_hangs_costs_the_deadline_and_comes_back(on_server, server, method) -> None:
    async def body(kept: Kept) -> None:
        await kept.bring(tiny_policy(seed=1), 1, method)
        weights = kept.of(tiny_policy(seed=2), 2, method)
        with standing_still(server.pid), pytest.raises(SyncFailed, match=r"did not reach .*no answer within"):
            await kept.weights.bring(weights, 1.0)
        policy = tiny_policy(seed=3)
        await kept.bring(policy, 3, method)
        assert await kept.worst(policy, 3) < 1e-5

    on_server(body)


def test_a_server_that_hangs_in_a_broadcast_holds_no_thread(on_server, server) -> None:
    async def body(kept: Kept) -> None:
        await kept.bring(tiny_policy(seed=1), 1, "distributed")
        weights = kept.of(tiny_policy(seed=2), 2, "distributed")
        # More than sockets hold, under a name the server ignores: sending it needs a server that reads.
        bulk = Bucket(["unused.weight"], [[128 << 20]], "uint8", torch.zeros(128 << 20, dtype=torch.uint8))
        weights = replace(weights, buckets=(bulk, *weights.buckets))
        task = asyncio.create_task(kept.weights.bring(weights, 5.0))
        while not sending_threads():
            await asyncio.sleep(0)
        with standing_still(server.pid), pytest.raises(SyncFailed, match=r"version 2 .* did not reach"):
            await task
        for thread in sending_threads():
            await asyncio.to_thread(thread.join, 30)
        assert not sending_threads()
        policy = tiny_policy(seed=3)
        await kept.bring(policy, 3, "distributed")
        assert await kept.worst(policy, 3) < 1e-5

    on_server(body)


def test_a_failure_before_the_pause_leaves_the_server_as_it_is(on_server) -> None:
    async def body(kept: Kept) -> None:
        policy = tiny_policy(seed=1)
        await kept.bring(policy, 1, "disk")
        weights = kept.of(tiny_policy(seed=2), 2, "distributed")
        with pytest.raises(SyncFailed, match="did not reach") as failure:
            await kept.weights.bring(weights, 1e-4)  # no time to join a process group
        assert not failure.value.dirty
        assert await kept.worst(policy, 1) < 1e-5
        await kept.bring(tiny_policy(seed=3), 3, "distributed")

    on_server(body)


def test_an_update_cancelled_in_the_middle_is_made_good(on_server) -> None:
    async def body(kept: Kept) -> None:
        await kept.bring(tiny_policy(seed=1), 1, "distributed")
        many = kept.of(
            tiny_policy(seed=2), 2, "distributed", bucket_bytes=1
        )  # a bucket for each tensor: it takes a while
        task = asyncio.create_task(kept.weights.bring(many, DEADLINE_S))
        while not kept.weights._begun:
            await asyncio.sleep(0)
        await asyncio.sleep(0.02)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        policy = tiny_policy(seed=3)
        await kept.bring(policy, 3, "distributed")
        assert await kept.worst(policy, 3) < 1e-5

    on_server(body)


def test_a_group_the_server_no_longer_knows_is_replaced(on_server) -> None:
    async def body(kept: Kept) -> None:
        await kept.bring(tiny_policy(seed=1), 1, "distributed")
        group = kept.weights._group
        assert group is not None
        await kept.client.post("/destroy_weights_update_group", {"group_name": group.name}, DEADLINE_S)
        policy = tiny_policy(seed=2)
        await kept.bring(policy, 2, "distributed")
        assert kept.weights._group is not group
        assert await kept.worst(policy, 2) < 1e-5

    on_server(body)


def test_what_a_dead_trainer_left_open_is_closed(on_server, server) -> None:
    """Paused, an update begun, a process group joined: the next trainer starts from there."""

    async def body(kept: Kept) -> None:
        other = Kept(server, kept.directory)
        await other.bring(tiny_policy(seed=1), 1, "distributed", stay_paused=True)
        await other.client.post("/begin_weight_update", {}, DEADLINE_S)
        other.weights._group.close()
        await other.client.close()
        policy = tiny_policy(seed=2)
        await kept.bring(policy, 2, "distributed")
        assert await kept.worst(policy, 2) < 1e-5

    on_server(body)


def test_two_updates_at_once_take_turns(on_server) -> None:
    async def body(kept: Kept) -> None:
        policies = {version: tiny_policy(seed=version) for version in (1, 2)}
        await asyncio.gather(*(kept.bring(policies[v], v, METHODS[v % 2]) for v in policies))
        assert await kept.worst(policies[2], 2) < 1e-5

    on_server(body)


def test_the_trainers_process_group_is_left_alone_and_nothing_listens_to_the_network(on_server) -> None:
    async def body(kept: Kept) -> None:
        before = set(psutil.Process().net_connections("inet"))
        await kept.bring(tiny_policy(seed=1), 1, "distributed")
        listening = {c for c in psutil.Process().net_connections("inet") if c.status == psutil.CONN_LISTEN} - before
        assert listening and {connection.laddr.ip for connection in listening} == {"127.0.0.1"}
        assert dist.get_world_size() == 1 and len(dist.distributed_c10d._world.pg_map) == 1

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        on_server(body)
    finally:
        dist.destroy_process_group()
