"""What the engine promises beyond numbers on random trees: accumulation, modes, frozen parameters, precision, and a
model left as it was found."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch import nn

from app.tree import PrefixTree, TreeEngine
from tests.app.tree import models, oracle
from tests.app.tree.losses import SequenceLoss
from tests.app.tree.parity import assert_unchanged, snapshot, take_grads

F64 = torch.float64
STEM = [3, 10, 17, 24, 3, 0, 9, 9]
SEQUENCES = [np.array(s) for s in (STEM, [*STEM[:5], 1, 2, 3], [*STEM[:5], 1, 4], STEM[:3], STEM, [7], [30, 3, 10])]
LENGTHS = [len(s) for s in SEQUENCES]
WANT = ("logprobs", "entropy", "values")


def setup(dtype: torch.dtype = F64, name: str = "starcoder2", **engine):
    """A model, its value head, an engine with small budgets, and a nonlinear loss over `SEQUENCES`."""
    model, head = models.make(name, dtype), models.value_head(dtype)
    options = {"chunk_tokens": 4, "live_tokens": 9, "value_head": head, **engine}
    return model, head, TreeEngine(model, **options), SequenceLoss("tanh_of_sums", LENGTHS, 3, WANT)


def test_the_model_is_left_as_found() -> None:
    model, _, engine, loss = setup()
    model.config._attn_implementation = "eager"
    tree = PrefixTree.build(SEQUENCES)
    for training in (True, False):
        model.train(training)
        model.model.layers[0].eval()  # mixed flags survive too
        model.model.norm.weight.requires_grad_(False)
        before = snapshot(model)
        engine.forward(tree, want=WANT)
        assert all(p.grad is None for p in model.parameters())
        engine.backward(tree, loss, want=WANT)
        assert_unchanged(model, before)
        take_grads(model)


def test_the_model_is_left_as_found_when_the_loss_raises() -> None:
    model, _, engine, loss = setup()
    before = snapshot(model)

    def broken(out, i):
        if i == 4:
            raise RuntimeError("reward model is on fire")
        return loss(out, i)

    with pytest.raises(RuntimeError, match="on fire"):
        engine.backward(PrefixTree.build(SEQUENCES), broken, want=WANT)
    assert_unchanged(model, before)
    take_grads(model, engine.value_head)
    engine.backward(PrefixTree.build(SEQUENCES), loss, want=WANT)  # and the engine still works
    got = take_grads(model, engine.value_head)
    _, expected = oracle.dense_backward(model, SEQUENCES, loss, head=engine.value_head)
    assert oracle.relative_error(got, expected)[0] < 1e-9


def test_repeated_backward_accumulates() -> None:
    model, head, engine, loss = setup()
    tree = PrefixTree.build(SEQUENCES)
    _, expected = oracle.dense_backward(model, SEQUENCES, loss, head=head)
    for _ in range(3):
        engine.backward(tree, loss, want=WANT)
    got = take_grads(model, head)
    assert oracle.relative_error(got, {name: 3 * grad for name, grad in expected.items()})[0] < 1e-9


def test_backward_adds_to_existing_gradients_in_place() -> None:
    """A sharded optimizer's gradients are views into flat buffers: they have to stay the same tensors."""
    model, head, engine, loss = setup()
    _, expected = oracle.dense_backward(model, SEQUENCES, loss, head=head)
    named = oracle.parameters(model, head)
    for p in named.values():
        p.grad = torch.ones_like(p)
    places = {name: p.grad.data_ptr() for name, p in named.items()}
    engine.backward(PrefixTree.build(SEQUENCES), loss, want=WANT)
    assert {name: p.grad.data_ptr() for name, p in named.items()} == places
    assert oracle.relative_error(take_grads(model, head), {n: g + 1 for n, g in expected.items()})[0] < 1e-9


@pytest.mark.parametrize("share", ["tree", "leaf", "none"])
@pytest.mark.parametrize("batched", [False, True])
def test_auto_budgets_and_modes_agree(share: str, batched: bool) -> None:
    model, head, engine, loss = setup(chunk_tokens="auto", live_tokens="auto")
    total, expected = oracle.dense_backward(model, SEQUENCES, loss, head=head)
    tree = PrefixTree.build(SEQUENCES, share=share)
    got_total = engine.backward(tree, loss.batched if batched else loss, want=WANT, batched=batched)
    assert got_total == pytest.approx(total, rel=1e-9)
    assert oracle.relative_error(take_grads(model, head), expected)[0] < 1e-9


