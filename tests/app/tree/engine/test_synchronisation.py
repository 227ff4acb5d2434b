"""Nothing inside a pass asks the device for a value: on a GPU each such question would wait for all queued work."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from app.tree import PrefixTree, TreeEngine, routed
from app.tree.states.scans import TORCH, ByWave
from tests.app.tree import models
from tests.app.tree.engine import families
from tests.app.tree.states import hybrids

STEM = [3, 10, 17, 24, 3, 0, 9, 9]
SEQUENCES = [np.array(s) for s in (STEM, [*STEM[:5], 1, 2, 3], [*STEM[:5], 1, 4], STEM[:3], STEM, [7], [30, 3, 10])]
SCORED = [np.arange(len(s)) % 3 > 0 for s in SEQUENCES]
BUDGETS = [(4, 9), (3, 3), (1000, 1000)]


class Questions(TorchDispatchMode):
    """Collects the operators whose result, or its shape, depends on values in memory of the device."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        masked = "index" in name and any(i is not None and i.dtype == torch.bool for i in _indices(args))
        if masked or name.startswith(("aten._local_scalar_dense", "aten.nonzero", "aten.masked_select", "aten.equal")):
            self.asked.append(name)
        return func(*args, **(kwargs or {}))


def _indices(args: Any) -> Any:
    return args[1] if len(args) > 1 and isinstance(args[1], (list, tuple)) else []


def run(model: Any, budgets: tuple[int, int], attention: str = "auto") -> None:
    engine = TreeEngine(model, *budgets, attention=attention, self_check=False)
    tree = PrefixTree.build(SEQUENCES, scored=SCORED)
    want = ("logprobs", "entropy")
    engine.backward(tree, lambda out, _: out.logprobs.square().sum() + out.entropy.sum(), want=want, batched=True)


@pytest.mark.parametrize("budgets", BUDGETS)
@pytest.mark.parametrize("name", ["qwen3", "starcoder2"])
def test_a_pass_asks_for_the_loss_alone(name: str, budgets: tuple[int, int]) -> None:
    model = models.make(name)
    with Questions() as questions:
        run(model, budgets)
    assert questions.asked == ["aten._local_scalar_dense.default"]


@pytest.mark.parametrize("scans", [TORCH, ByWave(TORCH)], ids=["blocks", "waves"])
@pytest.mark.parametrize("name", ["qwen3_5_text", "bamba"])
def test_a_pass_over_states_asks_for_the_loss_alone(name: str, scans: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.tree.engine.choose_scans", lambda *_: scans)
    model = hybrids.make(name)
    for budgets in BUDGETS:
        with Questions() as questions:
            run(model, budgets)
        assert questions.asked == ["aten._local_scalar_dense.default"]


def test_a_pass_over_recorded_experts_asks_for_the_loss_alone() -> None:
    """Experts in grouped products, which ask nothing of their own."""
    experts = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=8, experts_implementation="grouped_mm")
    model, tree = models.make("qwen3_moe", **experts), PrefixTree.build(SEQUENCES, scored=SCORED)
    rows = np.arange(tree.num_dense_tokens) % 9 - 1
    for budgets in BUDGETS:
        asked = []
        for one in (tree, routed(tree, rows, np.tile(np.array([1, 3], np.uint8), (8, 2, 1)))):
            engine = TreeEngine(model, *budgets, self_check=False)
            with Questions() as questions:
                engine.backward(one, lambda out, _: out.logprobs.square().sum(), batched=True)
            asked.append(questions.asked)
        assert asked[1] == asked[0]


def test_a_pass_over_chosen_tokens_asks_for_the_loss_alone() -> None:
    options = {**families.INDEXED, "first_k_dense_replace": 2}  # experts that are run one by one ask which there are
    model = models.make("deepseek_v32", **options)
    for budgets in BUDGETS:
        with Questions() as questions:
            run(model, budgets)
        assert questions.asked == ["aten._local_scalar_dense.default"]


def test_a_pass_over_keys_of_many_tokens_asks_for_the_loss_alone() -> None:
    model = hybrids.make("deepseek_v4", experts_implementation="grouped_mm")
    for budgets in BUDGETS:
        with Questions() as questions:
            run(model, budgets)
        assert questions.asked == ["aten._local_scalar_dense.default"]


def test_questions_are_noticed() -> None:
    with Questions() as questions:
        x = torch.arange(3.0)
        x[x > 1], float(x[0]), (x > 1).nonzero()
    assert len(questions.asked) == 3


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("attention", ["sdpa", "flash"])
def test_a_pass_does_not_wait_for_the_gpu(attention: str) -> None:
    model = models.make("qwen3").to("cuda", torch.bfloat16)
    run(model, (4, 9), attention)  # kernels load
    torch.cuda.set_sync_debug_mode("error")
    try:
        with pytest.raises(RuntimeError, match="synchronizing") as raised:  # the loss, at the very end
            run(model, (4, 9), attention)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert raised.traceback[-1].path.name == "engine.py"
