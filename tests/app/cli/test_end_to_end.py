"""Whole runs through the command line where data, rewards or processes are not as in the quickstart: solved GSM8K
problems, rewards that fail, adapters, recorded conversations on one and two processes, and input that cannot be used.
"""

from __future__ import annotations

import asyncio
import csv
import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from app.cli import main
from app.cli.export import export
from app.strategies.checkpoint.trainer_state import put_together
from datamodules.prompts import JsonlPrompts
from datamodules.rewards import RewardOptions, RewardPool, math_verify
from modules import ModelSource, build_model
from tests.helpers.doubles import conversations, off_by_one
from tests.helpers.recorded_samples import byte_tokenizer, line, real_file, write_jsonl
from tests.helpers.tiny_model import HYBRID_LAYERS, TINY_WITH_ENDS

ROOT = Path(__file__).resolve().parents[3]
CONFIGS = ROOT / "configs"
MODEL = TINY_WITH_ENDS
HYBRID = MODEL | HYBRID_LAYERS
MODEL_KEY = "--model.init_args.model.config"

WITHOUT_VALIDATION = ["--data.validation.prompts=null", "--trainer.val_check_interval=null"]
WITHOUT_VALIDATION += ["--trainer.callbacks=[]"]


@pytest.fixture(autouse=True)
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty directory to run in, with the tiny model as a configuration to lay over others."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["arborist"])
    monkeypatch.delenv("ARBORIST_DEBUG", raising=False)
    overlay = {"model": {"init_args": {"model": {"path": None, "config": MODEL}}}, "trainer": {"accelerator": "cpu"}}
    Path("tiny.yaml").write_text(yaml.safe_dump(overlay))
    return tmp_path


def fit(config: str, *flags: str, tiny: bool = True) -> list[str]:
    return ["fit", "--config", str(CONFIGS / config), *(["--config", "tiny.yaml"] if tiny else []), *flags]


