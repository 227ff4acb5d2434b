"""What plans and memory count of layers that carry a state, against what a forward really holds."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from torch import nn

from app.tree import PrefixTree, TreeEngine
from app.tree.attention.part_attention import PartBackend
from app.tree.executor import Executor
from app.tree.memory import pass_memory
from app.tree.model.shape import shape_of
from app.tree.planning.cost import ModelShape
from app.tree.planning.packing import Packing
from app.tree.planning.plan import most_ends
from app.tree.planning.planner import plan
from app.tree.planning.timing import CPU_RATES, TimeModel
from app.tree.planning.work import count_work
from benchmarks.common.systems import attach_gradients
from tests.app.tree import models
from tests.app.tree.engine.test_memory import peak_and_estimate
from tests.app.tree.states import hybrids
from tests.helpers.selection import some

TREE = PrefixTree.build([[1, 2, 3, 4, 5], [1, 2, 6], [1, 2, 3, 4, 7, 8, 9]])


@pytest.mark.parametrize("name", hybrids.OPTIONS)
def test_layers_and_states_are_counted_by_what_they_are(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many values as the states that a chunk hands on hold, and as many layers with keys as attend."""
    model = hybrids.make(name)
    engine, held = TreeEngine(model, 2, 1000), []
    provide = Executor._provide

    def spy(self: Executor, index: int, run, only) -> None:
        provide(self, index, run, only)
        held.extend(sum(end[0].numel() for end in run.states.ends.values()) for _ in self.open[index].ends and [0])

    monkeypatch.setattr(Executor, "_provide", spy)
    engine.forward(TREE)
    shape = ModelShape.of(model.config)
    assert set(held) == {shape.state_values}
    assert len(shape.attention) == len(engine.state_layers.attending)


def test_models_without_states_are_counted_as_before() -> None:
    model = models.make("qwen3")
    shape = ModelShape.of(model.config)
    assert len(shape.attention) == shape.layers and shape.state_values == 0
    assert pass_memory(model, 4, 8, TREE).states == 0


def test_states_of_a_path_are_memory() -> None:
    """One a chunk on the longest path, and its gradient, in float32."""
    model = hybrids.make("qwen3_5_text")
    assert pass_memory(model, 4, 8, TREE).states == 2 * 4 * ModelShape.of(model.config).state_values * 2


def test_what_keys_are_made_of_is_on_every_rank_of_a_group() -> None:
    for name, share in (("qwen3_5_text", 2), ("deepseek_v4", 1)):
        alone, together = (pass_memory(hybrids.make(name), 4, 8, TREE, ranks=ranks).states for ranks in (1, 2))
        assert alone == share * together > 0


