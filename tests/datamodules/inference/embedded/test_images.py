"""Pictures through the embedded engine: sampled log-probabilities are those of the untouched model, which runs every
sequence alone from its pixels; a tower runs once a picture, and never on weights that are gone."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch

from datamodules.inference import EmbeddedEngine
from datamodules.inference.protocol import GenerationError, GenerationRequest, GenerationResponse, WeightUpdate
from datamodules.prompts import Prompt
from tests.helpers.tiny_vision import TinyVision, noise

A, B, WIDE = noise(1), noise(2), noise(3, 8, 40)


@pytest.fixture(scope="module")
def vision(tmp_path_factory: pytest.TempPathFactory) -> TinyVision:
    return TinyVision(tmp_path_factory.mktemp("vision"))


def engine(vision: TinyVision, **options: Any) -> EmbeddedEngine:
    made = EmbeddedEngine(**{"kv_cache_tokens": 4096, "num_threads": 1, **options})
    made.use_images(vision.images)
    made.start(vision.model, version=0, seed=1)
    return made


def request(prompt: Prompt, count: int = 6, **fields: Any) -> GenerationRequest:
    images = list(prompt.images) if prompt.pictures else None
    return GenerationRequest(list(prompt.tokens), count, images=images, pictures=prompt.pictures, **fields)


def run(made: EmbeddedEngine, requests: list[GenerationRequest]) -> list[GenerationResponse]:
    async def together() -> list[GenerationResponse]:
        return list(await asyncio.gather(*(made.generate(one) for one in requests)))

    return asyncio.run(together())


def off_by(vision: TinyVision, one: GenerationRequest, response: GenerationResponse) -> float:
    """Largest difference of the reply's log-probabilities to the untouched model's."""
    tokens = [*one.tokens, *response.tokens]
    images = [*(one.images or [-1] * len(one.tokens)), *[-1] * len(response.tokens)]
    places = [k for at, k in enumerate(images) if k >= 0 and (at == 0 or images[at - 1] != k)]
    expected = vision.logprobs(tokens, [one.pictures[k] for k in places], images)[len(one.tokens) :]
    return float((torch.tensor(response.logprobs) - expected).abs().max())


def prompts(vision: TinyVision) -> list[Prompt]:
    """Equal ids on two pictures; other grids, two and the same twice; a picture first; text alone."""
    return [
        vision.prompt(["look ", A, " how many?"]),
        vision.prompt(["look ", B, " how many?"]),
        vision.prompt([WIDE, "a", A, "b"]),
        vision.prompt([A, "a", A, "b"]),
        vision.prompt(["text alone, of about the length"]),
    ]


@pytest.mark.parametrize("options", [{}, {"max_batch_tokens": 5}, {"max_concurrent": 3}], ids=str)
def test_sampled_log_probabilities_are_the_models(vision: TinyVision, options: dict[str, Any]) -> None:
    """Chunks of 5 tokens begin and end inside of pictures."""
    made = engine(vision, **options)
    asked = [request(one) for one in prompts(vision) for _ in range(2)]
    replies = run(made, asked)
    made.close()
    assert max(off_by(vision, one, reply) for one, reply in zip(asked, replies)) < 1e-5


@pytest.mark.parametrize("options", [{}, {"max_batch_tokens": 5, "max_concurrent": 3}], ids=str)
def test_decode_steps_of_few_sizes_count_pictures_too(vision: TinyVision, options: dict[str, Any]) -> None:
    """Prompts of one token among them, a picture's too."""
    made = engine(vision, cuda_graphs=True, **options)
    assert made.health()["decoding"] == "padded"
    picture = vision.images.picture(noise(4, 8, 8), "here")
    assert picture.tokens == 1
    lone = GenerationRequest([vision.images.placeholder], 6, images=[0], pictures=(picture,))
    asked = [request(one, 9) for one in prompts(vision) for _ in range(2)] + [lone, GenerationRequest([7], 6)]
    replies = run(made, asked)
    made.close()
    assert max(off_by(vision, one, reply) for one, reply in zip(asked, replies)) < 1e-5


