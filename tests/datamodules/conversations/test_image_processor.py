"""Pictures and prompts that show them, prepared for a model: resized once, counted, quoted; bad ones are refused."""

from __future__ import annotations

import io
import random
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from transformers import AutoTokenizer

from app.pictures import Picture
from app.tree.model import processors
from datamodules.conversations.image_processor import ImageProcessor
from datamodules.files.picture_files import PictureError, pixels_of
from datamodules.prompts import Prompt
from datamodules.prompts.dealer import encoded
from datamodules.prompts.tokenizers import encode_prompt
from examples.vision.make_model import write
from tests.helpers.selection import SEES, lack
from tests.helpers.tiny_vision import TinyVision, noise, unencoded


@pytest.fixture(scope="module")
def vision(tmp_path_factory: pytest.TempPathFactory) -> TinyVision:
    return TinyVision(tmp_path_factory.mktemp("vision"))


@pytest.mark.parametrize(("height", "width"), [(16, 24), (17, 23), (51, 37), (5, 90), (300, 200), (5, 5)])
def test_a_picture_is_resized_once_to_what_the_processor_keeps(vision: TinyVision, height: int, width: int) -> None:
    given = noise(1, height, width)
    picture = vision.images.picture(given, "here")
    theirs = vision.images.processor([given], return_tensors="np")["image_grid_thw"][0]
    ours = vision.images.processor([picture.pixels], return_tensors="np")
    assert ours["image_grid_thw"][0].tolist() == theirs.tolist()
    assert picture.pixels.shape == (theirs[1] * 4, theirs[2] * 4, 3) and picture.tokens == theirs[1] * theirs[2] // 4
    kept = vision.images.processor([picture.pixels], do_resize=False, return_tensors="np")
    assert np.array_equal(ours["pixel_values"], kept["pixel_values"])
    assert vision.images.picture(picture, "there") is picture
    assert vision.images.picture(picture.pixels, "there").key == picture.key


def test_a_transformers_that_needs_torchvision_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, hidden=32, tower=16)
    monkeypatch.setattr(processors, "find_spec", lambda name: None)
    if not lack(SEES):  # an older one does so by itself

        def old(*args: Any, **kwargs: Any) -> None:
            raise ImportError("AutoImageProcessor requires the Torchvision library")

        monkeypatch.setattr(processors.AutoImageProcessor, "from_pretrained", old)
    with pytest.raises(ValueError, match=r"cannot be read: transformers .* from 5\.18 on .* install torchvision"):
        ImageProcessor.beside(str(tmp_path), AutoTokenizer.from_pretrained(tmp_path))


def test_whatever_holds_a_picture_is_the_same_picture(tmp_path: Path) -> None:
    pixels = noise(2)
    image = Image.fromarray(pixels)
    image.save(tmp_path / "a.png")
    data = (tmp_path / "a.png").read_bytes()
    for one in (pixels, image, data, str(tmp_path / "a.png"), tmp_path / "a.png", {"bytes": data}, {"path": None} | {
        "bytes": data}, {"bytes": None, "path": str(tmp_path / "a.png")}):  # fmt: skip
        assert np.array_equal(pixels_of(one, "here"), pixels)


def test_grey_transparent_turned_and_printed_pictures() -> None:
    grey = noise(3)[..., 0]
    assert np.array_equal(pixels_of(grey, "here"), np.stack([grey] * 3, axis=2))
    clear = np.zeros((8, 8, 4), np.uint8)
    clear[:4] = (10, 20, 30, 255)
    found = pixels_of(clear, "here")
    assert (found[:4] == (10, 20, 30)).all() and (found[4:] == 255).all()
    turned = Image.fromarray(noise(4, 8, 16))
    exif = turned.getexif()
    exif[0x0112] = 6
    held = io.BytesIO()
    turned.save(held, "png", exif=exif)
    assert pixels_of(held.getvalue(), "here").shape == (16, 8, 3)
    held = io.BytesIO()
    Image.new("CMYK", (8, 8), (0, 0, 0, 0)).save(held, "jpeg")
    assert (pixels_of(held.getvalue(), "here") > 250).all()


def saved(kind: str, image: Image.Image | None = None, **options: Any) -> bytes:
    held = io.BytesIO()
    (image or Image.fromarray(noise(5, 40, 40))).save(held, kind, **options)
    return held.getvalue()


def bomb(width: int, height: int) -> bytes:
    """A PNG whose header says so."""
    head = width.to_bytes(4, "big") + height.to_bytes(4, "big") + b"\x08\x02\x00\x00\x00"
    parts = [(b"IHDR", head), (b"IDAT", zlib.compress(b"\x00" * 100)), (b"IEND", b"")]
    chunks = [len(d).to_bytes(4, "big") + n + d + zlib.crc32(n + d).to_bytes(4, "big") for n, d in parts]
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


