"""Objectives, corrections and regularisers against naive float64 Python (`naive_objectives`); gradients against finite
differences; the edges: overflowing ratios, one-token answers, nothing trained."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from app.batch import BatchError
from app.functions import Choice, choose
from modules.algorithm import STEP_INPUTS, TOKEN_INPUTS
from modules.corrections import CORRECTIONS
from modules.objectives import AGGREGATIONS, OBJECTIVES, token_weights
from modules.regularisers import REGULARISERS, k1, k2, k3
from tests.modules.objectives import naive_objectives as naive
from tests.modules.objectives.naive_objectives import Case, random_case

REGISTRIES = {"objective": OBJECTIVES, "correction": CORRECTIONS, "regularisers": REGULARISERS}
OBJECTIVE_CASES: list[tuple[str, str, dict[str, Any]]] = [
    ("objective", "ppo_clip", {}),
    ("objective", "ppo_clip", {"clip_low": 0.0, "clip_high": 0.0}),
    ("objective", "ppo_clip", {"clip_low": 1.0, "clip_high": 3.0, "dual_clip": 1.1}),
    ("objective", "dapo", {}),
    ("objective", "decoupled_ppo", {}),
    ("objective", "decoupled_ppo", {"weight_cap": 1.2, "over_cap": "clamp"}),
    ("objective", "decoupled_ppo", {"weight_cap": 1.2}),
    ("objective", "decoupled_ppo", {"weight_cap": None}),
    ("objective", "gspo", {}),
    ("objective", "gspo", {"clip_low": 0.2, "clip_high": 0.2}),
    ("objective", "cispo", {}),
    ("objective", "cispo", {"clip_low": 0.1, "clip_high": 0.1}),
    ("objective", "sapo", {}),
    ("objective", "sapo", {"tau_pos": 2.0, "tau_neg": 0.5}),
    ("objective", "m2po", {}),
    ("objective", "m2po", {"clip_low": 0.0, "clip_high": 0.0}),
    ("objective", "m2po", {"clip_low": 0.01, "clip_high": 0.01, "threshold": 1e-4}),
    ("objective", "m2po", {"threshold": 10.0}),
    *(("objective", "m2po", {"tokens": "all", **more}) for more in ({}, {"threshold": 1e-4}, {"threshold": 10.0})),
    ("objective", "reinforce", {}),
    ("objective", "sft", {}),
    ("objective", "tba", {}),
    ("objective", "tba", {"beta": 1.0}),
    ("objective", "dpo", {}),
    ("objective", "dpo", {"beta": 1.0, "label_smoothing": 0.2}),
]
WEIGHT_CASES: list[tuple[str, str, dict[str, Any]]] = [
    *(("correction", "truncated", {"level": level, "cap": 1.1}) for level in ("token", "sequence", "geometric")),
    ("correction", "truncated", {}),
    *(("correction", "masked", {"level": x, "low": 0.9, "high": 1.2}) for x in ("token", "sequence", "geometric")),
    ("correction", "masked", {}),
    *(("regularisers", "kl", {"estimator": estimator}) for estimator in ("k1", "k2", "k3")),
    ("regularisers", "kl_weighted", {}),
    ("regularisers", "entropy", {}),
    ("regularisers", "overlong", {"max_tokens": 3, "buffer_tokens": 2}),
    ("regularisers", "overlong", {"max_tokens": 2, "buffer_tokens": 2}),
]


def chosen(kind: str, name: str, options: dict[str, Any]) -> Choice:
    return choose(kind, name, options, REGISTRIES[kind], (*TOKEN_INPUTS, *STEP_INPUTS, "turns"))


def values(result: Any) -> tuple[Tensor, dict[str, Tensor]]:
    return result if isinstance(result, tuple) else (result, {})


@pytest.mark.parametrize("drift", [0.05, 0.5])
@pytest.mark.parametrize(("kind", "name", "options"), OBJECTIVE_CASES + WEIGHT_CASES, ids=str)
def test_equals_naive_floats(kind: str, name: str, options: dict[str, Any], drift: float) -> None:
    for seed in range(5):
        case = random_case(seed, drift)
        inputs = case.inputs()
        found, stats = values(chosen(kind, name, options)(inputs))
        expected = torch.tensor([x for row in getattr(naive, name)(case, **options) for x in row]).double()
        torch.testing.assert_close(found[inputs["mask"]].double(), expected, rtol=1e-6, atol=1e-7)
        assert all(value.shape == found.shape for value in stats.values())


@pytest.mark.parametrize(("kind", "name", "options"), OBJECTIVE_CASES, ids=str)
def test_gradient(kind: str, name: str, options: dict[str, Any]) -> None:
    """Of the weighted sum, by its own default aggregation, against finite differences of the naive floats. (A stopped
    gradient is a constant in them.)"""
    case = random_case(1, 0.3)
    inputs = case.inputs()
    inputs["logprobs"].requires_grad_()
    choice = chosen(kind, name, options)
    values(choice(inputs))[0][inputs["mask"]].sum().backward()
    grad, step = inputs["logprobs"].grad, 1e-6
    assert grad is not None
    grads = iter(grad[inputs["mask"]].tolist())
    for row in range(len(case.logprobs)):
        for t in range(len(case.logprobs[row])):
            got = next(grads)
            expected = (_moved(name, case, options, row, t, step) - _moved(name, case, options, row, t, -step)) / (
                2 * step
            )
            assert got == pytest.approx(expected, rel=1e-4, abs=1e-6), (row, t)
    assert float(grad[~inputs["mask"]].abs().max()) == 0


def _moved(name: str, case: Case, options: dict[str, Any], row: int, t: int, by: float) -> float:
    """The naive loss with one log-probability moved, what has no gradient held."""
    other = copy.deepcopy(case)
    other.logprobs[row][t] += by
    if name == "cispo":  # the weight is a constant
        weights = [
            [-loss / (a * logp) for loss, a, logp in zip(*rows)]
            for rows in zip(naive.cispo(case, **options), case.advantages, case.logprobs)
        ]
        return sum(-w * a * logp for rows in zip(weights, case.advantages, other.logprobs) for w, a, logp in zip(*rows))
    if name == "m2po" and options.get("tokens") != "all":  # its cap is a constant
        options = {**options, "cap": naive.m2po_cap(case, **options)}
    if name == "gspo":  # GSPO-token: the gradient of sum_t is len * mean; a token's ratio moves its own term alone
        drift = [a - b for a, b in zip(case.logprobs[row], case.old[row])]
        ratio = math.exp(sum(drift) / len(drift)) * math.exp(by)
        low, high = (options.get(key, default) for key, default in (("clip_low", 3e-4), ("clip_high", 4e-4)))
        a = case.advantages[row][t]
        return -min(ratio * a, min(max(ratio, 1 - low), 1 + high) * a)
    if name == "tba":  # log Z is a constant
        beta = options.get("beta", 0.05)
        before, after = naive._drifts(case), naive._drifts(other)
        group, reward = dict(zip(case.episodes, case.groups)), dict(zip(case.episodes, case.rewards))
        total = 0.0
        for episode, tokens in zip(case.episodes, case.logprobs):
            peers = [e for e in before if group[e] == group[episode]]
            log_z = sum(reward[e] / beta - before[e] for e in peers) / len(peers)
            total += len(tokens) * (log_z + after[episode] - reward[episode] / beta) ** 2
        return total
    return sum(x for losses in getattr(naive, name)(other, **options) for x in losses)


def test_gspo_gradient_is_the_papers() -> None:
    """One advantage a sequence, mean over the sequence: s A (1 / length) for each token (GSPO, eq. 10), or 0."""
    case = random_case(3, 0.3)
    case.advantages = [[row[0]] * len(row) if row else [] for row in case.advantages]
    inputs = case.inputs()
    inputs["logprobs"].requires_grad_()
    losses, stats = OBJECTIVES["gspo"](
        *(inputs[name] for name in ("logprobs", "old", "advantages", "mask", "cu_seqlens")), clip_low=0.1, clip_high=0.1
    )
    counts = inputs["cu_seqlens"].diff() - torch.tensor(case.padding)
    (losses * inputs["mask"] / counts.clamp(min=1).repeat_interleave(inputs["cu_seqlens"].diff())).sum().backward()
    expected = []
    for logps, olds, advantages in zip(case.logprobs, case.old, case.advantages):
        mean = sum(a - b for a, b in zip(logps, olds)) / max(len(logps), 1)
        s = math.exp(mean)
        cut = any((a > 0 and s > 1.1) or (a < 0 and s < 0.9) for a in advantages[:1])
        expected += [0.0 if cut else -s * a / len(logps) for a in advantages]
    grad = inputs["logprobs"].grad
    assert grad is not None and 0 < int(stats["clip_fraction"][inputs["mask"]].sum()) < len(expected)
    torch.testing.assert_close(grad[inputs["mask"]], torch.tensor(expected).double(), rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("kind", ["ppo_clip", "dapo", "gspo", "cispo", "sapo"])
def test_on_policy_the_gradient_is_the_policy_gradient(kind: str) -> None:
    """At ratio 1 all of them are REINFORCE."""
    case = random_case(2)
    case.old = case.logprobs
    case.advantages = [[row[0]] * len(row) if row else [] for row in case.advantages]
    inputs = case.inputs()
    inputs["logprobs"].requires_grad_()
    values(chosen("objective", kind, {})(inputs))[0][inputs["mask"]].sum().backward()
    grad = inputs["logprobs"].grad
    assert grad is not None
    torch.testing.assert_close(grad[inputs["mask"]], -inputs["advantages"][inputs["mask"]], rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize(("kind", "name", "options"), OBJECTIVE_CASES + WEIGHT_CASES, ids=str)
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_ratios_that_overflow_stay_finite(kind: str, name: str, options: dict[str, Any], sign: float) -> None:
    case = random_case(0)
    inputs = case.inputs(torch.float32)
    inputs["logprobs"] = torch.where(inputs["advantages"] > 0, 0.0, -1000.0).requires_grad_()
    inputs["old"] = torch.where(torch.arange(len(inputs["old"])) % 2 == 0, -1000.0, 0.0)
    inputs["advantages"] = torch.full_like(inputs["old"], sign)
    found, _ = values(chosen(kind, name, options)(inputs))
    assert torch.isfinite(found).all()
    if found.requires_grad:
        found.sum().backward()
        grad = inputs["logprobs"].grad
        assert grad is not None and torch.isfinite(grad).all()


@pytest.mark.parametrize(("kind", "name", "options"), OBJECTIVE_CASES + WEIGHT_CASES, ids=str)
def test_nothing_trained(kind: str, name: str, options: dict[str, Any]) -> None:
    inputs = random_case(0).inputs()
    inputs["mask"] = torch.zeros_like(inputs["mask"])
    found, stats = values(chosen(kind, name, options)(inputs))
    assert all(torch.isfinite(x.double()).all() for x in (found, *stats.values()))


def test_clip_fraction_is_where_the_gradient_is_cut() -> None:
    for name in ("ppo_clip", "dapo", "gspo", "m2po"):
        inputs = random_case(4, 0.5).inputs()
        inputs["logprobs"].requires_grad_()
        losses, stats = values(chosen("objective", name, {})(inputs))
        losses[inputs["mask"]].sum().backward()
        grad = inputs["logprobs"].grad
        assert grad is not None
        cut = stats["clip_fraction"][inputs["mask"]]
        assert torch.equal(cut, grad[inputs["mask"]] == 0) and 0 < int(cut.sum()) < len(cut), name


def test_m2po_leaves_the_tokens_alone_that_come_back() -> None:
    """log r of 2 with A < 0 and of -0.8 with A > 0 are far off and on their way back: the authors' code keeps them."""
    old = torch.zeros(4, dtype=torch.float64)
    advantages, mask = torch.tensor([1.0, 1.0, -1.0, 1.0]).double(), torch.ones(4, dtype=torch.bool)
    grads = {}
    for tokens in ("harmful", "all"):
        logp = torch.tensor([0.0, 0.05, 2.0, -0.8], dtype=torch.float64, requires_grad=True)
        losses, stats = OBJECTIVES["m2po"](logp, old, advantages, mask, tokens=tokens)
        losses.sum().backward()
        assert logp.grad is not None
        grads[tokens] = logp.grad
        assert stats["clip_fraction"].tolist() == [False, False, *[tokens == "all"] * 2]
    torch.testing.assert_close(grads["harmful"], -advantages * torch.tensor([0.0, 0.05, 2.0, -0.8]).double().exp())
    assert grads["all"].tolist()[2:] == [0.0, 0.0]