def test_equal_ids_with_another_picture_share_nothing(vision: TinyVision) -> None:
    made = engine(vision)
    first, second = prompts(vision)[:2]
    assert first.tokens == second.tokens and first.images == second.images
    asked = [request(one, temperature=0.0) for one in (first, second, first)]
    replies = run(made, asked)
    made.close()
    assert replies[0].tokens == replies[2].tokens
    assert replies[0].logprobs == pytest.approx(replies[2].logprobs, abs=1e-5)
    assert abs(replies[0].logprobs[0] - replies[1].logprobs[0]) > 1e-2 or replies[0].tokens != replies[1].tokens


def test_a_tower_runs_once_a_picture_and_again_with_new_weights(vision: TinyVision) -> None:
    made = engine(vision)
    asked = [request(one) for one in prompts(vision) for _ in range(4)]
    run(made, asked)
    tower = made._batcher.tower  # type: ignore[union-attr]
    assert tower is not None and tower.runs == 3
    run(made, asked)
    assert tower.runs == 3
    other = {name: t.clone() for name, t in vision.model.state_dict().items()}
    name = next(name for name in other if "visual.patch_embed" in name)
    other[name] *= -1.5
    made.update_weights(WeightUpdate(version=1, state_dict=other))
    again = request(prompts(vision)[0], seed=3)
    (reply,) = run(made, [again])
    made.close()
    assert tower.runs == 4 and off_by(vision, again, reply) > 1e-3
    before = vision.model.state_dict()[name].clone()
    vision.model.load_state_dict(other)
    assert off_by(vision, again, reply) < 1e-5
    other[name] = before
    vision.model.load_state_dict(other)


def test_weights_that_come_in_the_middle_of_replies(vision: TinyVision) -> None:
    """Everything is computed anew, the tower's features included: tokens that follow are those of the new weights."""
    made = engine(vision)
    kept = {name: tensor.clone() for name, tensor in vision.model.state_dict().items()}
    new = {name: tensor * (1.3 if "visual" in name and "norm" not in name else 1) for name, tensor in kept.items()}
    seen = asyncio.Event()

    async def both() -> tuple[GenerationRequest, GenerationResponse]:
        loop = asyncio.get_running_loop()
        one = request(prompts(vision)[2], 60, on_tokens=lambda *_: loop.call_soon_threadsafe(seen.set))
        task = asyncio.create_task(made.generate(one))
        await seen.wait()
        await asyncio.to_thread(made.update_weights, WeightUpdate(version=1, state_dict=new))
        return one, await task

    one, reply = asyncio.run(both())
    made.close()
    after = [k for k, version in enumerate(reply.versions) if version == 1]
    assert 0 < len(after) < 60 and len(reply.tokens) == 60
    vision.model.load_state_dict(new)
    tokens = [*one.tokens, *reply.tokens]
    images = [*(one.images or []), *[-1] * 60]
    expected = vision.logprobs(tokens, one.pictures, images)[len(one.tokens) :]
    vision.model.load_state_dict(kept)
    difference = (torch.tensor(reply.logprobs) - expected).abs()
    assert difference[after].max() < 1e-5 and difference[0] > 1e-3


def test_requests_that_do_not_fit_are_refused_by_name(vision: TinyVision) -> None:
    made = engine(vision)
    prompt = prompts(vision)[0]
    short = request(prompt)
    short.images = short.images[:-1]  # type: ignore[index]
    with pytest.raises(GenerationError, match=r"GenerationRequest.images: .* entries for .* tokens and 1 pictures"):
        run(made, [short])
    made.close()
    blind = EmbeddedEngine(kv_cache_tokens=512, num_threads=1)
    blind.start(vision.model, version=0, seed=1)
    with pytest.raises(GenerationError, match=r"request.pictures: the engine was started without"):
        run(blind, [request(prompt)])
    blind.close()
