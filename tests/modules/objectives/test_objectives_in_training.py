"""Every way of composing an algorithm trains the parameters of a plain dense loop (`dense`), through the tree."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable
from itertools import combinations
from typing import Any

import pytest
import torch
from torch.nn.functional import logsigmoid

from app.batch import BatchError, RolloutBatch
from modules import ModelSource, PolicyModule, Regulariser
from modules.advantages import ADVANTAGES
from modules.algorithm import with_rewards
from modules.objectives import OBJECTIVES
from modules.ranks import RankWork
from tests.helpers.tiny_policy import fit, make_batch, naive_model, naive_outputs, parameters, sgd, source
from tests.modules.dense_loop import Dense

Options = dict[str, Any]


def stale(recorded: bool = True) -> list[RolloutBatch]:
    """Two batches at policy versions 0 and 1, the second of mixed ages; not so far off that everything is clipped."""
    made = [make_batch(0, recorded=recorded), make_batch(1, recorded=recorded)]
    ages = made[1].group_ids.repeat_interleave(made[1].lengths())
    if recorded:
        made[1].versions = torch.where(made[1].loss_mask, (1 - ages).clamp(min=0), -1)
    for batch in made:
        batch.behavior_logprobs[batch.loss_mask] = batch.behavior_logprobs[batch.loss_mask] * 0.3 - 2.0
    return made


def half_recorded() -> list[RolloutBatch]:
    made = stale()
    for batch in made:
        batch.versions[batch.group_ids.repeat_interleave(batch.lengths()) == 0] = -1
    return made


def pairs() -> list[RolloutBatch]:
    """Groups of two episodes, the second of three turns."""
    return [make_batch(k, groups=4, episodes=2, recorded=False) for k in range(2)]


def credit(name: str = "grpo") -> Callable[..., Any]:
    return lambda batch, values, token_rewards: ADVANTAGES[name](batch)  # type: ignore[operator]


FAR = {"clip_low": 0.2, "clip_high": 0.2}
CASES: dict[str, tuple[Options, Dense, Callable[[], list[RolloutBatch]]]] = {
    "gspo": (
        {"objective": "gspo", "objective_options": FAR},
        Dense("gspo", FAR, credit(), aggregation="sequence_mean"),
        stale,
    ),
    "cispo, rloo": ({"objective": "cispo", "advantage": "rloo"}, Dense("cispo", {}, credit("rloo")), stale),
    "sapo": ({"objective": "sapo"}, Dense("sapo", {}, credit(), aggregation="sequence_mean"), stale),
    "dapo, tree": ({"objective": "dapo", "advantage": "tree"}, Dense("dapo", {}, credit("tree")), stale),
    "m2po, all tokens": (
        {"objective": "m2po", "objective_options": {"threshold": 0.3, "tokens": "all"}},
        Dense("m2po", {"threshold": 0.3, "tokens": "all"}, credit()),
        stale,
    ),
    "m2po": (
        {"objective": "m2po", "objective_options": {"threshold": 0.3}},
        Dense("m2po", {"threshold": 0.3}, credit()),
        stale,
    ),
    "reinforce": ({"objective": "reinforce"}, Dense("reinforce", {}, credit(), lr=0.05), stale),
    "sft": ({"objective": "sft"}, Dense("sft"), stale),
    "reinforce, truncated": (
        {"objective": "reinforce", "correction": "truncated", "correction_options": {"cap": 1.5}},
        Dense("reinforce", {}, credit(), "recomputed", "truncated", {"cap": 1.5}),
        stale,
    ),
    "ppo, masked by sequence": (
        {"correction": "masked", "correction_options": {"level": "geometric"}},
        Dense("ppo_clip", {}, credit(), "recomputed", "masked", {"level": "geometric"}),
        stale,
    ),
    "gspo, truncated": (
        {"objective": "gspo", "objective_options": FAR, "correction": "truncated", "correction_options": {"cap": 1.1}},
        Dense("gspo", FAR, credit(), "recomputed", "truncated", {"cap": 1.1, "level": "geometric"}, "sequence_mean"),
        stale,
    ),
    "decoupled, recomputed": (
        {"objective": "decoupled_ppo"},
        Dense("decoupled_ppo", {}, credit(), "recomputed"),
        stale,
    ),
    "decoupled, interpolated": (
        {"objective": "decoupled_ppo", "proximal": "interpolated"},
        Dense("decoupled_ppo", {}, credit(), "interpolated"),
        stale,
    ),
    "decoupled, half without a sampler": (
        {"objective": "decoupled_ppo"},
        Dense("decoupled_ppo", {}, credit(), "recomputed"),
        half_recorded,
    ),
    "kl in the reward of groups": (
        {"regularisers": [Regulariser("kl", 0.5, "reward", {"estimator": "k1"})], "reference": "initial"},
        Dense(credit=lambda batch, values, extra: ADVANTAGES["grpo"](with_rewards(batch, extra)), reward_kl=0.5),  # type: ignore[operator]
        half_recorded,
    ),
    "kl in the reward of tokens": (
        {
            "advantage": "reinforce_pp",
            "regularisers": [Regulariser("kl", 0.5, "reward", {"estimator": "k1"})],
            "reference": "initial",
        },
        Dense(credit=lambda batch, values, extra: ADVANTAGES["reinforce_pp"](batch, extra), reward_kl=0.5),  # type: ignore[operator]
        stale,
    ),
    "dpo": ({"objective": "dpo", "reference": "initial"}, Dense("dpo", aggregation="episode_mean"), pairs),
    "tba": (
        {"objective": "tba", "objective_options": {"beta": 1.0}, "reference": "initial"},
        Dense("tba", {"beta": 1.0}, aggregation="episode_mean", lr=0.002),
        stale,
    ),
}


AT_ONCE = ["cispo, rloo", "sapo", "dapo, tree", "m2po, all tokens", "reinforce", "sft", "gspo"]
"""Nothing is prepared of a batch but its credit, so that several steps of it are as PPO's in test_policy.py, or as a
sibling's here."""
STEPS = [
    *[pytest.param(case, (1, 1), id=f"{case}-one step a batch") for case in CASES],
    *[
        pytest.param(case, (2, 2), id=f"{case}-2 minibatches x 2 epochs", marks=pytest.mark.slow)
        for case in CASES
        if case not in AT_ONCE
    ],
]


