"""What servers have generated so far for one request, put together from their reports.

A report holds the tokens since the last one, with log-probabilities; the last report of an attempt also says exactly
which tokens belong to which weights. A server that is lost gives no last report: then those tokens are kept whose
version is certain, because the reports before and after them carry the same one.

Promises: the three lists always fit together, and never hold more than was asked for; versions never decrease; a report
that makes no sense (see `report`) or contradicts itself, or weights that are not this run's, are errors and never
training data.
"""

from __future__ import annotations

from typing import Any

from datamodules.inference.protocol import GenerationError, GenerationRequest, GenerationResponse
from datamodules.inference.sglang.report import Report


class ForeignWeights(GenerationError):
    """A server answered with weights that this run did not give it: it was restarted, or somebody else updates it."""


class Output:
    """The output of `request`: `begin` an attempt, `add` reports until it returns True, or `keep` what is certain.

    Args:
        request: what is to be generated.
        vocab_size: ids below it may come.

    Attributes:
        last: the last report.
    """

    def __init__(self, request: GenerationRequest, vocab_size: int) -> None:
        self.request = request
        self.last: Report | None = None
        self._vocab_size = vocab_size
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.versions: list[int] = []
        self._attempt: tuple[list[int], list[float], list[int]] = ([], [], [])
        self._label = 0  # version the last report carried
        self._certain = 0  # tokens of the attempt whose version is
        self.finish_reason = ""

    @property
    def left(self) -> int:
        """Tokens that may still come."""
        return self.request.max_new_tokens - len(self.tokens)

    def prompt(self) -> list[int]:
        """What the next attempt begins with."""
        return [*self.request.tokens, *self.tokens]

    def begin(self, version: int) -> None:
        """An attempt on a server that has weights `version`."""
        self._attempt, self._label, self._certain = ([], [], []), version, 0

    def add(self, said: Any, newest: int, incremental: bool) -> bool:
        """Takes a report in; True when it is the last of the attempt, whose tokens then count.

        Args:
            said: by the server.
            newest: the newest version any server was given.
            incremental: reports hold new tokens only; otherwise all of the attempt's.

        Raises:
            ForeignWeights: it carries weights that are not this run's.
            GenerationError: it makes no sense, or contradicts itself.
        """
        try:
            report = self.last = Report.of(said, self._vocab_size)
        except ValueError as error:
            raise self._wrong(str(error)) from error
        tokens, logprobs, versions = self._attempt
        known = len(tokens)
        fresh = slice(0, None) if incremental else slice(known, None)
        ids, values = report.tokens[fresh], report.logprobs[fresh]
        if known + len(ids) > report.completion_tokens and report.ended:
            ids, values = [], []  # the last report of an aborted request repeats the last token
        if known + len(ids) > self.left:
            raise self._wrong(f"{known + len(ids)} tokens came where {self.left} were left")
        label = self._version(report.label, newest)
        tokens += ids
        logprobs += values
        versions += [label] * len(ids)
        if not set(self.request.stop_token_ids).isdisjoint(tokens[max(known - 1, 0) : -1]):
            raise self._wrong("it goes on behind a stop token")
        if label == self._label and self._certain == known:
            self._certain = len(tokens)
        self._label = label
        if not report.ended:
            return False
        self._certain = self._apply_spans(report.spans, newest)
        self.keep()
        self.finish_reason = report.ended
        return True

    def keep(self) -> int:
        """Ends the attempt; returns how many of its tokens are certain, and kept."""
        tokens, logprobs, versions = self._attempt
        kept = self._certain
        self.tokens += tokens[:kept]
        self.logprobs += logprobs[:kept]
        self.versions += versions[:kept]
        self.begin(self._label)
        return kept

    def response(self) -> GenerationResponse:
        return GenerationResponse(self.tokens, self.logprobs, self.versions, self.finish_reason)

    def _apply_spans(self, spans: list[tuple[str, int, int]], newest: int) -> int:
        """Versions of the whole attempt as its last report says; returns its number of tokens."""
        versions, count = self._attempt[2], len(self._attempt[0])
        exact: list[int] = []
        for label, start, end in spans:
            if start != len(exact) or not start <= end <= count:
                raise self._wrong(f"{count} tokens came with the versions of tokens {start} to {end}")
            exact += [self._version(label, newest)] * (end - start)
        if len(exact) != count:
            raise self._wrong(f"{count} tokens came with the versions of {len(exact)}")
        if exact != sorted(exact) or (exact and self.versions and exact[0] < self.versions[-1]):
            raise self._wrong("versions decrease within the output")
        versions[:] = exact
        return count

    def _version(self, label: str, newest: int) -> int:
        version = int(label) if label.isascii() and label.isdecimal() and len(label) < 19 else -1
        if not 0 <= version <= newest:
            raise ForeignWeights(
                f"it serves weights '{label}' while this run is at version {newest}: it was started anew, or another"
                " trainer updates it too"
            )
        return version

    def _wrong(self, what: str) -> GenerationError:
        return GenerationError(f"request '{self.request.request_id}': the server's answer cannot be used: {what}")
