"""Puts a model, or any provider, behind an address that agents can be pointed at, and records what they do.

    arborist gateway --model DIR --port 8100 [--servers URL ...] [--record DIR]
    arborist gateway --upstream URL --port 8100 [--record DIR]

An agent's base URL becomes http://127.0.0.1:8100/r/<session>/v1, for any session name that comes up. POST
/r/<session>/reward says what a session was worth, POST /r/<session>/end that it is over. A session is recorded when it
is ended, has been silent for --idle_s, or this command ends; its name cannot be used again then.

--model: it generates in this process, or on the SGLang servers of `arborist serve` that --servers names, which get its
weights. The API key is that of the environment variable ARBORIST_GATEWAY_KEY (8 characters or more), without which one
is drawn and printed. A recorded session is a file batch_<number>.safetensors, for `arborist inspect DIR` and
`RecordedDataModule`.

--upstream: requests are passed on to the provider, whose base URL it is (https://api.openai.com/v1), with the key that
the agent sends, which is the provider's: the gateway has none of its own, and whoever reaches it may speak. Of Chat
Completions whole answers are recorded as conversations in text (conversations_<number>.jsonl a session) for supervised
training and preferences; without token ids there is no RL on them. Other paths are passed on and not recorded.

Promises: it listens on the loopback interface alone unless --host says otherwise; keys are in no file, log or process
list; SIGINT and SIGTERM end it once all sessions are written, a second one at once.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import secrets
import signal
import sys
from collections.abc import Awaitable, Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

if TYPE_CHECKING:  # torch and transformers take seconds, and `--help` none
    from datamodules.inference.protocol import InferenceEngine

KEY_VARIABLE = "ARBORIST_GATEWAY_KEY"
_SHORTEST_KEY = 8
_LARGEST_PORT = 65535
_PARSERS = ("hermes_calls", "json_calls", "ResponseTemplate")  # of datamodules.workflows
_OF_A_MODEL = {  # options, and what they are by default
    "servers": None,
    "dtype": "float32",
    "kv_cache_tokens": 32768,
    "max_new_tokens": 4096,
    "temperature": 1.0,
    "override_sampling": False,
    "untrainable": "refuse",
    "max_calls": 1000,
    "parser": "hermes_calls",
    "hide_tools": False,
    "seed": 0,
}


class CannotStart(RuntimeError):
    """What the user has to change; the message names the option."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `arborist gateway` to `parser`."""
    parser.add_argument("--model", metavar="DIR", help="directory written by save_pretrained")
    parser.add_argument(
        "--upstream",
        metavar="URL",
        help="in place of --model: base URL of a provider; agents send its key, and the gateway has none of its own",
    )
    parser.add_argument("--servers", nargs="+", metavar="URL", help="SGLang servers that generate for the model")
    parser.add_argument("--record", metavar="DIR", help="directory for recordings (default: nothing is recorded)")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: loopback)")
    parser.add_argument("--port", type=int, default=8100, help="default: 8100; 0 for any that is free")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="of the weights")
    parser.add_argument("--kv_cache_tokens", type=int, metavar="N", help="of the engine in this process")
    parser.add_argument("--max_new_tokens", type=int, metavar="N", help="most tokens of a reply")
    parser.add_argument("--temperature", type=float, help="of calls that name none")
    parser.add_argument(
        "--override_sampling",
        action="store_true",
        help="pass over what calls say of sampling and thinking, and tell the model of output types",
    )
    parser.add_argument(
        "--untrainable",
        choices=("refuse", "serve"),
        help="calls with top_p, temperature 0 and their like: refused (default), or answered and recorded without loss",
    )
    parser.add_argument(
        "--parser",
        choices=_PARSERS,
        help="how calls stand in replies: as Hermes' and Qwen's do (default), Llama's, or by a response template",
    )
    parser.add_argument(
        "--hide_tools",
        action="store_true",
        help="agents tell of their tools in messages of their own; without, calls with tools that the model's chat"
        " template does not show are refused",
    )
    parser.add_argument("--max_calls", type=int, metavar="N", help="of a session")
    parser.add_argument("--idle_s", type=float, default=3600.0, metavar="S", help="silence that ends a session")
    parser.add_argument("--seed", type=int, help="of sampling")
    parser.set_defaults(**_OF_A_MODEL)


