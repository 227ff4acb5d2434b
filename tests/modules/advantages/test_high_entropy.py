"""Credit for tokens of high entropy alone: which they are, and that training on them equals a plain dense loop."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from app.batch import LEFT_OUT, BatchError, RolloutBatch
from modules import PolicyModule
from modules.advantages import ADVANTAGES
from modules.advantages.high_entropy import high_entropy
from modules.ranks import RankWork
from tests.helpers.tiny_policy import fit, make_batch, naive_model, parameters, sgd, source
from tests.modules.dense_loop import Dense


def kept(batch: RolloutBatch, entropy: Tensor, share: float, counted: list[int] | None = None) -> set[int]:
    """Places of the tokens that are left, by sorting."""
    sequences = range(len(batch)) if counted is None else counted
    ends = batch.cu_seqlens.tolist()
    places = [t for i in sequences for t in range(ends[i], ends[i + 1]) if bool(batch.loss_mask[t])]
    places.sort(key=lambda t: -float(entropy[t]))
    return set(places[: max(1, round(share * len(places)))])


@pytest.mark.parametrize("share", [0.01, 0.2, 0.5, 0.99])
@pytest.mark.parametrize("estimator", ["grpo", "rloo", "tree"])
def test_the_share_of_tokens_with_the_highest_entropy_keeps_its_advantage(share: float, estimator: str) -> None:
    batch = make_batch()
    entropy = torch.rand(batch.num_tokens, generator=torch.Generator().manual_seed(1))
    entropy[~batch.loss_mask] = 100.0
    found = high_entropy(batch, entropy, share, estimator)
    full: Tensor = ADVANTAGES[estimator](batch)  # type: ignore[operator]
    chosen = torch.zeros(batch.num_tokens, dtype=torch.bool)
    chosen[list(kept(batch, entropy, share))] = True
    assert torch.equal(found[batch.loss_mask], (full * chosen)[batch.loss_mask])


HERE = __name__


def writes(batch: RolloutBatch) -> Tensor:
    batch.rewards -= 0.1
    return ADVANTAGES["grpo"](batch)  # type: ignore[no-any-return, operator]


def in_a_list(batch: RolloutBatch) -> Any:
    return [0.0] * batch.num_tokens


def of_sequences(batch: RolloutBatch) -> Tensor:
    return batch.rewards


def of_metadata(batch: RolloutBatch) -> Tensor:
    assert all("level" in one for one in batch.metadata)
    return ADVANTAGES["grpo"](batch)  # type: ignore[no-any-return, operator]


@pytest.mark.parametrize(
    ("estimator", "message"),
    [
        (writes, r"high_entropy writes into batch\.rewards"),
        (in_a_list, r"estimator=.*in_a_list: expected a tensor of shape \(213,\), one a token, got list"),
        (of_sequences, r"estimator=.*of_sequences: expected a tensor of shape \(213,\), .* got shape \(15,\)"),
        (of_metadata, None),
    ],
)
def test_an_estimator_of_ones_own_is_held_to_what_advantages_are(estimator: Any, message: str | None) -> None:
    batch = make_batch()
    for one in batch.metadata:
        one["level"] = 1  # which made-up batches have not
    options = {"share": 0.3, "estimator": f"{HERE}.{estimator.__name__}"}
    module = PolicyModule(source(), optimizer=sgd, advantage="high_entropy", advantage_options=options)
    with nullcontext() if message is None else pytest.raises(BatchError, match=message):
        fit(module, [batch])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"estimator": f"{HERE}.missing"}, "advantage_options: estimator.*missing"),
        ({"estimator": f"{HERE}.of_metadata", "share": 1.0}, "advantage_options: share: 1.0, must be below 1"),
    ],
)
def test_so_are_its_options_before_training(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PolicyModule(source(), advantage="high_entropy", advantage_options=options)


def test_ties_stay_and_episodes_that_are_left_out_do_not_count() -> None:
    batch = make_batch()
    trained = int(batch.loss_mask.sum())
    assert int((high_entropy(batch, torch.ones(batch.num_tokens), 0.1) != 0)[batch.loss_mask].sum()) == trained
    entropy = torch.rand(batch.num_tokens, generator=torch.Generator().manual_seed(1))
    for i in range(3):
        batch.metadata[i][LEFT_OUT] = "truncated"
    found = high_entropy(batch, entropy, 0.3)
    assert set(found.nonzero()[:, 0].tolist()) == kept(batch, entropy, 0.3, list(range(3, len(batch))))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"share": 0.0}, "advantage_options: share: 0.0, must be above 0"),
        ({"share": 1.0}, "advantage_options: share: 1.0, must be below 1: for all tokens set advantage=grpo"),
        ({"estimator": "gae"}, "advantage_options: estimator: no function 'gae'; name one of grpo, dr_grpo"),
        ({"estimator": "grpo", "estimator_options": {"sdt": 1}}, "advantage_options: estimator_options: grpo: .*sdt"),
    ],
)
def test_options_are_refused_where_the_module_is_made(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PolicyModule(source(), advantage="high_entropy", advantage_options=options)


class OfHighEntropy(Dense):
    def _prepare(self, batch: RolloutBatch, start: dict[str, Tensor]) -> None:
        super()._prepare(batch, start)
        chosen = torch.zeros(batch.num_tokens)
        chosen[list(kept(batch, start["entropy"], 0.3))] = 1.0
        start["advantages"] = start["advantages"] * chosen


@pytest.mark.parametrize(("minibatches", "proximal"), [(1, "sampler"), (2, "sampler"), (2, "recomputed")])
def test_training_equals_a_plain_dense_loop(minibatches: int, proximal: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, run = [], RankWork.outputs
    monkeypatch.setattr(
        RankWork, "outputs", lambda self, batch, passes, *a: asked.append(passes) or run(self, batch, passes, *a)
    )
    options: dict[str, Any] = {"advantage": "high_entropy", "advantage_options": {"share": 0.3}, "proximal": proximal}
    module = PolicyModule(source(), optimizer=sgd, minibatches=minibatches, chunk_tokens=7, live_tokens=20, **options)
    data = [make_batch(0), make_batch(1, version=1)]
    fit(module, data)
    dense = OfHighEntropy(
        credit=lambda batch, values, rewards: ADVANTAGES["grpo"](batch),  # type: ignore[operator]
        proximal=proximal,
        minibatches=minibatches,
    )
    model = naive_model()
    dense.train(model, data)
    for name, expected in parameters(model).items():
        torch.testing.assert_close(parameters(module.policy)[name], expected, atol=2e-6, rtol=0)
    both = ("logprobs", "entropy") if proximal == "recomputed" else ("entropy",)
    assert asked == [{"policy": both}] * 2  # one pass a batch
