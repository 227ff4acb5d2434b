"""`arborist check`: figures by hand, verdicts with their reasons, and a run that is rolled out for it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers import AutoConfig, AutoModelForCausalLM

from app.batch import CALL_REWARD, Trajectory
from app.cli import main
from datamodules.files.recording import RolloutRecorder
from datamodules.groups import Group
from tests.helpers.tiny_model import HYBRID_LAYERS

ROOT = Path(__file__).resolve().parents[4]
DATA = os.environ.get("ARBORIST_DATA", "")
CONFIG = {
    "model_type": "qwen3",
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["arborist"])
    Path("model.json").write_text(json.dumps(CONFIG))


def record(
    groups: Sequence[Sequence[float]], cut: int = 0, tokens: int = 4, run: str = "run", of_calls: bool = False
) -> Path:
    """Two batches of these rewards, given for the episode or for its call; the first `cut` episodes of every group
    end with their limit."""
    recorder = RolloutRecorder(Path(run) / "rollouts")
    for version, part in enumerate((groups[::2], groups[1::2])):
        made = []
        for at, rewards in enumerate(part):
            index = 2 * at + version
            trajectories = [
                Trajectory(
                    tokens=[1, 2, 3, 10 + index, *([20 + one] * tokens)],
                    loss_mask=[False] * 4 + [True] * tokens,
                    behavior_logprobs=[0.0] * 4 + [-1.0] * tokens,
                    versions=[-1] * 4 + [0] * tokens,
                    reward=0.0 if of_calls else reward,
                    group_id=index,
                    episode_id=index * len(rewards) + one,
                    finish_reason="length" if one < cut else "stop",
                    metadata={CALL_REWARD: float(reward)} if of_calls else {},
                )
                for one, reward in enumerate(rewards)
            ]
            made.append(Group(index, f"p{index}", 0, trajectories))
        recorder.write(version, made)
    return Path(run) / "rollouts"


def check(*args: Any) -> dict[str, Any]:
    main(["check", "--out", "out", *map(str, args)])
    return json.loads(Path("out/check.json").read_text())


def of(found: dict[str, Any], level: str) -> str:
    return "\n".join(f"{one['finding']}: {one['remedy']}" for one in found["reasons"] if one["level"] == level)


def test_figures_by_hand(capsys: pytest.CaptureFixture[str]) -> None:
    found = check(
        record([[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 0, 0], [1, 1, 1, 1]] * 4, tokens=6), "--model", "model.json"
    )
    assert (found["groups"], found["group_size"], found["different"]) == (16, 4, 0.5)
    assert (found["pass@1"], found["pass@4"]) == (pytest.approx(1.75 / 4), 0.75)
    low, high = found["pass@1_interval"]
    assert 0.2 < low < 0.27 and 0.6 < high < 0.68  # of 16 groups; of 64 independent episodes it would be 0.32 to 0.56
    assert (found["tokens_median"], found["cut"]) == (6, 0.0)
    assert found["tree_tokens"] == 3 + 8 * (1 + 4 * 6)  # one of two equal batches
    assert found["dense_over_tree"] == pytest.approx(8 * 4 * 10 / 203)
    low, high = found["different_interval"]
    assert (low, high) == (pytest.approx(0.2800, abs=1e-3), pytest.approx(0.7200, abs=1e-3))  # Wilson, 8 of 16
    assert found["predicted_seconds"] > 0 and found["layers_measured"]
    assert found["gib_fixed"] < found["gib_least"] <= found["gib_all"]
    assert found["gib_fixed"] == pytest.approx(found["parameters"] * 16 / 2**30)
    assert found["verdict"] == "go" and "verdict: go" in capsys.readouterr().out


def test_of_sixteen_groups_without_a_difference_it_is_said_how_many_others_may_have_one() -> None:
    """Where one group in ten has one, sixteen have none in one of five checks; forty say enough."""
    assert "only 16 groups: up to 19% of others may have different rewards" in of(
        check(record([[0.0] * 4] * 16)), "note"
    )
    assert "only" not in of(check(record([[0.0] * 4] * 40, run="many")), "note")


def test_pass_at_k_of_groups_that_differ_in_size(capsys: pytest.CaptureFixture[str]) -> None:
    """Twice as many tries find more: of 8 episodes, 1 of which is right, any 4 hold it every second time."""
    groups = [*[[1, 0, 0, 0]] * 4, *[[0.0] * 4] * 16, *[[1, *[0.0] * 7]] * 16]
    found = check(record(groups))
    assert found["pass@4"] == pytest.approx((4 + 16 / 2) / 36)
    assert "36 groups of 4 to 8 episodes" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("groups", "verdict", "said"),
    [
        ([[0.0] * 4] * 40, "no-go", "warm-start the model on demonstrations (SFTModule on a RecordedDataModule"),
        ([[1.0] * 4] * 40, "no-go", "harder prompts"),
        ([[1, 0, 0, 0]] * 12 + [[0.0] * 4] * 28, "go, slowly at first", "data.filter trains on the others alone"),
        ([[1, 0, 0, 0]] * 12 + [[0.0] * 4] * 28, "go, slowly at first", "30% of the prompts are solved in one of 4"),
        (
            [[0.9999999, 0, 0, 0]] * 12 + [[0.0] * 4] * 28,
            "go, slowly at first",
            "30% of the prompts are solved in one of 4",
        ),  # 1 but for rounding
        ([[1, 1, 1, 0]] * 12 + [[1.0] * 4] * 28, "change something first", "data.filter trains on the others alone"),
        ([[0.2, 0.3, 0.4, 0.1]] * 20, "go", ""),
    ],
)
def test_verdicts_on_what_there_is_to_learn(groups: Any, verdict: str, said: str) -> None:
    found = check(record(groups))
    assert found["verdict"] == verdict and said in "".join(of(found, level) for level in ("no-go", "change", "slow"))


def test_of_a_task_that_is_nearly_solved_harder_prompts_come_first() -> None:
    found = check(record([[1, 1, 1, 0]] * 4 + [[1.0] * 4] * 28))
    assert found["pass@1"] > 0.96
    assert "solved every time: take harder prompts, or stop if pass@1 0.97 will do; data.filter" in of(found, "change")
    assert "still misses now and then" in of(found, "note") and "first gains" not in of(found, "note")


def test_of_a_task_that_is_hardly_solved_nobody_is_told_to_take_harder_prompts() -> None:
    found = check(record([[1, 0, 0, 0]] * 4 + [[0.0] * 4] * 28))
    assert "harder" not in json.dumps(found["reasons"]) and "first gains come from there" in of(found, "note")


def test_rewards_of_single_calls_count() -> None:
    groups = [[1, 0, 0, 0], [0.5, 1, 1, 0]] * 8
    found = [check(record(groups, run=f"run{of_calls}", of_calls=of_calls)) for of_calls in (False, True)]
    assert found[1] == found[0] and found[1]["different"] == 1 and found[1]["verdict"] == "go"


def filtering(path: Path) -> str:
    """The configuration, written, of a run that keeps groups with different rewards alone."""
    keep = {"class_path": "datamodules.filters.NoSignal"}
    text = yaml.safe_dump({"data": {"init_args": {"filter": keep, "batch_size": 20, "group_size": 4}}})
    path.write_text(text)
    return text


@pytest.mark.parametrize(
    ("groups", "verdict", "said"),
    [
        ([[0.0] * 4] * 40, "no-go", "warm-start"),
        ([[1, 1, 1, 0]] * 12 + [[1.0] * 4] * 28, "go", "data.filter trains on the others alone"),
    ],
)
def test_who_is_rolled_out_is_not_filtered(
    groups: Any, verdict: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    configuration = filtering(Path("mine.yaml"))
    played: list[list[str]] = []

    def play(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        if "--print_config" not in command:
            played.append(command)
            run = command[command.index("--run_dir") + 1]
            record(groups, run=run)
            Path(run, "config.yaml").write_text(configuration.replace("class_path: datamodules.filters.NoSignal", ""))
        return subprocess.CompletedProcess(command, 0, configuration, "")

    monkeypatch.setattr(subprocess, "run", play)
    found = check("mine.yaml")
    (command,) = played
    off = ["--data.filter", "null", "--data.limits.max_filtered", "null"]
    assert any(command[at : at + 4] == off for at in range(len(command)))
    assert found["verdict"] == verdict and said in "".join(of(found, level) for level in ("no-go", "note"))
    assert not Path("out/recommended.yaml").exists()


def test_what_a_filter_has_left_of_a_recording_is_not_judged_by(capsys: pytest.CaptureFixture[str]) -> None:
    path = record([[0, 0, 0, 1]] * 20)
    filtering(path.parent / "config.yaml")
    found = check(path)
    assert "not told, the run's data.filter left groups out" in capsys.readouterr().out
    assert "different" not in found and found["groups"] == 20 and len(found["reasons"]) == 1
    assert "data.filter left groups out of the recording" in of(found, "note")


def test_what_is_recommended_is_a_file_that_a_run_takes(capsys: pytest.CaptureFixture[str]) -> None:
    path = record([[0, 0, 0, 1]] * 12 + [[0.0] * 4] * 28, cut=2)
    settings = {"data": {"init_args": {"workflow": {"init_args": {"max_new_tokens": 5}}}}}
    (path.parent / "config.yaml").write_text(yaml.safe_dump(settings))
    found = check(path)
    assert "50% of the episodes are cut" in of(found, "change") and "max_new_tokens, 5 now" in of(found, "change")
    capsys.readouterr()
    quickstart = str(ROOT / "configs/quickstart.yaml")
    with pytest.raises(SystemExit) as ended:
        main(["fit", "--config", quickstart, "--config", "out/recommended.yaml", "--print_config"])
    assert not ended.value.code
    data = yaml.safe_load(capsys.readouterr().out)["data"]["init_args"]
    assert data["workflow"]["init_args"]["max_new_tokens"] == 10
    assert data["filter"]["class_path"] == "datamodules.filters.NoSignal"


@pytest.mark.parametrize(
    ("rewards", "level"),
    [
        ([0, 0, 1, 1], "change"),  # who ends by itself does better: there is not enough room
        ([0, 1, 0, 1], "note"),  # no better: room is not what is missing
        ([0, 0, 0, 0], "change"),  # nobody can tell
    ],
)
def test_replies_that_are_cut(rewards: list[float], level: str) -> None:
    assert "50% of the episodes are cut" in of(check(record([rewards] * 20, cut=2)), level)


def test_a_hybrid_is_counted_by_its_layers() -> None:
    """States are kept where others hang below, not a key and a value a token."""
    Path("hybrid.json").write_text(json.dumps(CONFIG | HYBRID_LAYERS))
    path = record([[1, 0, 1, 0]] * 20)
    found = check(path, "--model", "hybrid.json")
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**CONFIG | HYBRID_LAYERS))
    assert found["parameters"] == sum(one.numel() for one in model.parameters())
    assert found["verdict"] == "go" and found["predicted_seconds"] > 0
    assert found["gib_fixed"] < found["gib_least"] <= found["gib_all"]


def test_verdicts_on_memory() -> None:
    path = record([[1, 0, 1, 0]] * 20)
    fixed = check(path, "--model", "model.json")
    weights, work = fixed["parameters"] * 4 / 2**30, fixed["gib_least"] - fixed["gib_fixed"]
    fits = check(path, "--model", "model.json", "--gib", fixed["gib_least"] * 1.01)
    assert fits["verdict"] == "go"
    two = check(path, "--model", "model.json", "--gib", work + 3.1 * weights)
    assert "8 devices" not in of(two, "change") and "devices share the optimizer's state" in of(two, "change")
    adapter = check(path, "--model", "model.json", "--gib", work + 1.5 * weights)
    assert "model.adapter" in of(adapter, "change")
    assert "smaller model" in of(check(path, "--model", "model.json", "--gib", work + 0.5 * weights), "no-go")


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"max_position_embeddings": 9}, "has 10 tokens, more than the model's max_position_embeddings of 9: shorten"),
        ({"vocab_size": 6}, "outside the model's vocabulary of 6: use the tokenizer that belongs to the model"),
    ],
)
def test_what_a_fit_would_refuse_is_no_go(changed: dict[str, int], said: str) -> None:
    Path("other.json").write_text(json.dumps(CONFIG | changed))
    found = check(record([[1, 0, 1, 0]] * 20, tokens=6), "--model", "other.json")
    assert found["verdict"] == "no-go" and said in of(found, "no-go")


def configured(path: Path, **model: Any) -> Path:
    """The batches of `path`, of a run whose module has these options."""
    settings = {"model": {"init_args": model}, "trainer": {"max_steps": 80}}
    (path.parent / "config.yaml").write_text(yaml.safe_dump(settings))
    return path


def test_a_step_of_the_run_trains_one_minibatch() -> None:
    path = record([[1, 0, 1, 0]] * 20)
    found = check(configured(path, model={"config": CONFIG}, minibatches=4, epochs=2))
    each, optimizer = found["predicted_seconds"], found["predicted_optimizer_seconds"]
    assert found["predicted_run_seconds"] == pytest.approx(80 * (each / 4 + optimizer))


def test_of_a_run_with_an_adapter_its_parameters_alone_are_trained(capsys: pytest.CaptureFixture[str]) -> None:
    AutoConfig.for_model(**CONFIG).save_pretrained("base")
    path = record([[1, 0, 1, 0]] * 20)
    found = check(configured(path, model={"path": "base", "adapter": {"r": 2, "target_modules": ["q_proj"]}}))
    trained = 4 * 2 * (64 + 4 * 16)  # of each layer: from 64 to 2, and from 2 to the heads
    assert found["trained_parameters"] == trained and found["layers_measured"]
    assert found["gib_fixed"] == pytest.approx((4 * found["parameters"] + 16 * trained) / 2**30)
    small = check(path, "--gib", found["gib_fixed"] / 2)
    assert "adapter do not fit" in of(small, "no-go") and "model.adapter" not in json.dumps(small["reasons"])
    capsys.readouterr()
    assert check(configured(path, model={"path": "base", "adapter": "nowhere"}))["trained_parameters"] == 0
    assert "an adapter that cannot be made here and is not counted" in capsys.readouterr().out


def test_frozen_weights_in_4_bit() -> None:
    """Codes and scales of the linear layers; where that helps it is what to change."""
    AutoConfig.for_model(**CONFIG).save_pretrained("base")
    path = record([[1, 0, 1, 0]] * 20)
    adapter = {"path": "base", "adapter": {"r": 2, "target_modules": ["q_proj"]}}
    whole = check(configured(path, model=adapter))
    linear = 4 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128)
    gib = whole["gib_fixed"] - (4 - 1 / 2 - 1 / 64 - 4 / (64 * 256)) * linear / 2**30
    room = whole["gib_least"] - (whole["gib_fixed"] - gib) / 2
    assert "4 bit (model.quantization: nf4) hold the frozen weights in" in of(check(path, "--gib", room), "change")
    less = check(configured(path, model={**adapter, "quantization": "nf4"}))
    assert less["gib_fixed"] == pytest.approx(gib, rel=1e-3)
    assert check(path, "--gib", room)["verdict"] == "go"


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("nowhere",), "WHAT: there is no 'nowhere'"),
        (("model.json",), "is no YAML, no directory of recorded batches and no .npz"),
        (("run/rollouts", "--episodes", "0"), "--episodes: must be above 0"),
        (("run/rollouts", "--judge-again", "-1"), "--judge-again: must be 0 or more"),
        (("run/rollouts", "--with", "--trainer.max_steps", "3"), "--with has no effect"),
        (("single/rollouts",), "data.group_size 2 or more"),
        (("run",), "holds no batch_*.safetensors"),
        (("broken.yaml",), "broken.yaml"),
    ],
)
def test_mistakes(args: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    record([[1, 0]] * 2)
    record([[1], [0]], run="single")
    Path("broken.yaml").write_text("model: {class_path: nowhere.Nothing}\n")
    with pytest.raises(SystemExit) as ended:
        main(["check", "--out", "out", *args])
    printed = capsys.readouterr().err
    assert ended.value.code == 2 and said in printed and "Traceback" not in printed


@pytest.mark.parametrize(("whole", "said"), [(False, "none is there"), (True, "/rollouts judges the 2 that are there")])
def test_an_interrupted_one_says_what_is_left(
    whole: bool, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        if command[-1] == "--print_config":
            return subprocess.CompletedProcess(command, 0, "data: {init_args: {}}")
        if whole:
            record([[1, 0]] * 2, run=command[command.index("--run_dir") + 1])
        raise KeyboardInterrupt

    monkeypatch.setattr(subprocess, "run", interrupted)
    Path("mine.yaml").write_text("")
    with pytest.raises(SystemExit) as ended:
        main(["check", "mine.yaml", "--out", "out"])
    err = capsys.readouterr().err
    assert ended.value.code == 130 and "interrupted: no verdict of " in err and said in err


def test_a_run_that_does_not_roll_out(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def fails(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        shows = command[-1] == "--print_config"
        return subprocess.CompletedProcess(command, 0 if shows else 3, "data: {init_args: {}}" if shows else None)

    monkeypatch.setattr(subprocess, "run", fails)
    Path("mine.yaml").write_text("")
    with pytest.raises(SystemExit) as ended:
        main(["check", "mine.yaml", "--out", "out"])
    said = capsys.readouterr().err
    assert ended.value.code == 2 and "error: WHAT: rolling out mine.yaml failed with exit code 3;" in said


@pytest.mark.slow
def test_a_run_is_rolled_out_and_judged(capsys: pytest.CaptureFixture[str]) -> None:
    """The quickstart from random weights: hardly a sum is right, and nothing is trained."""
    config = json.dumps(CONFIG | {"vocab_size": 16, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 0})
    given = ["--model.model", f'{{"config": {config}}}', "--data.batch_size", "8"]
    given += ["--data.filter", "datamodules.filters.NoSignal", "--data.limits.max_filtered", "1"]
    found = check(ROOT / "configs/quickstart.yaml", "--episodes", 128, "--with", *given)
    assert found["groups"] == 16 and found["group_size"] == 8 and found["pass@1"] < 0.2 and found["different"] < 1
    assert found["rollout_seconds"] > 0 and found["parameters"] > 0
    assert found["cut"] > 0.1 and "max_new_tokens, 5 now" in of(found, "change")


@pytest.mark.skipif(not DATA, reason="ARBORIST_DATA names no folder of recorded data")
def test_recorded_airline_conversations() -> None:
    found = check(Path(DATA) / "tau" / "airline_tokens.npz")
    assert (found["groups"], found["group_size"], found["verdict"]) == (50, 4, "go")
    assert found["dense_over_tree"] == pytest.approx(25.30, abs=0.01)
    assert found["pass@4"] > found["pass@1"]
