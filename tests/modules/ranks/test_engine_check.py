"""The self-check in training: on by default, one decision for all ranks, a fallback that is exact."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from app.exchange import OneProcess
from app.tree import PrefixTree, SelfCheckError, TreeEngine
from modules import SFTModule
from modules.ranks import RankWork
from tests.helpers.rank_pool import RankError, RankPool
from tests.helpers.tiny_policy import Batches, Metrics, make_batch, source, trainer
from tests.modules.ranks import mixing


@pytest.fixture(scope="module", autouse=True)
def no_self_check() -> None:
    """Here there is one."""


def test_a_mixing_layer_ends_the_run_by_default() -> None:
    with pytest.raises(SelfCheckError, match=r"Qwen3ForCausalLM: .*differ by more than rounding.*model\.self_check"):
        mixing.train(devices=1)


@pytest.mark.parametrize("mode", ["dta", "sparse"])
def test_fallback_trains_like_every_sequence_alone(mode: str) -> None:
    """The parameters after two steps do not depend on the mode or the budgets: nothing of a tree is left."""
    with pytest.warns(UserWarning, match="dense-leaf"):
        expected = mixing.train(devices=1, self_check="fallback")
        got = mixing.train(devices=1, self_check="fallback", tree_training_mode=mode, live_tokens=20)
    wrong = mixing.train(devices=1, self_check="skip")
    for name, value in expected.items():
        torch.testing.assert_close(got[name], value, atol=1e-6, rtol=0)
    assert max(float((wrong[name] - value).abs().max()) for name, value in expected.items()) > 1e-3


def test_after_a_fallback_all_models_run_alone_and_the_step_begins_anew() -> None:
    torch.manual_seed(0)
    module = mixing.MixingPolicy(self_check="fallback")
    run = trainer(Metrics())
    with pytest.warns(UserWarning, match="dense-leaf"):
        run.fit(module, Batches([make_batch(k) for k in range(2)]))
    assert [dense for dense, _ in module.found] == [False, True, True]  # the first batch twice
    errors = [error for _, error in module.found]
    assert errors[0] > 0.1 and max(errors[1:]) < 1e-4
    assert abs(float(run.callback_metrics["kl"])) < 1e-6


def test_two_ranks_fall_back_together(two_ranks: RankPool) -> None:
    with pytest.warns(UserWarning, match="dense-leaf"):
        expected = mixing.train(devices=1, self_check="fallback")
    for got in two_ranks.run(mixing.train, devices=2, self_check="fallback"):
        for name, value in expected.items():
            torch.testing.assert_close(got[name], value, atol=1e-6, rtol=0)


def test_one_failing_rank_decides_for_all(two_ranks: RankPool) -> None:
    assert two_ranks.run(mixing.train_one_broken_rank) == [True, True]
    with pytest.raises(RankError) as error:
        two_ranks.run(mixing.train, devices=2, ranks=(1,))
    messages = error.value.messages
    assert "differ on 1 other rank" in messages[0] and "differ by more than rounding" in messages[1]
    assert all("model.self_check" in message for message in messages.values())


def test_a_rank_without_sequences_joins_and_the_check_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    module = SFTModule(source())
    module.configure_model()
    assert module.policy is not None
    engine = TreeEngine(module.policy, self_check=False)
    joined: list[Tensor] = []

    class Alone(OneProcess):
        def sum(self, tensor: Tensor) -> Tensor:
            joined.append(tensor)
            return tensor

    ranks = RankWork(Alone(), "tree", module.engine_for)
    unchecked = ranks.verify_together(engine, PrefixTree.build([]), ("logprobs",), False, {False, True})
    assert unchecked == {False, True}
    tree = PrefixTree.build([[1, 2, 3, 4], [1, 2, 5]])
    assert ranks.verify_together(engine, tree, ("logprobs",), False, unchecked) == set(), "it never has pictures"
    assert [t.tolist() for t in joined] == [[0.0] * 4, [1.0, 0.0, 0.0, 0.0]]


def test_unknown_values_are_refused() -> None:
    with pytest.raises(ValueError, match="self_check: 'warn', must be one of error, fallback, skip"):
        SFTModule(source(), self_check="warn")  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
