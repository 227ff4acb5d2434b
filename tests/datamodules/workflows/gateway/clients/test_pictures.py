"""The providers' packages send pictures: a model that sees is shown them, as the untouched model confirms; one that
does not, and what is no picture, is refused by the field."""

from __future__ import annotations

import asyncio
import base64
import copy
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import numpy as np
import openai
import pytest
import torch

from datamodules.conversations.chat_template import Chat
from datamodules.inference import EmbeddedEngine
from datamodules.prompts import Prompt
from datamodules.workflows import hermes_calls
from datamodules.workflows.base import EpisodeEngine
from datamodules.workflows.gateway import Budget, Session
from datamodules.workflows.gateway.protocols.servable import Sampling
from tests.datamodules.workflows.gateway.clients.door import Door, door
from tests.helpers.tiny_layouts import TinyLayouts
from tests.helpers.tiny_vision import TinyVision, noise, png

A, B = noise(1), noise(2)


def base64_of(pixels: np.ndarray) -> str:
    return base64.b64encode(png(pixels)).decode()


def url(pixels: np.ndarray) -> str:
    return f"data:image/png;base64,{base64_of(pixels)}"


@pytest.fixture(scope="module")
def vision(tmp_path_factory: pytest.TempPathFactory) -> TinyVision:
    return TinyVision(tmp_path_factory.mktemp("vision"))


@pytest.fixture(scope="module")
def engine(vision: TinyVision) -> Iterator[EmbeddedEngine]:
    made = EmbeddedEngine(kv_cache_tokens=4096, num_threads=1)
    made.use_images(vision.images)
    made.start(vision.model, version=0, seed=1)
    yield made
    made.close()


CALLS = "{% for call in message.tool_calls or [] %}<call>{{ call.function.name }}</call>{% endfor %}"


def session_of(vision: TinyVision | TinyLayouts, engine: EmbeddedEngine, sees: bool = True) -> Session:
    """Of a template that shows calls, too."""
    tokenizer = copy.deepcopy(vision.tokenizer)
    end = tokenizer.chat_template.rindex("{%")  # of the loop over messages
    tokenizer.chat_template = tokenizer.chat_template[:end] + CALLS + tokenizer.chat_template[end:]
    images = vision.images if sees else None
    episode = EpisodeEngine(engine, tokenizer, None, name="e", seed="s", image_processor=images)
    return Session(episode, Chat(tokenizer), Sampling(6), Budget(), hermes_calls)


def of_openai(there: Door) -> list[int]:
    """Two calls, a picture each; tokens of the prompts as the client is told."""
    client = openai.OpenAI(base_url=there.v1, api_key=there.key, max_retries=0)
    shown: Any = [{"type": "text", "text": "look <|image_pad|>"}, {"type": "image_url", "image_url": {"url": url(A)}}]
    messages: list[Any] = [{"role": "user", "content": shown}]
    first = client.chat.completions.create(model="m", messages=messages)
    then: Any = [{"type": "image_url", "image_url": {"url": url(B), "detail": "auto"}}, {"type": "text", "text": "?"}]
    messages += [{"role": "assistant", "content": first.choices[0].message.content}, {"role": "user", "content": then}]
    second = client.chat.completions.create(model="m", messages=messages)
    return [one.usage.prompt_tokens for one in (first, second) if one.usage]


def of_responses(there: Door) -> list[int]:
    client = openai.OpenAI(base_url=there.v1, api_key=there.key, max_retries=0)

    def told(pixels: np.ndarray, text: str) -> Any:
        image = {"type": "input_image", "image_url": url(pixels), "detail": "auto"}
        return [{"role": "user", "content": [{"type": "input_text", "text": text}, image]}]

    first = client.responses.create(model="m", input=told(A, "look <|image_pad|>"))
    second = client.responses.create(model="m", input=told(B, "?"), previous_response_id=first.id)
    return [one.usage.input_tokens for one in (first, second) if one.usage]


