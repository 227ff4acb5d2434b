"""Configurations that cannot be: each ends in a few lines that name the key and the remedy, before a model is built."""

from __future__ import annotations

import inspect
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from lightning_utilities.core.imports import RequirementCache

from app.cli import main
from app.cli.configuration import check_values, read_yaml
from app.cli.errors import cut
from datamodules import RolloutDataModule
from modules.models import ModelSource, build_model
from tests.app.cli.test_end_to_end import CONFIGS
from tests.fuzz.test_configurations import RECORDED, ROLLED_OUT, base
from tests.helpers.doubles import conversations


@pytest.fixture(autouse=True)
def _in_an_empty_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["arborist"])
    monkeypatch.delenv("ARBORIST_DEBUG", raising=False)
    conversations(tmp_path / "made.npz")
    (tmp_path / "base.yaml").write_text(yaml.safe_dump(base(RECORDED)))
    (tmp_path / "rollouts.yaml").write_text(yaml.safe_dump(base(ROLLED_OUT)))


def refusal(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    with pytest.raises(SystemExit) as caught:
        main(["fit", *args])
    said = capsys.readouterr().err
    assert caught.value.code == 2 and "Traceback" not in said and len(said.splitlines()) < 12, said
    return said


_AGENT = "datamodules.workflows.gateway.AgentWorkflow"
_CALLBACKS = "--trainer.callbacks+=lightning.pytorch.callbacks"
_KEPT = "--trainer.callbacks"
_LR, _CONFIG = "--model.init_args.optimizer.init_args", "--model.init_args.model.config"


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ([f"{_LR}.lr=-0.1"], "model.init_args.optimizer.init_args.lr: Invalid learning rate: -0.1; correct it"),
        ([f"{_LR}.lr=1e30"], "model.init_args.optimizer.init_args.lr: 1e+30, must be between 0 and 1000"),
        ([f"{_LR}.lr=.inf"], "lr: inf is not finite"),
        ([f"{_LR}.betas=[2.0,0.9]"], "optimizer.init_args.betas: Invalid beta parameter at index 0: 2.0"),
        ([f"{_LR}.eps=-1"], "model.init_args.optimizer.init_args.eps: Invalid epsilon value: -1.0"),
        (
            [f"{_LR}.weight_decay=-1"],
            "model.init_args.optimizer.init_args.weight_decay: Invalid weight_decay value: -1",
        ),
        (
            ["--trainer.accelerator=tpu"],
            "trainer.accelerator: tpu, and torch finds none on this machine; set it to cpu",
        ),
        (["--trainer.accelerator=mps"], "trainer.accelerator: mps is not supported"),
        (["--seed_everything=-1"], "seed_everything: -1, must be between 0 and"),
        (["--trainer.precision=16-mixed"], "trainer.precision: 16-mixed is not supported"),
        (["--trainer.strategy=ddp"], "trainer.strategy: ddp wraps the model and averages gradients"),
        (
            ["--trainer.min_steps=9", "--trainer.max_steps=3"],
            "trainer.min_steps: 9 is more than trainer.max_steps: 3, at which the run ends; raise the",
        ),
        (
            ["--trainer.min_epochs=2", "--trainer.max_epochs=1"],
            "trainer.min_epochs: 2 is more than trainer.max_epochs: 1",
        ),
        (["--trainer.overfit_batches=2"], "trainer.overfit_batches: 2 would end epochs early"),
        (["--trainer.barebones=true"], "trainer.barebones: every run logs and saves, which it forbids; leave it out"),
        (
            [f"{_CALLBACKS}.EarlyStopping", "--trainer.callbacks.monitor=val/accuracy"],
            "trainer.callbacks: EarlyStopping looks for the smallest val/accuracy (mode: min); set mode: max",
        ),
        (
            [f"{_CALLBACKS}.ModelCheckpoint", "--trainer.callbacks.monitor=val/aime24/mean@32"],
            "trainer.callbacks: ModelCheckpoint looks for the smallest val/aime24/mean@32 (mode: min); set mode: max",
        ),
        (
            [f"{_CALLBACKS}.ModelCheckpoint", f"{_KEPT}.monitor=val/mismatch_kl", f"{_KEPT}.every_n_train_steps=1"],
            "trainer.callbacks: every_n_train_steps saves between validations too, where val/mismatch_kl is still that",
        ),
        (
            [f"{_CALLBACKS}.ModelCheckpoint", f"{_KEPT}.monitor=val/mismatch_kl", "--trainer.limit_val_batches=0"],
            "trainer.callbacks: ModelCheckpoint follows val/mismatch_kl, which trainer.limit_val_batches: 0 leaves",
        ),
        (["--trainer.val_check_interval=0"], "trainer.val_check_interval: 0, must be above 0"),
        (["--trainer.gradient_clip_val=-0.5"], "trainer.gradient_clip_val: -0.5, must be at least 0; leave it out"),
        (
            ["--model.init_args.minibatches=null"],
            "minibatches: null is no value for it; leave it out for its default, or",
        ),
        (["--model.init_args.minibatches=null"], "over a file that sets it, write 1\n"),
        (["--data.init_args.path=a\0b"], "has a NUL in it"),
    ],
)
def test_options_that_cannot_be(args: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert words in refusal(capsys, "--config", "base.yaml", *args)
    assert not Path("runs").exists()  # before anything starts


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--data.group_size=99999999999999999999"], "group_size: 99999999999999999999 is beyond 64 bits"),
        (["--data.group_size=1000000000"], "group_size: 1000000000, must be at most 1,000,000"),
        (["--data.limits.collect_deadline_s=.inf"], "collect_deadline_s: inf is not finite"),
        (["--data.limits.collect_deadline_s=null"], 'key "limits.collect_deadline_s"'),
        (["--config=null.yaml"], "collect_deadline_s: null is no value for it"),
        (["--data.limits=null"], "limits: null is no value for it"),
        (["--data.validation=null"], "over a file that sets it, write validation: {prompts: null}"),
        (["--data.stall=[]"], "stall: [] is no set of options; it has after_s, action, max_requeues"),
        (["--data.limits.episode_deadline_s=1e12"], "episode_deadline_s: 1000000000000.0, must be above 0 and at most"),
        (["--data.over_sampling=.inf"], "over_sampling: inf is not finite"),
        (
            ["--data.group_size=1"],
            "data.group_size: 1, but advantage=grpo compares the episodes of a group: set it to at",
        ),
        (
            ["--data.group_size=3", "--model.objective=dpo", "--model.reference=initial"],
            "data.group_size: 3, but RolloutBatch.group_ids: group 0 has 3 episodes in one optimizer step; dpo needs",
        ),
        (
            ["--data.group_size=1", "--model.objective=tba", "--model.reference=initial"],
            "data.group_size: 1, but objective=tba compares the episodes of a group",
        ),
        (["--trainer.devices=0"], "error: trainer: `Trainer(devices='0')` value is not a valid input"),
        (["--data.tokenizer=/etc"], "tokenizer: /etc holds no tokenizer"),
        (
            [f"--data.workflow={_AGENT}", "--data.workflow.agent=no.agent"],
            "AgentWorkflow.agent: 'no.agent' is no function",
        ),
        (
            [f"--data.workflow={_AGENT}", "--data.workflow.agent=['x']", "--data.workflow.host=192.0.2.1"],
            "AgentWorkflow.host: '192.0.2.1' is no address of this machine",
        ),
        (["--without_callbacks=[WeightSync]"], "add callbacks.WeightSync to trainer.callbacks"),
        (
            ["--without_callbacks=[Progress]"],
            "'Progress' is none of WeightSync, Opening, Throughput, RewardLogger",
        ),
        (
            ["--without_callbacks=[Summary]", "--trainer.callbacks=[callbacks.Summary]"],
            "without_callbacks: Summary has no effect, trainer.callbacks names it",
        ),
    ],
)
def test_rollout_options_that_cannot_be(args: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("null.yaml").write_text("data: {init_args: {limits: {collect_deadline_s: null}}}")
    assert words in refusal(capsys, "--config", "rollouts.yaml", *args)
    assert not list(Path("runs").rglob("samples.jsonl"))  # before anything is played


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--data.val_samples=4"], ["data.val_samples: is now data.validation.samples"]),
        (
            ["--data.val_prompts.init_args.size=9"],
            ["data.val_prompts.init_args.size: is now data.validation.prompts.init_args.size"],
        ),
        (["--data.on_stall", "stop"], ["data.on_stall: is now data.stall.action"]),
        (
            ["--config=old.yaml"],  # as a run directory of before has it
            [
                "data.reward_deadline_s: is now data.reward_options.deadline_s",
                "data.val_options: is now data.validation",
                "data.max_failures: is now data.limits.max_failures",
            ],
        ),
        (["--data.limits.max_concurent=3"], ["Did you mean 'max_concurrent'? limits accepts: episode_deadline_s, "]),
    ],
)
def test_an_option_that_moved_is_told_by_its_new_name(
    args: list[str], words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    options = {"reward_deadline_s": 3.0, "val_options": {"solved_at": 0.5}, "max_failures": 32, "seed": 1}
    Path("old.yaml").write_text(yaml.safe_dump({"data": {"init_args": options}}))
    said = refusal(capsys, "--config", "rollouts.yaml", *args)
    assert all(line in said for line in words) and "seed" not in said.splitlines(), said


def test_every_option_that_moved_is_one_now() -> None:
    now = inspect.signature(RolloutDataModule).parameters
    for old, new in RolloutDataModule.renamed_options.items():
        record, _, name = new.partition(".")
        assert old not in now and (not name or hasattr(now[record].default, name)), old


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("vocab_size", -1, "model.config.vocab_size: -1, must be between 1 and"),
        ("vocab_size", 10**9, r"model.config: its parameters need \d+ GB of this machine's"),
        ("rope_theta", 0, "model.config.rope_theta: 0, must be a number above 1"),
        ("rms_norm_eps", -1, "model.config.rms_norm_eps: -1, must be above 0"),
        ("hidden_size", 1.5, "model.config: .*'hidden_size'.*expected int, got float"),
        ("num_hidden_layers", {}, r"model.config.num_hidden_layers: \{\}, must be a finite number"),
        ("tie_word_embeddings", 1, "model.config.tie_word_embeddings: 1, must be of the kind of"),
    ],
)
def test_model_fields_that_cannot_be(field: str, value: Any, words: str) -> None:
    config = base(RECORDED)["model"]["init_args"]["model"]["config"]
    with pytest.raises(ValueError, match=words) as caught:
        build_model(ModelSource(config={**config, field: value}))
    assert len(str(caught.value).splitlines()) == 1


