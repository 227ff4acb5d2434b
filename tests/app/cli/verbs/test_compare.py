"""`arborist compare`: two policies on the same prompts, played for real; what it says, by task, and what it refuses."""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from app.cli import main
from app.cli.compare import Played, _format, _settings, _side, add_arguments, compared
from datamodules.prompts import JsonlPrompts
from datamodules.prompts.tokenizers import load_tokenizer
from modules.models import ModelSource, build_model
from tests.helpers.tiny_model import TINY_WITH_ENDS

ROOT = Path(__file__).resolve().parents[4]
TOKENIZER = "char:0123456789+-*="


def played(solved: int, of: int, tokens: float = 5.0, first: int = 0) -> Played:
    """The first `solved` of prompts "0", "1", ... are solved."""
    names = [str(i) for i in range(first, of)]
    return Played({one: float(int(one) < solved) for one in names}, dict.fromkeys(names, tokens), 2.0)


def test_a_clear_difference_is_told_with_what_it_cost() -> None:
    text, figures = compared(played(20, 100), played(60, 100, 8.0), {}, 0.05)
    assert "B against A: better; 95% interval" in text and "40 prompts better, 0 worse" in text
    assert figures["distinguishable"] and "prompts_for_least" not in figures
    assert "generated tokens an episode: 5.0 and 8.0" in text and "2.0 and 2.0" in text
    worse, _ = compared(played(60, 100), played(20, 100), {}, 0.05)
    assert "B against A: worse" in worse


def test_a_small_one_is_not_and_says_how_many_prompts_would_tell() -> None:
    a, b = played(50, 100), played(50, 100)
    b.rewards["3"], b.rewards["70"], b.rewards["71"] = 0.0, 1.0, 1.0
    text, figures = compared(a, b, {}, 0.05)
    assert "not distinguishable" in text and not figures["distinguishable"]
    # One prompt more on either side: variance 5 / 102, (1.96 + 0.84)^2 * 0.049 / 0.05^2.
    assert figures["prompts_for_least"] == 154
    assert f"about {figures['prompts_for_least']:,} prompts" in text


def test_tasks_are_told_apart_and_prompts_of_one_side_counted() -> None:
    tasks = {str(i): "easy" if i < 40 else "hard" if i < 99 else "lone" for i in range(100)}
    text, figures = compared(played(40, 100), played(80, 100, first=1), tasks, 0.05)
    found = figures["tasks"]
    assert found["hard"]["better"] == 40 and found["easy"]["difference"] == 0 and "lone" not in found
    assert "1 prompts were answered by one side alone" in text and figures["one_sided"] == 1
    assert "too few to compare" in text and found["all"]["prompts"] == 99


def test_episodes_that_failed_are_counted_though_others_of_their_prompts_are_compared() -> None:
    """Of four episodes a prompt the one that ends is the short one: a mean of those that are left."""
    text, figures = compared(played(50, 100), replace(played(60, 100), failed=300, asked=400), {}, 0.05)
    assert "B: 300 of 400 episodes failed and are in none of these numbers" in text and "A: 0" not in text
    assert figures["failed"] == [0, 300]


def test_nothing_in_common() -> None:
    with pytest.raises(ValueError, match="both sides answered 0 prompts"):
        compared(played(1, 2), played(1, 4, first=2), {}, 0.05)


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model directory, the run it could be of, and some prompts."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["arborist"])
    tokenizer = load_tokenizer(TOKENIZER)
    config = {**TINY_WITH_ENDS, "vocab_size": len(tokenizer), "max_position_embeddings": 64}
    build_model(ModelSource(config=config)).save_pretrained("run/model")
    settings: Any = yaml.safe_load((ROOT / "configs/quickstart.yaml").read_text())
    settings["trainer"] |= {"accelerator": "cpu"}
    settings["model"]["init_args"]["model"] = {"path": "run/model"}
    Path("run/config.yaml").write_text(yaml.safe_dump(settings))
    rows = [{"question": f"{i}+1=", "answer": str(i + 1), "digits": len(str(i))} for i in range(6, 14)]
    Path("prompts.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return tmp_path


def settings_of(configuration: dict[str, Any]) -> dict[str, Any]:
    """What model `run/model` plays prompts.jsonl with, under this configuration."""
    Path("mine.yaml").write_text(yaml.safe_dump(configuration))
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    arguments = parser.parse_args(["run", "run/model", "--prompts", "prompts.jsonl"])
    return _settings(_side(Path("run/model"), "B"), Path("mine.yaml"), arguments)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("math_dapo", {"question_field": "problem", "chat": True}),
        ("geometry3k_grpo", {"question_field": "problem", "image_field": "images", "system": "Put the final answer"}),
        (
            "clevr_count_grpo",
            {"question_field": "problem", "image_field": "images", "system": "Answer with the"},
        ),
    ],
)
def test_prompts_are_put_as_the_run_puts_its_own(workplace: Path, name: str, options: dict[str, Any]) -> None:
    """A table's, pictures included, and of several sets the first's."""
    found = settings_of(yaml.safe_load((ROOT / f"configs/experiments/{name}.yaml").read_text()))
    prompts = found["data"]["init_args"]["validation"]["prompts"]
    assert prompts["class_path"] == "datamodules.prompts.JsonlPrompts"
    given = {key: value for key, value in prompts["init_args"].items() if key not in ("path", "shuffle")}
    assert given.keys() == options.keys() and all(str(given[key]).startswith(str(options[key])) for key in given)
    record = {"problem": "p", "answer": "a", "images": ["one.png"]}
    Path("prompts.jsonl").write_text(json.dumps(record))
    dealt = JsonlPrompts(**prompts["init_args"]).deal(0)
    assert dealt.messages[-1]["role"] == "user" and len(dealt.pictures) == ("image_field" in options)


