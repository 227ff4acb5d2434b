"""What the gateway asks of a provider's protocol, and what it hands it: the same for all of them.

Promises: what a request asks for is told in the words of no provider; nothing here knows HTTP or sessions. A streamed
answer is written piece by piece, and holds the same as one that is sent whole.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from datamodules.conversations.chat_template import Message
from datamodules.inference.protocol import Shaping
from datamodules.workflows.gateway.errors import RequestError
from datamodules.workflows.gateway.transcript import Call


@dataclass(frozen=True)
class Demand:
    """Something a model cannot be held to.

    Attributes:
        param: the request's field.
        problem: why it is refused, and the remedy.
        words: what the model can be told in its place.
    """

    param: str
    problem: str
    words: str


@dataclass(frozen=True)
class Asked:
    """What a request asks for.

    Attributes:
        model: the name that was asked for, "" for none; said back and nothing else.
        messages: for the chat template; contents are text. Those of the whole conversation, once it was `continued`.
        prompt: in their place: text or token ids that the model goes on with, by no template.
        tools: as Chat Completions has them (`{"type": "function", "function": ...}`), None for none.
        max_tokens: most of a reply, None for no limit of the client's.
        temperature: None for the session's.
        stop: texts that end a reply.
        seed: of the first choice.
        shaping: None for replies that are sampled from the model as it is.
        n: choices.
        logprobs: of the replies' tokens are wanted.
        stream: events instead of one answer.
        before: messages in front of all that belong to this request alone.
        continues: the `name` of the answer whose conversation this one goes on with, "" for none.
        unmade: where the request holds results of calls that none of its `messages` made, by the ids of these calls:
            the conversation it goes on with must have.
        own: what the protocol needs to answer, by its own names.
        demands: what the model is to be held to, and cannot be.
    """

    model: str
    messages: list[Message]
    tools: list[dict[str, Any]] | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    stop: tuple[str, ...] = ()
    seed: int | None = None
    n: int = 1
    logprobs: bool = False
    stream: bool = False
    prompt: str | list[int] | None = None
    before: list[Message] = field(default_factory=list)
    continues: str = ""
    unmade: dict[str, str] = field(default_factory=dict)
    own: dict[str, Any] = field(default_factory=dict)
    shaping: Shaping | None = None
    demands: tuple[Demand, ...] = ()


class Sampled(NamedTuple):
    """A token of a reply.

    Attributes:
        text: of it alone. logprob: in nats.
        data: its bytes; None where they are not known.
        size: characters that are whole with it and were not before.
    """

    text: str
    logprob: float
    data: bytes | None
    size: int

    @property
    def bytes(self) -> list[int] | None:
        """As OpenAI's protocols have them."""
        return None if self.data is None else list(self.data)


class EventWriter(ABC):
    """A streamed answer as the bytes to send, in this order: `begin`; for each choice `text` as often as there is some,
    then `end`; `finish`. Choices may be mixed. `fail` in place of whatever would be next."""

    @abstractmethod
    def begin(self) -> bytes:
        """Before anything was sampled."""

    @abstractmethod
    def text(self, choice: int, piece: str, tokens: Sequence[Sampled]) -> bytes:
        """More of what is said, and, where log-probabilities are wanted, the tokens sampled for it.

        `piece` is "" for tokens that say nothing aloud, such as those of calls.
        """

    @abstractmethod
    def end(self, choice: int, call: Call) -> bytes:
        """The choice is complete: its calls of tools, which are no text, and why it ended."""

    @abstractmethod
    def finish(self, calls: Sequence[Call]) -> bytes:
        """All choices are."""

    @abstractmethod
    def fail(self, problem: RequestError) -> bytes:
        """What went wrong once the answer had begun."""


class WireProtocol(ABC):
    """One way to ask for replies.

    Attributes:
        path: behind `/v1/`.
        alive: what says in a stream that its call is, and is no event.
    """

    path: str
    alive: bytes = b": the call is alive\n\n"

    def whole(self, body: dict[str, Any], calls: Sequence[Call]) -> dict[str, Any]:
        """The request, with what it names only of the session's `calls` in its place."""
        return body

    @abstractmethod
    def parse(self, body: dict[str, Any]) -> Asked:
        """The request in `body`, which came from JSON. Raises RequestError naming the field."""

    @abstractmethod
    def answer(
        self, asked: Asked, name: str, calls: Sequence[Call], tokens: Sequence[Sequence[Sampled]] | None
    ) -> dict[str, Any]:
        """The whole answer.

        Args:
            name: unique in the session; clients see it with the protocol's prefix.
            calls: one a choice.
            tokens: of each choice, where log-probabilities are wanted.
        """

    @abstractmethod
    def events(self, asked: Asked, name: str) -> EventWriter:
        """The same as events."""

    @abstractmethod
    def error(self, problem: RequestError) -> dict[str, Any]:
        """A refusal in this protocol's shape."""
