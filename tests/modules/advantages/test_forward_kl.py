"""The forward divergence from a teacher, on its likeliest tokens: training is a dense loop's, wherever the teacher is;
one that does not say what its likeliest tokens are is refused."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch

from app.batch import RolloutBatch
from app.tree import SoftTargets, TreeEngine
from modules import ModelSource, PolicyModule, Refresh, Regulariser, TeacherServer
from modules.advantages.teacher import TeacherLost, shown, views
from modules.algorithm import Algorithm
from modules.ranks import TEACHERS_VIEW, build_tree, likeliest_columns
from tests.app.tree import models
from tests.helpers.tiny_policy import (
    fit,
    make_batch,
    make_twins,
    naive_model,
    naive_outputs,
    naive_training,
    parameters,
    sgd,
    source,
)
from tests.modules.advantages.test_teacher import hinted, scorer, served, teacher, unheated
from tests.modules.models.test_reference import assert_same

K, COEF = 4, 0.7


def module(reference: Any, k: int = K, **options: Any) -> PolicyModule:
    """By the divergence alone: nothing else earns an advantage."""
    forward = [Regulariser("forward_kl", COEF, options={"k": k})]
    return PolicyModule(
        source(),
        optimizer=sgd,
        advantage="distill",
        objective="reinforce",
        regularisers=forward,
        reference=reference,
        **options,
    )


def distributions(model: Any, batch: RolloutBatch, i: int) -> torch.Tensor:
    """Log-probabilities [L - 1, V] of one sequence run alone: of what stands at 1, 2, ..."""
    logits = model(batch.sequences()[i][None]).logits[0, :-1]
    return torch.log_softmax(logits / float(batch.temperatures[i]), -1)


def naive_forward_kl(model: Any, batch: RolloutBatch, i: int, chosen: list[int], *, teacher: Any) -> torch.Tensor:
    masks = batch.split(batch.loss_mask)
    with torch.no_grad():
        likely = distributions(teacher, batch, i).topk(K, -1)
    logp = distributions(model, batch, i).gather(-1, likely.indices)
    each = (likely.values.exp() * (likely.values - logp)).sum(-1)
    return COEF * each[masks[i][1:]].sum() / sum(int(masks[j].sum()) for j in chosen)


@pytest.mark.parametrize("mode", ["dta", "disabled"])
def test_training_is_a_dense_loops(mode: Any, tmp_path: Path) -> None:
    there = teacher()
    there.save_pretrained(tmp_path)
    taught = module(ModelSource(str(tmp_path)), tree_training_mode=mode)
    data = [make_batch(k, temperatures=(1.0, 0.7)) for k in range(3)]
    logged = fit(taught, data)
    model = naive_model()
    loss = functools.partial(naive_forward_kl, teacher=there)
    naive_training(model, data, lambda batch, _: [list(range(len(batch)))], loss)
    assert_same(taught.policy, parameters(model), atol=1e-6)
    mask, columns = data[0].loss_mask, data[0].columns
    mass = sum(columns[name] for name in likeliest_columns(K)[K:])[mask].mean()
    assert logged[0]["teacher_mass"] == pytest.approx(float(mass), rel=1e-5) and 0.2 < mass < 1
    assert logged[0]["forward_kl"] * COEF == pytest.approx(logged[0]["loss"], rel=1e-5)
    assert logged[0]["forward_kl"] > logged[-1]["forward_kl"]


def with_likeliest(model: Any) -> Any:
    """`scorer`, which also says what SGLang says where `top_logprobs_num` asks for it."""
    plain = scorer(model)

    def answer(body: dict[str, Any], number: int) -> dict[str, Any]:
        found, first = plain(body, number), body["logprob_start_len"]
        with torch.no_grad():
            logp = model(torch.tensor(body["input_ids"])[None]).logits[0].log_softmax(-1)
        best = [row.topk(body["top_logprobs_num"]) for row in logp[first:-1]]
        rows = [[[p, t, None] for p, t in zip(one.values.tolist(), one.indices.tolist())] for one in best]
        found["meta_info"]["input_top_logprobs"] = [None, *rows]
        return found

    return answer


def test_a_server_teaches_as_a_model_here(tmp_path: Path) -> None:
    model = teacher()
    model.save_pretrained(tmp_path)
    here = module(ModelSource(str(tmp_path)), minibatches=2, epochs=2)
    fit(here, [unheated(k) for k in range(2)])
    with served(with_likeliest(model)) as (url, asked):
        there = module(TeacherServer(url, str(tmp_path)), minibatches=2, epochs=2)
        fit(there, [unheated(k) for k in range(2)])
    assert_same(there.policy, parameters(here.policy), atol=1e-6)
    assert {one["top_logprobs_num"] for one in asked} == {K} and len(asked) == 2 * len(unheated(0))


def broken(model: Any) -> Any:
    """`with_likeliest`, one of whose numbers is none."""
    good = with_likeliest(model)

    def answer(body: dict[str, Any], number: int) -> dict[str, Any]:
        found = good(body, number)
        found["meta_info"]["input_top_logprobs"][-1][0][0] = float("nan")
        return found

    return answer


@pytest.mark.parametrize("answers", [scorer, broken])
def test_a_server_without_likeliest_tokens_is_refused(answers: Any) -> None:
    with served(answers(teacher())) as (url, _), pytest.raises(TeacherLost, match="gives no 4 likeliest tokens"):
        TeacherServer(url, "there", max_concurrent=1).scores(unheated(0), K)


def test_a_richer_prompt_is_followed_in_whole_distributions() -> None:
    batch = hinted(0)
    taught = module("initial", reference_refresh=Refresh(every=1))
    fit(taught, [batch])
    seen, start = shown(batch), naive_model()
    assert seen is not None
    ids, probabilities = (
        torch.stack([batch.columns[name] for name in half], -1)
        for half in (likeliest_columns(K)[:K], likeliest_columns(K)[K:])
    )
    expected = [distributions(start, seen, i).topk(K, -1) for i in range(len(seen))]
    masks = [mask[1:] for mask in seen.split(seen.loss_mask)]
    values = torch.cat([one.values[mask] for one, mask in zip(expected, masks)])
    columns = torch.cat([one.indices[mask] for one, mask in zip(expected, masks)])
    torch.testing.assert_close(probabilities[batch.loss_mask], values.exp().detach(), atol=1e-5, rtol=0)
    assert torch.equal(ids[batch.loss_mask].long(), columns) and not ids[~batch.loss_mask].any()


@pytest.mark.parametrize("mode", ["dta", "sparse", "disabled"])
def test_equal_sequences_follow_each_its_own_teacher(mode: Any, tmp_path: Path) -> None:
    """What their teachers saw differs, so they share no token: training is a dense loop's, each by its own targets."""
    data = [make_twins(k) for k in range(2)]
    there = teacher()
    there.save_pretrained(tmp_path)
    taught = module(ModelSource(str(tmp_path)), tree_training_mode=mode)
    fit(taught, data)
    model = naive_model()

    def loss(model: Any, batch: RolloutBatch, i: int, chosen: list[int]) -> torch.Tensor:
        masks, seen = batch.split(batch.loss_mask), shown(batch)
        assert seen is not None
        with torch.no_grad():
            likely = distributions(there, seen, i).topk(K, -1)
        rows = seen.split(seen.loss_mask)[i][1:]
        values, ids = likely.values[rows], likely.indices[rows]
        logp = distributions(model, batch, i)[masks[i][1:]].gather(-1, ids)
        return COEF * (values.exp() * (values - logp)).sum() / sum(int(masks[j].sum()) for j in chosen)

    naive_training(model, data, lambda batch, _: [list(range(len(batch)))], loss)
    assert_same(taught.policy, parameters(model), atol=1e-6)