def test_batched_loss_gets_flat_outputs_and_int64_indices() -> None:
    _, _, engine, loss = setup()
    seen: list[int] = []

    def check(out, indices):
        assert indices.dtype == torch.int64 and indices.dim() == 1
        assert out.cu_seqlens.dtype == torch.int64
        assert out.cu_seqlens.diff().tolist() == [LENGTHS[i] for i in indices]
        for column in (out.logprobs, out.entropy, out.values):
            assert column.shape == (int(out.cu_seqlens[-1]),)
        seen.extend(indices.tolist())
        return loss.batched(out, indices)

    engine.backward(PrefixTree.build(SEQUENCES), check, want=WANT, batched=True)
    assert sorted(seen) == list(range(len(SEQUENCES)))


def test_backward_outputs_equal_forward_outputs() -> None:
    """What losses see is what `forward` reports, so the first step's ratio is 1."""
    model, _, engine, _ = setup()
    tree = PrefixTree.build(SEQUENCES)
    reported = engine.forward(tree, want=WANT)

    def compare(out, i):
        for name in WANT:
            assert (getattr(out, name) - getattr(reported, name)[i]).abs().max() < 1e-12
        return out.logprobs.sum()

    engine.backward(tree, compare, want=WANT)
    take_grads(model)


def test_temperature_of_the_engine() -> None:
    model, head, engine, loss = setup(temperature=0.6)
    temperatures = [0.6] * len(SEQUENCES)
    expected = oracle.dense_forward(model, SEQUENCES, None, temperatures, head)
    out = engine.forward(PrefixTree.build(SEQUENCES), want=WANT)
    for i, dense in enumerate(expected):
        assert (out.logprobs[i] - dense.logprobs).abs().max() < 1e-9
        assert (out.entropy[i] - dense.entropy).abs().max() < 1e-9
        assert (out.values[i] - dense.values).abs().max() < 1e-9
    _, grads = oracle.dense_backward(model, SEQUENCES, loss, None, temperatures, head)
    engine.backward(PrefixTree.build(SEQUENCES), loss, want=WANT)
    assert oracle.relative_error(take_grads(model, head), grads)[0] < 1e-9


def test_empty_tree_is_ordinary() -> None:
    model, head, engine, loss = setup()
    tree = PrefixTree.build([])
    out = engine.forward(tree, want=WANT)
    assert (out.logprobs, out.entropy, out.values) == ([], [], [])
    assert out.flat("logprobs").shape == (0,) and out.cu_seqlens.tolist() == [0]
    for batched in (False, True):
        total = engine.backward(tree, loss.batched if batched else loss, want=WANT, batched=batched)
        assert total == 0.0
    assert loss.calls == []
    assert all(grad is None or not grad.any() for grad in take_grads(model, head).values())
    assert engine.backward(tree, loss, temperatures=torch.zeros(0)) == 0.0


@pytest.mark.parametrize(
    "frozen", ["embed_tokens", "layers.0", "layers.1", "layers", "q_proj", "k_proj", "norm", "lm_head"]
)
@pytest.mark.parametrize("name", ["starcoder2", "phi"])
def test_frozen_parameters_get_no_gradient(name: str, frozen: str) -> None:
    model, head, engine, loss = setup(name=name)
    for parameter_name, p in model.named_parameters():
        p.requires_grad_(frozen not in parameter_name)
    _, expected = oracle.dense_backward(model, SEQUENCES, loss, head=head)
    engine.backward(PrefixTree.build(SEQUENCES), loss, want=WANT)
    assert all(p.grad is None for p in model.parameters() if not p.requires_grad)
    assert oracle.relative_error(take_grads(model, head), expected)[0] < 1e-9


def test_value_head_alone_can_be_trained() -> None:
    model, head, engine, loss = setup()
    model.requires_grad_(False)
    loss = SequenceLoss("mean_times_variance", LENGTHS, 3, ("values",))
    _, expected = oracle.dense_backward(model, SEQUENCES, loss, head=head)
    engine.backward(PrefixTree.build(SEQUENCES), loss, want=("values",))
    assert all(p.grad is None for p in model.parameters())
    assert oracle.relative_error(take_grads(model, head), expected)[0] < 1e-9