def test_m2po_caps_where_the_moment_of_harmful_tokens_meets_the_budget() -> None:
    """Harmful: 0.1, 0.3, 1.0, 1.2. Capped at t the sum is 0.1 + 2 t^2 = 4 x 0.0975 where t^2 = 0.145; their own
    budget, whatever the many tokens that come back do."""
    logp = torch.tensor([0.1, 0.3, 1.0, -1.2, *[-3.0] * 20], dtype=torch.float64)
    advantages = torch.tensor([1.0, 1.0, 1.0, -1.0, *[1.0] * 20]).double()
    losses, stats = OBJECTIVES["m2po"](
        logp,
        torch.zeros_like(logp),
        advantages,
        torch.ones(24, dtype=torch.bool),
        threshold=0.0975,
        clip_low=0.0,
        clip_high=0.0,
    )
    cap = math.sqrt(0.145)
    assert losses[:4].tolist() == pytest.approx([-math.exp(0.1), -math.exp(0.3), -math.exp(cap), math.exp(-cap)])
    assert stats["clip_fraction"].tolist() == [False, False, True, True, *[False] * 20]


def test_dual_clip_bounds_the_loss_of_unlikely_bad_tokens() -> None:
    """Ye et al. 2020: A = -1 and r = e^3 would cost 20; with c = 3 it costs 3, without gradient."""
    logp = torch.tensor([3.0], requires_grad=True)
    losses, stats = OBJECTIVES["ppo_clip"](logp, torch.zeros(1), -torch.ones(1), dual_clip=3.0)
    losses.sum().backward()
    assert losses.tolist() == [3.0] and stats["clip_fraction"].tolist() == [True] and logp.grad.tolist() == [0.0]


