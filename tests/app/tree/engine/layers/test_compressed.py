"""Layers that attend to keys made of many tokens (`app.tree.attention.chosen.compressed`): exact, in any chunks."""

from __future__ import annotations

import copy
import gc
import weakref
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model
from transformers import PreTrainedModel

from app.tree import PrefixTree, TreeEngine, index_parameters
from app.tree.attention.chosen import group_indexer, selected
from app.tree.attention.chunk_attention import ChunkAttention
from app.tree.attention.path_cache import PathCache
from tests.app.tree import models, oracle
from tests.app.tree.cases import Case, cases
from tests.app.tree.engine import families
from tests.app.tree.engine.layers.test_indexers import expected, forest, gradients
from tests.app.tree.engine.test_parity import EXAMPLES
from tests.app.tree.losses import KINDS, SequenceLoss
from tests.app.tree.parity import assert_backward, assert_forward, assert_unchanged, snapshot, take_grads
from tests.app.tree.states import hybrids

WINDOW, ALL, CHOSEN = "sliding_attention", "heavily_compressed_attention", "compressed_sparse_attention"


@cache
def exact(kind: str = "", rates: tuple[int, int] = (3, 2), topk: int = 2, window: int = 3) -> PreTrainedModel:
    """In float64 throughout; the table of experts by token is filled, as a checkpoint's is. `kind`: of one layer alone;
    `rates`: tokens an entry where all are attended to, and where some are chosen."""
    chosen = {**hybrids.OPTIONS["deepseek_v4"], "compress_rates": dict(zip((ALL, CHOSEN), rates, strict=True))}
    chosen |= dict(index_topk=topk, sliding_window=window, max_position_embeddings=512)
    if kind:
        chosen |= dict(num_hidden_layers=1, layer_types=[kind], mlp_layer_types=["moe"])
    model = models.make("deepseek_v4", torch.float64, **chosen)
    generator = torch.Generator().manual_seed(0)
    for name, table in model.named_buffers():
        if name.endswith("tid2eid"):
            table.copy_(torch.rand(len(table), 4, generator=generator).argsort(-1)[:, : table.shape[1]])
    return hybrids.exact(model).eval()


@pytest.mark.parametrize("kind", ["", *(pytest.param(kind, marks=pytest.mark.slow) for kind in (ALL, CHOSEN))])
@settings(max_examples=EXAMPLES // 6)
@given(case=cases(), loss=st.sampled_from(sorted(KINDS)), batched=st.booleans(), block=st.sampled_from([1, 300, 10**6]))
def test_parity_in_float64(kind: str, case: Case, loss: str, batched: bool, block: int) -> None:
    model, head = exact(kind), models.value_head(torch.float64)
    with pytest.MonkeyPatch.context() as patch:  # blocks of one query, of several, and of all
        patch.setattr(group_indexer, "_SCORE_BYTES", block)
        patch.setattr(selected, "_MASK_BYTES", block)
        assert_forward(model, head, case, ("logprobs", "entropy", "values"), 1e-9)
        assert_backward(model, head, case, loss, ("logprobs", "values"), 1e-9, batched)


ANY = ((1000, 2000), (100, 200), (40, 60), (5, 9))


@pytest.mark.parametrize(
    ("rates", "budgets"),
    [
        ((7, 16), [(40, 60)]),
        *(pytest.param(rates, ANY, marks=pytest.mark.slow) for rates in ((3, 2), (128, 4), (7, 16))),
    ],
)
def test_long_sequences_in_chunks_of_any_size(rates: tuple[int, int], budgets: list[tuple[int, int]]) -> None:
    """Windows end in other chunks than they begin in, some in one that is further down than the next."""
    model = exact(rates=rates, topk=12, window=20)
    truth = expected(model, forest())
    for one in budgets:
        assert oracle.relative_error(gradients(model, forest(), *one), truth)[0] < 1e-9


@pytest.mark.parametrize("short", [2, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 3, 4, 5, 6))])
def test_lines_of_every_length_around_an_entry(short: int) -> None:
    """The first entry is made of half as many tokens as the others, and rows before it see none."""
    model = exact()
    for long in range(short, 9):
        sequences = [np.arange(long) + 2, np.arange(short) + 12, np.r_[2, np.arange(short) + 20]]
        tree, want = PrefixTree.build(sequences), oracle.dense_forward(model, sequences)
        for budgets in ((100, 100), (3, 100)):
            got = TreeEngine(model, *budgets, self_check=False).forward(tree).logprobs
            for ours, theirs in zip(got, want, strict=True):
                torch.testing.assert_close(ours, theirs.logprobs.detach(), rtol=0, atol=1e-9)


@pytest.mark.parametrize("kind", [ALL, CHOSEN])
def test_what_lies_beyond_the_window_is_attended_to_by_entries_alone(kind: str) -> None:
    """Guards the others: without entries, or with others chosen, outputs differ by this."""
    tree = PrefixTree.build(families.SEQUENCES)
    plain = exact(WINDOW)
    with_entries = exact(kind)
    plain.load_state_dict(with_entries.state_dict(), strict=False)
    out = [TreeEngine(model, 4, 8, self_check=False).forward(tree).flat("logprobs") for model in (plain, with_entries)]
    assert float((out[0] - out[1]).abs().max()) > 0.1


