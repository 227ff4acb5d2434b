"""The calls of one session, and the token ids of its next prompt.

Promises: a prompt's text is what the model's chat template renders for the messages of that call, as a server would,
replies with their thoughts where the client has forgotten these;
where that text shows an earlier reply of the session, whole or from some token on, the prompt holds the ids that were
sampled for it, and is tokenized anew only where it shows something else. Cost of a conversation that goes on: rendering
and tokenizing what is new, also where the template leaves out the thoughts of earlier replies.
"""

from __future__ import annotations

import functools
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from app.pictures import Picture
from datamodules.conversations.chat_template import Chat, Message
from datamodules.conversations.resumed_template import Renderings
from datamodules.inference.protocol import GenerationResponse
from datamodules.inference.reply_text import Decode
from datamodules.workflows.gateway.history import Kept, Messages, Said, for_template, names

Drift = Literal["thoughts", "arguments", "tail", "stops", "edited"]
"""Why a later prompt shows a reply otherwise than it was sampled: its beginning is left out, its calls are written
otherwise, what it said behind the last of them is left out, it ended at a stop text, which is not shown, or something
else."""

_LONGEST_CHARACTER = 4  # tokens


@dataclass(frozen=True)
class Call:
    """One reply.

    Attributes:
        id: of the reply; unique in the session.
        prompt: that the engine was sent.
        given: number of the prompt's tokens, those of pictures included.
        temperature: at which it sampled.
        response: as the engine made it.
        messages: number of those that the prompt was rendered from.
        reply: text of the reply, special tokens included, without the one that ended it; up to the last whole token
            before a stop text.
        end: text of that; "" where the reply was cut off, or ended at a text.
        kept: number of the sampled tokens that say `reply` and `end`.
        message: the reply as the client was given it.
        thought: how the reply begins, up to the message's content.
        opening: how its prompt ends where that has opened the thought, blanks included.
        stop: the text of the client's that ended it, "" for none.
        is_trained: sampled from the model as it is, so that it can be.
        pictures: that the prompt shows, in the order of their places, of which it has one token each.
    """

    id: str
    prompt: Kept
    given: int
    temperature: float
    response: GenerationResponse
    messages: int
    reply: str
    end: str
    kept: int
    message: Message
    stop: str = ""
    is_trained: bool = True
    pictures: tuple[Picture, ...] = ()
    thought: str = ""
    opening: str = ""

    @property
    def ids(self) -> list[int]:
        """The sampled tokens that later prompts may show."""
        return self.response.tokens[: self.kept]

    @property
    def logprobs(self) -> list[float]:
        """Theirs, in nats."""
        return self.response.logprobs[: self.kept]


@dataclass(frozen=True)
class Plan:
    """A prompt before it is tokenized.

    Attributes:
        text: of it.
        pieces: the same: token ids where they are known, text where they are not.
        base: a prompt that begins alike, as far as one can know; None for none.
        begins: all of the base does.
        known: the messages that were kept before.
        shown: all messages, as templates take them.
    """

    text: str
    pieces: list[str | list[int]]
    base: Kept | None
    begins: bool = False
    known: list[Said] = field(default_factory=list)
    shown: list[Message] = field(default_factory=list)

    @property
    def unknown(self) -> int:
        """Number of the characters to be tokenized."""
        return sum(len(one) for one in self.pieces if isinstance(one, str))

    def tokens(self, encode: Callable[[str], list[int]]) -> list[int]:
        """Raises what `encode` does."""
        found: list[int] = []
        for one in self.pieces:
            if one:
                found += encode(one) if isinstance(one, str) else one
        return found


