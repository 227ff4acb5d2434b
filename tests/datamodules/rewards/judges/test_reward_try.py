"""`arborist reward try`: a reward against labels, from files to the printed comparison."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from app.cli import reward as command
from datamodules.files.recording import RolloutRecorder
from datamodules.groups import Group, unpack
from tests.helpers.judge_server import Asked, JudgeServer, Said
from tests.helpers.tiny_run import make_batch

JUDGES = "datamodules.rewards.judges"


def labelled(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def attempt(config: Path, rows: Path, *options: str) -> None:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    command.run(parser.parse_args(["try", str(config), str(rows), *options]))


def judge(path: Path, url: str, name: str = "RubricJudge", **options: Any) -> Path:
    criteria: Any = {"right": "the sum"} if name == "RubricJudge" else "the sum"
    model = {"url": url, "name": "scripted", "deadline_s": 5.0}
    reward = {"class_path": f"{JUDGES}.{name}", "init_args": {"model": model, "criteria": criteria, **options}}
    path.write_text(yaml.safe_dump({"data": {"class_path": "any", "init_args": {"reward": reward}}}))
    return path


ROWS = [
    {"id": task, "prompt": f"{task}=", "completion": said, "answer": "5", "label": int(said == "5")}
    for task in ("2+3", "4+1")
    for said in ("5", "6", "5", "17")
]


def test_a_judge_that_is_right_but_for_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def grade(asked: Asked, number: int) -> Said | str:
        said = asked.blocks["REPLY"]
        if said == "17" and asked.blocks["TASK"] == "4+1=":
            return Said("not me", 403)
        return json.dumps({"right": 9 if said == "5" or said == "17" else 1})

    with JudgeServer(grade) as server:
        config = judge(tmp_path / "reward.yaml", server.url, reasoning=False)
        attempt(config, labelled(tmp_path / "rows.jsonl", ROWS), "--out", str(tmp_path / "out.jsonl"))
    said = capsys.readouterr().out
    assert "7 of 8 replies judged; 1 refused, the first: reward of prompt '4+1': the judge refuses" in said
    row = next(line for line in said.splitlines() if line.startswith("reward")).split()
    # Pairs: 2+3: (5,6) right twice, (5,17) ties twice; 4+1: (5,6) right twice.
    assert [float(one) for one in row[1:4]] == [0.671, 0.1, 0.9] and float(row[5]) == round((4 + 2 * 0.5) / 6, 3)
    assert "0.8 to 1.0:      5 replies, 0.800 of them right" in said and "area under the ROC curve 0.833" in said
    assert "calls 8" in said
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert len(lines) == 8 and lines[0]["reward"] == 0.9 and "refused" in lines[-1]


def test_tasks_may_be_counted_from_0(tmp_path: Path) -> None:
    rows = [{**ROWS[0], "id": one} for one in (0, 0, 1, "", None)]
    found = command.labelled(labelled(tmp_path / "rows.jsonl", rows), None)
    assert [row.prompt.id for row in found] == ["0", "0", "1", "line 4", "line 5"]


def test_a_ranking_of_the_groups(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def rank(asked: Asked, number: int) -> str:
        found = {int(name.split()[1]): text for name, text in asked.blocks.items() if name.startswith("ANSWER")}
        return json.dumps({"ranking": sorted(found, key=lambda one: found[one] != "5")})

    with JudgeServer(rank) as server:
        attempt(judge(tmp_path / "r.yaml", server.url, "RankingJudge"), labelled(tmp_path / "rows.jsonl", ROWS))
        assert len(server.asked) == 4
    row = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("reward")).split()
    assert row[5] == "1.000"


def test_recorded_batches_and_a_plain_reward(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "r.yaml"
    config.write_text("reward: tests.datamodules.rewards.reward_functions.length\n")
    batch = make_batch([1.0, 0.0])
    groups = [Group(0, "sum", 0, _trajectories(batch))]
    RolloutRecorder(tmp_path / "recorded").write(0, groups)
    with pytest.raises(ValueError, match="--tokenizer"):
        attempt(config, tmp_path / "recorded")
    attempt(config, tmp_path / "recorded", "--tokenizer", "char:0123456789+-*=")
    assert "2 of 2 replies judged" in capsys.readouterr().out


def test_a_score_in_place_of_a_verdict_is_no_label(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "r.yaml"
    config.write_text("reward: tests.datamodules.rewards.reward_functions.length\n")
    replies = _trajectories(make_batch([1.0, 0.0, 0.5]))
    replies[1].metadata["reward_failed"] = "the judge did not answer"
    RolloutRecorder(tmp_path / "recorded").write(0, [Group(0, "sum", 0, replies)])
    attempt(config, tmp_path / "recorded", "--tokenizer", "char:0123456789+-*=")
    said = capsys.readouterr().out
    assert "1 of 3 replies left out: their reward stands for a verdict that failed" in said
    row = next(line for line in said.splitlines() if line.startswith("label")).split()
    assert "2 of 2 replies judged" in said and [float(one) for one in row[1:]] == [0.75, 0.5, 1.0]
    for one in replies:
        one.metadata["reward_unreadable"] = "no number"
    RolloutRecorder(tmp_path / "none").write(0, [Group(0, "sum", 0, replies)])
    with pytest.raises(ValueError, match="no reply has a label"):
        attempt(config, tmp_path / "none", "--tokenizer", "char:0123456789+-*=")


def test_lines_end_where_json_lines_do_and_numbers_have_a_folder(tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text("reward: datamodules.rewards.exact_match\n")
    rows = tmp_path / "rows.jsonl"
    rows.write_text(
        "".join(json.dumps({**row, "prompt": "a\u2028b"}, ensure_ascii=False) + "\n" for row in ROWS), "utf-8"
    )
    attempt(tmp_path / "r.yaml", rows, "--out", str(tmp_path / "not" / "yet" / "out.jsonl"))
    assert len((tmp_path / "not" / "yet" / "out.jsonl").read_text().splitlines()) == len(ROWS)


def _trajectories(batch: Any) -> list[Any]:
    packed = {
        "groups": [(0, "sum", 0, len(batch))],
        "tensors": batch.tensors(),
        "prompt_ids": batch.prompt_ids,
        "finish_reasons": batch.finish_reasons,
        "metadata": json.dumps(batch.metadata),
    }
    return unpack(packed)[0].trajectories


@pytest.mark.parametrize(
    "change, message",
    [
        ({"label": "good"}, "line 1: label: must be a number"),
        ({"score": 1}, "line 1: 'score' is not known"),
        ({"transcript": []}, "line 1: needs one of completion and transcript"),
    ],
)
def test_lines_are_refused_by_field(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    config = tmp_path / "r.yaml"
    config.write_text("reward: datamodules.rewards.exact_match\n")
    with pytest.raises(ValueError, match=message):
        attempt(config, labelled(tmp_path / "rows.jsonl", [{**ROWS[0], **change}]))


def test_a_reward_that_judges_nothing_and_a_file_without_one(tmp_path: Path) -> None:
    rows = labelled(tmp_path / "rows.jsonl", ROWS)
    told = pytest.raises(ValueError, match=r"none of 8 replies was judged; the first: .* status 401")
    with JudgeServer(lambda asked, number: Said("no", 401)) as server, told:
        attempt(judge(tmp_path / "r.yaml", server.url), rows)
    (tmp_path / "r.yaml").write_text("trainer: {}\n")
    with pytest.raises(ValueError, match="names no reward"):
        attempt(tmp_path / "r.yaml", rows)
    (tmp_path / "r.yaml").write_text(f"reward: {{class_path: {JUDGES}.RubricJudge, init_args: {{criterion: 1}}}}\n")
    with pytest.raises(ValueError, match="Option 'criterion' is not accepted"):
        attempt(tmp_path / "r.yaml", rows)
