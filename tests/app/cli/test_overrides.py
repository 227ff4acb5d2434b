"""Dotted flags reach into every part of a YAML file (sweeps live on them); plain user classes fit where they may; what
a file says in words arrives as those words."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from app.cli import main

CONFIGS = Path(__file__).parents[3] / "configs"
QUICKSTART = CONFIGS / "quickstart.yaml"
QUICKSTART_ENGINE = yaml.safe_load(QUICKSTART.read_text())["data"]["init_args"]["engine"]
OVERLAYS = ("quickstart_sglang.yaml", "record.yaml", "replay.yaml")
FILES = [path for path in sorted(CONFIGS.rglob("*.yaml")) if path.parent.name not in ("cluster", "sweeps")]


class PlainWorkflow:
    """A user's workflow: inherits nothing, annotates nothing of `run`."""

    def __init__(self, max_new_tokens: int = 4) -> None:
        self.max_new_tokens = max_new_tokens

    async def run(self, engine, prompt):  # type: ignore[no-untyped-def]
        return []


class PlainEngine:
    """A user's engine: inherits nothing, annotates nothing of its methods."""

    update_methods = ("memory",)
    version, vocab_size, max_context = -1, 9, 9

    def __init__(self, url: str = "here") -> None:
        self.url = url

    def start(self, model, version, seed, parts=None):  # type: ignore[no-untyped-def]
        pass

    async def generate(self, request):  # type: ignore[no-untyped-def]
        pass

    def pause(self):  # type: ignore[no-untyped-def]
        pass

    def update_weights(self, update):  # type: ignore[no-untyped-def]
        pass

    resume = health = close = pause


def printed(capsys: pytest.CaptureFixture[str], *flags: str) -> str:
    with pytest.raises(SystemExit) as end:
        main(["fit", *flags, "--print_config"])
    assert not end.value.code
    return capsys.readouterr().out


def parsed(capsys: pytest.CaptureFixture[str], *flags: str) -> dict:
    return yaml.safe_load(printed(capsys, "--config", str(QUICKSTART), *flags))["data"]["init_args"]


def words(given: Any, used: Any, place: str = "") -> Iterator[tuple[str, str, Any]]:
    """Every string of a configuration: where it is, and what is used there. (Numbers as 1e-3 are strings to PyYAML.)"""
    if isinstance(given, dict | list):
        for key, value in given.items() if isinstance(given, dict) else enumerate(given):
            yield from words(value, used[key], f"{place}.{key}")
    elif isinstance(given, str) and isinstance(used, dict) and used.keys() <= {"class_path", "init_args"}:
        yield place, given.rpartition(".")[2], used["class_path"].rpartition(".")[2]  # a class by its name alone
    elif isinstance(given, str) and not isinstance(used, float):
        yield place, given, used


@pytest.mark.parametrize(
    ("part", "option", "value"),
    [
        ("engine", "num_threads", 2),
        ("workflow", "max_new_tokens", 7),
        ("prompts", "digits", 1),
        ("validation.prompts", "size", 9),
    ],
)
def test_a_flag_changes_one_option_and_keeps_its_neighbours(
    capsys: pytest.CaptureFixture[str], part: str, option: str, value: int
) -> None:
    written = yaml.safe_load(QUICKSTART.read_text())["data"]["init_args"]
    got = parsed(capsys, f"--data.{part}.init_args.{option}", str(value))
    for key in part.split("."):
        written, got = written[key], got[key]
    assert got["class_path"] == written["class_path"]
    assert got["init_args"].items() >= {**written["init_args"], option: value}.items()


def test_records_of_options_merge_key_by_key(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Of two files and the flags, each changes what it names, at any depth, and null takes a value away."""
    (tmp_path / "one.yaml").write_text(
        "data: {init_args: {validation: {temperature: 1.0, samples: 2}, limits: {max_failures: 5, max_concurrent: 9}}}"
    )
    (tmp_path / "two.yaml").write_text("data: {init_args: {validation: {ks: [1, 2]}, limits: {max_failures: 6}}}")
    files = [f"--config={tmp_path / name}.yaml" for name in ("one", "two")]
    flags = ["--data.validation.samples", "4", "--data.validation.prompts.init_args.size=9", "--data.stall.after_s=60"]
    got = parsed(capsys, *files, *flags, "--data.limits.max_concurrent=null", "--data.reward_options={cache: 7}")
    prompts = yaml.safe_load(QUICKSTART.read_text())["data"]["init_args"]["validation"]["prompts"]
    assert got["validation"] == {
        "prompts": {**prompts, "init_args": got["validation"]["prompts"]["init_args"]},
        "samples": 4,
        "temperature": 1.0,
        "batch_size": 256,
        "solved_at": 1.0,
        "ks": [1, 2],
        "answer": None,
    }
    assert got["validation"]["prompts"]["init_args"].items() >= {**prompts["init_args"], "size": 9}.items()
    assert (got["limits"]["max_failures"], got["limits"]["max_concurrent"]) == (6, None)
    assert got["stall"] == {"after_s": 60.0, "action": "warn", "max_requeues": None}
    assert got["reward_options"]["cache"] == 7 and got["reward_options"]["deadline_s"] == 15.0
    assert parsed(capsys, *files, "--data.validation.prompts=null")["validation"]["prompts"] is None


def test_options_that_a_class_has_of_the_one_it_replaces_are_told(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The quickstart's held-out set has 256 prompts, and so has one that a file of one's own names in its place."""
    (tmp_path / "data.jsonl").write_text('{"question": "1+1=", "answer": "2"}\n' * 300)
    own = {"class_path": "datamodules.prompts.JsonlPrompts", "init_args": {"path": str(tmp_path / "data.jsonl")}}
    whole = {**own, "init_args": {**own["init_args"], "size": 300}}
    said = []
    for name, held_out in (("short", own), ("whole", whole)):
        data = {"prompts": own, "validation": {"prompts": held_out}, "engine": QUICKSTART_ENGINE}
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump({"data": {"init_args": data}}))
        files = ["--config", str(QUICKSTART), "--config", str(tmp_path / f"{name}.yaml")]
        with pytest.raises(SystemExit):
            main(["fit", *files, "--run_dir", str(tmp_path / name)])  # the quickstart names no model
        said.append(capsys.readouterr().err)
    prompts = "datamodules.prompts.JsonlPrompts takes over"
    assert f"data.validation.prompts: {prompts} size: 256 from datamodules.prompts.Arith" in said[0]
    assert [one.count("takes over") for one in said] == [1, 0]  # a seed, which any does for, is not told


