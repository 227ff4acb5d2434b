"""What a client sees of replies: pieces and wholes agree, stop texts and calls are held back, ids stay."""

from __future__ import annotations

import asyncio
import json
import random
from functools import partial

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from datamodules.conversations.chat_template import Chat
from datamodules.inference.reply_text import cut_at_stop
from datamodules.workflows.base import EpisodeEngine
from datamodules.workflows.gateway import Budget, Session
from datamodules.workflows.gateway.protocols.base import Asked
from datamodules.workflows.gateway.protocols.servable import Sampling
from datamodules.workflows.gateway.replies import Parser, Reading, as_message, shown
from datamodules.workflows.tool_calls import GrowingCalls, ToolCall, hermes_calls, json_calls
from tests.datamodules.workflows.gateway.agents import LOOK_UP
from tests.datamodules.workflows.scripted_engine import WITH_CALLS, ScriptedEngine
from tests.helpers.recorded_samples import byte_tokenizer

TOKENIZER = byte_tokenizer(WITH_CALLS)
DECODE = partial(TOKENIZER.decode, skip_special_tokens=False)
END = TOKENIZER.eos_token_id


def own_calls(text: str) -> list[ToolCall]:
    return hermes_calls(text)


WORDS = [
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    '{"name": "f"}',
    "<tool",
    "a",
    "é",
    "😀",
    " ",
    "\n",
    "END",
]
REPLIES = st.lists(st.sampled_from(WORDS), max_size=12).map("".join)
PARSERS: list[Parser | None] = [None, hermes_calls, json_calls, own_calls]


@pytest.mark.parametrize("parser", PARSERS)
@settings(max_examples=60, deadline=None)
@given(
    REPLIES,
    st.lists(st.sampled_from(["END", "a", "é ", "</think>"]), max_size=2),
    st.booleans(),
    st.sampled_from(["", "<think>"]),
    st.randoms(),
)
def test_pieces_are_the_message(
    parser: Parser | None, text: str, stops: list[str], ended: bool, opened: str, draw: random.Random
) -> None:
    tokens = TOKENIZER.encode(text, add_special_tokens=False)
    end = next((k for k in range(1, len(tokens) + 1) if cut_at_stop(DECODE(tokens[:k]), stops) is not None), None)
    tokens = tokens[:end] if end else [*tokens, END] if ended else tokens
    logprobs = [-k / 10 for k in range(len(tokens))]
    seen = shown(tokens, bool(tokens) and tokens[-1] == END, stops, DECODE)
    content = as_message("m", seen.text, parser, opened)[0]["content"] or ""
    reading, pieces, at = Reading(DECODE, stops, parser, [END], opened), [], 0
    while at < len(tokens):
        size = draw.randint(1, 4)
        pieces.append(reading.add(tokens[at : at + size], logprobs[at : at + size]))
        at += size
    pieces.append(reading.finish(content, tokens[: seen.tokens], logprobs[: seen.tokens]))
    assert "".join(one.text for one in pieces) == content
    assert [token for one in pieces for token in one.tokens] == tokens[: seen.tokens]
    assert [value for one in pieces for value in one.logprobs] == logprobs[: seen.tokens]
    assert seen.text == text[: cut_at_stop(text, stops)] or not end
    assert seen.text.startswith(DECODE(tokens[: seen.tokens]).removesuffix("<|end|>")) and seen.whole <= len(seen.text)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from(TOKENIZER.encode("a€😀é", add_special_tokens=False)), max_size=12), st.booleans())
def test_bytes_that_are_no_characters_keep_their_ids_or_are_not_kept(ids: list[int], twice: bool) -> None:
    """As models sample them that have not learned much yet."""
    tokens = [*ids, *TOKENIZER.encode("END", add_special_tokens=False)] * (1 + twice)
    seen = shown(tokens, False, ["END"], DECODE)
    assert seen.text == DECODE(tokens).partition("END")[0]
    assert DECODE(tokens[: seen.tokens]) == seen.text[: seen.whole]


