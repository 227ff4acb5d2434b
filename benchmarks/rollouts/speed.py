"""Our engine beside a bare load generator on the same server, the agents' gateway in front of it, and how long a server
stands still for new weights.

Promises: all send the same requests, at most `concurrent` at a time, one after the other in an order that alternates,
each on an empty prefix cache; ratios are formed within a repeat.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedModel, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from benchmarks.common.measure import spread
from datamodules.conversations.chat_template import Chat
from datamodules.inference.export import checkpoint_weights
from datamodules.inference.protocol import GenerationRequest, WeightUpdate
from datamodules.inference.sglang import SGLangEngine
from datamodules.inference.sglang.weights.server_weights import Synced
from datamodules.inference.weight_files import WeightFiles
from datamodules.workflows.base import EpisodeEngine
from datamodules.workflows.gateway import Budget, Gateway, Session
from datamodules.workflows.gateway.protocols.servable import Sampling
from datamodules.workflows.tool_calls import hermes_calls


def make_requests(count: int, prompt_tokens: int, new_tokens: int, vocabulary: int, seed: int) -> list[Any]:
    """Random prompts of half to one and a half times `prompt_tokens`; every reply has `new_tokens`."""
    rng = random.Random(seed)
    sizes = [rng.randint(prompt_tokens // 2, prompt_tokens * 3 // 2) for _ in range(count)]
    return [GenerationRequest([rng.randrange(vocabulary) for _ in range(size)], new_tokens) for size in sizes]


async def bare(url: str, requests: Sequence[GenerationRequest], concurrent: int) -> int:
    """Plain HTTP, nothing checked or kept: tokens generated."""
    places, tokens = asyncio.Semaphore(concurrent), 0

    async def one(session: aiohttp.ClientSession, request: GenerationRequest) -> int:
        sampling = {"max_new_tokens": request.max_new_tokens, "temperature": 1.0, "ignore_eos": True}
        body = {"input_ids": request.tokens, "sampling_params": sampling, "return_logprob": True, "stream": False}
        async with places, session.post(f"{url}/generate", json=body) as response:
            answer = await response.json()
            return len(answer["output_ids"])

    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(300)) as session:
        tokens = sum(await asyncio.gather(*(one(session, request) for request in requests)))
    return tokens


async def ours(engine: SGLangEngine, requests: Sequence[GenerationRequest]) -> int:
    """Tokens generated; the engine's `max_concurrent` bounds what runs."""
    responses = await asyncio.gather(*(engine.generate(request) for request in requests))
    return sum(len(response.tokens) for response in responses)


def word_tokenizer(vocabulary: int) -> PreTrainedTokenizerBase:
    """A word a token, for any id that is sampled, and a chat template of two words."""
    core = Tokenizer(models.WordLevel({f"w{k}": k for k in range(vocabulary)}, unk_token="w0"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="w1")
    made.chat_template = "{% for m in messages %}w2 {{ m.content }} w1 {% endfor %}w2 "
    return made


async def through_gateway(
    engine: SGLangEngine, tokenizer: PreTrainedTokenizerBase, requests: Sequence[GenerationRequest], concurrent: int
) -> int:
    """Tokens generated; each request is a session's message, and its client lives in this process too."""
    places, chat, gateway = asyncio.Semaphore(concurrent), Chat(tokenizer), Gateway()

    async def one(client: aiohttp.ClientSession, number: int, request: GenerationRequest) -> int:
        episode = EpisodeEngine(engine, tokenizer, None, name=str(number), seed=str(number))
        session = Session(episode, chat, Sampling(request.max_new_tokens), Budget(), hermes_calls)
        body = {"messages": [{"role": "user", "content": tokenizer.decode(request.tokens)}]}
        headers = {"Authorization": f"Bearer {session.key}"}
        address = f"{gateway.admit(session)}/v1/chat/completions"
        async with places, client.post(address, json=body, headers=headers) as response:
            response.raise_for_status()
            return int((await response.json())["usage"]["completion_tokens"])

    await gateway.open()
    try:
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(300)) as client:
            return sum(await asyncio.gather(*(one(client, k, request) for k, request in enumerate(requests))))
    finally:
        await gateway.close()


