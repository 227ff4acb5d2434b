"""What the agents' gateway costs beside calling the engine directly, from turn 1 to turn 128 of one conversation.

    python -m benchmarks.rollouts.gateway                  # a minute; writes gateway.json and gateway.png
    python -m benchmarks.rollouts.gateway --quick --out DIR

The engine answers at once, so that all that is measured is the way to it. At each turn the same prompt is sent
directly and through the gateway (HTTP, JSON, template, tokens), and an empty call of HTTP is made, in an order that
rotates; the client lives in the same process, so its work is in all figures but the first. Milliseconds, wall and CPU.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from datetime import UTC, datetime
from functools import partial
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
from datamodules.workflows.gateway.sessions import Sampling
from datamodules.workflows.tool_calls import hermes_calls

TEMPLATE = (
    "{% for m in messages %}<|b|>{{ m.role }}\n{{ m.content }}<|e|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|b|>assistant\n{% endif %}"
)
SAID, REPLY = "so?", "yes, so."  # a token a byte: 32 tokens a turn, 4,000 at turn 128
WAYS = ("direct", "http", "gateway")
CONCURRENT = 256


def byte_tokenizer() -> PreTrainedTokenizerBase:
    vocabulary = {
        symbol: k for k, symbol in enumerate(["<|e|>", "<|b|>", *sorted(pre_tokenizers.ByteLevel.alphabet())])
    }
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|e|>", additional_special_tokens=["<|b|>"])
    made.chat_template = TEMPLATE
    return made


class Instant:
    """An engine that always says the same, at once."""

    version, max_context = 0, 1 << 20

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.vocab_size = len(tokenizer)
        self._reply = [*tokenizer.encode(REPLY, add_special_tokens=False), tokenizer.eos_token_id]

    async def generate(self, request: GenerationRequest) -> GenerationResponse:
        request.validate(self.vocab_size, self.max_context)
        made = len(self._reply)
        return GenerationResponse(list(self._reply), [-0.1] * made, [0] * made, "stop")


class Conversation:
    """One session, and the ways to ask in it."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, gateway: Gateway, client: aiohttp.ClientSession) -> None:
        self.engine = EpisodeEngine(Instant(tokenizer), tokenizer, None, name="e", seed="s")  # type: ignore[arg-type]
        budget = Budget(max_calls=1 << 20)
        self.session = Session(self.engine, Chat(tokenizer), Sampling(64), budget, hermes_calls)
        self.messages: list[dict[str, Any]] = [{"role": "user", "content": SAID}]
        self._client, self._address = client, gateway.admit(self.session) + "/v1"
        self._headers = {"Authorization": f"Bearer {self.session.key}"}

    def goes_on(self) -> None:
        self.messages += [{"role": "assistant", "content": REPLY}, {"role": "user", "content": SAID}]

    async def gateway(self) -> None:
        body = {"model": "any", "messages": self.messages}
        async with self._client.post(f"{self._address}/chat/completions", json=body, headers=self._headers) as answer:
            assert answer.status == 200, await answer.text()
            await answer.json()

    async def http(self) -> None:
        async with self._client.get(f"{self._address}/models", headers=self._headers) as answer:
            await answer.json()

    async def direct(self, prompt: list[int]) -> None:
        await self.engine.generate(GenerationRequest(prompt, 64, stop_token_ids=self.engine.ends.ids))


async def timed(call: Callable[[], Awaitable[None]]) -> tuple[float, float]:
    """Wall and CPU milliseconds."""
    wall, cpu = time.perf_counter(), time.process_time()
    await call()
    return 1000 * (time.perf_counter() - wall), 1000 * (time.process_time() - cpu)


