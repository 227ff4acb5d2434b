"""Trajectories with pictures: made of noise, and laid out as prompts are."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from app.batch import RolloutBatch, Trajectory
from app.pictures import Picture

PLACEHOLDER = 7


def picture(seed: int, tokens: int = 4, height: int = 4, width: int = 6) -> Picture:
    return Picture.of(np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8), tokens, b"tests")


def pictured(layout: list[Picture | int], reply: int = 3, **fields: Any) -> Trajectory:
    """A prompt of pictures and text ids, in that order, and a reply of `reply` trained tokens."""
    tokens: list[int] = []
    images: list[int] = []
    pictures: list[Picture] = []
    for part in layout:
        if isinstance(part, int):
            tokens.append(part)
            images.append(-1)
            continue
        if part not in pictures:
            pictures.append(part)
        tokens += [PLACEHOLDER] * part.tokens
        images += [pictures.index(part)] * part.tokens
    trained = torch.arange(len(tokens) + reply) >= len(tokens)
    given: dict[str, Any] = {
        "tokens": tokens + list(range(20, 20 + reply)),
        "loss_mask": trained,
        "behavior_logprobs": torch.where(trained, -1.5, 0.0),
        "versions": torch.where(trained, 0, -1),
        "reward": 1.0,
        "group_id": 0,
        "episode_id": 0,
        "prompt_id": "shown",
        "images": images + [-1] * reply if pictures else None,
        "pictures": tuple(pictures),
    }
    return Trajectory(**{**given, **fields})


def pictured_batch() -> RolloutBatch:
    """Two pictures over four sequences: shared, in the other order, twice, at the very start; and one of text alone."""
    a, b = picture(0), picture(1)
    layouts: list[list[Picture | int]] = [[1, a, 2], [1, b, 2, a, 3], [5, 6], [a, 2, a, 4], [1, a, 2, b, 3]]
    return RolloutBatch.from_trajectories(
        pictured(layout, group_id=i // 2, episode_id=i, prompt_id=f"shown {i}") for i, layout in enumerate(layouts)
    )
