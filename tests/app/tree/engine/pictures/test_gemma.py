"""Gemma's pictures on trees in float64: placeholders that see each other, windows narrower than a picture, layers that
attend to keys of others, inputs of each layer's own."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.models.gemma3 import modeling_gemma3
from transformers.models.gemma4 import modeling_gemma4

from app.tree import PrefixTree, TreeEngine
from app.tree.model.sight import Sight, seen, sight_of
from app.tree.planning.packing import Packing, pack
from app.tree.planning.planner import plan as planned
from app.tree.planning.uncut import Uncut
from tests.app.tree.engine.pictures import vision
from tests.app.tree.engine.pictures.test_parity import PLANS, TEXTS, WORDS, Dense, build, compare, densely

NAMES = ["Gemma 4, shared keys", "Gemma 4, large", "Gemma 3"]
TOGETHER = NAMES[1:]
"""Whose placeholders see each other."""


def gemma4_norm(self: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Of Gemma 4, without rounding to float32."""
    x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)
    return x * self.weight if self.with_scale else x


def gemma3_norm(self: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * (1 + self.weight)


@contextmanager
def exact() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(modeling_gemma4.Gemma4RMSNorm, "forward", gemma4_norm)
        patch.setattr(modeling_gemma3.Gemma3RMSNorm, "forward", gemma3_norm)
        yield


@functools.cache
def made(name: str) -> vision.Vision:
    return vision.make(name, torch.float64)


@functools.cache
def truth(name: str) -> Dense:
    """Of all plans, with norms that are `exact`."""
    return densely(made(name), TEXTS)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("plan", [*PLANS[:5], (6, 12)], ids=str)
def test_pictures_in_every_plan(name: str, plan: tuple[int, int]) -> None:
    """The tower of Gemma 4 pools in float32, whatever its dtype."""
    with exact():
        compare(made(name), TEXTS, plan, 1e-9, 1e-6, truth(name))


@pytest.mark.parametrize("name", NAMES)
def test_pictures_of_a_frozen_tower(name: str) -> None:
    model = vision.make(name, torch.float64)
    for part, parameter in model.model.named_parameters():
        parameter.requires_grad_("vision_tower" not in part)
    with exact():
        compare(model, TEXTS, (7, 14), 1e-9, 1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=25)
@given(words=WORDS, chunk=st.integers(6, 40), live=st.integers(6, 60))
def test_random_trees(name: str, words: list[list[vision.Part]], chunk: int, live: int) -> None:
    with exact():
        compare(made(name), words, (chunk, live), 1e-9, 1e-6)


@settings(max_examples=50, deadline=None)
@given(words=WORDS, chunk=st.integers(6, 40), even=st.booleans(), join=st.booleans())
def test_no_chunk_cuts_a_picture(words: list[list[vision.Part]], chunk: int, even: bool, join: bool) -> None:
    """Every token that has to run is in one chunk, none is too large, and no piece begins inside of a picture."""
    tree = build(made("Gemma 4, large").sequences(words))
    uncut = Uncut.of(tree)
    chunks = pack(tree, Packing(chunk, join, even=even), uncut)
    pieces = [piece for one in chunks for piece in one.pieces]
    tokens = np.concatenate([np.zeros(0, int), *(np.arange(piece.start, piece.stop) for piece in pieces)])
    assert len(np.unique(tokens)) == len(tokens) == tree.num_needed_tokens
    assert all(one.tokens == sum(piece.tokens for piece in one.pieces) <= chunk for one in chunks)
    inside = {token for start, stop in zip(uncut.starts, uncut.stops) for token in range(start + 1, stop)}
    assert not inside & {piece.start for piece in pieces}
    assert not inside & {piece.stop for piece in pieces}


def test_layers_in_which_placeholders_see_each_other() -> None:
    """All of Gemma 3, those with a window of Gemma 4's large models; as the models' own masks have it."""
    assert [sight_of(vision.make(name).model).layers for name in NAMES] == [set(), {0, 2, 4}, {0, 1, 2, 3}]
    assert sight_of(vision.make("Qwen3-VL").model) == Sight()
    is_row = np.array([False, True, True, True, False, True, True, False, False])
    model = vision.make("Gemma 3").model
    kinds = torch.from_numpy(is_row.astype(np.int64))[None]
    masks = model.create_masks_for_generate(model.config, torch.zeros(1, 9, 1), None, None, None, kinds)
    assert np.array_equal(masks["sliding_attention"][0, 0].numpy(), seen(is_row, True, 3))
    assert np.array_equal(masks["full_attention"][0, 0].numpy(), seen(is_row, True, None))


@pytest.mark.parametrize("name", NAMES)
def test_the_self_check_reads_masks_that_are_added_to_scores(name: str) -> None:
    model = vision.make(name)
    model.model.config.get_text_config()._attn_implementation = "eager"
    report = TreeEngine(model.model, image_processor=model.processor).verify(build(model.sequences(TEXTS)))
    assert report is not None and report.passed, str(report)
    is_row = np.array([False, True, True])
    assert not Sight().differs({"full_attention": object()}, is_row)  # of a kernel of its own
    assert Sight().differs({"full_attention": torch.ones(1, 1, 3, 3, dtype=torch.bool)}, is_row)


def test_placeholders_that_see_other_pictures_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a prefix is would depend on what follows it."""
    vision.all_pictures_see_each_other(monkeypatch)
    model = vision.make("Gemma 3")
    with pytest.raises(
        ValueError, match=r"see tokens after them in Gemma3For.*, others than those of their own picture"
    ):
        TreeEngine(model.model, image_processor=model.processor).forward(build(model.sequences(TEXTS)))


@pytest.mark.parametrize("budgets", [(5, 100), (100, 5)])
def test_chunks_too_small_for_a_picture_are_refused(budgets: tuple[int, int]) -> None:
    model = made("Gemma 4, large")
    tree = build(model.sequences(TEXTS))
    name = "chunk_tokens" if budgets[0] == 5 else "live_tokens"
    engine = TreeEngine(model.model, *budgets, image_processor=model.processor, checkpointing=False)
    with pytest.raises(ValueError, match=rf"{name}: a picture has 6 placeholders .* set {name} to at least 6"):
        engine.backward(tree, lambda out, i: out.logprobs.sum())
    assert planned(build(model.sequences([[1, 2, 3]])), 1, 1).chunks  # of text alone


@pytest.mark.parametrize("name", TOGETHER)
def test_other_backends_are_refused(name: str) -> None:
    model = made(name)
    engine = TreeEngine(model.model, attention="flex", image_processor=model.processor)
    with pytest.raises(ValueError, match=r"attention='flex' lets tokens see those before .*use attention='sdpa' \(or"):
        engine.forward(build(model.sequences(TEXTS)))
    engine.forward(PrefixTree.build([np.array([1, 2, 3]), np.array([1, 2, 4])]))


def test_pictures_that_a_model_would_take_for_one_are_refused() -> None:
    model = made("Gemma 3")
    sequences = model.sequences([["A", "B", 1]])
    keep = [i for i, token in enumerate(sequences.tokens[0]) if token not in (vision.START, vision.END)]
    sequences.tokens[0], sequences.images[0] = sequences.tokens[0][keep], sequences.images[0][keep]
    with pytest.raises(ValueError, match=r"pictures\[1\] follows another without a token between them"):
        TreeEngine(model.model, image_processor=model.processor).forward(build(sequences))


def test_a_picture_that_is_laid_out_in_two_ways_is_refused() -> None:
    """What its first placeholders see would differ."""
    model = made("Gemma 3")
    tokens = [
        np.array([1, *[vision.IMAGE] * 4, 2, 3]),
        np.array([1, *[vision.IMAGE] * 2, 5, *[vision.IMAGE] * 2, 2, 3]),
    ]
    images = [np.where(one == vision.IMAGE, 0, -1) for one in tokens]
    tree = PrefixTree.build(tokens, images=images, pictures=[model.pictures["A"]])
    with pytest.raises(ValueError, match=r"pictures\[0\] has text between its placeholders in one sequence and none"):
        TreeEngine(model.model, image_processor=model.processor).forward(tree)
