"""Weights that several ranks send, each to servers of its own: all servers get them, whatever becomes of a rank."""

from __future__ import annotations

import asyncio
import gc
import json
import weakref
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from app.strategies.ranks.listening import LOOPBACK, listen
from benchmarks.common.receiver import Receiver
from datamodules.inference.export import checkpoint_weights
from datamodules.inference.protocol import GenerationError
from datamodules.inference.sglang.client import ServerClient
from datamodules.inference.sglang.weights import senders as senders_module
from datamodules.inference.sglang.weights import sending_rank
from datamodules.inference.sglang.weights.forms import HostWeights
from datamodules.inference.sglang.weights.senders import PeerGroup, Senders, this_host
from datamodules.inference.sglang.weights.sending_rank import SendingRank
from datamodules.inference.sglang.weights.server_weights import ServerWeights, SyncFailed
from datamodules.inference.sglang.weights.update_group import Deadline
from datamodules.inference.weight_files import WeightFiles
from modules import build_model
from tests.app.strategies.shard_jobs import HEADS, Layout
from tests.datamodules.inference.engine_suite import tiny_policy
from tests.datamodules.inference.sglang import sender_jobs
from tests.helpers.rank_pool import RankPool
from tests.helpers.tiny_policy import source

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
        assert server.version.startswith(f"v{versions}-")
        assert server.got.keys() == expected.keys()
        assert all(torch.equal(server.got[name], tensor) for name, tensor in expected.items())
    return report


def test_servers_are_dealt_evenly_and_stay_with_their_sender(two_ranks: RankPool, servers: list[Receiver]) -> None:
    report = send(two_ranks, servers, versions=3)
    assert report == [{"rank": 1, "servers": 3, "bytes": 3 * 3 * NBYTES, "error": ""}]
    assert [len(server.joined) for server in servers] == [1] * 6  # one process group for all versions
    assert len({port for server in servers for port in server.joined}) == 6


@pytest.mark.parametrize("how", ["another model", "no weights", "no files", "other files"])
def test_of_four_ranks_one_that_cannot_is_replaced(
    how: str, four_ranks: RankPool, servers: list[Receiver], tmp_path: Path
) -> None:
    """By rank 0 at first, and by all others after three times. It has another model, cannot make its weights, does not
    see the files, or sees those of an earlier run under their names."""
    home, elsewhere = tmp_path / "home", tmp_path / "elsewhere"
    home.mkdir()
    for version in range(1, 6):
        WeightFiles(elsewhere / "weights").write(tiny_policy(seed=50), version)
    there = {"no files": "/", "other files": str(elsewhere)}
    wrong = {"another model": {"other": 2}, "no weights": {"breaks": 2}}.get(how)
    wrong = wrong or {"files": "weights", "blind": 2, "elsewhere": there[how]}
    report = send(four_ranks, servers, versions=5, home=str(home), **wrong)
    assert [(one["rank"], one["servers"], one["bytes"]) for one in report] == [
        (1, 2, 2 * 5 * NBYTES),
        (2, 0, 0),
        (3, 2, (5 + 2) * NBYTES),
    ]


def test_servers_of_a_rank_that_goes_are_sent_by_the_others(two_ranks: RankPool, servers: list[Receiver]) -> None:
    report = send(two_ranks, servers, versions=3, leaves=1)
    assert [(one["servers"], one["bytes"]) for one in report] == [(0, 3 * NBYTES)]
    assert "connection" in report[0]["error"]
    assert sorted(len(server.joined) for server in servers) == [1, 1, 1, 2, 2, 2]


