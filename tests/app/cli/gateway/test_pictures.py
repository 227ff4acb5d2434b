"""`arborist gateway` with a model that sees: what clients show is sampled behind, and recorded with its pictures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
import torch

from datamodules.files.recording import read_batch, versions
from tests.app.cli.gateway.processes import KEY, client, post, running
from tests.datamodules.workflows.gateway.clients.test_pictures import A, B, base64_of, url
from tests.helpers.tiny_vision import TinyVision


@pytest.mark.slow
def test_sessions_are_recorded_with_what_was_shown(tmp_path: Path) -> None:
    vision, record = TinyVision(tmp_path / "model", sharp=1.0), tmp_path / "recorded"
    with running("--model", vision.path, "--record", str(record), "--max_new_tokens", "6") as (_, at):
        part: Any = {"type": "image_url", "image_url": {"url": url(A)}}
        messages: list[Any] = [{"role": "user", "content": [{"type": "text", "text": "look"}, part]}]
        said = client(at, "chat").chat.completions.create(model="m", messages=messages).choices[0].message.content
        more: Any = [{"type": "image_url", "image_url": {"url": url(B)}}, {"type": "text", "text": "?"}]
        messages += [{"role": "assistant", "content": said}, {"role": "user", "content": more}]
        client(at, "chat").chat.completions.create(model="m", messages=messages)
        image: Any = {"type": "input_image", "image_url": url(A), "detail": "auto"}
        client(at, "responses").responses.create(model="m", input=[{"role": "user", "content": [image]}])
        block: Any = {
            "type": "image",
            "source": {"type": "base64", "media_type": "image/png", "data": base64_of(B)},
        }
        theirs = anthropic.Anthropic(base_url=f"{at}/messages", api_key=KEY, max_retries=0)
        theirs.messages.create(model="m", messages=[{"role": "user", "content": [block]}], max_tokens=6)
        wrong: Any = [{"type": "image_url", "image_url": {"url": "https://example.org/a.png"}}]
        with pytest.raises(openai.BadRequestError, match="nothing is fetched"):
            client(at, "wrong").chat.completions.create(model="m", messages=[{"role": "user", "content": wrong}])
        for name in ("chat", "responses", "messages"):
            post(at, name, "/end", {})
    sessions = [read_batch(record, version)[0].trajectories for version in versions(record)]
    a, b = (vision.images.picture(pixels, "here").key for pixels in (A, B))
    assert [[[shown.key for shown in one.pictures] for one in session] for session in sessions] == [
        [[a], [a, b]],
        [[a]],
        [[b]],
    ]
    for one in (one for session in sessions for one in session):
        assert one.images is not None and int((one.images >= 0).sum()) == sum(shown.tokens for shown in one.pictures)
        expected = vision.logprobs(one.tokens.tolist(), one.pictures, one.images.tolist())[one.loss_mask]
        torch.testing.assert_close(one.behavior_logprobs[one.loss_mask], expected, atol=1e-5, rtol=0)
