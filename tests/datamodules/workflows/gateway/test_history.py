"""What a session keeps, and what a call of a long conversation costs: counted in bytes and characters, not in time."""

from __future__ import annotations

import asyncio
import gc
import random
import sys
from collections.abc import Callable, Sequence
from types import FunctionType, ModuleType
from typing import Any

import pytest

from datamodules.conversations.chat_template import Chat, Message
from datamodules.inference.protocol import GenerationRequest, GenerationResponse
from datamodules.workflows.base import EpisodeEngine
from datamodules.workflows.gateway import Budget, Session
from datamodules.workflows.gateway.history import Kept, Messages
from datamodules.workflows.gateway.protocols.base import Asked
from datamodules.workflows.gateway.sessions import Sampling
from datamodules.workflows.tool_calls import hermes_calls
from tests.datamodules.workflows.gateway.agents import LOOK_UP
from tests.datamodules.workflows.gateway.test_sessions import TOKENIZER, odd_ids
from tests.datamodules.workflows.scripted_engine import ScriptedEngine

SAYS = "the price of an apple is three and that of a pear is five"
THINKS = f"<think>\n{SAYS}\n</think>\n\n{SAYS}"
CALLS = SAYS + '\n<tool_call>\n{"name": "look_up", "arguments": {"fruit": "pear"}}\n</tool_call>'


class Forgetful(ScriptedEngine):
    """Keeps nothing of what it is asked."""

    async def generate(self, request: GenerationRequest) -> GenerationResponse:
        response = await super().generate(request)
        self.seen.clear()
        self.responses.clear()
        return response


class Counting(Chat):
    """Counts the characters that are tokenized."""

    encoded = 0

    def encode(self, text: str) -> list[int]:
        self.encoded += len(text)
        return super().encode(text)


def session_of(says: str | list[int], engine: type[ScriptedEngine] = Forgetful) -> tuple[Session, Counting]:
    server = engine(TOKENIZER, lambda request: says, max_context=1 << 20)
    episode = EpisodeEngine(server, TOKENIZER, None, name="e", seed="s")  # type: ignore[arg-type]
    chat = Counting(TOKENIZER)
    return Session(episode, chat, Sampling(400), Budget(max_calls=1 << 20), hermes_calls), chat


Turn = Callable[[list[Message], int], list[Message]]
"""What an agent sends of its conversation at a turn."""


def as_it_is(messages: list[Message], turn: int) -> list[Message]:
    return messages


def reminded(messages: list[Message], turn: int) -> list[Message]:
    """The last message says something that it will not say any more at the next turn."""
    return [*messages[:-1], {**messages[-1], "content": f"{messages[-1]['content']} (turn {turn}, go on)"}]


def without_thoughts(messages: list[Message], turn: int) -> list[Message]:
    return [{**one, "content": str(one["content"] or "").rpartition("</think>")[2].strip()} for one in messages]


async def converse(session: Session, turns: range, messages: list[Message], sends: Turn, **options: Any) -> None:
    for turn in turns:
        messages.append({"role": "user", "content": f"{SAYS}, and in the shop number {turn}?"})
        # As a client does it, nothing of a request is the object that was in the one before.
        asked = Asked("", [{**one} for one in sends(messages, turn)], [{**LOOK_UP}], **options)
        (said, *_) = await session.reply(asked)
        messages.append(said.message)
        for call in said.message.get("tool_calls", ()):
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": "5"})


def size_of(root: Any, apart: Sequence[Any]) -> int:
    """Bytes of all that `root` holds, once each, but for what is `apart`, code and constants."""
    seen, size, left = {id(one) for one in apart}, 0, [root]
    while left:
        one = left.pop()
        if id(one) in seen or isinstance(one, type | FunctionType | ModuleType | bool | None):
            continue
        seen.add(id(one))
        size += sys.getsizeof(one)
        left += gc.get_referents(one)
    return size


def sizes(says: str, talk: Callable[[Session, range], Any], counts: Sequence[int]) -> list[int]:
    """Of a session after so many turns."""
    session, chat = session_of(says)
    apart = [chat, session._engine, session._decode, session._parser, session._free, session.ended]
    found, done = [], 0
    for count in counts:
        asyncio.run(talk(session, range(done, count)))
        done = count
        gc.collect()
        found.append(size_of(session, apart))
    return found


