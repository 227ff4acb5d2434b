"""Layers that attend to what an indexer chose (`app.tree.attention.chosen.indexers`): exact, not attending to all."""

from __future__ import annotations

import copy
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model
from transformers import CONFIG_MAPPING, PreTrainedModel

from app.tree import PrefixTree, TreeEngine
from app.tree.attention import kernels
from app.tree.attention.chosen import group_indexer, selected
from tests.app.tree import models, oracle
from tests.app.tree.cases import Case, cases
from tests.app.tree.engine import families
from tests.app.tree.engine.test_parity import EXAMPLES
from tests.app.tree.losses import KINDS, SequenceLoss
from tests.app.tree.parity import assert_backward, assert_forward, assert_unchanged, snapshot, take_grads
from tests.app.tree.states import hybrids
from tests.helpers.selection import some

TYPES: dict[str, dict[str, Any]] = {
    "deepseek_v32": {},
    "glm_moe_dsa": dict(num_hidden_layers=3, indexer_types=["full", "shared", "full"]),
    "hy_v4": {"attn_implementation": "eager"},
    "dots3_note_text": families.OTHERS["dots3_note_text"],
    "glm5_next": families.POOLED,
    "minimax_m3_vl_text": families.BLOCKS,
    "qwen4_exp_text": hybrids.OPTIONS["qwen4_exp_text"],
}
"""The plain form; layers that share the choice of others; sinks; layers with a window between; pools; blocks; groups
of what is seen."""
QUICK = ("deepseek_v32", "glm_moe_dsa", "glm5_next", "minimax_m3_vl_text", "qwen4_exp_text")
FEW: dict[str, dict[str, Any]] = {
    "minimax_m3_vl_text": {"index_topk_blocks": 4, "index_block_size": 6},
    "qwen4_exp_text": {"indexer_budget": 24, "indexer_compress_ratio": 4},
}
KINDS_OF_MODELS = some(TYPES, QUICK)


@cache
def exact(kind: str, **options: Any) -> PreTrainedModel:
    """In float64 but for scores and their choice, which are the module's own float32 on both sides."""
    if kind not in CONFIG_MAPPING:
        pytest.skip(f"the installed transformers has no {kind}")
    chosen = {**(families.INDEXED if kind not in hybrids.OPTIONS else {}), **TYPES[kind], **options}
    return hybrids.exact(models.make(kind, torch.float64, **chosen)).eval()


