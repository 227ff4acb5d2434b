"""What the agents' gateway costs beside calling the engine directly, from the first turn of a conversation to the last.

    python -m benchmarks.rollouts.gateway                  # five minutes; writes gateway.json, .md and .png
    python -m benchmarks.rollouts.gateway --quick --out DIR

The gateway has a process of its own, whose CPU time the kernel counts; its engine answers at once, so that all that is
measured is the way to it: HTTP, JSON, template, tokens. Conversations of 4,000 tokens in 16 turns and in 128, with a
template that says messages as they are and with Qwen3's, which looks for thoughts in each, also of a model that thinks
("qwen3, thinks"): that template leaves the thoughts of earlier replies out. At each turn an empty call
of HTTP is made, the engine is called directly with the same prompt (in the client's process) and through the gateway,
in an order that rotates. Milliseconds; wall holds the client's own work. Then as many conversations in their last turns
ask all at once.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import statistics
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from datetime import UTC, datetime
from functools import partial
from importlib import resources
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import aiohttp
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from benchmarks.common.records import write_json
from datamodules.conversations.chat_template import Chat
from datamodules.inference.protocol import GenerationRequest, GenerationResponse
from datamodules.workflows.base import EpisodeEngine
from datamodules.workflows.gateway import Budget, Gateway, Session
from datamodules.workflows.gateway.protocols.servable import Sampling
from datamodules.workflows.tool_calls import hermes_calls

PLAIN = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
WAYS = ("direct", "http", "gateway")
TOKENS = 4000
CONCURRENT = 256
CASES = ("plain", "qwen3", "qwen3, thinks")
THOUGHTS = "<think>\n" + "hm " * 10 + "\n</think>\n\n"


def template(case: str) -> str:
    """Of trl's data, but for the plain one."""
    name = case.partition(",")[0]
    return PLAIN if name == "plain" else resources.files("trl").joinpath(f"chat_templates/{name}.jinja").read_text()


