"""Agents that do with their history and with their connections whatever agents do, over HTTP; and the books that prove
that nothing of what was sampled for them is lost, changed or trained twice.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import aiohttp
import numpy as np
import torch
from transformers import PreTrainedTokenizerBase, Qwen3Config, Qwen3ForCausalLM

from datamodules.conversations.chat_template import Chat, Message
from datamodules.inference.protocol import GenerationRequest, GenerationResponse
from datamodules.prompts.base import Prompt
from datamodules.workflows.base import EpisodeEngine
from datamodules.workflows.gateway import Budget, Gateway, Session
from datamodules.workflows.gateway.protocols.servable import Sampling
from datamodules.workflows.gateway.transcript import Call
from datamodules.workflows.tool_calls import hermes_calls
from tests.datamodules.inference.engine_suite import reference_logprobs
from tests.datamodules.workflows.gateway.agents import LOOK_UP
from tests.datamodules.workflows.gateway.test_sessions import CHAT, TOKENIZER, WORDS

PATIENCE_S = 300.0
TOGETHER = 16  # sessions at a time
TASK = Prompt(id="t", text="-")


class Books:
    """An engine that remembers what it was asked and what it answered, apart from what anyone does with it."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self.answered: dict[int, tuple[GenerationResponse, list[int], list[int], list[float], list[int]]] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def generate(self, request: GenerationRequest) -> GenerationResponse:
        sent = list(request.tokens)
        response: GenerationResponse = await self._engine.generate(request)
        made = list(response.tokens), list(response.logprobs), list(response.versions)
        self.answered[id(response)] = (response, sent, *made)
        return response


@dataclass(frozen=True)
class Given:
    """What a client asked, and was given."""

    messages: list[Message]
    message: Message


class WildAgent:
    """One agent.

    Args:
        client: of HTTP.
        address: of its session. key: of that.
        draw: everything it does is drawn from this.
        words: it says these.
        impatient_s: the longest that it waits where it is impatient.
    """

    def __init__(
        self,
        client: aiohttp.ClientSession,
        address: str,
        key: str,
        draw: random.Random,
        words: Sequence[str],
        impatient_s: float,
    ) -> None:
        self.given: dict[str, Given] = {}
        self.given_up = 0
        self._client, self._url, self._draw = client, address + "/v1/chat/completions", draw
        self._headers = {"Authorization": f"Bearer {key}"}
        self._words, self._impatient_s = words, impatient_s

    async def converse(self, turns: int) -> None:
        draw = self._draw
        messages: list[Message] = [{"role": "user", "content": self._say(6)}]
        for _ in range(turns):
            kind = draw.random()
            if kind < 0.1:  # compaction
                messages = [{"role": "user", "content": "so far " + self._say(4)}, *messages[-1:]]
                if messages[-1]["role"] == "tool":
                    messages = messages[:1]
            elif kind < 0.2:
                at = draw.randrange(len(messages))
                messages[at] = {**messages[at], "content": self._say(3)}
            elif kind < 0.3:  # drops thoughts itself
                messages = [{**one, "reasoning_content": ""} if "reasoning_content" in one else one for one in messages]
            elif kind < 0.4:  # a sub-agent, and a call of its own beside it
                await asyncio.gather(self.converse(2), self.ask(messages))
            elif kind < 0.5:
                await self.ask(messages, n=3)
            elif kind < 0.6:
                await asyncio.gather(*(self.ask(messages) for _ in range(3)))
            elif kind < 0.7:
                await self.leave(messages)
            said = (await self.ask(messages))[0]
            messages.append(said)
            if said.get("tool_calls"):
                messages += [{"role": "tool", "tool_call_id": one["id"], "content": "5"} for one in said["tool_calls"]]
            else:
                messages.append({"role": "user", "content": self._say(2)})

    async def ask(self, messages: list[Message], **options: Any) -> list[Message]:
        """The choices; asks again where it lost its patience."""
        draw = self._draw
        body = {"model": "any", "messages": list(messages), "tools": [LOOK_UP], **options}
        body["stream"] = draw.random() < 0.5
        if draw.random() < 0.2:
            body["stop"] = draw.sample(["e", " th", "ear is", "or"], draw.randint(1, 3))
        if draw.random() < 0.2:
            body["max_tokens"] = draw.randint(1, 12)
        counts = draw.random() < 0.7  # tells how often it tried
        for attempt in range(3):
            wait_s = draw.uniform(0.0, self._impatient_s) if attempt < 2 and draw.random() < 0.15 else PATIENCE_S
            try:
                async with asyncio.timeout(wait_s):
                    found = await self._post(body, attempt if counts else 0)
            except TimeoutError:
                assert wait_s < PATIENCE_S, f"no answer within {PATIENCE_S} s"
                self.given_up += 1
                continue
            for name, message in found.items():
                if name in self.given:
                    assert self.given[name].message == message, "a repeated call was answered otherwise"
                self.given[name] = Given(list(messages), message)
            return list(found.values())
        raise AssertionError("the last attempt is patient")

    async def leave(self, messages: list[Message]) -> None:
        """Begins to read a stream, and goes away."""
        body = {"model": "any", "messages": messages, "stream": True, "seed": self._draw.getrandbits(30)}
        with suppress(aiohttp.ClientError):
            async with self._client.post(self._url, json=body, headers=self._headers) as answer:
                async for _ in answer.content:
                    break
                answer.close()

    async def _post(self, body: dict[str, Any], retries: int) -> dict[str, Message]:
        headers = {**self._headers, "x-stainless-retry-count": str(retries)}
        async with self._client.post(self._url, json=body, headers=headers) as answer:
            assert answer.status == 200, await answer.text()
            if not body["stream"]:
                whole = await answer.json()
                name = whole["id"].removeprefix("chatcmpl-")
                return {_nth(name, one["index"]): one["message"] for one in whole["choices"]}
            found: dict[str, Message] = {}
            async for line in answer.content:
                if not line.startswith(b"data: {"):
                    continue
                event = json.loads(line[6:])
                assert "error" not in event, event
                for one in event["choices"]:
                    name = _nth(event["id"].removeprefix("chatcmpl-"), one["index"])
                    message = found.setdefault(name, {"role": "assistant", "content": ""})
                    message["content"] += one["delta"].get("content") or ""
                    if "reasoning_content" in one["delta"]:
                        message["reasoning_content"] = one["delta"]["reasoning_content"]
                    for call in one["delta"].get("tool_calls", ()):
                        known = message.setdefault("tool_calls", [])
                        assert call["index"] == len(known)
                        known.append({key: value for key, value in call.items() if key != "index"})
            assert line == b"\n" or line.strip() == b"data: [DONE]", "the stream broke off"
            return {name: _as_sent(one) for name, one in found.items()}

    def _say(self, count: int) -> str:
        return " ".join(self._draw.choices(self._words, k=count))


