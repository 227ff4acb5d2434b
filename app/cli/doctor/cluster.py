"""Whether the processes of a job can train together: each runs this, rank 0 prints what was found.

Promises: a rank that does not come, a network that carries nothing and a folder that is not shared are findings, named,
within the deadline; every rank ends with the same exit code; what is written into the folder is gone afterwards.
"""

from __future__ import annotations

import asyncio
import json
import os
import platform
import secrets
import socket
import sys
import time
from collections import Counter
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.plugins.environments import SLURMEnvironment, TorchElasticEnvironment

from app.cli.doctor.findings import Finding, print_findings
from app.strategies.ranks.listening import gloo_on_loopback, is_local
from app.strategies.ranks.rendezvous import meet

_PACKAGES = ("arborist", "torch", "lightning", "transformers")
_CLOCK_NOTE_S, _CLOCK_BAD_S = 1.0, 60.0  # logs of machines are compared by eye; certificates and file times beyond
_ROUNDS = 10
_FLOATS = 2**24  # 64 MiB: a bucket of gradients
_LEAST_GB_S = 0.5
_POLL_S = 0.1


def job() -> ClusterEnvironment:
    """The job this process is one of. Raises ValueError where it is none."""
    for kind in (TorchElasticEnvironment, SLURMEnvironment):
        if kind.detect():
            try:
                return kind()
            except RuntimeError as error:  # Lightning refuses some of srun's options, to runs as well
                raise ValueError(f"--cluster: {error}") from error
    raise ValueError(
        "--cluster: this process is no rank of a job: start it as a run is started, torchrun ... -m app doctor"
        " --cluster, or srun ... python -m app doctor --cluster"
    )


def examine_cluster(folder: Path, servers: Sequence[str], deadline: float) -> int:
    """Collective over the processes of a job; returns the exit code, the same on all of them (1 on one that rank 0 no
    longer answers).

    Args:
        folder: what all ranks are to share; made if missing. servers: URLs of inference servers. deadline: seconds of
            each wait.

    Raises:
        ValueError: this process is no rank of a job. RuntimeError: rank 0 could not be reached.
    """
    cluster = job()
    rank, size, wait = cluster.global_rank(), cluster.world_size(), timedelta(seconds=deadline)
    store = dist.PrefixStore("doctor", meet(rank, cluster.main_address, cluster.main_port, wait))
    store.set(f"facts/{rank}", json.dumps(_facts(cluster)))
    if rank:
        return _follow(cluster, store, folder, wait)
    with suppress(dist.DistError):
        store.wait([f"facts/{other}" for other in range(size)], wait)
    missing = [other for other in range(size) if not store.check([f"facts/{other}"])]
    store.set("all", "no" if missing else "yes")
    facts = {other: json.loads(store.get(f"facts/{other}")) for other in range(size) if other not in missing}
    findings = list(_of_facts(facts, missing, deadline))
    if not missing:
        findings += _together(cluster, store, folder, wait)
    findings += asked_servers(servers, deadline)
    code = print_findings(findings)
    store.set("code", str(code))
    with suppress(dist.DistError):  # this process holds the store: the others read first
        store.wait([f"bye/{other}" for other in range(1, size) if other not in missing], wait)
    return code


def _follow(cluster: ClusterEnvironment, store: dist.Store, folder: Path, wait: timedelta) -> int:
    rank = cluster.global_rank()
    try:
        store.wait(["all"], 2 * wait)
        if store.get("all") == b"yes":
            for finding in _together(cluster, store, folder, wait):
                if finding.level == "bad":  # rank 0 knows only that somebody failed
                    print(f"rank {rank}: {finding.what}: {finding.text}", file=sys.stderr, flush=True)
        store.wait(["code"], 4 * wait)  # the longest that rank 0 waits for others and servers
        code = int(store.get("code"))
    except dist.DistError as error:
        print(f"rank {rank}: rank 0 does not answer ({_line(error)}): see its output", file=sys.stderr, flush=True)
        return 1
    with suppress(dist.DistError):  # rank 0 may be gone already
        store.set(f"bye/{rank}", "")
    return code


# ---- what each says of itself


def _facts(cluster: ClusterEnvironment) -> dict[str, Any]:
    versions = {"python": platform.python_version()}
    for name in _PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    device = _gpu(cluster)
    named = "CPU" if device is None else torch.cuda.get_device_name(device)
    return {"host": socket.gethostname(), "versions": versions, "device": named}


def _gpu(cluster: ClusterEnvironment) -> torch.device | None:
    """This rank's, of those it sees: with one for each task that is the first, whatever the rank."""
    if not torch.cuda.is_available():
        return None
    return torch.device("cuda", cluster.local_rank() % torch.cuda.device_count())