class Answers:
    """Which reply a message was: by the ids of its calls, by its thought, else by what it says and what it answers."""

    def __init__(self) -> None:
        self._latest: dict[bytes, Call] = {}  # by each of `names`
        self._given: dict[tuple[Any, bytes], list[Call]] = {}
        self._keys: dict[str, tuple[Any, bytes]] = {}  # of each

    def add(self, call: Call, before: Message | None) -> None:
        """A reply to the message `before`."""
        named = names(call.message)
        self._latest |= dict.fromkeys(named, call)
        self._keys[call.id] = key = (_place(before), named[-1])
        self._given.setdefault(key, []).append(call)

    def remove(self, call: Call) -> None:
        self._given[self._keys.pop(call.id)].remove(call)

    def find(self, k: int, before: Message | None, named: Sequence[bytes]) -> Call | None:
        """The reply that the `k`-th message was, behind the one `before` it; None for none, and where several could be
        it that have other thoughts.

        Args:
            named: what `names` says of the message: all but the last tell one reply, wherever it is shown.
        """
        if (sure := self.latest(named[:-1])) is not None or not named:
            return sure
        given = self._given.get((_place(before), named[-1]), [])
        given = [one for one in given if one.messages == k] or given
        return given[-1] if len({one.thought for one in given}) == 1 else None

    def latest(self, named: Sequence[bytes]) -> Call | None:
        """The last reply with one of these names, the first that there is; whatever it answered."""
        return next((self._latest[name] for name in named if name in self._latest), None)


def _place(before: Message | None) -> Any:
    return None if before is None else (before["role"], before["content"])


