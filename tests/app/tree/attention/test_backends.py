"""Every attention backend against a naive float64 reference: windows, soft-capping, sinks, grouped heads; and what each
refuses. On CUDA the real kernels run too."""

from __future__ import annotations

import copy
import functools
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from app.tree import PrefixTree, TreeEngine
from app.tree.attention import BACKENDS, choose_backend, flex
from app.tree.attention.flex import interval_blocks, window_blocks
from app.tree.attention.kernels import flash_refusal
from app.tree.planning.layout import layout
from app.tree.planning.planner import plan
from tests.app.tree import models, oracle
from tests.app.tree.attention.backends import ON_CPU, cuda_backends_on_cpu, float64_clean
from tests.app.tree.cases import Case, cases
from tests.app.tree.engine.families import EXPERTS
from tests.app.tree.losses import SequenceLoss
from tests.app.tree.parity import assert_backward, masked_block, take_grads

F64 = torch.float64
STEM = [3, 10, 17, 24, 3, 0, 9, 9, 4, 5, 6, 7, 30, 1]
SEQUENCES = [
    np.array(s)
    for s in (
        [*STEM, 8, 8, 2],
        [*STEM, 1, 2, 3, 4, 5, 6],
        [*STEM[:9], 1, 2, 3],
        [*STEM[:9], 1, 4, 4, 4],
        STEM[:3],
        [7],
        [*STEM[:5], 20, 21],
    )
]
LENGTHS = [len(s) for s in SEQUENCES]
WINDOWS = [None, 1, 2, 5, 9, 40]
# FlexAttention without a compiler computes every mask anew: seconds a case. One window is quick.
_FLEX = pytest.param("flex_on_cpu", marks=pytest.mark.slow)
SLOW_WINDOWS = [pytest.param("flex_on_cpu", w, marks=pytest.mark.slow) for w in WINDOWS if w != 5]
QUICK = [_FLEX if backend == "flex_on_cpu" else backend for backend in ON_CPU]
FEW = settings(max_examples=max(1, settings.default.max_examples // 3))
pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")


@pytest.fixture(autouse=True)
def on_cpu() -> Iterator[None]:
    with cuda_backends_on_cpu():
        yield


LOSS = SequenceLoss("tanh_of_sums", LENGTHS, 3, ("logprobs", "entropy"))


def truth_of(model) -> tuple[dict[str, torch.Tensor], list[torch.Tensor]]:
    """Gradients, and log-probabilities of every sequence."""
    _, gradients = oracle.dense_backward(model, SEQUENCES, LOSS)
    with torch.no_grad():
        return gradients, [out.logprobs for out in oracle.dense_forward(model, SEQUENCES)]


def check(model, backend: str, budgets: tuple[int, int], truth=None, prepare=lambda model: None) -> None:
    """Outputs and gradients of every sequence; `prepare` changes the model after the reference has run."""
    expected, dense = truth or truth_of(model)
    prepare(model)
    tolerance = 1e-9
    engine, tree = TreeEngine(model, *budgets, attention=backend, self_check=False), PrefixTree.build(SEQUENCES)
    out = engine.forward(tree)
    for got, want in zip(out.logprobs, dense):
        assert (got - want).abs().max() <= tolerance
    engine.backward(tree, LOSS, want=("logprobs", "entropy"))
    error, where = oracle.relative_error(take_grads(model), expected)
    assert error <= tolerance, f"{error:.1e} in {where}"


@pytest.mark.parametrize(
    ("backend", "window"), [*((b, w) for b in ON_CPU[:-1] for w in WINDOWS), ("flex_on_cpu", 5), *SLOW_WINDOWS]
)
@pytest.mark.parametrize("budgets", [(4, 9), (1000, 1000)])
def test_windows_float64(backend: str, window: int | None, budgets: tuple[int, int]) -> None:
    with masked_block(3):
        check(windowed(window), backend, budgets, truth_of_window(window))


def windowed(window: int | None):
    model = models.make("starcoder2", F64, sliding_window=window)
    model.set_attn_implementation("naive")
    return model


@functools.cache
def truth_of_window(window: int | None) -> tuple[dict[str, torch.Tensor], list[torch.Tensor]]:
    return truth_of(windowed(window))


@FEW
@given(case=cases(), window=st.sampled_from([1, 2, 3, 6, 10]), block=st.sampled_from([1, 3, 256]), flash=st.booleans())
def test_windows_float64_on_random_trees(case: Case, window: int, block: int, flash: bool) -> None:
    model, head = models.shared("starcoder2", F64)
    for layer in model.model.layers:
        layer.self_attn.config.sliding_window = window
    model.set_attn_implementation("naive")
    try:
        with masked_block(block):
            attention = "flash_on_cpu" if flash else "sdpa"
            assert_backward(model, head, case, "tanh_of_sums", ("logprobs",), 1e-9, True, attention=attention)
    finally:
        model.config.sliding_window = None
        model.set_attn_implementation("sdpa")


ALTERNATING = {
    "gemma2": dict(head_dim=8, sliding_window=4, attn_logit_softcapping=2.0, final_logit_softcapping=3.0),
    "gemma3_text": dict(head_dim=8, sliding_window=4, layer_types=["sliding_attention", "full_attention"]),
    "gpt_oss": dict(head_dim=8, sliding_window=4, **EXPERTS),
    "qwen2": dict(use_sliding_window=True, max_window_layers=1, sliding_window=4),
}


@pytest.mark.parametrize("backend", QUICK)
@pytest.mark.parametrize("name", ALTERNATING)
def test_alternating_windows_softcapping_and_sinks_float64(name: str, backend: str) -> None:
    model = float64_clean(models.make(name, F64, attn_implementation="eager", **ALTERNATING[name])).eval()
    if name == "gemma2" and backend == "flash_on_cpu":
        with pytest.raises(ValueError, match=r"layer 0.*soft-cap"):
            check(model, backend, (4, 9))
        return
    with masked_block(3):
        truth = truth_of(model)
        for budgets in ((4, 9), (1000, 1000)):
            check(model, backend, budgets, truth)


def test_the_reference_sees_windows_softcapping_and_sinks() -> None:
    """Guards the tests above: each option changes the reference's outputs."""
    for name, options in ALTERNATING.items():
        model = float64_clean(models.make(name, F64, attn_implementation="eager", **options)).eval()
        before = oracle.dense_forward(model, SEQUENCES[:1])[0].logprobs.detach()
        for layer in model.model.layers:
            attention = layer.self_attn
            attention.attn_logit_softcapping = None
            attention.sliding_window = None
            if hasattr(attention, "sinks"):
                attention.sinks.data.fill_(-1e9)
        after = oracle.dense_forward(model, SEQUENCES[:1])[0].logprobs.detach()
        assert (before - after).abs().max() > 1e-3, name


@pytest.mark.parametrize("backend", QUICK)
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_activation_checkpointing(backend: str, reentrant: bool) -> None:
    model = models.make("starcoder2", F64, sliding_window=6)
    model.set_attn_implementation("naive")

    def prepare(model) -> None:
        models.checkpoint(model, use_reentrant=reentrant)
        if reentrant:
            model.enable_input_require_grads()

    check(model, backend, (4, 1000), prepare=prepare)


@pytest.mark.parametrize("backend", ON_CPU)
def test_keys_alone_can_be_trained(backend: str) -> None:
    """The path's gradients must not depend on queries having some."""
    model = models.make("starcoder2", F64)
    model.set_attn_implementation("naive")
    for name, p in model.named_parameters():
        p.requires_grad_("layers.0.self_attn.k_proj" in name)
    check(model, backend, (4, 9))


@given(case=cases(), window=st.sampled_from([None, 1, 2, 5]), block=st.sampled_from([1, 2, 4]))
def test_block_masks_of_flex(case: Case, window: int | None, block: int) -> None:
    """No visible pair is in a block left out, no hidden one in a block called whole."""
    tree = PrefixTree.build(case.sequences, keys=case.keys, share=case.share)
    for chunk in plan(tree, case.chunk_tokens, tree.num_tokens).chunks:
        rows = layout(chunk)
        depths, n = tree.token_depth[rows.tokens], len(rows.tokens)
        query, key = np.arange(n)[:, None], np.arange(n)[None, :]
        near = depths[:, None] - depths[None, :] < (window or n + 999)
        own = (key <= query) & (query < rows.ends[None, :]) & near
        _covers(*interval_blocks(rows.ends, depths, window, block), own, block)
        if chunk.path_tokens and window is not None:
            path = depths[:, None] - np.arange(chunk.path_tokens)[None, :] < window
            _covers(*window_blocks(depths, chunk.path_tokens, window, block), path, block)


def _covers(some: np.ndarray, only: np.ndarray, visible: np.ndarray, block: int) -> None:
    spread_some, spread_only = (x.repeat(block, 0).repeat(block, 1) for x in (some, only))
    rows, keys = visible.shape
    assert not (visible & ~spread_some[:rows, :keys]).any()
    padded = np.zeros(spread_only.shape, bool)
    padded[:rows, :keys] = visible
    assert not (spread_only & ~padded).any()


def test_flex_leaves_blocks_of_other_branches_out() -> None:
    stem = np.arange(300)
    tree = PrefixTree.build([np.append(stem, [1000 + k] * 400) for k in range(6)])
    (chunk,) = plan(tree, 10_000, 10_000).chunks
    rows = layout(chunk)
    some, only = interval_blocks(rows.ends, tree.token_depth[rows.tokens], None)
    assert some.sum() < 0.55 * np.tril(np.ones_like(some)).sum() and only.sum() > 0.3 * some.sum()


@pytest.mark.slow
def test_flex_compiles_for_all_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    """Traced as on CUDA (only the code generator is left out): every kind of call is compiled a few times and then
    serves all lengths. torch's own limit would be reached within the first pass, and symbolic scales do not trace."""
    compiled = functools.partial(torch.compile, backend="aot_eager")
    monkeypatch.setattr("app.tree.attention.flex.torch.compile", compiled)
    runner = flex._runner.__wrapped__("cuda")
    monkeypatch.setattr(flex, "_runner", lambda device: runner)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model = models.make("gemma2", attn_implementation="eager", max_position_embeddings=512, **ALTERNATING["gemma2"])
    random = np.random.default_rng(0)
    graphs = []
    for stem in (20, 150, 290, 33):
        shared = random.integers(0, 31, stem)
        sequences = [np.concatenate([shared, random.integers(0, 31, n)]) for n in (10, 60, 140)]
        loss = SequenceLoss("plain_sum", [len(s) for s in sequences], 0, ("logprobs",))
        TreeEngine(model.eval(), 160, 350, attention="flex_on_cpu").backward(PrefixTree.build(sequences), loss)
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
        if stem == 290:
            _, expected = oracle.dense_backward(model, sequences, loss)
            assert oracle.relative_error(take_grads(model), expected)[0] < 1e-5
        take_grads(model)
    torch._dynamo.reset()
    assert 8 < graphs[2] < flex._GRAPHS / 2 and graphs[-1] == graphs[2], graphs


# What backends refuse


def test_unknown_backends_are_refused() -> None:
    model = models.make("qwen3")
    with pytest.raises(ValueError, match=r"attention must be 'auto' or one of .*'fast'"):
        TreeEngine(model, attention="fast")
    with pytest.raises(ValueError, match="'fast'"):
        choose_backend("fast", model)


@pytest.mark.parametrize(
    ("backend", "remedy"), [("flash", "CUDA.*attention='sdpa'"), ("flex", "CPU.*attention='sdpa'")]
)
def test_cuda_backends_refuse_to_train_on_cpus(backend: str, remedy: str) -> None:
    model = models.make("qwen3")
    engine, tree = TreeEngine(model, attention=backend), PrefixTree.build(SEQUENCES)
    with pytest.raises(ValueError, match=f"layer 0.*attention='{backend}'.*{remedy}"):
        engine.backward(tree, lambda out, i: out.logprobs.sum())
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("window", [None, 5])
def test_flex_as_it_is_runs_forward_on_cpus(window: int | None) -> None:
    model = models.make("starcoder2", F64, sliding_window=window)
    dense = oracle.dense_forward(model, SEQUENCES)
    out = TreeEngine(model, 4, 9, attention="flex").forward(PrefixTree.build(SEQUENCES))
    for got, want in zip(out.logprobs, dense):
        assert (got - want.logprobs.detach()).abs().max() <= 1e-9


def test_auto_is_sdpa_on_cpus() -> None:
    assert choose_backend("auto", models.make("qwen3")) is BACKENDS["sdpa"]


WIDTHS: dict[str, Any] = dict(
    model_type="gemma4_text", head_dim=256, global_head_dim=512, hidden_size_per_layer_input=0
)
WIDTHS |= dict(layer_types=["sliding_attention", "full_attention"])


@pytest.mark.parametrize(
    ("dtype", "options", "capability", "expected"),
    [
        (torch.bfloat16, {}, (8, 0), "flash"),
        (torch.float16, {}, (9, 0), "flash"),  # heads of 8
        (torch.float16, dict(head_dim=128), (9, 0), "triton"),
        (torch.bfloat16, dict(head_dim=96), (9, 0), "flash"),  # as wide as 128 to the Triton kernels
        (torch.bfloat16, dict(head_dim=128), (10, 0), "flash"),
        (torch.bfloat16, dict(head_dim=128, model_type="mistral", sliding_window=5), (9, 0), "flash"),
        (torch.bfloat16, dict(head_dim=128, model_type="llama4_text"), (9, 0), "flash"),
        (torch.float32, {}, (9, 0), "sdpa"),  # FlexAttention would be compiled for minutes first
        (torch.float64, {}, (9, 0), "sdpa"),
        (torch.bfloat16, {}, (7, 5), "sdpa"),  # flash kernels die there
        (torch.float16, {}, (7, 0), "sdpa"),
        (torch.bfloat16, dict(head_dim=264), (9, 0), "sdpa"),
        (torch.bfloat16, dict(head_dim=16, model_type="gemma2", attn_implementation="eager"), (9, 0), "flex"),
        (torch.bfloat16, dict(head_dim=8, model_type="gemma2", attn_implementation="eager"), (9, 0), "sdpa"),
        (torch.bfloat16, WIDTHS, (9, 0), "flash and sdpa"),
        (torch.bfloat16, WIDTHS | dict(head_dim=128, global_head_dim=256), (9, 0), "flash"),
        (torch.bfloat16, WIDTHS | dict(head_dim=264), (9, 0), "sdpa"),
        (torch.float32, WIDTHS, (9, 0), "sdpa"),
    ],
)
def test_auto_on_cuda(
    dtype, options: dict, capability: tuple[int, int], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The choice reads the device of the parameters and no kernel: a stand-in device is enough."""
    options = dict(options)
    model = models.make(options.pop("model_type", "qwen3"), dtype, **options)
    parameter = next(model.parameters())
    stand_in = torch.empty(0, dtype=parameter.dtype)
    monkeypatch.setattr(type(model), "parameters", lambda self: iter([_On("cuda", stand_in.dtype)]))
    monkeypatch.setattr("app.tree.attention.function._triton_compiles", lambda: True)
    for module in ("function", "kernels", "packages"):
        monkeypatch.setattr(f"app.tree.attention.{module}.capability", lambda device: capability)
    assert choose_backend("auto", model).name == expected
    monkeypatch.setattr("app.tree.attention.function._triton_compiles", lambda: False)
    assert choose_backend("auto", model).name == {"flex": "sdpa", "triton": "flash"}.get(expected, expected)


@pytest.mark.parametrize(
    ("dtype", "head_dim", "capability", "words"),
    [
        (torch.bfloat16, 64, (7, 5), r"compute capability 8\.0 .* this one has 7\.5"),
        (torch.float32, 64, (9, 0), "computes bfloat16 and float16, not torch.float32"),
        (torch.bfloat16, 260, (9, 0), "multiples of 8 and at most 256, not 260"),
    ],
)
def test_flash_refuses_by_name(dtype, head_dim: int, capability, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.tree.attention.kernels.capability", lambda device: capability)
    found = flash_refusal(torch.device("cuda"), dtype, head_dim)
    assert found is not None and re.search(words, found)


class _On:
    def __init__(self, device: str, dtype: torch.dtype) -> None:
        self.device, self.dtype = torch.device(device), dtype


def test_attention_operators_have_the_arguments_flash_passes() -> None:
    """The operators exist in every build of torch; a renamed or moved argument shows without a GPU."""
    forward = torch.ops.aten._flash_attention_forward.default._schema
    backward = torch.ops.aten._flash_attention_backward.default._schema
    expected = "cum_seq_q cum_seq_k max_q max_k dropout_p is_causal"
    names = " ".join(a.name for a in forward.arguments)
    assert names.startswith(f"query key value {expected} return_debug_mask")
    names = " ".join(a.name for a in backward.arguments)
    assert names.startswith(f"grad_out query key value out logsumexp {expected} rng_state unused")
    for schema in (forward, backward):
        named = {a.name for a in schema.arguments if a.kwarg_only}
        assert {"scale", "window_size_left", "window_size_right"} <= named
    assert [r.name for r in forward.returns][:4] == ["output", "softmax_logsumexp", "rng_state", "unused"]


# The real kernels


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("backend", ["sdpa", "flash", "flex", "triton"])
@pytest.mark.parametrize("name", ["starcoder2", "gemma2", "gpt_oss", "qwen3"])
def test_real_kernels_on_cuda(backend: str, name: str) -> None:
    """bf16 gradients no further from the float64 truth than 1.3 times the dense bf16 model's."""
    if (backend, name) == ("flash", "gemma2"):
        pytest.skip("flash cannot soft-cap, and says so")
    wide = dict(hidden_size=128, intermediate_size=96, head_dim=64, sliding_window=5, num_hidden_layers=2)
    options = {**ALTERNATING.get(name, {}), **wide}
    if name == "starcoder2":
        options.pop("head_dim")
        options.update(hidden_size=256)
    model = models.make(name, torch.bfloat16, attn_implementation="eager", **options).eval()
    exact = float64_clean_copy(model)
    loss = SequenceLoss("plain_sum", LENGTHS, 3, ("logprobs",))
    _, truth = oracle.dense_backward(exact, SEQUENCES, loss)
    _, dense = oracle.dense_backward(model, SEQUENCES, loss)
    there = copy.deepcopy(model).cuda()
    for p in there.parameters():
        p.grad = None
    TreeEngine(there, 8, 20, attention=backend).backward(PrefixTree.build(SEQUENCES), loss)
    got = {name: grad.cpu().double() for name, grad in take_grads(there).items() if grad is not None}
    ours, theirs = (sum(float((g[n].double() - t).square().sum()) for n, t in truth.items()) for g in (got, dense))
    assert ours <= 1.3**2 * theirs


def float64_clean_copy(model):
    exact = copy.deepcopy(model).double()
    exact.set_attn_implementation("naive")
    exact.set_experts_implementation("eager")  # grouped matrix products have no float64
    return exact