@pytest.mark.parametrize(("case", "steps"), STEPS)
def test_equals_a_plain_dense_loop(case: str, steps: tuple[int, int]) -> None:
    options, dense, data = CASES[case]
    if dense.proximal == "interpolated" and steps == (1, 1):
        with pytest.raises(ValueError, match=r"proximal=interpolated with minibatches=1 and epochs=1.*recomputed"):
            PolicyModule(source(), **options)
        return
    dense = copy.copy(dense)
    dense.minibatches, dense.epochs = steps
    module = PolicyModule(
        source(),
        optimizer=lambda p: torch.optim.SGD(p, lr=dense.lr),
        minibatches=steps[0],
        epochs=steps[1],
        chunk_tokens=7,
        live_tokens=20,
        **options,
    )
    logged = fit(module, data())
    model = naive_model()
    before = parameters(model)
    dense.train(model, data(), reference=copy.deepcopy(model))
    got, expected = parameters(module.policy), parameters(model)
    for name in expected:
        torch.testing.assert_close(got[name], expected[name], atol=2e-6, rtol=0)
    assert max(float((p - before[name]).abs().max()) for name, p in expected.items()) > 1e-3
    assert all(set(module.algorithm.metrics) - {"correction_square"} <= step.keys() for step in logged)


def test_all_objectives_are_trained_here() -> None:
    assert {dense.objective for _, dense, _ in CASES.values()} == set(OBJECTIVES)


def test_with_one_step_a_batch_the_proximal_policy_costs_no_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    passes = []
    run = RankWork.outputs
    monkeypatch.setattr(RankWork, "outputs", lambda *a, **k: passes.append(1) or run(*a, **k))
    for options, count in (({}, 0), ({"epochs": 2}, 1), ({"epochs": 2, "proximal": "interpolated"}, 0)):
        passes.clear()
        fit(PolicyModule(source(), optimizer=sgd, objective="decoupled_ppo", **options), [make_batch()])  # type: ignore[arg-type]
        assert len(passes) == count


def test_an_effective_sample_size_is_logged_with_a_correction() -> None:
    batch = stale()[0]
    options: Options = {"correction": "truncated", "correction_options": {"cap": 1.5}}
    [step] = fit(PolicyModule(source(), optimizer=sgd, **options), [batch])
    model = naive_model()
    with torch.no_grad():
        now = Dense()._run(model, None, None, batch, range(len(batch)))["logprobs"]
    ratio = (now - batch.behavior_logprobs)[batch.loss_mask].double().exp()
    weights = ratio.clamp(max=1.5)
    assert step["correction_weight"] == pytest.approx(float(weights.mean()), rel=1e-4)
    assert step["correction_ess"] == pytest.approx(float(weights.mean() ** 2 / weights.square().mean()), rel=1e-4)
    assert step["correction_cut"] == pytest.approx(float((ratio > 1.5).double().mean()))
    assert "correction_square" not in step


def test_penalties_are_logged_by_episode_and_the_reward_as_it_is() -> None:
    batch = make_batch()
    options = {"max_tokens": 3, "buffer_tokens": 2}
    long = Regulariser("overlong", 0.5, where="reward", options=options)
    steps = fit(PolicyModule(source(), optimizer=sgd, regularisers=[long], epochs=2), [batch])
    tokens: dict[int, int] = {}
    for episode, mask in zip(batch.episode_ids.tolist(), batch.split(batch.loss_mask)):
        tokens[episode] = tokens.get(episode, 0) + int(mask.sum())
    cost = sum(min(max((count - 1) / 2, 0.0), 1.0) for count in tokens.values())
    assert steps[0]["penalty/overlong"] == pytest.approx(0.5 * cost / 9) and "penalty/overlong" not in steps[1]
    rewards = {int(e): float(r) for e, r in zip(batch.episode_ids, batch.rewards)}
    assert steps[0]["reward"] == pytest.approx(sum(rewards.values()) / 9)