async def by_turn(turns: int, repeats: int, tokenizer: PreTrainedTokenizerBase) -> list[dict[str, Any]]:
    """A row for each turn."""
    gateway = Gateway()
    await gateway.open()
    taken: dict[int, dict[str, list[tuple[float, float]]]] = {t: {way: [] for way in WAYS} for t in range(1, turns + 1)}
    sizes: dict[int, int] = {}
    try:
        async with aiohttp.ClientSession() as client:
            await Conversation(tokenizer, gateway, client).gateway()  # the template is compiled
            for repeat in range(repeats):
                one = Conversation(tokenizer, gateway, client)
                prompt = one.session.transcript.prompt(one.messages, None).tokens
                for turn in range(1, turns + 1):
                    ways = {
                        "direct": partial(one.direct, prompt),
                        "http": one.http,
                        "gateway": one.gateway,
                    }
                    for k in range(3):
                        way = WAYS[(k + turn + repeat) % 3]
                        taken[turn][way].append(await timed(ways[way]))
                    call = one.session.transcript.calls[-1]
                    prompt, sizes[turn] = call.request.tokens, len(call.request.tokens)
                    one.goes_on()
    finally:
        await gateway.close()
    rows = []
    for turn, found in taken.items():
        row: dict[str, Any] = {"turn": turn, "tokens": sizes[turn]}
        for k, kind in enumerate(("wall_ms", "cpu_ms")):
            row |= {f"{way}_{kind}": spread([one[k] for one in found[way]]) for way in WAYS}
            added = [g[k] - d[k] for g, d in zip(found["gateway"], found["direct"], strict=True)]
            row[f"added_{kind}"] = spread(added)
        rows.append(row)
    return rows


async def concurrent(sessions: int, turns: int, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """Sessions that all ask at once, each in a conversation of `turns` turns."""
    gateway = Gateway()
    await gateway.open()
    try:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as client:
            all_of_them = [Conversation(tokenizer, gateway, client) for _ in range(sessions)]
            for one in all_of_them:
                for _ in range(turns - 1):
                    one.goes_on()
            await asyncio.gather(*(one.gateway() for one in all_of_them))
            wall, cpu = await timed(lambda: _all(all_of_them))
    finally:
        await gateway.close()
    return {"sessions": sessions, "turns": turns, "wall_ms_a_call": wall / sessions, "cpu_ms_a_call": cpu / sessions}


async def _all(conversations: Sequence[Conversation]) -> None:
    for one in conversations:
        one.goes_on()
    await asyncio.gather(*(one.gateway() for one in conversations))


def spread(values: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def draw(rows: Sequence[dict[str, Any]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 3.6))
    turns = [row["turn"] for row in rows]
    shown = (("gateway", "through the gateway"), ("http", "an empty HTTP call"), ("direct", "the engine directly"))
    for way, label in shown:
        found = [row[f"{way}_cpu_ms"] for row in rows]
        (line,) = axes.plot(turns, [one["median"] for one in found], label=label)
        low, high = [one["min"] for one in found], [one["max"] for one in found]
        axes.fill_between(turns, low, high, alpha=0.2, color=line.get_color())
    axes.set(
        xlabel="turn of the conversation (32 tokens each)", ylabel="CPU of a call, client included (ms)", ylim=(0, None)
    )
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
    tokenizer = byte_tokenizer()
    turns, repeats = (6, 2) if args.quick else (128, 7)
    rows = asyncio.run(by_turn(turns, repeats, tokenizer))
    first, last = rows[0], rows[-1]
    result = {
        "command": "python -m benchmarks.rollouts.gateway" + " --quick" * args.quick,
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "cores": os.cpu_count(),
        "load": [round(value, 1) for value in os.getloadavg()],
        "repeats": repeats,
        "added_cpu_last_over_first": last["added_cpu_ms"]["median"] / first["added_cpu_ms"]["median"],
        "wanted_added_wall_ms": 3.0,
        "concurrent": asyncio.run(concurrent(8 if args.quick else CONCURRENT, turns, tokenizer)),
        "turns": rows,
    }
    write_json(args.out / "gateway.json", result)
    draw(rows, args.out / "gateway.png")
    for row in (first, rows[len(rows) // 2], last):
        told = {key: round(row[key]["median"], 2) for key in ("added_wall_ms", "added_cpu_ms", "http_cpu_ms")}
        print(f"turn {row['turn']}, {row['tokens']} tokens: {told}")
    print(result["concurrent"])
    return result


if __name__ == "__main__":
    main()