def metrics(run_dir: Path) -> dict[str, list[float]]:
    """Column -> its values, where it has one."""
    with (run_dir / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    return {name: [float(row[name]) for row in rows if row[name]] for name in rows[0]}


# ---- GSM8K: a random model never solves a problem, so solutions come from the data


def test_real_solutions_are_right_and_others_wrong() -> None:
    source = JsonlPrompts(str(real_file("gsm8k/train.jsonl")), answer_pattern="#### (.+)", shuffle=False)
    prompts = [source.deal(i) for i in range(0, source.size, 25)]

    async def score(texts: list[str]) -> list[float]:
        pool = RewardPool(math_verify, RewardOptions(deadline_s=60.0))
        try:
            await pool.open()
            return await asyncio.gather(*(pool.score(*pair) for pair in zip(prompts, texts, strict=True)))
        finally:
            pool.close()

    assert set(asyncio.run(score([one.solution for one in prompts]))) == {1.0}
    assert set(asyncio.run(score([off_by_one(one) for one in prompts]))) == {0.0}


@pytest.mark.slow
def test_solved_problems_are_rewarded_and_trained_on(monkeypatch: pytest.MonkeyPatch, workplace: Path) -> None:
    monkeypatch.setenv("ARBORIST_DATA", str(real_file("gsm8k/train.jsonl").parents[1]))
    flags = ["--data.workflow", "tests.helpers.doubles.WrittenSolutions", "--data.max_staleness", "0"]
    main(fit("gsm8k.yaml", *flags, "--trainer.accelerator", "cpu", "--run_dir", "run", tiny=False))
    logged = metrics(workplace / "run")
    assert logged["reward"] == [0.5, 0.5, 0.5]  # of each group two are right
    assert logged["val/accuracy"] == [1.0, 0.0]  # asked for the first time, and again
    assert min(logged["grad_norm"]) > 0 and logged["rollouts/failed"] == [0.0, 0.0, 0.0]
    assert min(d / t for d, t in zip(logged["tokens/dense"], logged["tokens/tree"], strict=True)) > 2


# ---- adapters


@pytest.mark.parametrize("quantization", [None, "nf4"])
def test_an_adapter_is_trained_gone_on_with_merged_and_exported(workplace: Path, quantization: str | None) -> None:
    if quantization is not None:
        pytest.importorskip("bitsandbytes", reason="4 bit need bitsandbytes: pip install -e '.[qlora]'")
    torch.manual_seed(0)
    base = build_model(ModelSource(config=MODEL))
    base.save_pretrained("base")

    def with_adapter(adapter: Any, saved: str, **save: Any) -> list[str]:
        callbacks = [
            {"class_path": "callbacks.SavePretrained", "init_args": save},
            {
                "class_path": "lightning.pytorch.callbacks.ModelCheckpoint",
                "init_args": {"dirpath": saved, "save_last": True, "every_n_train_steps": 2},
            },
        ]
        model = {"path": "base", "config": None, "adapter": adapter, "quantization": quantization}
        overlay = {
            "model": {"init_args": {"model": model}},
            "trainer": {"accelerator": "cpu", "max_steps": 2, "callbacks": callbacks, "enable_checkpointing": True},
        }
        Path("adapter.yaml").write_text(yaml.safe_dump(overlay))
        return ["--config", "adapter.yaml"]

    options = {"r": 4, "lora_alpha": 8, "modules_to_save": None}
    main(fit("quickstart_sft.yaml", *with_adapter(options, "first"), "--run_dir", "warm", tiny=False))
    warm = Path("warm/model")
    assert not (warm / "model.safetensors").exists()

    flags = ["--data.batch_size=2", "--data.group_size=4", "--data.validation.prompts=null"]
    flags += [
        "--data.reward=tests.datamodules.rewards.reward_functions.length",
        "--trainer.val_check_interval=null",
        "--run_dir",
        "rl",
    ]
    main(fit("quickstart.yaml", *with_adapter(str(warm), "second", merge=True), *flags, tiny=False))
    assert min(metrics(Path("rl"))["grad_norm"]) > 0
    export(Path("second/last.ckpt"), Path("merged"))
    export(Path("second/last.ckpt"), Path("alone"), adapter=True)
    for one in (warm, Path("alone")):
        said = json.loads((one / "adapter_config.json").read_text())
        assert said["base_model_name_or_path"] == str(workplace / "base") and said["r"] == 4

    def logits(model: Any) -> torch.Tensor:
        with torch.no_grad():
            found: torch.Tensor = model.eval()(torch.arange(8)[None]).logits
        return found

    trained = logits(build_model(ModelSource(path="base", adapter="alone", quantization=quantization)))
    for path in ("merged", "rl/model"):
        torch.testing.assert_close(logits(build_model(ModelSource(path=path))), trained)
    began = logits(build_model(ModelSource(path="base", adapter=str(warm), quantization=quantization)))
    assert not torch.allclose(trained, began, atol=1e-5) and not torch.allclose(began, logits(base), atol=1e-5)


# ---- rewards that fail while the run goes on


def test_bad_rewards_cost_their_groups_only(caplog: pytest.LogCaptureFixture, workplace: Path) -> None:
    hows = ["fine", "nan", "fine", "raise", "hang", "fine", "fine", "fine"]
    problems = [{"question": f"1+{i}=", "answer": "2", "reward": how} for i, how in enumerate(hows)]
    path = write_jsonl(workplace / "sums.jsonl", problems)
    prompts = ["--data.prompts", "datamodules.prompts.JsonlPrompts", "--data.prompts.path", str(path)]
    options = {
        "--data.prompts.shuffle": "false",
        "--data.reward": "tests.datamodules.rewards.reward_functions.misbehave",
        "--data.reward_options.deadline_s": "1.0",
        "--data.batch_size": "5",
        "--data.group_size": "2",
        "--data.max_staleness": "0",
        "--trainer.max_steps": "1",
        "--run_dir": "run",
    }
    with caplog.at_level(logging.WARNING):
        main(fit("quickstart.yaml", *WITHOUT_VALIDATION, *prompts, *(x for pair in options.items() for x in pair)))
    logged = metrics(workplace / "run")
    assert logged["rollouts/failed"] == [3.0] and logged["rollouts/accepted"] == [5.0]
    assert np.isfinite(logged["reward"]).all() and np.isfinite(logged["loss"]).all()
    assert logged["rollouts/reward"] == pytest.approx(logged["reward"])  # nothing is filtered
    dropped = [record.getMessage() for record in caplog.records if "group dropped" in record.getMessage()]
    for number, said in ((2, "returned nan"), (4, "no such answer key"), (5, "did not return within 1 s")):
        (message,) = {one for one in dropped if f":{number}'" in one}  # once more in a batch that nobody waits for
        assert said in message and f"sums:{number}" in message
    assert len(set(dropped)) == 3


@pytest.mark.parametrize(
    ("workflow", "words"),
    [
        ("ShortMask", ["Trajectory.loss_mask of", "entries but tokens has", "align them"]),
        ("Mistyped", ["AttributeError", "no_such_field"]),
    ],
)
def test_a_workflow_that_always_fails_ends_the_run(
    workflow: str, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--data.workflow", f"tests.helpers.doubles.{workflow}", "--data.limits.max_failures=3"]
    printed = _mistake(capsys, *fit("quickstart.yaml", *WITHOUT_VALIDATION, *flags, "--data.workflow.max_new_tokens=5"))
    assert all(word in printed for word in ["3 groups in a row (limits.max_failures)", *words]), printed


# ---- recorded conversations, on one process and on two


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "launcher", "devices"),
    [
        (MODEL, [], ["--trainer.devices", "2"]),
        (HYBRID, ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"], []),  # which says how many
    ],
    ids=["attention", "hybrid of torchrun"],
)
def test_two_processes_train_recorded_data_as_one(
    workplace: Path, model: dict[str, Any], launcher: list[str], devices: list[str]
) -> None:
    overlay = {"model": {"init_args": {"model": {"path": None, "config": model}}}, "trainer": {"accelerator": "cpu"}}
    Path("tiny.yaml").write_text(yaml.safe_dump(overlay))
    flags = [f"--data.path={conversations(workplace / 'made.npz')}", "--data.tasks=null", "--data.tasks_per_batch=2"]
    flags += ["--trainer.max_epochs=3", "--data.shuffle=true"]
    main(fit("tau_recorded.yaml", *flags, "--run_dir", "one"))
    env = {k: v for k, v in os.environ.items() if k not in ("LOCAL_RANK", "RANK", "WORLD_SIZE")}
    env |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, *launcher, "-m", "app", *fit("tau_recorded.yaml", *flags), *devices]
    done = subprocess.run(command, cwd=workplace, env=env, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    (run,) = (workplace / "runs" / "tiny").iterdir()
    one, two = metrics(workplace / "one"), metrics(run)
    # Several ranks also report what passing the batch round took, and what their calibration measured.
    of_ranks = {"strategy/share_mb", "strategy/share_seconds", "strategy/pair_cost"}
    assert len(one["loss"]) == 6 and set(one) - of_ranks == set(two) - of_ranks
    assert {"strategy/share_mb", "strategy/share_seconds"} <= set(two) - set(one)
    for name in set(one) - of_ranks:
        if not name.startswith("time/") and name != "tokens/s":
            assert two[name] == pytest.approx(one[name], abs=1e-4), name
    assert json.loads((run / "summary.json").read_text())["dense_tokens"] == sum(one["tokens/dense"])


@pytest.mark.slow
def test_a_hybrid_that_is_killed_goes_on_as_if_it_had_not_been(workplace: Path) -> None:
    """kill -9 in the middle of training, then the same command from the last checkpoint: the weights of a run that
    was left alone."""
    saving = {"every_n_train_steps": 1, "filename": "{step}", "save_last": True, "dirpath": "saved"}
    callback = {"class_path": "lightning.pytorch.callbacks.ModelCheckpoint", "init_args": saving}
    overlay = {
        "model": {"init_args": {"model": {"path": None, "config": HYBRID}}},
        "trainer": {"accelerator": "cpu", "max_epochs": 1000, "enable_checkpointing": True, "callbacks": [callback]},
    }
    Path("tiny.yaml").write_text(yaml.safe_dump(overlay))
    flags = [f"--data.path={conversations(workplace / 'made.npz')}", "--data.tasks=null", "--data.shuffle=true"]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "app", *fit("tau_recorded.yaml", *flags), "--run_dir", "killed"]
    with subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        ends = time.monotonic() + 120
        while not any(int(path.stem.partition("=")[2]) > 2 for path in (workplace / "saved").glob("step=*.ckpt")):
            assert process.poll() is None and time.monotonic() < ends, "it made no checkpoint of its third step"
            time.sleep(0.01)
        process.kill()
    reached = put_together(workplace / "saved" / "last.ckpt")["global_step"]
    more = f"--trainer.max_steps={reached + 3}"
    main(fit("tau_recorded.yaml", *flags, more, "--run_dir", "resumed", "--ckpt_path", "saved/last.ckpt"))
    resumed = put_together(workplace / "saved" / "last.ckpt")
    saving["dirpath"] = "whole"
    Path("tiny.yaml").write_text(yaml.safe_dump(overlay))
    main(fit("tau_recorded.yaml", *flags, more, "--run_dir", "alone"))
    alone = put_together(workplace / "whole" / "last.ckpt")
    assert resumed["global_step"] == alone["global_step"] == reached + 3
    assert resumed["state_dict"].keys() == alone["state_dict"].keys()
    for name, weight in alone["state_dict"].items():
        torch.testing.assert_close(resumed["state_dict"][name], weight, rtol=0, atol=1e-6, msg=name)


