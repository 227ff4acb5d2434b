"""Real servers that read the trainer's memory: ends of either side in the middle, and addresses that only look near."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from datamodules.inference.protocol import WeightUpdate
from datamodules.inference.sglang.client import ServerClient
from datamodules.inference.sglang.launcher import ServerProcess
from datamodules.inference.sglang.server import leftovers
from datamodules.inference.sglang.weights.forms import Bucket, weights_of
from datamodules.inference.sglang.weights.server_weights import ServerWeights, SyncFailed
from datamodules.inference.sglang.weights.update_group import Deadline
from datamodules.inference.weight_files import WeightFiles
from tests.datamodules.inference.engine_suite import tiny_policy
from tests.datamodules.inference.sglang.real_servers.servers import KEY, START_S, options
from tests.datamodules.inference.sglang.real_servers.silence import standing_still
from tests.datamodules.inference.sglang.real_servers.test_weight_sync import DEADLINE_S, Kept, broken

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

# Ends in the middle of an update, as by a machine that is short of memory.
TRAINER = """
import asyncio, os, signal, sys
from pathlib import Path
from tests.datamodules.inference.engine_suite import tiny_policy
from tests.datamodules.inference.sglang.real_servers.test_weight_sync import Kept
from datamodules.inference.sglang.client import ServerClient

class Running:
    def client(self):
        return ServerClient(sys.argv[1], os.environ["ARBORIST_SGLANG_API_KEY"])