def test_an_odd_width_is_an_ordinary_model() -> None:
    """With `head_dim` of its own, nothing divides by `hidden_size`."""
    config = base(RECORDED)["model"]["init_args"]["model"]["config"]
    assert build_model(ModelSource(config={**config, "hidden_size": 15})).config.hidden_size == 15


def test_every_number_must_be_finite_and_fit() -> None:
    check_values({"a": [{"b": 1.0e300}], "c": 2**63 - 1})
    with pytest.raises(ValueError, match=r"a\.b: nan is not finite"):
        check_values({"a": [{"b": float("nan")}]})


# ---- libraries


@pytest.mark.parametrize(
    ("name", "library", "owner"),
    [("minigrid_grpo", "minigrid", "MiniGridPrompts"), ("easy_vqa_grpo", "easy_vqa", "EasyVqaPrompts")],
)
def test_a_library_that_is_not_installed_is_named(
    name: str, library: str, owner: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    said = refusal(capsys, "--config", str(CONFIGS / "experiments" / f"{name}.yaml"), "--trainer.accelerator=cpu")
    extra = library.replace("_", "-")
    assert said.startswith(
        f"error: {owner} needs the library {library}, which is not installed: pip install -e '.[{extra}]'\n"
    )


def test_a_library_that_a_logger_needs_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a class that is not this project's."""
    missing = RequirementCache("wandb>=999")
    monkeypatch.setattr("lightning.pytorch.loggers.wandb._WANDB_AVAILABLE", missing)
    logger = "--trainer.logger=lightning.pytorch.loggers.WandbLogger"
    assert refusal(capsys, "--config", "base.yaml", logger).startswith(f"error: {missing}\n")


# ---- YAML


@pytest.mark.parametrize(("given", "words"), [("chek", "did you mean 'check'?"), ("fly", "commands are fit, validate")])
def test_a_command_that_is_none(given: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main([given, "--config", "base.yaml"])
    assert caught.value.code == 2
    assert f"error: there is no command '{given}'; {words}" in capsys.readouterr().err


def test_a_key_that_is_there_twice_is_named_with_its_line(capsys: pytest.CaptureFixture[str]) -> None:
    Path("twice.yaml").write_text("trainer:\n  max_steps: 1\n  max_epochs: 1\n  max_steps: 2\n")
    said = refusal(capsys, "--config", "base.yaml", "--config", "twice.yaml")
    assert "config: twice.yaml: the key 'max_steps' is there twice, again in line 4" in said


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "trainer:\n\tmax_steps: 1\n",
            "config: laid.yaml, line 2, column 1: found character that cannot start any token",
        ),
        ("trainer: {max_steps: 1\n", "config: laid.yaml, line 2, column 1: "),
        ("", "config: laid.yaml holds no options by their names"),
        ("- trainer\n", "config: laid.yaml holds no options by their names"),
    ],
    ids=["tab", "open", "empty", "list"],
)
def test_a_file_that_cannot_be_read_is_named(text: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("laid.yaml").write_text(text)
    assert words in refusal(capsys, "--config", "base.yaml", "--config", "laid.yaml")


_WARM = {"class_path": "torch.optim.lr_scheduler.LinearLR", "init_args": {"total_iters": 3}}
_JOINED = {
    "class_path": "torch.optim.lr_scheduler.SequentialLR",
    "init_args": {"schedulers": [_WARM], "milestones": []},
}


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ([], "Name a configuration: --config FILE.yaml"),
        (["--data.prompts.help=datamodules.prompts.JsonlPrompts"], "put --config FILE.yaml, or --data datamodules."),
        (
            ["--config=rollouts.yaml", "--data.reward=my.py:score"],
            "Write module.name, with module.py in this directory",
        ),
        (
            ["--config=rollouts.yaml", "--data.reward=[a.b,c.d]"],
            "several are the parts of datamodules.rewards.WeightedSum",
        ),
        (
            ["--config=rollouts.yaml", "--config=joined.yaml"],
            "lr_scheduler names a class whose first argument is the opt",
        ),
    ],
    ids=["no configuration", "help of no class", "path of a file", "two rewards", "joined schedules"],
)
def test_what_is_refused_comes_with_a_remedy(args: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("joined.yaml").write_text(yaml.safe_dump({"model": {"init_args": {"lr_scheduler": _JOINED}}}))
    assert words in refusal(capsys, *args)


_STRATEGY = "--trainer.strategy=app.strategies.DTAStrategy"


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ([_STRATEGY, "--trainer.strategy.max_skipped_steps=0"], "error: DTAStrategy(max_skipped_steps=0): at least 1"),
        ([_STRATEGY, "--trainer.strategy.shard_parameters=true"], "error: DTAStrategy(shard_parameters=True) has no"),
        (["--data.reward=datamodules.rewards.WeightedSum", "--data.reward.rewards={}"], "error: WeightedSum.rewards: "),
    ],
)
def test_what_a_class_refuses_is_told_where_a_type_has_alternatives(
    args: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """jsonargparse raises an error of its own there, which has the text of each alternative's."""
    assert words in refusal(capsys, "--config", "rollouts.yaml", *args)


def test_aliases_that_multiply_are_refused_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 12)]
    Path("laughs.yaml").write_text("\n".join(lines) + "\n")
    assert "values with aliases (*name) written out" in refusal(capsys, "--config", "laughs.yaml")


