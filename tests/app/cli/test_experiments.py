"""Every configuration of configs/experiments: short, parsed as it is written, and run for two steps with a tiny model,
the embedded engine in the place of servers and a few records in the place of what would be downloaded."""

from __future__ import annotations

import copy
import csv
import gzip
import json
import math
from pathlib import Path
from typing import Any

import pytest
import yaml

from app.cli import main
from examples.vision.make_model import write
from modules import ModelSource, build_model
from tests.app.cli.test_end_to_end import CONFIGS, MODEL, workplace  # noqa: F401 - an autouse fixture
from tests.helpers.doubles import conversations
from tests.helpers.judge_server import JudgeServer
from tests.helpers.recorded_samples import byte_tokenizer, line, write_jsonl
from tests.helpers.selection import some
from tests.helpers.tiny_vision import noise, png

EXPERIMENTS = sorted((CONFIGS / "experiments").glob("*.yaml"))
QUICK = ("gsm8k_grpo", "sft_tau", "dpo_pairs")  # one of each module
VOCABULARY = 270
TINY = {**MODEL, "vocab_size": VOCABULARY, "max_position_embeddings": 1024}

# Laid over all that roll out. `None` removes a key, so that the default holds.
ROLLOUTS: dict[str, Any] = {
    "engine": {
        "class_path": "datamodules.inference.EmbeddedEngine",
        "init_args": {"kv_cache_tokens": 4096, "num_threads": 1},
    },
    "batch_size": 2,
    "group_size": 2,
    "max_staleness": 0,
    "reward_options": {"deadline_s": 120.0},
}
SHORT = {"workflow": {"init_args": {"max_new_tokens": 6}}}
LENGTH = "tests.datamodules.rewards.reward_functions.length"  # has a signal where a random model solves nothing


def gsm8k(**more: Any) -> dict[str, Any]:
    return {**ROLLOUTS, **SHORT, "validation": {"prompts": {"init_args": {"size": 2}}}, **more}


def table(name: str) -> dict[str, Any]:
    return {"init_args": {"path": f"{name}.parquet", "name": None, "split": None}}


def sees(**more: Any) -> dict[str, Any]:
    """Of the experiments with pictures."""
    data = {**ROLLOUTS, **SHORT, "reward": LENGTH, "tokenizer": "sees", **more}
    return {"data": data, "model": {"model": {"path": "sees", "config": None}}, "expect": {"reward", "val/accuracy"}}


OVERLAYS: dict[str, dict[str, Any]] = {
    "geometry3k_grpo": sees(prompts=table("figures"), validation={"prompts": table("figures")}),
    "clevr_count_grpo": sees(
        prompts=table("figures"),
        validation={"prompts": {"init_args": {"path": "figures.parquet", "name": None, "split": None, "size": 2}}},
    ),
    "easy_vqa_grpo": sees(validation={"prompts": {"init_args": {"size": 2}}}),
    "minigrid_grpo": sees(
        reward=None,  # the world's
        reward_options=None,
        prompts={"init_args": {"tile": 8}},
        validation={"prompts": {"init_args": {"size": 2, "tile": 8}}},
        workflow={"init_args": {"max_turns": 3, "max_new_tokens": 4}},
    ),
    "gsm8k_grpo": {"data": gsm8k(), "expect": {"val/accuracy"}},
    "gsm8k_qlora": {
        "data": gsm8k(),
        "model": {"model": {"path": "teacher", "config": None}},
        "expect": {"kl", "val/accuracy"},
    },
    "gsm8k_ppo": {
        "data": gsm8k(batch_size=4, group_size=1),
        "model": {"minibatches": 2, "critic_warmup": 0},
        "expect": {"value_loss", "val/accuracy"},
    },
    "math_dapo": {
        "data": {
            **ROLLOUTS,
            **SHORT,
            "prompts": table("dapo"),
            "validation": {
                "prompts": {"aime24": table("problems"), "math500": table("problems")},
                "samples": {"aime24": 4, "math500": 2},
            },
            "reward": LENGTH,
        },
        "model": {
            "minibatches": 2,
            "regularisers": [
                {"name": "overlong", "coef": 1.0, "where": "reward", "options": {"max_tokens": 6, "buffer_tokens": 2}}
            ],
        },
        "checkpoint": "val/aime24/mean@4",
        "expect": {"penalty/overlong", "val/aime24/pass@4", "val/aime24/maj@4", "val/math500/pass@2", "val/accuracy"},
    },
    "tau_airline_grpo": {
        "data": {
            **ROLLOUTS,
            "workflow": {"init_args": {"max_new_tokens": 48, "tool_latency_s": 0.01}},
            "prompts": {"init_args": {"vocab_size": 100}},
            "tokenizer": "char:0123456789",
            "reward_options": None,  # the workflow sets rewards itself
        },
        "expect": {"reward"},
    },
    "reasoning_gym": {"data": {**ROLLOUTS, **SHORT}, "expect": {"val/countdown/pass@1", "val/countdown/accuracy"}},
    "sft_tau": {"data": {"tasks_per_batch": 2}, "expect": {"loss"}},
    "dpo_pairs": {
        "data": {"prompts": table("pairs"), "batch_size": 2},
        "model": {"minibatches": 2},
        "expect": {"margin", "preferred"},
    },
    "reward_model": {
        "data": {"batch_size": 2, "validation": {"init_args": {"size": 2}}},
        "expect": {"accuracy", "margin", "val/accuracy", "val/calibration_error"},
    },
    "rubric_grpo": {
        "data": gsm8k(reward={"init_args": {"model": {"cache": None}}}),
        "expect": {"reward/right", "reward/drift", "rollouts/judge_calls", "val/accuracy"},
    },
    "distill": {
        "data": gsm8k(),
        "model": {"reference": {"path": "teacher", "dtype": None}},
        "expect": {"penalty/kl", "reward", "val/accuracy"},
    },
}


