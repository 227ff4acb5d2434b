"""What servers have generated so far for one request, put together from their reports.

A report holds the tokens since the last one, with log-probabilities; the last report of an attempt also says exactly
which tokens belong to which weights. A server that is lost gives no last report: then those tokens are kept whose
version is certain, because the reports before and after them carry the same one.

Promises: the three lists always fit together; versions never decrease; a report that contradicts itself, or weights
that are not this run's, are errors and never training data.
"""

from __future__ import annotations

import math
from typing import Any

from datamodules.inference.protocol import GenerationError, GenerationRequest, GenerationResponse


class ForeignWeights(GenerationError):
    """A server answered with weights that this run did not give it: it was restarted, or somebody else updates it."""


class Output:
    """The output of `request`: `begin` an attempt, `add` reports until it returns True, or `keep` what is certain."""

    def __init__(self, request: GenerationRequest) -> None:
        self.request = request
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

    def add(self, report: dict[str, Any], newest: int, incremental: bool) -> bool:
        """Takes a report in; True when it is the last of the attempt, whose tokens then count.

        Args:
            newest: the newest version any server was given.
            incremental: reports hold new tokens only; otherwise all of the attempt's.

        Raises:
            ForeignWeights: it carries weights that are not this run's.
            GenerationError: it contradicts itself.
        """
        meta = report["meta_info"]
        tokens, logprobs, versions = self._attempt
        known, ended = len(tokens), meta.get("finish_reason")
        fresh = slice(0, None) if incremental else slice(known, None)
        pairs = (meta.get("output_token_logprobs") or [])[fresh]
        ids = report["output_ids"][fresh]
        if known + len(ids) > meta["completion_tokens"] and ended:
            ids, pairs = [], []  # the last report of an aborted request repeats the last token
        if len(pairs) != len(ids) or any(pair[1] != one for pair, one in zip(pairs, ids)):
            raise self._wrong(f"{len(ids)} tokens came with the log-probabilities of {len(pairs)} others")
        if not all(pair[0] is not None and math.isfinite(pair[0]) for pair in pairs):
            raise self._wrong("a log-probability is not finite")
        label = self._version(meta.get("weight_version"), newest)
        tokens += ids
        logprobs += [pair[0] for pair in pairs]
        versions += [label] * len(ids)
        if label == self._label and self._certain == known:
            self._certain = len(tokens)
        self._label = label
        if not ended:
            return False
        self._certain = self._apply_spans(meta.get("weight_versions"), newest)
        self.keep()
        self.finish_reason = str(ended.get("type", ended)) if isinstance(ended, dict) else str(ended)
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

    def _apply_spans(self, spans: list[dict[str, Any]] | None, newest: int) -> int:
        """Versions of the whole attempt as its last report says; returns its number of tokens."""
        versions, count = self._attempt[2], len(self._attempt[0])
        exact: list[int] = []
        for span in spans or []:
            exact += [self._version(span["version"], newest)] * (span["end"] - span["start"])
        if len(exact) != count:
            raise self._wrong(f"{count} tokens came with the versions of {len(exact)}")
        if exact != sorted(exact) or (exact and self.versions and exact[0] < self.versions[-1]):
            raise self._wrong("versions decrease within the output")
        versions[:] = exact
        return count

    def _version(self, label: Any, newest: int) -> int:
        try:
            version = int(label)
        except (TypeError, ValueError):
            version = -1
        if not 0 <= version <= newest:
            raise ForeignWeights(
                f"it serves weights '{label}' while this run is at version {newest}: it was started anew, or another"
                " trainer updates it too"
            )
        return version

    def _wrong(self, what: str) -> GenerationError:
        return GenerationError(f"request '{self.request.request_id}': the server's answer cannot be used: {what}")
