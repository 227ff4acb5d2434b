"""What an update of many servers takes when one rank sends, and when several do: over links of a stated speed.

    python -m benchmarks.rollouts.senders                  # as root, for a network of its own; ten minutes
    python -m benchmarks.rollouts.senders --servers 4 --ranks 1 2 --megabytes 2 --out DIR

Every rank has a network namespace whose link the kernel limits (`tc`, token bucket); servers, which take weights as
SGLang does and generate nothing, are at the other end of a bridge. The ranks are processes with `SGLangEngine`'s own
parts. Bytes of the busiest link are the kernel's count. Seconds of an update, medians of repeats, beside what the links
allow; groups are joined before the first that counts. Writes senders.json and senders.md.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from app.strategies.ranks.listening import listen
from benchmarks.common.receiver import Receiver
from benchmarks.common.records import write_json
from datamodules.inference.export import checkpoint_weights, num_bytes
from datamodules.inference.protocol import Invitation, WeightUpdate
from datamodules.inference.sglang import SGLangEngine

INSIDE = "ARBORIST_SENDERS_INSIDE"
HUB = "10.9.0.1"
DEADLINE_S = 300.0


def address(rank: int) -> str:
    return f"10.9.0.{11 + rank}"


def policy(megabytes: float, version: int = 0) -> Qwen3ForCausalLM:
    """float32, of about this size; every version has other weights."""
    torch.manual_seed(version)
    config = Qwen3Config(
        vocab_size=max(64, int(megabytes * 1e6 / 4 / 256)),
        hidden_size=256,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=128,
        tie_word_embeddings=True,
    )
    return Qwen3ForCausalLM(config)


@contextmanager
def links(ranks: int, mbit: int) -> Iterator[None]:
    """A bridge here, and a namespace a rank whose link to it carries `mbit` Mbit/s."""
    for command in ("link add br0 type bridge", f"addr add {HUB}/24 dev br0", "link set br0 up", "link set lo up"):
        _run("ip", *command.split())
    for rank in range(ranks):
        space, near, far = f"rank{rank}", f"near{rank}", f"far{rank}"
        for command in (
            f"netns add {space}",
            f"link add {near} type veth peer name {far}",
            f"link set {far} netns {space}",
            f"link set {near} master br0 up",
            f"-n {space} addr add {address(rank)}/24 dev {far}",
            f"-n {space} link set {far} up",
            f"-n {space} link set lo up",
        ):
            _run("ip", *command.split())
        bucket = f"tc qdisc add dev {far} root tbf rate {mbit}mbit burst 256kb latency 100ms"
        _run("ip", "netns", "exec", space, *bucket.split())
    try:
        yield
    finally:
        for rank in range(ranks):
            _run("ip", "netns", "del", f"rank{rank}")
        _run("ip", "link", "del", "br0")


def _sent(rank: int) -> int:
    """Bytes of a rank's link so far, as the kernel counts them: weights, and what else was said."""
    command = ["ip", "-json", "-statistics", "link", "show", f"near{rank}"]
    shown = json.loads(subprocess.run(command, check=True, timeout=20, capture_output=True, text=True).stdout)
    received: int = shown[0]["stats64"]["rx"]["bytes"]
    return received


def _run(*command: str) -> None:
    subprocess.run(command, check=True, timeout=20)


