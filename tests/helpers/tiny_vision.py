"""A tiny Qwen3-VL in a directory, prompts with pictures for it, and the untouched model as the oracle of both."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from transformers import AutoModelForImageTextToText, AutoTokenizer, PreTrainedModel

from datamodules.conversations.image_processor import ImageProcessor
from datamodules.prompts import Prompt
from datamodules.prompts.dealer import encoded
from datamodules.prompts.tokenizers import encode_prompt
from examples.vision.make_model import write
from tests.helpers.selection import SEES, skip_without


class TinyVision:
    """Patches of 4 x 4 pixels, 2 x 2 of them a token."""

    def __init__(self, directory: Path, sharp: float = 3.0) -> None:
        """`sharp`: what the weights are multiplied by, so that no error hides behind small numbers."""
        skip_without(SEES)
        write(directory, hidden=32, tower=16, patch=4, merge=2)
        self.path = str(directory)
        self.model: PreTrainedModel = AutoModelForImageTextToText.from_pretrained(directory).eval()
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                if "norm" not in name:
                    parameter.mul_(sharp)
        self.tokenizer = AutoTokenizer.from_pretrained(directory)
        found = ImageProcessor.beside(self.path, self.tokenizer)
        assert found is not None
        self.images = found

    def prompt(self, parts: Sequence[str | np.ndarray], name: str = "p", **fields: Any) -> Prompt:
        """A user's message of texts and pictures, encoded."""
        return encoded(unencoded(parts, name, **fields), lambda one: encode_prompt(self.tokenizer, one), self.images)

    @torch.no_grad()
    def logprobs(self, tokens: Sequence[int], shown: Sequence[Any], images: Sequence[int]) -> Tensor:
        """[L]: of each token given those before it (0 at first), by the untouched model, from pixels. `shown`: the
        pictures in the order of their places; `images`: [L], -1 for text."""
        ids = torch.tensor([list(tokens)])
        given: dict[str, Any] = {}
        if shown:
            given = dict(self.images.processor([one.pixels for one in shown], return_tensors="pt"))
            given["mm_token_type_ids"] = (torch.tensor([list(images)]) >= 0).long()
        self.model.model.rope_deltas = None  # what the call before left
        logits = self.model(input_ids=ids, use_cache=False, **given).logits[0, :-1]
        found = logits.log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
        return torch.cat([found.new_zeros(1), found])


def unencoded(parts: Sequence[str | np.ndarray], name: str = "p", **fields: Any) -> Prompt:
    content = [{"type": "text", "text": one} if isinstance(one, str) else {"type": "image"} for one in parts]
    pictures = tuple(one for one in parts if not isinstance(one, str))
    return Prompt(id=name, messages=({"role": "user", "content": content},), pictures=pictures, **fields)


def png(pixels: np.ndarray) -> bytes:
    held = io.BytesIO()
    Image.fromarray(pixels).save(held, "png")
    return held.getvalue()


def noise(seed: int, height: int = 16, width: int = 24) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
