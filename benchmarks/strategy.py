"""What data parallelism costs between ranks: time and bytes of one optimizer step, and the balance of a split tree.

    python -m benchmarks.strategy [--ranks 2] [--parameters 8] [--repeats 5] [--out DIR]      # exchange of gradients
    python -m benchmarks.strategy --balance 2x2 [--ranks 2] [--groups 1] [--toy] [--data FILE]   # CPU seconds a rank

Exchange: the same layers under DTAStrategy's sharded optimizer (bfloat16 and float32, and with Muon, whose matrices are
one rank's each), DistributedDataParallel with float32 gradients, and the same with ZeroRedundancyOptimizer; all in one
gloo process group, taking turns. Bytes, a parameter and rank, are counted on a loopback device of their own (a network
namespace, where the system permits one; else left out); medians. Balance: every rank runs its part of recorded airline
turns through the tree engine, alone or in groups of ranks that run one plan together, with chunks that give each rank
as many rows as one alone has; before that rank 0 runs the whole, while the others wait.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from app.strategies.muon import Muon
from app.strategies.ranks.collectives import Communicator
from app.strategies.ranks.groups import GroupRanks
from app.strategies.zero1 import ShardedOptimizer
from app.tree import PrefixTree, TreeEngine, partition
from benchmarks.common.records import write_json

_INSIDE = "ARBORIST_BENCH_NETWORK"
_WIDTH = 512
_EACH = {"cpu_seconds": ".2f", "tokens": ""}
Step = Callable[[], None]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--parameters", type=float, default=8.0, help="millions")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--balance", metavar="TASKSxTRIALS", help="measure the balance of a split tree instead")
    parser.add_argument("--groups", type=int, nargs="+", default=[1], help="with --balance: ranks that run one plan")
    parser.add_argument("--toy", action="store_true", help="with --balance: a tiny model (hidden 32, two layers)")
    parser.add_argument("--data", help="recorded conversations (default: airline_tokens.npz of ARBORIST_DATA)")
    parser.add_argument("--out", type=Path, help="directory for strategy.json and strategy.md")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--meet", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.ranks < 2:
        parser.error(f"--ranks {arguments.ranks}: at least 2 are needed to exchange anything")
    if any(arguments.ranks % size for size in arguments.groups):
        parser.error(f"--groups {arguments.groups}: each has to divide --ranks {arguments.ranks}")
    if arguments.rank is not None:
        _rank(arguments)
    else:
        _launch(arguments)


def _launch(arguments: argparse.Namespace) -> None:
    """Starts the ranks, in a network of their own where possible, and reports what rank 0 says."""
    prefix: list[str] = []
    if subprocess.run(["unshare", "--net", "true"], capture_output=True, check=False).returncode == 0:
        prefix = ["unshare", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh"]
    with tempfile.TemporaryDirectory() as directory:
        me = [sys.executable, "-m", "benchmarks.strategy", *sys.argv[1:], "--meet", directory]
        script = "; ".join(f'"$@" --rank {rank} &' for rank in range(arguments.ranks)).replace("&;", "&") + " wait"
        environment = os.environ | {"OMP_NUM_THREADS": "1", _INSIDE: str(int(bool(prefix)))}
        subprocess.run([*prefix, "sh", "-c", script, "sh", *me], env=environment, check=True)
        answer = Path(directory) / "answer.json"
        if not answer.exists():
            raise SystemExit("a rank failed: see above")
        result = json.loads(answer.read_text())
    result["command"] = "python -m benchmarks.strategy " + " ".join(sys.argv[1:])
    text = _markdown(result)
    print(text)
    if arguments.out is not None:
        arguments.out.mkdir(parents=True, exist_ok=True)
        name = f"strategy_{arguments.ranks}"
        if arguments.balance:
            name = "strategy_balance" if arguments.groups == [1] else f"strategy_groups_{arguments.balance}"
        write_json(arguments.out / f"{name}.json", result)
        (arguments.out / f"{name}.md").write_text(text)


def _rank(arguments: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{arguments.meet}/store", arguments.ranks)
    dist.init_process_group("gloo", store=store, rank=arguments.rank, world_size=arguments.ranks)
    result = _balance(arguments) if arguments.balance else _exchange(arguments)
    if arguments.rank == 0:
        (Path(arguments.meet) / "answer.json").write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


# Exchange


def _exchange(arguments: argparse.Namespace) -> dict[str, Any]:
    layers = max(1, round(arguments.parameters * 1e6 / _WIDTH**2))
    systems = {
        "DTAStrategy, bfloat16": _ours(layers, torch.bfloat16),
        "DTAStrategy, float32": _ours(layers, torch.float32),
        "DTAStrategy, float32, Muon": _ours(layers, torch.float32, Muon),
        "DDP, float32 gradients": _ddp(layers, zero=False),
        "DDP + ZeroRedundancyOptimizer": _ddp(layers, zero=True),
    }
    ideal = {name: 8.0 for name in systems} | {"DTAStrategy, bfloat16": 6.0}
    shares = (arguments.ranks - 1) / arguments.ranks
    count, names = layers * _WIDTH**2, list(systems)
    times: dict[str, list[float]] = {name: [] for name in names}
    moved: dict[str, list[float]] = {name: [] for name in names}
    for repeat in range(arguments.repeats + 1):  # the first warms up
        for k in range(len(names)):
            name = names[(k + repeat) % len(names)]
            dist.barrier()
            before, start = _loopback_bytes(), time.perf_counter()
            systems[name]()
            seconds = time.perf_counter() - start
            dist.barrier()
            if repeat:
                times[name].append(seconds)
                moved[name].append((_loopback_bytes() - before) / arguments.ranks / count)
    counted = os.environ.get(_INSIDE) == "1"
    rows = {
        name: {
            "seconds": statistics.median(times[name]),
            "spread": [min(times[name]), max(times[name])],
            "bytes": statistics.median(moved[name]) if counted else None,
            "ideal_bytes": ideal[name] * shares,
        }
        for name in names
    }
    return {"ranks": arguments.ranks, "parameters": count, "rows": rows}


def _layers(count: int, dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(_WIDTH, _WIDTH, bias=False) for _ in range(count))).to(dtype)


def _ours(layers: int, dtype: torch.dtype, make: Callable[..., Optimizer] = torch.optim.AdamW) -> Step:
    module = _layers(layers, dtype)
    optimizer = make(module.named_parameters())
    sharded = ShardedOptimizer(optimizer, module, Communicator(dist.group.WORLD, torch.device("cpu")))

    def step() -> None:
        optimizer.zero_grad()
        module(torch.ones(2, _WIDTH, dtype=dtype)).sum().backward()
        sharded.reduce()
        optimizer.step()
        sharded.gather_parameters()

    return step


def _ddp(layers: int, zero: bool) -> Step:
    module = DistributedDataParallel(_layers(layers, torch.float32))
    optimizer: Any = torch.optim.AdamW(module.parameters())
    if zero:
        optimizer = ZeroRedundancyOptimizer(module.parameters(), optimizer_class=torch.optim.AdamW, lr=1e-3)

    def step() -> None:
        optimizer.zero_grad()
        module(torch.ones(2, _WIDTH)).sum().backward()
        nn.utils.clip_grad_norm_(module.parameters(), 1.0)  # ours knows the norm, too
        optimizer.step()

    return step


def _loopback_bytes() -> int:
    for line in Path("/proc/net/dev").read_text().splitlines():
        if line.strip().startswith("lo:"):
            return int(line.split()[1])
    return 0


# Balance


def _balance(arguments: argparse.Namespace) -> dict[str, Any]:
    from benchmarks.common.models import build_model
    from benchmarks.common.workloads import conversations, make_case

    tasks, trials = map(int, arguments.balance.split("x"))
    source, recorded = conversations(arguments.data)
    case = make_case(source, recorded, "turns", tasks, trials, vocabulary=512 if arguments.toy else 8192)
    whole, model = case.tree(), build_model(toy=arguments.toy)
    ranks = Communicator(dist.group.WORLD, torch.device("cpu"))
    warm = PrefixTree.build([sequence[:64] for sequence in case.sequences[:2]])

    def run(sequences: Sequence[int], group: GroupRanks | None) -> float:
        """CPU seconds of this process."""
        together = 1 if group is None else group.size  # ranks of a group hold rows of one chunk: as many rows each
        budgets = {"chunk_tokens": 2048 * together, "live_tokens": 8192 * together}
        engine = TreeEngine(model, **budgets, self_check=False, group=group)
        tree = whole.select(sequences) if sequences else None
        for one in (warm, tree):
            dist.barrier()
            begin = time.process_time()
            if one is not None:
                engine.backward(one, lambda out, indices: out.logprobs.sum(), batched=True)
        return time.process_time() - begin

    alone = _of_all(run(range(whole.num_sequences) if arguments.rank == 0 else (), None))[0]
    rows = []
    for size in arguments.groups:
        parts = partition(whole, arguments.ranks // size)
        mine = parts[arguments.rank // size]
        group = GroupRanks(ranks, size, timedelta(hours=1)) if size > 1 else None
        seconds = _of_all(run(mine, group))
        tokens = [whole.select(part).num_tokens if part else 0 for part in parts]
        rows.append({"group": size, "cpu_seconds": seconds, "tokens": tokens})
    return {
        "case": case.name,
        "source": source,
        "ranks": arguments.ranks,
        "cpu_seconds_of_one_tree": alone,
        "tokens_of_one_tree": whole.num_tokens,
        "groups": rows,
    }


def _of_all(mine: float) -> list[float]:
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return everyone


def _markdown(result: dict[str, Any]) -> str:
    lines = [f"`{result['command']}`", ""]
    if "rows" not in result:
        alone, count = result["cpu_seconds_of_one_tree"], result["ranks"]
        lines += [
            f"{result['case']} of {result['source']} on {count} ranks, and as one tree: {alone:.2f} CPU seconds,"
            f" {result['tokens_of_one_tree']} tokens.",
            "",
            "| ranks of a group | CPU seconds of each rank | slowest / mean | slowest x ranks / one tree |"
            " all / one tree | tokens of each group |",
            "|---|---|---|---|---|---|",
        ]
        for row in result["groups"]:
            seconds = row["cpu_seconds"]
            each, tokens = (", ".join(f"{one:{form}}" for one in row[key]) for key, form in _EACH.items())
            most, total = max(seconds) * count, sum(seconds)
            ratios = f"{most / total:.3f} | {most / alone:.3f} | {total / alone:.3f}"
            lines.append(f"| {row['group']} | {each} | {ratios} | {tokens} |")
        return "\n".join(lines) + "\n"
    lines += [
        f"{result['ranks']} ranks, {result['parameters'] / 1e6:.1f} M parameters; one step (forward and backward of two"
        " rows, exchange, AdamW or Muon); bytes sent a parameter and rank.",
        "",
        "| system | seconds | spread | bytes | ideal | bytes / ideal |",
        "|---|---|---|---|---|---|",
    ]
    for name, row in result["rows"].items():
        spread = "-".join(f"{bound:.3f}" for bound in row["spread"])
        if row["bytes"] is None:
            measured, ratio = "not counted", ""
        else:
            measured, ratio = f"{row['bytes']:.2f}", f"{row['bytes'] / row['ideal_bytes']:.3f}"
        lines.append(f"| {name} | {row['seconds']:.3f} | {spread} | {measured} | {row['ideal_bytes']:.2f} | {ratio} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