def bad_pictures() -> dict[str, Any]:
    """200 things that are no picture for a model, by what is wrong with them."""
    rng = random.Random(0)
    found: dict[str, Any] = {}
    whole = {kind: saved(kind) for kind in ("png", "jpeg", "bmp", "tiff", "webp", "gif")}
    for kind, data in whole.items():
        for share in (0.0, 0.01, 0.1, 0.3, 0.5, 0.7, 0.9):
            found[f"{kind} cut at {share}"] = data[: int(len(data) * share)]
        found[f"{kind} without its beginning"] = data[7:]
    for k in range(60):
        found[f"noise {k}"] = rng.randbytes(rng.randrange(1, 400))
    for sides in ((20_000, 20_000), (2**31 - 1, 2**31 - 1), (70_000, 1_000), (0, 5), (5, 0), (1, 1), (1, 300), (3, 3)):
        found[f"png of {sides}"] = bomb(*sides)
        found[f"bytes in a mapping of {sides}"] = {"bytes": bomb(*sides), "path": "a.png"}
    found |= {
        f"array of {s}": np.zeros(s, np.uint8) for s in ((1, 1, 3), (3, 9, 3), (9, 3), (8, 8, 2), (8,), (0, 0, 3))
    }
    found |= {f"array of {d}": np.zeros((8, 8, 3), d) for d in (float, "float32", "int64", bool, "uint16", object)}
    found |= {
        f"{type(v).__name__} {v!r:.20}": v for v in (None, 7, 1.5, True, [], [1, 2], (), {}, set(), object(), "", b"")
    }
    found |= {
        f"mapping {k}": v for k, v in enumerate(({"bytes": None}, {"path": ""}, {"a": 1}, {"bytes": 7}, {"path": 7}))
    }
    found |= {f"path {k}": f"/nowhere/{k}\x1b[31m.png" for k in range(10)}
    found["path too long"], found["path with a null"] = "x" * 5000, "a\x00b"
    found["a folder"] = "/tmp"
    found["a text file"] = __file__
    frames = [Image.fromarray(noise(k, 40, 40)) for k in range(3)]
    found["several frames"] = saved("gif", frames[0], save_all=True, append_images=frames[1:])
    found["several pages"] = saved("tiff", frames[0], save_all=True, append_images=frames[1:])
    for mode in ("I;16", "F", "I", "HSV", "LAB"):
        found[f"mode {mode}"] = Image.new(mode, (8, 8))
    found["16 bits a channel"] = saved("png", Image.new("I;16", (8, 8), 40_000))
    # Turned, and a field that is to be a short number says a long one.
    fields = struct.pack(">HHHIHHHHIII", 2, 274, 3, 1, 6, 0, 296, 4, 1, 70_000, 0)
    found["damaged EXIF data"] = saved("jpeg", exif=b"Exif\0\0MM\0*" + struct.pack(">I", 8) + fields)
    for k in range(200 - len(found)):
        data = bytearray(whole["png"])
        at = rng.randrange(40, len(data) - 20)
        data[at] ^= 1 << rng.randrange(8)
        found[f"png with a bit changed {k}"] = bytes(data)
    return found


def test_bad_pictures_are_errors_in_a_line_that_name_the_prompt(vision: TinyVision) -> None:
    pictures = bad_pictures()
    assert len(pictures) >= 200
    taken = []
    for name, value in pictures.items():
        try:
            vision.images.picture(value, "prompt 'p', picture 0")
        except PictureError as error:
            text = str(error)
            assert text.startswith("prompt 'p', picture 0") and text.isprintable() and len(text) < 600, (name, text)
        else:
            taken.append(name)
    assert taken == []


def test_a_shape_that_the_processor_refuses_is_an_error_by_name(vision: TinyVision) -> None:
    with pytest.raises(PictureError, match=r"here: the model's image processor refuses it .*aspect ratio"):
        vision.images.picture(noise(6, 5, 2000), "here")


def test_prompts_are_expanded_and_each_picture_is_held_once(vision: TinyVision) -> None:
    a, b = noise(1), noise(2, 8, 40)
    prompt = vision.prompt(["x", a, "y", b, "z", a.copy(), "."])
    assert [one.tokens for one in prompt.pictures] == [6, 5]
    runs = [(image, prompt.images.count(image)) for image in (0, 1)]
    assert runs == [(0, 12), (1, 5)] and len(prompt.images) == len(prompt.tokens)
    places = {token for token, image in zip(prompt.tokens, prompt.images) if image >= 0}
    assert places == {vision.images.placeholder}
    text = vision.prompt(["no picture"])
    assert text.pictures == () and text.images == ()


def test_text_that_spells_a_placeholder_is_quoted(vision: TinyVision) -> None:
    prompt = vision.prompt(["<|image_pad|>", noise(1), "and <|video_pad|>"])
    assert prompt.tokens.count(vision.images.placeholder) == 6
    assert "< |image_pad|>" in vision.tokenizer.decode(prompt.tokens)
    plain = encoded(
        Prompt(id="p", text="<|image_pad|>"), lambda one: encode_prompt(vision.tokenizer, one), vision.images
    )
    assert not set(plain.tokens) & {*vision.images.placeholders}


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (unencoded([noise(1)], name="q"), None),
        (Prompt(id="q", text="no part", pictures=(noise(1),)), "prompt 'q': 1 pictures, but its tokens have 0 places"),
        (
            Prompt(id="q", messages=({"role": "user", "content": [{"type": "image"}] * 2},), pictures=(noise(1),)),
            "prompt 'q': 1 pictures, but its tokens have 2 places for one; a message shows one by a part",
        ),
        (Prompt(id="q", text="a", pictures=("nowhere.png",)), r"prompt 'q', picture 0 \(nowhere.png\): cannot be read"),
    ],
)
def test_prompts_that_show_other_pictures_than_they_have(
    vision: TinyVision, prompt: Prompt, message: str | None
) -> None:
    def encode() -> Prompt:
        return encoded(prompt, lambda one: encode_prompt(vision.tokenizer, one), vision.images)

    if message is None:
        assert isinstance(encode().pictures[0], Picture)
        return
    with pytest.raises(PictureError, match=message):
        encode()


def test_a_model_that_sees_nothing_refuses_pictures_by_name(vision: TinyVision) -> None:
    with pytest.raises(PictureError, match=r"prompt 'p' has pictures, and the model has no image proc.*data.tok"):
        encoded(unencoded([noise(1)]), lambda one: encode_prompt(vision.tokenizer, one), None)