def files(folder: Path) -> None:
    """What the experiments read, in small."""
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    byte_tokenizer().save_pretrained(folder / "models")
    (folder / "gsm8k").mkdir()
    (folder / "tau").mkdir()
    for name in ("train", "test"):
        write_jsonl(
            folder / "gsm8k" / f"{name}.jsonl",
            [{"question": f"What is {i} + {i}?", "answer": f"Twice {i}.\n#### {2 * i}"} for i in range(6)],
        )
    conversations(folder / "tau" / "airline_tokens.npz", trials=2)
    spoken = [line(str(task), reward=reward, answer=f"Done {task}.") for task in range(4) for reward in (0.0, 1.0)]
    with gzip.open(folder / "tau" / "retail_gpt-4.1.jsonl.gz", "wt") as file:
        file.writelines(json.dumps({**one, "trial": k % 2}) + "\n" for k, one in enumerate(spoken))
    (folder / "tau" / "retail_system.json").write_text(json.dumps({"system_prompt": "Be brief.", "tools": []}))
    question = [{"role": "user", "content": "Two and two?"}]
    answers = {key: [*question, {"role": "assistant", "content": key}] for key in ("chosen", "rejected")}
    rows = {
        "dapo": [{"prompt": f"{i} + 1?", "solution": str(i + 1), "reward_model": {"style": "rule"}} for i in range(8)],
        "problems": [{"problem": f"{i} + 2?", "solution": "so it is", "answer": str(i + 2)} for i in range(2)],
        "pairs": [{"prompt": f"Two and two? ({i})", **answers} for i in range(6)],
    }
    (folder / "hh-rlhf" / "helpful-base").mkdir(parents=True)
    said = {key: f"\n\nHuman: Two and two?\n\nAssistant: {key}" for key in ("chosen", "rejected")}
    for name in ("train", "test"):
        with gzip.open(folder / "hh-rlhf" / "helpful-base" / f"{name}.jsonl.gz", "wt") as pairs:
            pairs.writelines(json.dumps(said) + "\n" for _ in range(4))
    build_model(ModelSource(config=TINY)).save_pretrained(folder / "teacher")
    byte_tokenizer().save_pretrained(folder / "teacher")
    write(folder / "sees", hidden=32, tower=16, patch=4, merge=2)
    rows["figures"] = [
        {"images": [{"bytes": png(noise(i)), "path": None}], "problem": f"<image>Find {i}.", "answer": str(i)}
        for i in range(4)
    ]
    for name, records in rows.items():
        parquet.write_table(arrow.Table.from_pylist(records), folder / f"{name}.parquet")


def laid_over(written: dict[str, Any], overlay: dict[str, Any]) -> dict[str, Any]:
    """`written` with the leaves of `overlay`; null removes, another class brings its own arguments."""
    found = copy.deepcopy(written)
    for key, value in overlay.items():
        old = found.get(key)
        if value is None:
            found.pop(key, None)
        elif isinstance(value, dict) and isinstance(old, dict) and "class_path" not in value:
            found[key] = laid_over(old, value)
        else:
            found[key] = value
    return found


