"""What a connection to Ray tells it, and what it says of tasks; on a cluster of this machine alone."""

from __future__ import annotations

import asyncio
import os
import secrets
import time
from typing import Any

import pytest

from datamodules.processes.calls import CallFailed, pickled_call, pickled_functions

os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "token"}
os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
ray = pytest.importorskip("ray", reason="pip install -e '.[ray]' brings it")
FUNCTIONS = {"pid": os.getpid, "sleep": time.sleep}


def setup(name: str, *args: Any) -> dict[str, Any]:
    given = {"functions": pickled_functions(FUNCTIONS), "job": pickled_call(name, args, {}), "seconds": 60.0}
    return given | {"memory_mb": 500.0, "workers": 1, "keep_environment": [], "folder": None, "held": None}


@pytest.mark.slow
def test_a_connection_tells_ray_of_the_task_once_and_ends_what_it_cancels() -> None:
    from datamodules.processes.on_ray import RayCluster

    cluster = RayCluster(None)

    async def run() -> None:
        told = []
        for _ in range(2):
            task = cluster.start(setup("pid"), {"CPU": 1.0})
            assert list(await task.next()) == ["address"] and (await task.next())["status"] == "ok"
            keys = ray.get_runtime_context().worker.gcs_client.internal_kv_keys(b"RemoteFunction:", b"fun", None)
            told.append(len(keys))
        assert told[0] == told[1] > 0
        task = cluster.start(setup("sleep", 1000), {"CPU": 1.0})
        await task.next()
        task.interrupt(force=True)
        with pytest.raises(CallFailed, match=r"^was cancelled$"):
            await task.next()
        cluster.close()
        task.interrupt()  # would have Ray start another cluster
        with pytest.raises(CallFailed, match=r"^was cancelled: Ray has been left$"):
            await task.next()  # would end this process
        assert not ray.is_initialized()

    try:
        asyncio.run(run())
    finally:
        cluster.close()
