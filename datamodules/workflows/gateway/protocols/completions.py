"""OpenAI's legacy Completions: text or token ids that the model goes on with, by no template.

Promises: as those of Chat Completions. Token ids are sent as they are.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Any

from datamodules.workflows.gateway.errors import RequestError
from datamodules.workflows.gateway.protocols import fields
from datamodules.workflows.gateway.protocols.base import Asked, EventWriter, Sampled, WireProtocol
from datamodules.workflows.gateway.protocols.chat_completions import openai_error, shared, usage
from datamodules.workflows.gateway.transcript import Call

_WITHOUT_EFFECT = ("user",)
_NEUTRAL: dict[str, tuple[Any, ...]] = {"suffix": ("",), "echo": (False,)}
_MAX_TOKENS = 16  # the provider's, of requests that name none


class Completions(WireProtocol):
    """`/v1/completions`."""

    path = "completions"

    def parse(self, body: dict[str, Any]) -> Asked:
        left = {key: value for key, value in body.items() if key not in _WITHOUT_EFFECT}
        alike = shared(left)
        fields.take_neutral(left, {**_NEUTRAL, "best_of": (alike["n"],)})
        logprobs = left.pop("logprobs", None)
        if fields.number("logprobs", logprobs, int, 0):
            raise RequestError(
                "logprobs: must be 0, those of the sampled tokens; those of others are not kept",
                param="logprobs",
                code="unsupported_parameter",
            )
        asked = Asked(
            messages=[],
            prompt=_prompt(left.pop("prompt", None)),
            max_tokens=fields.number("max_tokens", left.pop("max_tokens", None), int, 1) or _MAX_TOKENS,
            logprobs=logprobs is not None,
            **alike,
        )
        fields.nothing_left(left)
        return asked

    def answer(
        self, asked: Asked, name: str, calls: Sequence[Call], tokens: Sequence[Sequence[Sampled]] | None
    ) -> dict[str, Any]:
        choices = [
            _choice(k, call.message["content"], call.response.finish_reason, tokens[k] if tokens else None)
            for k, call in enumerate(calls)
        ]
        return {**_base(asked, name), "choices": choices, "usage": usage(calls)}

    def events(self, asked: Asked, name: str) -> EventWriter:
        return _Events(asked, name)

    def error(self, problem: RequestError) -> dict[str, Any]:
        return openai_error(problem)


class _Events(EventWriter):
    def __init__(self, asked: Asked, name: str) -> None:
        self._asked = asked
        self._base = _base(asked, name)
        self._said = [0] * asked.n  # characters

    def begin(self) -> bytes:
        return b""

    def text(self, choice: int, piece: str, tokens: Sequence[Sampled]) -> bytes:
        at, self._said[choice] = self._said[choice], self._said[choice] + sum(one.size for one in tokens)
        return self._event([_choice(choice, piece, None, tokens or None, at)])

    def end(self, choice: int, call: Call) -> bytes:
        return self._event([_choice(choice, "", call.response.finish_reason, None)])

    def finish(self, calls: Sequence[Call]) -> bytes:
        counted = self._event([], usage=usage(calls)) if self._asked.own["usage"] else b""
        return counted + b"data: [DONE]\n\n"

    def fail(self, problem: RequestError) -> bytes:
        return b"data: " + json.dumps(openai_error(problem)).encode() + b"\n\n"

    def _event(self, choices: list[dict[str, Any]], **more: Any) -> bytes:
        return b"data: " + json.dumps({**self._base, "choices": choices, **more}).encode() + b"\n\n"


def _base(asked: Asked, name: str) -> dict[str, Any]:
    return {"id": f"cmpl-{name}", "object": "text_completion", "created": int(time.time()), "model": asked.model}


def _choice(k: int, text: str, finish: str | None, tokens: Sequence[Sampled] | None, at: int = 0) -> dict[str, Any]:
    logprobs = None
    if tokens is not None:
        offsets = [at]
        for one in tokens[:-1]:
            offsets.append(offsets[-1] + one.size)
        logprobs = {
            "tokens": [one.text for one in tokens],
            "token_logprobs": [one.logprob for one in tokens],
            "top_logprobs": None,
            "text_offset": offsets,
        }
    return {"index": k, "text": text, "finish_reason": finish, "logprobs": logprobs}


def _prompt(found: Any) -> str | list[int]:
    if isinstance(found, list) and len(found) == 1 and not isinstance(found[0], int):
        found = found[0]
    if isinstance(found, list) and found and all(type(one) is int for one in found):
        return list(found)
    if isinstance(found, str) and found:
        return found
    raise RequestError("prompt: must be one text or one list of token ids, and not empty", param="prompt")
