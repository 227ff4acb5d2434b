"""Serves one request from a fleet: from place to place until it is complete, with everything generated kept.

Promises: log-probabilities and versions of all places are joined, token by token; a place that is lost costs the tokens
it had not reported (or whose version is not certain) and nothing else; a request that ends for any other reason is
aborted at its server; every end that is not a completion is a GenerationError that says why.
"""

from __future__ import annotations

import asyncio
import base64
import io
import logging
import uuid
from contextlib import aclosing
from functools import lru_cache
from typing import Any

from PIL import Image

from app.pictures import Picture
from datamodules.inference.protocol import GenerationError, GenerationRequest, GenerationResponse, Shaping
from datamodules.inference.sglang.client import ServerLost, ServerRefused
from datamodules.inference.sglang.experts import ExpertLayout
from datamodules.inference.sglang.fleet import Fleet
from datamodules.inference.sglang.output import ForeignWeights, Output
from datamodules.inference.sglang.server_state import Flight

_log = logging.getLogger(__name__)
_PROMPT_REPORT_TOKENS = 4  # where somebody reads along, or a text may end the reply: what is sampled behind it is lost
_MOST_REPORTS = 16  # of one request at a server whose reports repeat everything
_KNOWN_PICTURES = 256  # encoded, by which the samples of a group and of its neighbours are served
_OVERLOADED = (429, 502, 503, 504)  # or ending


class Pending:
    """A request being served; `expire` ends it with a message."""

    def __init__(
        self, request: GenerationRequest, vocab_size: int, began: float, layout: ExpertLayout | None = None
    ) -> None:
        self.output = Output(request, vocab_size, layout)
        self.began = began
        self.task: asyncio.Task[Any] | None = asyncio.current_task()
        self.flight: Flight | None = None
        self.failure = ""

    def expire(self, message: str) -> None:
        if not self.failure and self.task is not None:
            self.failure = message
            self.task.cancel()


async def complete(fleet: Fleet, pending: Pending, report_tokens: int, max_attempts: int) -> GenerationResponse:
    """The whole response.

    Args:
        report_tokens: new tokens between two reports of a server.
        max_attempts: so many places may be lost before the request fails: it may be what ends them.

    Raises:
        GenerationError: refused by a server, or that many places were lost.
    """
    output, lost = pending.output, 0
    name = output.request.request_id
    while True:
        flight = pending.flight = await fleet.acquire(output.affinity(), name)
        before = len(output.tokens)
        try:
            await _fly(fleet, flight, output, report_tokens)
        except ServerLost as error:
            reason = str(error)
            flight.server.suspect(str(error))
        except ForeignWeights as error:
            reason = str(error)
            flight.server.meet(error.label)
        except ServerRefused as error:
            if flight.adapter is not None and flight.adapter.label in str(error):
                flight.server.distrust(f"it no longer has adapter '{flight.adapter.label}'")
            elif error.status not in _OVERLOADED:
                raise GenerationError(f"request '{name}' was refused: {error}") from error
            else:
                flight.server.suspect(str(error))
            reason = str(error)
        except _TakenAway as error:
            reason = str(error)
        else:
            if output.finish_reason != "abort" and _is_complete(output):
                return output.response()
            if output.finish_reason != "abort":
                # An end of sequence that the request does not name: workflows' requests name all that end a reply of
                # the model (see workflows/turn_ends), so this one is to go on, or the server's model names others.
                if len(output.tokens) == before:
                    raise GenerationError(f"request '{name}': {flight.server.client.url} ended it without a token")
                fleet.tell_of_end(flight.server, output.tokens[-1])
                continue
            reason = f"{flight.server.client.url} aborted it"
        finally:
            pending.flight = None
            fleet.release(flight)
        kept, lost = output.keep(), lost + 1
        fleet.counts["moved"] += 1
        fleet.counts["kept_tokens"] += kept
        _log.info(
            "request '%s' goes on elsewhere with %d tokens (%d of this place): %s",
            name,
            len(output.tokens),
            kept,
            reason,
        )
        if _has_all(output):  # only the last report was lost
            return output.response()
        if lost == max_attempts:
            raise GenerationError(f"request '{name}': {lost} places were lost while it ran, the last one: {reason}")


class _TakenAway(Exception):
    """The fleet took the place away; the message says why."""


async def _fly(fleet: Fleet, flight: Flight, output: Output, report_tokens: int) -> None:
    """One attempt, in a task of its own, so that the fleet can end it without ending the request."""
    reason = flight.taken_away
    if reason:
        raise _TakenAway(reason)
    flight.task = asyncio.create_task(_attempt(fleet, flight, output, report_tokens))
    try:
        await flight.task
    except asyncio.CancelledError:
        current = asyncio.current_task()
        if not flight.taken_away or (current is not None and current.cancelling()):
            raise
        raise _TakenAway(flight.taken_away) from None


