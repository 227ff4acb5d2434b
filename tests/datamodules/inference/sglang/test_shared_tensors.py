"""Memory that other processes open, without a server: what they find there, and that nothing of it stays."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from benchmarks.common.receiver import Receiver
from datamodules.inference.export import checkpoint_weights
from datamodules.inference.protocol import GenerationError, WeightUpdate
from datamodules.inference.sglang import SGLangEngine
from datamodules.inference.sglang.weights import local_server
from datamodules.inference.sglang.weights.forms import HostWeights, SharedWeights, weights_of
from datamodules.inference.sglang.weights.shared_tensors import OnGPU, OnHost, told
from tests.datamodules.inference.engine_suite import tiny_policy

TENSORS = {"a": torch.randn(3, 5), "b": torch.randn(7), "c": torch.randn(2, 2, 2).bfloat16(), "d": torch.tensor(1.5)}

# A process that has nothing of this one but what it is told; of a GPU's UUID it makes a number, as SGLang does.
READER = """
import base64, json, pickle, sys
import torch
from torch.multiprocessing import reductions
rebuild = reductions.rebuild_cuda_tensor
def by_uuid(*given):
    return rebuild(*given[:6], next(i for i in range(torch.cuda.device_count())
        if str(torch.cuda.get_device_properties(i).uuid) == given[6]), *given[7:])
reductions.rebuild_cuda_tensor = by_uuid
found = {}
for line in sys.stdin:
    bucket = pickle.loads(base64.b64decode(line))
    data = bucket["flattened_tensor"]
    for one in bucket["metadata"]:
        tensor = data[one.start_idx : one.end_idx].view(one.dtype).reshape(one.shape)
        found[one.name] = [str(data.device), str(tensor.dtype), tensor.tolist()]
print(json.dumps(found))
"""
KILLED = """
import os, signal, torch
from datamodules.inference.sglang.weights.shared_tensors import OnHost
lent = OnHost(torch.zeros(1000, dtype=torch.uint8))
print(lent.file, lent.file.exists(), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def read_elsewhere(lines: list[str]) -> dict[str, list[object]]:
    command = [sys.executable, "-c", READER]
    done = subprocess.run(command, input="\n".join(lines), capture_output=True, text=True, timeout=500, check=True)
    return json.loads(done.stdout)


def wait_for(what: Callable[[], bool]) -> None:
    ends = time.monotonic() + 60
    while not what():
        assert time.monotonic() < ends
        time.sleep(0.05)


def test_another_process_finds_each_tensor_and_its_file_goes_with_it() -> None:
    weights = HostWeights.copy_of(TENSORS, 1, bucket_bytes=70)
    assert len(weights.buckets) == 3
    lent = [OnHost(bucket.data) for bucket in weights.buckets]
    assert all(one.file.parent == Path("/dev/shm") and one.file.exists() for one in lent)
    found = read_elsewhere([told(bucket, one) for bucket, one in zip(weights.buckets, lent, strict=True)])
    assert found == {name: ["cpu", str(tensor.dtype), tensor.tolist()] for name, tensor in TENSORS.items()}
    files = [one.file for one in lent]
    lent[0].free()
    lent.pop(1)
    assert [file.exists() for file in files][:2] == [False, False]
    told(weights.buckets[2], lent[1])  # for a process that never opens it
    lent.clear()
    assert not files[2].exists()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_another_process_finds_tensors_on_a_gpu() -> None:
    (bucket,) = HostWeights.copy_of({"a": torch.randn(300, 5)}, 1).buckets
    device = torch.device("cuda", torch.cuda.device_count() - 1)
    lent = OnGPU(bucket.read(), device)
    expected = bucket.read().view(torch.float32).view(300, 5).tolist()
    assert read_elsewhere([told(bucket, lent)]) == {"a": [str(device), "torch.float32", expected]}
    before = torch.cuda.memory_reserved(device)
    lent.free()
    assert torch.cuda.memory_reserved(device) < before


def test_a_process_that_is_killed_leaves_no_file() -> None:
    killed = subprocess.run([sys.executable, "-c", KILLED], capture_output=True, text=True, timeout=500)
    assert killed.returncode == -signal.SIGKILL
    name, existed = killed.stdout.split()
    assert existed == "True"
    wait_for(lambda: not Path(name).exists())


def test_too_much_for_shared_memory_is_an_error_that_says_where_there_is_no_room() -> None:
    huge = torch.zeros(1, dtype=torch.uint8).expand(1 << 50)

    def ours() -> set[str]:  # other processes come and go there
        return {name for name in os.listdir("/dev/shm") if name.startswith(f"torch_{os.getpid()}_")}

    before = ours()
    with pytest.raises(GenerationError, match=r"^/dev/shm has no room for 1,125,899,906,842,624 bytes .*--shm-size"):
        OnHost(huge)
    assert ours() == before


def refusal(url: str) -> str:
    with pytest.raises(GenerationError) as error:
        local_server.find(url)
    return str(error.value)


def test_servers_that_cannot_share_memory_are_refused_by_what_is_in_the_way() -> None:
    said = refusal("http://192.0.2.1:30000")
    assert said.startswith("WeightSync.method: tensor brings weights to servers on this host alone")
    assert "http://192.0.2.1:30000 it is on another host" in said and said.endswith(local_server.REMEDY)
    with socket.create_server(("127.0.0.1", 0)) as other:  # a tunnel would look like this
        assert "a tunnel to another host" in refusal(f"http://127.0.0.1:{other.getsockname()[1]}")


def test_updates_are_shared_when_they_ask_for_it() -> None:
    weights = weights_of(WeightUpdate(3, state_dict=TENSORS, shared=True), one_gpu=True)
    assert isinstance(weights, SharedWeights) and weights.version == 3
    assert isinstance(weights_of(WeightUpdate(3, state_dict=TENSORS)), HostWeights)
    with pytest.raises(ValueError, match=r"WeightUpdate\.shared: nothing is sent; give state_dict, or a path and"):
        WeightUpdate(3, path="/somewhere", shared=True)


@pytest.mark.parametrize("alone", [True, False])
def test_an_update_that_no_server_can_take_is_an_error_though_others_are_lost(alone: bool) -> None:
    """What is wrong here does not go away when a server comes back: a run that waited would wait for ever."""
    with socket.create_server(("127.0.0.1", 0)) as gone:
        dead = f"http://127.0.0.1:{gone.getsockname()[1]}"
    with Receiver() as server:
        engine = SGLangEngine(urls=[server.url] + [dead] * (not alone), start_timeout_s=20.0, update_timeout_s=10.0)
        engine.start(tiny_policy(), 0, seed=0)
        try:
            with pytest.raises(GenerationError, match=r"WeightSync\.method: tensor .* set WeightSync\.method"):
                engine.update_weights(WeightUpdate(1, state_dict=checkpoint_weights(tiny_policy()), shared=True))
            assert engine.version == -1
        finally:
            engine.close()