def test_nonlinear_value_head() -> None:
    model, _, _, _ = setup()
    head = nn.Sequential(nn.Linear(models.HIDDEN, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    loss = SequenceLoss("clipped_ratio", LENGTHS, 3, WANT)
    _, expected = oracle.dense_backward(model, SEQUENCES, loss, head=head)
    TreeEngine(model, 3, 5, value_head=head).backward(PrefixTree.build(SEQUENCES), loss, want=WANT)
    assert oracle.relative_error(take_grads(model, head), expected)[0] < 1e-9


def test_losses_that_do_not_depend_on_the_model() -> None:
    """A sequence without advantage may return a constant, in whatever dtype."""
    model, head, engine, loss = setup()

    def sometimes(out, i):
        return loss(out, i) if i % 2 else torch.zeros(())

    odd = range(1, len(SEQUENCES), 2)
    _, expected = oracle.dense_backward(model, [SEQUENCES[i] for i in odd], lambda out, k: loss(out, odd[k]), head=head)
    engine.backward(PrefixTree.build(SEQUENCES), sometimes, want=WANT)
    assert oracle.relative_error(take_grads(model, head), expected)[0] < 1e-9
    assert engine.backward(PrefixTree.build(SEQUENCES), lambda out, i: torch.ones(()), want=WANT) == len(SEQUENCES)


def test_nothing_scored_gives_zero_gradients() -> None:
    model, head, engine, _ = setup()
    tree = PrefixTree.build(SEQUENCES, scored=[np.zeros(n, bool) for n in LENGTHS])
    assert engine.backward(tree, lambda out, i: (out.logprobs + out.entropy + out.values).sum(), want=WANT) == 0.0
    assert all(grad is None or not grad.any() for grad in take_grads(model, head).values())


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # anchors run without gradient
@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing(reentrant: bool) -> None:
    model, head, engine, loss = setup()
    _, expected = oracle.dense_backward(model, SEQUENCES, loss, head=head)
    models.checkpoint(model, use_reentrant=reentrant)
    if reentrant:
        model.enable_input_require_grads()
    engine.backward(PrefixTree.build(SEQUENCES), loss, want=WANT)
    assert all(layer.gradient_checkpointing for layer in model.model.layers), "the user's own setting stays"
    assert oracle.relative_error(take_grads(model, head), expected)[0] < 1e-9


def test_engine_follows_weight_updates_and_moves_of_mode() -> None:
    """One engine lives as long as its module: optimizer steps and eval() in between change nothing about it."""
    model, head, engine, loss = setup()
    tree = PrefixTree.build(SEQUENCES)
    optimizer = torch.optim.SGD([*model.parameters(), *head.parameters()], lr=0.01)
    reference, reference_head = copy.deepcopy(model), copy.deepcopy(head)
    twin = torch.optim.SGD([*reference.parameters(), *reference_head.parameters()], lr=0.01)
    for step in range(3):
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        model.train(step % 2 == 0)
        engine.backward(tree, loss, want=WANT)
        optimizer.step()
        _, grads = oracle.dense_backward(reference, SEQUENCES, loss, head=reference_head)
        for name, p in oracle.parameters(reference, reference_head).items():
            p.grad = grads[name]
        twin.step()
    for p, q in zip([*model.parameters(), *head.parameters()], [*reference.parameters(), *reference_head.parameters()]):
        assert (p - q).abs().max() < 1e-9


def test_deep_comb_at_one_token_budgets() -> None:
    """60 levels, one token a chunk, one token live: the longest plans there are."""
    model, head = models.shared("starcoder2", F64)
    spine = np.arange(60) % 29
    sequences = [np.append(spine[:n], 30) for n in range(1, 60, 4)]
    loss = SequenceLoss("logsumexp", [len(s) for s in sequences], 1, ("logprobs",))
    total, expected = oracle.dense_backward(model, sequences, loss)
    take_grads(model, head)
    got_total = TreeEngine(model, chunk_tokens=1, live_tokens=1).backward(PrefixTree.build(sequences), loss)
    assert got_total == pytest.approx(total, rel=1e-9)
    assert oracle.relative_error(take_grads(model), expected)[0] < 1e-9
