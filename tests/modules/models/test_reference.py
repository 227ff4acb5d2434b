"""The reference policy follows, stays, is kept and is put away."""

from __future__ import annotations

import functools
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from app.strategies import DTAStrategy
from app.strategies.pieces import CheckpointMismatch
from modules import ActorCriticModule, ModelSource, PolicyModule, Refresh, Regulariser
from modules.models import ReferencePolicy, build_model
from modules.refusals.settings import check_own_tokens, check_same_tokens
from tests.helpers.recorded_samples import byte_tokenizer
from tests.helpers.tiny_policy import (
    CONFIG,
    Batches,
    Metrics,
    fit,
    make_batch,
    naive_grpo,
    naive_model,
    naive_outputs,
    naive_training,
    parameters,
    sgd,
    source,
    trainer,
)

make = functools.partial(
    PolicyModule, source(), optimizer=sgd, regularisers=[Regulariser("kl", 0.1)], reference="initial"
)


def assert_same(got: Any, expected: dict[str, torch.Tensor], atol: float = 0.0) -> None:
    for name, value in expected.items():
        torch.testing.assert_close(parameters(got)[name], value, atol=atol, rtol=0)


@pytest.mark.parametrize("ema", [0.0, 0.75])
def test_it_follows_every_second_batch(ema: float) -> None:
    data = [make_batch(k) for k in range(5)]
    expected = parameters(naive_model())
    policies = []
    for count in range(1, 6):
        module = make(reference_refresh=Refresh(2, ema))
        fit(module, data[:count])
        policies.append(parameters(module.policy))
        if count % 2 == 0:
            expected = {name: ema * old + (1 - ema) * policies[-1][name] for name, old in expected.items()}
        assert_same(module.reference.model, expected, atol=1e-6)
    if ema == 0:
        assert_same(module.reference.model, policies[3])


def test_a_checkpoint_has_what_was_refreshed(tmp_path: Any) -> None:
    data = [make_batch(k, version=max(0, k - 1)) for k in range(3)]
    options = {"reference_refresh": Refresh(2, 0.5)}
    whole, first, second = make(**options), make(**options), make(**options)
    fit(whole, data)
    torch.manual_seed(0)
    half = trainer()
    half.fit(first, Batches(data[:2]))  # the refresh falls on the batch of the checkpoint
    half.save_checkpoint(tmp_path / "half.ckpt")
    torch.manual_seed(123)
    trainer(max_epochs=2).fit(second, Batches(data[2:]), ckpt_path=tmp_path / "half.ckpt", weights_only=True)
    assert_same(second.reference.model, parameters(whole.reference.model))
    assert_same(second.policy, parameters(whole.policy), atol=1e-7)


@pytest.mark.parametrize(
    ("before", "now", "message"),
    [
        (
            {},
            {"reference": "other"},
            r"of another reference: 'reference\.model\.\S+' .*the reference that wrote",
        ),
        ({"reference": "other"}, {}, r"of another reference: .*\(model\.reference\)"),
        ({"model": source(hidden_size=24)}, {}, r"of another model: 'policy\.\S+' has shape .*\(model\.model\)"),
        ({"model": source(num_hidden_layers=3)}, {}, r"of another model: 'policy\.\S+' is .*\(model\.model\)"),
    ],
)
def test_a_checkpoint_of_another_reference_is_refused_by_that_name(
    tmp_path: Path, before: dict[str, Any], now: dict[str, Any], message: str
) -> None:
    """Where the policy differs too, as with the copy of another model, that is what is named."""
    build_model(source(num_hidden_layers=3)).save_pretrained(tmp_path / "other")
    other = {"reference": ModelSource(str(tmp_path / "other"))}
    options: dict[str, Any] = {"model": source(), "optimizer": sgd, "reference": "initial"}
    options["regularisers"] = [Regulariser("kl", 0.1)]
    runs = [PolicyModule(**{**options, **run, **(other if "reference" in run else {})}) for run in (before, now)]
    first = trainer(strategy=DTAStrategy())
    first.fit(runs[0], Batches([make_batch()]))
    first.save_checkpoint(tmp_path / "last.ckpt")
    with pytest.raises(CheckpointMismatch, match=message):
        trainer(max_epochs=2, strategy=DTAStrategy()).fit(
            runs[1], Batches([make_batch()]), ckpt_path=tmp_path / "last.ckpt", weights_only=True
        )


