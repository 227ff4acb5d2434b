"""A gateway with one session and a scripted engine, on a thread of its own, for clients that block."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from datamodules.conversations.chat_template import Chat
from datamodules.inference.protocol import GenerationRequest
from datamodules.workflows.base import EpisodeEngine
from datamodules.workflows.gateway import Budget, Gateway, Session
from datamodules.workflows.gateway.protocols.servable import Sampling
from datamodules.workflows.tool_calls import hermes_calls
from tests.datamodules.workflows.scripted_engine import WITH_CALLS, ScriptedEngine
from tests.helpers.recorded_samples import byte_tokenizer

TOKENIZER = byte_tokenizer(WITH_CALLS)
START_S = 20.0
PRICES = {"apple": 3, "pear": 5}
CALL = 'I look.\n<tool_call>\n{"name": "look_up", "arguments": {"fruit": "apple"}}\n</tool_call>'
REPLIES = [CALL, "It is 6."]
QUESTION = "What are two apples?"

Replies = Sequence[str | list[int]] | Callable[[GenerationRequest], str | list[int]]


class Door:
    """What a client needs: `address`, `key`; and what the engine saw.

    Args:
        replies: of a scripted engine.
        session: another one; then there is no such engine.
        sampling: of the session. budget: of it.
    """

    def __init__(self, replies: Replies, session: Session | None, sampling: Sampling, **budget: Any) -> None:
        self.engine = ScriptedEngine(TOKENIZER, replies)
        episode = EpisodeEngine(self.engine, TOKENIZER, None, name="e", seed="s")  # type: ignore[arg-type]
        scripted = Session(episode, Chat(TOKENIZER), sampling, Budget(**budget), hermes_calls)
        self.session = session or scripted
        self.key = self.session.key
        self.address = ""

    @property
    def v1(self) -> str:
        return f"{self.address}/v1"

    def prompts(self) -> list[str]:
        """What the engine was sent, as text."""
        return [TOKENIZER.decode(one.tokens) for one in self.engine.seen]

    def check_one_path(self) -> None:
        """The conversation with a tool was one path: the second prompt holds the sampled ids of the first reply."""
        asked, answered = self.engine.seen
        before = [*asked.tokens, *self.engine.responses[0].tokens]
        assert answered.tokens[: len(before)] == before
        shown = TOKENIZER.decode(answered.tokens[len(before) :])
        assert shown == "\n<|begin|>user<tool>\n3\n</tool><|end|>\n<|begin|>assistant\n"
        assert "look_up" in TOKENIZER.decode(asked.tokens) and not self.session.transcript.drift
        assert [call.response for call in self.session.transcript.calls] == self.engine.responses


@contextmanager
def door(
    replies: Replies = REPLIES,
    session: Session | None = None,
    quiet_s: float = 30.0,
    sampling: Sampling = Sampling(200),  # noqa: B008
    **budget: Any,
) -> Iterator[Door]:
    """Open while the block runs; `quiet_s` of the gateway."""
    made = Door(replies, session, sampling, **budget)
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    gateway = Gateway(quiet_s=quiet_s)
    asyncio.run_coroutine_threadsafe(gateway.open(), loop).result(START_S)
    made.address = gateway.admit(made.session)
    try:
        yield made
    finally:
        asyncio.run_coroutine_threadsafe(gateway.close(), loop).result(START_S)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(START_S)
        loop.close()
