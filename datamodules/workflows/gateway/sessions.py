"""A session: the calls of one agent during one episode, within a budget.

Promises: every reply is sampled by the episode's engine from the prompt of its own call, and recorded as it was
sampled, once the client can have it; a call that its client gave up is neither recorded nor counted as a turn, and when
it is repeated is one call (see `repeats.py`). Once it has ended nothing of it changes: what rewards see is what is
trained. What goes wrong in the engine ends the session, as a fault and not as a bad answer.
"""

from __future__ import annotations

import asyncio
import functools
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from app import checks
from app.batch import CALL_REWARD, UNTRAINABLE_CALLS, Trajectory
from app.pictures import Picture
from datamodules.conversations.chat_template import Chat, Message
from datamodules.inference.protocol import GenerationRequest
from datamodules.inference.reply_text import ReplyText, bytes_of, decode_of
from datamodules.prompts.base import Prompt
from datamodules.workflows.base import EpisodeEngine, to_trajectory
from datamodules.workflows.gateway.errors import RequestError, refused
from datamodules.workflows.gateway.history import Bodies, Kept
from datamodules.workflows.gateway.protocols import fields, servable, structured
from datamodules.workflows.gateway.protocols.base import Asked, Sampled
from datamodules.workflows.gateway.protocols.images import SessionImages
from datamodules.workflows.gateway.repeats import Repeats
from datamodules.workflows.gateway.replies import Parser, Piece, Reading, as_message, on_this_loop, shown
from datamodules.workflows.gateway.rewards import Exchange, Rewards
from datamodules.workflows.gateway.transcript import Call, Plan, Transcript
from datamodules.workflows.response_template import ResponseTemplate, TemplateCalls

OnText = Callable[[int, Piece], None]
"""Called on the session's event loop with the number of a choice and what it says next."""

_RETRIED = (408, 409, 429)  # and from 500 on: what clients send again after
_LONG = 1 << 13  # characters; some ms of work


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


