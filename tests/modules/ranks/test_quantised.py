"""A policy whose frozen weights are in 4 bit is trained, stopped, gone on with and saved as any other: on ranks as on
one process, and what does not go is refused by name."""

from __future__ import annotations

import functools
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from app.cli.export import export
from app.strategies import DTAStrategy
from app.tree import elements, quantised_layers, whole_weights
from callbacks.base import policy_in_parts
from callbacks.opening import models
from datamodules.inference.export import ExportError, adapter_weights, merged_weights
from modules import ActorCriticModule, ModelSource, PolicyModule, Refresh, RewardModule, build_model
from modules.models import ReferencePolicy, inner_model
from tests.helpers.rank_pool import RankPool
from tests.helpers.tiny_policy import (
    Batches,
    fit,
    make_batch,
    naive_policy_loss,
    naive_training,
    sgd,
    source,
    trainer,
)
from tests.modules.ranks import quantised_jobs as jobs
from tests.modules.ranks.quantised_jobs import REFERENCE, origin

pytest.importorskip("bitsandbytes", reason="4 bit need bitsandbytes: pip install -e '.[qlora]'")
WIDE = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16, "num_attention_heads": 4}
PROMPT = torch.arange(9)[None]


@pytest.fixture
def base(tmp_path: Path) -> Path:
    torch.manual_seed(1)
    build_model(source(**WIDE)).save_pretrained(tmp_path / "base")
    return tmp_path / "base"


def same(got: dict[str, Tensor], expected: dict[str, Tensor], atol: float = 0.0) -> None:
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(got[name], value, atol=atol, rtol=0, msg=lambda said, name=name: f"{name}: {said}")


def plain_twin(model: Any, base: Path) -> Any:
    """The same adapter on a plain model with the numbers that `model` stands for."""
    plain = build_model(ModelSource(path=str(base), adapter={"r": 2}))
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    whole = whole_weights(model)(f"{name}.weight" for name in quantised_layers(model))
    plain.load_state_dict(trained | whole, strict=False)
    return plain


def test_grpo_is_that_of_a_plain_loop(base: Path) -> None:
    """Three SGD steps, next to a loop over whole sequences on the numbers that 4 bit stand for; KL against the base."""
    data = [make_batch(k) for k in range(3)]
    module = PolicyModule(origin(base), optimizer=sgd, **REFERENCE)
    torch.manual_seed(0)
    module.configure_model()
    model = plain_twin(module.policy, base)
    fit(module, data)
    with model.disable_adapter():
        reference = {name: p.clone() for name, p in model.get_base_model().named_parameters()}
    frozen = build_model(ModelSource(path=str(base)))
    frozen.load_state_dict({name.replace("base_layer.", ""): p for name, p in reference.items()}, strict=False)
    loss = functools.partial(naive_policy_loss, kl_coef=0.1, reference=frozen)
    naive_training(model, data, lambda batch, _: [list(range(len(batch)))], loss)
    found = {name: p for name, p in module.policy.named_parameters() if p.requires_grad}
    expected = {name: p for name, p in model.named_parameters() if p.requires_grad}
    same(found, expected, atol=1e-6)
    assert min(float(p.abs().max()) for name, p in found.items() if "lora_B" in name) > 1e-3


@pytest.mark.parametrize("group_size", [1, 2])
def test_two_ranks_learn_what_one_process_does(base: Path, two_ranks: RankPool, group_size: int) -> None:
    """Five steps of GRPO; the second rank has other weights until it gets those of the first, scales and all."""
    expected, steps = jobs.fit(base, optimizer=sgd, **REFERENCE)
    options = {"strategy": {"group_size": group_size}, "damaged": True, "optimizer": sgd, **REFERENCE}
    for got, mine in two_ranks.run(jobs.fit, base=base, devices=2, **options):
        same(got, expected, atol=2e-6)
        assert [one["loss"] for one in mine] == pytest.approx([one["loss"] for one in steps], rel=1e-4, abs=1e-6)
        assert [one["approx_kl"] for one in mine] == pytest.approx([one["approx_kl"] for one in steps], abs=1e-6)
    assert steps[-1]["loss"] != steps[0]["loss"]


@pytest.mark.parametrize("precision", ["32-true", "bf16-true"])
def test_a_run_goes_on_from_a_checkpoint(base: Path, tmp_path: Path, precision: str) -> None:
    """To the bit, also where the model's directory has other weights by then: a checkpoint holds codes and scales."""
    straight, steps = jobs.fit(base, batches=4, precision=precision, **REFERENCE)
    jobs.fit(base, batches=4, directory=tmp_path / "saved", precision=precision, **REFERENCE)
    torch.manual_seed(2)
    shutil.rmtree(base)
    build_model(source(**WIDE)).save_pretrained(base)
    ckpt = tmp_path / "saved" / "step=2.ckpt"
    rest, after = jobs.fit(base, batches=4, start=ckpt, precision=precision, **REFERENCE)
    same(rest, straight)
    assert [one["loss"] for one in after if one] == [one["loss"] for one in steps[2:]]


