"""Budgets from bytes: parts that add up, early refusals that name them, and estimates near what autograd keeps."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model

from app.tree import PrefixTree, TreeEngine, memory
from app.tree.memory import DEVICE_CHUNK, auto_budgets, pass_memory, token_bytes
from app.tree.model.shape import shape_of
from app.tree.planning.cost import ModelShape
from app.tree.planning.plan import path_rows
from benchmarks.common.systems import attach_gradients
from tests.app.tree import models
from tests.app.tree.engine.test_memory import Meter, peak_and_estimate
from tests.app.tree.states import hybrids

TREE = PrefixTree.build([np.arange(60) % 31, np.append(np.arange(40) % 31, [3, 3])])


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch):
    """Sets the bytes that are free."""

    def set_(count: int) -> None:
        monkeypatch.setattr(memory, "free_bytes", lambda device: count)

    return set_


@pytest.mark.parametrize("name", ["qwen2", "qwen3", "llama", "starcoder2", "phi", "gpt_neox"])
def test_a_tokens_bytes_are_what_autograd_saves(name: str) -> None:
    """Within a fifth, on a model large enough for its layers to dominate; the last three have MLPs without a gate."""
    model = models.make(name, hidden_size=64, intermediate_size=192, num_hidden_layers=4, head_dim=16)
    tokens = np.random.default_rng(0).integers(0, 31, 60)
    meter = Meter(model)
    with meter.measuring():
        TreeEngine(model, 60, 60).backward(PrefixTree.build([tokens]), lambda o, i: o.logprobs.sum())
    assert token_bytes(model) * 59 == pytest.approx(meter.peak, rel=0.2)


def test_layers_are_told_by_their_modules() -> None:
    """Whatever the configuration does not say, below an adapter and in one tensor too."""
    sizes = {"hidden_size": 64, "intermediate_size": 192, "head_dim": 16}
    gated = {name: shape_of(models.make(name, **sizes)) for name in ("llama", "phi3", "starcoder2", "phi")}
    assert [shape.gated for shape in gated.values()] == [True, True, False, False]
    assert [shape.mlp_keeps for shape in gated.values()] == [4, 4, 2, 5]
    model = models.make("starcoder2", **sizes)
    adapted = get_peft_model(model, LoraConfig(r=2, target_modules="all-linear"))
    assert shape_of(adapted.get_base_model()) == gated["starcoder2"]


def test_parts_grow_with_what_they_hold() -> None:
    model = models.make("qwen3")
    small, large = pass_memory(model, 8, 16, TREE), pass_memory(model, 8, 32, TREE)
    assert large.live_activations == 2 * small.live_activations == 32 * token_bytes(model)
    assert large.total - small.total == small.live_activations
    assert small.gradients == small.parameters > 0
    longer = pass_memory(model, 8, 16, PrefixTree.build([np.arange(64) % 31] * 3))
    assert longer.path_cache > small.path_cache and longer.gradients == small.gradients
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    assert pass_memory(model, 8, 16, TREE).gradients == 0


def test_auto_takes_what_is_left(free) -> None:
    model = models.make("qwen3")
    for extra in (10_000, 100_000):
        fixed = pass_memory(model, DEVICE_CHUNK["cpu"], 0, TREE).total
        free(2 * (fixed + extra * token_bytes(model)))
        assert auto_budgets(model, "auto", "auto", TREE) == (DEVICE_CHUNK["cpu"], extra // 1024 * 1024)
    assert auto_budgets(model, "auto", 7, TREE) == (DEVICE_CHUNK["cpu"], 7)
    assert auto_budgets(model, 5, "auto", TREE)[0] == 5


def test_tight_memory_makes_small_chunks_that_fit(free) -> None:
    model = models.make("qwen3")
    tree = PrefixTree.build([np.append(np.arange(50) % 31, [i % 31, i // 31, 1]) for i in range(300)])
    least = pass_memory(model, 16, 16, tree).total
    free(2 * least + 2 * 40 * token_bytes(model))
    chunk, live = auto_budgets(model, "auto", "auto", tree)
    assert 16 <= live < chunk
    plan = TreeEngine(model, value_head=None).plan(tree)
    assert plan.peak_live_tokens <= live
    assert pass_memory(model, plan.chunk_tokens, plan.peak_live_tokens, tree).total <= least + 40 * token_bytes(model)


def test_states_along_a_long_path_are_those_of_the_chunks_that_fit(free) -> None:
    """Chunks of 16 tokens would keep a state every 16: a hybrid is not refused for what larger chunks do not need."""
    model = hybrids.make("qwen3_5_text", linear_key_head_dim=64, linear_value_head_dim=64)
    tree = PrefixTree.build([np.arange(6000) % 31, np.append(np.arange(5000) % 31, [3, 3])])
    room = pass_memory(model, 2048, 700, tree).total + pass_memory(model, 700, 700, tree).states
    assert pass_memory(model, 16, 16, tree).total > 1.1 * room
    free(2 * room)
    chunk, live = auto_budgets(model, "auto", "auto", tree)
    assert 0.97 * 700 - 1 <= live < chunk
    plan = TreeEngine(model).plan(tree)
    assert pass_memory(model, 2048, plan.peak_live_tokens, tree, chunks=plan.chunks).total <= room
    for extra in (3_000, 9_000):  # above a chunk's size, to the last thousand
        free(2 * pass_memory(model, 2048, extra, tree).total)
        assert auto_budgets(model, "auto", "auto", tree)[1] == extra // 1024 * 1024
    free(pass_memory(model, 2048, 16, tree).total)
    with pytest.raises(ValueError, match=r"with only \d{2,} live tokens") as refused:
        auto_budgets(model, "auto", "auto", tree)
    assert "only 16 live" not in str(refused.value)


def test_a_pass_that_cannot_fit_says_why_before_it_runs(free) -> None:
    model = models.make("qwen3")
    free(100_000)
    with pytest.raises(ValueError, match=r"does not fit, because 0\.1 MiB of memory are free") as refused:
        TreeEngine(model).backward(TREE, lambda out, i: pytest.fail("nothing may run"))
    for part in ("parameters", "gradients", "path cache", "head block", "live activations", "live_tokens", "shorter"):
        assert part in str(refused.value)
    assert all(p.grad is None for p in model.parameters())


def test_user_checkpointing_counts_for_the_budget() -> None:
    model = models.make("qwen3", num_hidden_layers=8)
    whole = token_bytes(model)
    models.checkpoint(model, use_reentrant=False)
    assert token_bytes(model) == int(whole * ModelShape.of(model.config).checkpoint_share()) < whole / 3


def test_ranks_on_a_cpu_share_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_control_group_room", lambda: 2**30)
    one = memory.free_bytes(torch.device("cpu"))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert one <= 2**30 and memory.free_bytes(torch.device("cpu")) == pytest.approx(one / 4, rel=0.5)


SLIDING, FULL = "sliding_attention", "full_attention"


@pytest.mark.parametrize(("chunk_tokens", "live_tokens"), [(256, 256), (256, 1500), (4000, 4000)])
def test_a_windowed_layers_path_is_what_is_in_sight(chunk_tokens: int, live_tokens: int) -> None:
    """The peak is what was estimated, within 12%, with a path far longer than the windows of five layers of six, in
    plans that run chunks twice, keep them, or have one alone; and less by what these layers do not keep."""
    sizes = dict(hidden_size=32, intermediate_size=32, head_dim=32, num_attention_heads=4, num_key_value_heads=4)
    kinds, reach = [SLIDING] * 5 + [FULL], dict(sliding_window=32, max_position_embeddings=2048)
    model = models.make("gemma3_text", **sizes, **reach, num_hidden_layers=6, layer_types=kinds)
    attach_gradients(model)
    random = np.random.default_rng(0)
    stem = random.integers(0, 31, 1500)
    sequences = [np.concatenate([stem[:cut], random.integers(0, 31, 60)]) for cut in (1500, 1500, 1200, 700)]
    peak, estimate, execution = peak_and_estimate(model, sequences, chunk_tokens, live_tokens)
    assert peak == pytest.approx(estimate.total, rel=0.12), estimate
    pieces = path_rows(execution.chunks, 31)
    assert execution.longest_path == path_rows(execution.chunks, 1500) and pieces <= execution.longest_path // 3
    model.config.layer_types = [FULL] * 6
    budgets = execution.chunk_tokens, execution.peak_live_tokens
    more = pass_memory(model, *budgets, execution.tree, 64, execution.chunks).path_cache - estimate.path_cache
    assert more == 5 * 2 * 4 * 32 * (4 + 4) * (execution.longest_path - pieces)
