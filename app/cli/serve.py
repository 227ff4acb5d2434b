"""Serves a model on SGLang servers of this machine until Ctrl-C; a training run takes their addresses as `urls`.

    arborist serve --model runs/quickstart/2026-01-31_12-00-00/model --replicas 2

The servers run in the environment that `make sglang` built (CPU) or that ARBORIST_SGLANG_PYTHON names. They listen on
loopback unless --host says otherwise; then they want an API key, from the environment variable ARBORIST_SGLANG_API_KEY,
here and where training runs. Arguments after a `--` go to SGLang as they are; those that say where it listens or which
key it wants are refused. `--chat` is for a judge: Chat Completions under /v1.

Promises: a server that ends is started again, on its port; when this command ends, however it ends, so do its servers,
with all they left in shared memory.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import Iterable
from dataclasses import replace
from datetime import datetime
from pathlib import Path

from app.cli.runs.run_directory import naming
from datamodules.inference.sglang.client import is_loopback
from datamodules.inference.sglang.launcher import (
    API_KEY_VARIABLE,
    ServerDidNotStart,
    ServerProcess,
    refused_argument,
)
from datamodules.inference.sglang.loop_thread import cancel_all
from datamodules.inference.sglang.roster import Launch

_PROCESS_POLL_S = 0.5
_TELL_S = 10.0  # between two lines of progress
_PAUSES_S = (1.0, 5.0, 30.0)  # before a server is started again
_STEADY_S = 300.0


class CannotServe(RuntimeError):
    """What the user has to change; the message names the option."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `arborist serve` to `parser`."""
    parser.add_argument("--model", required=True, metavar="DIR", help="directory written by save_pretrained")
    parser.add_argument("--replicas", type=int, default=1, metavar="N", help="servers (default: 1)")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: loopback)")
    parser.add_argument(
        "--port", type=int, default=0, help="of the first server, the others follow (default: free ones)"
    )
    parser.add_argument(
        "--device", default="auto", choices=("auto", "cuda", "cpu"), help="auto: a GPU where there is one"
    )
    parser.add_argument(
        "--dtype",
        default="auto",
        choices=("auto", "float32", "bfloat16", "float16"),
        help="of the weights; auto: the model's own on a CPU, on a GPU half precision of a float32 model",
    )
    parser.add_argument("--context", type=int, metavar="TOKENS", help="longest request (default: the model's limit)")
    parser.add_argument("--max_concurrent", type=int, metavar="N", help="requests a server runs (default: SGLang's)")
    parser.add_argument("--kv_cache_tokens", type=int, metavar="TOKENS", help="of a server (default on CPU: 65536)")
    parser.add_argument("--first_gpu", type=int, default=0, metavar="N", help="of the first server (default: 0)")
    parser.add_argument("--tensor_parallel", type=int, default=1, metavar="N", help="GPUs of one server")
    parser.add_argument("--num_threads", type=int, metavar="N", help="CPU threads of one server")
    parser.add_argument("--seed", type=int, default=0, help="of sampling")
    parser.add_argument("--chat", action="store_true", help="speak Chat Completions under /v1, for judges")
    parser.add_argument("--log_dir", metavar="DIR", help="for the servers' logs (default: runs/serve/<time>)")
    parser.add_argument("--start_timeout_s", type=float, default=600.0, metavar="S", help="for a server to come up")
    parser.add_argument("arguments", nargs="*", metavar="-- ...", help="more arguments for SGLang")


def run(args: argparse.Namespace) -> None:
    """Serves until SIGINT or SIGTERM.

    Raises:
        CannotServe: an option that cannot be.
        NoServerEnvironment, ServerDidNotStart: the first server that failed; the others are ended.
    """
    asyncio.run(_serve(_processes(args), args.start_timeout_s))


