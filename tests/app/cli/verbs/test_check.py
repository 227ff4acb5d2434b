"""`arborist check`: figures by hand, verdicts with their reasons, and a run that is rolled out for it."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers import AutoConfig, AutoModelForCausalLM

from app.batch import Trajectory
from app.cli import main
from datamodules.files.recording import RolloutRecorder
from datamodules.groups import Group
from tests.helpers.judge_server import JudgeServer, Said
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


def record(groups: Sequence[Sequence[float]], cut: int = 0, tokens: int = 4, run: str = "run") -> Path:
    """Two batches of these rewards; the first `cut` episodes of every group end with their limit."""
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
                    reward=reward,
                    group_id=index,
                    episode_id=index * len(rewards) + one,
                    finish_reason="length" if one < cut else "stop",
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
    assert (found["tokens_median"], found["cut"]) == (6, 0.0)
    assert found["tree_tokens"] == 3 + 8 * (1 + 4 * 6)  # one of two equal batches
    assert found["dense_over_tree"] == pytest.approx(8 * 4 * 10 / 203)
    low, high = found["different_interval"]
    assert (low, high) == (pytest.approx(0.2800, abs=1e-3), pytest.approx(0.7200, abs=1e-3))  # Wilson, 8 of 16
    assert found["predicted_seconds"] > 0 and found["gib_fixed"] < found["gib_least"] <= found["gib_all"]
    assert found["gib_fixed"] == pytest.approx(found["parameters"] * 16 / 2**30)
    assert found["verdict"] == "go" and "verdict: go" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("groups", "verdict", "said"),
    [
        ([[0.0] * 4] * 40, "no-go", "warm-start"),
        ([[1.0] * 4] * 40, "no-go", "harder prompts"),
        ([[1, 0, 0, 0]] * 12 + [[0.0] * 4] * 28, "go, slowly at first", "data.filter trains on the others alone"),
        ([[1, 0, 0, 0]] * 12 + [[0.0] * 4] * 28, "go, slowly at first", "30% of the prompts are solved in one of 4"),
        ([[1, 1, 1, 0]] * 12 + [[1.0] * 4] * 28, "change something first", "data.filter trains on the others alone"),
        ([[0.2, 0.3, 0.4, 0.1]] * 20, "go", ""),
    ],
)
def test_verdicts_on_what_there_is_to_learn(groups: Any, verdict: str, said: str) -> None:
    found = check(record(groups))
    assert found["verdict"] == verdict and said in "".join(of(found, level) for level in ("no-go", "change", "slow"))


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


@pytest.mark.slow
def test_a_run_is_rolled_out_and_judged(capsys: pytest.CaptureFixture[str]) -> None:
    """The quickstart from random weights: hardly a sum is right, and nothing is trained."""
    config = json.dumps(CONFIG | {"vocab_size": 16, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 0})
    given = ["--model.model", f'{{"config": {config}}}', "--data.batch_size", "8"]
    found = check(ROOT / "configs/quickstart.yaml", "--episodes", 128, "--with", *given)
    assert found["groups"] == 16 and found["group_size"] == 8 and found["pass@1"] < 0.2
    assert found["rollout_seconds"] > 0 and found["parameters"] > 0
    assert found["cut"] > 0.1 and "max_new_tokens, 5 now" in of(found, "change")


@pytest.mark.skipif(not DATA, reason="ARBORIST_DATA names no folder of recorded data")
def test_recorded_airline_conversations() -> None:
    found = check(Path(DATA) / "tau" / "airline_tokens.npz")
    assert (found["groups"], found["group_size"], found["verdict"]) == (50, 4, "go")
    assert found["dense_over_tree"] == pytest.approx(25.30, abs=0.01)
    assert found["pass@4"] > found["pass@1"]


QUALITY = {"poor": 2, "fair": 4, "good": 6, "best": 8}


def judged_run(url: str, cache: Path) -> Path:
    """Twelve groups of four replies whose recorded rewards are those of `QUALITY`."""
    recorder = RolloutRecorder(Path("run") / "rollouts")
    made = []
    for index in range(12):
        trajectories = [
            Trajectory(
                tokens=[2, 3, 4 + index % 8, 5],
                loss_mask=[False, False, True, True],
                behavior_logprobs=[0.0, 0.0, -1.0, -1.0],
                versions=[-1, -1, 0, 0],
                reward=points / 10,
                group_id=index,
                episode_id=4 * index + one,
                finish_reason="stop",
                metadata={"completion": f"{name} {index}"},
            )
            for one, (name, points) in enumerate(QUALITY.items())
        ]
        made.append(Group(index, f"p{index}", 0, trajectories))
    recorder.write(0, made)
    judge = {"url": url, "name": "judge", "temperature": 1.0, "cache": str(cache)}
    options = {"model": judge, "criteria": {"good": "It is good."}}
    reward = {"class_path": "datamodules.rewards.judges.RubricJudge", "init_args": options}
    settings = {"data": {"init_args": {"reward": reward, "tokenizer": "char:0123456789+-*="}}}
    Path("run/config.yaml").write_text(yaml.safe_dump(settings))
    return Path("run/rollouts")


def test_a_judge_is_asked_again_and_its_noise_is_told_from_what_replies_are_worth(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Second verdicts change places in pairs: by two points each, of a variance of 20/3 within groups."""
    swapped = {"poor": 4, "fair": 2, "good": 8, "best": 6}
    with JudgeServer(lambda asked, number: json.dumps({"good": swapped[asked.blocks["REPLY"].split()[0]]})) as server:
        path = judged_run(server.url, tmp_path / "verdicts")
        found = check(path, "--judge-again", 30)
        assert len(server.asked) == found["judged_again"] == 32  # whole groups; and none from the cache, or to it
        assert not (tmp_path / "verdicts").exists()
        assert found["judge_noise"] == pytest.approx(0.02**0.5) and found["judge_same"] == 0
        assert found["judge_noise_share"] == pytest.approx(0.02 / (0.2 / 3)) and found["judge_order"] == pytest.approx(
            4 / 6
        )
        assert "2 verdicts a reply (`repeats` of the judge) bring it to 25%" in of(found, "note")
        assert "judged again: 32 of 32 replies" in capsys.readouterr().out
        assert "judged_again" not in check(path, "--judge-again", 0) and len(server.asked) == 32


@pytest.mark.parametrize(
    ("second", "level", "said"),
    [
        (QUALITY, "", ""),
        (
            {"poor": 8, "fair": 6, "good": 4, "best": 2},
            "change",
            "100% of the variance within groups is the judge's noise",
        ),
    ],
)
def test_a_judge_that_repeats_itself_and_one_that_tosses_coins(
    second: dict[str, int], level: str, said: str, tmp_path: Path
) -> None:
    with JudgeServer(lambda asked, number: json.dumps({"good": second[asked.blocks["REPLY"].split()[0]]})) as server:
        found = check(judged_run(server.url, tmp_path / "verdicts"))
    assert found["judged_again"] == 48 and found["judge_same"] == (0 if level else 1)
    assert said in of(found, level) if level else "noise" not in json.dumps(found["reasons"])


def test_a_judge_that_does_not_answer_again(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with JudgeServer(lambda asked, number: Said("no", status=401)) as server:
        found = check(judged_run(server.url, tmp_path / "verdicts"))
    assert "judged_again" not in found and "no group has two second verdicts" in capsys.readouterr().out
