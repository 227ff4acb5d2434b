"""Pictures as files.

Promises: a PNG that is there is whole (written aside, then renamed) and holds the pixels bit for bit; one that cannot
be read is an error in one line that names it.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import cast

import numpy as np
from PIL import Image

from app.pictures import Pixels
from app.text import reason


class PictureError(ValueError):
    """A picture that cannot be used; the message names it and the remedy."""


def write_png(path: Path, pixels: Pixels) -> None:
    """Writes pixels, uint8 [H, W, 3], where there is no such file yet. Raises OSError when that fails."""
    if path.exists():
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_suffix(".part")
    Image.fromarray(pixels).save(aside, format="png")
    os.replace(aside, path)


def read_png(path: Path) -> Pixels:
    """The pixels of a file that `write_png` wrote, uint8 [H, W, 3]. Raises PictureError."""
    try:
        with Image.open(path, formats=["png"]) as image:
            return cast(Pixels, np.array(image.convert("RGB")))
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise PictureError(f"{path}: cannot be read as a PNG file ({reason(error)})") from None
