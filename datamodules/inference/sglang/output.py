"""What servers have generated so far for one request, put together from their reports.

A report holds the tokens since the last one, with log-probabilities; the last report of an attempt also says exactly
which tokens belong to which weights. A server that is lost gives no last report: then those tokens are kept whose
version is certain, because the reports before and after them carry the same one.

Promises: the three lists always fit together, and never hold more than was asked for; versions never decrease; whatever
a server sends, a report that makes no sense or contradicts itself, weights that are not this run's, or a prompt with
pictures that it read as other tokens than the trainer does, are errors that say what is wrong, in short, and never
training data. What a server generated behind a stop text is left out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from app.pictures import Picture
from app.text import printable
from datamodules.inference.protocol import GenerationError, GenerationRequest, GenerationResponse
from datamodules.inference.reply_text import TextStops
from datamodules.inference.sglang.experts import ExpertLayout

_WORDS = 200  # characters kept of a server's own words
_HIGHEST_LOGPROB, _LOWEST_LOGPROB = 1e-3, -1e3  # rounding above 0; nothing that unlikely was ever drawn


class ForeignWeights(GenerationError):
    """A server answered with weights that this run did not give it, under `label`: it was restarted, or somebody else
    updates it."""

    def __init__(self, label: str) -> None:
        super().__init__(f"it serves weights '{label}', which this run did not give it")
        self.label = label


class Output:
    """The output of `request`: `begin` an attempt, `add` reports until it returns True, or `keep` what is certain.

    Args:
        request: what is to be generated.
        vocab_size: ids below it may come.
        layout: of experts, for a request that asks for them.

    Attributes:
        last: the last report.
        stopped: the tokens end with a stop text. stop_seen: those of the attempt hold one, certain or not.
    """

    def __init__(self, request: GenerationRequest, vocab_size: int, layout: ExpertLayout | None = None) -> None:
        self.request = request
        self._layout = layout if request.experts_from is not None else None
        self._experts = ""  # as the last report of an attempt has them
        self.last: Report | None = None
        self._vocab_size = vocab_size
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.versions: list[int] = []
        self._attempt: tuple[list[int], list[float], list[int]] = ([], [], [])
        self._last_version = 0  # that the last report carried
        self._certain = 0  # tokens of the attempt whose version is
        self._stops: TextStops | None = None
        self._end: int | None = None  # of the attempt's tokens, with the one that completes a stop text
        self._told = 0
        self.stopped = False
        self.finish_reason = ""

    @property
    def left(self) -> int:
        """Tokens that may still come."""
        return self.request.max_new_tokens - len(self.tokens)

    def prompt(self) -> list[int]:
        """What the next attempt begins with."""
        return [*self.request.tokens, *self.tokens]

    def collapsed(self) -> tuple[list[int], list[Picture]]:
        """The same with one placeholder a picture, as servers take it, and the pictures in order of their places."""
        request = self.request
        if not request.pictures:
            return self.prompt(), []
        tokens, places, left = list[int](), list[Picture](), 0
        for token, image in zip(request.tokens, request.images or ()):
            if image < 0:
                tokens.append(token)
            elif left:
                left -= 1
            else:
                places.append(request.pictures[image])
                left = places[-1].tokens - 1
                tokens.append(token)
        return [*tokens, *self.tokens], places

    def affinity(self) -> list[int]:
        """The same for a router: whose tokens are those of a picture are told apart by its key."""
        pictures = self.request.pictures
        if not pictures:
            return self.prompt()
        names = [int.from_bytes(picture.key[:7]) for picture in pictures]
        own = zip(self.request.tokens, self.request.images or ())
        return [*(token if image < 0 else -1 - names[image] for token, image in own), *self.tokens]

    def begin(self, version: int) -> None:
        """An attempt on a server that has weights `version`."""
        self._attempt, self._last_version, self._certain = ([], [], []), version, 0
        self._stops, self._end = self.request.stops(), None
        if self._stops is not None:
            self._stops.end(self.tokens)

    @property
    def stop_seen(self) -> bool:
        return self._end is not None

    def add(self, said: Any, known: Mapping[str, int], incremental: bool) -> bool:
        """Takes a report in; True when it is the last of the attempt that matters, whose tokens then count.

        Args:
            said: by the server.
            known: versions whose tokens may come, by the labels that the server has for them.
            incremental: reports hold new tokens only; otherwise all of the attempt's.

        Raises:
            ForeignWeights: it carries weights that are not this run's.
            GenerationError: it makes no sense, or contradicts itself.
        """
        try:
            report = self.last = Report.of(said, self._vocab_size)
        except ValueError as error:
            raise self._wrong(str(error)) from error
        if self.request.pictures and not report.status:
            self._check_prompt(report)
        tokens, logprobs, versions = self._attempt
        before = len(tokens)
        fresh = slice(0, None) if incremental else slice(before, None)
        ids, values = report.tokens[fresh], report.logprobs[fresh]
        if before + len(ids) > report.completion_tokens and report.ended:
            ids, values = [], []  # the last report of an aborted request repeats the last token
        if before + len(ids) > self.left:
            raise self._wrong(f"{before + len(ids)} tokens came where {self.left} were left")
        version = self._version(report.label, known)
        tokens += ids
        logprobs += values
        versions += [version] * len(ids)
        if not set(self.request.stop_token_ids).isdisjoint(tokens[max(before - 1, 0) : -1]):
            raise self._wrong("it goes on behind a stop token")
        if version == self._last_version and self._certain == before:
            self._certain = len(tokens)
        self._last_version = version
        if self._stops is not None and self._end is None and (end := self._stops.end(ids)) is not None:
            self._end = before + end
        if report.ended:
            self._certain = self._apply_spans(report.spans, known)
            self._experts = report.experts
        elif self._end is None or self._certain < self._end or self._layout is not None:
            self._tell()
            return False
        self.keep()
        self.finish_reason = "stop" if self.stopped else report.ended
        return True

    def keep(self) -> int:
        """Ends the attempt; returns how many of its tokens are certain, and kept. Raises GenerationError as `add`."""
        self._tell()
        tokens, logprobs, versions = self._attempt
        kept = self._kept
        self.stopped = self.stopped or (self._end is not None and kept == self._end)
        self.tokens += tokens[:kept]
        self.logprobs += logprobs[:kept]
        self.versions += versions[:kept]
        self.begin(self._last_version)
        return kept

    @property
    def _kept(self) -> int:
        """Tokens of the attempt that stay whatever happens."""
        return self._certain if self._end is None else min(self._certain, self._end)

    def _tell(self) -> None:
        """Lets who reads along know what is certain and new."""
        before = len(self.tokens)
        new = slice(self._told - before, self._kept)
        self._told = before + self._kept
        self.request.tell(self._attempt[0][new], self._attempt[1][new])

    def response(self) -> GenerationResponse:
        """Raises GenerationError: experts that were asked for are missing, or make no sense."""
        experts = None
        if self._layout is not None and self.request.experts_from is not None:
            count = len(self.request.tokens) + len(self.tokens) - 1 - self.request.experts_from
            if count and not self._experts:  # of no token (one that follows a known prompt) it says nothing
                raise self._wrong("it does not say which experts it chose (routed_experts), or its last report is lost")
            try:
                experts = self._layout.read(self._experts, count)
            except ValueError as error:
                raise self._wrong(str(error)) from error
        return GenerationResponse(self.tokens, self.logprobs, self.versions, self.finish_reason, experts)

    def _check_prompt(self, report: Report) -> None:
        """A server makes tokens of pictures by itself: they must be the trainer's."""
        ours, theirs = self.prompt(), report.prompt
        if theirs == ours:
            return
        if theirs is None:
            raise self._wrong("it does not say which tokens it made of the prompt's pictures (prompt_token_ids)")
        at = next((k for k, (a, b) in enumerate(zip(ours, theirs)) if a != b), min(len(ours), len(theirs)))
        raise self._wrong(
            f"it read a prompt with pictures as {len(theirs)} tokens, the trainer as {len(ours)}, and they part at"
            f" position {at}: start it with the image processor and tokenizer of the model that is trained"
        )

    def _apply_spans(self, spans: list[tuple[str, int, int]], known: Mapping[str, int]) -> int:
        """Versions of the whole attempt as its last report says; returns its number of tokens."""
        versions, count = self._attempt[2], len(self._attempt[0])
        exact: list[int] = []
        for label, start, end in spans:
            if start != len(exact) or not start <= end <= count:
                raise self._wrong(f"{count} tokens came with the versions of tokens {start} to {end}")
            exact += [self._version(label, known)] * (end - start)
        if len(exact) != count:
            raise self._wrong(f"{count} tokens came with the versions of {len(exact)}")
        if exact != sorted(exact) or (exact and self.versions and exact[0] < self.versions[-1]):
            raise self._wrong("versions decrease within the output")
        versions[:] = exact
        return count

    def _version(self, label: str, known: Mapping[str, int]) -> int:
        if label not in known:
            raise ForeignWeights(label)
        return known[label]

    def _wrong(self, what: str) -> GenerationError:
        return GenerationError(f"request '{self.request.request_id}': the server's answer cannot be used: {what}")