def test_overlong_of_the_paper() -> None:
    """DAPO's setting: 20,480 tokens at most, a buffer of 4,096: half the penalty at 18,432."""
    lengths = torch.tensor([16384, 18432, 20480, 21000])
    mask = torch.ones(int(lengths.sum()), dtype=torch.bool)
    cost = REGULARISERS["overlong"](
        mask,
        torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]),
        torch.arange(4),
        torch.zeros(4, dtype=torch.int64),
        20480,
        4096,
    )
    assert cost[lengths.cumsum(0) - 1].tolist() == [0.0, 0.5, 1.0, 1.0] and float(cost.sum()) == 2.5


def test_overlong_counts_the_turns_of_an_episode_together() -> None:
    """An episode of 2, 0 and 3 tokens, its turns not in order, and one of 4: at most 5, from 1 on."""
    lengths = torch.tensor([3, 4, 1, 2])
    mask = torch.tensor([True] * 3 + [True] * 4 + [False] + [True] * 2)
    cost = REGULARISERS["overlong"](
        mask,
        torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]),
        torch.tensor([8, 3, 8, 8]),
        torch.tensor([1, 0, 2, 0]),
        5,
        4,
    )
    assert cost.tolist() == [0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.75, 0.0, 0.0, 0.0]


def test_dpo_without_drift_is_log_two_and_prefers_nobody() -> None:
    case = random_case(0)
    case.reference = case.logprobs
    inputs = case.inputs()
    losses, stats = values(chosen("objective", "dpo", {})(inputs))
    torch.testing.assert_close(losses, torch.full_like(losses, math.log(2)))
    assert not stats["preferred"].any()