async def main():
    kept = Kept(Running(), Path("/nowhere"))
    task = asyncio.create_task(kept.weights.bring(kept.of(tiny_policy(seed=5), 5, "tensor", bucket_bytes=1), 60.0))
    while not kept.weights._shared._lent:
        await asyncio.sleep(0)
    print(kept.weights._shared._lent[0].file, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(main())
"""

TUNNEL = """
import sys, time
from tests.datamodules.inference.sglang.real_servers.proxy import Proxy
print(Proxy(sys.argv[1]).start().url, flush=True)
time.sleep(600)
"""


def ours() -> set[str]:
    """Files of this process in shared memory."""
    return {name for name in os.listdir("/dev/shm") if name.startswith(f"torch_{os.getpid()}_")}


def mapped(server: ServerProcess) -> list[str]:
    """Lines on memory of this process that the server has still, files that are gone included."""
    lines = [
        line for pid in leftovers.members(server.pid) for line in Path(f"/proc/{pid}/maps").read_text().split("\n")
    ]
    assert any("libtorch" in line for line in lines)
    return [line for line in lines if f"torch_{os.getpid()}_" in line]


def wait_for(what: Callable[[], bool], seconds: float = 60) -> None:
    ends = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < ends
        time.sleep(0.05)


async def in_the_middle(kept: Kept, task: asyncio.Task[object]) -> None:
    """Returns when a bucket was put where the server reads it."""
    while not kept.weights._shared._lent:
        assert not task.done()
        await asyncio.sleep(0)


@pytest.fixture
def own(tmp_path: Path) -> Iterator[ServerProcess]:
    """A server that a test may end."""
    path, _ = WeightFiles(tmp_path / "first").write(tiny_policy(seed=98), version=0)
    process = ServerProcess(options(str(path)), tmp_path / "server.log", KEY)
    asyncio.run(process.ready(START_S))
    yield process
    process.stop(0.0)


def test_nothing_is_left_when_the_server_has_the_weights(server: ServerProcess, tmp_path: Path) -> None:
    async def main() -> None:
        kept = Kept(server, tmp_path)
        weights = kept.of(tiny_policy(seed=1), 1, "tensor")
        assert len(weights.buckets) > 3
        await kept.weights.bring(weights, DEADLINE_S)
        assert not ours() and not mapped(server)
        policy = tiny_policy(seed=2)
        path, _ = WeightFiles(tmp_path).write(policy, 2)  # of ranks that have shards, whose files servers need not see
        await kept.weights.bring(weights_of(WeightUpdate(2, path=str(path), read_here=True, shared=True)), DEADLINE_S)
        assert await kept.worst(policy, 2) < 1e-5
        await kept.bring(policy, 2, "tensor", stay_paused=True)
        await kept.weights._shared.open(weights, Deadline(DEADLINE_S))  # and then the run ends
        assert len(ours()) == 1
        await kept.client.post("/continue_generation", {}, DEADLINE_S)
        await kept.close()
        assert not ours()

    asyncio.run(main())


def test_a_server_that_hangs_finds_the_bucket_when_it_wakes(server: ServerProcess, tmp_path: Path) -> None:
    """Without, it would end: the file stays until it has answered a later one."""

    async def main() -> None:
        kept = Kept(server, tmp_path)
        await kept.bring(tiny_policy(seed=1), 1, "tensor")
        many = kept.of(tiny_policy(seed=2), 2, "tensor", bucket_bytes=1)
        task = asyncio.create_task(kept.weights.bring(many, 5.0))
        await in_the_middle(kept, task)
        with standing_still(server.pid):
            with pytest.raises(SyncFailed, match=r"version 2 .* did not reach"):
                await task
            await kept.close()  # as its supervisor does, who comes to it anew
            assert len(ours()) == 1
        kept = Kept(server, tmp_path)
        policy = tiny_policy(seed=3)
        await kept.bring(policy, 3, "tensor")
        assert await kept.worst(policy, 3) < 1e-5
        assert not ours() and server.running
        await kept.close()

    asyncio.run(main())


def test_an_update_cancelled_in_the_middle_is_made_good(server: ServerProcess, tmp_path: Path) -> None:
    async def main() -> None:
        kept = Kept(server, tmp_path)
        await kept.bring(tiny_policy(seed=1), 1, "tensor")
        task = asyncio.create_task(kept.weights.bring(kept.of(tiny_policy(seed=2), 2, "tensor", 1), DEADLINE_S))
        await in_the_middle(kept, task)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        policy = tiny_policy(seed=3)
        await kept.bring(policy, 3, "tensor")
        assert await kept.worst(policy, 3) < 1e-5
        await kept.close()
        assert not ours()

    asyncio.run(main())


def test_a_trainer_that_is_killed_leaves_no_file_and_a_server_for_the_next(
    server: ServerProcess, tmp_path: Path
) -> None:
    killed = subprocess.run([sys.executable, "-c", TRAINER, server.url], capture_output=True, text=True, timeout=500)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    pid = Path(killed.stdout.strip()).name.split("_")[1]
    wait_for(lambda: not any(name.startswith(f"torch_{pid}_") for name in os.listdir("/dev/shm")))

    async def main() -> None:
        kept = Kept(server, tmp_path)
        policy = tiny_policy(seed=6)
        await kept.bring(policy, 6, "tensor")
        assert await kept.worst(policy, 6) < 1e-5
        await kept.close()

    asyncio.run(main())


@pytest.mark.parametrize("how", ["killed", "tensors that do not fit"])
def test_a_server_that_ends_in_an_update_gets_it_when_it_is_back(own: ServerProcess, tmp_path: Path, how: str) -> None:
    async def main() -> None:
        kept, policy = Kept(own, tmp_path), tiny_policy(seed=2)
        await kept.bring(tiny_policy(seed=1), 1, "tensor")
        weights = kept.of(policy, 2, "tensor", bucket_bytes=1)
        if how == "killed":
            task = asyncio.create_task(kept.weights.bring(weights, DEADLINE_S))
            await in_the_middle(kept, task)
            os.killpg(own.pid, signal.SIGKILL)
        else:
            task = asyncio.create_task(kept.weights.bring(broken(weights), 20.0))
        with pytest.raises(SyncFailed) as failure:
            await task
        assert failure.value.lost and failure.value.dirty
        wait_for(lambda: own.ended)
        await kept.close()  # as a fleet does with one that is lost
        assert not ours()
        own.stop(0.0)
        await own.ready(START_S)
        again = Kept(own, tmp_path)
        await again.weights.bring(weights, DEADLINE_S)
        assert await again.worst(policy, 2) < 1e-5
        await again.close()
        assert not ours()

    asyncio.run(main())


def test_without_room_in_shared_memory_the_server_goes_on_as_it_is(server: ServerProcess, tmp_path: Path) -> None:
    async def main() -> None:
        kept = Kept(server, tmp_path)
        policy = tiny_policy(seed=1)
        await kept.bring(policy, 1, "tensor")
        weights = kept.of(tiny_policy(seed=2), 2, "tensor")
        huge = Bucket(["x"], [[1 << 50]], "uint8", None)
        with pytest.raises(SyncFailed, match=r"/dev/shm has no room for 1,125,899,906,842,624 bytes") as failure:
            await kept.weights.bring(replace(weights, buckets=(*weights.buckets, huge)), DEADLINE_S)
        assert not failure.value.dirty and not ours()
        assert await kept.worst(policy, 1) < 1e-5
        await kept.close()

    asyncio.run(main())


def test_an_address_that_leads_elsewhere_is_refused_and_the_server_goes_on(
    server: ServerProcess, tmp_path: Path
) -> None:
    async def main() -> None:
        kept = Kept(server, tmp_path)
        policy = tiny_policy(seed=1)
        tunnel = subprocess.Popen([sys.executable, "-c", TUNNEL, server.url], stdout=subprocess.PIPE, text=True)
        client = ServerClient(tunnel.stdout.readline().strip(), KEY)
        through = ServerWeights(client)
        try:
            await through.bring(kept.of(policy, 1, "disk"), DEADLINE_S)
            words = r"WeightSync\.method: tensor .* on this host alone, .*a tunnel to another host.*method: distributed"
            with pytest.raises(SyncFailed, match=words) as failure:
                await through.bring(kept.of(tiny_policy(seed=2), 2, "tensor"), DEADLINE_S)
            assert not failure.value.dirty
            assert await kept.worst(policy, 1) < 1e-5
        finally:
            await through.close()
            await client.close()
            tunnel.kill()
            tunnel.communicate()
            await kept.close()

    asyncio.run(main())