@dataclass(frozen=True)
class Report:
    """What a server says of a request that it serves, as plain values of the documented types and ranges.

    Attributes:
        tokens: ids, those since the last report or all of the attempt.
        logprobs: of each token, at most 0.
        completion_tokens: of the attempt so far.
        label: of the weights that serve, as the server says it.
        ended: why the attempt is over; "" while it is not.
        message: the server's words on that, with an HTTP status where it refused the request.
        spans: (label of weights, first token, end) of all tokens of the attempt; in its last report only.
        prompt_tokens, cached_tokens: of the prompt, and those of them that need not be computed.
        prompt: ids of the prompt as the server read it; None where it does not say.
        experts: as `ExpertLayout.read` takes them; "" where it does not say.
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
    prompt: list[int] | None = None
    experts: str = ""

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
            prompt=None if (given := report.get("prompt_token_ids")) is None else _ids(given, "prompt_token_ids"),
            experts=_encoded(meta.get("routed_experts")),
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


def _ids(value: Any, name: str) -> list[int]:
    return [_count(one, f"an entry of {name}") for one in _list(value, name)]


def _count(value: Any, name: str) -> int:
    if type(value) is not int or value < 0:  # True is no number
        raise ValueError(f"{name} is {_kind(value)}, where a whole number of at least 0 belongs")
    return value


def _encoded(value: Any) -> str:
    if value is not None and not isinstance(value, str):
        raise ValueError(f"routed_experts is {_kind(value)}, where text belongs")
    return value or ""


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