def byte_tokenizer(chat_template: str) -> PreTrainedTokenizerBase:
    """A token a byte, and one a mark."""
    marks = ["<|im_end|>", "<|im_start|>"]
    vocabulary = {symbol: k for k, symbol in enumerate([*marks, *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(tokenizer_object=core, eos_token=marks[0], additional_special_tokens=marks[1:])
    made.chat_template = chat_template
    return made


def said(turns: int) -> str:
    """What either side says, so that the conversation has about TOKENS tokens at its end."""
    return "so " * max(1, (TOKENS // turns - 20) // 6)


def reply(case: str, turns: int) -> str:
    """What the model says."""
    return THOUGHTS * case.endswith("thinks") + said(turns)


class Instant:
    """An engine that always says the same, at once."""

    version, max_context = 0, 1 << 20

    def __init__(self, tokenizer: PreTrainedTokenizerBase, reply: str) -> None:
        self.vocab_size = len(tokenizer)
        self._reply = [*tokenizer.encode(reply, add_special_tokens=False), tokenizer.eos_token_id]

    async def generate(self, request: GenerationRequest) -> GenerationResponse:
        request.validate(self.vocab_size, self.max_context)
        made = len(self._reply)
        return GenerationResponse(list(self._reply), [-0.1] * made, [0] * made, "stop")


def episode_engine(tokenizer: PreTrainedTokenizerBase, says: str) -> EpisodeEngine:
    return EpisodeEngine(Instant(tokenizer, says), tokenizer, None, name="e", seed="s")  # type: ignore[arg-type]


def serve(pipe: Connection) -> None:
    """The gateway's process: answers (template, turns) with the address and key of a new session, until None comes."""

    async def run() -> None:
        gateway = Gateway()
        await gateway.open()
        tokenizers: dict[str, PreTrainedTokenizerBase] = {}
        chats: dict[str, Chat] = {}
        try:
            while (asked := await asyncio.to_thread(pipe.recv)) is not None:
                name, turns = asked
                if name not in chats:
                    tokenizers[name] = byte_tokenizer(template(name))
                    chats[name] = Chat(tokenizers[name])
                engine = episode_engine(tokenizers[name], reply(name, turns))
                session = Session(engine, chats[name], Sampling(TOKENS), Budget(max_calls=1 << 20), hermes_calls)
                pipe.send((gateway.admit(session) + "/v1", session.key))
        finally:
            await gateway.close()

    asyncio.run(run())


class Server:
    """The gateway's process, as its client sees it."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, other = context.Pipe()
        self._process = context.Process(target=serve, args=(other,), daemon=True)
        self._process.start()

    def session(self, name: str, turns: int) -> tuple[str, dict[str, str]]:
        """Its address, and the headers to speak in it."""
        self._pipe.send((name, turns))
        if not self._pipe.poll(120.0):
            raise TimeoutError("the gateway's process gave no session within 120 s")
        address, key = self._pipe.recv()
        return address, {"Authorization": f"Bearer {key}"}

    def cpu_ms(self) -> float:
        """Of all its threads so far, as the kernel counts: reading it costs the process nothing."""
        tasks = Path(f"/proc/{self._process.pid}/task").iterdir()
        return sum(int((one / "schedstat").read_text().split()[0]) for one in tasks) / 1e6

    def close(self) -> None:
        self._pipe.send(None)
        self._process.join(20.0)
        self._process.kill()


class Conversation:
    """One session, and the ways to ask in it."""

    def __init__(self, server: Server, client: aiohttp.ClientSession, name: str, turns: int) -> None:
        self._said, self._reply = said(turns), reply(name, turns)
        self.messages: list[dict[str, Any]] = [{"role": "user", "content": self._said}]
        self._client = client
        self._address, self._headers = server.session(name, turns)
        self.prompt_tokens = 0

    def goes_on(self) -> None:
        self.messages += [{"role": "assistant", "content": self._reply}, {"role": "user", "content": self._said}]

    async def gateway(self) -> None:
        body = {"model": "any", "messages": self.messages}
        async with self._client.post(f"{self._address}/chat/completions", json=body, headers=self._headers) as answer:
            assert answer.status == 200, await answer.text()
            self.prompt_tokens = (await answer.json())["usage"]["prompt_tokens"]

    async def http(self) -> None:
        async with self._client.get(f"{self._address}/models", headers=self._headers) as answer:
            await answer.json()


async def timed(server: Server, call: Callable[[], Awaitable[None]]) -> tuple[float, float]:
    """Wall milliseconds, and those of the server's CPU."""
    cpu, wall = server.cpu_ms(), time.perf_counter()
    await call()
    wall = 1000 * (time.perf_counter() - wall)
    await asyncio.sleep(0.002)  # what the server does once its answer is out
    return wall, server.cpu_ms() - cpu


async def by_turn(server: Server, name: str, turns: int, repeats: int) -> list[dict[str, Any]]:
    """A row for each turn."""
    taken: dict[int, dict[str, list[tuple[float, float]]]] = {t: {way: [] for way in WAYS} for t in range(1, turns + 1)}
    sizes: dict[int, int] = {}
    engine = episode_engine(byte_tokenizer(template(name)), reply(name, turns))

    async def direct(tokens: int) -> None:
        await engine.generate(GenerationRequest([1] * max(1, tokens), TOKENS, stop_token_ids=engine.ends.ids))

    async with aiohttp.ClientSession() as client:
        await Conversation(server, client, name, turns).gateway()  # the template is compiled
        for repeat in range(repeats):
            one = Conversation(server, client, name, turns)
            for turn in range(1, turns + 1):
                ways = {"direct": partial(direct, one.prompt_tokens), "http": one.http, "gateway": one.gateway}
                for k in range(3):
                    way = WAYS[(k + turn + repeat) % 3]
                    taken[turn][way].append(await timed(server, ways[way]))
                sizes[turn] = one.prompt_tokens
                one.goes_on()
    rows = []
    for turn, found in taken.items():
        row: dict[str, Any] = {"turn": turn, "tokens": sizes[turn]}
        for k, kind in enumerate(("wall_ms", "gateway_cpu_ms")):
            row |= {
                f"{way}_{kind}": spread([one[k] for one in found[way]]) for way in WAYS if k == 0 or way != "direct"
            }
        added = [g[0] - d[0] for g, d in zip(found["gateway"], found["direct"], strict=True)]
        row["added_wall_ms"] = spread(added)
        rows.append(row)
    return rows


async def concurrent(server: Server, name: str, sessions: int, turns: int, repeats: int) -> dict[str, Any]:
    """Sessions that all ask at once in the last turns of a conversation, and the engine asked by all of them."""
    engine = episode_engine(byte_tokenizer(template(name)), reply(name, turns))
    asking: list[tuple[float, float]] = []
    direct: list[float] = []
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as client:
        all_of_them = [Conversation(server, client, name, turns) for _ in range(sessions)]
        for one in all_of_them:
            for _ in range(turns - 1 - repeats):
                one.goes_on()
        await asyncio.gather(*(one.gateway() for one in all_of_them))
        for _ in range(repeats):
            for one in all_of_them:
                one.goes_on()
            asking.append(await timed(server, lambda: _gathered(one.gateway() for one in all_of_them)))
            tokens = all_of_them[0].prompt_tokens
            requests = [GenerationRequest([1] * tokens, TOKENS, stop_token_ids=engine.ends.ids) for _ in all_of_them]
            started = time.perf_counter()
            await _gathered(engine.generate(request) for request in requests)
            direct.append(1000 * (time.perf_counter() - started))
    return {
        "template": name,
        "sessions": sessions,
        "turns": turns,
        "tokens": tokens,
        "gateway_cpu_ms_a_call": spread([cpu / sessions for _, cpu in asking]),
        "added_wall_ms_a_call": spread(
            [(wall - own) / sessions for (wall, _), own in zip(asking, direct, strict=True)]
        ),
    }


async def _gathered(calls: Iterable[Awaitable[Any]]) -> None:
    await asyncio.gather(*calls)


def spread(values: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def markdown(result: dict[str, Any]) -> str:
    lines = [
        "# What the agents' gateway adds to a call",
        "",
        "Beside calling an engine that answers at once, milliseconds; medians (least-most) of"
        f" {result['repeats']} conversations, and of {result['bursts']} bursts of sessions that all ask at once (a"
        f" call's share). Wanted: at most {result['wanted_added_wall_ms']:g} ms for a conversation of"
        f" {TOKENS:,} tokens.",
        "",
        "| template | turn | tokens | sessions at once | added, wall | the gateway's CPU |",
        "|---|---|---|---|---|---|",
    ]
    for case in result["cases"]:
        for row in (case["rows"][0], case["rows"][-1]):
            turn, wall, cpu = f"{row['turn']} of {case['turns']}", row["added_wall_ms"], row["gateway_gateway_cpu_ms"]
            lines.append(f"| {case['template']} | {turn} | {row['tokens']:,} | 1 | {_told(wall)} | {_told(cpu)} |")
    for one in result["concurrent"]:
        figures = f"{_told(one['added_wall_ms_a_call'])} | {_told(one['gateway_cpu_ms_a_call'])}"
        turn = f"{one['turns'] + 1 - result['bursts']} to {one['turns']}"
        lines.append(f"| {one['template']} | {turn} | {one['tokens']:,} | {one['sessions']} | {figures} |")
    load = ", ".join(f"{value:g}" for value in result["load"])
    lines += ["", f"`{result['command']}`, {result['date']}, {result['cores']} cores, load averages {load}.", ""]
    return "\n".join(lines)


def _told(found: dict[str, float]) -> str:
    return f"{found['median']:.1f} ({found['min']:.1f}-{found['max']:.1f})"


def draw(cases: Sequence[dict[str, Any]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 3.8))
    for case in cases:
        label = f"{case['template']} template, {case['turns']} turns"
        found = [row["gateway_gateway_cpu_ms"] for row in case["rows"]]
        tokens = [row["tokens"] for row in case["rows"]]
        (line,) = axes.plot(tokens, [one["median"] for one in found], label=label)
        axes.fill_between(
            tokens, [one["min"] for one in found], [one["max"] for one in found], alpha=0.2, color=line.get_color()
        )
    axes.axhline(3.0, color="0.6", linewidth=0.8, linestyle="--")
    axes.set(xlabel="tokens of the conversation", ylabel="the gateway's CPU of a call (ms)", ylim=(0, None))
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.rollouts.gateway", description=__doc__.split("\n\n")[0])
    parser.add_argument("--quick", action="store_true", help="toy size, figures without meaning")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/rollouts"))
    args = parser.parse_args(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    shapes, repeats, bursts = ((3, 6), 2, 2) if args.quick else ((16, 128), 7, 7)
    server = Server()
    try:
        cases = [
            {"template": name, "turns": turns, "rows": asyncio.run(by_turn(server, name, turns, repeats))}
            for turns in shapes
            for name in CASES
        ]
        sessions = 8 if args.quick else CONCURRENT
        many = [asyncio.run(concurrent(server, name, sessions, turns, bursts)) for turns in shapes for name in CASES]
    finally:
        server.close()
    result = {
        "command": "python -m benchmarks.rollouts.gateway" + " --quick" * args.quick,
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "cores": os.cpu_count(),
        "load": [round(value, 1) for value in os.getloadavg()],
        "repeats": repeats,
        "bursts": bursts,
        "wanted_added_wall_ms": 3.0,
        "concurrent": many,
        "cases": cases,
    }
    write_json(args.out / "gateway.json", result)
    draw(cases, args.out / "gateway.png")
    (args.out / "gateway.md").write_text(markdown(result))
    print(markdown(result))
    return result


if __name__ == "__main__":
    main()
