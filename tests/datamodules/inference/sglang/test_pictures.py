"""Requests with pictures in the form servers take, and answers of servers that read them otherwise."""

from __future__ import annotations

import base64
import io
from typing import Any

import numpy as np
import pytest
from PIL import Image

from datamodules.inference.protocol import GenerationError, GenerationRequest
from datamodules.inference.sglang.engine import SGLangEngine
from datamodules.inference.sglang.model_match import refuse_trained_tower
from datamodules.inference.sglang.output import Output
from datamodules.inference.sglang.requests import request_body
from datamodules.inference.sglang.router import PrefixRouter
from tests.helpers.pictured import PLACEHOLDER, picture
from tests.helpers.tiny_vision import TinyVision

A, B = picture(0, 4), picture(1, 4)


def an_output(*pictures: Any, count: int = 3) -> Output:
    """ "1, A, 2, B, 3" and their like."""
    distinct = list(dict.fromkeys(pictures))
    tokens, images = [1], [-1]
    for number, one in enumerate(pictures):
        tokens += [PLACEHOLDER] * one.tokens + [2 + number]
        images += [distinct.index(one)] * one.tokens + [-1]
    request = GenerationRequest(tokens, count, request_id="r", images=images, pictures=tuple(distinct))
    output = Output(request, 100)
    output.begin(0)
    return output


def report(tokens: list[int], prompt: Any, ended: bool = True) -> dict[str, Any]:
    meta: dict[str, Any] = {
        "completion_tokens": len(tokens),
        "weight_version": "0",
        "output_token_logprobs": [[-1.0, token, None] for token in tokens],
        "finish_reason": {"type": "length", "length": len(tokens)} if ended else None,
        "weight_versions": [{"version": "0", "start": 0, "end": len(tokens)}],
    }
    return {"output_ids": tokens, "meta_info": meta, **({} if prompt is None else {"prompt_token_ids": prompt})}


def test_a_request_has_one_placeholder_a_picture_and_their_pixels() -> None:
    body = request_body(an_output(A, B, A), "name", 8, True)
    assert body["input_ids"] == [1, PLACEHOLDER, 2, PLACEHOLDER, 3, PLACEHOLDER, 4]
    assert body["return_prompt_token_ids"] is True
    sent = [np.array(Image.open(io.BytesIO(base64.b64decode(one)))) for one in body["image_data"]]
    assert [np.array_equal(pixels, one.pixels) for pixels, one in zip(sent, (A, B, A), strict=True)] == [True] * 3
    text = request_body(Output(GenerationRequest([1, 2], 3), 100), "name", 8, True)
    assert "image_data" not in text and "return_prompt_token_ids" not in text


def test_a_request_that_goes_on_elsewhere_sends_its_pictures_again() -> None:
    output = an_output(A)
    prompt = output.prompt()
    assert output.add(report([9], prompt, ended=False), {"0": 0}, True) is False
    assert output.keep() == 1
    body = request_body(output, "name", 8, True)
    assert body["input_ids"] == [1, PLACEHOLDER, 2, 9] and len(body["image_data"]) == 1
    assert output.add(report([5, 6], [*prompt, 9]), {"0": 0}, True)
    assert output.response().tokens == [9, 5, 6]


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (None, "it does not say which tokens it made of the prompt's pictures"),
        (
            [1, *[PLACEHOLDER] * 3, 2],
            r"read a prompt with pictures as 5 tokens, the trainer as 6, and they part at.* 4:",
        ),
        (
            [1, *[PLACEHOLDER] * 4, 3],
            "as 6 tokens, the trainer as 6, and they part at position 5: start it with the ima",
        ),
        ([1, *[PLACEHOLDER] * 4], "as 5 tokens, the trainer as 6, and they part at position 5"),
        ("text", "prompt_token_ids is a str"),
        ([1, -1], "an entry of prompt_token_ids is -1"),
    ],
)
def test_a_server_that_reads_a_prompt_otherwise_is_an_error_by_name(prompt: Any, message: str) -> None:
    with pytest.raises(GenerationError, match=message):
        an_output(A).add(report([5, 6, 7], prompt), {"0": 0}, True)


def test_routers_tell_pictures_apart_that_have_equal_ids() -> None:
    one, other = an_output(A), an_output(B)
    assert one.prompt() == other.prompt() and one.affinity() != other.affinity()
    assert an_output(A).affinity() == one.affinity() and len(one.affinity()) == len(one.prompt())
    router = PrefixRouter(load_tokens=1)
    first = router.choose(one.affinity(), {"a": 0, "b": 0})
    assert router.choose(one.affinity(), {"a": 3, "b": 2} if first == "a" else {"a": 2, "b": 3}) == first
    assert router.choose(other.affinity(), {"a": 3, "b": 2} if first == "a" else {"a": 2, "b": 3}) != first


def test_a_trained_tower_is_refused_and_launched_servers_show_nothing(tmp_path_factory: pytest.TempPathFactory) -> None:
    vision = TinyVision(tmp_path_factory.mktemp("vision"))
    with pytest.raises(
        GenerationError, match=r"visual.*is trained, and servers keep the features .*train_tower to false"
    ):
        refuse_trained_tower(vision.model)
    engine = SGLangEngine(urls=["http://127.0.0.1:9"])
    engine.use_images(vision.images)
    with pytest.raises(GenerationError, match="is trained, and servers keep"):
        engine.start(vision.model, 0, 0)
    for name, parameter in vision.model.named_parameters():
        parameter.requires_grad_("visual" not in name)
    refuse_trained_tower(vision.model)
