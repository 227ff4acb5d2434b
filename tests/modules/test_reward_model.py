"""`RewardModule`: gradients are those of pairs run alone, whatever the chunks; what is saved is what was trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torchmetrics.classification import BinaryCalibrationError
from transformers import AutoModelForSequenceClassification

from app.batch import CALL_REWARD, BatchError, RolloutBatch
from app.tree import FlatOutputs, PrefixTree, TreeEngine
from callbacks import SavePretrained
from modules import ModelSource, RewardModule, build_model
from modules.supervised.reward_model import informative, with_scores
from tests.helpers.tiny_policy import VOCABULARY, Batches, Metrics, fit, make_batch, parameters, sgd, source, trainer

F64 = {
    "model_type": "starcoder2",
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
    "embedding_dropout": 0.0,
    "residual_dropout": 0.0,
    "attention_dropout": 0.0,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}  # norms without a cast to float32


def clean() -> ModelSource:
    return ModelSource(config=dict(F64), dtype="float64")


def recorded(seed: int, flat: bool = False) -> RolloutBatch:
    """Three groups of three; rewards of 0, 1 or 2, so that some tie. `flat`: not those of the second group."""
    batch = make_batch(seed, recorded=False)
    rewards = torch.tensor([0.0, 1.0, 2.0, 0.0, 2.0, 2.0, 1.0, 1.0, 0.0])[batch.episode_ids]
    return batch.with_rewards(rewards.masked_fill(batch.group_ids == 1, 1.0) if flat else rewards)


def naive_loss(model: Any, batch: RolloutBatch, margin: float = 0.0, centre: float = 0.0) -> Tensor:
    """Pair by pair, each sequence alone through the transformers model."""
    ends: dict[int, tuple[int, Tensor, float, int]] = {}
    for i, tokens in enumerate(batch.sequences()):
        turn, episode = int(batch.turn_indices[i]), int(batch.episode_ids[i])
        if episode not in ends or turn > ends[episode][0]:
            ends[episode] = (turn, tokens, float(batch.rewards[i]), int(batch.group_ids[i]))
    groups = []
    for group in sorted({one[3] for one in ends.values()}):
        own = [one for one in ends.values() if one[3] == group]
        pairs = [(a, b) for a in own for b in own if a[2] > b[2]]
        losses = []
        for better, worse in pairs:
            s, t = (model(one[1][None]).logits[0, 0] for one in (better, worse))
            losses.append(-F.logsigmoid(s - t - margin * (better[2] - worse[2])) + centre * (s + t) ** 2)
        if losses:
            groups.append(torch.stack(losses).mean())
    return torch.stack(groups).mean()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"chunk_tokens": 7},  # groups are cut
        {"chunk_tokens": 22, "margin": 0.5, "centre": 0.1},  # some are
        {"tree_training_mode": "disabled"},
    ],
    ids=str,
)
def test_gradients_are_those_of_pairs_run_alone(options: dict[str, Any]) -> None:
    data = [recorded(k, flat=k == 1) for k in range(3)]
    module = RewardModule(clean(), optimizer=sgd, **options)
    steps = fit(module, data)
    torch.manual_seed(0)
    model = build_model(clean(), scores=True)
    optimizer = sgd(model.parameters())
    weights = {name: options.get(name, 0.0) for name in ("margin", "centre")}
    for batch, step in zip(data, steps, strict=True):
        optimizer.zero_grad()
        loss = naive_loss(model, batch, **weights)
        loss.backward()
        optimizer.step()
        assert step["loss"] == pytest.approx(loss.item(), abs=1e-6)  # logged in float32
    assert [step["flat"] for step in steps] == pytest.approx([0.0, 1 / 3, 0.0])
    got, expected = parameters(module.policy), parameters(model)
    for name in expected:
        torch.testing.assert_close(got[name], expected[name], atol=1e-9, rtol=0)


@pytest.mark.parametrize(
    ("chunk_tokens", "again", "dense"),
    [(7, {9}, False), (22, {3, 6}, False), (1000, {0}, False), (7, {9}, True)],
)
def test_only_groups_that_are_cut_run_twice(
    chunk_tokens: int, again: set[int], dense: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that the test above takes every way through `TreeEngine.backward_grouped`; densely each sequence is alone."""
    model = build_model(clean(), scores=True)
    engine = TreeEngine(model, chunk_tokens=chunk_tokens, self_check=False)
    engine.dense = dense
    batch = with_scores(recorded(0))
    tree = PrefixTree.build(batch.sequences(), scored=batch.split(batch.loss_mask))
    compared: list[int] = []
    before: list[int] = []

    def loss(out: FlatOutputs, indices: Tensor) -> Tensor:
        assert all(int((batch.group_ids[indices] == group).sum()) == 3 for group in batch.group_ids[indices])
        compared.extend(indices.tolist())
        return out.values.sum()  # type: ignore[union-attr]

    forward = engine.forward
    monkeypatch.setattr(
        engine, "forward", lambda part, *rest: before.append(part.num_sequences) or forward(part, *rest)
    )
    engine.backward_grouped(tree, loss, batch.group_ids, ("values",))
    assert sorted(compared) == list(range(9)) and sum(before) in again


def test_an_episode_is_scored_at_the_end_of_its_last_turn() -> None:
    batch = make_batch(recorded=False)
    scored = with_scores(batch)
    assert len(scored) == 9 and scored.loss_mask.sum() == 9
    for i, tokens in enumerate(scored.sequences()):
        same = batch.episode_ids == scored.episode_ids[i]
        longest = max((s for s, one in zip(batch.sequences(), same) if one), key=len)
        assert tokens[:-1].tolist() == longest.tolist() and bool(scored.split(scored.loss_mask)[i][-1])


