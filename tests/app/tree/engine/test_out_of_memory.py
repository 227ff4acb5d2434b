"""Memory that runs out: the pass is repeated with half the live tokens, from exactly the gradients it began with."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from app.tree import PrefixTree, TreeEngine, memory
from app.tree.planning.uncut import Uncut
from tests.app.tree import models
from tests.app.tree.engine.pictures import vision
from tests.app.tree.engine.pictures.test_parity import TEXTS, build
from tests.app.tree.engine.test_memory import Meter, star

TREE = PrefixTree.build(star(12))


class Device(TorchDispatchMode):
    """An allocator that has `limit` bytes for what autograd keeps, and fails as a GPU's does."""

    def __init__(self, model: torch.nn.Module, limit: int) -> None:
        super().__init__()
        self.meter, self.limit, self.failures = Meter(model), limit, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.meter.now > self.limit:
            self.failures += 1
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate too much.\nmore")
        return func(*args, **(kwargs or {}))

    @contextmanager
    def measuring(self) -> Iterator[None]:
        with self.meter.measuring(), self:
            yield


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(memory, "runs_out", lambda module: True)
    return models.make("qwen3")


def gradients(model: torch.nn.Module) -> list[Tensor]:
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def loss(out: Any, i: int) -> Tensor:
    return out.logprobs.square().sum()


def limited(model: torch.nn.Module, share: float) -> Device:
    meter = Meter(model)
    with meter.measuring():
        TreeEngine(model, 40, 60).backward(TREE, loss)
    model.zero_grad()
    return Device(model, int(meter.peak * share))


@pytest.mark.parametrize("zeros", [False, True])  # buffers that a strategy keeps; or none
def test_gradients_are_those_of_the_smaller_plan_alone(model: Any, zeros: bool) -> None:
    device = limited(model, 0.6)
    engine = TreeEngine(model, 40, 30)
    value = engine.backward(TREE, loss)
    expected = gradients(model)
    model.zero_grad()
    for p in model.parameters():
        p.grad = torch.zeros_like(p) if zeros else None
    calls: list[str] = []
    engine = TreeEngine(model, 40, 60)
    engine.remember = lambda: calls.append("before") or (lambda: calls.append("undone"))
    with device.measuring(), pytest.warns(UserWarning, match="of 60 live tokens ran out .* repeated with 30"):
        assert engine.backward(TREE, loss) == value
    assert device.failures == 1 and calls == ["before", "undone"]
    assert all(torch.equal(a, b) for a, b in zip(gradients(model), expected, strict=True))
    assert engine.plan(TREE).live_tokens == 30  # later passes too
    with device.measuring():
        engine.backward(TREE, loss)
    assert device.failures == 1


def test_what_failed_is_freed_before_the_next_attempt(model: Any) -> None:
    device, held = limited(model, 0.6), list[Any]()
    first: list[Any] = []

    def watched(out: Any, i: int) -> Tensor:
        (held if not device.failures else first).append(weakref.ref(out.logprobs))
        if device.failures and len(first) == 1:
            assert device.meter.now < device.limit / 2 and all(one() is None for one in held)
        return loss(out, i)

    with device.measuring(), pytest.warns(UserWarning, match="repeated with 30"):
        TreeEngine(model, 40, 60).backward(TREE, watched)
    assert first and len(first) == TREE.num_sequences


def test_given_gradients_and_groups_are_repeated_too(model: Any) -> None:
    device, engine = limited(model, 0.6), TreeEngine(model, 40, 60)
    ones = {"logprobs": torch.ones(TREE.num_dense_tokens)}
    with device.measuring(), pytest.warns(UserWarning, match="repeated with 30"):
        engine.backward_from(TREE, ones)
    once = gradients(model)
    model.zero_grad()
    TreeEngine(model, 40, 30).backward_from(TREE, ones)
    assert all(torch.equal(a, b) for a, b in zip(once, gradients(model), strict=True))
    model.zero_grad()
    engine = TreeEngine(model, 40, 60)
    groups = [i % 3 for i in range(TREE.num_sequences)]
    with device.measuring(), pytest.warns(UserWarning, match="repeated with 30"):
        engine.backward_grouped(TREE, lambda out, _: out.logprobs.sum(), groups)
    got = gradients(model)
    assert all(torch.allclose(a, b, rtol=1e-4, atol=1e-5) for a, b in zip(got, once, strict=True))


