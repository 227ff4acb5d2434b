"""Wrong input and unsupported models are refused, naming the argument, the sequence or the layer."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import transformers
from torch import nn
from transformers import CONFIG_MAPPING, Qwen2AudioConfig, Qwen2AudioForConditionalGeneration

from app.tree import PrefixTree, TreeEngine, most_tokens
from tests.app.tree import models, oracle
from tests.app.tree.engine.pictures import others

GOOD = [np.array([1, 2, 3]), np.array([1, 2, 5, 6])]


def run(model, sequences=GOOD, want=("logprobs",), temperatures=None, **engine):
    """Both passes, so that a refusal may come from construction, forward or backward."""
    tree = PrefixTree.build(sequences)
    made = TreeEngine(model, **engine)
    out = made.forward(tree, want=want, temperatures=temperatures)
    made.backward(
        tree, lambda out, i: sum(getattr(out, name).sum() for name in want), want=want, temperatures=temperatures
    )
    for p in model.parameters():
        p.grad = None
    return out


def refused(model, message: str, **arguments) -> None:
    """Each pass on its own refuses; gradients of a refused pass stay untouched."""
    sequences, engine = arguments.pop("sequences", GOOD), arguments.pop("engine", {})
    tree = PrefixTree.build(sequences)
    with pytest.raises(ValueError, match=message):
        TreeEngine(model, **engine).forward(tree, **arguments)
    with pytest.raises(ValueError, match=message):
        TreeEngine(model, **engine).backward(tree, lambda out, i: out.logprobs.sum(), **arguments)
    assert all(p.grad is None for p in model.parameters())


@pytest.fixture
def model():
    return models.make("qwen3")


def test_token_outside_the_vocabulary(model) -> None:
    refused(model, r"sequences\[1\].*31.*position 2", sequences=[[1, 2, 3], [1, 2, 31]])


def test_longer_than_the_model_allows(model) -> None:
    refused(model, r"sequences\[1\].*65.*max_position_embeddings.*64", sequences=[[1, 2], [3] * 65])
    run(model, [[3] * 64])


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("qwen3", {"attention_dropout": 0.1}),
        ("starcoder2", {"residual_dropout": 0.1}),
        ("starcoder2", {"embedding_dropout": 0.1}),
        ("phi", {"resid_pdrop": 0.1}),
        ("phi", {"embd_pdrop": 0.1}),
        ("opt", {"dropout": 0.0, "attention_dropout": 0.0, "layerdrop": 0.1}),
    ],
)
def test_dropout_in_training_mode(name: str, options: dict) -> None:
    model = models.make(name, **options)
    refused(model, "layerdrop of 0.1" if "layerdrop" in options else "dropout")
    model.eval()
    run(model)


def test_dropped_paths_of_a_tower_in_training_mode() -> None:
    """Whose rate is above 0 unless it is said."""
    if "qianfan_ocr" not in CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no qianfan_ocr")
    model = others.model_of("qianfan_ocr", others.OTHERS["qianfan_ocr"][0]).train()
    refused(model, "drop_path_rate of 0.1 in training mode")
    run(model.eval())


def test_dropout_of_the_value_head(model) -> None:
    head = nn.Sequential(nn.Dropout(0.1), nn.Linear(models.HIDDEN, 1))
    refused(model, "dropout", engine={"value_head": head}, want=("logprobs", "values"))
    run(model, want=("logprobs", "values"), value_head=head.eval())


@pytest.mark.parametrize("want", [("logits",), ("logprobs", "value"), (), "logprobs"])
def test_unknown_want(model, want) -> None:
    refused(model, "want", want=want)


def test_values_without_a_value_head(model) -> None:
    refused(model, "value_head", want=("values",))


@pytest.mark.parametrize("name", ["chunk_tokens", "live_tokens", "head_tokens"])
@pytest.mark.parametrize("value", [0, -1, "all"])
def test_budgets_below_one(model, name: str, value) -> None:
    with pytest.raises(ValueError, match=name):
        TreeEngine(model, **{name: value})


def test_unknown_attention_backend(model) -> None:
    with pytest.raises(ValueError, match=r"attention.*'sdpaa'"):
        TreeEngine(model, attention="sdpaa")


@pytest.mark.parametrize("temperature", [0.0, -1.0, float("nan")])
def test_temperature_must_be_above_zero(model, temperature: float) -> None:
    with pytest.raises(ValueError, match="temperature"):
        TreeEngine(model, temperature=temperature)
    refused(model, r"temperatures\[1\]", temperatures=torch.tensor([1.0, temperature]))


def test_temperatures_of_another_length(model) -> None:
    refused(model, "temperatures.*2", temperatures=torch.ones(3))


def test_shared_tokens_with_different_temperatures(model) -> None:
    refused(model, "temperatures.*keys", temperatures=torch.tensor([1.0, 0.7]))
    run(model, [[1, 2], [3, 4]], temperatures=torch.tensor([1.0, 0.7]))  # nothing shared: nothing to refuse


@pytest.mark.parametrize("batched", [False, True])
def test_loss_must_be_a_scalar(model, batched: bool) -> None:
    with pytest.raises(ValueError, match=r"loss_fn.*scalar"):
        TreeEngine(model).backward(PrefixTree.build(GOOD), lambda out, i: out.logprobs, batched=batched)


def test_reading_an_output_that_was_not_wanted(model) -> None:
    out = TreeEngine(model).forward(PrefixTree.build(GOOD))
    with pytest.raises(KeyError, match=r"entropy.*want"):
        out.flat("entropy")


def test_a_model_without_output_projection(model) -> None:
    refused(model.model, "output projection|ForCausalLM")


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("mamba", dict(attn_implementation="eager"), "Mamba-1"),
        ("jamba", dict(attn_layer_offset=1, attn_layer_period=2, num_experts=2), "starts from zeros"),
        ("falcon_mamba", dict(attn_implementation="eager", state_size=4), "Mamba-1"),
        ("minimax", dict(num_local_experts=2, num_experts_per_tok=1), "MiniMaxForCausalLM: its lightning attention"),
        (
            "zamba2",
            dict(layers_block_type=["linear_attention", "hybrid"], n_mamba_heads=4, mamba_d_state=4),
            "Zamba2ForCausalLM: its attention layers share one block",
        ),
        ("rwkv", dict(attn_implementation="eager", attention_hidden_size=16), "[Rr]wkv"),
    ],
)
def test_layers_with_other_state_are_refused_by_name(name: str, options: dict, message: str) -> None:
    model = models.make(name, **options)
    refused(model, message)


def test_a_model_that_hears_is_refused_by_name() -> None:
    text = dict(models.make("qwen2").config.to_dict())
    sound = dict(d_model=16, encoder_layers=1, encoder_attention_heads=2, encoder_ffn_dim=16, num_mel_bins=8)
    model = Qwen2AudioForConditionalGeneration(Qwen2AudioConfig(text_config=text, audio_config=sound))
    refused(model, r"Qwen2AudioForConditionalGeneration takes sound.*\(Qwen2ForCausalLM\) that was given the weights")


WINDOWED = [
    ("mistral", {}),
    ("starcoder2", {}),
    ("qwen2", {"use_sliding_window": True, "max_window_layers": 1}),
    ("qwen3", {"use_sliding_window": True, "max_window_layers": 1}),
    ("phi3", {}),
]


@pytest.mark.parametrize(("name", "options"), WINDOWED, ids=[name for name, _ in WINDOWED])
@pytest.mark.parametrize("length", [5, 6, 9])
def test_sliding_window_is_honoured(name: str, options: dict, length: int) -> None:
    """A window of 5 tokens: shorter, just longer, and much longer sequences."""
    model = models.make(name, sliding_window=5, **options)
    sequence = np.arange(3, 3 + length)
    expected = oracle.dense_forward(model, [sequence])[0].logprobs
    out = run(model, [sequence, sequence[:2]])
    assert (out.logprobs[0] - expected).abs().max() < 1e-5


def test_a_window_of_no_tokens_is_refused() -> None:
    model = models.make("mistral", sliding_window=4)
    for layer in model.model.layers:
        layer.self_attn.config.sliding_window = 0
    refused(model, "layer 0 .*sliding_window=0")


LONG_ROPE = dict(
    original_max_position_embeddings=12,
    rope_parameters=dict(
        rope_type="longrope",
        rope_theta=10000.0,
        short_factor=[1.0, 1.1],
        long_factor=[4.0, 8.0],
        original_max_position_embeddings=12,
    ),
)


def test_positions_that_depend_on_what_follows_are_refused() -> None:
    """LongRoPE rotates a sequence beyond its original length otherwise, from the first token on."""
    model = models.make("phi3", **LONG_ROPE)
    longer = [np.arange(3, 16), [3, 4, 5]]
    refused(model, r"sequences\[0\] has 13 tokens.*original_max_position_embeddings of 12.*longrope", sequences=longer)
    kept = [np.arange(3, 15), [3, 4, 5]]
    expected = [out.logprobs for out in oracle.dense_forward(model, [np.asarray(one) for one in kept])]
    got = run(model, kept).logprobs
    assert all((a - b).abs().max() < 1e-5 for a, b in zip(got, expected, strict=True))


def test_positions_that_a_sequence_may_have() -> None:
    of_kinds = {"full_attention": LONG_ROPE["rope_parameters"], "sliding_attention": {"rope_type": "default"}}
    config = models.make("phi3").config
    assert most_tokens(config) == 64
    config.rope_parameters = of_kinds
    assert most_tokens(config) == most_tokens(models.make("phi3", **LONG_ROPE).config) == 12


def test_layers_that_drop_keyword_arguments_are_refused_by_name() -> None:
    model = models.make("nemotron")
    refused(model, r"layer 0 \(NemotronAttention\): does not hand keyword arguments of the forward on")


def test_layers_may_view_what_attention_returns() -> None:
    """As Afmoe's do, which need it in one piece."""
    model = models.make("afmoe", num_local_experts=4, num_experts_per_tok=2, moe_intermediate_size=8, sliding_window=4)
    sequence = np.arange(3, 13)
    expected = oracle.dense_forward(model, [sequence])[0].logprobs
    assert (run(model, [sequence, sequence[:2]]).logprobs[0] - expected).abs().max() < 1e-5