def _of_facts(facts: Mapping[int, dict[str, Any]], missing: Sequence[int], deadline: float) -> Iterator[Finding]:
    """`facts`: by rank, of those that came."""
    counts = Counter(one["host"] for one in facts.values())
    hosts = ", ".join(f"{count} on {host}" for host, count in counts.items())
    if missing:
        named, size = ", ".join(map(str, missing)), len(facts) + len(missing)
        came = f"{len(facts)} of {size} came within {deadline:g} s ({hosts}), missing: rank {named}"
        remedy = "its own output says why, or it cannot reach the address of rank 0"
        yield Finding("bad", "ranks", f"{came}; {remedy}")
    else:
        yield Finding("ok", "ranks", f"all {len(facts)} came: {hosts}")
    for what in dict.fromkeys(name for one in facts.values() for name in one["versions"]):
        versions = {rank: one["versions"].get(what, "none") for rank, one in facts.items()}
        yield _alike(what, versions, "bad", "install the same everywhere")
    devices = {rank: one["device"] for rank, one in facts.items()}
    yield _alike("device", devices, "note", "parts of a step are equal, so the slowest decides")


def _alike(what: str, found: Mapping[int, str], level: Any, remedy: str) -> Finding:
    """`found`: by rank."""
    kinds = {value: [rank for rank, one in found.items() if one == value] for value in found.values()}
    if len(kinds) == 1:
        return Finding("ok", what, f"{next(iter(kinds))} on every rank")
    said = "; ".join(f"{value} on rank {', '.join(map(str, ranks))}" for value, ranks in kinds.items())
    return Finding(level, what, f"{said}: {remedy}")


# ---- what they do together


def _together(cluster: ClusterEnvironment, store: dist.Store, folder: Path, wait: timedelta) -> Iterator[Finding]:
    """Collective; on rank 0, which alone knows, the findings.

    Raises:
        DistError: on another rank, rank 0 no longer answers.
    """
    rank, size = cluster.global_rank(), cluster.world_size()
    everyone = yield from _folder(store, rank, size, folder, wait)
    if not everyone:  # the network needs all of them
        return
    try:
        with gloo_on_loopback(is_local(cluster.main_address)):
            dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=wait)
    except (dist.DistError, RuntimeError) as error:
        remedy = "open the ports between the machines, or name the right interface in GLOO_SOCKET_IFNAME"
        yield Finding("bad", "network", f"ranks cannot connect to each other ({_line(error)}): {remedy}")
        return
    try:
        yield from _clocks(rank, size)
        yield _sums("gloo", torch.zeros(_FLOATS), size)
        if (device := _gpu(cluster)) is not None:
            torch.cuda.set_device(device)
            group = dist.new_group(backend="nccl", timeout=wait)
            yield _sums("NCCL", torch.zeros(_FLOATS, device=device), size, group)
    except (dist.DistError, RuntimeError) as error:
        yield Finding("bad", "network", f"a collective failed ({_line(error)}): see the output of the other ranks")
    finally:
        dist.destroy_process_group()


def _clocks(rank: int, size: int) -> Iterator[Finding]:
    """By how much each clock is ahead of rank 0's: of a few questions the one answered fastest, in whose middle the
    other clock was read."""
    worst, error, who = 0.0, 0.0, 0
    for other in range(1, size):
        best: tuple[float, float] | None = None
        for _ in range(_ROUNDS):
            message = torch.zeros(1, dtype=torch.float64)
            if rank == 0:
                asked = time.time()
                dist.send(message, other)
                dist.recv(message, other)
                answered = time.time()
                found = (answered - asked, float(message) - (asked + answered) / 2)
                best = found if best is None else min(best, found)
            elif rank == other:
                dist.recv(message, 0)
                message.fill_(time.time())
                dist.send(message, 0)
        if best is not None and abs(best[1]) >= abs(worst):
            worst, error, who = best[1], best[0] / 2, other
    level: Any = "bad" if abs(worst) > _CLOCK_BAD_S else "note" if abs(worst) > _CLOCK_NOTE_S else "ok"
    remedy = "" if level == "ok" else ": have all machines set their clocks (chrony, NTP)"
    yield Finding(level, "clocks", f"at most {worst:+.3g} s from rank 0's (rank {who}, known to {error:.2g} s){remedy}")


def _sums(name: str, values: torch.Tensor, size: int, group: Any = None) -> Finding:
    """Seconds of adding up a bucket of gradients; the first time, which makes connections, is left out."""
    fastest = float("inf")
    for attempt in range(4):
        dist.barrier(group=group)
        began = time.perf_counter()
        dist.all_reduce(values, group=group)
        if values.is_cuda:
            torch.cuda.synchronize(values.device)
        if attempt:
            fastest = min(fastest, time.perf_counter() - began)
    each = values.numel() * values.element_size()
    speed = 2 * (size - 1) / size * each / fastest / 1e9
    slow = size > 1 and speed < _LEAST_GB_S
    remedy = (
        ": the gradients of a 1B model take above half a minute a step; look at the interface in use" if slow else ""
    )
    text = (
        f"{each / 2**20:.0f} MiB summed over {size} ranks in {1e3 * fastest:.3g} ms, {speed:.3g} GB/s each way{remedy}"
    )
    return Finding("note" if slow else "ok", f"sums by {name}", text)


