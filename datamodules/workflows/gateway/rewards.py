"""What an episode and its calls are worth, as it was posted to the session.

Promises: a reward is a finite number of the episode or of one call that the client was given; the last one posted for
either counts, so that a client may try again; everything else is refused by its field.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from app.batch import LARGEST_REWARD
from datamodules.conversations.chat_template import Message
from datamodules.workflows.gateway.errors import RequestError
from datamodules.workflows.gateway.history import Said, in_parts
from datamodules.workflows.gateway.transcript import Call


@dataclass(frozen=True)
class Exchange:
    """A request that was answered.

    Attributes:
        said: the last message that the client sent, which knows those before it; None for a prompt without messages.
        tools: what the client sent.
        calls: the choices it was given.
        before: number of messages in front that later requests, which go on with this one, do not see.
        told: what was added to the first message for this request alone.
    """

    said: Said | None
    tools: list[dict[str, Any]] | None
    calls: list[Call]
    before: int = 0
    told: str = ""

    @property
    def messages(self) -> list[Message]:
        """What the client sent; a prompt without messages is one of the user's."""
        if self.said is None:
            return [{"role": "user", "content": self.calls[0].prompt.text}]
        return self.said.conversation()


@dataclass
class Rewards:
    """Those of one session.

    Attributes:
        episode: None so far. calls: by the call's id, on top of the episode's.
    """

    episode: float | None = None
    calls: dict[str, float] = field(default_factory=dict)

    @property
    def total(self) -> float | None:
        """The episode's own; 0.0 where only calls have rewards, None where nothing has."""
        return 0.0 if self.episode is None and self.calls else self.episode

    def post(self, body: dict[str, Any], exchanges: Sequence[Exchange]) -> None:
        """Takes `{"reward": number}` for the episode, or with `"call"`, the id of a completion, for that call (and
        `"choice"`, where it was asked for several). Raises RequestError."""
        if unknown := sorted(set(body) - {"reward", "call", "choice"}):
            remedy = "leave it out" if "reward" in body else "the field is `reward`"
            raise RequestError(f"{unknown[0][:50]}: not known; {remedy}", param=unknown[0][:50])
        value = body.get("reward")
        if (
            isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= LARGEST_REWARD  # nor NaN
        ):
            raise RequestError(f"reward: must be a finite number of at most {LARGEST_REWARD:g}", param="reward")
        name, choice = body.get("call"), body.get("choice")
        if name is None:
            if choice is not None:
                raise RequestError("choice: has no effect without call; leave it out", param="choice")
            self.episode = float(value)
            return
        given = [one for one in exchanges if isinstance(name, str) and name.endswith(one.calls[0].id)]
        if not given:
            raise RequestError(
                "call: no reply of this session has that id; name that of a completion the client was given",
                param="call",
            )
        calls = given[0].calls
        if choice is None and len(calls) == 1:
            choice = 0
        if isinstance(choice, bool) or not isinstance(choice, int) or not 0 <= choice < len(calls):
            raise RequestError(f"choice: must be the index of one of {len(calls)}", param="choice")
        if not calls[choice].is_trained:
            raise RequestError(
                "call: this reply is not trained on, as its request asked for what cannot be (untrainable: serve); post"
                " the episode's reward, without call",
                param="call",
            )
        self.calls[calls[choice].id] = float(value)

    def add(self, call: str, value: float) -> None:
        """Adds what a reward says of a single call, by its id, to what was posted for it."""
        self.calls[call] = self.calls.get(call, 0.0) + value


def shown(exchanges: Sequence[Exchange]) -> list[dict[str, Any]]:
    """The transcript as rewards get it, a dictionary a call in the order of the answers: `id`, `messages` and `tools`
    as the client sent them, `reply`, the message it was given (with its `tool_calls`), and `finish_reason`."""
    return [
        {
            "id": call.id,
            "messages": [in_parts(message) for message in one.messages],
            "tools": one.tools or [],
            "reply": call.message,
            "finish_reason": call.response.finish_reason,
        }
        for one in exchanges
        for call in one.calls
    ]
