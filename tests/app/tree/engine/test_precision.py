"""bf16 parameters: gradients accumulate in float32 and are as close to the float64 truth as dense bf16 is."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from app.tree import PrefixTree, TreeEngine
from tests.app.tree import models, oracle
from tests.app.tree.losses import SequenceLoss
from tests.app.tree.parity import take_grads

BF16 = torch.bfloat16


def conversation(seed: int) -> list[np.ndarray]:
    """A stem and eight branches that fork again: enough tokens for rounding to average out."""
    random = np.random.default_rng(seed)
    stem = random.integers(0, 31, 20)
    arms = [np.concatenate([stem, random.integers(0, 31, 8)]) for _ in range(4)]
    return [np.concatenate([arm, random.integers(0, 31, 6)]) for arm in arms for _ in range(2)]


def distance(got: dict[str, torch.Tensor | None], truth: dict[str, torch.Tensor]) -> float:
    """Norm of the error of all parameters together, relative to the norm of the truth."""
    zero = torch.zeros(())  # of what has no gradient
    error = sum(float(((zero if got[n] is None else got[n]).double() - t).square().sum()) for n, t in truth.items())
    return (error / sum(float(t.square().sum()) for t in truth.values())) ** 0.5


@pytest.mark.parametrize(("chunk_tokens", "live_tokens"), [(16, 24), (8, 1000), (1000, 1000)])
@pytest.mark.parametrize("name", ["qwen3", "llama", "starcoder2"])
def test_bf16_gradients_are_no_further_from_the_truth_than_dense(
    name: str, chunk_tokens: int, live_tokens: int
) -> None:
    wide = dict(hidden_size=64, intermediate_size=96, num_attention_heads=4, num_key_value_heads=2)
    ours, dense = [], []
    for seed in range(4):
        model = models.make(name, BF16, seed, **wide)
        exact = copy.deepcopy(model).double()
        sequences = conversation(seed)
        loss = SequenceLoss("plain_sum", [len(s) for s in sequences], seed, ("logprobs",))
        _, truth = oracle.dense_backward(exact, sequences, loss)
        TreeEngine(model, chunk_tokens, live_tokens, self_check=False).backward(PrefixTree.build(sequences), loss)
        got = take_grads(model)
        assert all(grad.dtype == torch.float32 for grad in got.values())
        ours.append(distance(got, truth))
        for p in model.parameters():
            p.grad_dtype = torch.float32
        for i, sequence in enumerate(sequences):
            loss(oracle.dense_sequence(model, sequence), i).backward()
        dense.append(distance(take_grads(model), truth))
    ratio = np.median(ours) / np.median(dense)
    assert ratio < 1.15, f"ours {ours}, dense {dense}"


class Sums(TorchDispatchMode):
    """Collects the dtypes in which `index_add_` sums rows."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: list[torch.dtype] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.index_add_.default and args[0].dim() == 2:
            self.dtypes.append(args[0].dtype)
        return func(*args, **(kwargs or {}))


def test_children_of_one_state_are_added_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 256 tokens that hang below one state, beside the float64 sum of what the heads give: one rounding is left. A
    CPU adds in float32 by itself; a GPU in the sum's dtype, one after the other, so that this is looked at too."""
    model = models.make("qwen3", BF16, vocab_size=300)
    engine, given, got = TreeEngine(model, 1000, 1000, self_check=False), [], []
    backward = engine.heads.backward
    monkeypatch.setattr(engine.heads, "backward", lambda *args: given.append(backward(*args)) or given[-1])
    hook = model.model.norm.register_full_backward_hook(lambda module, inward, outward: got.append(outward[0][0]))
    tree = PrefixTree.build([[3, 1, 4, k] for k in range(256)], [np.arange(4) == 3] * 256)
    with Sums() as sums:
        engine.backward(tree, lambda out, _: out.logprobs.sum() / 256, batched=True)
    hook.remove()
    assert sums.dtypes == [torch.float32]
    assert len(given) == len(got) == 1 and given[0].shape[0] == 256 and got[0].dtype == BF16
    exact = given[0].double().sum(0)
    assert float((got[0][2].double() - exact).norm() / exact.norm()) <= 0.003


def test_bf16_outputs_are_float32_and_close() -> None:
    model, head = models.make("qwen3", BF16), models.value_head(BF16)
    exact, exact_head = copy.deepcopy(model).double(), copy.deepcopy(head).double()
    sequences = conversation(0)
    out = TreeEngine(model, 16, 24, value_head=head).forward(
        PrefixTree.build(sequences), want=("logprobs", "entropy", "values")
    )
    truth = oracle.dense_forward(exact, sequences, head=exact_head)
    dense = oracle.dense_forward(model, sequences, head=head)
    for name in ("logprobs", "entropy", "values"):
        assert all(column.dtype == torch.float32 for column in getattr(out, name))
        ours = torch.cat([got - getattr(t, name) for got, t in zip(getattr(out, name), truth)]).square().mean()
        theirs = torch.cat([getattr(d, name) - getattr(t, name) for d, t in zip(dense, truth)]).square().mean()
        assert ours < 1.3**2 * theirs, name


def test_bf16_gradients_add_up_in_float32() -> None:
    """64 equal passes: in bf16 the sum would stall after about 256 times the smallest step."""
    model = models.make("llama", BF16)
    engine, tree = TreeEngine(model), PrefixTree.build(conversation(1))
    engine.backward(tree, lambda out, i: out.logprobs.sum())
    once = take_grads(model)
    for _ in range(64):
        engine.backward(tree, lambda out, i: out.logprobs.sum())
    for name, grad in take_grads(model).items():
        assert torch.allclose(grad, 64 * once[name], rtol=1e-4, atol=1e-4 * float(grad.abs().max())), name


def test_autocast_is_honoured() -> None:
    """float32 weights under bf16 autocast (Lightning's bf16-mixed): like dense under autocast, float32 gradients."""
    wide = dict(hidden_size=64, intermediate_size=96)
    model = models.make("qwen3", torch.float32, 0, **wide)
    sequences = conversation(2)
    loss = SequenceLoss("plain_sum", [len(s) for s in sequences], 0, ("logprobs",))
    _, truth = oracle.dense_backward(copy.deepcopy(model).double(), sequences, loss)
    with torch.autocast("cpu", BF16):
        _, dense = oracle.dense_backward(model, sequences, loss)
        TreeEngine(model, 16, 24, self_check=False).backward(PrefixTree.build(sequences), loss)
    got = take_grads(model)
    assert all(grad.dtype == torch.float32 for grad in got.values())
    assert distance(got, truth) < 1.2 * distance(dense, truth)
    assert distance(got, truth) > 1e-4, "autocast had no effect"