def test_ranks_write_a_checkpoint_together(base: Path, tmp_path: Path, two_ranks: RankPool) -> None:
    """Each a share of codes and scales; one process goes on with it, and two with what one wrote."""
    options: dict[str, Any] = {"base": base, "batches": 4, "optimizer": sgd, **REFERENCE}
    straight, _ = jobs.fit(**options)
    two_ranks.run(jobs.fit, devices=2, directory=tmp_path / "two", **options)
    rest, _ = jobs.fit(start=tmp_path / "two" / "step=2.ckpt", directory=tmp_path / "one", **options)
    same(rest, straight, atol=2e-6)
    for got, _ in two_ranks.run(
        jobs.fit, devices=2, start=tmp_path / "one" / "step=4.ckpt", **{**options, "batches": 5}
    ):
        assert {name: t for name, t in got.items() if "scale of" in name}.keys() <= straight.keys()
        same({n: t for n, t in got.items() if "lora" not in n}, {n: t for n, t in straight.items() if "lora" not in n})


@pytest.mark.parametrize("precision", ["32-true", "bf16-true"])
def test_what_is_saved_computes_what_was_trained(base: Path, tmp_path: Path, precision: str) -> None:
    """The adapter alone, which names its base, on the same 4 bit; and a model of whole weights, which anybody loads."""
    saved, dtype = tmp_path / "saved", "bfloat16" if precision == "bf16-true" else "float32"
    fields = {"dtype": dtype, "adapter": {"r": 2, "init_lora_weights": False}}
    jobs.fit(base, batches=2, directory=saved, fields=fields, precision=precision, **REFERENCE)
    export(saved / "step=2.ckpt", tmp_path / "exported")
    export(saved / "step=2.ckpt", tmp_path / "exported alone", adapter=True)
    again = build_model(origin(base, dtype=dtype, adapter=str(saved / "alone"))).eval()
    other = build_model(origin(base, dtype=dtype, adapter=str(tmp_path / "exported alone"))).eval()
    assert again.peft_config["default"].base_model_name_or_path == str(base)
    with torch.no_grad():
        trained = again(PROMPT).logits
        assert torch.equal(other(PROMPT).logits, trained)
        tolerance = {"float32": 1e-5, "bfloat16": 0.2}[dtype]
        found = []
        for path in (saved / "merged", tmp_path / "exported"):
            merged = build_model(ModelSource(path=str(path), dtype=dtype)).eval()
            assert not quantised_layers(merged) and merged.dtype == getattr(torch, dtype)
            assert "quantization_config" not in (path / "config.json").read_text()
            torch.testing.assert_close(merged(PROMPT).logits, trained, atol=tolerance, rtol=tolerance)
            found.append(merged.state_dict())
        same(found[0], found[1])
        began = build_model(origin(base, dtype=dtype)).eval()(PROMPT).logits
        assert float((trained - began).abs().max()) > 2 * tolerance
    alone = adapter_weights(again)
    assert {name: t.shape for name, t in alone.items()} == {
        name: t.shape for name, t in adapter_weights(plain_twin(again, base)).items()
    }
    with pytest.raises(ExportError, match=r"q_proj.*' is in 4 bit, and is read back a layer at a time: ask for Weight"):
        merged_weights(again)


def test_weights_come_in_the_dtype_of_the_run(base: Path) -> None:
    """A float32 model that a run rounds to bfloat16 is exported as bfloat16."""
    module = PolicyModule(origin(base, dtype="float32"), optimizer=sgd)
    trainer(strategy=DTAStrategy(), precision="bf16-true").fit(module, Batches([make_batch()]))
    like, parts = policy_in_parts(module.policy, keep=True)
    assert parts is not None and {p.device.type for p in like.parameters()} == {"meta"}
    dtypes = {name: t.dtype for part in parts.merged() for name, t in part.items()}
    assert set(dtypes.values()) == {torch.bfloat16} and len(dtypes) > 7
    assert policy_in_parts(module.policy, keep=False) == (None, None)


@pytest.mark.parametrize("critic", ["shared", "initial", "own"])
def test_critics(base: Path, critic: Any) -> None:
    """On the policy's layers, on a copy of them, and on others in 4 bit: all learn."""
    chosen = origin(base) if critic == "own" else critic
    module = ActorCriticModule(origin(base), chosen, optimizer=sgd)
    steps = fit(module, [make_batch(k) for k in range(3)])
    assert module.critic is not None and all("value_loss" in one for one in steps)
    assert float(module.critic.value_head.weight.abs().max()) > 0
    if critic != "shared":
        trained = [name for name, p in module.critic.trunk.named_parameters() if p.requires_grad]
        assert trained and all("lora_" in name for name in trained) and quantised_layers(module.critic.trunk)