def _nth(name: str, k: int) -> str:
    return name if k == 0 else f"{name}-{k}"


def _as_sent(message: Message) -> Message:
    """As an answer in one piece has it."""
    return {**message, "content": message["content"] or (None if message.get("tool_calls") else "")}


def check(session: Session, books: Books, agent: WildAgent, chat: Chat, tokenizer: PreTrainedTokenizerBase) -> None:
    """Everything that was sampled is trained once, as it was sampled, behind the prompt that the template makes."""
    calls = session.transcript.calls
    found = session.trajectories(TASK, 1.0)
    used = [id(call.response) for call in calls]
    assert len(set(used)) == len(used) == len(found), "a reply is trained twice"
    # Of several choices some may be complete when the client gives all of them up.
    lost = len(books.answered) - len(used) - session.counts["untaken_calls"]
    assert 0 <= lost <= session.counts["abandoned_calls"], "a reply is lost"
    for call, one in zip(calls, found, strict=True):
        _, sent, tokens, logprobs, versions = books.answered[id(call.response)]
        made = one.loss_mask
        assert one.tokens.tolist() == [*sent, *tokens]
        assert made.tolist() == [False] * len(sent) + [True] * len(tokens)
        assert one.behavior_logprobs[made].tolist() == [_float32(value) for value in logprobs]
        assert one.versions[made].tolist() == versions
    by_name = {call.id: call for call in calls}
    for name, given in agent.given.items():
        call = by_name[name]  # whatever the client was given is trained
        assert call.message == given.message
        said = [_as_sampled(k, given.messages, agent.given, by_name) for k in range(len(given.messages))]
        rendered = chat.text([_rendered(one) for one in said], [LOOK_UP])
        assert tokenizer.decode(call.prompt.tokens) == rendered, "the prompt is not the template's"