def test_indexers_have_no_gradient_and_the_model_is_left_as_it_was() -> None:
    model = exact()
    before, own = snapshot(model), [set(vars(module)) for module in model.modules()]
    found = gradients(model, families.SEQUENCES, 4, 8)
    choosing = {name for name in found if ".indexer." in name}
    assert {name for name, grad in found.items() if grad is None} == choosing != set()
    by_name = dict(model.named_parameters())
    assert {id(p) for p in index_parameters(model)} == {id(by_name[name]) for name in choosing}
    assert_unchanged(model, before)
    assert [set(vars(module)) for module in model.modules()] == own


def test_the_path_holds_a_row_for_so_many_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """And, of those in the window, the last of each piece that a token behind it can see."""
    held, push, model = {}, PathCache.push, exact()
    window, caches = model.config.sliding_window, list[PathCache]()

    def spy(self: PathCache, *pushed: Any) -> None:
        push(self, *pushed)
        caches.append(self)
        held.update({(place, self.with_grads): [x.shape[2] for x in kept] for place, kept in self._values.items()})

    monkeypatch.setattr(PathCache, "push", spy)
    sequences = [np.arange(20) % 30, np.r_[np.arange(18) % 30, 29, 28]]
    gradients(model, sequences, 6, 6)
    longest, rows_of = caches[0].capacity, caches[0].rows_of
    assert rows_of is not None and rows_of(window - 1) < longest // 2 and rows_of(longest) == longest
    assert held == {
        **{(layer, True): [rows_of(window - 1)] * 2 for layer in range(3)},
        **{(-3, True): [longest // 3] * 2, (-5, True): [longest // 2] * 2, (-6, False): [longest // 2]},
    }


def test_entries_that_autocast_leaves_in_float32_are_kept_as_keys_are() -> None:
    """As on a CUDA device, whose autocast adds up in float32."""
    model, found = hybrids.make("deepseek_v4"), []
    for summed in (False, True):
        for layer in model.model.layers:
            if summed and layer.self_attn.compressor is not None:
                layer.self_attn.compressor.kv_norm.register_forward_hook(lambda module, args, out: out.float())
        with torch.autocast("cpu", torch.bfloat16):
            grads = gradients(model, families.SEQUENCES, 4, 8)
        found.append({name: grad for name, grad in grads.items() if grad is not None})
    assert oracle.relative_error(found[1], found[0])[0] < 0.1


@pytest.mark.parametrize("checkpointed", [False, True])
def test_chunks_are_gone_after_a_pass(monkeypatch: pytest.MonkeyPatch, checkpointed: bool) -> None:
    """Entries have a graph, and nodes of it hold the chunk, which Python cannot see: a ring would stay for good."""
    model, chunks, init = copy.deepcopy(exact()), list[weakref.ref[ChunkAttention]](), ChunkAttention.__init__

    def spy(self: ChunkAttention, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        chunks.append(weakref.ref(self))

    monkeypatch.setattr(ChunkAttention, "__init__", spy)
    if checkpointed:
        model.train().gradient_checkpointing_enable({"use_reentrant": False})
    gradients(model, families.SEQUENCES, 4, 8)
    gc.collect()
    assert len(chunks) > 1 and not any(chunk() for chunk in chunks)


def test_a_pass_inside_of_another() -> None:
    model, sequences = exact(), families.SEQUENCES
    truth, inner = expected(model, sequences), TreeEngine(model, 3, 6, self_check=False)
    loss = SequenceLoss("mean_times_variance", [len(s) for s in sequences], 0, ("logprobs",))

    def asking(out: Any, i: int) -> torch.Tensor:
        inner.forward(PrefixTree.build(sequences[:2]))
        return loss(out, i)

    TreeEngine(model, 4, 8, self_check=False).backward(PrefixTree.build(sequences), asking)
    assert oracle.relative_error(take_grads(model), truth)[0] < 1e-9
    assert not any("forward" in vars(module) for module in model.modules())


def test_calls_past_the_engine_are_refused_by_name() -> None:
    model = exact()

    def past(out: Any, i: int) -> torch.Tensor:
        return model(torch.tensor([[1, 2, 3]])).logits.sum()

    with pytest.raises(ValueError, match=r"layer \d \(.*\): (runs without the tree|does not hand)"):
        TreeEngine(model, self_check=False).backward(PrefixTree.build(families.SEQUENCES), past)


@pytest.mark.parametrize("copied", ["indexer", "compressor", "gate_proj"])
def test_copies_that_an_adapter_would_train_are_refused(copied: str) -> None:
    config = LoraConfig(target_modules=["q_b_proj"], modules_to_save=[copied])
    adapted = get_peft_model(copy.deepcopy(exact()), config)
    with pytest.raises(ValueError, match=r"modules_to_save names .* leave it out"):
        TreeEngine(adapted)