EXPERTS = dict(num_experts=4, num_local_experts=4, num_experts_per_tok=2, router_jitter_noise=0.0)
IN_MASKS = [
    ("qwen2_moe", dict(use_sliding_window=True, max_window_layers=1, moe_intermediate_size=8)),
    ("phimoe", dict(input_jitter_noise=0.0)),
]


@pytest.mark.parametrize(("name", "options"), IN_MASKS, ids=[name for name, _ in IN_MASKS])
def test_a_window_that_only_the_mask_has_is_refused(name: str, options: dict) -> None:
    """These layers do not pass their window on; up to it, they need none."""
    model = models.make(name, sliding_window=5, **EXPERTS, **options).eval()
    refused(model, r"has a window of 5 tokens in the mask", sequences=[np.arange(3, 10)])
    sequence = np.arange(3, 9)  # nothing is predicted from the last
    assert most_tokens(model.config) == len(sequence)
    expected = oracle.dense_forward(model, [sequence])[0].logprobs
    assert (run(model, [sequence]).logprobs[0] - expected).abs().max() < 1e-5


def test_a_routers_noise_is_refused_in_training_mode() -> None:
    model = models.make("mixtral", **{**EXPERTS, "router_jitter_noise": 0.1})
    refused(model, "router_jitter_noise of 0.1 in training mode")
    model.eval()
    run(model, GOOD)


def test_nothing_selected_is_an_empty_tree(model) -> None:
    tree = PrefixTree.build(GOOD).select([])
    assert (tree.num_sequences, tree.num_tokens) == (0, 0)
    assert TreeEngine(model).backward(tree, lambda out, i: out.logprobs.sum()) == 0.0


def test_a_loss_may_be_a_number_for_some_sequences(model) -> None:
    tree = PrefixTree.build(GOOD)
    whole = TreeEngine(model).backward(tree, lambda out, i: out.logprobs.sum() if i else 0.0)
    alone = TreeEngine(model).forward(tree).logprobs[1].sum()
    assert whole == pytest.approx(float(alone), abs=1e-5)