def test_lightnings_profiler_sees_the_tree_pass(workplace: Path) -> None:
    profiler = "--trainer.profiler=lightning.pytorch.profilers.SimpleProfiler"
    where = ["--trainer.profiler.dirpath=profiles", "--trainer.profiler.filename=steps"]
    flags = [f"--data.path={conversations(workplace / 'made.npz')}", "--data.tasks=null", "--trainer.max_steps=2"]
    main(fit("tau_recorded.yaml", *flags, profiler, *where, "--run_dir", "run"))
    (report,) = (workplace / "profiles").glob("*steps*")
    rows = [line.split("|") for line in report.read_text().splitlines() if "DTAStrategy.backward" in line]
    assert rows and int(rows[0][3]) == 2, report.read_text()


# ---- input that cannot be used: one message with field and remedy, exit code 2


def _mask_of_another_length(path: Path) -> None:
    with np.load(conversations(path)) as file:
        arrays = {name: file[name] for name in file.files}
    np.savez(path, **{**arrays, "loss_mask": arrays["loss_mask"][:-1]})


def _nothing(path: Path) -> None:
    with np.load(conversations(path)) as file:
        arrays = {name: file[name] for name in file.files}
    np.savez(path, **{name: array[:0] for name, array in arrays.items()} | {"offsets": np.array([0])})


