"""The self-check with pictures: right models pass, and what is forgotten of a picture is named in the first step."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch

from app.exchange import OneProcess
from app.tree import SelfCheckError, TreeEngine
from app.tree.model import pictures, positions
from app.tree.model.pictures import PicturePass, Tower
from modules.ranks import RankWork
from tests.app.tree.engine.pictures import vision
from tests.app.tree.engine.pictures.test_parity import TEXTS, build
from tests.app.tree.parity import assert_unchanged, snapshot

ONE_PICTURE: list[list[vision.Part]] = [[1, 2, "A", 5, 6, 7, 8], [1, 2, "A", 5, 9, 10]]


def step(model: vision.Vision, texts: list[list[vision.Part]]) -> None:
    engine = TreeEngine(model.model, image_processor=model.processor, self_check=True)
    engine.backward(build(model.sequences(texts)), lambda out, i: out.logprobs.sum())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("texts", [TEXTS, ONE_PICTURE, [["A", 5, 6]], [[1, "D"], [1, 2, 3]]], ids=len)
def test_right_ones_pass(texts: list[list[vision.Part]], dtype: torch.dtype) -> None:
    model = vision.make("Qwen3-VL", dtype)
    before = snapshot(model.model)
    engine = TreeEngine(model.model, image_processor=model.processor)
    report = engine.verify(build(model.sequences(texts)))
    assert report is not None and report.passed, report
    assert_unchanged(model.model, before)
    assert engine.tower.runs <= 2 * (1 + 1)  # two pictures, over the tree and to look at what enters


def test_the_sample_has_every_way_to_go_wrong() -> None:
    """Equal ids under two pictures, a fork right after one, and one in a later turn."""
    from app.tree.model.picture_check import picture_sample

    sample = picture_sample(build(vision.make("Qwen3-VL").sequences(TEXTS)), vision.IMAGE)
    assert sample is not None and sample.images is not None
    first, forked, other, later = (s.tolist() for s in sample.sequences)
    assert first == other and sample.images[0].tolist() != sample.images[2].tolist()
    end = int(np.flatnonzero(sample.images[0] >= 0)[-1]) + 1
    assert first[:end] == forked[:end] and first[end] != forked[end]
    assert len(sample.seen(3)[0]) == 2 and later[: len(first)] == first


def identity(monkeypatch: pytest.MonkeyPatch) -> None:
    """All pictures of a size are one."""
    monkeypatch.setattr(
        "app.tree.prefix_tree._rows",
        lambda owners, starts, name, places: np.arange(len(owners)) % int(starts[1]),
    )


def three_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens are counted, as in models of text."""
    monkeypatch.setattr(PicturePass, "position_ids", lambda self, tokens, depths: depths)


def deepstack(monkeypatch: pytest.MonkeyPatch) -> None:
    """Zeros instead of deepstack features."""
    wrapped = Tower.wrapped
    monkeypatch.setattr(
        Tower, "wrapped", lambda self, tables: wrapped(self, [tables[0], *(0 * table for table in tables[1:])])
    )


def advance(monkeypatch: pytest.MonkeyPatch) -> None:
    """What follows a picture goes on as if it were one token."""
    ask = positions._ask
    monkeypatch.setattr(positions, "_ask", lambda *shape: (ask(*shape)[0], 1))


def features(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of a picture in another order."""
    rows = pictures._rows
    monkeypatch.setattr(pictures, "_rows", lambda given: rows(given).flip(0))


MISTAKES: dict[Any, str] = {
    identity: "'inputs_embeds' differs from the model's own",
    three_positions: "'position_ids' differs from the model's own",
    advance: "'position_ids' differs from the model's own",
    deepstack: r"'deepstack_visual_embeds\[0\]' differs from the model's own",
    features: "'inputs_embeds' differs from the model's own",
}


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.__name__)
@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow)])
def test_what_is_forgotten_is_named(mistake: Any, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    model = vision.make("Qwen3-VL", dtype)
    mistake(monkeypatch)
    with pytest.raises(SelfCheckError, match=MISTAKES[mistake]):
        step(model, ONE_PICTURE)
    assert all(parameter.grad is None for parameter in model.model.parameters())


def test_gradients_of_the_tower_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of deepstack features do not come back."""
    owe = PicturePass.owe

    def forgetful(self: PicturePass, taken: Any) -> None:
        for leaf in taken.leaves[1:] if taken is not None else ():
            leaf.grad = None
        owe(self, taken)

    monkeypatch.setattr(PicturePass, "owe", forgetful)
    with pytest.raises(SelfCheckError, match="visual"):
        step(vision.make("Qwen3-VL"), ONE_PICTURE)


def test_pictures_that_come_after_text_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    model = vision.make("Qwen3-VL")
    engine = TreeEngine(model.model, image_processor=model.processor, self_check=True)
    engine.backward(build(model.sequences([[1, 2, 5, 6], [1, 2, 7]])), lambda out, i: out.logprobs.sum())
    model.model.zero_grad()
    advance(monkeypatch)
    with pytest.raises(SelfCheckError, match=MISTAKES[advance]):
        engine.backward(build(model.sequences(ONE_PICTURE)), lambda out, i: out.logprobs.sum())


def test_ranks_whose_parts_have_no_pictures_wait_for_those_that_have(monkeypatch: pytest.MonkeyPatch) -> None:
    model = vision.make("Qwen3-VL")
    engine = TreeEngine(model.model, self_check=False, image_processor=model.processor)
    ranks = RankWork(OneProcess(), "tree", lambda name: nullcontext(engine))
    text = build(model.sequences([[1, 2, 5, 6], [1, 2, 7]]))
    unchecked = ranks.verify_together(engine, text, ("logprobs",), False, {False, True})
    assert unchecked == {True} == ranks.verify_together(engine, text, ("logprobs",), False, unchecked)
    pictured = build(model.sequences(ONE_PICTURE))
    assert ranks.verify_together(engine, pictured, ("logprobs",), False, unchecked) == set()
    advance(monkeypatch)
    engine = TreeEngine(model.model, self_check=False, image_processor=model.processor)
    with pytest.raises(SelfCheckError, match="position_ids"):
        ranks.verify_together(engine, pictured, ("logprobs",), False, unchecked)


def test_a_model_that_cannot_count_a_picture_says_of_which(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever it raises: some take the next of what they were not given."""
    model = vision.make("Qwen3-VL", torch.float32)
    monkeypatch.setattr(model.model.model, "get_rope_index", lambda image_grid_thw: next(iter([])))
    engine = TreeEngine(model.model, image_processor=model.processor, self_check=False)
    with pytest.raises(ValueError, match=r"could not count .* of a picture of \d+ x \d+ features .*: StopIteration"):
        engine.backward(build(model.sequences(ONE_PICTURE)), lambda out, i: out.logprobs.sum())
