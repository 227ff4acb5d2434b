"""A session: the calls of one agent during one episode, within a budget.

Promises: every reply is sampled by the episode's engine from the prompt of its own call, and recorded as it was
sampled, once the client can have it; a call that its client gave up is neither recorded nor counted as a turn. What
goes wrong in the engine ends the session, as a fault and not as a bad answer.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from app import checks
from app.batch import CALL_REWARD, TEMPERATURES, Trajectory
from datamodules.conversations.chat_template import Chat, Message
from datamodules.inference.protocol import GenerationRequest
from datamodules.prompts.base import Prompt
from datamodules.workflows.base import EpisodeEngine, to_trajectory
from datamodules.workflows.gateway.errors import RequestError
from datamodules.workflows.gateway.protocols.base import Sampled
from datamodules.workflows.gateway.rewards import Exchange, Rewards
from datamodules.workflows.gateway.transcript import Call, Rendered, Transcript
from datamodules.workflows.tool_calls import ToolCall

Parser = Callable[[str], list[ToolCall]]


@dataclass(frozen=True)
class Budget:
    """What a session may use; a call beyond it is refused with the code "session_budget_exceeded".

    Attributes:
        max_calls: replies asked for, every choice of `n` counted, and those that were given up or refused for what they
            hold.
        max_tokens: sampled tokens of all replies; None for no limit.
        max_parallel: replies sampled at a time.
    """

    max_calls: int = 64
    max_tokens: int | None = None
    max_parallel: int = 16

    def __post_init__(self) -> None:
        counts = {"max_calls": self.max_calls, "max_tokens": self.max_tokens, "max_parallel": self.max_parallel}
        checks.at_least(1, {f"budget.{name}": value for name, value in counts.items()})


@dataclass(frozen=True)
class Sampling:
    """How replies are sampled where a call does not say.

    Attributes:
        max_new_tokens: most of a reply, whatever the call says.
        temperature: of calls that name none.
    """

    max_new_tokens: int
    temperature: float = 1.0


class Session:
    """One agent's calls.

    Args:
        engine: of the episode.
        chat: the model's template.
        sampling, budget: see there.
        parser: finds the calls of tools in a reply's text.

    Attributes:
        id: part of the URL. key: what a client must show.
        fault: why the engine could not answer; None while it can. exhausted: whether a call was beyond the budget.
        rewards: what was posted. exchanges: what was asked and answered.
        ended: set when the agent said that it is done.
        counts: calls given up by the client, calls refused, and so on.
    """

    def __init__(self, engine: EpisodeEngine, chat: Chat, sampling: Sampling, budget: Budget, parser: Parser) -> None:
        self.id = secrets.token_hex(8)
        self.key = secrets.token_urlsafe(32)
        self.fault: Exception | None = None
        self.exhausted = False
        self.rewards = Rewards()
        self.exchanges: list[Exchange] = []
        self.ended = asyncio.Event()
        self.counts: Counter[str] = Counter()
        self._engine = engine
        self._sampling = sampling
        self._budget = budget
        self._parser = parser
        self._tokens = 0
        self._started = 0
        self._free = asyncio.Semaphore(budget.max_parallel)
        self.transcript = Transcript(chat, lambda ids: engine.tokenizer.decode(ids, skip_special_tokens=False))

    async def reply(
        self,
        messages: Sequence[Message],
        tools: list[dict[str, Any]] | None = None,
        *,
        max_tokens: int | None = None,
        temperature: float | None = None,
        stop: Sequence[str] = (),
        seed: int | None = None,
        n: int = 1,
    ) -> list[Call]:
        """`n` replies to `messages`, recorded. Raises RequestError."""
        temperature = self._sampling.temperature if temperature is None else temperature
        coldest, hottest = TEMPERATURES
        if not coldest <= temperature <= hottest:
            raise RequestError(
                f"temperature: {temperature}, must be between {coldest:g} and {hottest:g} to be trained on",
                param="temperature",
            )
        stops = (*self._engine.ends.ids, *self._stop_ids(stop))
        self._spend(n)
        try:
            prompt = self.transcript.prompt(messages, tools)
        except ValueError as error:
            raise RequestError(f"messages: {error}", param="messages") from error
        room = self._engine.max_context - len(prompt.tokens)
        if room < 1:
            raise RequestError(
                f"messages: they are {len(prompt.tokens)} tokens, which leaves no room for a reply in the model's"
                f" context of {self._engine.max_context}; shorten the conversation",
                param="messages",
                code="context_length_exceeded",
            )
        most = min(room, self._sampling.max_new_tokens, room if max_tokens is None else max_tokens)
        engine = self._engine  # a seed that is the same in every episode must not make a group's samples alike
        requests = [
            GenerationRequest(
                list(prompt.tokens),
                most,
                temperature,
                stops,
                seed=None if seed is None else engine.seed(("call", seed, k)),
            )
            for k in range(n)
        ]
        try:
            calls = await asyncio.gather(*(self._sample(one, prompt, len(messages), bool(tools)) for one in requests))
        except asyncio.CancelledError:
            self.counts["abandoned_calls"] += n
            raise
        for call in calls:
            self.transcript.add(call)
            self._tokens += len(call.response.tokens)
        self.exchanges.append(Exchange(messages, tools, calls))
        return calls

    def trajectories(self, prompt: Prompt, reward: float) -> list[Trajectory]:
        """The training sequences: a call each, with loss on what was sampled in it."""
        drift = {f"drift_{cause}": count for cause, count in self.transcript.drift.items()}
        calls = self.transcript.calls
        found = [to_trajectory(prompt, call.request, call.response, k) for k, call in enumerate(calls)]
        for call, one in zip(calls, found):
            one.reward = reward
            one.metadata = {"turns": len(calls), **self.counts, **drift}
            if call.id in self.rewards.calls:
                one.metadata[CALL_REWARD] = self.rewards.calls[call.id]
        return found

    def sampled(self, call: Call) -> list[Sampled]:
        """The text and log-probability of each token of a reply."""
        tokens, decode = call.response.tokens, self._engine.tokenizer.decode
        texts = [str(decode([token])) for token in tokens]
        return [Sampled(text, value) for text, value in zip(texts, call.response.logprobs, strict=True)]

    def text(self) -> str:
        """What the last reply said; "" before the first, and of one that only calls tools."""
        return str(self.transcript.calls[-1].message["content"] or "") if self.transcript.calls else ""

    def _spend(self, n: int) -> None:
        if self.fault is not None:
            raise RequestError("the engine failed; the session is over", status=503, code="engine_failed")
        if self.ended.is_set():
            raise RequestError("the session has ended", status=403, code="session_ended")
        most = self._budget.max_tokens
        if self._started + n > self._budget.max_calls or (most is not None and self._tokens >= most):
            self.exhausted = True
            what = f"{self._budget.max_calls} calls" if most is None or self._tokens < most else f"{most} tokens"
            raise RequestError(f"the session may use {what}, which are spent", code="session_budget_exceeded")
        self._started += n

    def _stop_ids(self, texts: Sequence[str]) -> list[int]:
        found = []
        for text in texts:
            tokens = self._engine.tokenizer.encode(text, add_special_tokens=False)
            if len(tokens) != 1:
                raise RequestError(
                    f"stop: {text!r} is {len(tokens)} tokens of this model, and a reply can only end at one token",
                    param="stop",
                    code="unsupported_parameter",
                )
            found += tokens
        return found

    async def _sample(self, request: GenerationRequest, prompt: Rendered, messages: int, with_tools: bool) -> Call:
        async with self._free:
            try:
                response = await self._engine.generate(request)
            except Exception as error:
                self.fault = error
                raise RequestError(
                    "the engine failed; the session is over", status=503, code="engine_failed"
                ) from error
        tokens, decode = response.tokens, self._engine.tokenizer.decode
        ended = bool(tokens) and tokens[-1] in request.stop_token_ids
        reply = str(decode(tokens[:-1] if ended else tokens, skip_special_tokens=False))
        end = str(decode(tokens[-1:], skip_special_tokens=False)) if ended else ""
        name = f"{self.id}-{secrets.token_hex(6)}"
        message = self._message(name, reply, with_tools)
        return Call(name, request, response, messages, prompt.text, reply, end, message)

    def _message(self, name: str, reply: str, with_tools: bool) -> Message:
        """The reply as clients know it; calls that cannot be read stay text, as on other servers."""
        found: list[ToolCall] = []
        if with_tools:
            try:
                found = self._parser(reply)
            except Exception as error:  # a user's own parser
                found = [ToolCall(error=f"{type(error).__name__}: {error}")]
        malformed = sum(bool(one.error) for one in found)
        if malformed:
            self.counts["malformed_calls"] += malformed
        if malformed or not found:
            return {"role": "assistant", "content": reply}
        said = reply.lstrip()
        content = "" if said.startswith(("{", "[")) else reply.partition("<tool_call>")[0].rstrip()
        calls = [
            {
                "id": f"call_{name}_{k}",
                "type": "function",
                "function": {"name": one.name, "arguments": json.dumps(one.arguments, ensure_ascii=False)},
            }
            for k, one in enumerate(found)
        ]
        self.counts["tool_calls"] += len(calls)
        return {"role": "assistant", "content": content or None, "tool_calls": calls}
