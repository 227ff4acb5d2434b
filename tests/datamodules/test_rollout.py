"""The rollout datamodule in real Trainer runs, with the embedded engine."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from jsonargparse import ArgumentParser
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from transformers import Qwen3Config, Qwen3ForCausalLM

from app.batch import EvalHandle, RolloutBatch, StepHandle
from callbacks.weight_sync import WeightSync
from datamodules.inference.embedded import EmbeddedEngine
from datamodules.pipeline.limits import Limits
from datamodules.pipeline.validation import Validation
from datamodules.prompts import ArithmeticPrompts, JsonlPrompts
from datamodules.rewards import RewardOptions, exact_match, math_verify
from datamodules.rollout import RolloutDataModule
from datamodules.workflows import RLVRWorkflow
from tests.datamodules.fake_engine import VOCABULARY, FakeEngine

CHAR = f"char:{VOCABULARY}"
GSM8K = Path(os.environ.get("ARBORIST_DATA", "nowhere")) / "gsm8k" / "train.jsonl"


def tiny_model(vocab_size: int = 16, context: int = 32) -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=vocab_size,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=16,
            max_position_embeddings=context,
            eos_token_id=1,
            pad_token_id=0,
        )
    ).eval()


def count_step(module: Any, handle: StepHandle) -> None:
    """What datamodules read of a module, after a step."""
    last = handle.index == handle.count - 1
    module.policy_version += last
    module.steps_done = 0 if last else handle.index + 1


class Recorder(L.LightningModule):
    """Trains nothing; moves the weights a little each policy version and keeps what it was given."""

    def __init__(self, steps_per_batch: int = 1, **model: int) -> None:
        super().__init__()
        self.policy = tiny_model(**model)
        self.steps_per_batch = steps_per_batch
        self.policy_version = self.steps_done = 0
        self.step_seconds: dict[str, float] = {}
        self.handles: list[tuple[RolloutBatch, int, int]] = []
        self.versions: list[int] = []
        self.evaluated: list[tuple[str, RolloutBatch, int]] = []
        self.automatic_optimization = False
        self.mismatch = 0.0

    def training_step(self, handle: StepHandle, index: int) -> None:
        assert handle.batch is not None
        self.handles.append((handle.batch, handle.index, handle.count))
        self.versions.append(self.policy_version)
        self._compare(handle.batch)
        self.optimizers().step()
        count_step(self, handle)
        if not self.steps_done:
            with torch.no_grad():
                self.policy.lm_head.weight.mul_(1.02)

    def validation_step(self, handle: EvalHandle, index: int) -> None:
        assert handle.batch is not None
        self.evaluated.append((handle.name, handle.batch, self.policy_version))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["progress"] = self.policy_version, self.steps_done

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.policy_version, self.steps_done = checkpoint["progress"]

    def _compare(self, batch: RolloutBatch) -> None:
        """Largest difference between the sampler's log-probabilities and the policy's, on tokens of its version."""
        for i, tokens in enumerate(batch.sequences()):
            here = slice(int(batch.cu_seqlens[i]), int(batch.cu_seqlens[i + 1]))
            current = batch.loss_mask[here] & (batch.versions[here] == self.policy_version)
            if not current.any():
                continue
            with torch.no_grad():
                logprobs = self.policy(tokens[None, :-1]).logits[0].log_softmax(-1)
            mine = torch.cat([torch.zeros(1), logprobs.gather(-1, tokens[1:, None])[:, 0]])
            difference = (mine - batch.behavior_logprobs[here])[current].abs().max()
            self.mismatch = max(self.mismatch, float(difference))


def rollouts(**options: Any) -> RolloutDataModule:
    return RolloutDataModule(
        **{
            "prompts": ArithmeticPrompts(digits=1, operators="+-*"),
            "workflow": RLVRWorkflow(max_new_tokens=4),
            "engine": EmbeddedEngine(kv_cache_tokens=2048),
            "tokenizer": CHAR,
            "reward": exact_match,
            "batch_size": 4,
            "group_size": 3,
            "batches_per_epoch": 3,
            "limits": Limits(collect_deadline_s=60.0),
            **options,
        }
    )


def trainer(tmp_path: Path, **options: Any) -> L.Trainer:
    return L.Trainer(
        **{
            "accelerator": "cpu",
            "default_root_dir": tmp_path,
            "logger": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "enable_checkpointing": False,
            "num_sanity_val_steps": 0,
            "use_distributed_sampler": False,
            "callbacks": [WeightSync()],
            **options,
        }
    )


def flat(batch: RolloutBatch) -> dict[str, Any]:
    return {name: value.tolist() for name, value in batch.tensors().items()} | {"prompts": batch.prompt_ids}


# ---- the whole data path


def test_synchronous_fit_is_reproducible_and_on_policy(tmp_path: Path) -> None:
    def fit() -> Recorder:
        module = Recorder()
        data = rollouts(max_staleness=0, validation=Validation(ArithmeticPrompts(split="validation", size=20)))
        ours = trainer(tmp_path, max_epochs=2, val_check_interval=2, check_val_every_n_epoch=None)
        ours.fit(module, datamodule=data)
        return module

    first = fit()
    assert len(first.handles) == 6 and first.versions == list(range(6))  # epochs go on with the stream
    for (batch, index, count), version in zip(first.handles, first.versions):
        assert (index, count, len(batch)) == (0, 1, 12)
        assert batch.group_ids.unique().tolist() == list(range(4 * version, 4 * version + 4))
        assert (batch.versions[batch.loss_mask] == version).all()
    assert first.mismatch < 1e-5
    second = fit()
    assert [flat(batch) for batch, _, _ in second.handles] == [flat(batch) for batch, _, _ in first.handles]
    assert len(first.evaluated) == 3
    assert [flat(batch) for _, batch, _ in second.evaluated] == [flat(batch) for _, batch, _ in first.evaluated]


def test_replies_end_where_the_model_says_and_the_log_says_where(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    module = Recorder()
    ends = [1, *range(5, 11)]
    module.policy.generation_config.eos_token_id = ends
    trainer(tmp_path, max_steps=3).fit(module, datamodule=rollouts(max_staleness=0))
    replies = [
        tokens[mask].tolist()
        for batch, _, _ in module.handles
        for tokens, mask in zip(batch.sequences(), batch.split(batch.loss_mask))
    ]
    assert len(replies) == 36 and sum(len(reply) < 4 for reply in replies) > 9
    for reply in replies:  # what ends a reply is sampled, so it is trained; nothing comes after it
        assert not set(reply[:-1]) & {*ends} and (len(reply) == 4 or reply[-1] in ends)
    (line,) = [one.getMessage() for one in caplog.records if "a reply ends with" in one.getMessage()]
    assert line.startswith("a reply ends with '<eos>' = 1 (tokenizer, model), '3' = 5 (model), ")


def test_asynchronous_fit_stays_within_the_bound(tmp_path: Path) -> None:
    module = Recorder()
    data = rollouts(max_staleness=2, batches_per_epoch=8)
    trainer(tmp_path, max_epochs=1).fit(module, datamodule=data)
    ages = []
    for (batch, _, _), version in zip(module.handles, module.versions):
        ages += (version - batch.versions[batch.loss_mask]).tolist()
        assert len(batch) == 12
    assert min(ages) >= 0 and max(ages) <= 2
    assert module.mismatch < 1e-5
    counters = data.counters()
    assert counters["failed"] == 0
    assert counters["accepted"] - counters["queued"] == 8 * 4


def test_one_batch_takes_several_steps(tmp_path: Path) -> None:
    module = Recorder(steps_per_batch=3)
    trainer(tmp_path, max_epochs=1).fit(module, datamodule=rollouts(max_staleness=0, batches_per_epoch=2))
    assert [(index, count) for _, index, count in module.handles] == [(0, 3), (1, 3), (2, 3)] * 2
    assert module.versions == [0, 0, 0, 1, 1, 1]
    assert module.handles[0][0] is module.handles[2][0] is not module.handles[3][0]


def test_validation_inside_fit_sees_one_version_and_all_prompts(tmp_path: Path) -> None:
    module = Recorder()
    data = rollouts(
        validation=Validation(ArithmeticPrompts(digits=1, operators="+-*", split="validation", size=10), batch_size=4)
    )
    trainer(tmp_path, max_epochs=1, val_check_interval=2, check_val_every_n_epoch=None).fit(module, datamodule=data)
    assert len(module.evaluated) == 3
    for name, batch, version in module.evaluated:
        assert name == "arithmetic"
        assert (batch.versions[batch.loss_mask] == version).all()
    assert sorted(p for _, batch, _ in module.evaluated for p in batch.prompt_ids) == sorted(
        p.id for p in data.validation.prompts.first(10)
    )


def test_validate_alone_starts_no_training_rollouts_and_repeats(tmp_path: Path) -> None:
    module = Recorder()
    data = rollouts(validation=Validation(ArithmeticPrompts(split="validation", size=20), samples=2, temperature=1.0))
    for _ in range(2):  # the second time everything starts again
        trainer(tmp_path).validate(module, datamodule=data, verbose=False)
    assert sum(data.counters().values()) == 0
    (_, first, _), (_, second, _) = module.evaluated
    assert flat(first) == flat(second) and len(first) == 40


@pytest.mark.parametrize("every", [2, 3])
def test_resume_loses_nothing_and_repeats_nothing(tmp_path: Path, every: int) -> None:
    """Two steps a batch: a checkpoint after step 3 is in the middle of the second batch, which then goes on."""

    def fit(**options: Any) -> Recorder:
        module = Recorder(steps_per_batch=2)
        checkpoint = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=every, save_top_k=-1)
        ours = trainer(tmp_path, max_steps=8, enable_checkpointing=True, callbacks=[WeightSync(), checkpoint])
        data = rollouts(max_staleness=0, batches_per_epoch=100)
        ours.fit(module, datamodule=data, weights_only=True, **options)
        return module

    whole = fit()
    resumed = fit(ckpt_path=tmp_path / f"step={every}.ckpt")
    trained = [(flat(batch), index) for batch, index, _ in whole.handles]
    again = [(flat(batch), index) for batch, index, _ in resumed.handles]
    assert resumed.versions[0] == 1
    assert again == trained[every:]


@pytest.mark.parametrize("steps", [1, 2])
def test_a_checkpoint_of_an_interrupted_step_keeps_its_batch(tmp_path: Path, steps: int) -> None:
    """What is interrupted in its last step is not in the weights, so it must be in the stream."""

    class Interrupted(Recorder):
        def training_step(self, handle: StepHandle, index: int) -> None:
            if self.policy_version == 2 and handle.index == steps - 1:
                self.handles.append((handle.batch, handle.index, handle.count))  # type: ignore[arg-type]
                raise RuntimeError("out of memory")
            super().training_step(handle, index)

    module = Interrupted(steps_per_batch=steps)
    checkpoint = OnExceptionCheckpoint(tmp_path, "interrupted")
    ours = trainer(tmp_path, max_steps=8 * steps, enable_checkpointing=True, callbacks=[WeightSync(), checkpoint])
    with pytest.raises(RuntimeError, match="out of memory"):
        ours.fit(module, datamodule=rollouts(max_staleness=0, batches_per_epoch=100))
    again = Recorder(steps_per_batch=steps)
    options = {"ckpt_path": tmp_path / "interrupted.ckpt", "weights_only": True}
    ours = trainer(tmp_path, max_steps=5 * steps)
    ours.fit(again, datamodule=rollouts(max_staleness=0, batches_per_epoch=100), **options)
    assert again.versions[0] == 2
    assert flat(again.handles[0][0]) == flat(module.handles[-1][0])


def test_single_samples_are_rolled_out(tmp_path: Path) -> None:
    module = Recorder()  # what needs groups to compare says so: see modules.advantages
    trainer(tmp_path, max_epochs=1).fit(module, datamodule=rollouts(group_size=1, batches_per_epoch=2))
    assert [batch.group_ids.unique().numel() for batch, _, _ in module.handles] == [4, 4]


# ---- rewards, tokenizers and limits


def test_a_reward_that_cannot_be_loaded_stops_before_training(tmp_path: Path) -> None:
    from tests.datamodules.rewards.reward_functions import FailsToLoad

    data = rollouts(reward=FailsToLoad())
    with pytest.raises(ValueError, match="reward: a worker process could not be started: ImportError"):
        trainer(tmp_path, max_epochs=1).fit(Recorder(), datamodule=data)
    assert data.engine.health()["alive"] is False  # what had started was closed


def test_a_prompt_longer_than_the_context_is_refused_before_training(tmp_path: Path) -> None:
    data = rollouts(prompts=ArithmeticPrompts(digits=20, operands=3))
    with pytest.raises(ValueError, match=r"\d+ of 256 prompts of 'arithmetic' leave no room for 4 new tokens .* of 32"):
        trainer(tmp_path, max_epochs=1).fit(Recorder(), datamodule=data)


def test_a_trained_tokenizer_is_kept_in_the_run_directory(tmp_path: Path) -> None:
    data = rollouts(tokenizer="train:258", max_staleness=0, batches_per_epoch=1)
    logger = L.pytorch.loggers.CSVLogger(tmp_path, name="", version="run")
    trainer(tmp_path, max_epochs=1, logger=logger).fit(Recorder(vocab_size=258), datamodule=data)
    assert (tmp_path / "run" / "tokenizer" / "tokenizer.json").is_file()


@pytest.mark.skipif(not GSM8K.is_file(), reason=f"needs {GSM8K} (set ARBORIST_DATA)")
def test_gsm8k_with_a_trained_tokenizer_and_math_verify(tmp_path: Path) -> None:
    data = rollouts(
        prompts=JsonlPrompts(str(GSM8K), template="{question}\n", answer_pattern="#### (.+)", size=500),
        tokenizer="train:512",
        workflow=RLVRWorkflow(max_new_tokens=8),
        reward=math_verify,
        reward_options=RewardOptions(deadline_s=60.0),
        limits=Limits(long_prompts="skip"),
        batches_per_epoch=2,
    )
    module = Recorder(vocab_size=512, context=160)
    trainer(tmp_path, max_epochs=1).fit(module, datamodule=data)
    assert module.mismatch < 1e-5
    for batch, _, _ in module.handles:
        assert len(batch) == 12 and set(batch.rewards.tolist()) <= {0.0, 1.0}
        assert all(name.startswith("gsm8k/train:") for name in batch.prompt_ids)
        assert int(batch.lengths().max()) <= 160
    assert data.counters()["failed"] == 0


def test_nothing_rolls_out_without_weight_sync(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"add callbacks\.WeightSync to trainer\.callbacks"):
        trainer(tmp_path, max_epochs=1, callbacks=[]).fit(Recorder(), datamodule=rollouts())


def test_gradient_accumulation_is_refused(tmp_path: Path) -> None:
    module = Recorder()
    module.automatic_optimization = True
    with pytest.raises(ValueError, match=r"trainer\.accumulate_grad_batches: 2"):
        trainer(tmp_path, max_epochs=1, accumulate_grad_batches=2).fit(module, datamodule=rollouts())


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"group_size": 0}, "group_size: 0"),
        ({"batch_size": 0}, "batch_size: 0"),
        ({"max_staleness": -1}, "max_staleness: -1"),
        ({"batches_per_epoch": 0}, "batches_per_epoch: 0"),
        ({"limits": Limits(max_filtered=3)}, "limits.max_filtered has no effect without filter"),
        ({"reward": None, "reward_options": RewardOptions(cache=3)}, "reward_options has no effect without reward"),
        ({"prompts": [1]}, "prompts: list is no PromptSource"),
        ({"workflow": object()}, "workflow: object needs a method run"),
        ({"engine": object()}, "engine: object is no InferenceEngine, it lacks version"),
        ({"reward": lambda prompt, text: 1.0}, "reward: .* cannot be sent to a worker process"),
    ],
)
def test_wrong_arguments_are_refused_by_name(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        rollouts(**{"engine": FakeEngine(), **options})


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"max_concurrent": -1}, "limits.max_concurrent: -1"),
        ({"max_concurrent": 0}, "limits.max_concurrent: 0"),
        ({"max_failures": 0}, "limits.max_failures: 0"),
        ({"max_filtered": 0}, "limits.max_filtered: 0"),
        ({"collect_deadline_s": 0}, "limits.collect_deadline_s: 0"),
        ({"episode_deadline_s": float("nan")}, "limits.episode_deadline_s: nan"),
        ({"long_prompts": "cut"}, "limits.long_prompts: 'cut'"),
    ],
)
def test_limits_check_themselves(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Limits(**options)


def test_yaml_configures_everything() -> None:
    parser = ArgumentParser(exit_on_error=False)
    parser.add_subclass_arguments(L.LightningDataModule, "data")
    written = """