class Transcript:
    """Calls in the order in which they were answered.

    Args:
        chat: the model's template.
        decode: token ids to text, special tokens included.
        show_calls: the template shows earlier calls of tools; if not, replies that made some are shown as sampled.

    Attributes:
        calls: those answered.
        drift: how often a prompt forked from an earlier reply, as it shows it otherwise than it was sampled, by cause.
        quoted: number of the results of tools that spelled marks of the template, which got a space put into them.
    """

    def __init__(self, chat: Chat, decode: Decode, show_calls: bool = True) -> None:
        self.calls: list[Call] = []
        self.drift: Counter[Drift] = Counter()
        self.quoted = 0
        self._chat = chat
        self._decode = decode
        self._show_calls = show_calls
        self._messages = Messages(lambda message: chat.shown(for_template(self._written(message), chat.arguments)))
        self._renderings = Renderings()
        self._after: dict[int, list[Call]] = {}  # by the number of messages before the reply
        self._answers = Answers()
        self._forms: dict[str, Message] = {}  # of replies with a thought, as the template shows it where it was
        self._shown: dict[tuple[str, int], int] = {}  # what `_first_shown` has found

    def keep(self, messages: Sequence[Message], plan: Plan, prompt: Kept) -> Said | None:
        """Messages that were answered, by the prompt that was planned for them; the last of them, None for none."""
        new = messages[len(plan.known) :]
        self.quoted += sum(one["role"] == "tool" and self._written(one) != one for one in new)
        return self._messages.keep(list(messages), plan.known, plan.shown, prompt)

    def add(self, call: Call, before: Message | None) -> None:
        """A reply that was given to the client, to the message `before`."""
        self.calls.append(call)
        self._answers.add(call, before)
        self._after.setdefault(call.messages, []).append(call)

    def remove(self, call: Call) -> None:
        """A reply that the client did not take after all; `add` it once it does."""
        self.calls.remove(call)
        self._answers.remove(call)
        self._after[call.messages].remove(call)

    def prompt(self, messages: Sequence[Message], tools: list[dict[str, Any]] | None) -> Plan:
        """What the model is sent for these messages. Raises ValueError when the template cannot render them."""
        known = self._messages.known(list(messages))
        new = enumerate(messages[len(known) :], len(known))
        shown = [
            *(one.shown for one in known),
            *(self._messages.shown(self._with_thought(k, messages)) for k, _ in new),
        ]
        text = self._chat.text(shown, tools, past=self._renderings)
        base = known[-1].prompt if known else None

        def named(k: int) -> list[bytes]:
            return known[k].names if k < len(known) else names(messages[k])

        pieces: list[str | list[int]] = []
        at = seen = 0
        begun = self._begun(text, messages, named)
        if begun is not None:
            call, at, said = begun
            pieces, base, seen = [call.prompt.tokens, *said], call.prompt, call.messages + 1
        for start, end, ids in self._replies(text, messages, named, seen, at):
            pieces += [text[at:start], ids]
            at = end
        return Plan(text, [*pieces, text[at:]], base, begun is not None, known, shown)

    def count(self, messages: Sequence[Message], tools: list[dict[str, Any]] | None) -> Plan:
        """That prompt, which nobody is sent. Raises ValueError as `prompt`."""
        drift = self.drift.copy()
        try:
            return self.prompt(messages, tools)
        finally:
            self.drift = drift

    def extended(self, text: str) -> Plan:
        """A prompt that is this text, which may go on with an earlier prompt and its reply."""
        best: Call | None = None
        for call in reversed(self.calls):
            size = call.prompt.size + len(call.reply)
            if best is not None and size <= best.prompt.size + len(best.reply):
                continue
            if text.startswith(call.reply, call.prompt.size) and call.prompt.begins(text):
                best = call
        if best is None:
            return Plan(text, [text], self.calls[-1].prompt if self.calls else None)
        said = best.ids[:-1] if best.end else best.ids  # what ended it is no text that clients see
        rest = text[best.prompt.size + len(best.reply) :]
        return Plan(text, [best.prompt.tokens, said, rest], best.prompt, begins=True)

    def of_ids(self, tokens: list[int]) -> Plan:
        """A prompt that is these."""
        return Plan(self._decode(tokens), [tokens], self.calls[-1].prompt if self.calls else None)

    def _with_thought(self, k: int, messages: Sequence[Message]) -> Message:
        """The `k`-th message; a reply with the thought that it was sampled with, unless the client gives it another:
        whether that is shown is the template's affair."""
        message = messages[k]
        if message.get("role") != "assistant" or (message.get("tool_calls") and not self._show_calls):
            return message
        call = self._answers.find(k, messages[k - 1] if k else None, names(message))
        if call is None or not call.thought:
            return message
        told = call.message
        same = (str(told["content"] or "").strip(), told.get("reasoning_content", ""))
        said = (str(message.get("content") or "").strip(), str(message.get("reasoning_content", same[1])).strip())
        if said != same:
            return message
        if call.id not in self._forms:
            self._forms[call.id] = self._form(call)
        left = {key: value for key, value in message.items() if key != "reasoning_content"}
        return {**left, **self._forms[call.id]}

    def _form(self, call: Call) -> Message:
        """Content, and `reasoning_content` where that has the thought, of a reply that the template shows as it was
        sampled; templates have the thought in either, with the mark that opens it or without."""
        content, thought = str(call.message["content"] or ""), call.message.get("reasoning_content", "")
        forms: list[Message] = [{"content": before + call.thought + content} for before in ("", call.opening)]
        forms.append({"content": content, "reasoning_content": thought})
        sampled = (call.opening + call.thought + content).rstrip()
        calls = {"tool_calls": call.message["tool_calls"]} if call.message.get("tool_calls") else {}
        for form in forms:
            reply = for_template({"role": "assistant", **calls, **form}, self._chat.arguments)
            try:
                text = self._chat.text([{"role": "user", "content": "."}, reply], None, goes_on=False)
            except ValueError:
                continue
            before, found, _ = text.partition(sampled)
            if found and before.rstrip().endswith(self._header.rstrip()):
                return form
        return forms[-1]

    def _written(self, message: Message) -> Message:
        """A tool's result without marks of the template's, which would end it; calls as text where the template shows
        no others. Raises ValueError for calls that no reply made."""
        if message["role"] == "tool":
            content = message["content"]
            if isinstance(content, str):
                return {**message, "content": self._chat.quoted(content)}
            parts = tuple(self._chat.quoted(one) if isinstance(one, str) else one for one in content)
            return {**message, "content": parts}
        if self._show_calls or not message.get("tool_calls"):
            return message
        call = self._answers.latest(names(message))
        if call is None:
            raise ValueError(
                "they hold tool_calls that no reply of this session made, which the model's chat template does not"
                " show, and show_tools: false can show as they were sampled only; use a model whose template shows them"
            )
        return {"role": "assistant", "content": call.reply}

    def _begun(
        self, text: str, messages: Sequence[Message], named: Callable[[int], list[bytes]]
    ) -> tuple[Call, int, list[str | list[int]]] | None:
        """The call with the longest prompt that begins `text`, if its reply follows, whole or from some token on; where
        that ends; and the pieces of it."""
        for count in range(len(messages) - 1, -1, -1):
            calls = self._after.get(count, ())
            for call in reversed(calls):
                shown = call.reply + call.end
                if text.startswith(shown, call.prompt.size) and call.prompt.begins(text):
                    if call.kept < len(call.response.tokens):
                        self.drift["stops"] += 1
                    return call, call.prompt.size + len(shown), [call.ids]
            if messages[count].get("role") != "assistant":
                continue
            mine = [self._answers.latest([name]) for name in named(count)]
            for call in sorted(reversed(calls), key=lambda one: one not in mine):
                begins = call.prompt.size
                if not call.end or not call.prompt.begins(text):
                    continue
                ends = text.find(self._header, begins)
                left = self._from_some_token(call, text[begins:ends] if ends >= 0 else text[begins:])
                if left is not None:
                    start, end, ids = left
                    self.drift["thoughts"] += 1
                    return call, begins + end, [text[begins : begins + start], ids]
        return None

    def _replies(
        self,
        text: str,
        messages: Sequence[Message],
        named: Callable[[int], list[bytes]],
        seen: int,
        at: int,
    ) -> Iterator[tuple[int, int, list[int]]]:
        """Where `text` shows replies of the session among the messages behind those `seen`, from `at` on: begin, end,
        sampled ids."""
        for k in range(seen, len(messages)):
            if messages[k].get("role") != "assistant":
                continue
            begins = text.find(self._header, at) + len(self._header)
            if begins < at + len(self._header):
                return
            ends = text.find(self._header, begins)
            ends = len(text) if ends < 0 else ends
            at = begins
            call = self._answers.find(k, messages[k - 1] if k else None, named(k)) or self._answers.latest(named(k))
            if call is None or not call.reply.strip():
                continue
            whole = call.reply + call.end
            if (start := text.find(whole, begins, ends)) >= 0:
                at = start + len(whole)
                if call.kept < len(call.response.tokens):
                    self.drift["stops"] += 1
                yield start, at, call.ids
                continue
            left = self._from_some_token(call, text[begins:ends])
            if left is None:
                self.drift[_cause(call, messages[k], text[begins:ends])] += 1
                continue
            self.drift["thoughts"] += 1
            start, end, ids = left
            at = begins + end
            yield begins + start, at, ids

    def _from_some_token(self, call: Call, shown: str) -> tuple[int, int, list[int]] | None:
        """Where `shown` begins with what the reply says from some token on: begin, end, and the ids of these tokens."""
        closed = shown.find(call.end) if call.end else -1
        if closed < 0:
            return None
        said, last = call.reply + call.end, closed + len(call.end)
        first = self._first_shown(call, said, _alike_at_the_end(said, shown[:last]))
        tokens = call.ids[first:]
        begins = last - len(self._decode(tokens))
        return None if len(tokens) < 2 or shown[:begins].strip() else (begins, last, tokens)

    def _first_shown(self, call: Call, said: str, size: int) -> int:
        """The first of the reply's tokens that is shown with all behind it, where the last `size` characters of what it
        `said` are; their number for none."""
        known = self._shown.get((call.id, size))
        if known is None:
            ids = call.ids

            def text(k: int) -> str:
                return self._decode(ids[k:])

            near = bisect_left(range(len(ids)), -size, key=lambda k: -len(text(k)))
            # Nearly so: what is left of a character of several tokens is no text, and may be longer than it. And some
            # decoders leave out the space before a word that comes first.
            around = range(max(0, near - _LONGEST_CHARACTER), min(near + _LONGEST_CHARACTER, len(ids)))
            whole = (k for k in around if len(text(k)) <= size and self._decode(ids[:k]) + text(k) == said)
            known = next(whole, len(ids))
            self._shown[call.id, size] = known
        return known

    @functools.cached_property
    def _header(self) -> str:
        """What the template puts before a reply, as far as it is the same before every one."""
        said = [{"role": "user", "content": "."}]
        ended, opened = self._chat.text(said, None, goes_on=False), self._chat.text(said, None)
        opening = opened[len(ended) :] if opened.startswith(ended) else ""
        return opening.split("\n")[0]


def _cause(call: Call, message: Message, shown: str) -> Drift:
    """Why a message that the reply was is `shown` otherwise than it was sampled."""
    if not message.get("tool_calls"):
        return "edited"
    said, found, _ = shown.partition(call.end) if call.end else ("", "", "")
    return "tail" if found and said.strip() and call.reply.lstrip().startswith(said.strip()) else "arguments"


def _alike_at_the_end(one: str, other: str) -> int:
    """Length of the longest common end."""
    low, high = 0, min(len(one), len(other)) + 1
    while high - low > 1:
        middle = (low + high) // 2
        if other.endswith(one[-middle:]):
            low = middle
        else:
            high = middle
    return low