def test_rewards_of_single_calls_decide_which_episode_is_better() -> None:
    """Of the last episode of each group the second of three turns, which is no sequence of its own here."""
    batch = recorded(0)
    for i in (batch.turn_indices == 1).nonzero().flatten().tolist():
        batch.metadata[i][CALL_REWARD] = -5.0
    scored = with_scores(batch)
    assert scored.rewards.tolist() == [0.0, 1.0, -3.0, 0.0, 2.0, -3.0, 1.0, 1.0, -5.0]
    torch.testing.assert_close(with_scores(scored).rewards, scored.rewards)  # each counts once
    told = recorded(0).with_rewards(scored.rewards[batch.episode_ids])
    losses = [fit(RewardModule(clean(), optimizer=sgd), [one])[0]["loss"] for one in (batch, told, recorded(0))]
    assert losses[0] == losses[1] != losses[2]


def test_what_is_saved_scores_as_what_was_trained(tmp_path: Path) -> None:
    batch = recorded(0)
    module = RewardModule(source(pad_token_id=int(batch.tokens[-1])), optimizer=sgd)  # which also ends a sequence
    torch.manual_seed(0)
    trainer(SavePretrained(), default_root_dir=tmp_path).fit(module, Batches([batch, recorded(1)]))
    saved = AutoModelForSequenceClassification.from_pretrained(tmp_path / "model")
    scored = with_scores(batch)
    tree = PrefixTree.build(scored.sequences(), scored=scored.split(scored.loss_mask))
    values = module.engine.forward(tree, ("values",)).values
    assert values is not None
    with torch.no_grad():
        for tokens, value in zip(scored.sequences(), values):
            torch.testing.assert_close(saved(tokens[None, :-1]).logits[0, 0], value[-1], atol=1e-5, rtol=0)


def test_learns_the_order_and_measures_it_on_held_out_pairs() -> None:
    batch = recorded(0)
    module = RewardModule(source(), optimizer=lambda p: torch.optim.AdamW(p, lr=0.01))
    steps = fit(module, [batch] * 25)
    assert steps[-1]["accuracy"] == 1.0 and steps[-1]["loss"] < 0.2 * steps[0]["loss"] and steps[-1]["margin"] > 1
    held_out = [recorded(3), recorded(4, flat=True)]
    [metrics] = trainer().validate(module, Batches([], held_out=held_out), verbose=False)
    error, gaps, losses = BinaryCalibrationError(n_bins=20), [], []
    with torch.no_grad():
        for one in held_out:
            part = with_scores(one)
            scores = [float(module.policy(tokens[None, :-1]).logits) for tokens in part.sequences()]
            for group in part.group_ids.unique().tolist():
                own = [i for i in range(len(part)) if int(part.group_ids[i]) == group]
                pairs = [(i, j) for i in own for j in own if part.rewards[i] > part.rewards[j]]
                found = torch.tensor([scores[i] - scores[j] for i, j in pairs])
                if len(found):
                    gaps.append(found)
                    losses.append(-F.logsigmoid(found).mean())
    gap = torch.cat(gaps)
    error.update(gap.abs().sigmoid(), (gap > 0).long())
    assert metrics["val/accuracy"] == pytest.approx(float((gap > 0).float().mean()))
    assert metrics["val/margin"] == pytest.approx(float(gap.mean()), abs=1e-4)
    assert metrics["val/loss"] == pytest.approx(float(torch.stack(losses).mean()), abs=1e-4)
    assert metrics["val/calibration_error"] == pytest.approx(float(error.compute()), abs=1e-4)


def test_an_episode_as_long_as_the_model_has_positions_is_told_with_its_length() -> None:
    """The token behind its end has a position, too, where the model's own code runs it."""
    batch = recorded(0)
    longest = int(batch.lengths().max())
    fit(RewardModule(source(max_position_embeddings=longest + 1), optimizer=sgd), [batch])
    with pytest.raises(BatchError, match=rf"has {longest} tokens, and .*max_position_embeddings: {longest} takes"):
        fit(RewardModule(source(max_position_embeddings=longest), optimizer=sgd), [batch])


def test_rewards_that_differ_by_rounding_are_no_pair() -> None:
    batch = recorded(0)
    assert informative(batch)
    shifted = batch.with_rewards(1e5 + 0.02 * (batch.rewards > batch.rewards.mean()))
    assert shifted.rewards.max() > shifted.rewards.min() and informative(shifted) == []


def test_a_batch_without_a_pair_moves_nothing() -> None:
    batch = recorded(0)
    flat = batch.with_rewards(torch.ones(len(batch)))
    module = RewardModule(source(), optimizer=lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1))
    metrics = Metrics()
    run = trainer(metrics, max_steps=2, max_epochs=-1)
    torch.manual_seed(0)
    run.fit(module, Batches([batch, flat]))
    before = RewardModule(source(), optimizer=lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1))
    fit(before, [batch])
    assert metrics.steps[1]["flat"] == 1.0 and "accuracy" not in metrics.steps[1]
    for name, value in parameters(before.policy).items():
        assert torch.equal(parameters(module.policy)[name], value), name


@pytest.mark.parametrize(
    ("options", "said"),
    [({"margin": -1.0}, "margin: -1.0"), ({"centre": float("nan")}, "centre: nan")],
)
def test_options_out_of_range_are_named(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        RewardModule(source(), **options)
    with pytest.raises(ValueError, match=r"model\.adapter"):
        RewardModule(ModelSource(path="somewhere", adapter={"r": 2}))


def test_an_episode_with_two_rewards_is_refused() -> None:
    batch = make_batch(recorded=False)
    broken = batch.with_rewards(torch.arange(len(batch)).float())
    with pytest.raises(BatchError, match="an episode has one"):
        fit(RewardModule(source(), optimizer=sgd), [broken])
