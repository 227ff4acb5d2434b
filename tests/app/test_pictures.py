"""Pictures in trajectories and batches: once each, whole, apart, untrained; anything else is refused by name."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from app.batch import BatchError, RolloutBatch
from app.pictures import Picture, key_of, used, whole
from tests.helpers.pictured import picture, pictured, pictured_batch

A, B = picture(0), picture(1)


def shown(batch: RolloutBatch) -> list[list[bytes | None]]:
    """Of each sequence, the key of the picture at every token."""
    if batch.images is None:
        return [[None] * length for length in batch.lengths().tolist()]
    keys = [picture.key for picture in batch.pictures] + [None]
    return [[keys[i] for i in images.tolist()] for images in batch.split(batch.images)]


def test_keys_tell_pixels_shapes_and_processors_apart_and_nothing_else() -> None:
    pixels = np.zeros((2, 6, 3), np.uint8)
    other = pixels.copy()
    other[1, 5, 2] = 1
    keys = [key_of(one) for one in (pixels, other, pixels.reshape(3, 4, 3), pixels.reshape(6, 2, 3))]
    assert len({*keys, key_of(pixels, b"x")}) == 5 and {len(key) for key in keys} == {16}
    assert key_of(np.asfortranarray(pixels)) == key_of(pixels.copy()) == Picture.of(pixels, 3).key


def test_a_picture_is_never_changed() -> None:
    pixels = np.zeros((2, 6, 3), np.uint8)
    with pytest.raises(ValueError, match="read-only"):
        Picture.of(pixels, 1).pixels[0] = 1
    pixels[0] = 1  # the caller's own is still its own to write


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"key": b"short"}, "Picture.key: expected 16 bytes, got b'short'"),
        ({"pixels": np.zeros((2, 2, 4), np.uint8)}, r"Picture.pixels: expected uint8 \[height, width, 3\].*RGB"),
        ({"pixels": np.zeros((2, 2, 3))}, r"got float64 \(2, 2, 3\)"),
        ({"pixels": np.zeros((0, 2, 3), np.uint8)}, r"Picture.pixels: \(0, 2, 3\) has no pixel"),
        ({"pixels": "no.png"}, "Picture.pixels: .*got str"),
        ({"tokens": 0}, "Picture.tokens: expected an integer of at least 1, got 0"),
    ],
)
def test_what_is_no_picture_is_refused_by_name(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(BatchError, match=message):
        Picture(**{"key": A.key, "pixels": A.pixels, "tokens": 4, **fields})


@pytest.mark.parametrize(
    ("images", "message"),
    [
        ([-1, 0, 0, 0, -1, -1], r"position 3: a picture ends after 3 of its 4 tokens"),
        ([-1, -1, -1, 0, 0, 0], r"position 5: a picture ends after 3 of its 4"),
        ([0, 0, 1, 1, 1, 1], "position 1: a picture ends after 2 of its 4"),
        ([0, 0, 0, 0, 1, 1, 1, 1], "position 4: a picture follows another at once"),
        ([0, 0, 0, 0, 0, 0, 0, 0], "position 4: a picture follows another at once"),
        ([-1, 2, 2, 2, 2, -1], r"position 1: picture 2, but there are 2"),
        ([-1, -2, 0, 0, 0, -1], "position 1: picture -2, but there are"),
        ([-1, 0, 0, 0, 0], r"images of shown has 5 entries but tokens has 6"),
        ([-1, 0.5, 0, 0, 0, -1], "Trajectory.images of shown: expected integers"),
        (None, "Trajectory.images of shown has 0 entries"),
    ],
)
def test_cut_touching_and_unknown_pictures_are_refused_by_name(images: Any, message: str) -> None:
    length = max(6, len(images or ()))
    given = {"tokens": [7] * length, "loss_mask": [False] * length, "versions": [-1] * length, "images": images}
    pictures = (A, B) if not isinstance(images, list) or 1 in images or 2 in images else (A,)
    with pytest.raises(BatchError, match=message):
        pictured([1], **given, behavior_logprobs=[0.0] * length, pictures=pictures)


def test_trained_idle_and_double_pictures_are_refused_by_name() -> None:
    with pytest.raises(BatchError, match="images of shown at position 2: a token of a picture is trained"):
        pictured([1, A, 2], reply=0, loss_mask=[False, False, True, False, False, False])
    with pytest.raises(BatchError, match="images of shown: picture 1 is at no token: leave it out"):
        pictured([1, A, 2], pictures=(A, B))
    with pytest.raises(BatchError, match="two pictures have the same key"):
        pictured([1, A, 2], pictures=(A, picture(0)))
    other = Picture(A.key, A.pixels, 2)
    with pytest.raises(BatchError, match=f"Picture.key {A.key.hex()}: of pictures of"):
        RolloutBatch.from_trajectories([pictured([1, A, 2]), pictured([1, other, 2])])


def test_a_batch_names_sequence_and_position() -> None:
    batch = pictured_batch()
    images = batch.images.clone()  # type: ignore[union-attr]
    images[batch.cu_seqlens[3] + 2] = -1
    tensors = {**batch.tensors(), "images": images}
    texts = (batch.prompt_ids, batch.finish_reasons, batch.metadata)
    with pytest.raises(
        BatchError, match=r"RolloutBatch.images at position 8 of sequence 3 \(prompt 'shown 3'\): a pic"
    ):
        RolloutBatch.from_tensors(tensors, *texts, batch.pictures)
    with pytest.raises(BatchError, match=r"RolloutBatch.images: expected torch.int32.*got torch.int64"):
        RolloutBatch.from_tensors({**tensors, "images": images.long()}, *texts, batch.pictures)
    with pytest.raises(BatchError, match=r"RolloutBatch.images.*got None"):
        RolloutBatch.from_tensors({k: v for k, v in tensors.items() if k != "images"}, *texts, batch.pictures)


def test_a_batch_holds_each_picture_once_and_select_keeps_those_shown() -> None:
    batch = pictured_batch()
    assert [one.key for one in batch.pictures] == [A.key, B.key] and batch.images is not None
    assert batch.images.dtype == torch.int32
    assert shown(batch)[1] == [None, *[B.key] * 4, None, *[A.key] * 4, *[None] * 4]
    only = batch.select([2])
    assert only.images is None and only.pictures == () and "images" not in only.tensors()
    back = batch.select([4, 0])
    assert shown(back) == [shown(batch)[4], shown(batch)[0]]
    assert batch.select([0, 3]).pictures == (batch.pictures[0],)
    for view in (batch.without("columns", "metadata"), batch.with_columns({}), batch.with_rewards(batch.rewards)):
        assert view.images is batch.images and view.pictures is batch.pictures


def test_batches_of_text_alone_have_neither() -> None:
    batch = RolloutBatch.from_trajectories([pictured([1, 2]), pictured([3], images=[-1] * 4)])
    assert batch.images is None and batch.pictures == () and "images" not in batch.tensors()


@given(st.lists(st.sampled_from([-1, 0, 1, 2]), max_size=8))
def test_what_is_used_shows_the_same(images: list[int]) -> None:
    pictures = (A, B, picture(2))
    column, kept = used(torch.tensor(images, dtype=torch.int32), pictures)
    expected = [None if i < 0 else pictures[i] for i in images]
    got = [None] * len(images) if column is None else [None if i < 0 else kept[i] for i in column.tolist()]
    assert got == expected and set(kept) == {one for one in expected if one is not None}


def test_pictures_in_tiles_may_have_text_between_their_rows() -> None:
    images = [-1, 0, 0, -1, 0, 0, -1, 0, 0, -1, 0, 0, -1]
    tokens = [7] * len(images)
    tiled = pictured([1], 0, tokens=tokens, loss_mask=[0] * 13, behavior_logprobs=[0.0] * 13, versions=[-1] * 13)
    assert tiled.images is None
    both = pictured(
        [1], 0, tokens=tokens, loss_mask=[0] * 13, behavior_logprobs=[0.0] * 13, versions=[-1] * 13,
        images=images, pictures=(A,),
    )  # fmt: skip
    assert both.images is not None and both.images.tolist() == images
    filled = [-1, 0, 0, 0, 0, 0, -1, 0, 0, 0, 0, 0, -1]
    assert whole(both.images, both.pictures).tolist() == filled and both.images.tolist() == images