def test_what_is_said_of_pairs_weighs_as_many_tokens_as_they_have_alike(tmp_path: Any) -> None:
    """Two batches of as many steps each, of unequal numbers of pairs, of which no two are as long."""
    naive_model(1).save_pretrained(tmp_path)
    made = [make_batch(k, groups=groups, episodes=2, recorded=False) for k, groups in enumerate((3, 5))]
    module = PolicyModule(
        source(),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.0),
        objective="dpo",
        reference=ModelSource(str(tmp_path)),
        minibatches=2,
    )
    steps = fit(module, made)
    for k, batch in enumerate(made):
        margins, lengths = _margins(batch)
        pairs = range(len(margins))
        found = [(step["margin"], step["preferred"], step["loss"]) for step in steps[2 * k : 2 * k + 2]]

        def means(some: Iterable[int], margins: torch.Tensor = margins) -> tuple[float, ...]:
            said = margins[list(some)]
            return float(said.mean()), float((said > 0).double().mean()), float(-logsigmoid(said).mean())

        splits = [
            (means(some), means(set(pairs) - set(some)))
            for n in range(1, len(pairs))
            for some in combinations(pairs, n)
        ]
        assert any(split == (pytest.approx(found[0], rel=1e-4), pytest.approx(found[1], rel=1e-4)) for split in splits)
        by_tokens = float((margins * lengths).sum() / lengths.sum())
        assert by_tokens != pytest.approx(float(margins.mean()), rel=1e-2)


def _margins(batch: RolloutBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """Of each pair: 0.1 (drift of the better episode - that of the other), float64, and its trained tokens."""
    policy, reference = naive_model(), naive_model(1)
    drift, rewards, length = torch.zeros(3, len(set(batch.episode_ids.tolist())), dtype=torch.float64)
    with torch.no_grad():
        for i, episode in enumerate(batch.episode_ids.tolist()):
            mask = batch.split(batch.loss_mask)[i]
            apart = naive_outputs(policy, batch, i)[0] - naive_outputs(reference, batch, i)[0]
            drift[episode] += apart[mask].double().sum()
            length[episode] += mask.sum()
            rewards[episode] = batch.rewards[i]
    first, second = drift.view(-1, 2).unbind(1)
    better = (rewards[::2] - rewards[1::2]).sign()
    return 0.1 * better * (first - second), length.view(-1, 2).sum(1)


def test_a_pair_that_is_none_names_its_group() -> None:
    batch = make_batch(groups=2, episodes=3)
    with pytest.raises(BatchError, match=r"group 0 has 3 episodes.*dpo needs exactly two"):
        fit(PolicyModule(source(), optimizer=sgd, objective="dpo", reference="initial"), [batch])


def test_a_pair_that_a_penalty_ties_costs_itself_alone() -> None:
    """The second episodes have 9 tokens and lose 1, the first ones 2 and 3."""
    batch = make_batch(groups=2, episodes=2)
    batch.rewards[:] = torch.tensor([0.0, 1.0, 0.0, 2.0])[batch.episode_ids]
    long = Regulariser("overlong", 1.0, "reward", {"max_tokens": 9, "buffer_tokens": 5})
    module = PolicyModule(source(), optimizer=sgd, objective="dpo", reference="initial", regularisers=[long])
    [step] = fit(module, [batch])
    assert (step["tied"], step["loss"]) == (0.5, pytest.approx(math.log(2) / 2)) and step["grad_norm"] > 0


def test_a_group_of_one_is_a_matter_of_the_batch() -> None:
    """Whatever step of it the group comes into."""
    whole = make_batch(groups=2, episodes=3)
    lone = whole.group_ids == 1
    batch = whole.select((~lone | (whole.episode_ids == whole.episode_ids[lone][0])).nonzero().flatten())
    module = PolicyModule(source(), optimizer=sgd, objective="tba", reference="initial", minibatches=2)
    losses = sorted(step["loss"] for step in fit(module, [batch]))
    assert losses[0] == 0.0 < losses[1]
    with pytest.raises(BatchError, match=r"single episode, as all others: tba compares.*group_size of at least 2"):
        fit(PolicyModule(source(), optimizer=sgd, objective="tba", reference="initial"), [make_batch(episodes=1)])


def test_pairs_stay_together_where_there_are_fewer_than_minibatches() -> None:
    module = PolicyModule(source(), optimizer=sgd, objective="dpo", reference="initial", minibatches=3)
    steps = fit(module, [make_batch(groups=2, episodes=2)])
    assert sorted("margin" in step for step in steps) == [False, True, True]