@pytest.mark.parametrize(
    ("text", "aloud"),
    [
        ("so I look <tool_c", "so I look"),
        ("so I look <b", "so I look <b"),
        ("<think>a <tool_call> b", "<think>a <tool_call> b"),
        ("<think>a</think>b <tool_call>{", "<think>a</think>b"),
    ],
)
def test_what_may_become_a_call_is_held_back(text: str, aloud: str) -> None:
    def begin(parser: Parser, text: str) -> int:
        return GrowingCalls(parser, "").begin(text, len(text))

    assert text[: begin(hermes_calls, text)] == aloud
    assert begin(own_calls, text) == 0
    assert begin(json_calls, "<|py") == begin(json_calls, " [") == 0


@pytest.mark.parametrize("parser", [None, hermes_calls, json_calls])
@pytest.mark.parametrize("opened", ["", "<think>"])
@pytest.mark.parametrize("begin", ["so ", "<think>", '{"name": 1, ', " " * 30, "a <tool_call>{"])
def test_what_was_searched_is_not_searched_again(parser: Parser | None, opened: str, begin: str) -> None:
    """What stands there later makes no difference."""
    long = [begin + "it is so. " * 9, "more ", "and more"]
    readings = [Reading(DECODE, ["STOP"], parser, [END], opened) for _ in range(2)]
    found: list[list[str]] = [[], []]
    for said, reading in zip(found, readings, strict=True):
        for k, text in enumerate(long):
            tokens = TOKENIZER.encode(text, add_special_tokens=False)
            said.append(reading.add(tokens, [-1.0] * len(tokens)).text)
            if reading is readings[1] and not k:
                marks = "STOP<tool_call></think>{<|python_tag|>" * 9
                reading._text = marks[: len(reading._text) - 20] + reading._text[-20:]
    assert found[0] == found[1]


def test_calls_in_a_thought_that_the_prompt_opened_are_part_of_it() -> None:
    call = '<tool_call>{"name": "f"}</tool_call>'
    assert as_message("m", f"{call} or</think>no", hermes_calls, "<think>") == (
        {"role": "assistant", "content": "no", "reasoning_content": f"{call} or"},
        0,
        f"{call} or</think>",
    )
    direct, _, thought = as_message("m", f"Hm {call}", hermes_calls, "<think>")
    assert direct["content"] == "Hm" and len(direct["tool_calls"]) == 1 and not thought
    message, _, _ = as_message("m", f"Hm {call}</think>yes {call}", hermes_calls, "<think>")
    assert message["content"] == "yes" and len(message["tool_calls"]) == 1
    assert message["reasoning_content"] == f"Hm {call}"


@pytest.mark.parametrize(
    ("text", "opened", "thought", "aloud", "before"),
    [
        ("<think>\nhm\n</think>\n\nsix", "", "hm", "six", "<think>\nhm\n</think>\n\n"),
        ("hm\n</think>\n\nsix", "<think>", "hm", "six", "hm\n</think>\n\n"),
        ("<think>\n\n</think>\n\nsix", "", None, "six", "<think>\n\n</think>\n\n"),  # of one who does not think
        ("<think>hm", "", "hm", "", "<think>hm"),  # cut off
        ("six", "<think>", None, "six", ""),  # nothing says that it was one
        ("six <think>hm</think>", "", None, "six <think>hm</think>", ""),
        ("six</think>", "", None, "six</think>", ""),
        (" \n", "", None, " \n", ""),
    ],
)
def test_the_thought_that_a_reply_begins_with_is_apart(
    text: str, opened: str, thought: str | None, aloud: str, before: str
) -> None:
    message, _, begin = as_message("m", text, None, opened)
    assert (message.get("reasoning_content"), message["content"], begin) == (thought, aloud, before)


def test_a_thought_that_the_prompt_opened_may_be_cut_off() -> None:
    cut, _, begin = as_message("m", "It is three", hermes_calls, "<think>", cut=True)
    assert cut == {"role": "assistant", "content": "", "reasoning_content": "It is three"} and begin == "It is three"
    calls, _, _ = as_message("m", 'Hm <tool_call>{"name": "f"}</tool_call>', hermes_calls, "<think>", cut=True)
    assert calls["content"] == "Hm" and calls["tool_calls"]


