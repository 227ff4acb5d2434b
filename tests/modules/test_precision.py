"""Precisions: each trains, and none is seen by anything else in the process, nor by the arithmetic of rewards."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any, ClassVar

import lightning as L
import pytest
import torch
from lightning.pytorch.plugins.precision import DoublePrecision, HalfPrecision
from torch import nn
from transformers import AutoModelForCausalLM

from app.batch import StepHandle
from app.strategies import DTAStrategy
from app.strategies.precision import keep_default_dtype
from modules import ActorCriticModule, ModelSource, PolicyModule, Regulariser, build_model
from tests.helpers.selection import EXACT_ROUTERS, needs_transformers
from tests.helpers.tiny_policy import Batches, fit, make_batch, parameters, sgd, source, trainer


@pytest.mark.parametrize("precision", ["bf16-true", "bf16-mixed", "64-true"])
def test_precisions_train(precision: str) -> None:
    module = PolicyModule(source(), optimizer=sgd, regularisers=[Regulariser("kl", 0.1)], reference="initial", epochs=2)
    torch.manual_seed(0)
    run = trainer(precision=precision, strategy="auto" if precision == "bf16-mixed" else DTAStrategy())
    run.fit(module, Batches([make_batch()]))
    reference = PolicyModule(
        source(), optimizer=sgd, regularisers=[Regulariser("kl", 0.1)], reference="initial", epochs=2
    )
    fit(reference, [make_batch()])
    rough = 1e-6 if precision == "64-true" else 0.03
    moved = parameters(reference.policy)
    for name, value in parameters(module.policy).items():
        torch.testing.assert_close(value.float(), moved[name], atol=rough, rtol=rough)


class DefaultDtype(L.Callback):
    """Makes `dtype` torch's default for whatever is computed in a step, as Lightning's own precision plugins do."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def on_train_batch_start(self, *unused: Any) -> None:
        torch.set_default_dtype(self.dtype)

    def on_train_batch_end(self, *unused: Any) -> None:
        torch.set_default_dtype(torch.float32)

    on_exception = on_train_batch_end


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_advantages_do_not_depend_on_the_default_dtype(dtype: torch.dtype) -> None:
    for name in ("grpo", "rloo", "tree", "reinforce_pp", "gae", "gae_turn"):
        make = ActorCriticModule if name.startswith("gae") else PolicyModule
        found = []
        for chosen in (torch.float32, dtype):
            batch = make_batch()
            trainer(DefaultDtype(chosen)).fit(make(source(), optimizer=sgd, advantage=name), Batches([batch]))
            found.append(batch.columns["advantages"])
        assert torch.equal(*found), name


def test_shares_and_penalties_do_not_depend_on_the_default_dtype() -> None:
    """Tensors that come of whole numbers: 2 / 3 of a version, 13 / 30 of a buffer."""
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        batch = make_batch()
        batch.versions[batch.loss_mask] = 0
        options = {"max_tokens": 5, "buffer_tokens": 3}
        module = PolicyModule(
            source(),
            optimizer=sgd,
            objective="decoupled_ppo",
            proximal="interpolated",
            epochs=2,
            regularisers=[Regulariser("overlong", 1.0, where="reward", options=options)],
        )
        module.policy_version = 2
        torch.manual_seed(0)
        trainer(DefaultDtype(dtype)).fit(module, Batches([batch]))
        found.append((batch.columns["token_rewards"].unique(), parameters(module)))
    assert torch.equal(found[0][0], found[1][0])
    assert any(value not in (0.0, -1.0) for value in found[0][0].tolist())
    for name, value in found[0][1].items():
        torch.testing.assert_close(found[1][1][name], value, atol=1e-6, rtol=1e-6)