async def _attempt(fleet: Fleet, flight: Flight, output: Output, report_tokens: int) -> None:
    server, request = flight.server, output.request
    if flight.adapter is None:
        version, known = server.version, fleet.target.versions
    else:  # it goes on with that to its end, and reports carry the label of the model below
        version = flight.adapter.version
        known = {server.below: version}
    output.begin(version)
    name = f"{uuid.uuid4().hex}:{request.request_id}"
    body = request_body(output, name, report_tokens, server.incremental)
    if flight.adapter is not None:
        body["lora_path"] = flight.adapter.label
    over = hurried = False
    try:
        async with aclosing(server.client.generate(body)) as reports:
            async for report in reports:
                server.alive()
                complete = output.add(report, known, server.incremental)
                if output.stop_seen and not hurried:  # and not complete, which begins anew
                    hurried = True  # its last report, which says whose the tokens are, is all that is missing
                    fleet.abort(flight, name)
                if complete:
                    said = output.last
                    assert said is not None
                    over = bool(said.ended)
                    if not output.stopped and said.ended == "abort" and said.status:
                        raise ServerRefused(f"{server.client.url}/generate: {said.status}: {said.message}", said.status)
                    fleet.counts["prompt_tokens"] += said.prompt_tokens
                    fleet.counts["cached_tokens"] += said.cached_tokens
                    return
        raise ServerLost(f"{server.client.url}/generate: the answer ended without its last report")
    except ServerRefused:
        over = True
        raise
    finally:
        if not over:
            fleet.abort(flight, name)


def request_body(output: Output, name: str, report_tokens: int, incremental: bool) -> dict[str, Any]:
    """What /generate takes for the rest of a request: plain sampling from the whole vocabulary, unless it is shaped."""
    request = output.request
    shaping = request.shaping or Shaping()
    if request.on_tokens is not None or request.stop_texts:
        report_tokens = min(report_tokens, _PROMPT_REPORT_TOKENS)
    interval = report_tokens if incremental else max(report_tokens, -(-output.left // _MOST_REPORTS))
    sampling: dict[str, Any] = {
        "max_new_tokens": output.left,
        "temperature": request.temperature,
        "top_p": shaping.top_p,
        "top_k": shaping.top_k,
        "min_p": shaping.min_p,
        "frequency_penalty": shaping.frequency_penalty,
        "presence_penalty": shaping.presence_penalty,
        "repetition_penalty": shaping.repetition_penalty,
        "n": 1,
        "stream_interval": interval,
    }
    if shaping.logit_bias:
        sampling["logit_bias"] = {str(token): bias for token, bias in shaping.logit_bias}
    if request.stop_token_ids:
        sampling["stop_token_ids"] = list(request.stop_token_ids)
    else:
        sampling["ignore_eos"] = True  # which would switch stop_token_ids off as well
    if request.seed is not None:
        sampling["sampling_seed"] = request.seed % (1 << 31)
    tokens, pictures = output.collapsed()
    shown: dict[str, Any] = {}
    if pictures:
        shown = {"image_data": [encoded_png(one) for one in pictures], "return_prompt_token_ids": True}
    if request.experts_from is not None:
        shown |= {"return_routed_experts": True, "routed_experts_start_len": request.experts_from}
    return {
        "rid": name,
        "input_ids": tokens,
        "sampling_params": sampling,
        "return_logprob": True,
        "stream": True,
        **shown,
    }


@lru_cache(_KNOWN_PICTURES)
def encoded_png(picture: Picture) -> str:
    """Base64 of a PNG file of its pixels, which servers need not resize."""
    held = io.BytesIO()
    Image.fromarray(picture.pixels).save(held, "png")
    return base64.b64encode(held.getvalue()).decode()


def _is_complete(output: Output) -> bool:
    request = output.request
    if _has_all(output):
        return True
    if output.finish_reason == "stop":
        return False
    raise GenerationError(
        f"request '{request.request_id}': the server ended it after {len(output.tokens)} of {request.max_new_tokens}"
        f" tokens with finish reason '{output.finish_reason}'; give the server a longer context (--context-length)"
    )


def _has_all(output: Output) -> bool:
    """Whether nothing is left to generate, whatever the server said of it; the finish reason is set then."""
    if output.stopped or (output.tokens and output.tokens[-1] in output.request.stop_token_ids):
        output.finish_reason = "stop"
    elif not output.left:
        output.finish_reason = "length"
    else:
        return False
    return True