def test_a_gateway_looks_for_a_thought_in_the_prompt_that_was_served() -> None:
    opens = "{% if '/no_think' not in messages[0].content %}<think>\n{% endif %}{% endif -%}"
    tokenizer = byte_tokenizer(WITH_CALLS.removesuffix("{% endif -%}") + opens)
    call = '<tool_call>{"name": "look_up", "arguments": {}}</tool_call>'
    server = ScriptedEngine(tokenizer, [f"{call} or</think>no", f"{call} or</think>no"])
    engine = EpisodeEngine(server, tokenizer, None, name="e", seed="s")  # type: ignore[arg-type]
    session = Session(engine, Chat(tokenizer), Sampling(400), Budget(), hermes_calls)

    async def called(asked: str) -> bool:
        pieces: list[str] = []
        messages = [{"role": "user", "content": asked}]
        (one,) = await session.reply(Asked("", messages, [LOOK_UP]), lambda k, piece: pieces.append(piece.text))
        assert "".join(pieces) == (one.message["content"] or "")
        return "tool_calls" in one.message

    assert asyncio.run(called("look")) is False
    assert asyncio.run(called("/no_think look")) is True


def test_text_comes_while_it_is_sampled_and_calls_at_the_end() -> None:
    reply = 'I l😀k.\n<tool_call>\n{"name": "look_up", "arguments": {"fruit": "apple"}}\n</tool_call>'
    server = ScriptedEngine(TOKENIZER, [reply])
    engine = EpisodeEngine(server, TOKENIZER, None, name="e", seed="s")  # type: ignore[arg-type]
    session = Session(engine, Chat(TOKENIZER), Sampling(400), Budget(), hermes_calls)
    pieces: list[str] = []
    answered: list[int] = []

    async def run() -> None:
        said = [{"role": "user", "content": "look"}]
        calls = await session.reply(Asked("", said, [LOOK_UP]), lambda k, piece: pieces.append(piece.text))
        answered.append(len(pieces))
        assert calls[0].message["content"] == "I l😀k." and calls[0].message["tool_calls"]

    asyncio.run(run())
    assert pieces == ["I", " l", "😀", "k", ".", ""] or pieces == [*"I l😀k.", ""]


def test_half_a_character_in_a_call_reaches_the_client_as_its_escape() -> None:
    """Which UTF-8 cannot express: the agent's client could not send its history again."""
    text = '<tool_call>{"name": "say\\ude00", "arguments": {"x": "\\ud83d"}}</tool_call>'
    message, malformed, _ = as_message("r", text, hermes_calls)
    function = message["tool_calls"][0]["function"]
    assert not malformed and function == {"name": "say\\ude00", "arguments": '{"x": "\\ud83d"}'}
    orjson.loads(json.dumps(message, ensure_ascii=False).encode())


def test_a_reply_that_ends_at_a_text_is_trained_whole_and_shown_up_to_it() -> None:
    """What is sent back keeps the ids before the stop; the tree forks there."""
    server = ScriptedEngine(TOKENIZER, ["It is three.STOP and more", "well"])
    engine = EpisodeEngine(server, TOKENIZER, None, name="e", seed="s")  # type: ignore[arg-type]
    session = Session(engine, Chat(TOKENIZER), Sampling(400), Budget(), hermes_calls)

    async def run() -> None:
        said = [{"role": "user", "content": "look"}]
        (call,) = await session.reply(Asked("", said, stop=("STOP", "never")))
        assert call.message["content"] == "It is three." and call.response.finish_reason == "stop"
        assert DECODE(call.response.tokens) == "It is three.STOP"
        await session.reply(Asked("", [*said, call.message, {"role": "user", "content": "go on"}]))

    asyncio.run(run())
    first, second = session.transcript.calls
    before = [*first.prompt.tokens, *first.ids]
    assert len(first.ids) < len(first.response.tokens) and second.prompt.tokens[: len(before)] == before
    assert dict(session.transcript.drift) == {"stops": 1}