@pytest.mark.parametrize("kind", KINDS_OF_MODELS)
@settings(max_examples=EXAMPLES // 6)
@given(case=cases(), loss=st.sampled_from(sorted(KINDS)), batched=st.booleans(), block=st.sampled_from([1, 300, 10**6]))
def test_parity_in_float64(kind: str, case: Case, loss: str, batched: bool, block: int) -> None:
    model, head = exact(kind), models.value_head(torch.float64)
    with pytest.MonkeyPatch.context() as patch:  # blocks of one query, of several, and of all
        patch.setattr(group_indexer, "_SCORE_BYTES", block)
        patch.setattr(selected, "_MASK_BYTES", block)
        assert_forward(model, head, case, ("logprobs", "entropy", "values"), 1e-9)
        assert_backward(model, head, case, loss, ("logprobs", "values"), 1e-9, batched)


def gradients(model: PreTrainedModel, sequences: list[Any], *budgets: int, **engine: Any) -> dict[str, Any]:
    loss = SequenceLoss("mean_times_variance", [len(s) for s in sequences], 0, ("logprobs",))
    TreeEngine(model, *budgets, self_check=False, **engine).backward(PrefixTree.build(sequences), loss)
    return take_grads(model)


def expected(model: PreTrainedModel, sequences: list[Any]) -> dict[str, Any]:
    loss = SequenceLoss("mean_times_variance", [len(s) for s in sequences], 0, ("logprobs",))
    return oracle.dense_backward(model, sequences, loss)[1]


def forest() -> list[Any]:
    random = np.random.default_rng(0)
    stem = random.integers(0, 31, 200)
    cuts = ((200, 120), (200, 10), (200, 60), (90, 80), (90, 3), (30, 6))
    return [np.concatenate([stem[:cut], random.integers(0, 31, n)]) for cut, n in cuts]


@pytest.mark.parametrize("kind", KINDS_OF_MODELS)
def test_long_sequences_of_which_few_tokens_are_chosen(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_indexer, "_SCORE_BYTES", 2**18)
    monkeypatch.setattr(selected, "_MASK_BYTES", 2**16)
    model = exact(kind, max_position_embeddings=512, **FEW.get(kind, {"index_topk": 24}))
    truth = expected(model, forest())
    for budgets in ((1000, 2000), (100, 200), (40, 60)):
        assert oracle.relative_error(gradients(model, forest(), *budgets), truth)[0] < 1e-9


def test_on_devices_without_a_kernel_for_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    model = exact("hy_v4", max_position_embeddings=512, index_topk=24)
    truth = expected(model, forest())
    monkeypatch.setattr(selected, "pick_kernel", lambda q, mask: kernels.Math())
    assert oracle.relative_error(gradients(model, forest(), 100, 200), truth)[0] < 1e-9


def test_what_was_not_chosen_is_not_attended_to() -> None:
    """Guards the others: were indexers passed over, the engine would differ from the model by this."""
    few, all_ = (exact("deepseek_v32", index_topk=topk) for topk in (5, 64))
    all_.load_state_dict(few.state_dict())
    tree = PrefixTree.build(families.SEQUENCES)
    out = [TreeEngine(model, 4, 8, self_check=False).forward(tree).flat("logprobs") for model in (few, all_)]
    assert float((out[0] - out[1]).abs().max()) > 0.1


def test_indexers_have_no_gradient_and_are_left_as_they_were() -> None:
    model = exact("deepseek_v32")
    before, own = snapshot(model), [set(vars(module)) for module in model.modules()]
    found = gradients(model, families.SEQUENCES, 4, 8)
    assert {name for name, grad in found.items() if grad is None} >= {n for n in found if ".indexer." in n} != set()
    assert_unchanged(model, before)
    assert [set(vars(module)) for module in model.modules()] == own


def test_keys_of_the_path_are_computed_once() -> None:
    """Of every tree token its index keys, and again where a chunk runs again: never those of the path."""
    model = exact("deepseek_v32")
    tree, rows = PrefixTree.build(families.SEQUENCES), []
    handle = model.model.layers[0].self_attn.indexer.wk.register_forward_hook(lambda *a: rows.append(a[1][0].shape[1]))
    engine = TreeEngine(model, 4, 100, self_check=False)
    engine.forward(tree)
    handle.remove()
    assert sum(rows) == sum(chunk.tokens for chunk in engine.last_plan.chunks) and len(engine.last_plan.chunks) > 1


def test_a_pass_inside_of_another() -> None:
    """Losses may ask an engine for numbers of the same model, such as without its adapters."""
    model, sequences = exact("deepseek_v32"), families.SEQUENCES
    truth, inner = expected(model, sequences), TreeEngine(model, 3, 6, self_check=False)
    loss = SequenceLoss("mean_times_variance", [len(s) for s in sequences], 0, ("logprobs",))

    def asking(out: Any, i: int) -> torch.Tensor:
        inner.forward(PrefixTree.build(sequences[:2]))
        return loss(out, i)

    TreeEngine(model, 4, 8, self_check=False).backward(PrefixTree.build(sequences), asking)
    assert oracle.relative_error(take_grads(model), truth)[0] < 1e-9
    assert not any("forward" in vars(module) for module in model.modules())


def test_calls_past_the_engine_are_refused_by_name() -> None:
    model = exact("deepseek_v32")

    def past(out: Any, i: int) -> torch.Tensor:
        return model(torch.tensor([[1, 2, 3]])).logits.sum()

    with pytest.raises(ValueError, match=r"layer 0 \(.*\): runs without the tree inside of a TreeEngine's pass"):
        TreeEngine(model, self_check=False).backward(PrefixTree.build(families.SEQUENCES), past)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("glm5_next", {}),
        ("glm5_next", {"index_kpool_always_select_tail": False}),
        ("minimax_m3_vl_text", {}),
        ("qwen4_exp_text", {}),
    ],
)
@pytest.mark.parametrize("short", some(range(1, 7), (1, 4)))
def test_lines_of_every_length_around_what_is_chosen(short: int, kind: str, options: dict[str, Any]) -> None:
    """Whose choices have other columns where they are of all, or of just as many as there are; without the tokens
    behind the last pool they are never of all."""
    model = exact(kind, **options)
    for long in range(short, 9):
        sequences = [np.arange(long) + 2, np.arange(short) + 12, np.r_[2, np.arange(short) + 20]]
        tree, want = PrefixTree.build(sequences), oracle.dense_forward(model, sequences)
        for budgets in ((100, 100), (3, 100)):
            got = TreeEngine(model, *budgets, self_check=False).forward(tree).logprobs
            for ours, theirs in zip(got, want, strict=True):
                torch.testing.assert_close(ours, theirs.logprobs.detach(), rtol=0, atol=1e-9)


def test_a_model_of_such_layers_alone() -> None:
    model = hybrids.make_exact("qwen4_exp_text", layer_types=["indexed_attention"] * 3, ple_layer_ids=[]).eval()
    truth = expected(model, families.SEQUENCES)
    assert oracle.relative_error(gradients(model, families.SEQUENCES, 3, 6), truth)[0] < 1e-9


@pytest.mark.parametrize("kind", ["glm5_next", "minimax_m3_vl_text", "qwen4_exp_text"])
def test_tokens_in_a_row_are_refused_in_groups_of_ranks(kind: str) -> None:
    group = SimpleNamespace(rank=0, size=2)
    with pytest.raises(ValueError, match=r"layer \d \(.*\) looks at tokens in a row.*group=None"):
        TreeEngine(exact(kind), group=group)  # type: ignore[arg-type]


@pytest.mark.parametrize("copied", ["indexer", "wk"])
def test_copies_of_indexers_that_an_adapter_would_train_are_refused(copied: str) -> None:
    config = LoraConfig(target_modules=["q_b_proj"], modules_to_save=[copied])
    adapted = get_peft_model(copy.deepcopy(exact("deepseek_v32")), config)
    with pytest.raises(ValueError, match="modules_to_save names an indexer or a part of one"):
        TreeEngine(adapted)


def test_choices_that_nobody_here_made_are_refused() -> None:
    choosing = exact("deepseek_v32")
    plain, tree = models.make("llama"), PrefixTree.build(families.SEQUENCES)
    picks = torch.zeros(1, 3, 2, dtype=torch.int32)
    for model, argument, words in (
        (choosing, {"sliding_window": 4}, r"chooses tokens \(indices\) beside a window"),
        (plain, {"indices": picks}, r"by no indexer known here"),
    ):
        layer = model.model.layers[0].self_attn
        hook = layer.register_forward_pre_hook(lambda m, a, k, more=argument: (a, {**k, **more}), with_kwargs=True)
        with pytest.raises(ValueError, match=f"layer 0 .*{words}"):
            TreeEngine(model, self_check=False).forward(tree)
        hook.remove()
