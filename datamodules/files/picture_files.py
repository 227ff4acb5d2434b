"""Pictures as files, and whatever else a data set holds for a picture, as pixels.

Promises: a PNG that is there is whole (written aside, then renamed) and holds the pixels bit for bit; a picture that
cannot be used is an error in one line that names it; what a conversion would change in silence (several frames, 16 bits
a channel) is refused; the size is looked at before anything is unpacked.
"""

from __future__ import annotations

import base64
import io
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np
from PIL import Image, ImageOps

from app.pictures import Pixels
from app.text import printable, reason
from datamodules.files.publish import aside_of

MOST_PIXELS = 2**26
"""Of a picture that is given; 64 million are 200 MB of memory."""
FEWEST_SIDE = 5
"""Pixels a side: of fewer, image processors cannot tell height and width from colours."""
_FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")
_MODES = ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "RGBX", "CMYK", "YCbCr")


class PictureError(ValueError):
    """A picture that cannot be used; the message names it and the remedy."""


def write_png(path: Path, pixels: Pixels) -> None:
    """Writes pixels, uint8 [H, W, 3], where there is no such file yet. Raises OSError when that fails."""
    if path.exists():
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = aside_of(path)  # another gateway may be writing the same picture
    Image.fromarray(pixels).save(aside, format="png")
    os.replace(aside, path)


def read_png(path: Path) -> Pixels:
    """The pixels of a file that `write_png` wrote, uint8 [H, W, 3]. Raises PictureError."""
    try:
        with Image.open(path, formats=["png"]) as image:
            return cast(Pixels, np.array(image.convert("RGB")))
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise PictureError(f"{path}: cannot be read as a PNG file ({reason(error)})") from None


def pixels_of(value: Any, where: str) -> Pixels:
    """A picture as uint8 [H, W, 3].

    Args:
        value: an array uint8 [H, W], [H, W, 1], [H, W, 3] or [H, W, 4]; a PIL image; a file's bytes, path or data URL
            (RFC 2397, base64; BMP, GIF, JPEG, PNG, PPM, TIFF, WebP); or such bytes or path in a mapping (`bytes`,
            `path`), as data sets hold them. It is turned as its EXIF data says; what is transparent stands on white.
        where: what errors call it.

    Raises:
        PictureError: anything else, one that is damaged, has several frames or more than 8 bits a channel, is larger
            than 64 million pixels or has a side of fewer than 5.
    """
    if isinstance(value, np.ndarray):
        return _of_array(value, where)
    if isinstance(value, Image.Image):
        return _of_image(value, where)
    if isinstance(value, Mapping):
        value = value.get("bytes") or value.get("path")
    if isinstance(value, str) and value.startswith("data:"):
        value = _of_url(value, where)
    if isinstance(value, bytes | bytearray | memoryview):
        source: Any = io.BytesIO(value)
    elif isinstance(value, str | os.PathLike) and str(value):
        source = os.fspath(value)
        where = f"{where} ({printable(str(source), 200)})"
    else:
        raise PictureError(f"{where}: expected an array, a PIL image, bytes or a path, got {type(value).__name__}")
    try:
        with Image.open(source, formats=_FORMATS) as image:
            return _of_image(image, where)
    except PictureError:
        raise
    except Exception as error:  # the library's, of any kind: `struct.error` of damaged EXIF data, for one
        raise PictureError(f"{where}: cannot be read as a picture ({reason(error)}); remove or replace it") from None


def _of_url(url: str, where: str) -> bytes:
    head, comma, body = url.partition(",")
    if not comma or not head.endswith(";base64"):
        raise PictureError(f"{where}: a data URL must be data:image/...;base64,..., got {printable(url[:40])!r}")
    try:
        return base64.b64decode(body, validate=True)
    except ValueError as error:  # binascii.Error is one
        raise PictureError(f"{where}: its data URL is no base64 ({reason(error)})") from None


def _of_array(value: Any, where: str) -> Pixels:
    if value.dtype != np.uint8 or value.ndim not in (2, 3) or (value.ndim == 3 and value.shape[2] not in (1, 3, 4)):
        raise PictureError(
            f"{where}: expected uint8 [height, width] with 1, 3 or 4 channels behind, got {value.dtype} {value.shape}"
        )
    _check_size(value.shape[1], value.shape[0], where)
    if value.ndim == 3 and value.shape[2] == 3:
        return cast(Pixels, value)
    return _of_image(Image.fromarray(value[..., 0] if value.ndim == 3 and value.shape[2] == 1 else value), where)


def _of_image(image: Image.Image, where: str) -> Pixels:
    _check_size(*image.size, where)
    if getattr(image, "n_frames", 1) > 1:
        raise PictureError(f"{where}: has {getattr(image, 'n_frames', 0)} frames; give one of them as a picture")
    if image.mode not in _MODES:
        raise PictureError(f"{where}: of mode {image.mode}, not 8 bits a channel; convert it to RGB")
    upright = ImageOps.exif_transpose(image)
    if upright.mode in ("LA", "PA", "RGBA") or "transparency" in upright.info:
        layer = upright.convert("RGBA")
        upright = Image.alpha_composite(Image.new("RGBA", layer.size, "white"), layer)
    return cast(Pixels, np.array(upright.convert("RGB")))


def _check_size(width: int, height: int, where: str) -> None:
    if width * height > MOST_PIXELS:
        raise PictureError(f"{where}: {width} x {height} pixels are more than {MOST_PIXELS:,}; make it smaller")
    if min(width, height) < FEWEST_SIDE:
        raise PictureError(f"{where}: {width} x {height} pixels; a side needs at least {FEWEST_SIDE}")