def small(path: Path) -> dict[str, Any]:
    """The experiment with a tiny model on this machine, for two rollout batches."""
    overlay = OVERLAYS[path.stem]
    config = yaml.safe_load(path.read_text())
    trainer: dict[str, Any] = {"accelerator": "cpu", "devices": 1, "precision": "32-true", "max_epochs": None}
    steps = 2 * overlay.get("model", {}).get("minibatches", 1)
    trainer |= {"max_steps": steps}
    if "val_check_interval" in config["trainer"]:
        trainer["val_check_interval"] = steps
    config["trainer"] = laid_over(config["trainer"], trainer)
    for callback in config["trainer"].get("callbacks", []):
        if isinstance(callback, dict) and "checkpoint" in overlay:
            callback["init_args"]["monitor"] = overlay["checkpoint"]
    model = {"path": None, "dtype": None, "config": TINY}
    of_model = laid_over({"model": model}, overlay.get("model", {}))
    config["model"]["init_args"] = laid_over(config["model"]["init_args"], of_model)
    data = {"tokenizer": "models", **overlay["data"]}
    config["data"]["init_args"] = laid_over(config["data"]["init_args"], data)
    if path.stem == "reasoning_gym":
        config["data"]["init_args"]["validation"]["prompts"]["countdown"]["init_args"]["size"] = 2
    return config


def test_there_is_an_overlay_for_each() -> None:
    assert [path.stem for path in EXPERIMENTS] == sorted(OVERLAYS)


@pytest.mark.parametrize("path", EXPERIMENTS, ids=lambda path: path.stem)
def test_prompts_are_validated_in_the_form_they_are_trained_in(path: Path) -> None:
    data = yaml.safe_load(path.read_text())["data"]["init_args"]

    def forms(source: dict[str, Any]) -> set[bool]:
        """Whether the sources in `source` give chats."""
        inner = [one for one in source.values() if isinstance(one, dict)]
        if "class_path" in source and "class_path" not in str(source["init_args"]):
            return {bool(source["init_args"].get("chat"))}
        return set().union(*map(forms, inner))

    assert forms(data.get("validation", {})) <= forms(data.get("prompts", {}))


@pytest.mark.parametrize(
    "path", some(EXPERIMENTS, [one for one in EXPERIMENTS if one.stem in QUICK]), ids=lambda path: path.stem
)
def test_an_experiment(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for stem, package in (
        ("reasoning_gym", "reasoning_gym"),
        ("gsm8k_qlora", "bitsandbytes"),
        ("easy_vqa_grpo", "easy_vqa"),
        ("minigrid_grpo", "minigrid"),
    ):
        if path.stem == stem:
            pytest.importorskip(package)
    files(tmp_path)
    monkeypatch.setenv("ARBORIST_DATA", str(tmp_path))
    assert len(path.read_text().splitlines()) <= 40
    with pytest.raises(SystemExit) as end:
        main(["fit", "--config", str(path), "--print_config"])
    assert not end.value.code
    full = yaml.safe_load(capsys.readouterr().out)
    assert full["model"]["class_path"] == yaml.safe_load(path.read_text())["model"]["class_path"]

    with JudgeServer(lambda asked, number: json.dumps({"right": number % 10, "reasoned": 5})) as judge:
        config = yaml.safe_dump(small(path)).replace("http://127.0.0.1:30000/v1", judge.url)
        Path("small.yaml").write_text(config)
        main(["fit", "--config", "small.yaml", "--run_dir", "run"])
    with Path("run/metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    logged = {name: [float(row[name]) for row in rows if row[name]] for name in rows[0]}
    steps = 2 * OVERLAYS[path.stem].get("model", {}).get("minibatches", 1)
    assert len(logged["loss"]) == steps and all(math.isfinite(value) for value in logged["loss"])
    assert OVERLAYS[path.stem]["expect"] <= set(logged)
    if "logprob_diff_max" in logged:
        assert max(logged["logprob_diff_max"]) < 1e-4
    if "SavePretrained" in path.read_text():
        assert {"model.safetensors", "tokenizer.json"} <= {file.name for file in Path("run/model").iterdir()}
    if "ModelCheckpoint" in path.read_text():
        assert list(Path("run").rglob("*.ckpt"))
