"""Text through a model that sees is what it is through its language model alone: the same plans and gradients."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, Qwen3Config

from app.tree import PrefixTree, TreeEngine
from examples.vision.make_model import write
from tests.app.tree.engine import families
from tests.app.tree.engine.pictures import others


@pytest.mark.parametrize("budget", [None, 7])
def test_plans_and_gradients_are_those_of_the_language_model(tmp_path: Path, budget: int | None) -> None:
    write(tmp_path, hidden=32, tower=16)
    sees = AutoModelForImageTextToText.from_pretrained(tmp_path).double().train()
    text = sees.config.get_text_config().to_dict()
    kept = {key: value for key, value in text.items() if key in Qwen3Config().to_dict() and key != "rope_parameters"}
    config = Qwen3Config(
        **kept | {"model_type": "qwen3", "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
    )
    config.tie_word_embeddings = True
    blind = AutoModelForCausalLM.from_config(config).double().train()
    weights = {name.replace("model.language_model.", "model."): value for name, value in sees.state_dict().items()}
    blind.load_state_dict({name: weights[name] for name in blind.state_dict()})
    rng = np.random.default_rng(0)
    first = rng.integers(0, 200, 9)
    tree = PrefixTree.build([np.concatenate([first[: 3 + k % 5], rng.integers(0, 200, 4 + k)]) for k in range(8)])
    plans, gradients = [], []
    for model in (sees, blind):
        engine = TreeEngine(model, chunk_tokens=budget or "auto", live_tokens=2 * budget if budget else "auto")
        plans.append(engine.plan(tree))
        engine.backward(tree, lambda out, i: (out.logprobs * torch.arange(len(out.logprobs))).sum())
        gradients.append(model.get_input_embeddings().weight.grad)
    one, other = plans
    assert (one.steps, one.chunk_tokens) == (other.steps, other.chunk_tokens)
    assert budget is None or one.live_tokens == other.live_tokens  # else of the memory that is free at the moment
    torch.testing.assert_close(*gradients, atol=1e-9, rtol=1e-9)
    assert not any(p.grad is not None for name, p in sees.named_parameters() if "visual" in name)


def test_logits_are_scaled_where_the_whole_model_scales_them() -> None:
    """LLaVA-NeXT leaves them as they are around a Granite, too, which by itself divides them; as Granite Vision is."""
    kind, text = "llava_next", dict(model_type="granite", logits_scaling=4.0)
    families.within(families.errors(others.model_of(kind, {**others.OTHERS[kind][0], "text_config": text})))
    alone = families.SUPPORTED["Granite"]
    families.within(families.errors(families.build(alone)))