@pytest.mark.parametrize(
    ("make", "flags", "words"),
    [
        (conversations, [f"{MODEL_KEY}.vocab_size=50"], ["tokens", "vocabulary of 50", "tokenizer"]),
        (conversations, [f"{MODEL_KEY}.max_position_embeddings=30"], ["40 tokens", "max_position_embeddings of 30"]),
        (conversations, ["--data.trials=1"], ["data.trials: 1", "compares the episodes"]),
        (conversations, ["--data.trials=9"], ["trials: 9", "has only 4", "lower"]),
        (conversations, ["--data.tasks=[0,7]"], ["tasks: '7'", "is not in"]),
        (conversations, ["--data.trails=4"], ["trails", "Did you mean 'trials'?"]),
        (_mask_of_another_length, [], ["made.npz", "'loss_mask' has shape"]),
        (_nothing, [], ["made.npz", "no conversation", "data.path"]),
    ],
)
def test_recorded_data_that_cannot_be_used(
    make: Callable[[Path], object],
    flags: list[str],
    words: list[str],
    workplace: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = workplace / "made.npz"
    make(path)
    printed = _mistake(capsys, *fit("tau_recorded.yaml", f"--data.path={path}", "--data.tasks=null", *flags))
    assert all(word in printed for word in words), printed


def test_a_broken_conversation_is_named_by_file_and_line(workplace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    byte_tokenizer().save_pretrained(workplace / "bytes")
    broken = write_jsonl(workplace / "told.jsonl", [line(), line(trial=1), '{"task_id": "1", '])
    flags = [f"--data.path={broken}", "--data.tokenizer=bytes", "--data.tasks=null", "--data.trials=2"]
    printed = _mistake(capsys, *fit("tau_recorded.yaml", *flags))
    assert "told.jsonl:3: not valid JSON" in printed


@pytest.mark.parametrize(
    ("text", "flags", "words"),
    [
        ("", [], ["JsonlPrompts.path", "problems.jsonl holds no prompts"]),
        ("\n\n", [], ["JsonlPrompts.path", "problems.jsonl holds no prompts"]),
        ('{"question": "1+1=", "answer": "2"}\n{"question": "1+2=", "answer"\n', [], ["problems.jsonl:2"]),
        ('{"question": "1+1="}\n', [], ["problems.jsonl:1", "'answer'", "answer_field"]),
        ('{"question": "", "answer": "2"}\n', [], ["problems.jsonl:1", "the prompt is empty"]),
        ('{"question": "what?", "answer": "2"}\n', [], ["problems:1", "cannot be tokenized"]),
        ('{"question": "1+1=", "answer": "2"}\n', [f"{MODEL_KEY}.vocab_size=3"], ["vocabulary of 3", "tokenizer"]),
        ('{"question": "%s=", "answer": "2"}\n' % ("1+" * 40), [], ["context of 64", "max_new_tokens", "long_prompts"]),
        ('{"question": "1+1=", "answer": "2"}\n', ["--data.tokenizer=chars:01"], ["tokenizer: no directory", "char:"]),
    ],
)
def test_prompts_that_cannot_be_used(
    text: str, flags: list[str], words: list[str], workplace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (workplace / "problems.jsonl").write_text(text)
    prompts = ["--data.prompts=datamodules.prompts.JsonlPrompts", f"--data.prompts.path={workplace / 'problems.jsonl'}"]
    printed = _mistake(capsys, *fit("quickstart.yaml", *prompts, *flags))
    assert all(word in printed for word in words), printed


@pytest.mark.parametrize("config", ["gsm8k.yaml", "tau_recorded.yaml"])
def test_missing_data_says_what_to_do(
    config: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("ARBORIST_DATA", raising=False)
    printed = _mistake(capsys, *fit(config, tiny=False))
    assert "ARBORIST_DATA, which is not set" in printed and "arborist data import" in printed


def _mistake(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    """What the command prints; asserts exit code 2 and no traceback."""
    with pytest.raises(SystemExit) as caught:
        main(list(args))
    printed = capsys.readouterr().err
    assert caught.value.code == 2
    assert "Traceback" not in printed and len(printed.splitlines()) < 12, printed
    return printed
