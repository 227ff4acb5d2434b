"""What `arborist check` says of a judge: its noise by hand, whom it asks again, and when it does not."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from app.batch import Trajectory
from app.cli import main
from app.cli.check.judging import agreement
from datamodules.files.recording import RolloutRecorder
from datamodules.groups import Group
from datamodules.rewards.judges import JudgeModel, RankingJudge, RubricJudge
from tests.helpers.judge_server import Asked, JudgeServer, Said

QUALITY = {"poor": 2, "fair": 4, "good": 6, "best": 8}
COMPARING = {
    "class_path": "datamodules.rewards.judges.RankingJudge",
    "init_args": {"model": {}, "criteria": "It is good.", "orders": 1},
}


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["arborist"])


def check(*args: Any) -> dict[str, Any]:
    main(["check", "--out", "out", *map(str, args)])
    return json.loads(Path("out/check.json").read_text())


def of(found: dict[str, Any], level: str) -> str:
    return "\n".join(f"{one['finding']}: {one['remedy']}" for one in found["reasons"] if one["level"] == level)


def judged_run(url: str, failed: int = 0, reward: dict[str, Any] | None = None, **data: Any) -> Path:
    """Twelve groups of four replies whose recorded rewards are those of `QUALITY`; in the first `failed` groups the
    best has 0 in place of a verdict. `data`: further options of the run."""
    recorder = RolloutRecorder(Path("run") / "rollouts")
    made = []
    for index in range(12):
        trajectories = [
            Trajectory(
                tokens=[2, 3, 4 + index % 8, 5],
                loss_mask=[False, False, True, True],
                behavior_logprobs=[0.0, 0.0, -1.0, -1.0],
                versions=[-1, -1, 0, 0],
                reward=0.0 if (lost := name == "best" and index < failed) else points / 10,
                group_id=index,
                episode_id=4 * index + one,
                finish_reason="stop",
                metadata={"completion": f"{name} {index}", **({"reward_failed": "no answer"} if lost else {})},
            )
            for one, (name, points) in enumerate(QUALITY.items())
        ]
        made.append(Group(index, f"run/tasks:{index + 1}", 0, trajectories))
    recorder.write(0, made)
    judge = {"url": url, "name": "judge", "temperature": 1.0, "cache": "verdicts"}
    if reward is None:
        options = {"model": judge, "criteria": {"good": "It is good."}}
        reward = {"class_path": "datamodules.rewards.judges.RubricJudge", "init_args": options}
    elif "model" in reward.get("init_args", {}):
        reward = {**reward, "init_args": {**reward["init_args"], "model": judge}}
    settings = {"data": {"init_args": {"reward": reward, "tokenizer": "char:0123456789+-*=", **data}}}
    Path("run/config.yaml").write_text(yaml.safe_dump(settings))
    return Path("run/rollouts")


def by_quality(asked: Asked, number: int = 0) -> str:
    """The verdicts that were recorded."""
    return json.dumps({"good": QUALITY[asked.blocks["REPLY"].split()[0]]})


def test_a_judge_is_asked_again_and_its_noise_is_told_from_what_replies_are_worth(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Second verdicts change places in pairs: by two points each, which is a variance of 16/3 between
    two verdicts, and half of it a verdict's, of 20/3 within groups."""
    swapped = {"poor": 4, "fair": 2, "good": 8, "best": 6}
    with JudgeServer(lambda asked, number: json.dumps({"good": swapped[asked.blocks["REPLY"].split()[0]]})) as server:
        path = judged_run(server.url)
        found = check(path, "--judge-again", 30)
        assert len(server.asked) == found["judged_again"] == 32  # whole groups; and none from the cache, or to it
        assert not Path("verdicts").exists()
        assert found["judge_noise"] == pytest.approx((0.08 / 3) ** 0.5) and found["judge_same"] == 0
        assert found["judge_noise_share"] == pytest.approx(0.4) and found["judge_order"] == pytest.approx(4 / 6)
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
def test_a_judge_that_repeats_itself_and_one_that_tosses_coins(second: dict[str, int], level: str, said: str) -> None:
    with JudgeServer(lambda asked, number: json.dumps({"good": second[asked.blocks["REPLY"].split()[0]]})) as server:
        found = check(judged_run(server.url))
    assert found["judged_again"] == 48 and found["judge_same"] == (0 if level else 1)
    assert said in of(found, level) if level else "noise" not in json.dumps(found["reasons"])


def test_a_judge_that_does_not_answer_again(capsys: pytest.CaptureFixture[str]) -> None:
    with JudgeServer(lambda asked, number: Said("no", status=401)) as server:
        found = check(judged_run(server.url))
    assert "judged_again" not in found and "no group has two second verdicts" in capsys.readouterr().out


def test_a_score_in_place_of_a_verdict_is_no_first_verdict(capsys: pytest.CaptureFixture[str]) -> None:
    with JudgeServer(by_quality) as server:
        found = check(judged_run(server.url, failed=12, reward_options={"on_failure": 0.0}))
    assert found["judged_again"] == len(server.asked) == 36 and found["judge_same"] == 1
    assert "noise" not in json.dumps(found["reasons"])
    assert "not judged again: 12 replies, whose reward stands for a verdict that failed" in capsys.readouterr().out


