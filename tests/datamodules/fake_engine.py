"""An engine without a model, whose replies, delays and failures a test decides."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import Any

from datamodules.inference.protocol import GenerationRequest, GenerationResponse, WeightUpdate

VOCABULARY = "0123456789+-*="
EOS = 1


class FakeEngine:
    """Replies with a random digit and an end of sequence, as a function of the request's seed.

    `before(request)` is awaited first: a test sleeps, raises or waits there. `seen` lists requests in order of arrival.
    """

    vocab_size = 2 + len(VOCABULARY)
    update_methods = ("memory",)

    def __init__(
        self, before: Callable[[GenerationRequest], Awaitable[None]] | None = None, max_context: int = 64
    ) -> None:
        self.before = before
        self.max_context = max_context
        self.version = 0
        self.alive = True
        self.running = 0
        self.seen: list[GenerationRequest] = []

    def start(self, model: Any, version: int, seed: int) -> None:
        self.version = version

    async def generate(self, request: GenerationRequest) -> GenerationResponse:
        request.validate(self.vocab_size, self.max_context)
        self.seen.append(request)
        self.running += 1
        try:
            if self.before is not None:
                await self.before(request)
            else:
                await asyncio.sleep(0)
        finally:
            self.running -= 1
        digit = 2 + random.Random(request.seed).randrange(10)
        return GenerationResponse([digit, EOS], [-2.3, -0.1], [self.version, self.version], "stop")

    def pause(self) -> None: ...

    def resume(self) -> None: ...

    def update_weights(self, update: WeightUpdate) -> float:
        self.version = update.version
        return 0.0

    def health(self) -> dict[str, Any]:
        return {"alive": self.alive, "version": self.version, "running": self.running}

    def close(self) -> None: ...