TEACHES: dict[str, Any] = {
    "advantage": "distill",
    "objective": "reinforce",
    "regularisers": [Regulariser("kl", 1.0, "reward", {"estimator": "k1"})],
}


def naive_distillation(model: Any, batch: Any, i: int, chosen: list[int], *, teacher: Any, task: float) -> torch.Tensor:
    """Minus the sum over trained tokens of (log q - log p + task A) log p, over the number of tokens."""
    masks, sampled = batch.split(batch.loss_mask), batch.split(batch.behavior_logprobs)
    logp, count = naive_outputs(model, batch, i)[0], sum(int(masks[j].sum()) for j in chosen)
    with torch.no_grad():
        wanted = naive_outputs(teacher, batch, i)[0]
    advantage = naive_grpo(batch, normalize_std=False)[i]
    total = torch.zeros(())
    for t in masks[i].nonzero()[:, 0].tolist():
        total = total - (wanted[t] - sampled[i][t] + task * advantage) * logp[t] / count
    return total


@pytest.mark.parametrize("task", [0.0, 0.5])
def test_a_teacher_of_another_size_is_followed_token_by_token(tmp_path: Any, task: float) -> None:
    """Three steps equal a naive dense loop, and what was read of the teacher is its own to 1e-5."""
    torch.manual_seed(7)
    teacher = build_model(source(num_hidden_layers=3, intermediate_size=40))
    teacher.save_pretrained(tmp_path)
    module = PolicyModule(
        source(), optimizer=sgd, advantage_options={"task": task}, reference=ModelSource(str(tmp_path)), **TEACHES
    )
    data = [make_batch(k) for k in range(3)]
    logged = fit(module, data)
    model = naive_model()
    loss = functools.partial(naive_distillation, teacher=teacher, task=task)
    naive_training(model, data, lambda batch, _: [list(range(len(batch)))], loss)
    assert_same(module.policy, parameters(model), atol=1e-6)
    for batch in data:
        for i, read in enumerate(batch.split(batch.columns["reference"])):
            mask = batch.split(batch.loss_mask)[i]
            torch.testing.assert_close(
                read[mask], naive_outputs(teacher, batch, i)[0].detach()[mask], atol=1e-5, rtol=0
            )
    first = data[0]
    apart = first.behavior_logprobs - first.columns["reference"]
    episodes = len(set(first.episode_ids.tolist()))
    assert logged[0]["penalty/kl"] == pytest.approx(float(apart[first.loss_mask].sum()) / episodes, rel=1e-4)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, "no teacher says what that is"),
        ({"regularisers": [Regulariser("kl", 1.0, "reward")], "reference": ModelSource("teacher")}, "estimator: k1"),
        (
            {"regularisers": [Regulariser("overlong", 1.0, "reward", {"max_tokens": 8, "buffer_tokens": 2})]},
            "reference: {path: DIR}",
        ),
        ({**TEACHES, "reference": "initial"}, "would teach the policy to be what it was"),
        (TEACHES, "reference is missing"),
    ],
)
def test_distillation_without_a_teacher_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        PolicyModule(source(), optimizer=sgd, **{"advantage": "distill", **options})


def test_data_of_another_tokenizer_than_the_models_is_refused(tmp_path: Any) -> None:
    for name in ("policy", "bare"):
        naive_model().save_pretrained(tmp_path / name)
    mine = byte_tokenizer()
    mine.save_pretrained(tmp_path / "policy")
    policy, bare = (ModelSource(str(tmp_path / name)) for name in ("policy", "bare"))
    wider = byte_tokenizer()
    wider.add_tokens(["zebra"])
    for tokenizer, model in ((mine, policy), (wider, policy), (None, policy), (mine, bare), (mine, source())):
        check_own_tokens(tokenizer, model)
    (tmp_path / "bare" / "tokenizer_config.json").write_text("{}")  # of which transformers makes a tokenizer
    check_own_tokens(mine, bare)
    vocabulary = mine.get_vocab()
    first, second = list(vocabulary)[:2]
    swapped = {**vocabulary, first: vocabulary[second], second: vocabulary[first]}
    other = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel(swapped)))
    with pytest.raises(ValueError, match=r"data.tokenizer: .* and \d+ in the tokenizer beside .*name that directory"):
        check_own_tokens(other, policy)