def test_who_compares_is_asked_about_whole_groups(capsys: pytest.CaptureFixture[str]) -> None:
    def ranked(asked: Asked, number: int) -> str:
        shown = {name: text.split()[0] for name, text in asked.blocks.items() if name.startswith("ANSWER")}
        best = sorted(shown, key=lambda name: -QUALITY[shown[name]])
        return json.dumps({"reasoning": "", "ranking": [[int(name.split()[1])] for name in best]})

    with JudgeServer(ranked) as server:
        found = check(judged_run(server.url, failed=5, reward=COMPARING))
    assert found["judged_again"] == 4 * len(server.asked) == 28 and found["judge_order"] == 1
    assert "5 replies, and their groups, which are compared" in capsys.readouterr().out


def test_all_replies_graded_lower_the_second_time_is_no_noise() -> None:
    lines, figures, reasons = agreement([[(a, a + 0.3) for a in (0.1, 0.3, 0.5, 0.7)]] * 12, 48)
    assert figures["judge_noise"] == pytest.approx(0) and figures["judge_order"] == 1 and not reasons
    assert "0% with the same verdict" in lines[0]


MODEL = JudgeModel("http://127.0.0.1:1/v1", "judge", temperature=1.0)
COLD = JudgeModel("http://127.0.0.1:1/v1", "judge")


@pytest.mark.parametrize(
    ("judge", "said", "unsaid"),
    [
        (RubricJudge(MODEL, {"good": "is"}), "2 verdicts a reply (`repeats` of the judge) bring it to 25%", "above 0"),
        (RubricJudge(MODEL, {"good": "is"}, repeats=2), "4 verdicts a reply (`repeats` of the judge) bring", "above 0"),
        (
            RubricJudge(COLD, {"good": "is"}),
            "2 verdicts a reply (`repeats` of the judge and a temperature above 0)",
            "-",
        ),
        (RankingJudge(MODEL, "is good"), "clearer criteria, or a better judge", "RankingJudge"),
        (RankingJudge(MODEL, "is good"), "clearer criteria, or a better judge", "repeats"),
    ],
)
def test_what_is_recommended_is_an_option_of_the_judge(judge: Any, said: str, unsaid: str) -> None:
    pairs = [(0.2, 0.4), (0.4, 0.2), (0.6, 0.8), (0.8, 0.6)]  # 40% of the variance
    _, _, (reason,) = agreement([pairs] * 12, 48, judge)
    assert said in reason.remedy and unsaid not in reason.remedy


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"workflow": {"init_args": {"judged": "transcript"}}}, "it was shown the transcripts (judged: transcript)"),
        ({"workflow": {"init_args": {"turn_discount": 0.9}}}, "the discount of their turns (turn_discount)"),
        ({"tokenizer": None}, "the run's configuration names no tokenizer; set --tokenizer"),
        ({"tokenizer": "nowhere"}, "tokenizer: no directory nowhere"),
        ({"reward_options": {"retries": 3}}, "only on_failure has an effect on a judge"),
        ({"reward": {"class_path": "my_rewards.Mine"}}, "data.reward: my_rewards.Mine cannot be imported here"),
        ({"reward": {**COMPARING, "init_args": {"model": {}, "criteria": ""}}}, "RankingJudge.criteria: empty"),
    ],
)
def test_a_judge_that_cannot_be_asked_the_same_again_is_not_asked(
    options: dict[str, Any], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with JudgeServer(by_quality) as server:
        found = check(judged_run(server.url, **{"workflow": {"init_args": {"turn_discount": 1.0}}, **options}))
    printed = capsys.readouterr().out
    (line,) = [one for one in printed.splitlines() if one.startswith("the judge is not asked again: ")]
    assert said in line and found["groups"] == 12 and "judged_again" not in found and not server.asked


def test_a_plain_reward_is_no_judge(capsys: pytest.CaptureFixture[str]) -> None:
    """And is not made: this one needs an argument."""
    found = check(judged_run("", reward={"class_path": "datamodules.rewards.RegexMatch"}))
    assert found["groups"] == 12 and "judge" not in capsys.readouterr().out


def test_the_judge_is_shown_the_prompt_of_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    """The conversation, not its tokens with the marks of a chat template; where the prompts are others now, those."""
    Path("run").mkdir()
    tasks = Path("run/tasks.jsonl")
    tasks.write_text("".join(json.dumps({"question": f"task {k}", "answer": ""}) + "\n" for k in range(12)))
    options = {"path": "run/tasks.jsonl", "chat": True, "shuffle": False}
    prompts = {"class_path": "datamodules.prompts.JsonlPrompts", "init_args": options}
    with JudgeServer(by_quality) as server:
        path = judged_run(server.url, prompts=prompts)
        assert check(path)["judge_same"] == 1
        for one in server.asked:
            assert one.blocks["TASK"] == f"[user]\ntask {one.blocks['REPLY'].split()[1]}"
        assert "spell them" not in capsys.readouterr().out
        tasks.unlink()
        assert check(path)["judge_same"] == 1 and server.asked[-1].blocks["TASK"] == "01"
    printed = capsys.readouterr().out
    assert "shown prompts as their tokens spell them, a chat template's marks included: data.prompts cannot" in printed
