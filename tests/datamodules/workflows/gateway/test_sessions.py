"""Sessions that do with their history what agents do: what was sampled keeps its ids wherever a prompt shows it."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from datamodules.conversations.chat_template import Chat, Message
from datamodules.inference.protocol import GenerationRequest
from datamodules.workflows.base import EpisodeEngine
from datamodules.workflows.gateway import Budget, Session
from datamodules.workflows.gateway.errors import RequestError
from datamodules.workflows.gateway.protocols.base import Asked
from datamodules.workflows.gateway.protocols.servable import Sampling
from datamodules.workflows.tool_calls import hermes_calls
from tests.datamodules.workflows.gateway.agents import LOOK_UP
from tests.datamodules.workflows.scripted_engine import WITH_CALLS, ScriptedEngine
from tests.helpers.recorded_samples import fallback_tokenizer

TEXT = "the price of an apple is three and that of a pear is five look up think about it once more"
WORDS = TEXT.split()


def merging_tokenizer() -> PreTrainedTokenizerBase:
    """Byte-level BPE in which every word is a token, and can be spelled by others too."""
    bare = Tokenizer(models.BPE())
    bare.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bare.decoder = decoders.ByteLevel()
    marks = ["<|begin|>", "<|end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=marks, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    bare.train_from_iterator([TEXT] * 9 + ["<think>", "</think>", "<tool_call>", "assistant user"], trainer)
    made = PreTrainedTokenizerFast(tokenizer_object=bare, eos_token="<|end|>", clean_up_tokenization_spaces=False)
    made.chat_template = WITH_CALLS
    return made


TOKENIZER = merging_tokenizer()
CHAT = Chat(TOKENIZER)


def odd_ids(text: str, draw: random.Random) -> list[int]:
    """Ids of the text as a model may sample them: cut anywhere, each piece tokenized alone."""
    found, at = [], 0
    while at < len(text):
        size = draw.randint(1, 9)
        found += TOKENIZER.encode(text[at : at + size], add_special_tokens=False)
        at += size
    return found


def reply(draw: random.Random, request: GenerationRequest) -> list[int]:
    said = " ".join(draw.choices(WORDS, k=draw.randint(1, 9)))
    if draw.random() < 0.4:
        said = f"<think>\n{said}\n</think>\n\n" + " ".join(draw.choices(WORDS, k=3))
    if draw.random() < 0.3:
        said += '\n<tool_call>\n{"name": "look_up", "arguments": {"fruit": "pear"}}\n</tool_call>'
    ids = odd_ids(said, draw)
    return ids if draw.random() < 0.1 else [*ids, TOKENIZER.eos_token_id]  # some are cut off


def new_session(draw: random.Random, **budget: Any) -> tuple[ScriptedEngine, Session]:
    server = ScriptedEngine(TOKENIZER, lambda request: reply(draw, request), max_context=20_000)
    engine = EpisodeEngine(server, TOKENIZER, None, name="e", seed="s")  # type: ignore[arg-type]
    return server, Session(engine, CHAT, Sampling(400), Budget(**{"max_calls": 999, **budget}), hermes_calls)


async def converse(session: Session, draw: random.Random, turns: int) -> None:
    """One agent; it extends its conversation, edits or forgets what was said, and starts others within."""
    messages: list[Message] = [{"role": "user", "content": "what is the price of an apple"}]
    for _ in range(turns):
        kind = draw.random()
        if kind < 0.1:  # compaction
            messages = [{"role": "user", "content": "so far " + " ".join(draw.choices(WORDS, k=4))}, *messages[-1:]]
            if messages[-1]["role"] == "tool":
                messages = messages[:1]
        elif kind < 0.2:
            at = draw.randrange(len(messages))
            messages[at] = {**messages[at], "content": " ".join(draw.choices(WORDS, k=3))}
        elif kind < 0.3:  # a sub-agent, and a call of our own beside it
            await asyncio.gather(converse(session, draw, 2), session.reply(Asked("", messages, [LOOK_UP])))
        elif kind < 0.4:
            await session.reply(Asked("", messages, [LOOK_UP], n=3))
        said = (await session.reply(Asked("", messages, [LOOK_UP])))[0].message
        messages.append(said)
        if said.get("tool_calls"):
            messages += [{"role": "tool", "tool_call_id": one["id"], "content": "5"} for one in said["tool_calls"]]
        else:
            messages.append({"role": "user", "content": " ".join(draw.choices(WORDS, k=2))})


@pytest.mark.parametrize("seed", range(40))
def test_whatever_an_agent_does_with_its_history(seed: int) -> None:
    draw = random.Random(seed)
    server, session = new_session(draw)
    asyncio.run(converse(session, draw, turns=8))
    calls = session.transcript.calls
    # Nothing lost, nothing twice, as the engine was asked and as it answered.
    sent = {id(answer): asked.tokens for asked, answer in zip(server.seen, server.responses, strict=True)}
    assert len(calls) == len(sent) and all(call.prompt.tokens == sent[id(call.response)] for call in calls)
    kept = whole = 0
    for call in calls:
        assert TOKENIZER.decode(call.prompt.tokens) == call.prompt.text  # what a server would have rendered
        for other in calls:
            shown = other.reply + other.end
            if other.end and call.prompt.text.startswith(other.prompt.text + shown):
                whole += 1
                before = [*other.prompt.tokens, *other.response.tokens]
                kept += call.prompt.tokens[: len(before)] == before
    assert kept == whole > 0


def test_a_reply_keeps_its_ids_behind_another_beginning() -> None:
    """A compacted history that ends with an earlier reply."""
    draw = random.Random(1)
    ids = [*odd_ids("the price of an apple is three", draw), TOKENIZER.eos_token_id]
    assert ids[:-1] != TOKENIZER.encode("the price of an apple is three")
    server = ScriptedEngine(TOKENIZER, [ids, "once more"], max_context=4096)
    engine = EpisodeEngine(server, TOKENIZER, None, name="e", seed="s")  # type: ignore[arg-type]
    session = Session(engine, CHAT, Sampling(400), Budget(), hermes_calls)

    async def run() -> None:
        said = (await session.reply(Asked("", [{"role": "user", "content": "look it up"}])))[0].message
        shown = [{"role": "user", "content": "the price of an apple is three"}, said, {"role": "user", "content": "it"}]
        await session.reply(Asked("", shown))

    asyncio.run(run())
    sent = server.seen[1].tokens
    assert any(sent[k : k + len(ids)] == ids for k in range(len(sent))) and not session.transcript.drift


def test_budgets_are_refusals_that_clients_do_not_repeat() -> None:
    _, session = new_session(random.Random(0), max_calls=1)

    async def run() -> RequestError:
        await session.reply(Asked("", [{"role": "user", "content": "a"}]))
        with pytest.raises(RequestError) as caught:
            await session.reply(Asked("", [{"role": "user", "content": "a"}]))
        return caught.value

    error = asyncio.run(run())
    assert (error.status, error.code) == (400, "session_budget_exceeded") and session.exhausted


def test_a_full_context_has_the_providers_code() -> None:
    _, session = new_session(random.Random(0))
    with pytest.raises(RequestError, match="no room for a reply") as caught:
        asyncio.run(session.reply(Asked("", [{"role": "user", "content": "apple " * 30_000}])))
    assert caught.value.code == "context_length_exceeded"


def test_a_seed_repeats_a_call_within_its_episode_only() -> None:
    asked = []
    for episode in ("a", "b"):
        server = ScriptedEngine(TOKENIZER, lambda request: "well")
        engine = EpisodeEngine(server, TOKENIZER, None, name="e", seed=episode)  # type: ignore[arg-type]
        session = Session(engine, CHAT, Sampling(400), Budget(), hermes_calls)
        for _ in range(2):
            asyncio.run(session.reply(Asked("", [{"role": "user", "content": "x"}], seed=0, n=2)))
        asked.append([request.seed for request in server.seen])
    for first, second, *again in asked:
        assert first != second and again == [first, second]
    assert not set(asked[0]) & set(asked[1])


@pytest.mark.parametrize("text", [" a é😀 a", "  a", b"\xc3\xa9\xa9 a", b"a\xf0\x9f"])
def test_characters_of_tokens_add_up_to_those_of_the_reply(text: str | bytes) -> None:
    """Where the decoder drops a text's first space, and where bytes are no character; however the tokens come."""
    tokenizer = fallback_tokenizer()
    if isinstance(text, str):
        ids = tokenizer.encode(text, add_special_tokens=False)
    else:
        ids = [tokenizer.convert_tokens_to_ids(f"<0x{byte:02X}>") for byte in text]
    ids.append(tokenizer.convert_tokens_to_ids("b"))
    episode = EpisodeEngine(ScriptedEngine(tokenizer, []), tokenizer, None, name="e", seed="s")  # type: ignore[arg-type]
    session = Session(episode, Chat(tokenizer), Sampling(9), Budget(), hermes_calls)
    reply = session.new_text()
    told = session.sampled(ids, [0.0] * len(ids))
    assert told == [one for token in ids for one in session.sampled([token], [0.0], reply)]
    assert sum(one.size for one in told) == len(tokenizer.decode(ids))
