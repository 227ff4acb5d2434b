"""Puts a model, or any provider, behind an address that agents can be pointed at, and records what they do.

    arborist gateway --model DIR --port 8100 [--servers URL ...] [--record DIR]

An agent's base URL becomes http://127.0.0.1:8100/r/<session>/v1, for any session name that comes up; its API key is
that of the environment variable ARBORIST_GATEWAY_KEY, without which one is drawn and printed. POST /r/<session>/reward
says what a session was worth, POST /r/<session>/end that it is over. The model generates in this process, or on the
SGLang servers of `arborist serve` that --servers names, which get the weights of --model.

A session is recorded when it is ended, has been silent for --idle_s, or this command ends: a file
batch_<number>.safetensors each, which `arborist inspect DIR` shows and `RecordedDataModule` trains on.

Promises: it listens on the loopback interface alone unless --host says otherwise; the key is in no file, log or process
list; SIGINT and SIGTERM end it once all sessions are written, a second one at once.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import secrets
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # torch and transformers take seconds, and `--help` none
    from datamodules.inference.protocol import InferenceEngine
    from datamodules.workflows.gateway.sessions import Session

KEY_VARIABLE = "ARBORIST_GATEWAY_KEY"
_SHORTEST_KEY = 8


class CannotStart(RuntimeError):
    """What the user has to change; the message names the option."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `arborist gateway` to `parser`."""
    parser.add_argument("--model", metavar="DIR", required=True, help="directory written by save_pretrained")
    parser.add_argument("--servers", nargs="+", metavar="URL", help="SGLang servers that generate for it")
    parser.add_argument("--record", metavar="DIR", help="directory for recordings (default: nothing is recorded)")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: loopback)")
    parser.add_argument("--port", type=int, default=8100, help="default: 8100; 0 for any that is free")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"), help="of the weights")
    parser.add_argument("--kv_cache_tokens", type=int, default=32768, metavar="N", help="of the engine in this process")
    parser.add_argument("--max_new_tokens", type=int, default=4096, metavar="N", help="most tokens of a reply")
    parser.add_argument("--temperature", type=float, default=1.0, help="of calls that name none")
    parser.add_argument("--max_calls", type=int, default=1000, metavar="N", help="of a session")
    parser.add_argument("--idle_s", type=float, default=3600.0, metavar="S", help="silence that ends a session")
    parser.add_argument("--seed", type=int, default=0, help="of sampling")


def run(args: argparse.Namespace) -> None:
    """Serves until SIGINT or SIGTERM.

    Raises:
        CannotStart: an option that cannot be; the port is taken.
        RecordingError: a session could not be written at the end.
    """
    key = os.environ.get(KEY_VARIABLE, "")
    if key and (len(key) < _SHORTEST_KEY or not key.isascii() or not key.isprintable() or " " in key):
        raise CannotStart(f"{KEY_VARIABLE}: must be at least {_SHORTEST_KEY} printable ASCII characters without blanks")
    if not (Path(args.model) / "config.json").is_file():
        raise CannotStart(f"--model: {args.model} holds no config.json; name a directory written by save_pretrained")
    asyncio.run(_serve(args, key or secrets.token_urlsafe(24), drawn=not key))


async def _serve(args: argparse.Namespace, key: str, drawn: bool) -> None:
    from datamodules.workflows.gateway.server import Gateway

    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    engine, sessions = await asyncio.to_thread(_open, args, key)
    gateway = Gateway(Path(args.model).name, args.host, args.port, opens=sessions.open, ended=sessions.end)
    watching = None
    try:
        try:
            await gateway.open()
        except OSError as error:
            raise CannotStart(f"--port: {args.host}:{args.port} cannot be listened on: {error.strerror}") from error
        watching = asyncio.create_task(sessions.watch(gateway))
        _tell(gateway.address, key if drawn else None, args.record)
        waiting = asyncio.create_task(stop.wait())
        await asyncio.wait([waiting, watching], return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        if watching.done():
            watching.result()
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)  # a second one ends this at once
        if watching is not None:
            watching.cancel()
        await gateway.close()
        lost: list[Exception] = []
        await sessions.close(lambda session, error: _lost(session, error, lost))
        if args.record:
            _say(f"{sessions.counts['written']} session(s) recorded in {args.record}")
        await asyncio.to_thread(engine.close)
        if lost:
            raise lost[0]


def _lost(session: Session, error: Exception, lost: list[Exception]) -> None:
    _say(f"session {session.id} could not be written: {error}")
    lost.append(error)


def _open(args: argparse.Namespace, key: str) -> tuple[InferenceEngine, Any]:
    """A started engine, and the sessions in front of it."""
    from datamodules.inference import EmbeddedEngine
    from datamodules.inference.protocol import WeightUpdate
    from datamodules.inference.sglang import SGLangEngine
    from datamodules.prompts.tokenizers import load_tokenizer
    from datamodules.workflows.gateway.sessions import Budget, Sampling
    from datamodules.workflows.gateway.standalone import OpenSessions, SessionRecorder
    from datamodules.workflows.tool_calls import hermes_calls
    from datamodules.workflows.turn_ends import TurnEnds
    from modules.models import ModelSource, build_model

    path = Path(args.model).absolute()
    tokenizer = load_tokenizer(str(path), [])
    model = build_model(ModelSource(path=str(path), dtype=args.dtype)).eval()
    engine: InferenceEngine
    engine = SGLangEngine(urls=args.servers) if args.servers else EmbeddedEngine(kv_cache_tokens=args.kv_cache_tokens)
    engine.start(model, 0, args.seed)
    try:
        if args.servers:
            engine.update_weights(WeightUpdate(1, path=str(path)))
        sessions = OpenSessions(
            engine,
            tokenizer,
            key,
            Sampling(args.max_new_tokens, args.temperature),
            Budget(max_calls=args.max_calls),
            hermes_calls,
            TurnEnds.of(tokenizer, model, engine.vocab_size),
            SessionRecorder(Path(args.record)) if args.record else None,
            args.idle_s,
            args.seed,
        )
    except BaseException:
        engine.close()
        raise
    return engine, sessions


def _tell(address: str, key: str | None, record: str | None) -> None:
    print(f"{address}/r/<session>/v1", flush=True)
    _say(
        f"base URL of a session: {address}/r/<session>/v1; rewards to {address}/r/<session>/reward, its end to .../end"
    )
    if key is not None:
        _say(f"{KEY_VARIABLE} is not set; the API key until this command ends: {key}")
    _say(f"recording to {record}" if record else "nothing is recorded (--record)")


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
