"""Recorded experts are replayed: against the untouched model whose routers are forced by an oracle of their own."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedModel

from app.tree import PrefixTree, TreeEngine, routed
from app.tree.experts import replay
from app.tree.experts.replay import Replay
from app.tree.experts.routers import Routers
from app.tree.planning.dense import dense_plan
from tests.app.tree import models, oracle
from tests.app.tree.cases import Case, cases
from tests.app.tree.engine.families import EXPERTS, LATENT, SEQUENCES, SUPPORTED, distance, with_lora
from tests.app.tree.engine.layers.forced import FAMILIES, forced, model_of, own_choice, random_table
from tests.app.tree.engine.layers.test_checkpointing import CheckpointingEngine
from tests.app.tree.engine.pictures import families as pictured
from tests.app.tree.engine.pictures import vision
from tests.app.tree.losses import KINDS, SequenceLoss
from tests.app.tree.parity import assert_unchanged, snapshot, take_grads
from tests.app.tree.states import hybrids
from tests.helpers.selection import some

F64 = torch.float64
QUICK = ("Qwen3-MoE", "DeepSeek-V3", "GPT-OSS", "Nemotron-H")
ROWS = some(FAMILIES, QUICK)


def records(sequences: list[Any], seed: int) -> np.ndarray:
    """[sum of L_i]: rows of a table; some tokens have none, and sequences that share a token have others."""
    random, total = np.random.default_rng(seed), sum(map(len, sequences))
    rows = random.permutation(total)
    rows[random.random(total) < 0.3] = -1
    return rows


def decided(sequences: list[Any], rows: np.ndarray) -> list[np.ndarray]:
    """By prefixes in a dictionary: the first sequence with a record for a token decides for all that share it."""
    first: dict[tuple[int, ...], int] = {}
    bounds = np.cumsum([0, *map(len, sequences)])
    names = [[tuple(map(int, tokens[: t + 1])) for t in range(len(tokens))] for tokens in sequences]
    for i, of_sequence in enumerate(names):
        for t, name in enumerate(of_sequence):
            if rows[bounds[i] + t] >= 0:
                first.setdefault(name, int(rows[bounds[i] + t]))
    return [np.array([first.get(name, -1) for name in of_sequence]) for of_sequence in names]


def dense(
    model: PreTrainedModel, row: str, sequences: list[Any], rows: list[np.ndarray], table: np.ndarray, loss: Any
) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """Log-probabilities of the forced model, and gradients, by plain autograd."""
    named, logprobs = oracle.parameters(model), []
    grads = {name: torch.zeros_like(p) for name, p in named.items()}
    for i, tokens in enumerate(sequences):
        experts = torch.from_numpy(table[np.maximum(rows[i], 0)])
        with forced(model, row, experts, torch.from_numpy(rows[i] >= 0)):
            out = oracle.dense_sequence(model, tokens)
        logprobs.append(out.logprobs.detach())
        found = loss(out, i)
        if found.requires_grad:
            for name, grad in zip(named, torch.autograd.grad(found, list(named.values()), allow_unused=True)):
                grads[name] += 0 if grad is None else grad
    return logprobs, grads


@cache
def exact(row: str) -> PreTrainedModel:
    return hybrids.exact(model_of(row, F64)).eval()


@pytest.mark.parametrize("row", ROWS)
@settings(settings.default, max_examples=max(3, settings.default.max_examples // 10))
@given(case=cases(shares=("tree",)), kind=st.sampled_from(sorted(KINDS)))
def test_random_trees_are_exact(row: str, case: Case, kind: str) -> None:
    case = replace(case, scored=None, keys=None)
    model = exact(row)
    table = random_table(model, sum(case.lengths), case.seed)
    rows = records(case.sequences, case.seed)
    loss = SequenceLoss(kind, case.lengths, case.seed, ("logprobs",))
    logprobs, expected = dense(model, row, case.sequences, decided(case.sequences, rows), table, loss)
    tree = routed(PrefixTree.build(case.sequences), rows, table)
    for checkpointing, is_dense in ((True, False), (False, True)):
        engine = TreeEngine(model, case.chunk_tokens, case.live_tokens, checkpointing=checkpointing)
        engine.dense = is_dense
        before = snapshot(model)
        out = engine.forward(tree)
        assert max(float((a - b).abs().max()) for a, b in zip(out.logprobs, logprobs)) < 1e-9
        engine.backward(tree, loss)
        assert_unchanged(model, before)
        assert not any("forward" in vars(m) for m in model.modules())
        error, where = oracle.relative_error(take_grads(model), expected)
        assert error < 1e-9, where


TABLE = np.zeros((9, 2, 2), np.uint8)
LENGTHS = [len(s) for s in SEQUENCES]
LOSS = SequenceLoss("plain_sum", LENGTHS, 0, ("logprobs",))


def check(model: Any, plain: PreTrainedModel, row: str = "Qwen3-MoE", tolerance: float = 2e-6, **engine: Any) -> Replay:
    """Both passes of an engine over `model` are what `plain` gives densely, forced, in float32."""
    table, rows = random_table(plain, sum(LENGTHS)), records(SEQUENCES, 0)
    _, expected = dense(plain, row, SEQUENCES, decided(SEQUENCES, rows), table, LOSS)
    take_grads(model)
    ours = TreeEngine(model, 4, 8, **engine)
    ours.backward(routed(PrefixTree.build(SEQUENCES), rows, table.astype(np.uint8)), LOSS)
    error, where = oracle.relative_error(take_grads(model), expected)
    assert error < tolerance, where
    assert ours.replay is not None
    return ours.replay


def test_layers_that_run_again_replay_the_same_experts() -> None:
    """By the planner, by the user's own checkpointing, and by both."""
    for checkpoints in (False, True):
        model = model_of("Qwen3-MoE").train()
        plain = copy.deepcopy(model)
        if checkpoints:
            models.checkpoint(model, use_reentrant=False)
        check(model, plain)
        tree = PrefixTree.build(SEQUENCES)
        table, rows = random_table(plain, sum(LENGTHS)), records(SEQUENCES, 0)
        _, expected = dense(plain, "Qwen3-MoE", SEQUENCES, decided(SEQUENCES, rows), table, LOSS)
        engine = CheckpointingEngine(model, 9, 4)
        assert any(chunk.checkpoint for chunk in engine.plan(tree).chunks)
        engine.backward(routed(tree, rows, table), LOSS)
        assert oracle.relative_error(take_grads(model), expected)[0] < 2e-6


