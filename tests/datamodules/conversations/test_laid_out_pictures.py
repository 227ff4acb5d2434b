"""Pictures that a family's own processor lays out, in prompts: kept as they are, bounded, laid out by their size alone;
what cannot be known of them is refused by name."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from app.pictures import Picture
from app.tree import PictureProcessor, picture_processor
from datamodules.conversations.image_processor import LONGEST, ImageProcessor
from datamodules.files.picture_files import PictureError
from datamodules.inference.protocol import GenerationError, GenerationRequest
from datamodules.inference.sglang import SGLangEngine
from tests.helpers.tiny_layouts import TinyLayouts
from tests.helpers.tiny_vision import noise


@pytest.fixture(scope="module", params=["LLaVA", "Idefics3", "InternVL", "Gemma 4, shared keys", "Gemma 3"])
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TinyLayouts:
    return TinyLayouts(tmp_path_factory.mktemp("tiny"), request.param)


def test_a_picture_stays_as_it_is_up_to_a_size(tiny: TinyLayouts) -> None:
    pixels = noise(1, 17, 50)
    assert np.array_equal(tiny.images.picture(pixels, "here").pixels, pixels)
    large = tiny.images.picture(np.zeros((LONGEST // 2, 2 * LONGEST, 3), np.uint8), "here")
    assert large.pixels.shape == (LONGEST // 4, LONGEST, 3)
    assert tiny.images.layout(large, "here").count(tiny.images.placeholder) == large.tokens


def test_a_size_is_laid_out_once(tiny: TinyLayouts, monkeypatch: pytest.MonkeyPatch) -> None:
    processor = tiny.images.processor
    assert isinstance(processor, PictureProcessor)
    runs = []
    ids = PictureProcessor._ids
    monkeypatch.setattr(PictureProcessor, "_ids", lambda self, *given: runs.append(1) or ids(self, *given))
    for seed in range(3):
        tiny.prompt([noise(seed, 31, 41), "?"])
        tiny.prompt([noise(seed, 41, 31), "?"])
    assert 0 < len(runs) <= 4  # two sizes, and text around the first


def test_a_picture_of_another_model_is_refused(tiny: TinyLayouts) -> None:
    with pytest.raises(
        PictureError, match=r"prompt 'p': a picture of 24 x 24 has \d+ rows in a .*, and this one says 5"
    ):
        tiny.prompt([Picture.of(noise(1, 24, 24), 5), "?"])  # type: ignore[list-item]


def test_pictures_without_text_between_them_are_refused_where_their_rows_would_touch(tiny: TinyLayouts) -> None:
    message: list[str | np.ndarray] = [noise(1), noise(2), "?"]
    if tiny.name == "LLaVA":
        with pytest.raises(PictureError, match="prompt 'p': a picture follows another at once; put text between them"):
            tiny.prompt(message)
    else:  # their borders are such text
        assert list(tiny.prompt(message).tokens) == tiny.inputs(message)["input_ids"][0].tolist()


def test_servers_that_would_resize_it_are_shown_nothing(tiny: TinyLayouts, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = SGLangEngine(urls=["http://127.0.0.1:9"])
    engine.use_images(tiny.images)
    monkeypatch.setattr(SGLangEngine, "vocab_size", 1000)  # which it has once it runs
    monkeypatch.setattr(SGLangEngine, "max_context", 1000)
    prompt = tiny.prompt([noise(1), "?"])
    shown = GenerationRequest(list(prompt.tokens), 2, images=list(prompt.images), pictures=prompt.pictures)
    with pytest.raises(GenerationError, match=r"request.pictures: servers would resize .*; use EmbeddedEngine"):
        asyncio.run(engine.generate(shown))


def test_what_is_saved_lays_out_the_same(tiny: TinyLayouts, tmp_path: Path) -> None:
    tiny.model.config.save_pretrained(tmp_path)
    tiny.tokenizer.save_pretrained(tmp_path)
    tiny.images.processor.save_pretrained(tmp_path)
    again = picture_processor(tmp_path)
    assert isinstance(again, PictureProcessor) and again.layout(31, 41) == tiny.images.processor.layout(31, 41)
    assert again.to_json_string() == tiny.images.processor.to_json_string()


def damaged(tiny: TinyLayouts, directory: Path, **fields: Any) -> ImageProcessor:
    """Its directory with other fields in processor_config.json; None removes one."""
    shutil.copytree(tiny.path, directory, dirs_exist_ok=True)
    path = directory / "processor_config.json"
    found = json.loads(path.read_text()) | fields
    path.write_text(json.dumps({name: value for name, value in found.items() if value is not None}))
    made = ImageProcessor.beside(str(directory), AutoTokenizer.from_pretrained(directory))
    assert made is not None
    return made


@pytest.fixture(scope="module")
def llava(tmp_path_factory: pytest.TempPathFactory) -> TinyLayouts:
    return TinyLayouts(tmp_path_factory.mktemp("llava"), "LLaVA")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"patch_size": None}, r"LlavaProcessor of .* does not say how a picture of 16 x 24 is laid out"),
        ({"image_token": "[IMG]"}, r"the processor of a llava, .*its placeholder '\[IMG\]' is token \d+, the model's"),
    ],
)
def test_processors_that_do_not_fit_are_errors_at_the_first_picture(
    llava: TinyLayouts, tmp_path: Path, fields: dict[str, Any], message: str
) -> None:
    images = damaged(llava, tmp_path, **fields)
    with pytest.raises(PictureError) as refused:
        images.picture(noise(1), "here")
    with pytest.raises(ValueError, match=message):
        images.processor.layout(16, 24)
    assert str(refused.value).startswith("here: the model's image processor refuses it")


def test_a_layout_that_depends_on_the_text_around_it_is_refused(
    llava: TinyLayouts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    images = damaged(llava, tmp_path)
    ids = PictureProcessor._ids
    monkeypatch.setattr(PictureProcessor, "_ids", lambda self, text, *given: ids(self, text.replace("c", "d"), *given))
    with pytest.raises(ValueError, match="its ids are others beside text than alone"):
        images.processor.layout(16, 24)


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> TinyLayouts:
    return TinyLayouts(tmp_path_factory.mktemp("gemma"), "Gemma 3")


@pytest.mark.parametrize("text", ["\n", "\n\nand ", " and\n", "\n\n", ""])
def test_text_beside_a_picture_is_one_text_with_the_line_breaks_around_it(gemma: TinyLayouts, text: str) -> None:
    """Which Gemma 3's processor writes: two are one token, five another."""
    message: list[str | np.ndarray] = [f"a{text}", noise(1), text, noise(2), f"{text}b"]
    assert list(gemma.prompt(message).tokens) == gemma.inputs(message)["input_ids"][0].tolist()


