"""A model of experts is trained from prompts to recording with the experts that its sampler chose."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.loggers import CSVLogger

from callbacks.pictures import read_metrics
from callbacks.weight_sync import WeightSync
from datamodules.files.recording import read_batch
from datamodules.groups import to_batch
from datamodules.inference import EmbeddedEngine
from datamodules.replay import ReplayDataModule
from modules import ModelSource, PolicyModule
from tests.datamodules.rewards.reward_functions import length
from tests.datamodules.test_rollout import rollouts, trainer
from tests.helpers.tiny_model import TINY_WITH_ENDS

EXPERTS = dict(TINY_WITH_ENDS, model_type="qwen3_moe", num_experts=16, num_experts_per_tok=4, moe_intermediate_size=16)


def policy(**config: Any) -> PolicyModule:
    return PolicyModule(
        ModelSource(config=dict(EXPERTS, num_hidden_layers=3, initializer_range=0.3) | config),
        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-2),
        chunk_tokens=16,
        live_tokens=32,
        self_check="error",
        minibatches=2,
    )


def run(path: Path, module: PolicyModule, data: Any, callbacks: list[Any]) -> dict[str, Any]:
    torch.manual_seed(0)
    log = CSVLogger(str(path), name="", version="", flush_logs_every_n_steps=1)
    options: dict[str, Any] = {"max_epochs": 1, "log_every_n_steps": 1, "logger": log, "callbacks": callbacks}
    trainer(path, **options).fit(module, datamodule=data)
    return read_metrics(path / "metrics.csv")


def test_what_is_sampled_is_what_is_trained_whatever_the_dtype(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    found = {}
    for dtype, records in (("float32", True), ("bfloat16", True), ("bfloat16", False)):
        engine = EmbeddedEngine(kv_cache_tokens=2048, num_threads=1, dtype=dtype, record_experts=records)
        made = {"reward": length, "max_staleness": 0, "batches_per_epoch": 2, "record": "rollouts"}
        path, module = tmp_path / f"{dtype}_{records}", policy()
        caplog.clear()
        metrics = run(path, module, rollouts(engine=engine, **made), [WeightSync()])
        assert ("4 experts in each of 3 layers" in caplog.text) == (not records)
        found[dtype, records] = metrics
        held = to_batch(read_batch(path / "rollouts", 0))
        assert (held.routes is not None) == ("routing/changed" in metrics) == records
        again = policy()
        replayed = run(path / "again", again, ReplayDataModule(f"{path}/rollouts"), [])
        assert replayed["loss"][1] == metrics["loss"][1]
        mine, theirs = module.state_dict(), again.state_dict()
        assert all(torch.equal(mine[name], theirs[name]) for name in mine)
        if held.routes is not None:
            assert held.routes.table.shape[1:] == (3, 4)
    assert max(found["float32", True]["logprob_diff_max"][1]) < 1e-4
    assert found["float32", True]["routing/changed"][1][0] == 0
    assert 0 < found["bfloat16", True]["routing/changed"][1][0] < 0.2


def test_rollouts_of_a_model_of_experts_train_one_that_has_none(tmp_path: Path) -> None:
    engine = EmbeddedEngine(kv_cache_tokens=2048, num_threads=1, record_experts=True)
    made = {"reward": length, "max_staleness": 0, "batches_per_epoch": 1, "record": "rollouts"}
    run(tmp_path, policy(), rollouts(engine=engine, **made), [WeightSync()])
    dense = PolicyModule(ModelSource(config=TINY_WITH_ENDS), self_check="error")
    with pytest.raises(ValueError, match=r"Qwen3ForCausalLM has no router.*replay_experts of recorded rollouts, off"):
        run(tmp_path / "refused", dense, ReplayDataModule(f"{tmp_path}/rollouts"), [])
    wider = policy(num_experts_per_tok=2)
    with pytest.raises(ValueError, match=r"recorded are 4 experts.*chooses 2 in 3.*replay_experts"):
        run(tmp_path / "wider", wider, ReplayDataModule(f"{tmp_path}/rollouts"), [])
    data = ReplayDataModule(f"{tmp_path}/rollouts", replay_experts=False)
    for name, module in (("dense", dense), ("wider_again", wider)):
        metrics = run(tmp_path / name, module, data, [])
        assert metrics["grad_norm"][1][0] > 0 and "routing/changed" not in metrics


def test_models_without_experts_are_refused(tmp_path: Path) -> None:
    module = PolicyModule(ModelSource(config=TINY_WITH_ENDS), self_check="skip")
    data = rollouts(engine=EmbeddedEngine(kv_cache_tokens=2048, num_threads=1, record_experts=True))
    with pytest.raises(Exception, match=r"EmbeddedEngine.record_experts: Qwen3ForCausalLM has no router"):
        run(tmp_path, module, data, [WeightSync()])