def run(args: argparse.Namespace) -> None:
    """Serves until SIGINT or SIGTERM.

    Raises:
        CannotStart: an option that cannot be; the port is taken.
        RecordingError: nobody can write to `--record`; a session could not be written at the end.
    """
    from datamodules.files.recording import check_directory

    if (args.model is None) == (args.upstream is None):
        given = "neither is" if args.model is None else "both are"
        raise CannotStart(f"--model, --upstream: {given} given; name a model's directory or a provider's URL")
    if not 0 <= args.port <= _LARGEST_PORT:
        raise CannotStart(f"--port: {args.port}, must be between 0 (any that is free) and {_LARGEST_PORT}")
    if args.record:
        check_directory("--record", Path(args.record))
    if args.upstream is not None:
        _check_upstream(args)
        asyncio.run(_pass_on(args))
        return
    key = os.environ.get(KEY_VARIABLE, "")
    if key and (len(key) < _SHORTEST_KEY or not key.isascii() or not key.isprintable() or " " in key):
        raise CannotStart(f"{KEY_VARIABLE}: must be at least {_SHORTEST_KEY} printable ASCII characters without blanks")
    if not (Path(args.model) / "config.json").is_file():
        raise CannotStart(f"--model: {args.model} holds no config.json; name a directory written by save_pretrained")
    asyncio.run(_serve(args, key or secrets.token_urlsafe(24), drawn=not key))


def _check_upstream(args: argparse.Namespace) -> None:
    for name, default in _OF_A_MODEL.items():
        if getattr(args, name) != default:
            raise CannotStart(f"--{name}: has no effect with --upstream, whose provider decides; leave it out")
    try:
        parts = urlsplit(args.upstream)
        is_base = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_base = False
    if not is_base or parts.query or parts.fragment or "@" in parts.netloc:  # which may hold a key: not quoted
        raise CannotStart(
            "--upstream: must be a URL such as https://api.openai.com/v1, without user, query and fragment"
        )


async def _serve(args: argparse.Namespace, key: str, drawn: bool) -> None:
    """A model."""
    from datamodules.workflows.gateway.server import Gateway

    stop = _signalled()
    engine, sessions = await asyncio.to_thread(_open, args, key)
    gateway = Gateway(Path(args.model).name, args.host, args.port, opens=sessions.open, ended=sessions.end)
    lost: list[Exception] = []
    try:
        await _listen(args, gateway.open())
        shown = f"{KEY_VARIABLE} is not set; the API key until this command ends: {key}" if drawn else ""
        _tell(gateway.address, shown, args.record)
        await _until(stop, sessions.watch(gateway))
    finally:
        _forget_signals()
        await gateway.close()
        await sessions.close(lambda session, error: _lost(session.id, error, lost))
        if args.record:
            count = sessions.counts["untrainable"]
            told = f"; {count} of their replies cannot be trained on" if count else ""
            _say(f"{_recorded(sessions.counts['written'], args.record)}{told}")
        await asyncio.to_thread(engine.close)
    if lost:
        raise lost[0]


async def _pass_on(args: argparse.Namespace) -> None:
    """A provider."""
    from datamodules.workflows.gateway.overheard import ConversationRecorder
    from datamodules.workflows.gateway.upstream import UpstreamGateway

    stop = _signalled()
    record = ConversationRecorder(Path(args.record)) if args.record else None
    gateway = UpstreamGateway(args.upstream, args.host, args.port, record, args.idle_s)
    lost: list[Exception] = []
    try:
        await _listen(args, gateway.open())
        keys = "the API key is the provider's, which agents send; the gateway has none: whoever reaches it may speak"
        _tell(gateway.address, keys, args.record)
        await _until(stop, gateway.watch())
    finally:
        _forget_signals()
        await gateway.close(lambda name, error: _lost(name, error, lost))
        if args.record:
            counts = gateway.counts
            _say(
                f"{_recorded(counts['written'], args.record)}, {counts['replies']} replies; calls not"
                f" recorded: {counts['failed']} failed, {counts['cut_off']} cut off, {counts['not_text']} of more than"
                f" text or too large, {counts['other']} of other paths"
            )
    if lost:
        raise lost[0]


