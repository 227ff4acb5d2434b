"""Which placeholders are the same token, and what is refused where pictures are named wrongly."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from app.tree import PrefixTree

PLACE = 9
A, B = (SimpleNamespace(key=name, tokens=3, pixels=np.zeros((2, 2, 3), np.uint8)) for name in (b"a", b"b"))


def build(*texts: list[int | str], **options: Any) -> PrefixTree:
    """Letters are pictures of three placeholders."""
    tokens, images = [], []
    for text in texts:
        spread = [part if isinstance(part, int) else name for part in text for name in _three(part)]
        tokens.append(np.array([PLACE if isinstance(part, str) else part for part in spread]))
        images.append(np.array(["AB".index(part) if isinstance(part, str) else -1 for part in spread]))
    return PrefixTree.build(tokens, images=images, pictures=(A, B), **options)


def _three(part: int | str) -> list[int | str]:
    return [part] * (3 if isinstance(part, str) else 1)


def test_a_picture_is_shared_and_another_under_equal_ids_is_not() -> None:
    tree = build([1, "A", 2, 3], [1, "A", 2, 4], [1, "B", 2, 3])
    assert tree.num_tokens == 1 + (3 + 1 + 1 + 1) + (3 + 1 + 1)
    assert tree.num_dense_tokens == 18
    assert tree.picture_rows.tolist() == [-1, 0, 1, 2, -1, -1, -1, 3, 4, 5, -1, -1]
    assert tree.scored_tokens.tolist() == np.flatnonzero((tree.picture_rows < 0) & (tree.token_depth > 0)).tolist()


def test_a_picture_that_comes_twice_has_the_same_rows() -> None:
    tree = build([1, "A", 2, "A", 3])
    assert tree.picture_rows.tolist() == [-1, 0, 1, 2, -1, 0, 1, 2, -1]


def test_parts_of_a_tree_keep_their_pictures() -> None:
    tree = build([1, "A", 2, 3], [1, "B", 2, 3], [1, 2])
    part = tree.select([1, 2])
    assert part.picture_rows.tolist() == [-1, -1, 3, 4, 5, -1, -1]
    assert part.pictures == tree.pictures


def test_text_between_the_tiles_of_a_picture() -> None:
    tokens, images = np.array([1, PLACE, 5, PLACE, 5, PLACE, 2]), np.array([-1, 0, -1, 0, -1, 0, -1])
    assert PrefixTree.build([tokens], images=[images], pictures=[A]).picture_rows.tolist() == [-1, 0, -1, 1, -1, 2, -1]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (dict(images=[[-1, 0, 0, -1]]), r"images\[0\], position 1: 2 of the 3 placeholders of picture 0 follow"),
        (dict(images=[[-1, 0, 0, 1]]), r"images\[0\], position 1: 2 of the 3"),
        (dict(images=[[-1, 0, 0, 2]]), r"images\[0\]: indices must lie in \[-1, 2\)"),
        (dict(images=[[-1, 0, 0]]), r"images\[0\]: expected 4 integers, one a token"),
        (dict(images=[]), "0 arrays for 1 sequences"),
        (dict(images=None), "without images"),
        (dict(scored=[[False, True, False, False]]), r"scored\[0\]: position 1 is a picture's placeholder"),
        (dict(pictures=[A, A]), r"pictures\[1\] has the key of pictures\[0\]"),
        (dict(sequences=[[2**31, 1, 1, 1]]), r"sequences\[0\]: token ids beside pictures"),
    ],
)
def test_refused(changed: dict[str, Any], message: str) -> None:
    good: dict[str, Any] = dict(sequences=[[1, PLACE, PLACE, PLACE]], images=[[-1, 0, 0, 0]], pictures=[A, B])
    PrefixTree.build(**good)
    with pytest.raises(ValueError, match=message):
        PrefixTree.build(**good | changed)