@pytest.mark.parametrize("label_smoothing", [0.0, 0.2])
def test_a_tied_pair_teaches_nothing(label_smoothing: float) -> None:
    """0.1 + 0.2 is 0.3 here; the other pairs are as without it."""
    dpo, inputs = chosen("objective", "dpo", {"label_smoothing": label_smoothing}), random_case(0).inputs()
    untied, _ = values(dpo(inputs))
    first = inputs["groups"] == inputs["groups"][0]
    second = inputs["episodes"] == inputs["episodes"][0]
    inputs["rewards"] = inputs["rewards"].double().masked_fill(first, 0.3).masked_fill(second, 0.1 + 0.2)
    inputs["logprobs"].requires_grad_()
    losses, stats = values(dpo(inputs))
    losses.sum().backward()
    here = first.repeat_interleave(inputs["cu_seqlens"].diff())
    assert torch.equal(stats["tied"], here) and not losses[here].any() and not stats["margin"][here].any()
    torch.testing.assert_close(losses[~here], untied[~here])
    grad = inputs["logprobs"].grad
    assert grad is not None and not grad[here].any() and bool(grad[~here].any())


def test_what_is_no_pair_is_refused() -> None:
    inputs = random_case(0).inputs()
    inputs["groups"] = torch.full_like(inputs["groups"], 3)
    with pytest.raises(BatchError, match="group 3 has 8 episodes in one optimizer step; dpo needs exactly two"):
        chosen("objective", "dpo", {})(inputs)