def _signalled() -> asyncio.Event:
    """Set by the first signal to end."""
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    return stop


def _forget_signals() -> None:
    """A second one ends this at once."""
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().remove_signal_handler(number)


async def _listen(args: argparse.Namespace, opening: Awaitable[None]) -> None:
    try:
        await opening
    except OSError as error:
        raise CannotStart(f"--port: {args.host}:{args.port} cannot be listened on: {error.strerror}") from error


async def _until(stop: asyncio.Event, watch: Coroutine[Any, Any, None]) -> None:
    """Watches over the sessions; raises what that runs into."""
    watching, waiting = asyncio.create_task(watch), asyncio.create_task(stop.wait())
    try:
        await asyncio.wait([waiting, watching], return_when=asyncio.FIRST_COMPLETED)
        if watching.done():
            watching.result()
    finally:
        waiting.cancel()
        watching.cancel()


def _recorded(count: int, directory: str) -> str:
    """The directory is made with the first session: it is not named where there was none."""
    return f"{count} session(s) recorded in {directory}" if count else "no session was recorded"


def _lost(session: str, error: Exception, lost: list[Exception]) -> None:
    _say(f"session {session} could not be written: {error}")
    lost.append(error)


def _open(args: argparse.Namespace, key: str) -> tuple[InferenceEngine, Any]:
    """A started engine, and the sessions in front of it."""
    from datamodules.conversations.image_processor import ImageProcessor
    from datamodules.inference import EmbeddedEngine
    from datamodules.inference.protocol import WeightUpdate
    from datamodules.inference.sglang import SGLangEngine
    from datamodules.prompts.tokenizers import load_tokenizer
    from datamodules.workflows.gateway.protocols.servable import Sampling
    from datamodules.workflows.gateway.sessions import Budget
    from datamodules.workflows.gateway.standalone import OpenSessions, SessionRecorder
    from datamodules.workflows.response_template import ResponseTemplate
    from datamodules.workflows.tool_calls import hermes_calls, json_calls
    from datamodules.workflows.turn_ends import TurnEnds
    from modules.models import ModelSource, build_model

    path = Path(args.model).absolute()
    tokenizer = load_tokenizer(str(path), [])
    parser = {"hermes_calls": hermes_calls, "json_calls": json_calls}.get(args.parser) or ResponseTemplate()
    if isinstance(parser, ResponseTemplate):
        try:
            parser.prepare(tokenizer)
        except ValueError as error:
            raise CannotStart(f"--parser: {error}") from error
    try:
        images = ImageProcessor.beside(str(path), tokenizer)
    except ValueError as error:
        raise CannotStart(f"--model: {error}") from error
    model = build_model(ModelSource(path=str(path), dtype=args.dtype)).eval().requires_grad_(False)
    engine: SGLangEngine | EmbeddedEngine
    engine = SGLangEngine(urls=args.servers) if args.servers else EmbeddedEngine(kv_cache_tokens=args.kv_cache_tokens)
    if images is not None:
        engine.use_images(images)
    engine.start(model, 0, args.seed)
    try:
        if args.servers:
            engine.update_weights(WeightUpdate(1, path=str(path)))
        sessions = OpenSessions(
            engine,
            tokenizer,
            key,
            Sampling(args.max_new_tokens, args.temperature, args.override_sampling, args.untrainable),
            Budget(max_calls=args.max_calls),
            parser,
            TurnEnds.of(tokenizer, model, engine.vocab_size),
            SessionRecorder(Path(args.record)) if args.record else None,
            args.idle_s,
            args.seed,
            images,
            show_tools=not args.hide_tools,
        )
    except BaseException:
        engine.close()
        raise
    return engine, sessions


def _tell(address: str, keys: str, record: str | None) -> None:
    print(f"{address}/r/<session>/v1", flush=True)
    _say(
        f"base URL of a session: {address}/r/<session>/v1; rewards to {address}/r/<session>/reward, its end to .../end"
    )
    if keys:
        _say(keys)
    _say(f"recording to {record}" if record else "nothing is recorded (--record)")


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