def test_they_are_each_others_only_where_their_teachers_saw_the_same() -> None:
    """In float64, against every row run alone: values and gradients."""
    batch, (model, _) = make_twins(0), models.shared("starcoder2", torch.float64)
    model.zero_grad()
    batch.add_column(TEACHERS_VIEW, views(batch))
    tree = build_tree(batch, "tree")
    assert build_tree(batch.without("columns"), "tree").num_tokens < tree.num_tokens < batch.num_tokens
    generator = torch.Generator().manual_seed(1)
    soft = SoftTargets(
        torch.stack([torch.randperm(17, generator=generator)[:K] for _ in range(batch.num_tokens)]),
        torch.rand(batch.num_tokens, K, generator=generator, dtype=torch.float64),
    )
    masks = batch.split(batch.loss_mask)
    found: dict[int, torch.Tensor] = {}

    def loss(out: Any, i: int) -> torch.Tensor:
        found[i] = out.soft.detach()[masks[i]]
        return (i + 1) * out.soft[masks[i]].sin().sum()

    TreeEngine(model).backward(tree, loss, want=("soft",), soft=soft)
    got = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    for i, (ids, weights) in enumerate(zip(batch.split(soft.ids), batch.split(soft.weights), strict=True)):
        logp = distributions(model, batch, i).gather(-1, ids[1:])
        alone = (weights[1:] * logp).sum(-1)[masks[i][1:]]
        torch.testing.assert_close(found[i], alone.detach(), atol=1e-9, rtol=0)
        ((i + 1) * alone.sin().sum()).backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(got[name], p.grad, atol=1e-9, rtol=0)


