"""What is found out about layers that carry a state by watching them; what cannot be carried is named."""

from __future__ import annotations

import weakref
from inspect import Parameter, Signature, signature

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers.models.lfm2 import modeling_lfm2

from app.tree import PrefixTree, TreeEngine
from app.tree.executor import Executor
from app.tree.states.functions import FUNCTIONS
from app.tree.states.piece_states import PieceStates
from tests.app.tree import models, oracle
from tests.app.tree.states import hybrids

SEQUENCES = [[1, 2, 3, 4, 5], [1, 2, 6], [1, 2, 3, 4, 7, 8, 9]]


def run(model, sequences=SEQUENCES) -> None:
    TreeEngine(model, 3, 5).backward(PrefixTree.build(sequences), lambda out, i: out.logprobs.sum())


@pytest.mark.parametrize("name", hybrids.OPTIONS)
def test_transformers_still_has_what_is_hooked(name: str) -> None:
    """Each family's layers call known functions, a convolution and (but for short convolutions) a scan."""
    layers = TreeEngine(hybrids.make(name)).state_layers
    kinds = {"convolution"} if name.startswith("lfm") else {"convolution", "scan"}
    kinds |= {"lookback", "tokens"} if name == "qwen4_exp_text" else set()
    kinds = {"deepseek_v4": {"entries", "index"}, "zaya": {"lookback"}}.get(name, kinds)
    assert {kind for _, kind in layers.expected} == kinds
    if name in ("deepseek_v4", "zaya"):
        assert layers.indices == ({1, 2} if name == "deepseek_v4" else {0, 1, 2}) and layers.attending == {0, 1, 2}
        return
    both = name == "falcon_h1"
    assert layers.indices == ({0, 1} if both else {0, 2}) and layers.attending == ({0, 1} if both else {1})


def test_layers_are_found_by_what_they_are_made_of() -> None:
    layers = TreeEngine(models.make("qwen3")).state_layers
    assert not layers.mixers and layers.attending == {0, 1}


def test_without_states_a_function_is_the_original() -> None:
    model = hybrids.make("lfm2")
    before = oracle.dense_sequence(model, SEQUENCES[0]).logprobs
    TreeEngine(model)
    wrapped = modeling_lfm2.causal_conv1d_fn
    TreeEngine(hybrids.make("lfm2"))
    assert modeling_lfm2.causal_conv1d_fn is wrapped, "wrapped once"
    assert torch.equal(oracle.dense_sequence(model, SEQUENCES[0]).logprobs, before)


def test_a_layer_that_was_replaced_is_named() -> None:
    """A hub kernel or a compiled layer in place of transformers' own does not call its functions."""
    model = hybrids.make("lfm2")
    model.model.layers[2].conv.forward = lambda hidden_states, **others: hidden_states
    with pytest.raises(ValueError, match=r"layer 2: causal_conv1d_fn of 'model.layers.2.conv' \(Lfm2ShortConv\)"):
        run(model)


def test_a_layer_that_takes_no_state_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """LFM2's of older releases."""
    model = hybrids.make("qwen3_5_text")
    forward = type(model.model.layers[0].linear_attn).forward
    taken = [one for one in signature(forward).parameters.values() if one.kind is not Parameter.VAR_KEYWORD]
    monkeypatch.setattr(forward, "__signature__", Signature(taken), raising=False)
    with pytest.raises(ValueError, match=r"layer 0, .*GatedDeltaNet.*takes nothing for .*; use a newer transformers"):
        TreeEngine(model)