def test_tba_reports_how_far_episodes_are_from_balance() -> None:
    """The signed distances of a group have mean 0, however large they are."""
    sizes = []
    for beta in (1.0, 0.1):
        inputs = random_case(0).inputs()
        losses, stats = values(chosen("objective", "tba", {"beta": beta})(inputs))
        torch.testing.assert_close(stats["log_z_gap"].square(), losses)
        sizes.append(float(stats["log_z_gap"].mean()))
    assert 0.1 < sizes[0] < sizes[1]


def test_a_clipped_weight_of_cispo_keeps_its_gradient() -> None:
    inputs = random_case(4, 0.5).inputs()
    inputs["logprobs"].requires_grad_()
    losses, stats = values(chosen("objective", "cispo", {"clip_high": 0.1})(inputs))
    losses[inputs["mask"]].sum().backward()
    grad, clipped = inputs["logprobs"].grad, stats["weight_clipped"] & inputs["mask"]
    assert grad is not None and bool(clipped.any()) and "clip_fraction" not in stats
    torch.testing.assert_close(grad[clipped], -1.1 * inputs["advantages"][clipped])


def test_kl_estimators_estimate_the_divergence() -> None:
    p, q = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64), torch.tensor([0.4, 0.4, 0.2], dtype=torch.float64)
    exact = (p * (p / q).log()).sum()
    torch.testing.assert_close((p * k1(p.log(), q.log())).sum(), exact)
    torch.testing.assert_close((p * k3(p.log(), q.log())).sum(), exact)
    assert (p * k2(p.log(), q.log())).sum() == pytest.approx(float(exact), rel=0.1)
    assert torch.isfinite(k3(torch.tensor([-1000.0]), torch.tensor([0.0]))).all()


def test_aggregation_denominators() -> None:
    trained, episodes = torch.tensor([4, 0, 1, 5]), torch.tensor([3, 3, 7, 3])
    weights = {
        mode: token_weights(trained, mode, 8.0 if mode == "constant" else None, episodes) for mode in AGGREGATIONS
    }
    expected = {
        "token_mean": [1 / 10, 0, 1 / 10, 1 / 10],
        "sequence_mean": [1 / 16, 0, 1 / 2, 1 / 20],
        "episode_mean": [1 / 18, 0, 1 / 2, 1 / 18],
        "constant": [1 / 16, 0, 1 / 16, 1 / 16],
    }
    for mode, row in expected.items():
        torch.testing.assert_close(weights[mode], torch.tensor(row, dtype=torch.float64))