@pytest.mark.parametrize(
    ("part", "plain", "option", "value"),
    [("workflow", PlainWorkflow, "max_new_tokens", 9), ("engine", PlainEngine, "url", "there")],
)
def test_a_plain_class_is_one_by_its_methods(
    part: str, plain: type, option: str, value: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    name = f"{__name__}.{plain.__name__}"
    got = parsed(capsys, f"--data.{part}", name, f"--data.{part}.{option}", str(value))[part]
    assert got == {"class_path": name, "init_args": {option: value}}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_word_of_a_configuration_is_used_as_it_stands(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "my_agent.py").write_text("def right(prompt, answer):\n    return 1.0\n")  # of agent.yaml's reader
    monkeypatch.delitem(sys.modules, "my_agent", raising=False)  # another test's
    monkeypatch.syspath_prepend(str(tmp_path))
    below = ["--config", str(QUICKSTART)] if path.name in OVERLAYS else []
    used = yaml.safe_load(printed(capsys, *below, "--config", str(path)))
    found = list(words(yaml.safe_load(path.read_text()), used))
    assert found and [one for one in found if one[1] != one[2]] == []


_NULLABLE = ("answer_pattern", "template", "system")  # of JsonlPrompts


@pytest.mark.parametrize(
    "texts",
    [
        ("#### (.+)", "# Question: {question}\nAnswer:", "a # b"),
        ("- x", "key: value", "1e3"),
        ("12", "yes", "[x"),
        ("1.5e3", ".5E-3", "-1_0.e5"),
        ("---", '"x"', "Q: {question}\nQ: again"),
    ],
)
def test_a_string_stays_itself_where_null_is_possible(
    texts: tuple[str, str, str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    options = dict(zip(_NULLABLE, texts, strict=True))
    prompts = {"class_path": "datamodules.prompts.JsonlPrompts", "init_args": {"path": "p", **options}}
    mine = tmp_path / "mine.yaml"
    mine.write_text(yaml.safe_dump({"data": {"init_args": {"prompts": prompts}}}, default_style='"'))
    for _ in range(2):
        used = printed(capsys, "--config", str(QUICKSTART), "--config", str(mine))
        got = yaml.safe_load(used)["data"]["init_args"]["prompts"]["init_args"]
        assert {name: got[name] for name in _NULLABLE} == options
        mine.write_text(used)  # as a run saves it


def test_so_does_that_of_a_flag_and_null_takes_it_away(capsys: pytest.CaptureFixture[str]) -> None:
    def got(*texts: str) -> list[str | None]:
        flags = [f"--data.prompts.{name}={text}" for name, text in zip(_NULLABLE, texts, strict=True)]
        used = parsed(capsys, "--data.prompts=datamodules.prompts.JsonlPrompts", "--data.prompts.path=p", *flags)
        return [used["prompts"]["init_args"][name] for name in _NULLABLE]

    assert got("#### (.+)", "a # b", "[x") == ["#### (.+)", "a # b", "[x"]
    assert got("null", "~", "12") == [None, None, "12"]


@pytest.mark.parametrize("text", ["# only\n# comments\n", "---\n", "", "null\n"])
def test_a_file_that_says_nothing_is_refused(text: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "empty.yaml").write_text(text)
    with pytest.raises(SystemExit) as end:
        main(["fit", "--config", str(QUICKSTART), "--config", str(tmp_path / "empty.yaml"), "--print_config"])
    assert end.value.code == 2 and "empty.yaml holds no options" in capsys.readouterr().err


@pytest.mark.slow
def test_the_console_script_finds_classes_beside_the_user(tmp_path: Path) -> None:
    (tmp_path / "beside_me.py").write_text(
        "class Mine:\n    max_new_tokens = 3\n    async def run(self, engine, prompt):\n        return []\n"
    )
    script = Path(sys.executable).with_name("arborist")
    command = [script, "fit", "--config", QUICKSTART, "--data.workflow", "beside_me.Mine", "--print_config"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0 and "beside_me.Mine" in done.stdout, done.stderr