def test_with_lora() -> None:
    model = model_of("Qwen3-MoE")
    adapted = with_lora(SUPPORTED["Qwen3-MoE"], model)
    plain = copy.deepcopy(adapted)
    check(adapted, plain)


def test_with_pictures() -> None:
    """Whose tokens have experts as others have; two pictures under equal placeholders are two prefixes."""
    model = vision.make("Qwen3-VL-MoE")
    sequences = model.sequences(pictured.TEXTS)
    loss, lengths = pictured.loss_of(sequences), sequences.lengths
    table = random_table(model.model, sum(lengths))
    tree = routed(pictured.build(sequences), np.arange(sum(lengths)), table)
    assert tree.routes is not None
    named, expected = oracle.parameters(model.model), dict[str, torch.Tensor]()
    engine, wanted = TreeEngine(model.model, *pictured.PLAN, image_processor=model.processor), []
    for i, (tokens, scored) in enumerate(zip(sequences.tokens, sequences.scored(), strict=True)):
        rows = tree.routes.rows[tree.sequence_tokens([i])]
        with forced(model.model, "Mixtral", torch.from_numpy(table[rows]), torch.ones(len(rows), dtype=torch.bool)):
            out = oracle.dense_sequence(model.model, tokens, scored, inputs=sequences.arguments(i))
        wanted.append(out.logprobs.detach())
        for name, grad in zip(named, torch.autograd.grad(loss(out, i), list(named.values()), allow_unused=True)):
            expected[name] = expected.get(name, torch.zeros(())) + (0 if grad is None else grad)
    for got, want in zip(engine.forward(tree).logprobs, wanted, strict=True):
        assert (got - want).abs().max() < 2e-5
    engine.backward(tree, loss)
    error, where = oracle.relative_error(take_grads(model.model), expected)
    assert error < vision.FAMILIES["Qwen3-VL-MoE"].tolerances[1], where


