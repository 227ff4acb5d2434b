"""A fleet's servers change while an update begins. No server is contacted."""

from __future__ import annotations

import asyncio

import pytest

from datamodules.inference.sglang.fleet import Fleet
from datamodules.inference.sglang.roster import given_servers
from datamodules.inference.sglang.router import PrefixRouter
from datamodules.inference.sglang.server_state import Server
from datamodules.inference.sglang.weights import DiskWeights, SyncFailed


async def _no_check(server: Server) -> None:
    pass


def test_a_server_found_dirty_as_an_update_begins_is_left_to_its_keeper() -> None:
    """Its keeper reconnects it, which closes what an update on the same connection works with."""

    async def run() -> None:
        (server,) = given_servers(["http://127.0.0.1:9"], None, 4)
        fleet = Fleet([server], PrefixRouter(256), _no_check, silence_s=60, update_s=60, start_s=60, max_restarts=0)
        server.enter("serving")
        weights = DiskWeights(1, 0, "/nowhere")
        updating = asyncio.create_task(fleet.update(weights, 60))
        # In the turn of the loop after the update chose its servers, before it begins with them.
        asyncio.get_running_loop().call_soon(fleet.distrust, server, "it has version 0 still")
        assert await updating == []
        assert server.state == "dirty" and fleet.target is weights

    asyncio.run(run())


@pytest.mark.parametrize("other", ["serving", "lost"])
def test_the_last_one_lost_in_an_update_is_an_error_only_when_no_other_was_lost_before(other: str) -> None:
    async def run() -> None:
        servers = given_servers(["http://127.0.0.1:9", "http://127.0.0.1:10"], None, 4)  # nobody listens there
        fleet = Fleet(servers, PrefixRouter(256), _no_check, silence_s=60, update_s=60, start_s=60, max_restarts=0)
        old, new = DiskWeights(1, 0, "/nowhere"), DiskWeights(2, 0, "/nowhere")
        fleet.target = old
        servers[0].enter("serving")
        servers[1].enter(other, "restarting")
        if other == "lost":
            assert await fleet.update(new, 60) == []
            assert fleet.target is new and servers[0].state not in ("serving", "updating")
        else:
            with pytest.raises(SyncFailed, match="version 2 of the weights did not reach"):
                await fleet.update(new, 60)
            assert fleet.target is old

    asyncio.run(run())
