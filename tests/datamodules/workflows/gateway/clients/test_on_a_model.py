"""The providers' packages with a real model behind the door: conversations of several turns with tools, streamed and
not, in which every sampled token is trained once, as the model said it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import anthropic
import openai
import pytest
import torch

from datamodules.inference import EmbeddedEngine
from datamodules.workflows.base import EpisodeEngine
from datamodules.workflows.gateway import Budget, Session
from datamodules.workflows.gateway.protocols.servable import Sampling
from datamodules.workflows.tool_calls import ToolCall
from tests.datamodules.inference.engine_suite import reference_logprobs
from tests.datamodules.workflows.gateway.agents import LOOK_UP
from tests.datamodules.workflows.gateway.clients.door import PRICES, QUESTION, Door, door
from tests.datamodules.workflows.gateway.test_sessions import CHAT, TOKENIZER
from tests.datamodules.workflows.gateway.wild_agents import TASK, Books, model_of_words

TURNS = 4
TOKENS = 12


@pytest.fixture(scope="module")
def engine() -> Iterator[EmbeddedEngine]:
    made = EmbeddedEngine(kv_cache_tokens=1 << 13, num_threads=1)
    made.start(model_of_words(0), version=0, seed=1)
    yield made
    made.close()


def every_reply_looks_up(text: str) -> list[ToolCall]:
    """A random model calls no tools: whatever it says is taken for a call."""
    return [ToolCall("look_up", {"fruit": "pear"})]


def of_openai(there: Door, streamed: bool) -> list[str]:
    client = openai.OpenAI(base_url=there.v1, api_key=there.key, max_retries=0)
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    given = []
    for _ in range(TURNS):
        ask: Any = {"model": "any", "messages": messages, "tools": [LOOK_UP], "max_completion_tokens": TOKENS}
        if streamed:
            with client.chat.completions.stream(**ask) as stream:
                for _ in stream:
                    pass
                answer: Any = stream.current_completion_snapshot  # the final one may not be cut off
        else:
            answer = client.chat.completions.create(**ask)
        given.append(answer.id.removeprefix("chatcmpl-"))
        message = answer.choices[0].message
        (call,) = message.tool_calls
        said = {"id": call.id, "type": "function", "function": call.function.model_dump(include={"name", "arguments"})}
        messages.append({"role": "assistant", "content": message.content, "tool_calls": [said]})
        price = str(PRICES[json.loads(call.function.arguments)["fruit"]])
        messages.append({"role": "tool", "tool_call_id": call.id, "content": price})
    return given


def of_anthropic(there: Door, streamed: bool) -> list[str]:
    client = anthropic.Anthropic(base_url=there.address, api_key=there.key, max_retries=0)
    tool: Any = {"name": "look_up", "input_schema": LOOK_UP["function"]["parameters"]}  # type: ignore[index]
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    given = []
    for _ in range(TURNS):
        ask: Any = {"model": "any", "messages": messages, "tools": [tool], "max_tokens": TOKENS}
        if streamed:
            with client.messages.stream(**ask) as stream:
                answer = stream.get_final_message()
        else:
            answer = client.messages.create(**ask)
        given.append(answer.id.removeprefix("msg_"))
        messages.append({"role": "assistant", "content": answer.content})
        (call,) = [block for block in answer.content if block.type == "tool_use"]
        result = {"type": "tool_result", "tool_use_id": call.id, "content": str(PRICES[call.input["fruit"]])}
        messages.append({"role": "user", "content": [result]})
    return given


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("converse", [of_openai, of_anthropic])
def test_every_sampled_token_is_trained_once(
    engine: EmbeddedEngine, converse: Callable[[Door, bool], list[str]], streamed: bool
) -> None:
    books = Books(engine)
    episode = EpisodeEngine(books, TOKENIZER, None, name="e", seed="s")  # type: ignore[arg-type]
    session = Session(episode, CHAT, Sampling(TOKENS), Budget(), every_reply_looks_up)
    with door(session=session) as there:
        given = converse(there, streamed)
    assert [call.id for call in session.transcript.calls] == given
    answered = [books.answered[id(call.response)] for call in session.transcript.calls]
    assert len(books.answered) == TURNS
    model = model_of_words(0)
    for one, (_, sent, tokens, logprobs, versions) in zip(session.trajectories(TASK, 1.0), answered, strict=True):
        assert one.tokens.tolist() == [*sent, *tokens] and set(versions) == {0}
        assert one.loss_mask.tolist() == [False] * len(sent) + [True] * len(tokens)
        torch.testing.assert_close(one.behavior_logprobs[one.loss_mask], torch.tensor(logprobs))
        with torch.no_grad():
            expected = reference_logprobs(model, sent, tokens, 1.0)
        torch.testing.assert_close(torch.tensor(logprobs), expected, atol=1e-4, rtol=0)
        assert QUESTION in TOKENIZER.decode(sent)
    assert TOKENIZER.decode(answered[-1][1]).count("<tool>\n5\n</tool>") == TURNS - 1
