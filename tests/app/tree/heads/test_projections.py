"""Weight gradients of linear projections, summed in place on a CPU as they are on CUDA devices, and what is left to
autograd."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from app.tree import PrefixTree, TreeEngine
from app.tree.model import projections
from app.tree.model.projections import summed_in_place
from tests.app.tree import models, oracle
from tests.app.tree.attention.test_backends import SEQUENCES
from tests.app.tree.losses import SequenceLoss
from tests.app.tree.parity import assert_unchanged, snapshot, take_grads

F64 = torch.float64
LOSS = SequenceLoss("tanh_of_sums", [len(s) for s in SEQUENCES], 3, ("logprobs",))


@pytest.fixture(autouse=True)
def on_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(projections, "DEVICES", ("cpu", "cuda"))


def in_place(model: nn.Module) -> set[str]:
    """Names of the projections that are summed in place."""
    with summed_in_place(model):
        return {name for name, module in model.named_modules() if "forward" in module.__dict__}


class Operators(TorchDispatchMode):
    """Names of the operators that ran."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.found.append(str(func))
        return func(*args, **(kwargs or {}))


@contextmanager
def counted() -> Iterator[list[str]]:
    mode = Operators()
    with mode:
        yield mode.found


@pytest.mark.parametrize("begun", [False, True], ids=["no gradients", "gradients of an earlier pass"])
@pytest.mark.parametrize(("chunk_tokens", "live_tokens"), [(6, 9), (8, 1000), (1000, 1000)])
def test_parity(chunk_tokens: int, live_tokens: int, begun: bool) -> None:
    """With biases, over many chunks, of which some run twice; added to what is there."""
    model = models.make("starcoder2", F64)
    _, expected = oracle.dense_backward(model, SEQUENCES, LOSS)
    take_grads(model)
    for p in model.parameters() if begun else ():
        p.grad = torch.ones_like(p)
    pointers = [p.grad.data_ptr() for p in model.parameters() if p.grad is not None]
    before = snapshot(model)
    with counted() as operators:
        TreeEngine(model, chunk_tokens, live_tokens, self_check=False).backward(PrefixTree.build(SEQUENCES), LOSS)
    assert_unchanged(model, before)
    assert operators.count("aten.addmm_.default") >= 2 * 6  # layers and projections of each
    assert not any("forward" in module.__dict__ for module in model.modules())
    assert not begun or pointers == [p.grad.data_ptr() for p in model.parameters() if p.grad is not None]
    if begun:
        expected = {name: grad + 1 for name, grad in expected.items()}
    error, where = oracle.relative_error(take_grads(model), expected)
    assert error <= 1e-9, f"{error:.1e} in {where}"


def test_layers_that_run_again_in_backward_add_once() -> None:
    model = models.make("starcoder2", F64)
    _, expected = oracle.dense_backward(model, SEQUENCES, LOSS)
    take_grads(model)
    models.checkpoint(model, use_reentrant=False)
    TreeEngine(model, 8, 1000, self_check=False).backward(PrefixTree.build(SEQUENCES), LOSS)
    assert oracle.relative_error(take_grads(model), expected)[0] <= 1e-9


def test_the_self_check_compares_it_with_autograd() -> None:
    """Dense execution, which the check compares with, goes through autograd."""
    model = models.make("qwen3")
    with counted() as operators:
        report = TreeEngine(model, 6, 9).verify(PrefixTree.build(SEQUENCES))
    assert report is not None and report.passed
    assert operators.count("aten.addmm_.default") >= 2 * 7


def test_a_weight_that_is_made_of_others_is_left_to_autograd() -> None:
    model = models.make("qwen3")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        nn.utils.weight_norm(model.model.layers[0].mlp.down_proj)
    assert "model.layers.0.mlp.down_proj" not in in_place(model)


def test_frozen_weights_and_adapters_are_left_to_autograd() -> None:
    model = models.make("qwen3")
    assert len(in_place(model)) == 2 * 7 + 1
    model.model.layers[0].mlp.up_proj.weight.requires_grad_(False)
    assert "model.layers.0.mlp.up_proj" not in in_place(model) and len(in_place(model)) == 2 * 7
    adapted = get_peft_model(models.make("qwen3"), LoraConfig(r=2, target_modules="all-linear"))
    assert in_place(adapted) == set()
    some = get_peft_model(models.make("qwen3"), LoraConfig(r=2, target_modules=["q_proj"]))
    assert in_place(some) == set()


def test_hooks_autocast_and_other_modules_are_left_to_autograd() -> None:
    model = models.make("qwen3")
    first, *layers = model.model.layers
    first.self_attn.q_proj.weight.register_post_accumulate_grad_hook(lambda parameter: None)
    first.self_attn.k_proj.weight.register_hook(lambda grad: grad)
    first.mlp.up_proj.weight.grad_dtype = torch.float64
    first.mlp.up_proj.weight.grad = torch.zeros_like(first.mlp.up_proj.weight, dtype=F64)
    torch.nn.utils.parametrizations.weight_norm(first.mlp.down_proj)
    first.mlp.gate_proj.forward = first.mlp.gate_proj.forward  # somebody else's
    left = {name.split(".")[-1] for name in in_place(model.model) if name.startswith("layers.0.")}
    assert left == {"v_proj", "o_proj", "gate_proj"}  # the last as it was
    assert "forward" in first.mlp.gate_proj.__dict__
    with torch.autocast("cpu", torch.bfloat16):
        assert in_place(layers[0]) == set()


def test_cpus_are_left_to_autograd(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(projections, "DEVICES", ("cuda",))
    assert in_place(models.make("qwen3")) == set()
