"""Chunks whose layers run again in backward: exact on random trees, cheaper in what autograd saves, and switched on
without a trace on the model."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import Linear

from app.tree import PrefixTree, TreeEngine
from app.tree.model.checkpointing import checkpointable, checkpointed, checkpoints_itself
from app.tree.planning.packing import Packing
from app.tree.planning.plan import ExecutionPlan
from app.tree.planning.planner import plan
from tests.app.tree import models, oracle
from tests.app.tree.cases import Case, cases
from tests.app.tree.engine.test_memory import Meter, star
from tests.app.tree.losses import KINDS, SequenceLoss
from tests.app.tree.parity import as_tensor, assert_unchanged, build, snapshot, take_grads

F64 = torch.float64


class CheckpointingEngine(TreeEngine):
    """Chunks as large as given, checkpointed wherever `live_tokens` makes it possible."""

    share = 0.3

    def plan(self, tree: PrefixTree) -> ExecutionPlan:
        budget = max(1, min(self.budget.chunk_tokens, int(self.budget.live_tokens / self.share)))
        return plan(tree, budget, self.budget.live_tokens, share=self.share, packing=Packing(budget))


@pytest.mark.parametrize("name", models.FLOAT64_CLEAN)
@settings(settings.default, max_examples=settings.default.max_examples // 5)
@given(case=cases(), kind=st.sampled_from(sorted(KINDS)), training=st.booleans())
def test_gradients_are_exact(name: str, case: Case, kind: str, training: bool) -> None:
    model, head = models.shared(name, F64)
    want = ("logprobs", "entropy", "values")
    loss = SequenceLoss(kind, case.lengths, case.seed, want)
    _, expected = oracle.dense_backward(model, case.sequences, loss, case.scored, case.temperatures, head)
    take_grads(model, head)
    engine = CheckpointingEngine(model, case.chunk_tokens, case.live_tokens, value_head=head)
    model.train(training)
    before = snapshot(model)
    engine.backward(build(case), loss, want=want, temperatures=as_tensor(case.temperatures))
    assert_unchanged(model, before)
    model.train()
    error, where = oracle.relative_error(take_grads(model, head), expected)
    assert error < 1e-9, where


def test_all_kinds_of_graphs_in_one_plan_are_exact() -> None:
    """Kept, run twice, checkpointed, and run twice and checkpointed: a plan that has each, on a real-sized chunk."""
    random = np.random.default_rng(1)
    stem = random.integers(0, 31, 60)
    arms = [np.concatenate([stem, [i], random.integers(0, 31, 40)]) for i in range(3)]
    sequences = [
        np.concatenate([arm, [i], random.integers(0, 31, n)]) for arm in arms for i, n in enumerate((3, 25, 50))
    ]
    model, tree = models.make("starcoder2", F64, max_position_embeddings=256), PrefixTree.build(sequences)
    seen = set()
    loss = SequenceLoss("tanh_of_sums", [len(s) for s in sequences], 0, ("logprobs",))
    _, expected = oracle.dense_backward(model, sequences, loss)
    for chunk_tokens, live_tokens in ((64, 90), (64, 30), (120, 40), (110, 100), (110, 70)):
        engine = CheckpointingEngine(model, chunk_tokens, live_tokens)
        seen |= {(chunk.keep, chunk.checkpoint) for chunk in engine.plan(tree).chunks if chunk.anchors}
        seen |= {chunk.checkpoint for chunk in engine.plan(tree).chunks if not chunk.anchors}
        engine.backward(tree, loss)
        assert oracle.relative_error(take_grads(model), expected)[0] < 1e-9
    assert seen == {True, False, (True, False), (True, True), (False, False), (False, True)}


def test_checkpointed_chunks_keep_their_share_of_the_activations() -> None:
    """What autograd holds between forward and backward is the layers' inputs: far below the full graph."""
    tree, peaks = PrefixTree.build(star(12)), []
    for engine in (TreeEngine, CheckpointingEngine):
        model = models.make("qwen3", num_hidden_layers=4)
        meter, live = Meter(model), tree.num_tokens if engine is TreeEngine else int(tree.num_tokens * 0.3) + 1
        with meter.measuring():
            engine(model, tree.num_tokens, live).backward(tree, lambda out, i: out.logprobs.sum())
        peaks.append(meter.peak)
    assert peaks[1] < 0.25 * peaks[0]


@pytest.mark.parametrize("name", ["qwen2", "qwen3", "llama", "starcoder2", "phi"])
def test_supported_models_are_recognised(name: str) -> None:
    model = models.make(name)
    assert checkpointable(model) and not checkpoints_itself(model)
    assert checkpointable(model.eval())


def test_models_that_would_change_are_left_alone() -> None:
    """Dropout that evaluation mode switches off, the user's own checkpointing, one layer only."""
    assert not checkpointable(models.make("phi", resid_pdrop=0.1).eval())
    own = models.make("qwen2")
    models.checkpoint(own, use_reentrant=False)
    assert checkpoints_itself(own) and not checkpointable(own)
    assert not checkpointable(models.make("qwen2", num_hidden_layers=1))
    assert TreeEngine(own, 4, 2).plan(PrefixTree.build([[1] * 9])).share == 1.0


def test_flags_come_back_when_a_layer_raises() -> None:
    model = models.make("qwen2").eval()
    layers = list(model.model.layers)
    layers[0].gradient_checkpointing = False  # set on the instance, as transformers does when it switches it off
    before = [dict(layer.__dict__) for layer in layers]
    with pytest.raises(RuntimeError, match="on fire"), checkpointed(model, True):
        assert all(layer.gradient_checkpointing and layer.training for layer in layers)
        assert not layers[0].mlp.training
        raise RuntimeError("on fire")
    assert [dict(layer.__dict__) for layer in layers] == before


def test_the_planner_checkpoints_only_when_allowed() -> None:
    model, tree = models.make("qwen3", num_hidden_layers=8), PrefixTree.build(star(12))
    allowed, refused = TreeEngine(model, 64, 16), TreeEngine(model, 64, 16, checkpointing=False)
    assert any(chunk.checkpoint for chunk in allowed.plan(tree).chunks)
    assert not any(chunk.checkpoint for chunk in refused.plan(tree).chunks)


def test_frozen_embeddings_and_adapters() -> None:
    """No input of the first layer needs a gradient, its weights do."""
    model = models.make("starcoder2", F64)
    for name, p in model.named_parameters():
        p.requires_grad_("q_proj" in name or "mlp" in name)
    sequences = star(4)
    loss = SequenceLoss("mean_times_variance", [len(s) for s in sequences], 0, ("logprobs",))
    _, expected = oracle.dense_backward(model, sequences, loss)
    assert isinstance(model.lm_head, Linear)
    CheckpointingEngine(model, 40, 16).backward(PrefixTree.build(sequences), loss)
    assert oracle.relative_error(take_grads(model), expected)[0] < 1e-9
