"""What a session keeps, and what a call of a long conversation costs: counted in bytes and characters, not in time."""

from __future__ import annotations

import asyncio
import gc
import json
import random
import sys
from collections.abc import Callable, Sequence
from types import FunctionType, ModuleType
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from datamodules.conversations.chat_template import Chat, Message
from datamodules.inference.protocol import GenerationRequest, GenerationResponse
from datamodules.workflows.base import EpisodeEngine
from datamodules.workflows.gateway import Budget, Session
from datamodules.workflows.gateway.history import Bodies, Kept, Messages, Shelf
from datamodules.workflows.gateway.protocols.base import Asked
from datamodules.workflows.gateway.protocols.chat_completions import ChatCompletions
from datamodules.workflows.gateway.protocols.servable import Sampling
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
        pytest.param(SAYS, as_it_is, {}, id="extends", marks=pytest.mark.slow),
        pytest.param(SAYS, as_it_is, {"n": 2}, id="choices", marks=pytest.mark.slow),
        pytest.param(CALLS, as_it_is, {}, id="tools"),
        pytest.param(THINKS, as_it_is, {}, id="thinks", marks=pytest.mark.slow),
        pytest.param(THINKS, without_thoughts, {}, id="drops thoughts"),
        pytest.param(SAYS, reminded, {}, id="reminders", marks=pytest.mark.slow),
    ],
)
def test_memory_grows_with_what_is_new(says: str, sends: Turn, options: dict[str, Any]) -> None:
    messages: list[Message] = []
    first, second, third = sizes(
        says, lambda session, turns: converse(session, turns, messages, sends, **options), (8, 16, 32)
    )
    assert (third - second) / (second - first) < 2.5  # twice as many turns; of whole histories 3.2 to 3.4


@pytest.mark.slow
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
        first, second, third = sizes(SAYS, talk, (8, 16, 32))
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


TEXTS = st.sampled_from(["", "a", "é", '"', "\\", ']}, {"', '"messages": [', "],", "[", '\\"],'])
VALUES = st.one_of(
    TEXTS, st.lists(TEXTS, max_size=2), st.lists(st.lists(TEXTS, max_size=2), max_size=2), st.just({"messages": [1]})
)
SAID = st.one_of(st.fixed_dictionaries({"role": st.just("user"), "content": TEXTS}), VALUES)
BODIES = st.lists(
    st.tuples(
        st.sampled_from([0, 0, 0, 1, 2]),  # messages of the last request that are left out
        st.lists(SAID, max_size=3),
        st.lists(st.tuples(st.sampled_from(["model", "tools", "messages", "x"]), VALUES), max_size=2),
        st.lists(st.tuples(st.sampled_from(["model", "tools", "messages", "x"]), VALUES), max_size=2),
        st.sampled_from([(",", ":"), (", ", ": ")]),
        st.booleans(),
    ),
    min_size=2,
    max_size=8,
)


@settings(max_examples=4 * settings.default.max_examples, deadline=None)
@given(BODIES)
def test_requests_are_read_as_the_whole_of_them(steps: list[Any]) -> None:
    bodies, said = Bodies(), list[Any]()
    front, behind, separators = [], [], (",", ":")
    for cut, new, *options, is_ascii in steps:
        said = [*said[: len(said) - cut], *new]
        if cut == 0 and new:  # mostly, as a client does it, all else stays
            options = [front, behind, separators]
        front, behind, separators = options
        named = [*front, ("messages", said), *behind]  # names may come twice
        pairs = [f"{json.dumps(name)}{separators[1]}" + _json(one, separators, is_ascii) for name, one in named]
        body = ("{" + separators[0].join(pairs) + "}").encode()
        assert bodies.read(body, orjson.loads) == orjson.loads(body)