def test_refused_by_name_where_it_cannot_be_exact(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    device = limited(model, 0.6)
    TreeEngine(model, 40, 60).backward(TREE, loss)
    with device.measuring(), pytest.raises(torch.OutOfMemoryError) as raised:
        TreeEngine(model, 40, 60).backward(TREE, loss)
    assert "gradients of earlier passes" in raised.value.__notes__[0] and "Set live_tokens" in raised.value.__notes__[0]
    del raised
    gc.collect()
    model.zero_grad()
    never = Device(model, 0)
    with never.measuring(), pytest.warns(UserWarning), pytest.raises(torch.OutOfMemoryError) as raised:
        TreeEngine(model, 40, 40).backward(TREE, loss)
    assert never.failures == 2 and "10 are too few" in raised.value.__notes__[0]
    engine = TreeEngine(model, 40, 60)
    with never.measuring(), pytest.raises(torch.OutOfMemoryError) as raised:
        engine.budget.run(lambda: engine._executor(TREE, ("logprobs",)).run(engine.plan), [model], True, None)
    assert "ranks of a group run one plan together" in raised.value.__notes__[0]


def test_refused_where_complete_gradients_were_taken_away(model: Any) -> None:
    """To be summed over ranks, in the last backward of a pass, which then fails."""
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    engine, device = TreeEngine(model, 40, 60), Device(model, 1 << 40)

    def take(roots: Sequence[Tensor]) -> None:
        model.model.embed_tokens.weight.grad, device.limit = None, 0

    engine.completing = take
    with device.measuring(), pytest.raises(torch.OutOfMemoryError) as raised:
        engine.backward(TREE, loss)
    assert "on their way to other ranks" in raised.value.__notes__[0]


def test_host_memory_is_left_alone() -> None:
    """Its allocator fails by another error, and asking gradients for zeros would cost time for nothing."""
    assert not memory.runs_out(models.make("qwen3"))


def test_plans_repeat_while_free_memory_moves(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Asked for at the first two backward passes, then known: with gradients there or not."""
    each, asked = memory.token_bytes(model), []
    grads = sum(p.numel() * 4 for p in model.parameters())

    def free(_: torch.device) -> int:
        asked.append(1)
        there = any(p.grad is not None for p in model.parameters())
        return 2 * (grads + 3_000 * each + 100 * each * len(asked)) + 2 * memory._ROUND * 64 * each - there * grads

    monkeypatch.setattr(memory, "free_bytes", free)
    engine, found = TreeEngine(model), []
    for step in range(5):
        found.append(engine.plan(TREE).live_tokens)
        engine.backward(TREE, loss)
        if step % 2:
            model.zero_grad()
    assert len(asked) == 4 and len(set(found[1:])) == 1 and found[1] > memory._ROUND and found[1] % memory._ROUND == 0


def test_of_a_budget_half_empty_half_of_what_was_used_is_taken(model: Any) -> None:
    """Half of 4,096 would be the same plan again, and run out again."""
    device = limited(model, 0.6)
    engine = TreeEngine(model, 40, 4096)
    used = engine.plan(TREE).peak_live_tokens
    with device.measuring(), pytest.warns(UserWarning, match=f"of 4096 live tokens .* repeated with {used // 2},"):
        engine.backward(TREE, loss)
    assert device.failures == 1


def test_a_small_pass_that_runs_out_does_not_bound_those_that_have_fitted(model: Any) -> None:
    """Whatever took the memory, these many live tokens were not it."""
    device, engine = limited(model, 0.6), TreeEngine(model, 40, 4096)
    engine.backward(TREE, loss)
    fitted = engine.last_plan.peak_live_tokens
    model.zero_grad()
    with device.measuring(), pytest.warns(UserWarning, match="repeated with"):
        engine.backward(TREE, loss)
    assert engine.last_plan.live_tokens < fitted
    assert engine.plan(TREE).live_tokens == fitted


def test_half_is_never_less_than_what_has_to_run_in_one_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Placeholders that see each other: the smaller plan was refused, in place of the memory that ran out."""
    monkeypatch.setattr(memory, "runs_out", lambda module: True)
    monkeypatch.setattr(memory, "_LEAST", 2)
    made = vision.make("Gemma 3")
    tree = build(made.sequences(TEXTS))
    most = Uncut.of(tree).longest
    engine = TreeEngine(made.model, 2 * most, most + 2, image_processor=made.processor)
    never = Device(made.model, 0)
    smaller = pytest.warns(UserWarning, match=f"repeated with {most},")
    with never.measuring(), smaller, pytest.raises(torch.OutOfMemoryError) as raised:
        engine.backward(tree, loss)
    assert f"a picture has {most} placeholders" in raised.value.__notes__[0] and never.failures == 2
    engine.backward(tree, loss)
    assert engine.plan(tree).live_tokens == most