def measure(ranks: int, servers: int, megabytes: float, mbit: int, repeats: int) -> dict[str, Any]:
    """Updates of so many servers by so many ranks."""
    with ExitStack() as stack:
        stack.enter_context(links(ranks, mbit))
        receivers = [stack.enter_context(Receiver(HUB)) for _ in range(servers)]
        options = {"urls": [one.url for one in receivers], "megabytes": megabytes, "versions": repeats + 1}
        each = [{**options, "rank": rank, "ranks": ranks} for rank in range(ranks)]
        workers = [stack.enter_context(_worker(one)) for one in each]
        said = _line(workers[0])
        for worker in workers[1:]:
            assert worker.stdin is not None
            worker.stdin.write(json.dumps(said) + "\n")
            worker.stdin.close()
        result = _line(workers[0])
        for worker in workers:
            worker.wait(DEADLINE_S)
        by_rank = [_sent(rank) // (repeats + 1) for rank in range(ranks)]
        expected = checkpoint_weights(policy(megabytes, repeats + 1))
        exact = all(
            one.version.startswith(f"v{repeats + 1}-") and torch.equal(one.got[name], tensor)
            for one in receivers
            for name, tensor in expected.items()
        )
    size, seconds = num_bytes(expected), result["seconds"][1:]
    return {
        "servers": servers,
        "ranks": ranks,
        "seconds": round(statistics.median(seconds), 3),
        "min": round(min(seconds), 3),
        "max": round(max(seconds), 3),
        "least_s": round(max(by_rank) * 8 / (mbit * 1e6), 3),
        "bytes": size,
        "most_sent": max(by_rank),
        "exact": exact,
    }


@contextmanager
def _worker(options: dict[str, Any]) -> Iterator[subprocess.Popen[str]]:
    command = [
        "ip",
        "netns",
        "exec",
        f"rank{options['rank']}",
        sys.executable,
        "-m",
        "benchmarks.rollouts.senders",
        "--worker",
    ]
    pipe = subprocess.PIPE
    process = subprocess.Popen([*command, json.dumps(options)], stdin=pipe, stdout=pipe, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.wait(20)


def _line(worker: subprocess.Popen[str]) -> Any:
    assert worker.stdout is not None
    line = worker.stdout.readline()
    if not line:
        raise RuntimeError(f"a rank ended: {worker.args}")
    return json.loads(line)


def work(rank: int, ranks: int, urls: list[str], megabytes: float, versions: int) -> None:
    """One rank."""
    torch.set_num_threads(1)
    engine = SGLangEngine(urls=urls)
    if rank:
        engine.senders.join(Invitation(**json.loads(sys.stdin.readline())), rank)
        for version in range(1, versions + 1):
            engine.senders.lend(version, partial(checkpoint_weights, policy(megabytes, version)), DEADLINE_S)
        return engine.senders.leave()
    engine.start(policy(megabytes), 0, seed=0)
    invitation = engine.senders.invite(ranks, 1, ranks, address(0), partial(listen, address(0)))
    print(json.dumps(None if invitation is None else asdict(invitation)), flush=True)
    seconds = []
    for version in range(1, versions + 1):
        weights = checkpoint_weights(policy(megabytes, version))
        began = time.perf_counter()
        engine.update_weights(WeightUpdate(version, weights, deadline_s=DEADLINE_S))
        seconds.append(time.perf_counter() - began)
    print(json.dumps({"seconds": seconds}), flush=True)
    engine.close()


def page(result: dict[str, Any]) -> str:
    lines = [
        "# An update of many servers, sent by one rank or several",
        "",
        f"Made by `{result['command']}`; gloo over links of {result['mbit']} Mbit/s a rank (network namespaces, token"
        f" bucket), weights of {result['rows'][0]['bytes'] / 1e6:.1f} MB, {result['repeats']} updates a row.",
        "",
        "| servers | ranks that send | seconds (min-max) | the busiest link allows, s | copies on it | exact |",
        "|---|---|---|---|---|---|",
    ]
    for row in result["rows"]:
        copies = row["most_sent"] / row["bytes"]
        lines.append(
            f"| {row['servers']} | {row['ranks']} | {row['seconds']:.2f} ({row['min']:.2f}-{row['max']:.2f})"
            f" | {row['least_s']:.2f} | {copies:.1f} | {'yes' if row['exact'] else 'NO'} |"
        )
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.rollouts.senders", description=__doc__.splitlines()[0])
    parser.add_argument("--servers", type=int, nargs="+", default=[8, 64])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--megabytes", type=float, default=8.0, help="of weights")
    parser.add_argument("--mbit", type=int, default=400, help="a second, of every rank's link")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/rollouts"))
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.worker:
        return work(**json.loads(args.worker))
    if missing := [name for name in ("ip", "tc", "unshare") if shutil.which(name) is None]:
        parser.error(f"{', '.join(missing)} not found: install iproute2 and util-linux")
    if INSIDE not in os.environ:  # once more, in namespaces where we may make links
        again = [sys.executable, "-m", "benchmarks.rollouts.senders", *(sys.argv[1:] if argv is None else argv)]
        inside = 'mkdir -p /run/netns && mount -t tmpfs none /run/netns && exec "$@"'
        command = ["unshare", "--net", "--mount", "sh", "-c", inside, "sh", *again]
        raise SystemExit(subprocess.run(command, env=os.environ | {INSIDE: "1"}, check=False).returncode)
    rows = []
    for servers in args.servers:
        for ranks in (one for one in args.ranks if one <= servers):  # more would have nothing to send
            rows.append(measure(ranks, servers, args.megabytes, args.mbit, args.repeats))
            print(rows[-1], flush=True)
    asked = " ".join(["python -m benchmarks.rollouts.senders", *(sys.argv[1:] if argv is None else argv)])
    result = {
        "command": asked,
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "torch": torch.__version__,
        "mbit": args.mbit,
        "repeats": args.repeats,
        "rows": rows,
    }
    args.out.mkdir(parents=True, exist_ok=True)
    write_json(args.out / "senders.json", result)
    (args.out / "senders.md").write_text(page(result))


if __name__ == "__main__":
    main()