def test_a_server_whose_rank_fails_is_sent_by_rank_0(two_ranks: RankPool) -> None:
    with Receiver() as first, Receiver(refuse=1) as second:
        report = send(two_ranks, [first, second], versions=2)
        assert report == [{"rank": 1, "servers": 1, "bytes": NBYTES, "error": ""}]
        assert [len(first.joined), len(second.joined)] == [1, 2]


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
        assert server.version.startswith("v2-")
        assert server.got and all(torch.equal(tensor, weights[name]) for name, tensor in server.got.items())
    size = sum(tensor.nbytes for tensor in servers[0].got.values())
    share = 4 // layout[0]
    for number, report in enumerate(reports, 2):
        expected = [{"rank": rank, "servers": share, "bytes": number * share * size} for rank in range(1, layout[0])]
        assert report == [one | {"error": ""} for one in expected]
    assert len(reports) == 2


async def together() -> tuple[Senders, SendingRank]:
    """Rank 0's side, and rank 1, in this process."""
    senders = Senders()
    sending = await asyncio.to_thread(SendingRank, await senders.invite([1], LOOPBACK, listen(LOOPBACK)), 1)
    while not senders.report():
        await asyncio.sleep(0.01)
    return senders, sending


def test_merged_weights_of_adapters_are_sent_by_rank_0_unless_others_are_asked_for(
    two_ranks: RankPool, servers: list[Receiver], tmp_path: Path
) -> None:
    torch.manual_seed(1)
    build_model(source(**HEADS)).save_pretrained(tmp_path / "base")
    for senders, expected in ((None, 0), (2, 1)):
        options = {"urls": [one.url for one in servers[:2]], "directory": tmp_path, "base": tmp_path / "base"}
        reports, _ = two_ranks.run(sender_jobs.fit, layout=(2, 1, False), senders=senders, **options)[0]
        assert [len(report) for report in reports] == [expected] * 2
        assert all(torch.equal(servers[0].got[name], tensor) for name, tensor in servers[1].got.items())


def test_a_server_that_comes_late_is_sent_by_rank_0() -> None:
    """Ranks have gone on to the next step by then."""

    async def run(late: Receiver) -> None:
        senders, sending = await together()
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
        assert senders.choose(own, late.url, weights) is None
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
        invitation = await senders.invite([1], LOOPBACK, listen(LOOPBACK))
        for hello in (
            {"rank": 1, "host": this_host(), "token": "wrong"},
            {"rank": 2, "host": this_host(), "token": invitation.token},
            {"rank": 1},
            [],
            json.loads("[" * 900 + "]" * 900),
        ):
            reader, writer = await asyncio.open_connection(invitation.address, invitation.port)
            writer.write(json.dumps(hello).encode() + b"\n")
            assert await reader.read() == b""
            writer.close()
        assert senders.report() == []
        await senders.close()

    asyncio.run(asyncio.wait_for(run(), 60))


def test_a_rank_whose_connection_is_lost_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    """A run does not end for that; said once."""

    async def run() -> None:
        senders, sending = await together()
        lending = asyncio.create_task(asyncio.to_thread(sending.lend, 1, dict, 60.0))
        await senders.close()
        await lending
        await asyncio.to_thread(sending.lend, 2, dict, 60.0)
        sending.close()

    asyncio.run(asyncio.wait_for(run(), 60))
    assert caplog.text.count("rank 1 sends no weights any more") == 1


def test_a_rank_sends_no_version_but_the_one_it_is_asked_for() -> None:
    """As a server that came late, and whose update took longer than the others', would be sent the next one's."""

    async def run(server: Receiver) -> None:
        senders, sending = await together()
        tensors = checkpoint_weights(tiny_policy(seed=1))
        lending = asyncio.create_task(asyncio.to_thread(sending.lend, 1, lambda: tensors, 60.0))
        weights = HostWeights.copy_of(tensors, 1)
        await senders.lend(weights, 60.0)
        group = PeerGroup(next(iter(senders._peers.values())))
        await group.open(server.url, 2, 1, False, Deadline(60.0))
        group.version = 1
        await group.stage(weights.buckets[0], Deadline(60.0))
        senders.over(1)
        await lending
        with pytest.raises(GenerationError, match="rank 1: it does not hold version 1 still now"):
            await group.stage(weights.buckets[0], Deadline(60.0))
        lending = asyncio.create_task(asyncio.to_thread(sending.lend, 2, lambda: tensors, 60.0))
        await senders.lend(HostWeights.copy_of(tensors, 2), 60.0)
        with pytest.raises(GenerationError, match="rank 1: it does not hold version 1 still now"):
            await group.stage(weights.buckets[0], Deadline(60.0))
        senders.over(2)
        await lending
        sending.close()
        await senders.close()

    with Receiver() as server:
        asyncio.run(asyncio.wait_for(run(server), 60))