def test_a_file_in_another_encoding_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    Path("latin.yaml").write_bytes("trainer: {max_steps: 1}  # grün".encode("latin-1"))
    assert "config: latin.yaml is not UTF-8 at byte 29" in refusal(capsys, "--config", "latin.yaml")


def test_ordinary_yaml_reads_as_before() -> None:
    text = "a: &x {k: 1, l: [1e-3, .5]}\nb: {<<: *x, <<: {m: 2}}\nc: *x\n? [k]\n: v\n"
    assert read_yaml(text.replace("? [k]\n: v\n", ""))["c"] == {"k": 1, "l": [0.001, 0.5]}
    assert read_yaml("12") == 12 and read_yaml("[a, b]") == ["a", "b"]
    with pytest.raises(yaml.YAMLError, match="nested more than 100 deep"):
        read_yaml("[" * 200 + "]" * 200)


@pytest.mark.parametrize(
    ("args", "said", "unsaid"),
    [
        (["--data.reward", "exact_mach"], "Did you mean 'datamodules.rewards.exact_match'?", "Union"),
        (["--data.reward", "my_reward.x"], "There is no my_reward to import: run where my_reward.py is", "Callable"),
        (
            ["--data.reward", "misspelt.score"],
            "There is a package modules, and no modules.advantges in it: did you mean 'modules.advantages'?",
            "run where",
        ),
        (["--data.reward", "stale.score"], "no datamodules.rewards.nothing in it: correct the import", "run where"),
        (
            ["--data.reward", "flash_attn.x"],
            "comes with an extra of this project: pip install -e '.[flash]'\n",
            "run where",
        ),
        (
            ["--data.reward", "datamodules.rewards.exact_mach"],
            "error: data.reward: module 'datamodules.rewards' has no attribute 'exact_mach'; did you mean"
            " 'datamodules.rewards.exact_match'?\n",
            "Problem",
        ),
        (
            ["--trainer.callbacks+=callbacks.Picture"],
            "trainer.callbacks: module 'callbacks' has no attribute 'Picture'; did you mean 'callbacks.Pictures'?",
            "Problem",
        ),
        (
            ["--data.reward", "tests.app.cli.signals.earn"],
            "has no attribute 'earn'; it has Diverges, Interruptible, Sends, Speaks, Waits, until",
            "Union",
        ),
        (["--data.workflow", "Nope"], "'Nope' is no import path: name the module too, as in my_module.Nope", "a path"),
        (["--model.regularisers", "{name: kl}"], "Expected a <class 'list'>", "Union"),
        (["--trainer.callbacks", "cb.yaml"], "Expected a path but cb.yaml either not accessible", "no cb to import"),
        (["--model.optimizer.init_args.lr", "1e-3x"], "Expected a <class 'float'>", "import path"),
    ],
)
def test_what_was_meant_is_said_and_nothing_else(
    args: list[str], said: str, unsaid: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("misspelt.py").write_text("from modules.advantges import grpo\n")
    Path("stale.py").write_text("import datamodules.rewards.nothing\n")
    message = refusal(capsys, "--config", str(CONFIGS / "quickstart.yaml"), *args)
    assert said in message and unsaid not in message


@pytest.mark.parametrize(("given", "meant"), [("batch_size", "tasks_per_batch"), ("group_size", "trials")])
def test_what_another_datamodule_calls_otherwise(given: str, meant: str, capsys: pytest.CaptureFixture[str]) -> None:
    data = f"data: {{class_path: datamodules.RecordedDataModule, init_args: {{path: x.npz, {given}: 4}}}}\n"
    Path("recorded.yaml").write_text(data)
    said = refusal(capsys, "--config", "base.yaml", "--config", "recorded.yaml")
    assert f"Did you mean '{meant}'? RecordedDataModule accepts: path, " in said


def test_of_a_line_that_is_too_long_the_end_is_shown_too() -> None:
    """Where what agents print has its cause, and the file with the rest."""
    printed = "^" * 2_000 + " TypeError: x (all of it: agents/1.log)"
    said = cut(f"prompt 'a': the agent exited with code 1; it printed {printed}")
    assert said.startswith("prompt 'a': the agent exited") and said.endswith("TypeError: x (all of it: agents/1.log)")
    assert "characters) ..." in said and len(said) < 550
    assert cut("short") == "short"
