"""Columns beside a token's own: sums over them and their gradients are dense autograd's, in every plan, and what is
collected as likeliest is what the model alone finds so."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from app.tree import Likeliest, PrefixTree, SoftTargets, TreeEngine
from tests.app.tree import models, oracle
from tests.app.tree.cases import VOCABULARY, Case, cases
from tests.app.tree.losses import KINDS, SequenceLoss
from tests.app.tree.parity import as_tensor, build, masked_block, take_grads

EXAMPLES = settings.default.max_examples
FEW = settings(max_examples=EXAMPLES // 6)


def beside(case: Case, count: int) -> list[SoftTargets]:
    """Of each token `count` columns and weights that its prefix alone decides, as a teacher's do."""
    found = []
    for tokens in case.sequences:
        ids, weights = [], []
        for at in range(len(tokens)):
            random = np.random.default_rng([case.seed, *tokens[:at].tolist()])
            ids.append(random.permutation(VOCABULARY)[:count])
            weights.append(random.random(count) * 2 / count)
        found.append(SoftTargets(torch.tensor(np.array(ids)), torch.tensor(np.array(weights))))
    return found


def joined(rows: list[SoftTargets]) -> SoftTargets:
    return SoftTargets(torch.cat([one.ids for one in rows]), torch.cat([one.weights for one in rows]))


def dense(model: Any, case: Case, i: int, head: Any, soft: SoftTargets) -> Any:
    """Columns of one sequence run alone, by autograd through all of its logits."""
    temperature = case.temperatures[i] if case.temperatures else 1.0
    scored = case.scored and case.scored[i]
    out = oracle.dense_sequence(model, case.sequences[i], scored, temperature, head)
    logits = model(input_ids=torch.from_numpy(case.sequences[i])[None], use_cache=False).logits[0, :-1]
    logp = torch.log_softmax(logits / temperature, -1)
    sums = (logp.gather(-1, soft.ids[1:]) * soft.weights[1:]).sum(-1)
    mask = torch.ones(len(sums), dtype=torch.bool) if scored is None else torch.from_numpy(scored)[1:]
    return SimpleNamespace(**vars(out), soft=torch.cat([sums.new_zeros(1), torch.where(mask, sums, 0.0)]))


@pytest.mark.parametrize("name", models.FLOAT64_CLEAN)  # a bare projection, and one with a bias
@settings(FEW)
@given(
    case=cases(),
    want=st.sampled_from([("soft",), ("logprobs", "soft"), ("entropy", "soft"), ("logprobs", "entropy", "soft")]),
    kind=st.sampled_from(sorted(KINDS)),
    head_tokens=st.sampled_from([1, 4, "auto"]),
    count=st.integers(1, 5),
)
def test_backward_float64(
    name: str, case: Case, want: tuple[str, ...], kind: str, head_tokens: Any, count: int
) -> None:
    model, head = models.shared(name, torch.float64)
    rows = beside(case, count)
    loss, named = SequenceLoss(kind, case.lengths, case.seed, want), oracle.parameters(model)
    expected = {parameter: torch.zeros_like(p) for parameter, p in named.items()}
    total = torch.zeros((), dtype=torch.float64)
    for i in range(len(case.sequences)):
        one = loss(dense(model, case, i, head, rows[i]), i)
        total += one.detach()
        if one.requires_grad:
            for parameter, grad in zip(named, torch.autograd.grad(one, list(named.values()), allow_unused=True)):
                expected[parameter] += 0 if grad is None else grad
    take_grads(model)
    with masked_block(3):
        engine = TreeEngine(
            model, case.chunk_tokens, case.live_tokens, value_head=head, head_tokens=head_tokens, self_check=False
        )
        temperatures = as_tensor(case.temperatures)
        got = engine.backward(build(case), loss, want=want, temperatures=temperatures, soft=joined(rows))
    assert abs(got - float(total)) <= 1e-9 * max(1.0, abs(float(total))) * len(case.sequences)
    error, where = oracle.relative_error(take_grads(model), expected)
    assert error <= 1e-9, where


