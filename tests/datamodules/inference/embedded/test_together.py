"""Placeholders that see each other, in the embedded engine: log-probabilities are the untouched model's, whatever
prompts are computed together, and no forward has a part of a picture."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from datamodules.inference import EmbeddedEngine
from datamodules.inference.protocol import GenerationError, GenerationRequest, GenerationResponse
from tests.app.tree.engine.pictures import vision

NAMES = ["Gemma 3", "Gemma 4, large"]
TEXTS: list[list[vision.Part]] = [
    [1, 2, "A", 5, 6, 7],
    [1, 2, "B", 5, 6, 7],
    [1, 2, "A", 5, 6, 7],
    [1, 3, "A", 6, "D", 9, "C", 10, 11, 12, 13, 14, 15],
    ["B", 4],
    [1, 2, 5],
]


def engine(model: vision.Vision, **options: Any) -> EmbeddedEngine:
    made = EmbeddedEngine(kv_cache_tokens=2048, num_threads=1, **options)
    images: Any = SimpleNamespace(processor=model.processor)
    made.use_images(images)
    made.start(model.model, version=0, seed=1)
    return made


def asked(model: vision.Vision) -> list[GenerationRequest]:
    found = []
    for text in TEXTS:
        one = model.sequences([text])
        shown: dict[str, Any] = {"images": one.images[0].tolist(), "pictures": tuple(one.pictures)}
        more = shown if one.pictures else {}
        found.append(GenerationRequest(one.tokens[0].tolist(), 5, stop_token_ids=(vision.IMAGE,), **more))
    return found


def off_by(model: vision.Vision, text: list[vision.Part], reply: GenerationResponse) -> float:
    sequences = model.sequences([text])
    given = sequences.arguments(0)
    tokens = [*sequences.tokens[0].tolist(), *reply.tokens[:-1]]  # the last may be a placeholder that was sampled
    ids = torch.tensor(tokens)[None]
    for name in ("token_type_ids", "mm_token_type_ids"):
        if name in given:
            given[name] = torch.nn.functional.pad(given[name], (0, len(reply.tokens) - 1))
    with torch.no_grad():
        logprobs = model.model(input_ids=ids, use_cache=False, **given).logits[0].log_softmax(-1)
    expected = logprobs[-len(reply.tokens) :].gather(1, torch.tensor(reply.tokens)[:, None])[:, 0]
    return float((torch.tensor(reply.logprobs) - expected).abs().max())


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "options", [{}, {"max_batch_tokens": 8}, {"max_concurrent": 2}, {"cuda_graphs": True}], ids=str
)
def test_log_probabilities_are_the_untouched_models(name: str, options: dict[str, Any]) -> None:
    """Chunks of 8 tokens would end inside of pictures."""
    model = vision.make(name)
    made = engine(model, **options)

    async def together() -> list[GenerationResponse]:
        return list(await asyncio.gather(*(made.generate(one) for one in asked(model))))

    replies = asyncio.run(together())
    made.close()
    assert max(off_by(model, text, reply) for text, reply in zip(TEXTS, replies, strict=True)) < 2e-5


@pytest.mark.parametrize("name", NAMES)
def test_pictures_larger_than_a_forward_are_refused(name: str) -> None:
    model = vision.make(name)
    made = engine(model, max_batch_tokens=3)
    with pytest.raises(
        GenerationError, match=r"request.pictures: .* placeholders next to .* max_batch_tokens=3 tokens"
    ):
        asyncio.run(made.generate(asked(model)[0]))
    assert asyncio.run(made.generate(asked(model)[-1])).tokens
    made.close()