def test_the_other_direction_follows_each_its_own_teacher_too(tmp_path: Path) -> None:
    """There a teacher's log-probability is a sequence's own, whatever it shares."""
    data = [make_twins(k) for k in range(2)]
    there = teacher()
    there.save_pretrained(tmp_path)
    taught = PolicyModule(
        source(),
        optimizer=sgd,
        advantage="distill",
        objective="reinforce",
        regularisers=[Regulariser("kl", COEF, "reward", {"estimator": "k1"})],
        reference=ModelSource(str(tmp_path)),
    )
    fit(taught, data)
    assert taught.last_tree is not None and taught.last_tree.num_tokens < data[1].num_tokens // 3
    model = naive_model()

    def loss(model: Any, batch: RolloutBatch, i: int, chosen: list[int]) -> torch.Tensor:
        masks, seen = batch.split(batch.loss_mask), shown(batch)
        assert seen is not None
        with torch.no_grad():
            wanted = naive_outputs(there, seen, i)[0][seen.split(seen.loss_mask)[i]]
        logp = naive_outputs(model, batch, i)[0][masks[i]]
        sampled = batch.split(batch.behavior_logprobs)[i][masks[i]]
        return -COEF * ((wanted - sampled) * logp).sum() / sum(int(masks[j].sum()) for j in chosen)

    naive_training(model, data, lambda batch, _: [list(range(len(batch)))], loss)
    assert_same(taught.policy, parameters(model), atol=1e-6)


@pytest.mark.parametrize(
    ("regularisers", "said"),
    [
        ([Regulariser("forward_kl", 1.0, "reward")], "set where: loss"),
        ([Regulariser("forward_kl", 1.0, options={"k": 0})], "forward_kl: k"),
        ([Regulariser("forward_kl", 1.0)], "reference is missing: forward_kl compares"),
    ],
)
def test_what_makes_no_sense_is_refused(regularisers: list[Regulariser], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        PolicyModule(source(), optimizer=sgd, regularisers=regularisers)


def follows(soft: torch.Tensor, teacher_soft: torch.Tensor) -> torch.Tensor:
    return teacher_soft - soft


def follows_some(soft: torch.Tensor, teacher_soft: torch.Tensor, k: int = 5) -> torch.Tensor:
    return teacher_soft - soft


def test_a_cost_without_a_count_takes_that_of_the_others() -> None:
    ours, own = Regulariser("forward_kl", 1.0, options={"k": 3}), Regulariser(follows, 1e-9)
    assert Algorithm(regularisers=[ours, own]).likeliest == Algorithm(regularisers=[own, ours]).likeliest == 3
    assert Algorithm(regularisers=[own]).likeliest == 20 and Algorithm().likeliest == 0
    assert Algorithm(regularisers=[Regulariser(follows_some, 1.0)]).likeliest == 5, "its own default"
    with pytest.raises(ValueError, match=r"k: 3 of forward_kl and 5 of .*follows_some, and the reference is"):
        PolicyModule(
            source(), regularisers=[ours, Regulariser(follows_some, 1.0, options={"k": 5})], reference="initial"
        )


def test_more_tokens_than_the_vocabulary_has_are_refused_before_the_first_step() -> None:
    made = module("initial", k=18, reference_refresh=Refresh(every=1))
    with pytest.raises(ValueError, match=r"regularisers\.options\.k: 18 likeliest.*has 17: set k to 17 at most"):
        made.configure_model()