class Session:
    """One agent's calls.

    Args:
        engine: of the episode.
        chat: the model's template.
        sampling, budget: see there.
        parser: finds the calls of tools in a reply's text.
        name, key: its id and key; both are drawn where they are not given.
        show_tools: whether the model is shown the tools of requests; if not, the agent's own messages tell of them.

    Attributes:
        id: part of the URL. key: what a client must show. touched: when it last asked or was answered, by
            `time.monotonic`.
        fault: why the engine could not answer; None while it can. exhausted: whether a call was beyond the budget.
        asked: number of the requests that reached it.
        misfit: what was refused as the model's template hides it, whatever the agent asks; "" for nothing.
        refused: what was refused as such requests are not served, or not heard; "" for nothing, and once a later one
            was served.
        bodies: by which requests are read. rewards: what was posted. exchanges: what was asked and answered.
        ended: set when the agent is done. repeats: which calls run, and who has their answers.
        counts: `abandoned_calls` were given up by the client, or ended with the session, while they were sampled,
            `untaken_calls` by the client once they were complete; `repeated_calls` were answered with a reply that had
            been sampled before; of `overridden_calls` something was passed over; of `prompted_calls` the model was told
            what it cannot be held to; `clamped_calls` asked for more tokens than `max_new_tokens`; of `nameless_calls`
            the template does not show which of the users said what; calls of tools.
    """

    def __init__(
        self,
        engine: EpisodeEngine,
        chat: Chat,
        sampling: servable.Sampling,
        budget: Budget,
        parser: Parser,
        name: str | None = None,
        key: str | None = None,
        show_tools: bool = True,
    ) -> None:
        self.id = name or secrets.token_hex(8)
        self.key = key or secrets.token_urlsafe(32)
        self.touched = time.monotonic()
        self.fault: Exception | None = None
        self.exhausted = False
        self.misfit = self.refused = ""
        self.asked = 0
        self.bodies, self.rewards = Bodies(), Rewards()
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
        self._decode = decode_of(engine.tokenizer)
        self._bytes_of = bytes_of(engine.tokenizer)
        self._images = SessionImages(engine.image_processor)
        self.repeats = Repeats()
        self._chat, self._show_tools = chat, show_tools
        self._tools: dict[str, list[dict[str, Any]] | None] = {}  # as they are written: clients send them each time
        self.transcript = Transcript(chat, self._decode, show_calls=show_tools or chat.visible.calls(False))

    async def reply(self, asked: Asked, on_text: OnText | None = None, name: str = "", same: bytes = b"") -> list[Call]:
        """The replies that are asked for, recorded. Raises RequestError.

        Args:
            asked: with all messages of its conversation, as by `continued`.
            on_text: told what the replies say while they are sampled, and the rest before this returns.
            name: id of the first reply, of `new_name`; "" for a new one.
            same: what is equal in equal requests, b"" for a request that is equal to none.
        """
        before, temperature = self.refused, asked.temperature
        temperature = self._sampling.temperature if temperature is None else temperature
        try:
            servable.check_sampling(asked, temperature, self._engine, self._sampling.untrainable)
        except RequestError as error:
            self.refused = str(error)
            raise
        self._spend(asked.n)
        if asked.demands:
            self.counts["prompted_calls"] += asked.n
        sampling = asyncio.ensure_future(self._answers(asked, temperature, name or self.new_name(), on_text))
        calls = await self._awaited(sampling, asked.n, same)
        self.refused = "" if self.refused == before else self.refused  # the agent has gone on without that
        return calls

    async def _answers(self, asked: Asked, temperature: float, name: str, on_text: OnText | None) -> Exchange:
        """The replies, which nobody has yet. Raises RequestError."""
        asked = replace(
            asked, messages=await self._images.read(asked.messages), tools=self._images.quoted_tools(asked.tools)
        )
        pictures = self._images.seen(asked.messages)
        with refused():
            plan = self._plan(asked)
            with _ends_the_run(self):
                structured.check_shown(asked, plan.text)
                servable.check_systems(self._chat, asked.messages, self._show_tools and bool(asked.tools))
            tokens = await self._tokens_of(plan)
            placed = self._images.placed(tokens, pictures)
        prompt = Kept(plan.text, tokens, plan.base, plan.begins)
        given = len(placed["tokens"])
        room = self._engine.max_context - given
        if room < 1:
            raise RequestError(
                f"messages: this model's maximum context length is {self._engine.max_context} tokens, and they are"
                f" {given}, which leaves no room for a reply; shorten the conversation",
                param="messages",
                code="context_length_exceeded",
            )
        most = min(room, self._sampling.max_new_tokens, asked.max_tokens or room)
        if (asked.max_tokens or 0) > self._sampling.max_new_tokens:
            self.counts["clamped_calls"] += asked.n
        if servable.hides_speakers(self._chat, asked.messages):
            self.counts["nameless_calls"] += asked.n
        engine = self._engine  # a seed that is the same in every episode must not make a group's samples alike
        requests = [
            GenerationRequest(
                **{**placed, "tokens": list(placed["tokens"])},
                max_new_tokens=most,
                temperature=temperature,
                stop_token_ids=engine.ends.ids,
                seed=None if asked.seed is None else engine.seed(("call", asked.seed, k)),
                stop_texts=asked.stop,
                shaping=asked.shaping,
            )
            for k in range(asked.n)
        ]
        parser = self._parser if asked.tools else None
        if asked.tools and isinstance(parser, ResponseTemplate):
            parser = parser.of_tools(asked.tools)  # whose schemas give its arguments types
        calls = await asyncio.gather(
            *(
                self._sample(
                    name if k == 0 else f"{name}-{k}",
                    one,
                    prompt,
                    pictures,
                    len(asked.messages),
                    parser,
                    asked.shaping is None and temperature > 0,
                    None if on_text is None else functools.partial(on_text, k),
                )
                for k, one in enumerate(requests)
            )
        )
        return self._exchange(asked, plan, calls)

    def heard(self, body: dict[str, Any]) -> dict[str, Any]:
        """A request as this session takes it, whatever its protocol."""
        if not self._sampling.override:
            return body
        left = fields.without_sampling(body)
        if fields.said(left) != fields.said(body):
            self.counts["overridden_calls"] += 1
        return left

    def new_name(self) -> str:
        """Of a reply; unique."""
        return f"{self.id}-{secrets.token_hex(6)}"

    async def again(self, same: bytes, retried: bool) -> list[Call] | None:
        """The replies that were sampled for an equal request, when this one repeats it; None when it is a new one.

        Args:
            same: as in `reply`, which comes next where this is None.
            retried: the client says that it gave an equal request up.
        """
        known = await self.repeats.again(same, retried)
        if known is None:
            return None
        if self.ended.is_set():
            raise _over()
        self.counts["repeated_calls"] += len(known.calls)
        if not any(one is known for one in self.exchanges):
            self.counts["untaken_calls"] -= len(known.calls)
            self._record(known)
        self.repeats.taken(same, known)
        return known.calls

    def not_taken(self, same: bytes, calls: list[Call]) -> None:
        """The client left before it had the whole answer: no training sequences, unless somebody else asked for it."""
        if not self.repeats.is_lost(calls) or self.ended.is_set():
            return
        known = self.exchanges.pop(next(k for k, one in enumerate(self.exchanges) if one.calls is calls))
        for call in calls:
            self.transcript.remove(call)
        self._set_aside(same, known)

    async def end(self) -> None:
        """No call is answered any more, and none recorded; those that run are given up. Idempotent."""
        self.ended.set()
        await self.repeats.cancel()

    def _record(self, exchange: Exchange) -> None:
        self.exchanges.append(exchange)
        for call in exchange.calls:
            self.transcript.add(call, None if exchange.said is None else exchange.said.message)
        self.touched = time.monotonic()

    def _set_aside(self, same: bytes, exchange: Exchange) -> None:
        self.counts["untaken_calls"] += len(exchange.calls)
        self.repeats.left(same, exchange)

    def continued(self, asked: Asked) -> Asked:
        """The request with all messages of its conversation, its demands told. Raises RequestError when that is not
        known, and for demands that are refused."""
        said: list[Message] = []
        if asked.continues:
            one = next((one for one in self.exchanges if one.calls[0].id == asked.continues), None)
            if one is None:
                raise RequestError(
                    "previous_response_id: no answer of this session has it; send the conversation as input",
                    param="previous_response_id",
                    code="previous_response_not_found",
                )
            said = [*structured.untold(one.messages[one.before :], one.told), one.calls[0].message]
            fields.check_made(asked.unmade, said)
        whole = replace(asked, messages=[*asked.before, *said, *asked.messages])
        return structured.told(whole, self._sampling.override)

    async def count(self, messages: Sequence[Message], tools: list[dict[str, Any]] | None) -> int:
        """Tokens of the prompt that `reply` would send. Raises RequestError."""
        tools = self._images.quoted_tools(self._shown_tools(messages, tools))
        messages = await self._images.read(messages)
        with refused():
            tokens = await self._tokens_of(self.transcript.count(messages, tools))
            return len(self._images.placed(tokens, self._images.seen(messages))["tokens"])

    @property
    def held_s(self) -> float:
        """Seconds of the episode so far that no deadline counts."""
        return self._engine.held_s

    @property
    def untrained(self) -> int:
        """Number of the replies that cannot be trained on."""
        return sum(not call.is_trained for call in self.transcript.calls)

    def trajectories(self, prompt: Prompt, reward: float, recorded: bool = False) -> list[Trajectory]:
        """The training sequences: a call each, with loss on what was sampled in it.

        Args:
            prompt, reward: of the episode.
            recorded: those that cannot be trained on too, without loss and with `untrainable` in their metadata.
        """
        calls = self.transcript.calls
        about = {"turns": len(calls), **self.counts}
        about |= {f"drift_{cause}": count for cause, count in self.transcript.drift.items()}
        about |= {"quoted_results": self.transcript.quoted} if self.transcript.quoted else {}
        if self.untrained:
            about[UNTRAINABLE_CALLS] = self.untrained
        found = []
        for k, call in enumerate(calls):
            if not (call.is_trained or recorded):
                continue
            made = len(call.response.tokens)
            placed = self._images.placed(call.prompt.tokens, call.pictures)
            request = GenerationRequest(**placed, max_new_tokens=made, temperature=call.temperature)
            one = to_trajectory(prompt, request, call.response, k)
            one.reward, one.metadata = reward, dict(about)
            if call.id in self.rewards.calls:
                one.metadata[CALL_REWARD] = self.rewards.calls[call.id]
            if not call.is_trained:
                one.loss_mask = torch.zeros_like(one.loss_mask)
                one.metadata["untrainable"] = True
            found.append(one)
        return found

    def new_text(self) -> ReplyText:
        """For `sampled`, of a reply whose tokens come in pieces."""
        return ReplyText(self._decode)

    def sampled(self, tokens: Sequence[int], logprobs: Sequence[float], said: ReplyText | None = None) -> list[Sampled]:
        """Each token as clients are told of it; `said` has heard those before, and hears these."""
        found, said = list[Sampled](), said or self.new_text()
        for token, value in zip(tokens, logprobs, strict=True):
            data = self._bytes_of(token)
            text = self._decode([token]) if data is None else data.decode("utf-8", "replace")
            found.append(Sampled(text, value, data, len(said.add([token]))))
        return found

    def text(self) -> str:
        """What the last reply said; "" before the first, and of one that only calls tools."""
        return str(self.transcript.calls[-1].message["content"] or "") if self.transcript.calls else ""

    def _plan(self, asked: Asked) -> Plan:
        raw = asked.prompt
        if raw is None:
            return self.transcript.prompt(asked.messages, self._shown_tools(asked.messages, asked.tools))
        if isinstance(raw, str):
            return self.transcript.extended(raw)
        known = self._engine.vocab_size
        if not all(0 <= token < known for token in raw):
            raise RequestError(f"prompt: token ids must be from 0 to {known - 1}", param="prompt")
        return self.transcript.of_ids(raw)

    async def _tokens_of(self, plan: Plan) -> list[int]:
        """Other sessions go on while long texts are tokenized, without Python's lock."""
        if plan.unknown < _LONG:
            return plan.tokens(self._chat.encode)
        return await asyncio.to_thread(plan.tokens, self._chat.encode)

    def _shown_tools(
        self, messages: Sequence[Message], tools: list[dict[str, Any]] | None
    ) -> list[dict[str, Any]] | None:
        """Those the template is given. Raises RequestError where it would leave them or earlier calls out, and for more
        messages than fit: each is a token at least, and need not be rendered, while other sessions wait, to know it."""
        if len(messages) > self._engine.max_context:
            raise RequestError(
                f"messages: this model's maximum context length is {self._engine.max_context} tokens, and they are"
                f" {len(messages)} messages; shorten the conversation",
                param="messages",
                code="context_length_exceeded",
            )
        with _ends_the_run(self):
            servable.check_tools(self._chat, messages, tools, self._show_tools)
        return tools if self._show_tools else None

    def _spend(self, n: int) -> None:
        self.touched = time.monotonic()
        if self.fault is not None:
            raise RequestError("the engine failed; the session is over", status=503, code="engine_failed")
        if self.ended.is_set():
            raise _over()
        most = self._budget.max_tokens
        if self._started + n > self._budget.max_calls or (most is not None and self._tokens >= most):
            self.exhausted = True
            what = f"{self._budget.max_calls} calls" if most is None or self._tokens < most else f"{most} tokens"
            raise RequestError(f"the session may use {what}, which are spent", code="session_budget_exceeded")
        self._started += n

    async def _awaited(self, sampling: asyncio.Future[Exchange], n: int, same: bytes) -> list[Call]:
        """The `n` replies, recorded, unless their client leaves first."""
        same = same or secrets.token_bytes(16)
        self.repeats.begin(same, sampling)
        try:
            exchange = await sampling
        except asyncio.CancelledError:
            if self.ended.is_set():
                self.counts["abandoned_calls"] += n
                if sampling.cancelled() and not asyncio.current_task().cancelling():  # type: ignore[union-attr]
                    raise _over() from None
            elif sampling.done() and not sampling.cancelled() and sampling.exception() is None:
                self._set_aside(same, sampling.result())
            else:
                self.counts["abandoned_calls"] += n
                self.repeats.given_up(same)
            raise
        except RequestError as error:
            if error.status >= 500 or error.status in _RETRIED:
                self.repeats.given_up(same)
            raise
        else:
            if self.ended.is_set():  # in the same moment
                self.counts["abandoned_calls"] += n
                raise _over()
            self._record(exchange)
            self.repeats.taken(same, exchange)
            return exchange.calls
        finally:
            self.repeats.end(same, sampling)
            self.touched = time.monotonic()

    def _exchange(self, asked: Asked, plan: Plan, calls: list[Call]) -> Exchange:
        """What is kept of a request and its answer."""
        said = self.transcript.keep(asked.messages, plan, calls[0].prompt) if asked.prompt is None else None
        written = repr(asked.tools)  # by which 1 and 1.0 differ
        tools = self._tools.setdefault(written, asked.tools)
        return Exchange(said, tools, calls, len(asked.before), structured.added(asked))

    async def _sample(
        self,
        name: str,
        request: GenerationRequest,
        prompt: Kept,
        pictures: tuple[Picture, ...],
        messages: int,
        parser: Parser | None,
        is_trained: bool,
        say: Callable[[Piece], None] | None,
    ) -> Call:
        opened = self._chat.opened(request.tokens)
        apart = messages > 0  # a prompt that is no conversation is gone on with, whatever that is
        opening = "".join(prompt.text.rpartition(opened)[1:]) if opened and apart else ""
        reading = Reading(self._decode, request.stop_texts, parser, request.stop_token_ids, opened, apart)
        if say is not None:
            request.on_tokens = on_this_loop(reading, say)
        async with self._free:
            try:
                response = await self._engine.generate(request)
            except Exception as error:
                self.fault = error
                raise RequestError(
                    "the engine failed; the session is over", status=503, code="engine_failed"
                ) from error
        self._tokens += len(response.tokens)
        tokens = response.tokens
        ended = bool(tokens) and tokens[-1] in request.stop_token_ids
        seen = shown(tokens, ended, request.stop_texts, self._decode)
        rest = self._decode(tokens)[len(seen.text) :]
        stop = next((one for one in request.stop_texts if rest.startswith(one)), "")
        end = self._decode(tokens[-1:]) if ended and seen.tokens == len(tokens) else ""
        if isinstance(parser, TemplateCalls):
            parser = parser.ended_by(end)
        message, malformed, thought = as_message(name, seen.text, parser, opened, apart, not ended)
        for what, count in (("malformed_calls", malformed), ("tool_calls", len(message.get("tool_calls", ())))):
            if count:
                self.counts[what] += count
        if say is not None:
            said = str(message["content"] or "")
            say(reading.finish(said, tokens[: seen.tokens], response.logprobs[: seen.tokens]))
        whole = seen.text[: seen.whole]
        kept = seen.tokens
        heard = (whole, end, kept, message, stop, is_trained, pictures, thought, opening)
        return Call(name, prompt, len(request.tokens), request.temperature, response, messages, *heard)


@contextmanager
def _ends_the_run(session: Session) -> Iterator[None]:
    """For what the model's template hides: every episode would meet it."""
    try:
        yield
    except RequestError as error:
        session.misfit = str(error)
        raise


def _over() -> RequestError:
    return RequestError("the session has ended", status=403, code="session_ended")