@pytest.mark.parametrize(
    ("prompts", "held_out", "found"),
    [
        (
            {"class_path": "JsonlPrompts", "init_args": {"path": "a", "answer_field": None}},
            None,
            {"answer_field": None},
        ),
        ({"class_path": "DatasetPrompts"}, {"class_path": "nowhere.Prompts"}, {}),
        ({"class_path": "ReasoningGymPrompts", "init_args": {"tasks": ["a"], "chat": True}}, None, {"chat": True}),
        (
            {"class_path": "CurriculumPrompts", "init_args": {"prompts": {"class_path": "JsonlPrompts"}}},
            {"class_path": "TauPrompts", "init_args": {"path": "a", "system": "a_system.json"}},
            {},
        ),
        ("datamodules.prompts.ArithmeticPrompts", None, None),
        ({"class_path": "DialoguePairs", "init_args": {"path": "a", "system": "Be brief."}}, None, None),
    ],
)
def test_whose_format_is_taken(prompts: Any, held_out: Any, found: Any) -> None:
    assert _format({"prompts": prompts, "validation": {"prompts": held_out}}) == found


def fails_to_play(*sides: str) -> None:
    """Compares where every run that is started ends with an error of its own."""
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit) as ended:
        patch.setattr(subprocess, "run", lambda command: subprocess.CompletedProcess(command, 3))
        main(["compare", *sides, "--prompts", "prompts.jsonl", "--out", "out"])
    assert ended.value.code == 2


