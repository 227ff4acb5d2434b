"""A model's pictures as its family's own processor takes them: their pixels for the tower, and the ids of a sequence.

Promises: families whose processor gives grids have transformers' image processor, of the PIL backend, which knows all
there is to know; of the others transformers' processor of text and pictures is asked, with its own options, for both
the pixels and the ids (tokens of rows, columns, tiles and borders, as the model was trained to see them), so that they
fit together; where it writes text around a picture (Gemma 3's line breaks), the text beside is made tokens of anew. No
family is known by name. Ids that depend on more than a picture's size and the text beside it are refused, and a
processor that cannot be had is an error where the first picture is shown, not before.
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

    Attributes:
        place: the token that stands for a picture in text that is not laid out yet; in most families that of a row.
    """

    def __init__(self, directory: Path, config: PretrainedConfig, images: Any) -> None:
        self.directory, self._config, self._images = directory, config, images
        self._placeholder = self.place = int(config.image_token_id)
        self._processor: Any = None
        self._missing = ""  # why there is none
        self._special: set[int] = set()  # tokens that text on both sides of them is apart for
        self._borders: set[tuple[int, int]] = set()  # first and last ids of layouts that text around them leaves alone
        self._lock = threading.Lock()  # tokenizers are not to be used by two threads at once
        self._kept = lru_cache(_KNOWN_SIZES)(self._measured)
        try:
            self._processor = _of_pictures(PROCESSOR_MAPPING[type(config)], directory, images)
            tokenizer = self._processor.tokenizer
            self.place = tokenizer.convert_tokens_to_ids(self._processor.image_token)
            self._special = {token for token, one in tokenizer.added_tokens_decoder.items() if one.special}
            named = [one for one in getattr(self._processor, "image_token_ids", ()) if one is not None]
            if self._placeholder not in (named or [self.place]):  # Janus has no id of its own
                raise ValueError(
                    f"its placeholder '{self._processor.image_token}' is token {self.place}, the model's is"
                    f" {self._placeholder}"
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

    def laid_out(self, tokens: Sequence[int], layouts: Sequence[tuple[int, ...]]) -> list[list[int]]:
        """Ids of a sequence with one `place` a picture, and what each is laid out as: text, picture, text and so on.

        Raises:
            ValueError: text beside a picture that is not made of the tokens that its words are.
        """
        parts: list[list[int]] = [[]]
        for token in tokens:
            if token == self.place:
                parts.append([])
            else:
                parts[-1].append(token)
        cut = [self._bordered(layout) for layout in layouts]
        shown: list[list[int]] = []
        for k, text in enumerate(parts):
            before, after = cut[k - 1][2] if k else [], cut[k][0] if k < len(cut) else []
            shown += [self._between(before, text, after) if before or after else text]
            shown += [cut[k][1]] if k < len(cut) else []
        return shown

    def _bordered(self, layout: tuple[int, ...]) -> tuple[list[int], list[int], list[int]]:
        """Ordinary text before a picture's own ids, these, and such text after them. A placeholder need not be marked
        as special."""
        own = [k for k, token in enumerate(layout) if token in self._special or token == self._placeholder]
        first, last = own[0], own[-1] + 1
        return list(layout[:first]), list(layout[first:last]), list(layout[last:])

    def _between(self, before: list[int], text: list[int], after: list[int]) -> list[int]:
        """Text between the borders of two pictures; up to the next special token it is one text with them."""
        special = [k for k, token in enumerate(text) if token in self._special]
        if not special:
            return self._anew(before, text, after)
        head, tail = text[: special[0]], text[special[-1] + 1 :]
        middle = text[special[0] : special[-1] + 1]
        return [
            *(self._anew(before, head, []) if before else head),
            *middle,
            *(self._anew([], tail, after) if after else tail),
        ]

    def _anew(self, *parts: list[int]) -> list[int]:
        """The tokens of a text that is made of these."""
        with self._lock:
            texts = [self._processor.tokenizer.decode(part, clean_up_tokenization_spaces=False) for part in parts]
        for part, text in zip(parts, texts):
            if self._tokens(text) != part:
                raise ValueError(f"the text {text!r:.100} beside a picture is made of other tokens than its words are")
        return self._tokens("".join(texts))

    def _tokens(self, text: str) -> list[int]:
        with self._lock:
            return list(self._processor.tokenizer(text, add_special_tokens=False)["input_ids"])

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
            if self._placeholder in found and (borders := (found[0], found[-1])) not in self._borders:
                text = f"a{token}\nb{token}c"
                whole = self._ids(text, [picture, picture])
                parts = self.laid_out(self._tokens(text), [tuple(found)] * 2)
                if whole != [one for part in parts for one in part]:
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
        kept = [part for part in parts if part is not None]  # which are told apart by their places
        super().__init__(*kept, **{name: part for name, part in named.items() if part is not None})


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