def _session_on(engine: Any, most: int, seed: int) -> tuple[Books, Session]:
    books = Books(engine)
    episode = EpisodeEngine(books, TOKENIZER, None, name=f"e{seed}", seed=str(seed))  # type: ignore[arg-type]
    return books, Session(episode, CHAT, Sampling(most), Budget(max_calls=9999), hermes_calls)


async def play(
    seeds: range, engine_of: Callable[[random.Random], Any], most: int, turns: int, impatient_s: float
) -> Counter[str]:
    """Sessions of these seeds, checked; what happened in them.

    Args:
        engine_of: the engine of a session.
        most: tokens of a reply.
        turns: of an agent; its sub-agents have two.
        impatient_s: see `WildAgent`.
    """
    counts: Counter[str] = Counter()
    places = asyncio.Semaphore(TOGETHER)
    gateway = Gateway()
    await gateway.open()

    async def one(seed: int, client: aiohttp.ClientSession) -> tuple[Session, Books, WildAgent]:
        async with places:
            books, session = _session_on(engine_of(random.Random(seed)), most, seed)
            draw = random.Random(-1 - seed)
            agent = WildAgent(client, gateway.admit(session), session.key, draw, WORDS, impatient_s)
            await agent.converse(turns)
            return session, books, agent

    try:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as client:
            played = await asyncio.gather(*(one(seed, client) for seed in seeds))
    finally:
        await gateway.close()  # those who left may still be noticed until then
    for session, books, agent in played:
        check(session, books, agent, CHAT, TOKENIZER)
        counts.update(session.counts)
        counts["given_up"] += agent.given_up
        counts["calls"] += len(session.transcript.calls)
        counts.update({f"drift_{cause}": count for cause, count in session.transcript.drift.items()})
    return counts


def assert_of_their_versions(books: Sequence[Books], models: Sequence[Any], count: int, tolerance: float) -> None:
    """Log-probabilities of `count` replies are those of the weights of their versions, all of which sampled some."""
    answered = [one for each in books for one in each.answered.values()]
    assert {version for one in answered for version in one[4]} == set(range(len(models)))
    mixed = [one for one in answered if len(set(one[4])) > 1]
    for _, sent, tokens, logprobs, versions in [*mixed[:count], *random.Random(0).sample(answered, count)]:
        for version in set(versions):
            mine = torch.tensor(versions) == version
            expected = reference_logprobs(models[version], sent, tokens, 1.0)
            torch.testing.assert_close(torch.tensor(logprobs)[mine], expected[mine], atol=tolerance, rtol=0)


def model_of_words(seed: int) -> Qwen3ForCausalLM:
    """A tiny one for `TOKENIZER`, with random weights."""
    config = Qwen3Config(
        vocab_size=len(TOKENIZER),
        hidden_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        intermediate_size=64,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        initializer_range=0.15,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Qwen3ForCausalLM(config).eval()


def _float32(value: float) -> float:
    return float(np.float32(value))


def _as_sampled(k: int, messages: list[Message], given: dict[str, Given], calls: dict[str, Call]) -> Message:
    """The `k`-th message; a reply with its thought in its text."""
    message = messages[k]
    # Without a thought it may be any reply with this text: clients leave thoughts out.
    dropped = () if "reasoning_content" in message else ("reasoning_content",)
    found = [
        name
        for name, one in given.items()
        if name in calls and {key: value for key, value in one.message.items() if key not in dropped} == message
    ]
    if "reasoning_content" not in message:  # it is known by what it answers
        before = messages[k - 1] if k else {}
        same = [
            name for name in found if all(given[name].messages[-1][key] == before[key] for key in ("role", "content"))
        ]
        found = [name for name in same if len(given[name].messages) == k] or same
    thoughts = {calls[name].thought for name in found}
    if len(thoughts) != 1:
        return message
    call = calls[found[0]]
    assert call.reply.startswith(call.thought[: len(call.reply)])  # a stop text may end it within a token
    left = {key: value for key, value in message.items() if key != "reasoning_content"}
    return {**left, "content": call.thought + (message["content"] or "")}


def _rendered(message: Message) -> Message:
    if not message.get("tool_calls"):
        return {**message, "content": message["content"] or ""}
    calls = [
        {**one, "function": {**one["function"], "arguments": json.loads(one["function"]["arguments"])}}
        for one in message["tool_calls"]
    ]
    return {**message, "content": message["content"] or "", "tool_calls": calls}