def test_where_no_format_is_known_it_is_said(workplace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fails_to_play("run", "run/model")
    said = capsys.readouterr().err
    assert "prompts.jsonl is taken as plain text of the fields 'question' and 'answer'" in said
    assert "error: A: run could not play (out/a.yaml), exit code 3;" in said and "Traceback" not in said


@pytest.mark.parametrize("sides", [("warm", "run"), ("run", "warm")])
def test_both_play_under_the_run_that_can(workplace: Path, sides: tuple[str, str]) -> None:
    """A warm start's configuration has no workflow."""
    shutil.copytree("run/model", "warm/model")
    shutil.copy(ROOT / "configs/quickstart_sft.yaml", "warm/config.yaml")
    fails_to_play(*sides)
    settings = yaml.safe_load(Path("out/a.yaml").read_text())
    assert settings["data"]["init_args"]["workflow"]["class_path"].endswith("RLVRWorkflow")
    assert settings["model"]["init_args"]["model"]["path"] == f"{sides[0]}/model"


@pytest.mark.parametrize("given", ["lora", "lora/model"])
def test_an_adapter_is_played_on_the_model_it_names(workplace: Path, given: str) -> None:
    """As `SavePretrained` leaves one, whose run may have no checkpoint any more."""
    adapted: Any = build_model(ModelSource(path="run/model", adapter={"r": 2}))
    adapted.save_pretrained("lora/model")
    settings = yaml.safe_load(Path("run/config.yaml").read_text())
    settings["model"]["init_args"]["model"] = {"path": "run/model", "adapter": {"r": 2}, "quantization": "nf4"}
    Path("lora/config.yaml").write_text(yaml.safe_dump(settings))
    fails_to_play(given, "run")
    base = str(workplace / "run/model")
    played_with = yaml.safe_load(Path("out/a.yaml").read_text())["model"]["init_args"]["model"]
    assert played_with == {"path": base, "adapter": "lora/model", "quantization": "nf4"}


def test_an_adapter_that_names_no_model(workplace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("alone").mkdir()
    Path("alone/adapter_config.json").write_text('{"base_model_name_or_path": null}')
    fails_to_play("alone", "run")
    assert "A: alone does not say on what model it was trained" in capsys.readouterr().err


def test_the_report_is_written_where_the_run_has_none(workplace: Path) -> None:
    configuration = yaml.safe_load(Path("run/config.yaml").read_text())
    assert "without_callbacks" not in settings_of(configuration | {"without_callbacks": ["Report"]})


@pytest.mark.slow
def test_a_model_without_experts_plays_against_one_whose_run_records_them(workplace: Path) -> None:
    """The dense one's engine would be refused."""
    settings = yaml.safe_load(Path("run/config.yaml").read_text())
    settings["data"]["init_args"]["engine"]["init_args"]["record_experts"] = True
    Path("run/config.yaml").write_text(yaml.safe_dump(settings))
    main(["compare", "run", "run/model", "--prompts", "prompts.jsonl", "--out", "out"])
    assert json.loads(Path("out/compare.json").read_text())


OTHER = "char:=*-+9876543210"


@pytest.mark.parametrize("kind", ["model", "run", "checkpoint"])
def test_each_side_is_played_with_the_tokenizer_of_its_ids(workplace: Path, kind: str) -> None:
    """As large, so that nothing else would tell; what is numbered alike keeps the template of the configuration."""
    shutil.copytree("run/model", "other/model")
    load_tokenizer(OTHER).save_pretrained("other/model")
    if kind != "model":
        settings = yaml.safe_load(Path("run/config.yaml").read_text())
        settings["data"]["init_args"]["tokenizer"] = OTHER
        Path("other/config.yaml").write_text(yaml.safe_dump(settings))
    if kind == "checkpoint":
        shutil.rmtree("other/model")
        Path("other/checkpoints/last.ckpt").mkdir(parents=True)
    load_tokenizer(TOKENIZER).save_pretrained("run/model")
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    given = "other/model" if kind == "model" else "other"
    arguments = parser.parse_args(["run", given, "--prompts", "prompts.jsonl"])
    found = [
        _settings(_side(path, "A"), Path("run/config.yaml"), arguments)["data"]["init_args"]["tokenizer"]
        for path in (Path("run"), Path(given))
    ]
    assert found == [TOKENIZER, OTHER if kind == "checkpoint" else "other/model"]


def test_nobody_needs_what_the_run_was_trained_on(workplace: Path) -> None:
    """But a tokenizer that is learnt from it and was kept nowhere."""
    elsewhere = {"class_path": "datamodules.prompts.JsonlPrompts", "init_args": {"path": "not/here.jsonl"}}
    settings = yaml.safe_load(Path("run/config.yaml").read_text())
    settings["data"]["init_args"]["prompts"] = elsewhere
    found = settings_of(settings)["data"]["init_args"]
    assert found["prompts"] == found["validation"]["prompts"] != elsewhere
    settings["data"]["init_args"]["tokenizer"] = "train:300"
    Path("run/config.yaml").write_text(yaml.safe_dump(settings))
    assert settings_of(settings)["data"]["init_args"]["prompts"] == elsewhere
    load_tokenizer(TOKENIZER).save_pretrained("run/tokenizer")
    found = settings_of(settings)["data"]["init_args"]
    assert found["tokenizer"] == str(workplace / "run/tokenizer") and found["prompts"] != elsewhere


@pytest.mark.slow
def test_a_model_against_itself(workplace: Path, capfd: pytest.CaptureFixture[str]) -> None:
    main(["compare", "run", "run/model", "--prompts", "prompts.jsonl", "--by", "digits", "--out", "out"])
    said = capfd.readouterr().out
    found = json.loads(Path("out/compare.json").read_text())
    assert found["tasks"]["all"]["prompts"] == 8 and found["tasks"]["all"]["difference"] == 0
    assert {"1", "2"} < set(found["tasks"]) and not found["distinguishable"] and "not distinguishable" in said
    assert found["tokens"][0] == found["tokens"][1] > 0 and min(found["seconds"]) > 0 and found["failed"] == [0, 0]
    assert json.loads(Path("out/a/report.jsonl").read_text())["sets"]["prompts"]["asked"] == 8


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["nowhere", "run"], "A: there is no 'nowhere'"),
        (["run", "empty"], "B: empty is no run directory, no model directory, no adapter and no checkpoint"),
        (["run", "began"], "B: began has neither model/ nor checkpoints/last.ckpt yet"),
        (["bare", "bare"], "--config: neither A nor B is of a run"),
        (["run", "alone.ckpt"], "arborist export"),
        (["run", "run", "--by", "colour"], "has no field 'colour'; it has question, answer, digits"),
        (["run", "run", "--samples", "0"], "--samples: must be above 0"),
        (["run", "run", "--config", "began/config.yaml"], "has no model.init_args"),
        (["run", "run", "--config", "none.yaml"], "--config: there is no file 'none.yaml'"),
        (["run", "run", "--config", "alone.ckpt"], "--config: there is no file 'alone.ckpt'"),
        (["run", "run", "--config", "broken.yaml"], "--config: broken.yaml is no YAML: "),
        (["warm", "warm"], "--config: warm/config.yaml and warm/config.yaml name no workflow"),
        (["run", "run", "--prompts", "none.jsonl"], "--prompts: there is no file 'none.jsonl'"),
    ],
)
def test_mistakes(workplace: Path, args: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("empty", "began", "bare", "alone.ckpt"):
        Path(name).mkdir()
    Path("began/config.yaml").write_text("{}")
    Path("broken.yaml").write_text("data: [")
    shutil.copytree("run/model", "warm/model")
    shutil.copy(ROOT / "configs/quickstart_sft.yaml", "warm/config.yaml")
    Path("bare/config.json").write_text("{}")
    with pytest.raises(SystemExit) as ended:
        main(["compare", *args, *([] if "--prompts" in args else ["--prompts", "prompts.jsonl"]), "--out", "out"])
    printed = capsys.readouterr().err
    assert ended.value.code == 2 and said in printed and "Traceback" not in printed
