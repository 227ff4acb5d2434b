"""Pictures in training data: what one is, and the per-token column that says where in the sequences they stand.

A model reads a picture as `tokens` rows of features, at as many placeholder tokens. Which picture a token belongs to is
data, `images` [T]: -1, or an index into `pictures`; its row is a running count over the picture's tokens in order. So a
placeholder id that a policy sampled is text, and rows of one picture may have text between them (tiles).

Promises: pictures are told apart by content, held once however many sequences show them, and never changed; a column
that passes `fault` shows whole pictures, apart from one another, none of them trained on. Imports of the project
`app.fields` alone.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from app.fields import BatchError, as_tensor

KEY_BYTES = 16
Pixels = npt.NDArray[np.uint8]


@dataclass(frozen=True, eq=False)
class Picture:
    """One picture, shared by reference; equal where `key` is.

    Attributes:
        key: 16 bytes; see `key_of`.
        pixels: uint8 [H, W, 3], red, green, blue, of a size that the model's image processor keeps. Read-only.
        tokens: placeholder tokens it takes in a sequence, which are the rows of its features; at least 1.

    Raises:
        BatchError: another dtype or shape, an empty picture, a key of another length.
    """

    key: bytes
    pixels: Pixels
    tokens: int

    def __post_init__(self) -> None:
        pixels: Any = self.pixels
        if not isinstance(self.key, bytes) or len(self.key) != KEY_BYTES:
            raise BatchError(f"Picture.key: expected {KEY_BYTES} bytes, got {self.key!r:.50}; make it with Picture.of")
        if not isinstance(pixels, np.ndarray) or pixels.dtype != np.uint8 or pixels.ndim != 3 or pixels.shape[2] != 3:
            got = f"{pixels.dtype} {pixels.shape}" if isinstance(pixels, np.ndarray) else type(pixels).__name__
            raise BatchError(f"Picture.pixels: expected uint8 [height, width, 3], got {got}; convert it to RGB")
        if not pixels.size:
            raise BatchError(f"Picture.pixels: {pixels.shape} has no pixel")
        if type(self.tokens) is not int or self.tokens < 1:
            raise BatchError(f"Picture.tokens: expected an integer of at least 1, got {self.tokens!r:.40}")
        frozen = np.ascontiguousarray(pixels).view()
        frozen.flags.writeable = False
        object.__setattr__(self, "pixels", frozen)

    @classmethod
    def of(cls, pixels: Pixels, tokens: int, fingerprint: bytes = b"") -> Picture:
        """The picture of these pixels, with its key. `fingerprint`: of the image processor that it was made for."""
        return cls(key_of(pixels, fingerprint), pixels, tokens)


def key_of(pixels: Pixels, fingerprint: bytes = b"") -> bytes:
    """BLAKE2b (RFC 7693), 16 bytes, of pixels (uint8 [H, W, 3]), their shape, and what else tells pictures apart."""
    digest = hashlib.blake2b(np.ascontiguousarray(pixels).data, digest_size=KEY_BYTES)
    digest.update(repr((tuple(pixels.shape), fingerprint)).encode())
    return digest.digest()


def fault(
    images: Tensor, pictures: Sequence[Picture], bounds: Tensor, trained: Tensor
) -> tuple[int | None, str] | None:
    """What is wrong with a column: the flat position (None: no position in particular) and the reason; None if nothing.

    Args:
        images: integers [T]. pictures: what they are indices of.
        bounds: int64 [N + 1], where the N sequences begin, and T. trained: bool [T].
    """
    of_token, edges, count = images.numpy(), bounds.numpy(), len(pictures)
    outside = np.flatnonzero((of_token < -1) | (of_token >= count))
    if len(outside):
        return int(outside[0]), f"picture {of_token[outside[0]]}, but there are {count}: index pictures from 0, or -1"
    if len({picture.key for picture in pictures}) < count:
        return None, "two pictures have the same key: let their tokens share one"
    at = np.flatnonzero(of_token >= 0)
    which = of_token[at].astype(np.int64)
    idle = np.flatnonzero(np.bincount(which, minlength=count) == 0)
    if len(idle):
        return None, f"picture {idle[0]} is at no token: leave it out"
    if not count:
        return None
    taught = np.flatnonzero(trained.numpy()[at])
    if len(taught):
        return int(at[taught[0]]), "a token of a picture is trained, but no policy draws it: set loss_mask False there"
    sequence = np.searchsorted(edges, at, side="right") - 1
    sizes = np.array([picture.tokens for picture in pictures], np.int64)[which]
    rows = _running_count(sequence * count + which) % sizes
    goes_on = np.append((sequence[1:] == sequence[:-1]) & (which[1:] == which[:-1]), False)
    cut = np.flatnonzero((rows < sizes - 1) & ~goes_on)
    if len(cut):
        i = int(cut[0])
        return int(at[i]), f"a picture ends after {rows[i] + 1} of its {sizes[i]} tokens: keep pictures whole"
    touching = np.flatnonzero((rows[1:] == 0) & (at[1:] == at[:-1] + 1) & (sequence[1:] == sequence[:-1]))
    if len(touching):
        return int(at[touching[0] + 1]), "a picture follows another at once: put a text token between them"
    return None


def batch_fault(
    images: Tensor | None, pictures: Sequence[Picture], bounds: Tensor, trained: Tensor
) -> tuple[int | None, str] | None:
    """The same of a batch, whose column (None: no picture) has to be int32 [T]."""
    if images is None and not pictures:
        return None
    if images is None or images.shape != trained.shape or images.dtype != torch.int32:
        got = None if images is None else f"{images.dtype} of shape {tuple(images.shape)}"
        return None, f"expected torch.int32 of shape {tuple(trained.shape)}, got {got}"
    return fault(images, pictures, bounds, trained)


def checked(images: Tensor | None, pictures: Sequence[Picture], trained: Tensor, name: str) -> Tensor | None:
    """The column (int32 [L], None without pictures) of one sequence whose tokens are `trained` or not: bool [L].

    Raises:
        BatchError: another length, or a `fault`.
    """
    if images is None and not pictures:
        return None
    column, length = as_tensor([] if images is None else images, torch.int64, name), len(trained)
    if column.numel() != length:
        raise BatchError(f"{name} has {column.numel()} entries but tokens has {length}")
    found = fault(column, pictures, torch.tensor([0, length]), trained)
    if found is not None:
        at = "" if found[0] is None else f" at position {found[0]}"
        raise BatchError(f"{name}{at}: {found[1]}")
    return column.to(torch.int32) if pictures else None


def _running_count(values: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """How often each value stood before: [a, b, a, a] -> [0, 0, 1, 2]."""
    order = np.argsort(values, kind="stable")
    ranked = values[order]
    first = np.concatenate([[True], ranked[1:] != ranked[:-1]])
    starts = np.flatnonzero(first)
    counts = np.empty_like(values)
    counts[order] = np.arange(len(values)) - starts[np.cumsum(first) - 1]
    return counts


def whole(images: Tensor, pictures: Sequence[Picture]) -> Tensor:
    """The column of one sequence (integers [L], without a `fault`), for readers: what stands between the rows of a
    picture, where it ends a row or a tile, belongs to the picture."""
    filled, rows = images.clone(), (images >= 0).nonzero().flatten().tolist()
    k = 0
    while k < len(rows):
        picture = int(images[rows[k]])
        last = rows[k + pictures[picture].tokens - 1]
        filled[rows[k] : last + 1] = picture
        k += pictures[picture].tokens
    return filled


def shown(images: Sequence[int], pictures: Sequence[Picture]) -> tuple[Picture, ...]:
    """The pictures of one sequence (without a `fault`) as often as it shows them, in their order."""
    found: list[Picture] = []
    left = 0  # rows of the last one
    for picture in images:
        if picture >= 0:
            if not left:
                found.append(pictures[picture])
                left = pictures[picture].tokens
            left -= 1
    return tuple(found)


def used(images: Tensor | None, pictures: Sequence[Picture]) -> tuple[Tensor | None, tuple[Picture, ...]]:
    """The column (int32 [T]) over those of the pictures that it shows, and these, in their order; (None, ()) where it
    shows none."""
    chosen = [] if images is None else images[images >= 0].unique().tolist()
    if images is None or not chosen:
        return None, ()
    table = torch.full((len(pictures) + 1,), -1, dtype=torch.int32)  # its last entry is that of index -1
    table[chosen] = torch.arange(len(chosen), dtype=torch.int32)
    return table[images.long()], tuple(pictures[i] for i in chosen)


def merged(
    parts: Iterable[tuple[Tensor | None, Sequence[Picture], int]],
) -> tuple[Tensor | None, tuple[Picture, ...]]:
    """One column (int32 [T]) of several, one behind another, and their distinct pictures as they first occur.

    Args:
        parts: the column of each (None: no picture), its pictures, and its tokens.

    Raises:
        BatchError: two pictures have one key, but other shapes or numbers of tokens.
    """
    places: dict[bytes, int] = {}
    pictures: list[Picture] = []
    columns = []
    for images, own, length in parts:
        if images is None:
            columns.append(torch.full((length,), -1, dtype=torch.int32))
            continue
        table = torch.full((len(own) + 1,), -1, dtype=torch.int32)
        for i, picture in enumerate(own):
            place = table[i] = places.setdefault(picture.key, len(pictures))
            if place == len(pictures):
                pictures.append(picture)
            known = pictures[place]
            if (known.pixels.shape, known.tokens) != (picture.pixels.shape, picture.tokens):
                raise BatchError(
                    f"Picture.key {picture.key.hex()}: of pictures of {known.pixels.shape[:2]} pixels, {known.tokens}"
                    f" tokens and {picture.pixels.shape[:2]}, {picture.tokens}: make keys with Picture.of"
                )
        columns.append(table[images.long()])
    return (torch.cat(columns), tuple(pictures)) if pictures else (None, ())