data:
  class_path: datamodules.RolloutDataModule
  init_args:
    prompts: {class_path: datamodules.prompts.ArithmeticPrompts, init_args: {digits: 3}}
    validation:
      prompts: {class_path: datamodules.prompts.ArithmeticPrompts, init_args: {split: validation, size: 5}}
    workflow: {class_path: datamodules.workflows.RLVRWorkflow, init_args: {max_new_tokens: 5}}
    engine: {class_path: datamodules.inference.EmbeddedEngine, init_args: {kv_cache_tokens: 4096}}
    tokenizer: "char:0123456789+="
    reward: datamodules.rewards.math_verify
    max_staleness: 2
"""
    config = parser.parse_string(written)
    data = parser.instantiate_classes(config).data
    assert isinstance(data, RolloutDataModule)
    assert data.prompts.digits == 3 and data.validation.prompts.size == 5 and data.workflow.max_new_tokens == 5
    assert data.gate.max_concurrent == 48
    assert "math_verify" in parser.dump(config)  # what a run directory's config.yaml shows

    scaled = "reward: {class_path: tests.datamodules.rewards.reward_functions.Scaled, init_args: {factor: 3.0}}"
    config = parser.parse_string(written.replace("reward: datamodules.rewards.math_verify", scaled))
    assert parser.instantiate_classes(config).data._pool is not None