@pytest.mark.parametrize(
    ("says", "sends", "options"),
    [
        (SAYS, as_it_is, {}),
        (SAYS, as_it_is, {"n": 2}),
        (CALLS, as_it_is, {}),
        (THINKS, as_it_is, {}),
        (THINKS, without_thoughts, {}),
        (SAYS, reminded, {}),
    ],
    ids=["extends", "choices", "tools", "thinks", "drops thoughts", "reminders"],
)
def test_memory_grows_with_what_is_new(says: str, sends: Turn, options: dict[str, Any]) -> None:
    messages: list[Message] = []
    first, second, third = sizes(
        says, lambda session, turns: converse(session, turns, messages, sends, **options), (16, 32, 64)
    )
    assert (third - second) / (second - first) < 2.5  # twice as many turns; of whole histories 3.4 to 3.8


def test_memory_of_raw_prompts_and_of_parallel_agents() -> None:
    text = ["price:"]

    async def completes(session: Session, turns: range) -> None:
        for _ in turns:
            text[0] += f"\n{SAYS}"
            (said,) = await session.reply(Asked("", [], prompt=text[0]))
            text[0] += str(said.message["content"])

    async def together(session: Session, turns: range) -> None:
        for turn in turns:
            await asyncio.gather(*(converse(session, range(turn, turn + 1), one, as_it_is) for one in each))

    each: list[list[Message]] = [[{"role": "system", "content": f"You are number {k}. {SAYS}"}] for k in range(3)]
    for talk in (completes, together):
        first, second, third = sizes(SAYS, talk, (16, 32, 64))
        assert (third - second) / (second - first) < 2.5, talk.__name__


@pytest.mark.parametrize("sends", [as_it_is, without_thoughts])
@pytest.mark.parametrize("says", [SAYS, THINKS, "<think>\n世界 🌍\n</think>\n\n四つの林檎 🍎🍏"])
def test_what_is_tokenized_does_not_grow_with_the_conversation(says: str, sends: Turn) -> None:
    """And thoughts that are left out cost the rest of a reply none of its ids, whatever its characters."""
    draw = random.Random(0)
    ids = [*odd_ids(says, draw), TOKENIZER.eos_token_id]
    session, chat = session_of(ids)
    messages: list[Message] = []
    encoded = []
    for turn in range(100, 110):
        before = chat.encoded
        asyncio.run(converse(session, range(turn, turn + 1), messages, sends))
        encoded.append(chat.encoded - before)
    assert len(set(encoded[2:])) == 1 and encoded[2] < 3 * len(SAYS)
    dropped = len(encoded) - 1 if "<think>" in says else 0
    assert session.transcript.drift == ({"thoughts": dropped} if dropped else {})
    kept = ids[-3:]
    sent = session.transcript.calls[-1].prompt.tokens
    assert sum(sent[k : k + 3] == kept for k in range(len(sent))) == len(encoded) - 1


@pytest.mark.parametrize("seed", range(20))
def test_what_is_kept_reads_back(seed: int) -> None:
    draw = random.Random(seed)
    messages = Messages(lambda message: message)
    prompts: list[tuple[Kept, str, list[int]]] = []
    said: list[tuple[Any, list[Message]]] = []
    for _ in range(40):
        kept, text, tokens = draw.choice(prompts) if prompts else (None, "", [])
        cut, at = draw.randint(0, len(text)), draw.randint(0, len(tokens))
        if draw.random() < 0.4:
            cut, at = len(text), len(tokens)
        text = text[:cut] + "".join(draw.choices("ab", k=draw.randint(0, 5)))
        tokens = tokens[:at] + draw.choices([7, 8], k=draw.randint(0, 5))
        begins = kept is not None and (text[: kept.size], tokens[: kept.count]) == (kept.text, kept.tokens)
        prompts.append((Kept(text, tokens, kept, begins and draw.random() < 0.5), text, tokens))
        talk = [{"role": draw.choice("ua"), "content": draw.choice("xy")} for _ in range(draw.randint(1, 6))]
        if draw.random() < 0.3:
            talk[-1]["name"] = draw.choice("pq")
        known = messages.known(talk)
        assert [one.message for one in known] == talk[: len(known)]
        said.append((messages.keep([{**one} for one in talk], known, talk, prompts[-1][0]), talk))
        assert [one.message for one in messages.known(talk)] == talk
    for kept, text, tokens in prompts:
        assert (kept.text, kept.tokens, kept.size, kept.count) == (text, tokens, len(text), len(tokens))
        for _, other, _ in prompts:
            assert kept.begins(other) == other.startswith(text)
    for last, talk in said:
        assert last.conversation() == talk
    assert len({id(last) for last, _ in said}) == len({str(talk) for _, talk in said})
