"""Weights that several ranks send, each to servers of its own: all servers get them, whatever becomes of a rank."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.common.receiver import Receiver
from datamodules.inference.export import checkpoint_weights
from datamodules.inference.protocol import GenerationError
from datamodules.inference.sglang.client import ServerClient
from datamodules.inference.sglang.weights.forms import HostWeights
from datamodules.inference.sglang.weights.senders import Senders, this_host
from datamodules.inference.sglang.weights.sending_rank import SendingRank
from datamodules.inference.sglang.weights.server_weights import ServerWeights
from tests.app.strategies.shard_jobs import Layout
from tests.datamodules.inference.engine_suite import tiny_policy
from tests.datamodules.inference.sglang import sender_jobs
from tests.helpers.rank_pool import RankPool

NBYTES = sum(tensor.nbytes for tensor in checkpoint_weights(tiny_policy()).values())


@pytest.fixture
def servers() -> Iterator[list[Receiver]]:
    with ExitStack() as stack:
        yield [stack.enter_context(Receiver()) for _ in range(6)]


def send(ranks: RankPool, servers: list[Receiver], versions: int, **options: Any) -> list[dict[str, Any]]:
    """All servers have the last version to the bit, whoever sent it; what rank 0 says of the other ranks."""
    report = ranks.run(sender_jobs.send_versions, urls=[one.url for one in servers], versions=versions, **options)[0]
    expected = checkpoint_weights(tiny_policy(seed=versions))
    for server in servers:
        assert server.version == str(versions)
        assert server.got.keys() == expected.keys()
        assert all(torch.equal(server.got[name], tensor) for name, tensor in expected.items())
    return report


def test_servers_are_dealt_evenly_and_stay_with_their_sender(two_ranks: RankPool, servers: list[Receiver]) -> None:
    report = send(two_ranks, servers, versions=3)
    assert report == [{"rank": 1, "servers": 3, "bytes": 3 * 3 * NBYTES, "error": ""}]
    assert [len(server.joined) for server in servers] == [1] * 6  # one process group for all versions
    assert len({port for server in servers for port in server.joined}) == 6


@pytest.mark.parametrize("how", ["in memory", "in files"])
def test_of_four_ranks_one_that_cannot_is_replaced_by_rank_0(
    how: str, four_ranks: RankPool, servers: list[Receiver], tmp_path: Path
) -> None:
    """It has another model, or does not see the files."""
    wrong = {"other": 2} if how == "in memory" else {"files": "weights", "blind": 2}
    report = send(four_ranks, servers, versions=2, home=str(tmp_path), **wrong)
    assert [(one["rank"], one["servers"], one["bytes"]) for one in report] == [
        (1, 2, 2 * 2 * NBYTES),
        (2, 0, 0),
        (3, 2, 2 * 2 * NBYTES),
    ]


def test_servers_of_a_rank_that_goes_are_sent_by_the_others(two_ranks: RankPool, servers: list[Receiver]) -> None:
    report = send(two_ranks, servers, versions=3, leaves=1)
    assert [(one["servers"], one["bytes"]) for one in report] == [(0, 3 * NBYTES)]
    assert "connection" in report[0]["error"]
    assert sorted(len(server.joined) for server in servers) == [1, 1, 1, 2, 2, 2]


def test_a_server_that_does_not_reach_a_rank_is_sent_by_rank_0(two_ranks: RankPool) -> None:
    with Receiver() as first, Receiver(refuse=1) as second:
        report = send(two_ranks, [first, second], versions=2)
    assert report == [{"rank": 1, "servers": 0, "bytes": 0, "error": ""}]
    assert len(first.joined) == len(second.joined) == 1


def test_no_rank_is_asked_for_one_server_or_where_one_is_to_send(two_ranks: RankPool, servers: list[Receiver]) -> None:
    assert send(two_ranks, servers[:1], versions=1) == []
    assert send(two_ranks, servers, versions=1, most=1) == []


@pytest.mark.parametrize("layout", [(2, 1, False), (4, 2, True)], ids=["whole", "shards, by files"])
def test_in_a_run_every_version_is_sent_by_all(
    layout: Layout, two_ranks: RankPool, four_ranks: RankPool, servers: list[Receiver], tmp_path: Path
) -> None:
    """The first too, of the run's beginning."""
    ranks = {2: two_ranks, 4: four_ranks}[layout[0]]
    urls = [server.url for server in servers[:4]]
    reports, weights = ranks.run(sender_jobs.fit, layout=layout, urls=urls, directory=tmp_path)[0]
    for server in servers[:4]:
        assert server.version == "2"
        assert server.got and all(torch.equal(tensor, weights[name]) for name, tensor in server.got.items())
    size = sum(tensor.nbytes for tensor in servers[0].got.values())
    share = 4 // layout[0]
    for number, report in enumerate(reports, 2):
        expected = [{"rank": rank, "servers": share, "bytes": number * share * size} for rank in range(1, layout[0])]
        assert report == [one | {"error": ""} for one in expected]
    assert len(reports) == 2