def test_under_autocast() -> None:
    """No further from the truth than the forced dense model is."""
    model = model_of("Qwen3-MoE")
    table, rows = random_table(model, sum(LENGTHS)), records(SEQUENCES, 0)
    per_sequence = decided(SEQUENCES, rows)
    rows = np.concatenate([np.maximum(one, 0) for one in per_sequence])  # all known: nothing is left to rounding
    per_sequence = decided(SEQUENCES, rows)
    _, truth = dense(model, "Qwen3-MoE", SEQUENCES, per_sequence, table, LOSS)
    with torch.autocast("cpu", torch.bfloat16):
        _, rounded = dense(model, "Qwen3-MoE", SEQUENCES, per_sequence, table, LOSS)
        TreeEngine(model, 4, 8).backward(routed(PrefixTree.build(SEQUENCES), rows, table), LOSS)
    assert distance(take_grads(model), truth) < 1.5 * distance(rounded, truth)


@pytest.mark.parametrize("row", ["Qwen3-MoE", "DeepSeek-V3", "GPT-OSS", "Llama 4"])
def test_its_own_choice_changes_no_bit(row: str) -> None:
    model = model_of(row)
    for sequences in (SEQUENCES[:1], SEQUENCES[4:5]):  # densely and over a tree alike: one chunk of one sequence
        tree, loss = PrefixTree.build(sequences), SequenceLoss("plain_sum", list(map(len, sequences)), 0, ("logprobs",))
        replayed = routed(tree, np.arange(tree.num_tokens), own_choice(model, sequences))
        for is_dense in (False, True):
            engine = TreeEngine(model, 64, 64)
            engine.dense = is_dense
            found = []
            for one in (tree, replayed):
                engine.backward(one, loss)
                found.append((engine.forward(one).logprobs, take_grads(model)))
            assert all(map(torch.equal, found[0][0], found[1][0]))
            for name, grad in found[0][1].items():
                assert (grad is None) == (found[1][1][name] is None) and (
                    grad is None or torch.equal(grad, found[1][1][name])
                ), name
            assert engine.replay is not None
            assert engine.replay.take_counts()[1] == 0


def test_what_the_router_would_have_chosen_is_counted_once_a_token() -> None:
    """In a plan that runs tokens twice, and whose layers run again."""
    model, tree = model_of("Qwen3-MoE"), PrefixTree.build(SEQUENCES)
    tokens = [tree.sequence_tokens([i]) for i in range(len(SEQUENCES))]
    own = own_choice(model, SEQUENCES)
    changed = own.copy()
    for expert in range(8):  # the second expert of each token in the first layer is another one
        spare = (changed[:, 0] != expert).all(1) & (changed[:, 0, 1] == own[:, 0, 1])
        changed[spare, 0, 1] = expert
    assert (changed[:, 0, 1] != own[:, 0, 1]).all()
    layers = own.shape[1]
    for chunk, live in ((64, 64), (2, 4), (9, 4)):
        engine = CheckpointingEngine(model, chunk, live)
        engine.replay = Replay(model)
        assert engine.verify(routed(tree, np.arange(sum(LENGTHS)), changed)) is not None  # which counts nothing
        engine.backward(routed(tree, np.arange(sum(LENGTHS)), own), LOSS)
        known, other = engine.replay.take_counts().tolist()
        assert (known, other) == (2 * layers * tree.num_needed_tokens, 0)
        engine.backward(routed(tree, np.arange(sum(LENGTHS)), changed), LOSS)
        known, other = engine.replay.take_counts().tolist()
        assert known == 2 * layers * tree.num_needed_tokens
        assert other >= tree.num_needed_tokens  # in the first layer exactly so many; later ones see other hidden states
    take_grads(model)
    assert max(map(len, tokens)) > 4