def of_anthropic(there: Door) -> list[int]:
    client = anthropic.Anthropic(base_url=there.address, api_key=there.key, max_retries=0)

    def block(pixels: np.ndarray) -> Any:
        return {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": base64_of(pixels)}}

    messages: list[Any] = [{"role": "user", "content": [{"type": "text", "text": "look <|image_pad|>"}, block(A)]}]
    first = client.messages.create(model="m", messages=messages, max_tokens=6)
    counted = client.messages.count_tokens(model="m", messages=messages).input_tokens
    assert counted == first.usage.input_tokens
    said = "".join(one.text for one in first.content if one.type == "text")
    call = {"type": "tool_use", "id": "1", "name": "look", "input": {}}
    messages += [{"role": "assistant", "content": [{"type": "text", "text": said or "."}, call]}]
    result = {"type": "tool_result", "tool_use_id": "1", "content": [block(B), {"type": "text", "text": "?"}]}
    messages += [{"role": "user", "content": [result]}]
    second = client.messages.create(model="m", messages=messages, max_tokens=6)
    return [first.usage.input_tokens, second.usage.input_tokens]


def of_google(there: Door) -> list[int]:
    """As google-genai sends them: in a message of the user, and in a result."""

    def ask(*contents: Any, method: str = "generateContent") -> Any:
        path = f"{there.address}/v1beta/models/m:{method}"
        headers = {"x-goog-api-key": there.key}
        return httpx.post(path, json={"contents": contents}, headers=headers, timeout=20).json()

    def data(pixels: np.ndarray) -> Any:
        return {"inlineData": {"mimeType": "image/png", "data": base64_of(pixels)}}

    asked = {"role": "user", "parts": [{"text": "look <|image_pad|>"}, data(A)]}
    first = ask(asked)
    counts = [first["usageMetadata"]["promptTokenCount"]]
    assert ask(asked, method="countTokens") == {"totalTokens": counts[0]}
    call = {"functionCall": {"id": "1", "name": "look", "args": {}}}
    result = {"id": "1", "name": "look", "response": {"output": "?"}, "parts": [data(B)]}
    said = {"role": "model", "parts": [*first["candidates"][0]["content"]["parts"], call]}
    second = ask(asked, said, {"role": "user", "parts": [{"functionResponse": result}]})
    return [*counts, second["usageMetadata"]["promptTokenCount"]]


@pytest.mark.parametrize("converse", [of_openai, of_responses, of_anthropic, of_google])
def test_what_clients_show_is_what_the_model_sees(
    vision: TinyVision, engine: EmbeddedEngine, converse: Callable[[Door], list[int]]
) -> None:
    session = session_of(vision, engine)
    with door(session=session) as there:
        told = converse(there)
    calls = session.trajectories(Prompt(id="p"), 1.0)
    pictures = [vision.images.picture(one, "here") for one in (A, B)]
    for k, one in enumerate(calls):
        assert [shown.key for shown in one.pictures] == [shown.key for shown in pictures[: k + 1]]
        assert one.images is not None and told[k] == int((~one.loss_mask).sum())
        assert int((one.images >= 0).sum()) == sum(shown.tokens for shown in one.pictures)
        expected = vision.logprobs(one.tokens.tolist(), one.pictures, one.images.tolist())[one.loss_mask]
        torch.testing.assert_close(one.behavior_logprobs[one.loss_mask], expected, atol=1e-5, rtol=0)


def test_pictures_in_tiles_are_seen_and_counted_with_what_stands_between_them(tmp_path: Path) -> None:
    tiny = TinyLayouts(tmp_path, "Idefics3")
    made = EmbeddedEngine(kv_cache_tokens=4096, num_threads=1)
    made.use_images(tiny.images)
    made.start(tiny.model, version=0, seed=1)
    session = session_of(tiny, made)
    with door(session=session) as there:
        told = of_anthropic(there)
    made.close()
    one = session.trajectories(Prompt(id="p"), 1.0)[0]
    assert told[0] == int((~one.loss_mask).sum()) and one.images is not None
    assert int((one.images >= 0).sum()) == one.pictures[0].tokens
    with torch.no_grad():
        expected = tiny.logprobs(["look <|image_pad|>", A], one.tokens[one.loss_mask].tolist())
    torch.testing.assert_close(one.behavior_logprobs[one.loss_mask], expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("sees", "image", "param", "problem"),
    [
        (False, url(A), "messages[0].content[0].image_url.url", "shown no pictures"),
        (True, "https://example.org/a.png", "messages[0].content[0].image_url.url", "nothing is fetched"),
        (True, "data:image/png;base64,AAAA", "messages[0].content[0].image_url.url", "cannot be read as a picture"),
        (True, "data:image/png,AAAA", "messages[0].content[0].image_url.url", "a data URL must be"),
    ],
)
def test_what_cannot_be_shown_is_refused_by_its_field(
    vision: TinyVision, engine: EmbeddedEngine, sees: bool, image: str, param: str, problem: str
) -> None:
    session = session_of(vision, engine, sees)
    with door(session=session) as there:
        client = openai.OpenAI(base_url=there.v1, api_key=there.key, max_retries=0)
        content: Any = [{"type": "image_url", "image_url": {"url": image}}]
        with pytest.raises(openai.BadRequestError, match=problem) as refused:
            client.chat.completions.create(model="m", messages=[{"role": "user", "content": content}])
        assert refused.value.param == param and param in str(refused.value)
        if sees:
            with pytest.raises(openai.BadRequestError, match="0 pictures, but its tokens have 1 places"):
                client.completions.create(model="m", prompt="a <|image_pad|>")
        answer = client.chat.completions.create(model="m", messages=[{"role": "user", "content": "text"}])
    assert answer.usage is not None and session.fault is None and not session.transcript.calls[0].pictures


class Slow:
    """The model's image processor, which has read no picture until it may."""

    def __init__(self, vision: TinyVision) -> None:
        self.begun, self.may = threading.Event(), threading.Event()
        self._processor = vision.images

    def picture(self, value: Any, where: str) -> Any:
        self.begun.set()
        assert self.may.wait(30)
        return self._processor.picture(value, where)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._processor, name)