@pytest.mark.parametrize(
    "last",
    [
        '{"messages": [1], "tools": [2]',
        '{"messages": [[1], [2]',
        '{"messages": [1], "messages": [2]',
        '{"tools": [{"messages": [1]',
        '{"x": "\\"messages\\": [", "messages": [1]',
        '{"x": {"messages": [0]}, "messages": [1]',
        '{"messages": [1, "]", "a]',
        '{"messages": [',
    ],
)
def test_a_bracket_that_does_not_close_the_messages(last: str) -> None:
    for end in ("}", "]}", "]}}", "]}]}", '"]}', ', "messages": [3]}', ', "messages": []}', ', "messages": 3}'):
        bodies = Bodies()
        for new in ("]", ", 5]", ", 5, [6]]", ', 5, [6], "7", "]"]', ", 5"):
            body = (last + new + end).encode()
            try:
                wanted = orjson.loads(body)
            except ValueError:
                with pytest.raises(orjson.JSONDecodeError):
                    bodies.read(body, orjson.loads)
                continue
            assert bodies.read(body, orjson.loads) == wanted


def _json(value: Any, separators: tuple[str, str], is_ascii: bool) -> str:
    return json.dumps(value, separators=separators, ensure_ascii=is_ascii)


@pytest.mark.parametrize("first", ["model", "messages"])
def test_what_a_request_says_again_is_not_read_again(first: str) -> None:
    bodies, protocol, sizes = Bodies(), ChatCompletions(), []
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": "{}"}}
    said = [{"role": "user", "content": SAYS}, {"role": "assistant", "content": None, "tool_calls": [call]}]
    before: list[Message] = []
    for _ in range(20):
        request = {"model": "any", "messages": said, "temperature": 1.0}
        order = sorted(request, key=lambda key: key != first)

        def parse(body: bytes) -> dict[str, Any]:
            sizes.append(len(body))
            return dict(orjson.loads(body))

        asked = protocol.parse(bodies.read(json.dumps({key: request[key] for key in order}).encode(), parse))
        assert asked.messages == protocol.parse(json.loads(json.dumps(request))).messages
        assert all(one is other for one, other in zip(asked.messages, before, strict=False))
        before = asked.messages
        said = [*said, {"role": "tool", "content": "5", "tool_call_id": "1"}, *said[:2]]
    assert len(sizes) == 20 and max(sizes[1:]) < 600


def test_what_many_sessions_keep_of_their_requests_is_bounded() -> None:
    """Those read longest ago are forgotten, and read whole the next time, to the same."""
    sizes, many = list[int](), [Bodies() for _ in range(8)]
    request = json.dumps({"messages": [{"role": "user", "content": "x" * 1000}]}).encode()
    first = Bodies()
    first.read(request, orjson.loads)
    most = 3 * first.size + 500
    shelf = Shelf(most)

    def parse(body: bytes) -> dict[str, Any]:
        sizes.append(len(body))
        return dict(orjson.loads(body))

    def read(one: Bodies, body: bytes) -> int:
        sizes.clear()
        assert one.read(body, parse) == orjson.loads(body)
        shelf.keep(one)
        assert shelf.size == sum(each.size for each in many) <= most
        return sizes[-1]

    for one in many:
        assert read(one, request) == len(request)
    assert [one.size > 0 for one in many] == [False] * 5 + [True] * 3
    longer = request[:-2] + b', {"role": "user", "content": "y"}]}'
    assert read(many[5], longer) < 200  # goes on with the last one
    assert read(many[0], longer) == len(longer) and many[6].size == 0 and many[5].size > 0
    assert read(many[1], request[:-2] + b" " * most + b"]}") > most
    assert not any(one.size for one in many)  # it is larger than all together may be
    read(many[2], request)
    shelf.drop(many[2])
    shelf.drop(many[2])
    assert shelf.size == many[2].size == 0


def test_what_is_kept_of_a_request_counts_as_the_objects_it_is() -> None:
    """Which many small ones take far more memory than their text."""
    bodies, message = Bodies(), {"role": "user", "content": [{"type": "text", "text": "a"}] * 3}
    for count in (100, 101, 150, 20):
        bodies.read(orjson.dumps({"messages": [message] * count}), orjson.loads)
        assert 0.8 < bodies.size / size_of(bodies, ()) < 1.2