def test_a_teacher_with_another_tokenizer_is_refused(tmp_path: Any) -> None:
    mine, other = byte_tokenizer(), byte_tokenizer()
    other.add_tokens(["zebra"])
    for name, tokenizer in (("policy", mine), ("wider", other), ("bare", None), ("cut", mine)):
        naive_model().save_pretrained(tmp_path / name)
        if tokenizer is not None:
            tokenizer.save_pretrained(tmp_path / name)
    (tmp_path / "cut" / "tokenizer.json").write_text("{}")
    policy, wider, bare, cut = (ModelSource(str(tmp_path / name)) for name in ("policy", "wider", "bare", "cut"))
    check_same_tokens(None, policy, wider.path)  # a teacher may have more
    check_same_tokens(None, policy, bare.path)
    check_same_tokens(mine, wider, policy.path)  # the rollouts' tokenizer counts, not the one beside the weights
    for tokenizer, model in ((None, wider), (other, policy), (other, bare), (other, source())):
        with pytest.raises(ValueError, match=r"reference: .*policy2?' has another .*'zebra' is \d+ here and none"):
            check_same_tokens(tokenizer, model, (policy if model is not policy else _copy(tmp_path / "policy")).path)
    with pytest.raises(ValueError, match=r"the tokenizer beside .*cut' cannot be read|has no tokens"):
        check_same_tokens(mine, policy, cut.path)
    module = PolicyModule(wider, optimizer=sgd, reference=policy, **TEACHES)
    with pytest.raises(ValueError, match="take a model of the same family"):
        fit(module, [make_batch()])


def _copy(path: Path) -> ModelSource:
    return ModelSource(str(shutil.copytree(path, path.with_name(path.name + "2"), dirs_exist_ok=True)))


def test_an_average_below_float32_follows_exact_arithmetic() -> None:
    """Steps of a hundredth of the difference are less than half a digit of bfloat16, all of them."""
    policy = naive_model().bfloat16()
    reference = ReferencePolicy("initial", policy, lambda model: model, Refresh(1, 0.99))  # type: ignore[arg-type, return-value]
    exact = {name: param.detach().double() for name, param in policy.named_parameters()}
    start = dict(exact)
    rng = torch.Generator().manual_seed(0)
    for version in range(1, 41):
        for name, param in policy.named_parameters():
            param.data += 0.004 * torch.rand(param.shape, generator=rng).bfloat16()
            exact[name] = 0.99 * exact[name] + 0.01 * param.detach().double()
        reference.follow(policy, version)
    for name, param in reference.model.named_parameters():
        assert param.dtype == torch.bfloat16
        torch.testing.assert_close(reference._masters[name].double(), exact[name], atol=1e-6, rtol=1e-6)
        assert torch.equal(param, reference._masters[name].bfloat16())
        assert float((exact[name] - start[name]).abs().max()) > 1e-3


def test_a_resumed_average_below_float32_is_the_same(tmp_path: Any) -> None:
    def run() -> Any:
        return trainer(precision="bf16-true", strategy=DTAStrategy())

    options = {"reference_refresh": Refresh(1, 0.9)}
    data = [make_batch(k, version=k) for k in range(3)]
    whole, first, second = make(**options), make(**options), make(**options)
    torch.manual_seed(0)
    run().fit(whole, Batches(data))
    torch.manual_seed(0)
    half = run()
    half.fit(first, Batches(data[:2]))
    half.save_checkpoint(tmp_path / "half.ckpt")
    torch.manual_seed(123)
    last = trainer(max_epochs=2, precision="bf16-true", strategy=DTAStrategy())
    last.fit(second, Batches(data[2:]), ckpt_path=tmp_path / "half.ckpt", weights_only=True)
    assert whole.reference._masters.keys() == second.reference._masters.keys() != set()
    for name, master in whole.reference._masters.items():
        assert torch.equal(second.reference._masters[name], master)
    assert any(not torch.equal(master, master.bfloat16().float()) for master in whole.reference._masters.values())
    assert_same(second.reference.model, parameters(whole.reference.model))
    assert_same(second.policy, parameters(whole.policy))


def test_offloaded_it_computes_the_same() -> None:
    data = [make_batch(k) for k in range(2)]
    modules = [make(reference_offload=offload, reference_refresh=Refresh(1)) for offload in (False, True)]
    for module in modules:
        fit(module, data)
    assert_same(modules[1].policy, parameters(modules[0].policy))