def _processes(args: argparse.Namespace) -> list[ServerProcess]:
    if not (Path(args.model) / "config.json").is_file():
        raise CannotServe(f"--model: {args.model} holds no config.json; name a directory written by save_pretrained")
    key = os.environ.get(API_KEY_VARIABLE) or None
    if problem := refused_argument(args.arguments):
        raise CannotServe(f"-- {problem}")
    if not is_loopback(args.host) and key is None:
        raise CannotServe(
            f"--host: {args.host} opens the servers to the network, and whoever reaches one can end it or change its"
            f" weights; set {API_KEY_VARIABLE} here and where training runs"
        )
    launch = Launch(
        replicas=args.replicas,
        device=args.device,
        dtype=args.dtype,
        kv_cache_tokens=args.kv_cache_tokens,
        first_gpu=args.first_gpu,
        tensor_parallel=args.tensor_parallel,
        num_threads=args.num_threads,
        arguments=tuple(args.arguments),
    )
    logs = Path(args.log_dir or Path("runs") / "serve" / datetime.now().strftime("%Y-%m-%d_%H-%M-%S"))
    with naming(logs, "--log_dir"):
        logs.mkdir(parents=True, exist_ok=True)
    context = args.context or _limit(Path(args.model))
    options = launch.options(str(Path(args.model).absolute()), context, None, args.seed, args.max_concurrent)
    return [
        ServerProcess(replace(one, host=args.host, port=port, chat=args.chat), logs / f"server_{index}.log", key)
        for index, one in enumerate(options)
        for port in [args.port + index if args.port else 0]
    ]


def _limit(model: Path) -> int | None:
    """Most positions of the model, as its configuration says."""
    config = json.loads((model / "config.json").read_text())
    limit: int | None = config.get("text_config", config).get("max_position_embeddings")
    return limit


async def _serve(processes: list[ServerProcess], start_s: float) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for name in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(name, stop.set)
    _say(f"starting {len(processes)} SGLang server(s), logs in {processes[0].log_file.parent}")
    tasks: list[asyncio.Task[None]] = [asyncio.create_task(process.ready(start_s)) for process in processes]
    stopping = asyncio.create_task(stop.wait())
    try:
        await _come_up(processes, tasks, stopping)
        if not stop.is_set():
            _say("ready; in the YAML of a training run:\n")
            print(_yaml(processes), flush=True)
            tasks.extend(asyncio.create_task(_keep(process, start_s)) for process in processes)
            await asyncio.wait([stopping, *tasks[len(processes) :]], return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            if task.done():
                task.result()
    finally:
        _say("ending the servers")
        await cancel_all([*tasks, stopping])
        for name in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(name)  # a second Ctrl-C ends this at once, and the servers with it
        await asyncio.gather(*(asyncio.to_thread(process.stop) for process in processes))


async def _come_up(
    processes: list[ServerProcess], tasks: list[asyncio.Task[None]], stopping: asyncio.Task[bool]
) -> None:
    """Returns when all are up, or one has failed, or the user wants to stop; tells how it goes."""
    began, told = time.monotonic(), set[int]()
    while pending := [task for task in tasks if not task.done()]:
        done, _ = await asyncio.wait([*pending, stopping], timeout=_TELL_S, return_when=asyncio.FIRST_COMPLETED)
        seconds = time.monotonic() - began
        for index, task in enumerate(tasks):
            if task.done() and index not in told:
                task.result()
                told.add(index)
                _say(f"server {index} is up at {processes[index].url} after {seconds:.0f} s")
        if stopping in done:
            return
        if not done:
            _say(f"{len(told)} of {len(tasks)} servers are up after {seconds:.0f} s")


async def _keep(process: ServerProcess, start_s: float) -> None:
    """Starts a server again when it has ended, at the same address, for as long as that works."""
    process.options = replace(process.options, port=process.port)
    failures = 0
    while True:
        began = time.monotonic()
        while process.running:
            await asyncio.sleep(_PROCESS_POLL_S)
        failures = 1 if time.monotonic() - began > _STEADY_S else failures + 1
        _say(f"the server at {process.url}: {process.ending}; {process.tail()}")
        await asyncio.to_thread(process.stop, 0.0)
        if failures > len(_PAUSES_S):
            raise ServerDidNotStart(
                f"the server at {process.url} ended {failures} times in a row; see {process.log_file}"
            )
        await asyncio.sleep(_PAUSES_S[failures - 1])
        await process.ready(start_s)
        _say(f"it is up again at {process.url}, with the weights of --model; a training run gives it the current ones")


def _yaml(processes: Iterable[ServerProcess]) -> str:
    urls = ", ".join(f'"{process.url}"' for process in processes)
    return (
        "    engine:\n"
        "      class_path: datamodules.inference.sglang.SGLangEngine\n"
        f"      init_args: {{urls: [{urls}]}}\n"
    )


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