@settings(FEW)
@given(case=cases(), count=st.sampled_from([1, 3, VOCABULARY]), dense=st.booleans())
def test_likeliest(case: Case, count: int, dense: bool) -> None:
    model, head = models.shared("starcoder2", torch.float64)
    tree, likeliest = build(case), Likeliest(count)
    temperatures = as_tensor(case.temperatures)
    with masked_block(3):
        engine = TreeEngine(model, case.chunk_tokens, case.live_tokens, value_head=head, self_check=False)
        engine.dense = dense  # as after a self-check that failed: of another tree than the one given
        engine.forward(tree, ("logprobs", "values"), temperatures, likeliest)
    ids, logprobs = likeliest.found()
    for i, (columns, values) in enumerate(zip(ids.split(case.lengths), logprobs.split(case.lengths), strict=True)):
        with torch.no_grad():
            logits = model(input_ids=torch.from_numpy(case.sequences[i])[None]).logits[0, :-1]
        logp = torch.log_softmax(logits / (case.temperatures[i] if case.temperatures else 1.0), -1)
        scored = np.ones(len(columns), bool) if case.scored is None else case.scored[i].copy()
        scored[0] = False
        at = torch.from_numpy(np.flatnonzero(scored))
        torch.testing.assert_close(values[at], logp[at - 1].topk(count).values, atol=1e-9, rtol=0)
        torch.testing.assert_close(logp[at - 1].gather(-1, columns[at]), values[at], atol=1e-9, rtol=0)
        assert not values[torch.from_numpy(~scored)].any()


def test_the_first_that_scores_a_shared_token_decides() -> None:
    model, _ = models.shared("starcoder2", torch.float64)
    tree = PrefixTree.build([[1, 2, 3], [1, 2, 4]], scored=[[False, False, True], [False, True, True]])
    ids = torch.arange(6).unsqueeze(-1)
    out = TreeEngine(model).forward(tree, ("soft",), soft=SoftTargets(ids, torch.ones(6, 1)))
    assert out.soft is not None
    expected = dense(model, SimpleNamespace(**CASE), 0, None, SoftTargets(ids[3:], torch.ones(3, 1)))
    assert out.soft[0][1] == 0 and float(out.soft[1][1]) == pytest.approx(float(expected.soft[1]))


CASE = {"sequences": [np.array([1, 2, 4])], "scored": None, "temperatures": None}


def test_what_does_not_fit_is_refused() -> None:
    model, _ = models.shared("starcoder2", torch.float64)
    tree, engine = PrefixTree.build([[1, 2, 3]]), TreeEngine(model, self_check=False)
    good = SoftTargets(torch.zeros(3, 2, dtype=torch.int64), torch.ones(3, 2))
    with pytest.raises(ValueError, match=r"'soft' and soft=SoftTargets\(...\) go together"):
        engine.forward(tree, ("logprobs", "soft"))
    with pytest.raises(ValueError, match="go together"):
        engine.backward(tree, lambda out, i: out.logprobs.sum(), soft=good)
    with pytest.raises(ValueError, match="2 rows, but the tree's sequences have 3 tokens"):
        engine.forward(tree, ("soft",), soft=good[:2])
    with pytest.raises(ValueError, match=f"outside of the vocabulary of {VOCABULARY}"):
        engine.forward(tree, ("soft",), soft=SoftTargets(good.ids + VOCABULARY, good.weights))
    with pytest.raises(ValueError, match="one row a token"):
        SoftTargets(good.ids, good.weights[:, :1])
    with pytest.raises(ValueError, match="collects beside 'logprobs'"):
        engine.forward(tree, ("entropy",), soft=Likeliest(2))
    with pytest.raises(ValueError, match="99 columns, must be 1 to"):
        engine.forward(tree, soft=Likeliest(99))
