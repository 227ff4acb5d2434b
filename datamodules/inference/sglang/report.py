"""One report of a server about a request that it serves, as plain values.

Promises: whatever a server sends, what comes out has the documented types and ranges, or it is a ValueError that says
what is wrong with it; what is kept of the server's own words is short.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from app.text import printable

_WORDS = 200  # characters
_HIGHEST_LOGPROB, _LOWEST_LOGPROB = 1e-3, -1e3  # rounding above 0; nothing that unlikely was ever drawn


@dataclass(frozen=True)
class Report:
    """What a server says.

    Attributes:
        tokens: ids, those since the last report or all of the attempt.
        logprobs: of each token, at most 0.
        completion_tokens: of the attempt so far.
        label: of the weights that serve, as the server says it.
        ended: why the attempt is over; "" while it is not.
        message: the server's words on that, with an HTTP status where it refused the request.
        spans: (label of weights, first token, end) of all tokens of the attempt; in its last report only.
        prompt_tokens, cached_tokens: of the prompt, and those of them that need not be computed.
    """

    tokens: list[int]
    logprobs: list[float]
    completion_tokens: int
    label: str
    ended: str
    message: str
    status: int | None
    spans: list[tuple[str, int, int]]
    prompt_tokens: int
    cached_tokens: int

    @classmethod
    def of(cls, said: Any, vocab_size: int) -> Report:
        """Reads what a server sent. Raises ValueError."""
        report = _object(said, "the report")
        meta = _object(report.get("meta_info"), "meta_info")
        reason = meta.get("finish_reason")
        ended, message, status = "", "", None
        if isinstance(reason, dict):
            ended = _text(reason.get("type"), "finish_reason.type")
            message = _text(reason.get("message") or "", "finish_reason.message")
            code = reason.get("status_code")
            status = None if code is None else _count(code, "finish_reason.status_code")
        elif reason is not None:
            ended = _text(reason, "finish_reason")
        tokens = [_count(one, "a token id") for one in _list(report.get("output_ids"), "output_ids")]
        if tokens and max(tokens) >= vocab_size:
            raise ValueError(f"token {max(tokens)} is outside the vocabulary of {vocab_size}")
        pairs = _list(meta.get("output_token_logprobs") or [], "output_token_logprobs")
        if len(pairs) != len(tokens):
            raise ValueError(f"{len(tokens)} tokens came with {len(pairs)} log-probabilities")
        spans = [
            (
                _label(_object(one, "a span").get("version")),
                _count(one.get("start"), "start"),
                _count(one.get("end"), "end"),
            )
            for one in _list(meta.get("weight_versions") or [], "weight_versions")
        ]
        return cls(
            tokens=tokens,
            logprobs=[_logprob(pair, token) for pair, token in zip(pairs, tokens, strict=True)],
            completion_tokens=_count(meta.get("completion_tokens"), "completion_tokens"),
            label=_label(meta.get("weight_version")),
            ended=ended,
            message=message,
            status=status,
            spans=spans,
            prompt_tokens=_count(meta.get("prompt_tokens") or 0, "prompt_tokens"),
            cached_tokens=_count(meta.get("cached_tokens") or 0, "cached_tokens"),
        )


def _logprob(pair: Any, token: int) -> float:
    """Of a pair (log-probability, token, ...)."""
    if not isinstance(pair, list) or len(pair) < 2 or type(pair[1]) is not int or pair[1] != token:
        raise ValueError("log-probabilities of other tokens came with these")
    value = pair[0]
    if type(value) not in (int, float) or not math.isfinite(value):
        raise ValueError("a log-probability is not finite")
    if not _LOWEST_LOGPROB <= value <= _HIGHEST_LOGPROB:
        raise ValueError(f"a log-probability is {value:.3g}, which is {'above 0' if value > 0 else 'none'}")
    return min(float(value), 0.0)


def _object(value: Any, name: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{name} is {_kind(value)}, where an object belongs")
    return value


def _list(value: Any, name: str) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError(f"{name} is {_kind(value)}, where a list belongs")
    return value


def _count(value: Any, name: str) -> int:
    if type(value) is not int or value < 0:  # True is no number
        raise ValueError(f"{name} is {_kind(value)}, where a whole number of at least 0 belongs")
    return value


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{name} is {_kind(value)}, where text belongs")
    return printable(value, _WORDS)


def _label(value: Any) -> str:
    """Labels of weights are text, or a number; one that is something else is shown as what it is, and is no version."""
    return printable(value, _WORDS) if isinstance(value, str) else _kind(value)


def _kind(value: Any) -> str:
    """What a value is, for an error: it may be long, or nested deep."""
    if type(value) is int:
        return str(value) if value.bit_length() < 64 else "a very large number"
    return repr(value) if value is None or isinstance(value, bool | float) else f"a {type(value).__name__}"
