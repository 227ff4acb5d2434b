"""A step's seconds from a model's first layers: which are run, and what is made of what they take."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from app.cli.check import layers
from app.tree import PrefixTree, auto_class
from tests.helpers.tiny_model import HYBRID_LAYERS, TINY_MODEL


def on_meta(**fields: Any) -> Any:
    with torch.device("meta"):
        return auto_class(config := AutoConfig.for_model(**TINY_MODEL | fields)).from_config(config)


def tree() -> PrefixTree:
    return PrefixTree.build([[1, 2, 3, 4], [1, 2, 5, 6], [1, 2, 5, 7]], [[False, False, True, True]] * 3)


@pytest.mark.parametrize(
    ("kinds", "expected"),
    [
        ("f", (1, 1)),
        ("ff", (2, 1)),
        ("ffff", (1, 1)),
        ("dmmm", (1, 1)),
        ("sfsfsf", (2, 2)),
        ("sssfsssfsssf", (4, 4)),
        ("sssfsssf", (8, 1)),
        ("abcd", (4, 1)),
        ("ddmmmmm", (2, 1)),
    ],
)
def test_where_layers_begin_to_repeat(kinds: str, expected: tuple[int, int]) -> None:
    first, period = layers.depths(kinds)
    assert (first, period) == expected
    assert all(kinds[i] == kinds[i + period] for i in range(first, len(kinds) - period))


def counted(monkeypatch: pytest.MonkeyPatch, seconds: list[float]) -> list[int]:
    """Passes run, and take these seconds; returns how often each was asked for."""
    asked = list[int]()

    def instead(run: Callable[[], None], device: str) -> float:
        run()
        asked.append(1)
        return seconds[len(asked) - 1]

    monkeypatch.setattr(layers, "_seconds", instead)
    return asked


def test_one_more_layer_is_multiplied(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = counted(monkeypatch, [5.0, 4.0, 6.0, 7.0, 9.0, 8.0])  # one layer, two layers: the fastest of three
    assert (
        layers.measured_seconds(on_meta(num_hidden_layers=10), tree(), "cpu", "float32", 0.1) == 4 + 9 * (7 - 4)
        and len(asked) == 6
    )


def test_what_does_not_repeat_runs_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = counted(monkeypatch, [3.0, 2.0, 4.0])
    assert (
        layers.measured_seconds(on_meta(num_hidden_layers=2), tree(), "cpu", "float32", 0.1) == 2.0 and len(asked) == 3
    )


def test_what_would_take_too_long_is_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = counted(monkeypatch, [])
    assert layers.measured_seconds(on_meta(num_hidden_layers=4), tree(), "cpu", "float32", 1e3) is None and not asked


def test_what_the_engine_refuses_is_left_to_the_prediction() -> None:
    model = on_meta(num_hidden_layers=4, attention_dropout=0.1)
    assert layers.measured_seconds(model, tree(), "cpu", "float32", 0.1) is None


@pytest.mark.parametrize(
    ("depths", "fields"),
    [
        ((2, 1), {"num_hidden_layers": 2, "tie_word_embeddings": False}),
        ((1, 1), {"model_type": "llama", "num_hidden_layers": 5}),
        ((2, 2), {**HYBRID_LAYERS, "num_hidden_layers": 6, "layer_types": HYBRID_LAYERS["layer_types"] * 3}),
        ((1, 1), {"model_type": "gpt_neox", "num_hidden_layers": 3}),
        ((2, 1), {"model_type": "qwen2_moe", "num_hidden_layers": 6, "mlp_only_layers": [0, 1], "num_experts": 4,
                  "num_experts_per_tok": 2, "moe_intermediate_size": 8, "shared_expert_intermediate_size": 8}),
    ],
)  # fmt: skip
def test_layers_are_told_apart(depths: tuple[int, int], fields: dict[str, Any]) -> None:
    model = on_meta(**fields)
    assert layers.depths(layers.kinds(model)) == depths
    seconds = layers.measured_seconds(model, tree(), "cpu", "float32", 0.0)
    assert seconds is not None and seconds > 0