def test_references(base: Path) -> None:
    """The base, a copy, and the same weights read again in 4 bit are one; a copy may follow."""
    data = [make_batch(k) for k in range(3)]
    kl = {"regularisers": REFERENCE["regularisers"]}
    found = []
    for reference in ("base", "initial", origin(base, adapter=None)):
        module = PolicyModule(origin(base), optimizer=sgd, reference=reference, **kl)
        fit(module, data)
        found.append({name: p for name, p in module.policy.named_parameters() if p.requires_grad})
    same(found[1], found[0], atol=1e-6)
    same(found[2], found[0], atol=1e-6)
    module = PolicyModule(origin(base), optimizer=sgd, reference="initial", reference_refresh=Refresh(1, 0.5), **kl)
    fit(module, data)
    followed = {name: p for name, p in module.reference.model.named_parameters() if "lora_B" in name}
    assert min(float(p.abs().max()) for p in followed.values()) > 0
    with pytest.raises(ValueError, match="reference_refresh: a reference in 4 bit cannot follow"):
        ReferencePolicy(origin(base, adapter=None), module.policy, lambda model: model, Refresh(1))  # type: ignore


def test_sft(base: Path, two_ranks: RankPool) -> None:
    expected, _ = jobs.fit(base, batches=2, kind="sft", optimizer=sgd)
    for got, _ in two_ranks.run(jobs.fit, base=base, devices=2, batches=2, kind="sft", optimizer=sgd):
        same(got, expected, atol=2e-6)


def test_a_model_that_was_saved_in_4_bit(base: Path, tmp_path: Path) -> None:
    """As hubs have them: taken as it is, where the option says so; and refused where it says nothing."""
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    for name, options in {"nf4": {"load_in_4bit": True}, "int8": {"load_in_8bit": True}}.items():
        config = BitsAndBytesConfig(**options, bnb_4bit_quant_type="nf4")
        AutoModelForCausalLM.from_pretrained(base, quantization_config=config).save_pretrained(tmp_path / name)
    saved = build_model(origin(tmp_path / "nf4")).eval()
    assert len(quantised_layers(saved)) == 14 and not hasattr(inner_model(saved).config, "quantization_config")
    with pytest.raises(ValueError, match=r"model.path: the weights in '.*nf4' are quantised .*model.quantization"):
        build_model(ModelSource(path=str(tmp_path / "nf4"), adapter={"r": 2}))
    # Older releases read what is not in 4 bit in the dtype that was asked for.
    said = r"model.dtype: bfloat16, and '.*nf4' was saved in 4 bit of (bfloat16 and )?float32: set"
    with pytest.raises(ValueError, match=said):
        build_model(replace(origin(tmp_path / "nf4"), dtype="bfloat16"))
    with pytest.raises(ValueError, match=r"model.quantization: '.*' is in 8 bit, .*load the model in 4 bit"):
        build_model(origin(tmp_path / "int8"))


def test_bytes_and_the_opening(base: Path) -> None:
    module = PolicyModule(origin(base), optimizer=sgd)
    module.configure_model()
    (line,) = models(module)
    linear = sum(elements(layer.weight) for layer in quantised_layers(module).values())
    plain = PolicyModule(ModelSource(path=str(base), adapter={"r": 2}), optimizer=sgd)
    plain.configure_model()
    (other,) = models(plain)
    assert line == f"{other}, {linear:,} of them kept in 4 bit"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda at: ModelSource(path=at, quantization="int8"), "model.quantization: 'int8', must be one of nf4"),
        (lambda at: ModelSource(config={}, quantization="nf4"), "model.quantization: the weights of model.config are"),
        (
            lambda at: build_model(origin(at, dtype="float64")),
            "model.quantization: 4 bit are read back to float32 or b",
        ),
        (lambda at: PolicyModule(origin(at, adapter=None)), r"model.quantization: nf4 keeps .*set model.adapter"),
        (
            lambda at: ActorCriticModule(origin(at), origin(at, adapter=None)),
            r"critic.quantization: nf4 keeps .*set critic.adapter",
        ),
        (lambda at: RewardModule(origin(at, adapter=None)), "model.quantization has no effect with RewardModule"),
    ],
)
def test_mistakes(make: Any, message: str, base: Path) -> None:
    with pytest.raises(ValueError, match=message):
        make(str(base))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"strategy": DTAStrategy(), "precision": "64-true"}, "model.quantization: nf4 with trainer.precision=64-true"),
        (
            {"strategy": "sharded"},
            r"model.quantization: nf4 with DTAStrategy\(shard_parameters=True\).*set shard_parameters to false",
        ),
    ],
)
def test_settings_of_the_trainer(settings: dict[str, Any], said: str, base: Path, monkeypatch: Any) -> None:
    module = PolicyModule(origin(base), optimizer=sgd)
    if settings["strategy"] == "sharded":
        settings = {"strategy": DTAStrategy()}
        settings["strategy"].shard_parameters = True  # a single process is refused before
    with pytest.raises(ValueError, match=said):
        trainer(**settings).fit(module, Batches([make_batch()]))


def test_without_the_package(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(ValueError, match=r"model.quantization: 4 bit need the package bitsandbytes: pip install -e"):
        build_model(origin(base))