def test_a_server_that_comes_late_is_sent_by_rank_0() -> None:
    """Ranks have gone on to the next step by then."""

    async def run(late: Receiver) -> None:
        senders = Senders()
        invitation = await senders.invite([1], "127.0.0.1")
        sending = await asyncio.to_thread(SendingRank, invitation, 1)
        tensors = checkpoint_weights(tiny_policy(seed=1))
        lending = asyncio.create_task(asyncio.to_thread(sending.lend, 1, lambda: tensors, 60.0))
        weights = HostWeights.copy_of(tensors, 1)
        await senders.lend(weights, 60.0)
        client = ServerClient(late.url, None)
        first, own = ServerWeights(client), ServerWeights(client)
        assert senders.choose(first, late.url, weights) is None  # rank 0 is the first to be dealt a server
        assert senders.choose(own, late.url, weights) is not None
        senders.over(1)
        await lending
        for tensor in tensors.values():
            tensor.zero_()  # the rank trains on
        await own.bring(weights, 60.0, senders)
        await own.close()
        await client.close()
        sending.close()
        await senders.close()

    with Receiver() as late:
        asyncio.run(asyncio.wait_for(run(late), 60))
    expected = checkpoint_weights(tiny_policy(seed=1))
    assert all(torch.equal(late.got[name], tensor) for name, tensor in expected.items())


def test_who_does_not_know_the_token_is_not_answered() -> None:
    async def run() -> None:
        senders = Senders()
        invitation = await senders.invite([1], "127.0.0.1")
        for hello in (
            {"rank": 1, "host": this_host(), "token": "wrong"},
            {"rank": 2, "host": this_host(), "token": invitation.token},
            {"rank": 1},
            [],
        ):
            reader, writer = await asyncio.open_connection(invitation.address, invitation.port)
            writer.write(json.dumps(hello).encode() + b"\n")
            assert await reader.read() == b""
            writer.close()
        assert senders.report() == []
        await senders.close()

    asyncio.run(asyncio.wait_for(run(), 60))


def test_a_rank_that_lends_hears_that_rank_0_is_gone() -> None:
    async def run() -> None:
        senders = Senders()
        invitation = await senders.invite([1], "127.0.0.1")
        sending = await asyncio.to_thread(SendingRank, invitation, 1)
        lending = asyncio.create_task(asyncio.to_thread(sending.lend, 1, dict, 60.0))
        while not senders.report():
            await asyncio.sleep(0.01)
        await senders.close()
        with pytest.raises(GenerationError, match="rank 0 is gone while version 1 was sent: it closed the connection"):
            await lending
        sending.close()

    asyncio.run(asyncio.wait_for(run(), 60))


def test_a_rank_that_does_not_reach_rank_0_says_what_to_set() -> None:
    async def run() -> None:
        senders = Senders()
        invitation = await senders.invite([1], "127.0.0.1")
        await senders.close()
        with pytest.raises(GenerationError, match=r"rank 0 at 127\.0\.0\.1:\d+: .*WeightSync\.senders: 1"):
            await asyncio.to_thread(SendingRank, invitation, 1)

    asyncio.run(asyncio.wait_for(run(), 60))
