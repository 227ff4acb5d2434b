"""A model's pictures as its family's own processor takes them: their pixels for the tower, and the ids of a sequence.

Promises: families whose processor gives grids have transformers' image processor, of the PIL backend, which knows all
there is to know; of the others transformers' processor of text and pictures is asked, with its own options, for both
the pixels and the ids (tokens of rows, columns, tiles and borders, as the model was trained to see them), so that they
fit together. No family is known by name. Ids that depend on more than a picture's size are refused, and a processor
that cannot be had is an error where the first picture is shown, not before.
"""

from __future__ import annotations

import shutil
import threading
from collections.abc import Sequence
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import transformers
from PIL import Image
from transformers import (
    PROCESSOR_MAPPING,
    AutoConfig,
    AutoImageProcessor,
    AutoTokenizer,
    PretrainedConfig,
    ProcessorMixin,
)

_FILES = ("preprocessor_config.json", "processor_config.json")
_MORE_FILES = ("video_preprocessor_config.json", "chat_template.json")
_KNOWN_SIZES = 4096
_TEXT = ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids")


def picture_processor(directory: str | Path) -> Any | None:
    """What makes arguments of pictures for the model in a directory, as `TreeEngine` takes it: transformers' image
    processor where that gives grids, else a `PictureProcessor`; None where there is no model that sees, or none of it.

    Raises:
        ValueError: a release of transformers that needs torchvision for it, which is not installed.
        Exception: whatever it says of files that are cut or of another kind.
    """
    folder = Path(directory)
    if not (folder / "config.json").is_file() or not any((folder / name).is_file() for name in _FILES):
        return None
    config = AutoConfig.from_pretrained(folder)
    if getattr(config, "vision_config", None) is None:
        return None
    try:
        images = AutoImageProcessor.from_pretrained(folder, backend="pil")
    except ImportError:
        if find_spec("torchvision") is not None:
            raise
        raise ValueError(
            f"transformers {transformers.__version__} reads image processors with torchvision alone; those from 5.18 on"
            " do without, and show pictures: use a newer one or, for text alone, install torchvision"
        ) from None
    return images if "image_grid_thw" in images.model_input_names else PictureProcessor(folder, config, images)


class PictureProcessor:
    """A family's processor of text and pictures, for pictures alone.

    Args:
        directory: of the model, its tokenizer and its processor.
        config: the model's.
        images: its image processor.
    """

    def __init__(self, directory: Path, config: PretrainedConfig, images: Any) -> None:
        self.directory, self._config, self._images = directory, config, images
        self._processor: Any = None
        self._missing = ""  # why there is none
        self._borders: set[tuple[int, int]] = set()  # first and last ids of layouts that text around them leaves alone
        self._lock = threading.Lock()  # tokenizers are not to be used by two threads at once
        self._kept = lru_cache(_KNOWN_SIZES)(self._measured)
        try:
            self._processor = _of_pictures(PROCESSOR_MAPPING[type(config)], directory, images)
            self._placeholder = self._processor.tokenizer.convert_tokens_to_ids(self._processor.image_token)
            if self._placeholder != config.image_token_id:
                raise ValueError(
                    f"its placeholder '{self._processor.image_token}' is token {self._placeholder}, the model's is"
                    f" {config.image_token_id}"
                )
        except Exception as error:  # whatever is missing, from a library to a file
            self._missing = _in_one_line(error)

    def __call__(self, pictures: Sequence[npt.NDArray[np.uint8]], return_tensors: str = "pt") -> dict[str, Any]:
        """The model's arguments of pictures, uint8 [H, W, 3] each. Raises ValueError where there is no processor."""
        processor = self._ready()
        shown = [Image.fromarray(np.asarray(one)) for one in pictures]
        with self._lock:
            found = processor(text=[processor.image_token * len(shown)], images=shown, return_tensors=return_tensors)
        return {name: value for name, value in found.items() if name not in _TEXT}

    def layout(self, height: int, width: int) -> tuple[int, ...]:
        """The ids that stand in a sequence for a picture of this size; those of its rows of features are the model's
        placeholder, in order.

        Raises:
            ValueError: no processor, or one that makes something else of such a picture.
        """
        return self._kept(height, width)

    def to_json_string(self) -> str:
        """All that what it makes of pixels depends on."""
        return str((self._images if self._missing else self._processor).to_json_string())

    def save_pretrained(self, directory: str | Path) -> None:
        """Copies its files."""
        for name in (*_FILES, *_MORE_FILES):
            if (self.directory / name).is_file():
                Path(directory).mkdir(parents=True, exist_ok=True)
                shutil.copyfile(self.directory / name, Path(directory) / name)

    def _ready(self) -> Any:
        if self._missing:
            raise ValueError(
                f"the processor of a {self._config.model_type}, which lays out its pictures, cannot be read:"
                f" {self._missing} (in {self.directory})"
            )
        return self._processor

    def _measured(self, height: int, width: int) -> tuple[int, ...]:
        processor = self._ready()
        picture = Image.fromarray(np.zeros((height, width, 3), np.uint8))
        token = processor.image_token
        try:
            found = self._ids(token, [picture])
            if found and (borders := (found[0], found[-1])) not in self._borders:
                text = f"a{token}\nb{token}c"
                whole = self._ids(text, [picture, picture])
                plain = processor.tokenizer(text, add_special_tokens=False)["input_ids"]
                apart = [[one] if one != self._placeholder else found for one in plain]
                if whole != [one for part in apart for one in part]:
                    raise ValueError("its ids are others beside text than alone")
                self._borders.add(borders)
        except Exception as error:  # options that are missing or contradict each other fail anywhere in transformers
            raise ValueError(
                f"{type(processor).__name__} of {self.directory} does not say how a picture of {height} x {width} is"
                f" laid out: {_in_one_line(error)}; compare its processor_config.json with the model's"
            ) from error
        if self._placeholder not in found:
            raise ValueError(f"{type(processor).__name__} makes no row of a picture of {height} x {width}")
        return tuple(found)

    def _ids(self, text: str, pictures: list[Image.Image]) -> list[int]:
        with self._lock:
            found = self._processor(text=[text], images=pictures, add_special_tokens=False)["input_ids"]
        return [int(one) for one in found[0]]


class _Parts(ProcessorMixin):
    """Takes parts that are not there for none."""

    def __init__(self, *parts: Any, **named: Any) -> None:
        super().__init__(*parts, **{name: part for name, part in named.items() if part is not None})


def _of_pictures(kind: Any, directory: Path, images: Any) -> Any:
    """A processor of the type `kind` over an image processor of the PIL backend, without those of videos, which have no
    such, and of sound."""
    parts = {"image_processor": images, "tokenizer": AutoTokenizer.from_pretrained(directory)}

    class OfPictures(kind, _Parts):
        @classmethod
        def get_attributes(cls) -> list[str]:
            return [name for name in super().get_attributes() if name in parts]

    OfPictures.__name__ = kind.__name__
    options, _ = OfPictures.get_processor_dict(directory)
    return OfPictures.from_args_and_dict([], options, **dict.fromkeys(kind.get_attributes()) | parts)


def _in_one_line(error: BaseException) -> str:
    return " ".join(f"{error}".split()) or type(error).__name__