@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_an_episode_weighs_the_same_whole_and_split(mode: Any) -> None:
    """One turn of 4 tokens beside four turns of 4: as a sequence, and as four."""
    constant = 16.0 if mode == "constant" else None
    whole = torch.tensor([4, 16]) * token_weights(torch.tensor([4, 16]), mode, constant, torch.tensor([0, 1]))
    split = 4 * token_weights(torch.tensor([4] * 5), mode, constant, torch.tensor([0, 1, 1, 1, 1]))
    torch.testing.assert_close(torch.stack([split[0], split[1:].sum()]), whole)
    shares = {"token_mean": [0.2, 0.8], "constant": [0.125, 0.5]}
    assert whole.tolist() == pytest.approx(shares.get(mode, [0.5, 0.5]))


@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_a_step_without_trained_tokens_weighs_nothing(mode: Any) -> None:
    assert token_weights(torch.tensor([0, 0]), mode, 8.0, torch.tensor([0, 1])).tolist() == [0.0, 0.0]


@pytest.mark.parametrize(
    ("kind", "name", "options", "message"),
    [
        ("objective", "ppo_clip", {"clip_low": 1.5}, "objective_options.clip_low: .*, must be between 0 and 1"),
        ("objective", "gspo", {"clip_high": -0.1}, "objective_options.clip_high: .*, must be between 0 and 1000"),
        ("objective", "cispo", {"clip_high": 1e30}, "objective_options.clip_high: .*, must be between 0 and 1000"),
        ("objective", "m2po", {"tokens": "some"}, "objective_options.tokens: 'some', must be one of harmful, all"),
        (
            "objective",
            "m2po",
            {"tokens": "all", "clip_low": 0.1},
            "clip_low and clip_high have no effect with tokens=all",
        ),
        ("objective", "m2po", {"clip_low": 2.0}, "objective_options.clip_low: .*, must be between 0 and 1"),
        ("objective", "sapo", {"tau_pos": 1e30}, "objective_options.tau_pos: .*, must be above 0 and at most 4.85e.08"),
        ("objective", "ppo_clip", {"dual_clip": 1.0}, "objective_options.dual_clip: .*, must be above 1"),
        ("objective", "decoupled_ppo", {"over_cap": "drop"}, "objective_options.over_cap: 'drop', must be one of"),
        ("objective", "decoupled_ppo", {"weight_cap": 0.5}, "objective_options.weight_cap: .*, must be at least 1"),
        ("objective", "sapo", {"tau_neg": 0.0}, "objective_options.tau_neg: .*, must be above 0"),
        ("objective", "m2po", {"threshold": 0.0}, "objective_options.threshold"),
        ("objective", "tba", {"beta": 0.0}, "objective_options.beta"),
        ("objective", "dpo", {"beta": -1.0}, "objective_options.beta"),
        ("objective", "dpo", {"label_smoothing": 0.5}, "objective_options.label_smoothing"),
        ("correction", "truncated", {"cap": 0.5}, "correction_options.cap: .*, must be at least 1"),
        ("correction", "masked", {"low": 2.0}, "correction_options: low=2.0 and high=5.0 must enclose 1"),
        ("correction", "masked", {"level": "turn"}, "correction_options.level: 'turn', must be one of"),
        ("regularisers", "kl", {"estimator": "k4"}, "estimator: 'k4', must be one of k1, k2, k3"),
        ("regularisers", "overlong", {"max_tokens": 2, "buffer_tokens": 4}, "buffer_tokens=4 must be"),
    ],
)
def test_options_out_of_range(kind: str, name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        chosen(kind, name, options)(random_case(0).inputs())