@pytest.mark.parametrize(
    ("name", "argument"), [("causal_conv1d_fn", "seq_idx"), ("torch_chunk_gated_delta_rule", "initial_state")]
)
def test_an_argument_that_is_not_honoured_is_named(name: str, argument: str) -> None:
    from transformers.models.qwen3_5 import modeling_qwen3_5 as file

    model = hybrids.make("qwen3_5_text")
    TreeEngine(model)
    with pytest.MonkeyPatch.context() as patch:
        wrapped = getattr(file, name)
        patch.setattr(file, name, lambda *args, **kwargs: wrapped(*args, **{**kwargs, argument: torch.zeros(1)}))
        getattr(file, name)._runs_over_pieces = True
        with pytest.raises(ValueError, match=rf"layer 0 \(Qwen3_5GatedDeltaNet\): .* arguments \['{argument}'\]"):
            run(model)


def test_a_mask_on_a_layer_with_a_state_is_named() -> None:
    model = hybrids.make("lfm2")
    layer = model.model.layers[0].conv
    layer.register_forward_pre_hook(
        lambda module, args, kwargs: (args, {**kwargs, "attention_mask": torch.ones(1, 3)}), with_kwargs=True
    )
    with pytest.raises(ValueError, match=r"layer 0 \(Lfm2ShortConv\): received attention_mask"):
        run(model)


def test_a_scan_nobody_knows_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(FUNCTIONS, "torch_chunk_gated_delta_rule")
    from transformers.models.olmo_hybrid import modeling_olmo_hybrid as file

    monkeypatch.setattr(file, "torch_chunk_gated_delta_rule", file.torch_chunk_gated_delta_rule.__wrapped__)
    with pytest.raises(ValueError, match=r"layer 0 \(OlmoHybridGatedDeltaNet\) calls torch_chunk_gated_delta_rule"):
        run(hybrids.make("olmo_hybrid"))


@pytest.mark.filterwarnings("ignore:LoRA adapter added to ConvNd")
def test_projections_with_a_bias_that_are_convolved_are_refused() -> None:
    with pytest.raises(ValueError, match=r"qkv_proj' \(ZayaCCAProjection\) convolves projections with a bias"):
        TreeEngine(hybrids.make("zaya", attention_bias=True))


def test_adapters_on_convolutions_are_refused() -> None:
    model = get_peft_model(hybrids.make("lfm2"), LoraConfig(r=16, target_modules=["conv.conv", "in_proj"]))
    with pytest.raises(ValueError, match=r"layers\.0\.conv\.conv' has an adapter .*target_modules"):
        TreeEngine(model)


@pytest.mark.parametrize("name", ["qwen3_5_text", "qwen4_exp_text"])
def test_layers_that_run_without_a_graph_first_are_refused(name: str) -> None:
    """States that they hand on would have no gradient."""
    model = hybrids.make(name)
    models.checkpoint(model, use_reentrant=True)
    with pytest.raises(ValueError, match=r"checkpoints its layers with use_reentrant=True.*set use_reentrant=False"):
        run(model)


@pytest.mark.parametrize("saved", ["ple", "ple_embedding"])
def test_a_part_that_looks_back_within_a_wrapper(saved: str) -> None:
    config = LoraConfig(r=2, target_modules=["q_proj", "out_proj"], modules_to_save=[saved])
    engine = TreeEngine(get_peft_model(hybrids.make("qwen4_exp_text"), config), 3, 5)
    report = engine.verify(PrefixTree.build(SEQUENCES))
    assert report is not None and report.passed, str(report)


def test_states_go_with_their_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing holds those of a chunk that has run backward."""
    made: list[weakref.ref[PieceStates]] = []
    init, backward = PieceStates.__init__, Executor._backward

    def noted(self: PieceStates, *args, **kwargs) -> None:
        made.append(weakref.ref(self))
        init(self, *args, **kwargs)

    def checked(self: Executor, index: int) -> None:
        backward(self, index)
        kept = [chunk.run.states for chunk in self.open.values() if chunk.run is not None]
        assert all(any(one() is state for state in kept) for one in made if one() is not None)

    monkeypatch.setattr(PieceStates, "__init__", noted)
    monkeypatch.setattr(Executor, "_backward", checked)
    run(hybrids.make("qwen4_exp_text"))
    assert len(made) > 2
