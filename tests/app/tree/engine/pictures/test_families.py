"""Families with pictures: exact, or refused by name. Rows and columns are those of `docs/support_matrix.md`."""

from __future__ import annotations

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForImageTextToText

from app.tree import SelfCheckError, TreeEngine, picture_tokens
from app.tree.model.sight import Sight
from app.tree.planning.cost import TowerShape
from tests.app.tree import models
from tests.app.tree.engine import families as text
from tests.app.tree.engine import support_matrix
from tests.app.tree.engine.pictures import families, vision

CELLS = [  # quick: every family in float32, and every column of one family
    pytest.param(name, column, marks=[] if column == "float32" or name == "LLaVA" else pytest.mark.slow)
    for name in vision.FAMILIES
    for column in families.COLUMNS
]


@pytest.mark.parametrize(("name", "column"), CELLS)
def test_supported_family(name: str, column: str) -> None:
    assert families.cell(name, column) == "yes"


@pytest.mark.slow  # every cell
def test_the_support_matrix_is_current() -> None:
    fresh = "\n".join(support_matrix.pictures())
    assert f"{fresh}\n\n## Refused by name" in support_matrix.DOCUMENT.read_text(), (
        "run python -m tests.app.tree.engine.support_matrix"
    )


@pytest.mark.parametrize("name", vision.FAMILIES)
def test_placeholders_of_a_picture(name: str) -> None:
    """By the configuration what the tower makes, without running it."""
    model = vision.make(name)
    for picture in model.pictures.values():
        assert picture_tokens(model.model.config, model.processor, picture.pixels) == picture.tokens


@pytest.mark.parametrize("name", vision.FAMILIES)
def test_patches_that_a_tower_runs_for_a_picture(name: str) -> None:
    """By the rows of its features, for pixels are resized on the way; tiles and what is shown twice included."""
    model = vision.make(name)
    shape = TowerShape.of(model.model.config)
    assert shape is not None
    for picture in model.pictures.values():
        found = model.processor([picture.pixels], return_tensors="np")
        grid, places = found.get("image_grid_thw"), found.get("image_position_ids")
        patches = found["pixel_values"].size // (3 * 4 * 4) if grid is None else int(grid.prod())
        if places is not None:  # of pictures that need no resizing few; others are padded by little
            patches = int((places >= 0).all(-1).sum())
        assert shape.patches(picture.tokens) == patches


@pytest.mark.parametrize("name", vision.REFUSED)
def test_refused_family(name: str) -> None:
    assert type(vision.make(name).model).__name__ in families.refusal(name)


@pytest.mark.parametrize("name", ["Gemma 3", "Gemma 4, large"])
def test_models_whose_placeholders_see_each_other_train_on_text(name: str) -> None:
    text.within(text.errors(vision.make(name).model), text.UNSCALED)


def test_a_model_that_hears_and_sees_trains_on_text() -> None:
    """Sound has no way into a tree."""
    sound = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "output_proj_dims": 16}
    config = CONFIG_MAPPING["gemma4"](**vision.FAMILIES["Gemma 4, large"].options, audio_config=sound)
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float64)
    models.randomise(model, seed=0)
    text.within(text.errors(model.float().eval()), text.UNSCALED)


def test_a_mask_among_placeholders_that_is_missing_is_named() -> None:
    """Gemma 3, were it not known to have one."""
    model = vision.make("Gemma 3")
    engine = TreeEngine(model.model, image_processor=model.processor, self_check=True)
    engine.tower.sight = Sight(window=engine.tower.sight.window)
    with pytest.raises(SelfCheckError, match="'attention_mask', which the model makes of its pictures, is missing"):
        engine.backward(families.build(model.sequences(families.TEXTS)), lambda out, i: out.logprobs.sum())


def test_pictures_need_what_is_missing() -> None:
    model = vision.make("LLaVA")
    tree = families.build(model.sequences(families.TEXTS))
    with pytest.raises(ValueError, match="TreeEngine needs image_processor="):
        TreeEngine(model.model).forward(tree)
    with pytest.raises(ValueError, match="LlamaForCausalLM takes text alone"):
        TreeEngine(models.make("llama"), image_processor=model.processor).forward(tree)


def test_an_older_transformers_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    model = vision.make("LLaVA")

    def forward(input_ids: torch.Tensor, pixel_values: torch.Tensor) -> None: ...

    monkeypatch.setattr(model.model.base_model, "forward", forward)
    with pytest.raises(ValueError, match=r"LlavaForConditionalGeneration takes no features .* transformers 5\.18"):
        TreeEngine(model.model, image_processor=model.processor).forward(families.build(model.sequences([["A", 1]])))


def test_a_placeholder_that_was_sampled_is_refused() -> None:
    """The model would take it for a row of a picture."""
    model = vision.make("LLaVA")
    tree = families.build(model.sequences([["A", 1, 2], ["A", 1, vision.IMAGE, 3]]))
    with pytest.raises(
        ValueError, match=r"sequences\[1\]: token id 37 at position 12 is a placeholder that belongs to"
    ):
        TreeEngine(model.model, image_processor=model.processor).forward(tree)


def test_a_picture_of_another_size_is_refused() -> None:
    model = vision.make("LLaVA")
    sequences = model.sequences([["A", 1, 2]])
    small = sequences.images[0].astype(int)
    small[1] = -1  # eight placeholders for nine rows
    sequences.images[0], sequences.tokens[0][1] = small, 5
    sequences.pictures[0] = vision.Pixels(b"a", sequences.pictures[0].pixels, 8)
    with pytest.raises(ValueError, match=r"picture 61 has 8 tokens, and LlavaForConditionalGeneration makes 9 rows"):
        TreeEngine(model.model, image_processor=model.processor).forward(families.build(sequences))


def test_pictures_side_by_side_are_refused() -> None:
    """Where positions count them in three dimensions; the model itself fails there."""
    model = vision.make("Qwen3-VL")
    sequences = model.sequences([["A", "B", 1]])
    keep = [i for i, token in enumerate(sequences.tokens[0]) if token not in (vision.START, vision.END)]
    sequences.tokens[0], sequences.images[0] = sequences.tokens[0][keep], sequences.images[0][keep]
    with pytest.raises(ValueError, match=r"pictures\[1\] follows another without a token between them"):
        TreeEngine(model.model, image_processor=model.processor).forward(families.build(sequences))