@pytest.mark.parametrize("leaves", [False, True])
def test_a_retry_while_pictures_are_read_is_the_same_call(
    vision: TinyVision, engine: EmbeddedEngine, leaves: bool
) -> None:
    slow = Slow(vision)
    episode = EpisodeEngine(engine, vision.tokenizer, None, name="e", seed="s", image_processor=slow)  # type: ignore[arg-type]
    session = Session(episode, Chat(vision.tokenizer), Sampling(6), Budget(), hermes_calls)
    shown: Any = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": url(A)}}]}
    arrived, again = list[bool](), session.again

    async def hear(same: bytes, retried: bool) -> Any:
        arrived.append(retried)
        return await again(same, retried)

    session.again = hear  # type: ignore[method-assign]

    async def converse(there: Door) -> list[str]:
        async with openai.AsyncOpenAI(base_url=there.v1, api_key=there.key, max_retries=0) as client:

            async def ask(retries: int) -> str:
                told = {"x-stainless-retry-count": str(retries)}
                return (await client.chat.completions.create(model="m", messages=[shown], extra_headers=told)).id

            first = asyncio.create_task(ask(0))
            assert await asyncio.to_thread(slow.begun.wait, 30)
            if leaves:
                first.cancel()
                await asyncio.gather(first, return_exceptions=True)
                async with asyncio.timeout(30):
                    while not session.counts["abandoned_calls"]:
                        await asyncio.sleep(0.01)
            second = asyncio.create_task(ask(1))
            async with asyncio.timeout(30):
                while arrived != [False, True]:
                    await asyncio.sleep(0.01)
            slow.may.set()
            return [await one for one in ([second] if leaves else [first, second])]

    with door(session=session) as there:
        names = asyncio.run(converse(there))
    assert len(set(names)) == 1 and len(session.trajectories(Prompt(id="p"), 1.0)) == 1
    assert session.counts["repeated_calls"] == (0 if leaves else 1)
    assert session.counts["abandoned_calls"] == (1 if leaves else 0)


def test_placeholders_that_tools_and_thoughts_spell_are_quoted(vision: TinyVision, engine: EmbeddedEngine) -> None:
    tokenizer, spelled = copy.deepcopy(vision.tokenizer), "<|image_pad|>"
    tokenizer.chat_template = (
        "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}{% for message in messages %}"
        "{{ message.reasoning_content }}{% for call in message.tool_calls or [] %}{{ call | tojson }}{% endfor %}"
        "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
        "<|vision_start|><|image_pad|><|vision_end|>{% endfor %}{% endif %}{% endfor %}"
    )
    episode = EpisodeEngine(engine, tokenizer, None, name="e", seed="s", image_processor=vision.images)
    session = Session(episode, Chat(tokenizer), Sampling(6), Budget(), hermes_calls)
    tool = {"name": "look", "description": spelled, "parameters": {"type": "object", "properties": {spelled: {}}}}
    call = {"id": "1", "type": "function", "function": {"name": "look", "arguments": json.dumps({"at": spelled})}}
    said = {"role": "assistant", "content": None, "reasoning_content": f"I think {spelled}", "tool_calls": [call]}
    told: list[Any] = [{"role": "user", "content": "?"}, said]
    told += [{"role": "tool", "tool_call_id": "1", "content": [{"type": "image_url", "image_url": {"url": url(A)}}]}]
    tools: Any = [{"type": "function", "function": tool}]
    with door(session=session) as there:
        client = openai.OpenAI(base_url=there.v1, api_key=there.key, max_retries=0)
        client.chat.completions.create(model="m", messages=told, tools=tools)
    (one,) = session.trajectories(Prompt(id="p"), 1.0)
    assert [shown.key for shown in one.pictures] == [vision.images.picture(A, "here").key] and one.images is not None
    assert int((one.images >= 0).sum()) == one.pictures[0].tokens
    prompt = vision.tokenizer.decode(one.tokens[~one.loss_mask][one.images[~one.loss_mask] < 0])
    assert prompt.count("< |image_pad|>") == 4 and spelled not in prompt
