"""A model's image processor, as prompts need it: pictures of a size it keeps, and room for them among the tokens.

Promises: where processors give grids, a picture is resized once, here, to what the processor would make of it, so that
trainer and servers see equal pixels, and is one run of placeholders; elsewhere it stays as it is, at most `LONGEST`
pixels a side, and is what the family's own processor lays out, tokens of rows, tiles and borders included. A prompt
shows as many placeholders as pictures, in their order, with text between them, or is refused by name; text that spells
a placeholder is quoted. No backend but PIL is asked for.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, cast

import numpy as np
from PIL import Image
from transformers import AutoConfig, PretrainedConfig, PreTrainedTokenizerBase

from app.pictures import Picture, Pixels
from app.text import reason
from app.tree import PictureProcessor, picture_processor, picture_tokens
from datamodules.files.picture_files import PictureError, pixels_of

LONGEST = 2048
"""Pixels of a side, beyond which pictures that are not resized otherwise are made smaller: what is shown of them is no
larger in most families, and they are sent and kept."""
_KNOWN_SIZES = 4096
_PLACEHOLDERS = ("image_token_id", "video_token_id", "audio_token_id")


class ImageProcessor:
    """transformers' image processor of a model, and its placeholders.

    Args:
        processor: see `app.tree.picture_processor`.
        config: of the model.
        tokenizer: the model's.

    Attributes:
        processor: as above.
        placeholder: the token that stands for a row of a picture's features.
        place: the token that stands for a whole picture in text as it is rendered.
        placeholders: all tokens that the model takes for something else than text.
        laid_out: whether pictures are laid out by the family's own processor, which resizes them itself.
        fingerprint: of what it makes of pixels.

    Raises:
        ValueError: a model or tokenizer without a placeholder.
    """

    def __init__(self, processor: Any, config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase) -> None:
        found = [getattr(config, name, None) for name in _PLACEHOLDERS]
        if found[0] is None:
            raise ValueError(f"image processor: a {config.model_type} names no image_token_id, so it shows no pictures")
        if found[0] >= len(tokenizer):
            raise ValueError(
                f"tokenizer: it has {len(tokenizer)} tokens, and the model's placeholder of pictures is {found[0]}; use"
                " the tokenizer that belongs to the model"
            )
        self.processor, self.config = processor, config
        self.laid_out = isinstance(processor, PictureProcessor)
        self.placeholder: int = found[0]
        self.place: int = processor.place if self.laid_out else self.placeholder
        self.placeholders = tuple(one for one in found if one is not None and one < len(tokenizer))
        spelled = dict.fromkeys((*self.placeholders, self.place))
        self._spelled = [str(tokenizer.convert_ids_to_tokens(one)) for one in spelled]
        self.fingerprint = hashlib.blake2b(processor.to_json_string().encode(), digest_size=16).digest()
        self._kept = lru_cache(_KNOWN_SIZES)(self._measured)

    @classmethod
    def beside(cls, directory: str, tokenizer: PreTrainedTokenizerBase) -> ImageProcessor | None:
        """That of the model in a directory; None where the directory holds no model that sees.

        Raises ValueError for one that cannot be read.
        """
        folder = Path(directory).expanduser()
        try:
            processor = picture_processor(folder)
            config = None if processor is None else AutoConfig.from_pretrained(folder)
        except Exception as error:  # files that are cut or of another kind fail anywhere in transformers
            raise ValueError(f"tokenizer: the image processor in {directory} cannot be read: {reason(error)}") from None
        return None if config is None else cls(processor, config, tokenizer)

    def picture(self, value: Any, where: str) -> Picture:
        """What a source gives for a picture (see `pixels_of`), prepared for the model; a `Picture` as it is.

        Raises PictureError, naming `where`.
        """
        if isinstance(value, Picture):
            return value
        pixels = pixels_of(value, where)
        try:
            height, width, tokens = self._kept(*pixels.shape[:2])
        except ValueError as error:
            raise PictureError(f"{where}: the model's image processor refuses it ({reason(error)})") from None
        if (height, width) != pixels.shape[:2]:
            resample = Image.Resampling(getattr(self.processor, "resample", None) or Image.Resampling.BICUBIC)
            pixels = cast(Pixels, np.array(Image.fromarray(pixels).resize((width, height), resample)))
        return Picture.of(pixels, tokens, self.fingerprint)

    def layout(self, picture: Picture, where: str) -> tuple[int, ...]:
        """The ids that a prompt has for the picture, its rows of features as placeholders.

        Raises PictureError, naming `where`: a picture that was prepared for another model.
        """
        if not self.laid_out:
            return (self.placeholder,) * picture.tokens
        height, width = picture.pixels.shape[:2]
        try:
            found: tuple[int, ...] = self.processor.layout(height, width)
        except ValueError as error:
            raise PictureError(f"{where}: the model's image processor refuses it ({reason(error)})") from None
        if (rows := found.count(self.placeholder)) != picture.tokens:
            raise PictureError(
                f"{where}: a picture of {height} x {width} has {rows} rows in a {self.config.model_type}, and this one"
                f" says {picture.tokens}: it was prepared for another model; give its pixels"
            )
        return found

    def _measured(self, height: int, width: int) -> tuple[int, int, int]:
        """Height and width that a picture of this size is given, and its rows."""
        if self.laid_out:
            smaller = min(1.0, LONGEST / max(height, width))
            height, width = (max(1, round(side * smaller)) for side in (height, width))
            return height, width, self.processor.layout(height, width).count(self.placeholder)
        blank = np.zeros((height, width, 3), np.uint8)
        found = self.processor([blank], return_tensors="np", input_data_format="channels_last")
        _, rows, columns = (int(n) for n in found["image_grid_thw"][0])
        patch = int(self.config.vision_config.patch_size)
        kept = np.zeros((rows * patch, columns * patch, 3), np.uint8)
        again = self.processor([kept], return_tensors="np", input_data_format="channels_last")["image_grid_thw"]
        if [int(n) for n in again[0]][1:] != [rows, columns]:
            raise ValueError(f"{kept.shape[:2]} pixels, which it makes of {height} x {width}, are resized again")
        return *kept.shape[:2], picture_tokens(self.config, self.processor, kept)

    def quoted(self, text: str) -> str:
        """`text` with a space in each placeholder it spells."""
        for token in self._spelled:
            text = text.replace(token, f"{token[0]} {token[1:]}")
        return text

    def quoted_messages(self, messages: Sequence[Mapping[str, Any]]) -> tuple[dict[str, Any], ...]:
        """The messages, their texts quoted."""
        return tuple({**message, "content": self._quoted_content(message.get("content"))} for message in messages)

    def _quoted_content(self, content: Any) -> Any:
        if isinstance(content, str):
            return self.quoted(content)
        if not isinstance(content, list | tuple):
            return content
        return [
            {**part, "text": self.quoted(part["text"])}
            if isinstance(part, Mapping) and isinstance(part.get("text"), str)
            else part
            for part in content
        ]

    def expanded(
        self, tokens: Sequence[int], pictures: Sequence[Picture], where: str
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Rendered ids, one placeholder a picture in their order, with what each picture is laid out as; and for each
        id the index of its picture among the distinct ones (`distinct`), or -1 where it is no row of one.

        Raises PictureError: another number of placeholders than of pictures, one that stands for something else, or two
        pictures without a token between them.
        """
        if not {*self.placeholders}.difference([self.place]).isdisjoint(tokens):
            raise PictureError(f"{where}: spells a placeholder of something else than a picture; leave it out")
        count = sum(token == self.place for token in tokens)
        if count != len(pictures):
            raise PictureError(
                f"{where}: {len(pictures)} pictures, but its tokens have {count} places for one; a message shows one by"
                " a part {'type': 'image'}, through a chat template that knows such parts"
            )
        places = {picture.key: at for at, picture in enumerate(distinct(pictures))}
        ids, images = list[int](), list[int]()
        parts = self._parts(tokens, [self.layout(picture, where) for picture in pictures], where)
        for k, part in enumerate(parts):  # text, picture, text and so on
            if k % 2 and images and images[-1] >= 0 and part[0] == self.placeholder:
                raise PictureError(f"{where}: a picture follows another at once; put text between them")
            ids += part
            images += [places[pictures[k // 2].key] if k % 2 and one == self.placeholder else -1 for one in part]
        return tuple(ids), tuple(images)

    def _parts(self, tokens: Sequence[int], layouts: Sequence[tuple[int, ...]], where: str) -> Sequence[Sequence[int]]:
        if self.laid_out:
            try:
                parts: Sequence[Sequence[int]] = self.processor.laid_out(tokens, layouts)
            except ValueError as error:
                raise PictureError(f"{where}: {error}; begin what is beside it with a token of the template") from None
            return parts
        cuts = [k for k, token in enumerate(tokens) if token == self.place]
        texts = [tokens[a + 1 : b] for a, b in zip([-1, *cuts], [*cuts, len(tokens)], strict=True)]
        return [part for pair in zip(texts, [*layouts, ()], strict=True) for part in pair]


def distinct(pictures: Sequence[Picture]) -> tuple[Picture, ...]:
    """Each once, as they first occur."""
    return tuple({picture.key: picture for picture in pictures}.values())