def test_a_tree_that_is_selected_from_keeps_what_was_decided() -> None:
    tree = routed(
        PrefixTree.build([[1, 2, 3], [1, 2, 4], [1, 2, 4, 5]]), np.array([-1, 7, 1, 0, 8, -1, 2, 3, 4, -1]), TABLE
    )
    assert tree.routes is not None
    some = tree.select([2, 1])
    assert some.routes is not None
    assert some.routes.rows[some.sequence_tokens([0])].tolist() == [0, 7, 4, -1]
    assert some.routes.rows[some.sequence_tokens([1])].tolist() == [0, 7, 4]
    alone = dense_plan(tree).tree
    assert alone.routes is not None
    assert alone.routes.rows[alone.sequence_tokens([1])].tolist() == [0, 7, 4]


def test_the_self_check_replays_on_both_sides() -> None:
    for row in ("Qwen3-MoE", "DeepSeek-V3", "Qwen3.5-MoE"):
        model = model_of(row)
        table = random_table(model, sum(LENGTHS)).astype(np.uint8)
        tree = routed(PrefixTree.build(SEQUENCES), np.arange(sum(LENGTHS)), table)
        report = TreeEngine(model, 4, 8).verify(tree)
        assert report is not None and report.passed, report


def test_the_self_check_sees_a_replay_that_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("Qwen3-MoE")
    tree = routed(PrefixTree.build(SEQUENCES), np.arange(sum(LENGTHS)), random_table(model, sum(LENGTHS)))
    right = replay.ReplayPass.at
    monkeypatch.setattr(replay.ReplayPass, "at", lambda self, tokens: right(self, np.sort(tokens)[::-1].copy()))
    report = TreeEngine(model, 4, 8).verify(tree)
    assert report is not None and not report.passed


def test_groups_of_losses_and_two_passes_replay() -> None:
    model = model_of("Qwen3-MoE")
    table, rows = random_table(model, sum(LENGTHS)), np.arange(sum(LENGTHS))
    tree, groups = routed(PrefixTree.build(SEQUENCES), rows, table), [0, 1, 0, 1, 0, 1]
    engine = TreeEngine(model, 4, 8)
    expected = [float(x.sum()) for x in engine.forward(tree).logprobs]

    def loss(out: Any, indices: torch.Tensor) -> torch.Tensor:
        bounds = out.cu_seqlens.tolist()
        sums = torch.stack([out.logprobs[a:b].sum() for a, b in pairwise(bounds)])
        assert sums.tolist() == pytest.approx([expected[i] for i in indices.tolist()], abs=1e-4)
        return sums.sum()

    engine.backward_grouped(tree, loss, groups)
    grouped = take_grads(model)
    engine.backward_from(tree, {"logprobs": torch.ones(sum(LENGTHS))})
    error, where = oracle.relative_error(take_grads(model), {n: g for n, g in grouped.items() if g is not None})
    assert error < 2e-6, where


OTHERS: dict[str, dict[str, Any]] = {
    "qwen2_moe": {},
    "olmoe": {},
    "glm4_moe": {},
    "dots1": {},
    "ernie4_5_moe": {},
    "minimax_m2": {},
    "granitemoe": {},
    "hunyuan_v1_moe": dict(head_dim=8),
    "gemma4_text": dict(
        enable_moe_block=True,
        top_k_experts=2,
        head_dim=8,
        global_head_dim=8,
        hidden_size_per_layer_input=0,
        vocab_size_per_layer_input=31,
        layer_types=["full_attention"] * 2,
    ),
}
"""Families beyond the support matrix."""


