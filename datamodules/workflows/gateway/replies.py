"""What a client sees of a reply: its thought, text and calls, and nothing from a stop text on; while it is sampled, and
then.

Promises: the pieces of a reply that is sent as it is made are its text as it is sent whole; thoughts, and what may be
the beginning of a call or of a stop text, are held back until it is known; ids are not touched. A token costs as much
late in a reply as early.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from typing import NamedTuple

from app.text import well_formed
from datamodules.conversations.chat_template import Message
from datamodules.inference.reply_text import Decode, ReplyText, cut_at_stop, maybe_stop
from datamodules.workflows.tool_calls import GrowingCalls, ToolCall, begin_of_calls, with_thought

Parser = Callable[[str], list[ToolCall]]

_THOUGHT, _OVER = "<think>", "</think>"


class Piece(NamedTuple):
    """Of a reply.

    Attributes:
        text: said aloud; may be empty.
        tokens, logprobs: sampled for it, or for what is not said aloud, in order; log-probabilities in nats.
    """

    text: str
    tokens: list[int]
    logprobs: list[float]


class Shown(NamedTuple):
    """How a whole reply looks to its client.

    Attributes:
        text: without what ended it.
        whole: how much of it is the text of whole tokens from the first on; all of it, unless a stop text cut it.
        tokens: their number, and that of the token which ended the reply.
    """

    text: str
    whole: int
    tokens: int


def shown(tokens: list[int], ended: bool, stops: Sequence[str], decode: Decode) -> Shown:
    """What is seen of the sampled `tokens`, the last of which ended the reply where it `ended`."""
    text = decode(tokens[:-1] if ended else tokens)
    cut = cut_at_stop(text, stops)
    if cut is None:
        return Shown(text, len(text), len(tokens))
    reply, size, whole, kept = ReplyText(decode), 0, 0, 0
    for count, token in enumerate(tokens, 1):
        size += len(reply.add([token]))
        if size <= cut and not reply.holds:
            whole, kept = size, count
    return Shown(text[:cut], whole, kept)


def end_of_thought(text: str, opened: str = "") -> int | None:
    """Where what is said aloud begins in a reply that begins with a thought; 0 for one that does not, None for one that
    does not close it.

    Args:
        text: what is seen of it.
        opened: the mark of the thought that the prompt has opened: it counts where the reply closes that thought.
    """
    whole = with_thought(opened, text)
    begins = len(whole) - len(whole.lstrip())
    if not whole.startswith(_THOUGHT, begins):
        return 0
    over = whole.find(_OVER, begins)
    if over < 0:
        return None
    rest = whole[over + len(_OVER) :]
    return len(text) - len(rest.lstrip())


def as_message(
    name: str, text: str, parser: Parser | None, opened: str = "", apart: bool = True, cut: bool = False
) -> tuple[Message, int, str]:
    """The reply as clients know it; how many calls in it cannot be read: then all of it stays text; and its beginning,
    up to what is said aloud, which holds its thought: the message's `reasoning_content`.

    Args:
        name: unique; ids of calls hold it.
        text: what is seen of it.
        parser: finds calls; None where no tools were offered.
        opened: the mark of the thought that the prompt has opened.
        apart: whether its thought is no part of its text.
        cut: whether it was cut off: a thought that the prompt has opened goes on to its end, then, unless it calls.
    """
    found: list[ToolCall] = []
    if parser is not None:
        try:
            found = parser(with_thought(opened, text))
        except Exception as error:  # a user's own parser
            found = [ToolCall(error=f"{type(error).__name__}: {error}")]
    malformed = sum(bool(one.error) for one in found)
    aloud = end_of_thought(text, opened) if apart else 0
    if apart and cut and opened and _OVER not in text and not found:
        aloud = None
    begins = len(text) if aloud is None else aloud
    thought = text[:begins].strip().removeprefix(_THOUGHT).removesuffix(_OVER).strip()
    message: Message = {"role": "assistant", "content": text[begins:]} | (
        {"reasoning_content": thought} if thought else {}
    )
    if parser is None or malformed or not found:
        return message, malformed, text[:begins]
    calls = [
        {
            "id": f"call_{name}_{k}",
            "type": "function",
            "function": {
                "name": well_formed(one.name),  # half of a character, which JSON's escapes can say and UTF-8 cannot
                "arguments": well_formed(json.dumps(one.arguments, ensure_ascii=False)),
            },
        }
        for k, one in enumerate(found)
    ]
    ends = begin_of_calls(parser, text, opened)
    said = text[begins:ends]
    before = text[:begins] if said else text[: min(begins, ends)].rstrip()  # one's own may find calls in a thought
    return {**message, "content": said or None, "tool_calls": calls}, 0, before


class Reading:
    """The text of one reply as far as it may be shown.

    Args:
        decode: token ids to text, special tokens included.
        stops: texts at which it ends.
        parser: finds calls; None where no tools were offered.
        ends: tokens that end it, and are no text.
        opened: the mark of the thought that the prompt has opened.
        apart: whether its thought is no part of its text.
    """

    def __init__(
        self,
        decode: Decode,
        stops: Sequence[str],
        parser: Parser | None,
        ends: Sequence[int],
        opened: str = "",
        apart: bool = True,
    ) -> None:
        self._reply = ReplyText(decode)
        self._stops, self._ends = stops, ends
        self._calls = None if parser is None else GrowingCalls(parser, opened)
        self._begin: int | None = None if apart else 0  # of what is said aloud, once that is known
        self._looked = 0  # what is before was looked at for it
        self._thinks, self._closed = bool(opened), False  # whether the reply begins with a thought, that is over
        self._overlap = max(map(len, stops), default=1) - 1  # of what is searched for stops next with what was
        self._cut: int | None = None
        self._text = ""
        self._given = 0  # characters of it
        self._waiting: list[tuple[int, int, float]] = []  # (characters until then, token, log-probability)
        self._holding: list[tuple[int, float]] = []  # of characters that are not whole
        self._tokens = 0  # that were given
        self._complete = False

    def add(self, tokens: Sequence[int], logprobs: Sequence[float]) -> Piece:
        """What may be shown now and could not be before; nothing more once it was finished."""
        if self._complete:
            return Piece("", [], [])
        text, self._text = self._text, ""  # so that nobody else holds it: Python appends in place then
        before = len(text)
        for token, logprob in zip(tokens, logprobs, strict=True):
            if token in self._ends:
                break
            text += self._reply.add([token])
            self._holding.append((token, logprob))
            if not self._reply.holds:
                self._waiting += [(len(text), *one) for one in self._holding]
                self._holding = []
        self._text = text
        found = cut_at_stop(text, self._stops, max(0, before - self._overlap))
        self._cut = min((one for one in (self._cut, found) if one is not None), default=None)
        known = len(text) - maybe_stop(text, self._stops) if self._cut is None else self._cut
        if self._calls is not None:
            known = min(known, self._calls.begin(text, known))
        if self._begin is None and not self._begins(known):
            return Piece("", [], [])
        known = max(known, self._given)
        piece, self._given = self._text[self._given : known], known
        count = next((k for k, (until, _, _) in enumerate(self._waiting) if until > known), len(self._waiting))
        if not piece:  # tokens come with the text they make
            return Piece("", [], [])
        said, self._waiting = self._waiting[:count], self._waiting[count:]
        self._tokens += count
        return Piece(piece, [token for _, token, _ in said], [logprob for _, _, logprob in said])

    def finish(self, content: str, tokens: list[int], logprobs: list[float]) -> Piece:
        """The rest of the complete reply's text, and of its tokens."""
        self._complete = True
        given = self._text[self._begin or 0 : self._given]
        rest = content.removeprefix(given) if content.startswith(given) else ""
        return Piece(rest, tokens[self._tokens :], logprobs[self._tokens :])

    def _begins(self, known: int) -> bool:
        """Whether it is known where what is said aloud begins; the text is given from there on."""
        text, at = self._text, self._looked
        if not self._thinks:
            at = self._behind_blanks(known)
            said = text[at : min(at + len(_THOUGHT), known)]
            if not _THOUGHT.startswith(said):
                self._begin = 0
                return True
            if said != _THOUGHT:
                return False
            self._thinks = True
        if not self._closed:
            over = text.find(_OVER, at, known)
            if over < 0:
                self._looked = max(at, known - len(_OVER) + 1)
                return False
            self._looked, self._closed = over + len(_OVER), True
        at = self._behind_blanks(known)
        if at < known:
            self._begin = self._given = at
        return at < known

    def _behind_blanks(self, known: int) -> int:
        while self._looked < known and self._text[self._looked].isspace():
            self._looked += 1
        return self._looked


def on_this_loop(reading: Reading, say: Callable[[Piece], None]) -> Callable[[Sequence[int], Sequence[float]], None]:
    """Has `say` told on this loop, for engines, which call from their own threads."""
    loop = asyncio.get_running_loop()

    def hear(tokens: list[int], logprobs: list[float]) -> None:
        piece = reading.add(tokens, logprobs)
        if piece.text:
            say(piece)

    def on_tokens(tokens: Sequence[int], logprobs: Sequence[float]) -> None:
        loop.call_soon_threadsafe(hear, list(tokens), list(logprobs))

    return on_tokens
