"""Ranks listen where they must and nowhere else."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments import LightningEnvironment

from app.strategies import DTAStrategy
from app.strategies.ranks import listening
from app.strategies.ranks.rendezvous import join

SOON = timedelta(seconds=10)


@pytest.fixture
def nothing_set(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    yield


def _reached(address: str, port: int) -> bool:
    with socket.socket() as stranger:
        stranger.settimeout(SOON.total_seconds())
        return stranger.connect_ex((address, port)) == 0


def test_a_store_listens_on_its_address_alone() -> None:
    """Every address of 127.0.0.0/8 is the machine's own: a wildcard would answer on all of them."""
    store = listening.open_store("127.0.0.1", 0, SOON)
    assert _reached("127.0.0.1", store.port) and not _reached("127.0.0.2", store.port)
    dist.TCPStore("127.0.0.1", store.port, wait_for_workers=False, timeout=SOON).set("met", "yes")
    assert store.get("met") == b"yes"


def test_a_port_that_is_taken_is_named() -> None:
    store = listening.open_store("127.0.0.1", 0, SOON)
    with pytest.raises(OSError, match=rf"rank 0 cannot listen at 127.0.0.1, port {store.port}: .*MASTER_PORT"):
        listening.open_store("127.0.0.1", store.port, SOON)


def test_a_rank_that_is_alone_needs_no_free_port(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run after another one in the same process: Lightning left the port in the environment."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        monkeypatch.setenv("MASTER_PORT", str(taken.getsockname()[1]))
        join(LightningEnvironment(), listening.LOOPBACK, "gloo", torch.device("cpu"), SOON, SOON)
        assert dist.get_world_size() == 1


def test_an_address_of_no_interface_is_said_to_listen_everywhere(capsys: pytest.CaptureFixture[str]) -> None:
    with listening.listen("192.0.2.1", 0) as listener:  # reserved for documentation
        assert listener.getsockname()[0] in ("::", "0.0.0.0")
    assert "192.0.2.1, where the ranks meet, is no address of this machine" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("address", "local"), [("127.0.0.1", True), ("::1", True), ("localhost", True), ("10.0.0.1", False), ("a", False)]
)
def test_local_addresses(address: str, local: bool) -> None:
    assert listening.is_local(address) == local


@pytest.mark.usefixtures("nothing_set")
def test_gloo_is_told_only_while_groups_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    with listening.gloo_on_loopback(True):
        assert os.environ["GLOO_SOCKET_IFNAME"] in ("lo", "lo0")
    assert "GLOO_SOCKET_IFNAME" not in os.environ
    with listening.gloo_on_loopback(False):
        assert "GLOO_SOCKET_IFNAME" not in os.environ
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    with listening.gloo_on_loopback(True):
        assert os.environ["GLOO_SOCKET_IFNAME"] == "eth7"


@pytest.mark.parametrize(
    ("nodes", "address", "expected"),
    [(1, "node0.cluster", "127.0.0.1"), (2, "node0.cluster", "node0.cluster"), (2, "127.0.0.1", "127.0.0.1")],
)
def test_ranks_of_one_machine_meet_on_loopback(
    nodes: int, address: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the cluster calls the machine."""
    monkeypatch.setenv("MASTER_ADDR", address)
    monkeypatch.setenv("LOCAL_RANK", "0")
    strategy = DTAStrategy(cluster_environment=LightningEnvironment(), parallel_devices=[torch.device("cpu")] * 2)
    strategy.num_nodes = nodes
    strategy.set_world_ranks()
    assert strategy._address == expected