class Watcher(threading.Thread):
    """Reads torch's default dtype all the time, on a thread of its own, where rollouts would be."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.seen: set[torch.dtype] = set()
        self.reads = 0
        self.done = threading.Event()

    def run(self) -> None:
        while not self.done.is_set():
            self.seen.add(torch.tensor([0.1]).dtype)
            self.reads += 1
            self.done.wait(1e-4)


class Reading(L.Callback):
    """Also reads it where a step certainly is."""

    def __init__(self) -> None:
        self.seen: list[torch.dtype] = []

    def _read(self, *unused: Any) -> None:
        self.seen.append(torch.get_default_dtype())

    on_before_backward = on_after_backward = on_before_optimizer_step = on_before_zero_grad = _read


class Inside(PolicyModule):
    """Reads it inside the tree pass, validation and prediction."""

    seen: ClassVar[list[tuple[str, torch.dtype]]] = []

    def configure_model(self) -> None:
        self.seen.append(("configure", torch.get_default_dtype()))
        super().configure_model()

    def loss(self, *arguments: Any) -> Any:
        self.seen.append(("loss", torch.get_default_dtype()))
        return super().loss(*arguments)

    def evaluate(self, handle: Any) -> None:
        self.seen.append(("evaluate", torch.get_default_dtype()))
        super().evaluate(handle)

    def predict_step(self, *arguments: Any) -> Any:
        self.seen.append(("predict", torch.get_default_dtype()))
        return super().predict_step(*arguments)


def _one(handle: StepHandle) -> Any:
    return torch.utils.data.DataLoader([handle], batch_size=None)


@pytest.mark.parametrize("precision", ["bf16-true", "64-true"])
@pytest.mark.parametrize("how", ["flag", "plugin"])
def test_no_thread_ever_sees_another_default_dtype(precision: Any, how: str) -> None:
    Inside.seen.clear()
    strategy = DTAStrategy()
    options: dict[str, Any] = {"precision": precision, "strategy": strategy}
    if how == "plugin":
        own = HalfPrecision("bf16-true") if precision == "bf16-true" else DoublePrecision()
        options = {"plugins": [own], "strategy": strategy}
    watcher, reading = Watcher(), Reading()
    watcher.start()
    run = trainer(reading, **options)
    module = Inside(source(), optimizer=sgd, epochs=2, regularisers=[Regulariser("kl", 0.1)], reference="initial")
    run.fit(module, Batches([make_batch()], [make_batch()]))
    run.predict(module, _one(StepHandle(make_batch(), 0, 1)))
    watcher.done.set()
    watcher.join(10)
    assert run.precision == precision
    dtype = torch.bfloat16 if precision == "bf16-true" else torch.float64
    assert {p.dtype for p in module.parameters()} == {dtype}
    assert {name for name, _ in Inside.seen} == {"configure", "loss", "evaluate", "predict"}
    assert {dtype for _, dtype in Inside.seen} == {*reading.seen} == watcher.seen == {torch.float32}
    assert watcher.reads


def test_bf16_true_needs_the_strategy_that_keeps_masters() -> None:
    with pytest.raises(ValueError, match=r"precision=bf16-true .*SingleDeviceStrategy.*app\.strategies\.DTAStrategy"):
        trainer(precision="bf16-true").fit(PolicyModule(source(), optimizer=sgd), Batches([make_batch()]))
    narrow = ModelSource(config=source().config, dtype="bfloat16")
    with pytest.raises(
        ValueError, match=r"model\.dtype: bfloat16 .*SingleDeviceStrategy.*app\.strategies\.DTAStrategy"
    ):
        trainer().fit(PolicyModule(narrow, optimizer=sgd), Batches([make_batch()]))


@pytest.mark.parametrize("precision", ["bf16-true", "64-true"])
def test_objectives_of_whole_steps_train_in_every_precision(precision: str) -> None:
    module = PolicyModule(source(), optimizer=sgd, objective="m2po")
    [step] = fit(module, [make_batch()], precision=precision, strategy=DTAStrategy())
    [expected] = fit(PolicyModule(source(), optimizer=sgd, objective="m2po"), [make_batch()])
    assert step["loss"] == pytest.approx(expected["loss"], rel=0.1)


ROUTED = {
    "moe_intermediate_size": 8,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "tie_word_embeddings": False,
}
LATENT = {
    "head_dim": 4,
    "q_lora_rank": None,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 8,
}
LOADED: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "gemma3_text": {},  # frequencies by the layers' kind
    "glm4_moe": ROUTED,
    "deepseek_v3": {**ROUTED, **LATENT},
}


def _dtypes(model: nn.Module) -> dict[str, torch.dtype]:
    return {name: tensor.dtype for name, tensor in (*model.named_parameters(), *model.named_buffers())}


@pytest.mark.parametrize("kind", LOADED)
def test_a_model_in_bf16_true_is_what_is_loaded_in_bfloat16(tmp_path: Path, kind: str) -> None:
    """What servers and whoever loads the saved model compute with, bit for bit, also far from the beginning."""
    torch.manual_seed(0)
    holder = nn.Module()
    holder.policy = build_model(source(model_type=kind, **LOADED[kind])).eval()
    for name, buffer in holder.policy.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.copy_(8 + 0.05 * torch.randn(len(buffer)))  # as of trained routers: half precision would tie them
    holder.policy.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    trained: Any = holder
    keep_default_dtype(HalfPrecision("bf16-true")).convert_module(trained)
    assert _dtypes(holder.policy) == _dtypes(loaded)
    assert {torch.float32, torch.bfloat16} == {*_dtypes(loaded).values()}
    positions = torch.arange(8000, 8200)[None]
    tokens = torch.randint(0, 17, (1, 200))
    with torch.no_grad():
        got, expected = (m(input_ids=tokens, position_ids=positions).logits for m in (holder.policy, loaded))
    assert torch.equal(got, expected)


@needs_transformers(EXACT_ROUTERS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_frequencies_and_routers_stay_exact_in_training(dtype: str) -> None:
    model = source(model_type="glm4_moe", **ROUTED)
    model.dtype = dtype
    module = PolicyModule(model, optimizer=sgd, regularisers=[Regulariser("kl", 0.1)], reference="initial", epochs=2)
    fit(module, [make_batch()], precision="bf16-true", strategy=DTAStrategy())
    for trained in (module.policy.model, module.reference.model.model):
        assert trained.rotary_emb.inv_freq.dtype == trained.layers[1].mlp.gate.weight.dtype == torch.float32
        assert trained.layers[1].mlp.shared_experts.up_proj.weight.dtype == torch.bfloat16