def _folder(store: dist.Store, rank: int, size: int, folder: Path, wait: timedelta) -> Generator[Finding, None, bool]:
    """Every rank writes a file and looks for rank 0's; rank 0 looks for all of them. Returns whether all answered."""
    if rank == 0:
        store.set("token", secrets.token_hex(8))
    store.wait(["token"], wait)
    token = store.get("token").decode()
    own = folder / f".doctor-{token}-{rank}"
    said = ""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        own.write_text(token)
    except OSError as error:
        said = f"rank {rank} cannot write ({error.strerror})"
    try:
        if rank == 0:
            store.set("wrote/0", said)
            finding, absent = _of_folder(store, size, folder, token, wait)
            store.set("tidy", "no" if absent else "yes")
            yield finding
            return not absent
        seen = _sees(folder / f".doctor-{token}-0", token, time.monotonic() + wait.total_seconds())
        store.set(f"wrote/{rank}", said or ("" if seen else f"rank {rank} does not see what rank 0 wrote"))
        store.wait(["tidy"], 4 * wait)  # rank 0 waits for the others, then looks for their files
        return store.get("tidy") == b"yes"
    finally:
        with suppress(OSError):
            own.unlink(missing_ok=True)


def _of_folder(
    store: dist.Store, size: int, folder: Path, token: str, wait: timedelta
) -> tuple[Finding, Sequence[int]]:
    """What rank 0 finds, and the ranks that did not answer."""
    began, problems = time.monotonic(), []
    with suppress(dist.DistError):
        store.wait([f"wrote/{other}" for other in range(size)], 2 * wait)  # they look for a file, for one
    absent = [other for other in range(size) if not store.check([f"wrote/{other}"])]
    end = time.monotonic() + wait.total_seconds()
    for other in range(size):
        if other in absent:
            problems.append(f"rank {other} did not answer about the folder (it ended, or its file system hangs)")
        elif said := store.get(f"wrote/{other}").decode():
            problems.append(said)
        elif not _sees(folder / f".doctor-{token}-{other}", token, end):
            problems.append(f"rank 0 does not see what rank {other} wrote")
    where = folder.absolute()
    if problems:
        remedy = "checkpoints are written by every rank: name a folder that all machines share (--folder, --run_dir)"
        skipped = "; clocks and sums, which need all ranks, were not measured" if absent else ""
        return Finding("bad", "folder", f"{where}: {'; '.join(problems)}; {remedy}{skipped}"), absent
    seconds = time.monotonic() - began
    return Finding("ok", "folder", f"{where}: what a rank writes, all see, within {seconds:.2g} s"), absent


def _sees(path: Path, token: str, end: float) -> bool:
    """Whether the file holds `token` before `end`, of `time.monotonic`."""
    while True:
        with suppress(OSError):
            if path.read_text() == token:
                return True
        if time.monotonic() > end:
            return False
        time.sleep(_POLL_S)


# ---- servers


def asked_servers(urls: Sequence[str], deadline: float) -> Iterator[Finding]:
    """From here, of several ranks from rank 0, where all requests of a run come from. All at once, so that many that
    hang take one deadline, `deadline` seconds."""
    for url, found in zip(urls, asyncio.run(_asked(urls, deadline)), strict=True):
        if isinstance(found, BaseException):
            remedy = "start it (arborist serve), or open its port to this machine"
            yield Finding("bad", "server", f"{_line(found)}; {remedy}")
        else:
            yield Finding("ok", "server", f"{url} answers in {1e3 * found:.3g} ms")


async def _asked(urls: Sequence[str], deadline: float) -> list[float | BaseException]:
    return await asyncio.gather(*(_seconds(url, deadline) for url in urls), return_exceptions=True)


async def _seconds(url: str, deadline: float) -> float:
    """Of an answer to /health over a connection that is open."""
    from datamodules.inference.sglang.client import ServerClient
    from datamodules.inference.sglang.launcher import API_KEY_VARIABLE

    end = time.monotonic() + deadline
    client = ServerClient(url, os.environ.get(API_KEY_VARIABLE) or None)
    try:
        await client.get("/health", deadline)
        began = time.perf_counter()
        await client.get("/health", end - time.monotonic())
        return time.perf_counter() - began
    finally:
        await client.close()


def _line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