def test_no_copy_of_weights_outlives_its_update_for_a_sender_that_failed() -> None:
    async def run() -> list[Any]:
        senders, sending = await together()
        servers, left = [ServerWeights(ServerClient("http://127.0.0.1:1", None)) for _ in range(4)], []
        for version in (1, 2):
            tensors = checkpoint_weights(tiny_policy(seed=version))
            lending = asyncio.create_task(asyncio.to_thread(sending.lend, version, lambda t=tensors: t, 60.0))
            weights = HostWeights.copy_of(tensors, version)
            await senders.lend(weights, 60.0)
            chosen = [senders.choose(server, "http://127.0.0.1:1", weights) for server in servers]
            assert any(chosen)
            senders.avoid(servers[1], "http://127.0.0.1:1", weights, "for the test")
            senders.over(version)
            await lending
            left.append(weakref.ref(weights))
        del weights
        sending.close()
        gc.collect()
        found = [one() for one in left]
        await senders.close()
        return found

    assert asyncio.run(asyncio.wait_for(run(), 60)) == [None, None]


def test_machines_of_other_ranks_are_tried_by_one_server_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that waits for a group it does not reach may wait for half an hour: the others never begin to."""
    monkeypatch.setattr(sending_rank, "this_host", lambda: "elsewhere")
    monkeypatch.setattr(senders_module, "on_this_host", lambda url: False)
    monkeypatch.setattr(senders_module, "_JOIN_S", 2.0)

    async def run(servers: list[Receiver]) -> None:
        senders, sending = await together()
        tensors = checkpoint_weights(tiny_policy(seed=1))
        lending = asyncio.create_task(asyncio.to_thread(sending.lend, 1, lambda: tensors, 60.0))
        weights = HostWeights.copy_of(tensors, 1)
        await senders.lend(weights, 60.0)
        clients = [ServerClient(server.url, None) for server in servers]
        own = [ServerWeights(client) for client in clients]
        found = await asyncio.gather(*(one.bring(weights, 8.0, senders) for one in own), return_exceptions=True)
        senders.over(1)
        await lending
        failed = [one for one in found if isinstance(one, SyncFailed)]
        assert len(failed) == 1 and failed[0].dirty
        for one, client in zip(own, clients, strict=True):
            await one.close()
            await client.close()
        sending.close()
        await senders.close()

    with ExitStack() as stack:
        servers = [stack.enter_context(Receiver(unreached=number == 1)) for number in range(4)]
        asyncio.run(asyncio.wait_for(run(servers), 60))
        assert [server.version.split("-")[0] for server in servers] == ["v1", "0", "v1", "v1"]
        assert [len(server.joined) for server in servers] == [1, 0, 1, 1]


def test_a_rank_that_does_not_reach_rank_0_says_what_to_set() -> None:
    async def run() -> None:
        senders = Senders()
        invitation = await senders.invite([1], LOOPBACK, listen(LOOPBACK))
        await senders.close()
        with pytest.raises(GenerationError, match=r"rank 0 at 127\.0\.0\.1:\d+: .*WeightSync\.senders: 1"):
            await asyncio.to_thread(SendingRank, invitation, 1)

    asyncio.run(asyncio.wait_for(run(), 60))