def test_ends_that_are_kept_at_once_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all chunks that are open, in plans of one token a chunk and of a few."""
    model, kept = hybrids.make("qwen3_5_text"), []
    provide = Executor._provide

    def spy(self: Executor, index: int, run, only) -> None:
        provide(self, index, run, only)
        kept.append(sum(len(next(iter(chunk.ends.values()))) for chunk in self.open.values() if chunk.ends))

    monkeypatch.setattr(Executor, "_provide", spy)
    sequences = [[1, 2, 3, 4, 5, 6], [1, 2, 3, 7], [1, 2, 3, 4, 8], [1, 9], [1, 9, 2], [1, 9, 3, 4], [5, 6]]
    for chunk_tokens in (1, 3):
        engine, tree = TreeEngine(model, chunk_tokens, 1000, self_check=False), PrefixTree.build(sequences)
        kept.clear()
        engine.backward(tree, lambda out, i: out.logprobs.sum())
        assert max(kept) == most_ends(engine.plan(tree).chunks) > 1


LINEAR = ["linear_attention"] * 3
WINDOW, ALL, CHOSEN = "sliding_attention", "heavily_compressed_attention", "compressed_sparse_attention"
DELTA = dict(linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=32, linear_value_head_dim=32)
MAMBA = dict(mamba_n_heads=4, mamba_d_head=32, mamba_d_state=16, mamba_n_groups=1)
WIDE: dict[str, dict[str, Any]] = {
    "qwen3_5_text": dict(DELTA, layer_types=[*LINEAR, "full_attention"]),
    "bamba": dict(MAMBA, attn_layer_indices=[3]),
    "lfm2": dict(full_attn_idxs=[3], block_auto_adjust_ff_dim=False),
    "qwen4_exp_text": dict(
        {**hybrids.OPTIONS["qwen4_exp_text"], **DELTA},
        layer_types=[*LINEAR, "indexed_attention"],
        ple_layer_ids=[1],
        moe_intermediate_size=32,
        shared_expert_intermediate_size=32,
        hc_count=4,
        hc_lowrank=16,
        indexer_head_dim=16,
        indexer_budget=64,
    ),
    "zaya": dict(hybrids.OPTIONS["zaya"], layer_types=["hybrid"] * 4, moe_intermediate_size=96, router_hidden_size=16),
    "deepseek_v4": dict(
        {**hybrids.OPTIONS["deepseek_v4"], "layer_types": [WINDOW, ALL, CHOSEN, CHOSEN]},
        mlp_layer_types=["hash_moe", "moe", "moe", "moe"],
        compress_rates={ALL: 16, CHOSEN: 4},
        sliding_window=32,
        moe_intermediate_size=32,
        q_lora_rank=32,
        o_lora_rank=16,
        index_n_heads=4,
        hc_mult=4,
        hc_sinkhorn_iters=20,
    ),
}
"""Wide enough for layers to dominate; three layers that carry a state, then attention."""


def wide(name: str) -> Any:
    sizes = dict(hidden_size=64, intermediate_size=192, head_dim=16, num_hidden_layers=4, max_position_embeddings=256)
    return models.make(name, **{**WIDE[name], **sizes})


@pytest.mark.parametrize("name", WIDE)
def test_linear_flops_are_those_of_each_layers_own_weights(name: str) -> None:
    """Two a weight; gates of a few values a head are left out, and what an indexer scores by."""
    model = wide(name)
    weights = sum(m.weight.numel() for m in model.model.layers.modules() if isinstance(m, nn.Linear))
    if name in ("qwen4_exp_text", "deepseek_v4", "zaya"):
        experts = [m for m in model.modules() if type(m).__name__.endswith("Experts")]
        chosen = model.config.num_experts_per_tok  # of four, for each token
        weights += sum(p.numel() for m in experts for p in m.parameters()) * chosen // 4
    if name == "zaya":
        weights += sum(m.weight.numel() for m in model.modules() if isinstance(m, nn.Conv1d))
    assert shape_of(model).linear_flops() == pytest.approx(2 * weights, rel=0.08)


BUDGETS = [(4000, 4000), (512, 4000), (512, 512), (256, 300)]
PEAKS = some(
    [(name, *budgets) for name in WIDE for budgets in BUDGETS],
    [(name, 512, 512) for name in ("qwen3_5_text", "bamba", "deepseek_v4")] + [("qwen3_5_text", 256, 300)],
)


@pytest.mark.parametrize(("name", "chunk_tokens", "live_tokens"), PEAKS)
def test_peak_memory_is_what_was_estimated(name: str, chunk_tokens: int, live_tokens: int) -> None:
    """Within 15% at a hundred branches of 16 tokens, kept whole, in chunks, and run twice."""
    model = wide(name)
    attach_gradients(model)
    random = np.random.default_rng(0)
    stem = random.integers(0, 31, 64)
    branches = [np.concatenate([stem, [i % 31, i // 31], random.integers(0, 31, 14)]) for i in range(100)]
    peak, estimate, _ = peak_and_estimate(model, branches, chunk_tokens, live_tokens)
    assert peak == pytest.approx(estimate.total, rel=0.15), estimate


def test_blocks_and_levels_are_work() -> None:
    """A stem of 4 and two branches of 3 (whose last tokens never run), chunks of 4 and no room to keep one: the stem is
    one block and runs twice, the branches are two blocks of one level."""
    tree = PrefixTree.build([[1, 2, 3, 4, i, 6, 7] for i in (5, 8)])
    chunks = plan(tree, 4, 4, packing=Packing(4, join=False)).chunks
    found = count_work(tree, chunks, PartBackend(), scans=True)
    assert (found.scanned, found.levels, found.scanned_again, found.levels_again) == (4 + 2 * 4, 2, 4, 1)
    without = count_work(tree, chunks, PartBackend())
    assert (without.scanned, without.levels) == (0, 0) and without.tokens == found.tokens


def test_a_scan_along_one_path_takes_longer_than_beside_each_other() -> None:
    """As many tokens in one row and in many short ones: what a scan adds grows with its levels."""
    row = PrefixTree.build([list(np.arange(1024) % 31)])
    comb = PrefixTree.build([[i, *(np.arange(63) + i) % 31] for i in range(16)])
    hybrid, scans = TimeModel(ModelShape.of(wide("qwen3_5_text").config), CPU_RATES, PartBackend()), []
    for tree in (row, comb):
        chunks = plan(tree, 2000, 2000, packing=Packing(2000)).chunks
        without, counted = (hybrid.seconds(count_work(tree, chunks, PartBackend(), s)) for s in (False, True))
        assert hybrid.predict(tree, chunks) == counted
        scans.append(counted - without)
    assert scans[0] > scans[1] > 0
