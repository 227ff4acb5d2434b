"""README.md and docs/: their files exist, their snippets run as written, their numbers are the measured ones."""

from __future__ import annotations

import csv
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import wandb
import yaml

from app.cli import main
from datamodules.prompts import Prompt
from datamodules.prompts.tokenizers import load_tokenizer
from modules.models import ModelSource, build_model
from tests.app.cli.test_overrides import words
from tests.helpers.tiny_model import TINY_WITH_ENDS

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
CONFIGURATION = (ROOT / "docs" / "configuration.md").read_text()
RESULTS = (ROOT / "docs" / "results.md").read_text()
PAGES = [
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    *(f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md"))),
]
SWEEP = ROOT / "configs" / "sweeps" / "quickstart_lr.yaml"
LR = "model.optimizer.init_args.lr"
AS_THE_AGENT_DOES = """
import json, sys
from wandb.sdk.launch.sweeps.utils import create_sweep_command, create_sweep_command_args
command, chosen = json.loads(sys.argv[1])
print(json.dumps([create_sweep_command(command), create_sweep_command_args({"args": chosen})["args"]]))
"""
SMALL = ["--trainer.accelerator=cpu", "--trainer.max_steps=2", "--trainer.val_check_interval=2"]


def blocks(language: str, page: str = README + CONFIGURATION) -> list[str]:
    fenced = re.findall(r"^```(\w*)\n(.*?)^```$", page, flags=re.MULTILINE | re.DOTALL)
    return [text for name, text in fenced if name == language]


def named(language: str) -> dict[str, str]:
    """Snippets whose first line is a comment with the file they belong in."""
    found = {}
    for block in blocks(language):
        first = re.match(r"# (\S+)\n", block)
        if first:
            found[first[1]] = block
    return found


def save_model(directory: Path, tokenizer: str, texts: list[str]) -> None:
    loaded = load_tokenizer(tokenizer, texts)
    config = {**TINY_WITH_ENDS, "vocab_size": len(loaded), "max_position_embeddings": 256}
    build_model(ModelSource(config=config)).save_pretrained(directory)
    loaded.save_pretrained(directory)


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty directory that stands for the user's checkout: its configs, and where modules are imported from."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["arborist"])
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    shutil.copytree(ROOT / "configs", tmp_path / "configs")
    yield tmp_path
    wandb.finish()  # or the next test's logger would go on with this run


def steps(run: Path) -> int:
    with (run / "metrics.csv").open() as file:
        return sum(1 for row in csv.DictReader(file) if row["reward"])


@pytest.mark.parametrize(
    ("completion", "score"),
    [
        ("def f(x): return 2 * x", 1.0),
        ("def f(x): return x", 0.0),
        ("def f(", 0.0),
        ("import sys; sys.exit(0)", 0.0),
        ("while True: pass", 0.0),
        ("print('x' * 10**6)\ndef f(x): return 2 * x", 1.0),
        ("half a character \ud83d", 0.0),
    ],
)
def test_a_reward_that_runs_programs(completion: str, score: float) -> None:
    """All but the sandbox, which the machine of the tests may not have."""
    [block] = [one for one in blocks("python") if "SANDBOX" in one]
    names: dict[str, Any] = {}
    exec(block.replace("*SANDBOX, ", "").replace("timeout 5", "timeout 1"), names)
    assert names["passes_its_tests"](Prompt(id="p", metadata={"tests": "assert f(2) == 4"}), completion) == score


@pytest.mark.parametrize("page", PAGES)
def test_files_and_folders_exist(page: str) -> None:
    text = (ROOT / page).read_text()
    for quoted in re.findall(r"`((?:app|modules|datamodules|callbacks|configs|docs|tests|benchmarks)/[\w/.]*)`", text):
        assert (ROOT / quoted).exists(), quoted
    for link, place in re.findall(r"\]\(([^)#:]*)(?:#([\w-]+))?\)", text):
        target = (ROOT / page).parent / link if link else ROOT / page
        assert target.exists(), link
        if place:
            titles = re.findall(r"^#+ (.+)$", target.read_text(), flags=re.MULTILINE)
            assert place in {re.sub(r"[^\w-]", "", title.lower().replace(" ", "-")) for title in titles}, place


def test_the_tree_names_every_file_once() -> None:
    (block,) = (one for one in blocks("", README) if one.startswith("app/"))
    listed, folders = list[str](), list[str]()
    for line in re.sub(r"\n {22}", " ", block).splitlines():
        entry = re.fullmatch(r"( *)(\w+)/ +[^:]+: (.+)", line)
        assert entry, line
        folders[len(entry[1]) // 2 :] = [entry[2]]
        names = re.sub(r" \([^)]*\)", "", entry[3]).split(", ")
        listed += ["/".join([*folders, name]) for name in names]
    rooms = [ROOT / room for room in ("app", "modules", "datamodules", "callbacks", "configs")]
    paths = [path for room in rooms for path in room.rglob("*") if path.suffix in (".py", ".yaml", ".sbatch")]
    there = [path.relative_to(ROOT).with_suffix("").as_posix() for path in paths]
    assert sorted(listed) == sorted(name for name in there if not name.endswith("/__init__"))


def test_your_model_data_and_reward(workplace: Path) -> None:
    for name, text in {**named("yaml"), **named("python")}.items():
        (workplace / name).write_text(text)
    problem = next(block for block in blocks("json") if "question" in block)
    (workplace / "my_data").mkdir()
    for split, count in (("train", 20), ("test", 64)):
        (workplace / "my_data" / f"{split}.jsonl").write_text(problem * count)
    save_model(workplace / "my_model", "train:300", [problem])
    command = next(line for line in blocks("") if "--config my_run.yaml" in line)
    flags = command.strip().removeprefix("python -m app ").split()
    main([*flags, "--config", "my_wandb.yaml", "--config", "my_algorithm.yaml", "--run_dir", "run", *SMALL])
    assert steps(workplace / "run") == 2  # of two minibatches a batch
    used = yaml.safe_load((workplace / "run" / "config.yaml").read_text())
    assert used["data"]["init_args"]["reward"] == "my_rewards.ends_with_answer"
    mine = list(words(yaml.safe_load(named("yaml")["my_run.yaml"]), used))
    assert "#### (.+)" in [given for _, given, _ in mine] and [one for one in mine if one[1] != one[2]] == []
    with (workplace / "run" / "samples.jsonl").open() as samples:
        assert {json.loads(line)["metadata"]["answer"] for line in samples} == {"12"}  # which follows the ####
    assert used["data"]["init_args"]["validation"]["prompts"]["init_args"]["size"] == 64
    assert used["model"]["init_args"]["model"]["path"] == "my_model"
    assert used["model"]["init_args"]["objective"] == "gspo"
    assert list((workplace / "wandb").glob("offline-run-*"))


@pytest.mark.parametrize("name", ["my_agent.yaml", "my_tools.yaml", "my_mcp.yaml", "my_servers.yaml"])
def test_snippets_of_agents_and_servers_are_understood(
    workplace: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    # tests/app/cli/test_end_to_end_agents.py runs such an agent, tests/datamodules/inference/sglang such servers.
    for file, text in {**named("yaml"), **named("python")}.items():
        (workplace / file).write_text(text)
    (workplace / "my_agent.py").write_text("async def solve(task): ...")  # that of docs/agents.md needs `openai`
    with pytest.raises(SystemExit) as ended:
        main(["fit", "--config", "configs/quickstart.yaml", "--config", name, "--print_config"])
    assert ended.value.code == 0
    printed = yaml.safe_load(capsys.readouterr().out)["data"]["init_args"]
    for key, value in yaml.safe_load(named("yaml")[name])["data"]["init_args"].items():
        given = value["class_path"] if isinstance(value, dict) and "class_path" in value else None
        assert (printed[key]["class_path"] == given) if given else printed[key], key


def test_agents_on_many_machines_are_understood(workplace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # tests/datamodules/workflows/adapters/test_ray_executor.py runs such agents.
    page = (ROOT / "docs" / "agents.md").read_text()
    (given,) = (one for one in blocks("yaml", page) if "# my_cluster.yaml" in one)
    Path("my_cluster.yaml").write_text(given)
    for flags in ([], ["--data.workflow.executor=ray"]):
        with pytest.raises(SystemExit) as ended:
            main(["fit", "--config=configs/quickstart.yaml", "--config=my_cluster.yaml", *flags, "--print_config"])
        assert ended.value.code == 0
        used = yaml.safe_load(capsys.readouterr().out)["data"]["init_args"]["workflow"]["init_args"]["executor"]
        wanted = yaml.safe_load(given)["data"]["init_args"]["workflow"]["init_args"]["executor"]
        if flags:
            assert used == "ray"
        else:
            assert (
                used["class_path"] == wanted["class_path"] and wanted["init_args"].items() <= used["init_args"].items()
            )


def test_every_yaml_snippet_has_a_file_and_is_used() -> None:
    tried = {"my_run.yaml", "my_wandb.yaml", "my_algorithm.yaml", "my_servers.yaml"}
    tried |= {"my_agent.yaml", "my_tools.yaml", "my_mcp.yaml"}
    assert set(named("yaml")) == tried
    assert len(blocks("yaml")) == len(named("yaml"))


def test_the_sweep_starts_what_it_says(workplace: Path) -> None:
    sweep = yaml.safe_load(SWEEP.read_text())
    save_model(workplace / "runs/sweep_warm_start/model", "char:0123456789+-*=", [])
    chosen = {name: {"value": options["values"][0]} for name, options in sweep["parameters"].items()}
    # As W&B's agent does it; in a small process, for its launcher looks through all modules that are loaded.
    done = subprocess.run(
        [sys.executable, "-c", AS_THE_AGENT_DOES, json.dumps([sweep["command"], chosen])],
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr
    parts, args = json.loads(done.stdout)
    command = [flag for part in parts for flag in (args if part == "${args}" else [part])]
    assert command[:4] == ["${env}", "${interpreter}", "-m", "app"]
    main([*command[4:], "--run_dir", "run", "--data.batch_size=4", *SMALL])
    used = yaml.safe_load((workplace / "run" / "config.yaml").read_text())
    assert used["model"]["init_args"]["optimizer"]["init_args"]["lr"] == sweep["parameters"][LR]["values"][0]
    assert used["data"]["init_args"]["group_size"] == sweep["parameters"]["data.group_size"]["values"][0]
    assert "WandbLogger" in str(used["trainer"]["logger"])
    assert sweep["metric"]["name"] in (workplace / "run" / "metrics.csv").read_text()


def test_tables_are_those_of_the_result_files() -> None:
    """A table of docs/results.md stands in the file whose link was last before it."""
    checked, measured = 0, ""
    for line in RESULTS.splitlines():
        for link in re.findall(r"\(\.\./(benchmarks/results/\w+/\w+\.md)\)", line):
            measured = (ROOT / link).read_text()
        if line.startswith("|"):
            assert line in measured
            checked += 1
    assert checked > 100


def test_gains_are_the_measured_ones() -> None:
    summary = json.loads(next(block for block in blocks("json", RESULTS) if "accuracy_before" in block))
    for name, told in (("dense_tokens", "{:.1f} against dense"), ("leaf_tokens", "{:.2f} against dense-leaf")):
        assert told.format(summary[name] / summary["tree_tokens"]) in " ".join(RESULTS.split())
    rows = [line.strip("| ").split(" | ") for line in RESULTS.splitlines() if line.startswith("|")]
    ratios = {row[0]: [cell.split(" (")[0] for cell in row[1:]] for row in reversed(rows)}  # the first of a name
    dense, leaf, _, _, think_dense, think_leaf = ratios["8 x 4"][2:]
    assert f"{dense} : {leaf} : 1 for `turns`, {think_dense} : {think_leaf} : 1 for `think`" in README
    turns, think = ([float(one) for one in ratios[f"{name} 8x4"][2:4]] for name in ("turns", "think"))
    assert f"{turns[0]:.1f} : {turns[1]:.2f} : 1 and {think[0]:.1f} : {think[1]:.1f} : 1" in README
