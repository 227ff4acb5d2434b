"""Types with pictures beside the families: as the untouched model, on the tree and in the embedded engine; and those
that cannot be right, refused by name."""

from __future__ import annotations

import asyncio
from itertools import takewhile
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoModelForImageTextToText

from app.pictures import Picture
from app.tree import TreeEngine, auto_class, picture_positions, picture_tokens, refuse_pictures
from app.tree.planning.cost import TowerShape
from datamodules.inference import EmbeddedEngine
from datamodules.inference.protocol import GenerationRequest, GenerationResponse
from tests.app.tree import oracle
from tests.app.tree.engine import families as text
from tests.app.tree.engine.pictures import families, others, vision
from tests.helpers.selection import some
from tests.helpers.tiny_layouts import TinyLayouts

QUICK = ("aya_vision", "janus", "kimi_k25", "llava_onevision", "qwen3_omni_moe_thinker")
"""One for each way in which they are unlike the families."""
KINDS = some(others.OTHERS, QUICK)
TEXTS: list[list[vision.Part]] = [[1, 2, "A", 5, 6, 7], [1, 2, "B", 5, 6, 7], ["B", 4], [1, "A", 6, "D", 9], [1, 2, 5]]


def made(kind: str) -> vision.Vision:
    if kind not in CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no {kind}")
    return others.vision_of(kind)


@pytest.mark.parametrize("kind", KINDS)
def test_other_families(kind: str) -> None:
    text.within(families.errors(made(kind)), others.TOLERANCES.get(kind, (text.FORWARD, text.FORWARD)))


@pytest.mark.parametrize("kind", KINDS)
def test_other_families_in_the_embedded_engine(kind: str) -> None:
    model = made(kind)
    sequences = model.sequences(TEXTS)
    asked = [(i, request(sequences, i)) for i in range(len(TEXTS)) for _ in range(4)]
    engine = EmbeddedEngine(kv_cache_tokens=4096, num_threads=1)
    engine.use_images(SimpleNamespace(processor=model.processor, config=model.model.config))  # type: ignore[arg-type]
    engine.start(model.model, version=0, seed=1)

    async def together() -> list[GenerationResponse]:
        return list(await asyncio.gather(*(engine.generate(one) for _, one in asked)))

    replies = asyncio.run(together())
    engine.close()
    seen = 0
    for (i, one), reply in zip(asked, replies):
        # Random weights draw placeholders, which no trained model does: what precedes them counts.
        sampled = list(takewhile(lambda token: token < vision.BETWEEN, reply.tokens))
        whole = model.sequences([[*TEXTS[i], *sampled]])
        with torch.no_grad():
            expected = oracle.dense_sequence(model.model, whole.tokens[0], inputs=whole.arguments(0)).logprobs
        off = torch.tensor(reply.logprobs[: len(sampled)]) - expected[len(one.tokens) :]
        assert not sampled or off.abs().max() < 2e-5
        seen += len(sampled)
    assert seen > len(asked)


def request(sequences: vision.Sequences, i: int) -> GenerationRequest:
    """Five tokens after sequence i."""
    own = np.unique(sequences.images[i][sequences.images[i] >= 0])
    shown = tuple(Picture(one.key, one.pixels, one.tokens) for one in (sequences.pictures[k] for k in own))
    images = np.where(sequences.images[i] >= 0, np.searchsorted(own, sequences.images[i]), -1).tolist()
    return GenerationRequest(sequences.tokens[i].tolist(), 5, images=images if shown else None, pictures=shown)


@pytest.mark.parametrize("kind", others.REFUSED)
def test_types_that_cannot_be_right_are_refused(kind: str) -> None:
    if kind not in CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no {kind}")
    model = others.model_of(kind, others.REFUSED[kind][0])
    with pytest.raises(
        ValueError, match=rf"pictures: .*{type(model).__name__}.*{others.REFUSED[kind][1]}.*use another"
    ):
        refuse_pictures(model, object())


@pytest.mark.parametrize("kind", others.REFUSED)
def test_types_that_are_refused_pictures_train_on_text(kind: str) -> None:
    if kind not in CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no {kind}")
    model = others.model_of(kind, others.REFUSED[kind][0])
    text.within(text.errors(model), others.TOLERANCES.get(kind, (text.FORWARD, text.FORWARD)))


@pytest.mark.parametrize("kind", ["kimi_k25", "muse_glimmer", "aya_vision"])
def test_patches_of_a_row_by_the_names_that_configurations_have(kind: str) -> None:
    shape = TowerShape.of(made(kind).model.config)
    assert shape is not None and shape.patches(6) == 24


def test_kinds_of_tokens_that_a_forward_leaves_alone_are_no_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gemma 3n's takes them and does nothing with them; what does may see ahead in a way that cannot be asked for."""
    model = vision.make("LLaVA").model

    def leaves(input_ids: torch.Tensor, mm_encoder_outputs: object, token_type_ids: torch.Tensor) -> torch.Tensor:
        return input_ids

    def reads(input_ids: torch.Tensor, mm_encoder_outputs: object, token_type_ids: torch.Tensor) -> torch.Tensor:
        return input_ids + token_type_ids

    monkeypatch.setattr(model.base_model, "forward", leaves)
    refuse_pictures(model, object())
    monkeypatch.setattr(model.base_model, "forward", reads)
    with pytest.raises(ValueError, match="placeholders see tokens after them in Llava"):
        refuse_pictures(model, object())


def test_pictures_that_are_counted_by_their_number_are_refused() -> None:
    """HunYuan's axes are width, height and which picture it is, none of them from where it begins."""
    model = others.model_of(
        "hunyuan_vl",
        dict(
            text_config=dict(
                head_dim=8, rope_parameters={"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1] * 4}
            ),
            vision_config=dict(
                num_key_value_heads=2, out_hidden_size=16, text_hidden_size=16, max_image_size=64, spatial_merge_size=2
            ),
        ),
    )
    shown = [Picture(b"a" * 16, np.zeros((16, 24, 3), np.uint8), 10)]
    with pytest.raises(ValueError, match=r"HunYuanVL.* counts the positions of a picture .* by more than its size"):
        picture_positions(model, [-1, *[0] * 10, -1], shown)


def test_a_tower_whose_features_have_no_place_in_a_sequence_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    model = vision.make("LLaVA")
    made = model.model.base_model.get_image_features
    monkeypatch.setattr(
        model.model.base_model,
        "get_image_features",
        lambda pixel_values, **rest: SimpleNamespace(last_hidden_state=made(pixel_values, **rest).pooler_output),
    )
    with pytest.raises(ValueError, match=r"get_image_features of LlavaFor.* gives no rows that stand in a sequence"):
        TreeEngine(model.model, image_processor=model.processor).forward(families.build(model.sequences([["A", 1]])))


def test_rows_by_a_processor_that_lays_pictures_out(tmp_path: Path) -> None:
    tiny = TinyLayouts(tmp_path, "Idefics3")
    pixels = np.zeros((24, 40, 3), np.uint8)
    assert picture_tokens(tiny.model.config, tiny.images.processor, pixels) == tiny.images.picture(pixels, "").tokens


@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_5_moe"])
def test_what_has_a_text_model_too_is_loaded_as_what_it_was_saved_as(name: str) -> None:
    config = CONFIG_MAPPING[name]()
    assert auto_class(config) is AutoModelForCausalLM
    config.architectures = [others.class_of(name)]
    assert auto_class(config) is AutoModelForImageTextToText
    config.architectures = [others.class_of(name).replace("ConditionalGeneration", "CausalLM")]
    assert auto_class(config) is AutoModelForCausalLM