def test_offloaded_it_stays_on_the_cpu_but_takes_dtypes() -> None:
    """Its own pass moves it, and it comes back."""
    policy = naive_model()
    places: list[str] = []
    reference = ReferencePolicy("initial", policy, lambda model: places.append("engine"), offload=True)  # type: ignore[arg-type, return-value]
    torch.nn.ModuleList([reference]).to(torch.bfloat16)
    assert {p.dtype for p in reference.parameters()} == {torch.bfloat16}
    assert {p.device.type for p in reference.parameters()} == {"cpu"}
    moved: list[Any] = []
    original = reference.model.to
    reference.model.to = lambda where: moved.append(where) or original(where)  # type: ignore[method-assign, assignment]
    with reference.engine(torch.device("cpu")):
        assert len(moved) == 1
    assert moved[1] == "cpu" and places == ["engine"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_offloaded_it_leaves_the_device() -> None:
    reference = ReferencePolicy("initial", naive_model(), lambda model: model, offload=True)  # type: ignore[arg-type, return-value]
    torch.nn.ModuleList([reference]).cuda()
    assert {p.device.type for p in reference.parameters()} == {"cpu"}
    with reference.engine(torch.device("cuda")):
        assert {p.device.type for p in reference.parameters()} == {"cuda"}
    assert {p.device.type for p in reference.parameters()} == {"cpu"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"every": 0}, "reference_refresh.every: .*, must be at least 1"),
        ({"every": 1, "ema": 1.0}, "reference_refresh.ema"),
    ],
)
def test_refreshes_out_of_range(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Refresh(**options)


def test_another_architecture_cannot_follow() -> None:
    other = ModelSource(config={**CONFIG, "intermediate_size": 40})
    module = make(reference=other, reference_refresh=Refresh(1))
    with pytest.raises(ValueError, match="reference_refresh: the reference has other parameters"):
        module.configure_model()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> str:
    torch.manual_seed(0)
    path = str(tmp_path_factory.mktemp("model"))
    naive_model().save_pretrained(path)
    return path


@pytest.mark.parametrize("critic", [False, True])
def test_adapters_switched_off_are_the_model_below_them(critic: bool, saved: str) -> None:
    """A LoRA begins at nothing, so the model it starts from is that one. A critic's head is on the same pass."""
    adapted = ModelSource(path=saved, adapter={"r": 2})
    kind, options = (ActorCriticModule, {"critic_warmup": 1}) if critic else (PolicyModule, {})
    data = [make_batch(k, version=max(0, k - 1)) for k in range(3)]
    seen, policies = [], []
    for reference in ("initial", "base"):
        torch.manual_seed(0)
        module = kind(adapted, optimizer=sgd, regularisers=[Regulariser("kl", 0.5)], reference=reference, **options)
        metrics = Metrics()
        run = trainer(metrics)
        run.fit(module, Batches(data))
        seen.append(metrics.steps)
        policies.append(parameters(module.policy))
        assert ("reference" in dict(module.named_children())) == (reference == "initial")
        assert {n for n, p in module.policy.named_parameters() if p.requires_grad} == {
            n for n in policies[0] if "lora_" in n
        }
    for name, value in policies[0].items():
        torch.testing.assert_close(policies[1][name], value, atol=1e-6, rtol=0)
    assert any(float(value.abs().max()) > 1e-3 for name, value in policies[1].items() if "lora_B" in name)
    kls = [[step["kl"] for step in steps] for steps in seen]
    assert kls[1] == pytest.approx(kls[0], abs=1e-6) and max(kls[1]) > 1e-3


def test_what_has_no_model_below_it_is_refused(saved: str) -> None:
    with pytest.raises(
        ValueError, match=r"reference: 'base' .* it has none: set model.adapter, or reference to 'initial'"
    ):
        make(reference="base").configure_model()
    biased = PolicyModule(
        ModelSource(path=saved, adapter={"r": 2, "bias": "all"}),
        optimizer=sgd,
        regularisers=[Regulariser("kl", 0.1)],
        reference="base",
    )
    with pytest.raises(ValueError, match=r"model\.adapter\.bias is 'all'.*set it to 'none'"):
        biased.configure_model()
    moved = PolicyModule(
        ModelSource(path=saved, adapter={"r": 2, "lora_alpha": 2, "init_lora_weights": "pissa"}),
        optimizer=sgd,
        regularisers=[Regulariser("kl", 0.1)],
        reference="base",
    )
    with pytest.raises(ValueError, match=r"model\.adapter\.init_lora_weights is 'pissa'.*reference to 'initial'"):
        moved.configure_model()
    with pytest.raises(ValueError, match="reference_offload has no effect on reference 'base'"):
        make(reference="base", reference_offload=True)