@pytest.mark.parametrize("name", OTHERS)
def test_routers_of_other_families_are_found_and_told(name: str) -> None:
    model, tokens = models.make(name, **{**EXPERTS, **OTHERS[name]}).eval(), torch.arange(1, 13)[None]
    found = Routers.of(model)
    random, answered = np.random.default_rng(0), list[torch.Tensor]()
    table = [torch.from_numpy(random.random((12, 4)).argsort(1)[:, :2].copy()) for _ in found.all]
    handles = [
        one.module.register_forward_hook(lambda module, args, out: answered.append(out[-1])) for one in found.all
    ]
    chosen: list[torch.Tensor] = []
    with torch.no_grad():
        plain = model(input_ids=tokens, use_cache=False).logits
        with found.seen_by(chosen):
            seen = model(input_ids=tokens, use_cache=False).logits
        with found.chosen_by(lambda place, own: chosen[place].clone()):
            again = model(input_ids=tokens, use_cache=False).logits
        answered.clear()
        with found.chosen_by(lambda place, own: table[place]):
            other = model(input_ids=tokens, use_cache=False).logits
    for handle in handles:
        handle.remove()
    assert torch.equal(seen, plain) and torch.equal(again, plain)
    assert all(map(torch.equal, answered, table)) and len(answered) == len(table)
    assert bool(other.isfinite().all()) and not torch.equal(other, plain)


def test_refusals() -> None:
    tree = PrefixTree.build(SEQUENCES)
    rows, few = np.arange(sum(LENGTHS)), np.zeros((sum(LENGTHS), 2, 2), np.uint8)
    with pytest.raises(ValueError, match=r"Qwen3ForCausalLM has no router.*leave the engine's record_experts, or"):
        TreeEngine(models.make("qwen3")).forward(routed(tree, rows, few))
    with pytest.raises(ValueError, match="PhimoeForCausalLM has no router"):  # which takes maxima of masked scores
        Routers.of(models.make("phimoe", num_local_experts=4, num_experts_per_tok=2))
    limited = dict(EXPERTS, **LATENT, topk_method="group_limited_greedy", head_dim=4)
    with pytest.raises(ValueError, match=r"gate.*group_limited_greedy"):
        Routers.of(models.make("deepseek_v2", **limited))
    model = model_of("Qwen3-MoE")
    with pytest.raises(ValueError, match=r"recorded are 2 experts in each of 3 layers.*chooses 2 in 2"):
        TreeEngine(model).forward(routed(tree, rows, np.zeros((sum(LENGTHS), 3, 2), np.uint8)))
    with pytest.raises(ValueError, match=r"experts 0 to 8.*has 8"):
        TreeEngine(model).forward(routed(tree, rows, few + np.uint8(8) * (np.arange(2) == 0)))
    with pytest.raises(ValueError, match="3 rows for 43 tokens"):
        routed(tree, rows[:3], few)
    model.model.layers[1].mlp.gate.top_k = 1  # otherwise than the router says at first
    with pytest.raises(ValueError, match="different numbers of experts"):
        TreeEngine(model).forward(routed(tree, rows, few))


def test_a_layer_past_its_router_is_refused() -> None:
    model = model_of("Qwen3-MoE")
    block = model.model.layers[1].mlp
    block.forward = lambda hidden: hidden
    tree = routed(PrefixTree.build(SEQUENCES), np.arange(sum(LENGTHS)), random_table(model, sum(LENGTHS)))
    with pytest.raises(ValueError, match=r"layers.1.mlp.gate' did not run"):
        TreeEngine(model).forward(tree)
