"""Parameters that stay as they are: the others are trained as a dense loop trains them, and names that mean nothing are
refused."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from modules import ModelSource, PolicyModule, build_model
from tests.helpers.tiny_policy import (
    CONFIG,
    fit,
    make_batch,
    naive_model,
    naive_policy_loss,
    naive_training,
    parameters,
    sgd,
)

HALF = ["model.embed_tokens", "model.layers.0", "*.input_layernorm"]


def is_frozen(name: str) -> bool:
    return name.startswith(("model.embed_tokens.", "model.layers.0.")) or ".input_layernorm." in name


@pytest.mark.parametrize("mode", ["dta", "sparse", "disabled"])
def test_the_others_are_trained_as_a_dense_loop_trains_them(mode: Any) -> None:
    module = PolicyModule(ModelSource(config=CONFIG, freeze=HALF), optimizer=sgd, tree_training_mode=mode)
    data = [make_batch(k) for k in range(2)]
    fit(module, data)
    model = naive_model()
    start = parameters(model)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not is_frozen(name))
    naive_training(model, data, lambda batch, _: [list(range(len(batch)))], naive_policy_loss)
    for name, value in parameters(module.policy).items():
        torch.testing.assert_close(value, parameters(model)[name], atol=1e-6, rtol=0)
        assert torch.equal(value, start[name]) == is_frozen(name), name


def test_names_are_of_parameters_modules_or_patterns() -> None:
    def frozen(*names: str) -> set[str]:
        model = build_model(ModelSource(config=CONFIG, freeze=names))
        return {name for name, one in model.named_parameters() if not one.requires_grad}

    assert frozen() == set()
    assert frozen("model.norm.weight") == frozen("model.norm") == {"model.norm.weight"}
    assert {name.split(".")[2] for name in frozen("model.layers.[0-1]")} == {"0", "1"}


def test_what_is_shared_stays_on_both_sides() -> None:
    model = build_model(ModelSource(config={**CONFIG, "tie_word_embeddings": True}, freeze=["model.embed_tokens"]))
    assert not model.lm_head.weight.requires_grad


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (
            ["model.layer.0"],
            "model.freeze: 'model.layer.0' is the name of nothing that is trained; did you mean 'model.layers.0",
        ),
        (["gate"], "model.freeze: 'gate' is the name of nothing that is trained; names are those of"),
        (["*"], "model.freeze: nothing is left to train"),
    ],
)
def test_names_that_mean_nothing_are_refused(names: list[str], said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        build_model(ModelSource(config=CONFIG, freeze=names))


def test_beside_an_adapter_it_has_no_effect() -> None:
    with pytest.raises(ValueError, match=r"model\.freeze has no effect beside model\.adapter"):
        ModelSource(path="somewhere", adapter={"r": 4}, freeze=["lm_head"])