def throughput(url: str, policy: PreTrainedModel, scratch: Path, scale: dict[str, int]) -> dict[str, Any]:
    """Tokens a second of both at `scale["concurrent"]` requests.

    `scale`: concurrent, requests, prompt_tokens, new_tokens, repeats.
    """
    engine = SGLangEngine([url], max_concurrent=scale["concurrent"], start_timeout_s=60.0)
    tokenizer = word_tokenizer(policy.config.vocab_size)
    names = ("ours", "bare", "gateway")
    engine.start(policy, version=0, seed=0)
    try:
        path, _ = WeightFiles(scratch).write(policy, 0)
        engine.update_weights(WeightUpdate(0, path=str(path)))
        rates: dict[str, list[float]] = {name: [] for name in names}
        cpu: dict[str, list[float]] = {name: [] for name in names}
        for repeat in range(scale["repeats"] + 1):  # the first is not counted
            requests = make_requests(
                scale["requests"], scale["prompt_tokens"], scale["new_tokens"], policy.config.vocab_size, repeat
            )
            ways = {
                "ours": ours(engine, requests),
                "bare": bare(url, requests, scale["concurrent"]),
                "gateway": through_gateway(engine, tokenizer, requests, scale["concurrent"]),
            }
            for k in range(len(names)):
                name = names[(k + repeat) % len(names)]
                asyncio.run(_flush(url))
                wall, own = time.perf_counter(), time.process_time()
                tokens = asyncio.run(ways[name])
                wall, own = time.perf_counter() - wall, time.process_time() - own
                if repeat:
                    rates[name].append(tokens / wall)
                    cpu[name].append(own)
    finally:
        engine.close()
    ratios = [own / other for own, other in zip(rates["ours"], rates["bare"], strict=True)]
    behind = [through / own for through, own in zip(rates["gateway"], rates["ours"], strict=True)]
    return {
        **scale,
        "tokens_per_second": {name: spread(values) for name, values in rates.items()},
        "client_cpu_seconds": {name: spread(values) for name, values in cpu.items()},
        "ratio": spread(ratios),
        "gateway_ratio": spread(behind),
        "wanted": 0.95,
    }


def downtime(url: str, policy: PreTrainedModel, scratch: Path, scale: dict[str, int]) -> dict[str, Any]:
    """Seconds of a weight update during `concurrent` running requests, by method: standing still (`downtime_s`, as the
    engine reports it), of those in the server's own update calls (`update_s`), and the difference.

    `scale`: concurrent, new_tokens, repeats.
    """
    result: dict[str, Any] = {}
    for method in SGLangEngine.update_methods:
        engine = SGLangEngine([url], max_concurrent=scale["concurrent"], start_timeout_s=60.0)
        engine.start(policy, version=0, seed=0)
        files = WeightFiles(scratch / method)
        seen: list[Synced] = []
        try:
            _watch_updates(engine, seen)
            engine.update_weights(_update(0, "disk", policy, files))
            if method != "disk":
                engine.update_weights(_update(1, method, policy, files))  # makes the process group, or torch's manager
            seen.clear()
            stop = threading.Event()
            load = threading.Thread(target=asyncio.run, args=(_load(engine, policy, scale, stop),))
            load.start()
            try:
                for number in range(scale["repeats"]):
                    ends = time.monotonic() + 60.0
                    while engine.health()["running"] < scale["concurrent"]:
                        if time.monotonic() > ends:
                            raise TimeoutError(f"the load did not come up: {engine.health()}")
                        time.sleep(0.01)
                    time.sleep(0.3)
                    engine.update_weights(_update(2 + number, method, policy, files))
            finally:
                stop.set()
                load.join()
        finally:
            engine.close()
        over = [one.downtime_s - one.update_s for one in seen]
        result[method] = {
            "downtime_s": spread([one.downtime_s for one in seen]),
            "update_s": spread([one.update_s for one in seen]),
            "over_s": spread(over),
            "updates": len(seen),
            "wanted_s": 0.3,
        }
    return result


def _watch_updates(engine: SGLangEngine, seen: list[Synced]) -> None:
    fleet: Any = engine._fleet
    update = fleet.update

    async def watched(*args: Any) -> list[Synced]:
        synced: list[Synced] = await update(*args)
        seen.extend(synced)
        return synced

    fleet.update = watched


def _update(version: int, method: str, policy: PreTrainedModel, files: WeightFiles) -> WeightUpdate:
    if method != "disk":
        shared = method == "tensor"
        return WeightUpdate(version, state_dict=checkpoint_weights(policy), deadline_s=60.0, shared=shared)
    return WeightUpdate(version, path=str(files.write(policy, version)[0]), deadline_s=60.0)


async def _load(engine: SGLangEngine, policy: PreTrainedModel, scale: dict[str, int], stop: threading.Event) -> None:
    """Keeps so many requests running until told to stop."""

    async def one(number: int) -> None:
        lap = 0
        while not stop.is_set():
            seed = 1000 * number + lap
            (request,) = make_requests(1, 64, scale["new_tokens"], policy.config.vocab_size, seed)
            await engine.generate(request)
            lap += 1

    await asyncio.gather(*(one(number) for number in range(scale["concurrent"])))


async def _flush(url: str) -> None:
    """A server refuses (400) as long as it has not noticed the end of its last request."""
    async with aiohttp.ClientSession() as session:
        for wait_s in (*[0.1] * 50, 0.0):
            async with session.post(f"{url}/flush_cache") as response:
                if response.status != 400 or not wait_s:
                    response.raise_for_status()
                    return
            await asyncio.sleep(wait_s)


def median_of(values: dict[str, Any]) -> float:
    return statistics.median(values["runs"])
