"""Layers whose tokens see those of their own section of positions, and queries scaled by position (Llama 4): exact with
every backend, and counted by what is kept and computed."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import CONFIG_MAPPING, PreTrainedModel

from app.tree import PrefixTree, TreeEngine, auto_class
from app.tree.attention.places import Places
from app.tree.memory import pass_memory, token_bytes
from app.tree.model.shape import shape_of
from tests.app.tree import models, oracle
from tests.app.tree.attention.backends import ON_CPU, cuda_backends_on_cpu
from tests.app.tree.cases import Case, cases
from tests.app.tree.engine import families
from tests.app.tree.engine.test_memory import Meter
from tests.app.tree.engine.test_parity import EXAMPLES
from tests.app.tree.losses import KINDS, SequenceLoss
from tests.app.tree.parity import assert_backward, assert_forward, masked_block, take_grads
from tests.app.tree.states import hybrids

ROW = families.SUPPORTED["Llama 4"]
F64 = torch.float64
pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")


@pytest.fixture(autouse=True)
def on_cpu() -> Iterator[None]:
    with cuda_backends_on_cpu():
        yield


@cache
def exact(section: int = 4) -> PreTrainedModel:
    return hybrids.exact(families.build(ROW, F64, attention_chunk_size=section))


@settings(max_examples=EXAMPLES // 3)
@given(
    case=cases(),
    kind=st.sampled_from(sorted(KINDS)),
    section=st.sampled_from([1, 2, 3, 4, 7]),
    block=st.sampled_from([1, 3, 256]),
    attention=st.sampled_from(["sdpa", "flash_on_cpu"]),
)
def test_parity_in_float64(case: Case, kind: str, section: int, block: int, attention: str) -> None:
    model, head = exact(section), models.value_head(F64)
    with masked_block(block):
        assert_forward(model, head, case, ("logprobs", "entropy", "values"), 1e-9, attention=attention)
        assert_backward(model, head, case, kind, ("logprobs", "values"), 1e-9, True, attention=attention)
    assert model.model.layers[1].self_attn.attn_temperature_tuning is True


LOSS = SequenceLoss("tanh_of_sums", families.LENGTHS, 3, ("logprobs", "entropy"))


@pytest.mark.parametrize("attention", ON_CPU)
@pytest.mark.parametrize("budgets", [(4, 9), (1000, 1000)])
def test_every_backend(attention: str, budgets: tuple[int, int]) -> None:
    model = exact()
    _, expected = oracle.dense_backward(model, families.SEQUENCES, LOSS)
    with masked_block(3):
        engine = TreeEngine(model, *budgets, attention=attention, self_check=False)
        engine.backward(PrefixTree.build(families.SEQUENCES), LOSS, want=("logprobs", "entropy"))
    error, where = oracle.relative_error(take_grads(model), expected)
    assert error <= 1e-9, f"{error:.1e} in {where}"


@pytest.mark.parametrize("changed", ["sections", "scales"])
def test_the_reference_sees_sections_and_scales(changed: str) -> None:
    """Guards the tests above: each changes the outputs of the dense model."""
    other = {"sections": {"attention_chunk_size": 64}, "scales": {"attn_temperature_tuning": False}}[changed]
    found = [
        oracle.dense_forward(families.build(ROW, **more), families.SEQUENCES[:1])[0].logprobs.detach()
        for more in ({}, other)
    ]
    assert (found[0] - found[1]).abs().max() > 1e-3


def test_scales_are_the_models_own_bit_for_bit() -> None:
    """By steps, of the position and not of the row."""
    model = families.build(ROW)
    scaling = model.model.layers[1].self_attn
    places = Places.of(scaling)
    assert places == (3, 0.7) and Places.of(model.model.layers[0].self_attn) is None
    query, at = torch.randn(1, 2, 40, 8), torch.arange(40)
    steps = torch.log1p(torch.floor((at.float() + 1.0) / 3)) * 0.7 + 1.0
    assert torch.equal(places.scale(query, at), (query.transpose(1, 2) * steps.view(1, -1, 1, 1)).transpose(1, 2))


def test_the_path_keeps_a_section() -> None:
    """Of the layer with sections as many keys at most as one holds, as with a window."""
    tree, found = PrefixTree.build([np.arange(41) % 31]), []
    for section in (4, 64):
        model = families.build(ROW, attention_chunk_size=section)
        assert shape_of(model).keys_seen() == {None: 2 * 8, section: 2 * 8}
        chunks = TreeEngine(model, 8, 8).plan(tree).chunks
        found.append(pass_memory(model, 8, 8, tree, chunks=chunks).path_cache)
    assert [chunk.tokens for chunk in chunks] == [8] * 5
    assert found[1] - found[0] == 2 * (2 * 8) * (32 - 4 * 3) * (4 + 4)  # of each piece 3; in float32, and gradients


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("step", [1, 2])
def test_experts_are_counted_as_they_run(dtype: torch.dtype, step: int) -> None:
    """Every expert runs every token: matrices exactly, a token's bytes within a fifth of what autograd saves."""
    wide = dict(hidden_size=64, intermediate_size=96, intermediate_size_mlp=192, head_dim=16)
    model = families.build(ROW, dtype, **wide, interleave_moe_layer_step=step)
    parameters = dict(model.model.layers.named_parameters())
    matrices = sum(p.numel() for name, p in parameters.items() if p.dim() > 1 and "router" not in name)
    assert shape_of(model).linear_flops() == 2 * matrices
    tokens, meter = np.random.default_rng(0).integers(0, 31, 60), Meter(model)
    with meter.measuring():
        TreeEngine(model, 60, 60, self_check=False).backward(
            PrefixTree.build([tokens]), lambda out, i: out.logprobs.sum()
        )
    assert token_bytes(model) * 59 == pytest.approx(meter.peak, rel=0.2)


def test_a_window_within_sections_is_refused_by_name() -> None:
    """No model has both, and no backend would see the nearer end of the two."""
    model = models.make("mistral", sliding_window=3)
    model.config.layer_types, model.config.attention_chunk_size = ["chunked_attention"] * 2, 4
    engine = TreeEngine(model, attention="sdpa", self_check=False)
    with pytest.raises(ValueError, match=r"layer 0 \(MistralAttention\): sliding_window=3 in sections of 4 tokens"):
        engine.forward(PrefixTree.build(families.SEQUENCES))


def test_a_whole_model_is_refused_by_name() -> None:
    tower = dict(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64, patch_size=4)
    tower |= dict(image_size=16, vision_output_dim=16, projector_input_dim=16, projector_output_dim=16)
    config = CONFIG_MAPPING["llama4"](text_config={**models._COMMON, **families.SECTIONS}, vision_config=tower)
    config.architectures = ["Llama4ForConditionalGeneration"]
    with pytest.raises(ValueError, match=r"Llama4ForConditionalGeneration: .*text model trains, a Llama4ForCausalLM"):
        TreeEngine(auto_class(config).from_config(config))