def test_tokens_before_a_token_of_the_template_stay_as_they_are(gemma: TinyLayouts) -> None:
    """A reply's, say, which were sampled; but what is beside a picture has to be what its words are."""
    line, end = (gemma.tokenizer(one)["input_ids"] for one in ("\n", "<|im_end|>"))
    picture = gemma.images.picture(noise(1), "here")
    apart, _ = gemma.images.expanded([*line, *line, *end, gemma.images.place], [picture], "here")
    assert list(apart[:3]) == [*line, *line, *end]
    with pytest.raises(
        PictureError, match=r"here: the text '\\n\\n' beside a picture is made of other tokens than its"
    ):
        gemma.images.expanded([*end, *line, *line, gemma.images.place], [picture], "here")


def test_text_that_spells_the_place_of_a_picture_is_quoted(gemma: TinyLayouts) -> None:
    assert gemma.images.quoted("<start_of_image> <image_soft_token>") == "< start_of_image> < image_soft_token>"


def test_a_placeholder_need_not_be_marked_as_special(llava: TinyLayouts, tmp_path: Path) -> None:
    images = damaged(llava, tmp_path)
    images.processor._special.clear()
    picture = images.picture(noise(1), "here")
    ids, shown = images.expanded([*llava.tokenizer("a")["input_ids"], images.place], [picture], "here")
    assert ids[1:] == (images.placeholder,) * picture.tokens and shown == (-1, *[0] * picture.tokens)
