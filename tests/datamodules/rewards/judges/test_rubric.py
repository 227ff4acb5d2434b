"""Rubric judges against a real server that is right, late, malformed, contradicting or gone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from datamodules.prompts.base import Prompt
from datamodules.rewards import RewardError, RewardOptions, exact_match
from datamodules.rewards.judges import Budget, RubricJudge
from tests.datamodules.rewards.judges.judging import CRITERIA, PROMPT, judged, model, points, rubric
from tests.helpers.judge_server import Asked, JudgeServer, Said


def by_length(asked: Asked, number: int) -> str:
    return points(10 if asked.blocks["REPLY"] == "42" else 0, max(0, 10 - len(asked.blocks["REPLY"])))


def test_each_criterion_is_a_part_and_the_reward_their_weighted_mean() -> None:
    with JudgeServer(by_length) as server:
        (found, other), pool = judged(rubric(server.url, weights={"right": 3.0}), ["42", "sixty"])
    assert found.parts == {"right": 1.0, "short": 0.8, "judge_cut": 0.0}
    assert found.value == pytest.approx((3 * 1.0 + 0.8) / 4)
    assert other.value == pytest.approx(0.5 / 4)
    spent = pool.spent()
    assert (spent["judge_calls"], spent["judge_input_tokens"], spent["judge_output_tokens"]) == (2, 200, 20)


def test_what_the_judge_is_shown() -> None:
    with JudgeServer(by_length) as server:
        judged(rubric(server.url, reference=True, scale=10), ["42"])
    (asked,) = server.asked
    assert asked.blocks == {"TASK": PROMPT.text, "REFERENCE": "42", "REPLY": "42"}
    system = asked.body["messages"][0]["content"]
    assert all(f"- {name}: {text}" in system for name, text in CRITERIA.items())
    assert '{"reasoning": "...", "right": 0..10, "short": 0..10}' in system
    schema = asked.body["response_format"]["json_schema"]["schema"]
    assert schema["properties"]["right"] == {"type": "integer", "enum": list(range(11))}
    assert schema["required"] == ["reasoning", "right", "short"]
    assert asked.body["temperature"] == 0.0 and asked.body["max_tokens"] == 1024


def test_no_reference_no_verdict() -> None:
    with JudgeServer(by_length) as server:
        (found,), _ = judged(rubric(server.url, reference=True), ["42"], prompt=Prompt(id="bare", text="?"))
    assert isinstance(found, RewardError) and "'bare'" in str(found) and "reference: true" in str(found)
    assert server.asked == []


@pytest.mark.parametrize(
    "text",
    [
        "Well.\n```json\n" + points(10, 8) + "\n```\nThat is all.",
        '<think>{"right": 0, "short": 0} maybe</think>' + points(10, 8),
        points(10, 8) + "\n" + points(10, 8),
        '{"right": "10", "short": 8.0}',
        'a { brace, then {"right": 10, "short": 8, "more": {"right": 1}}',
    ],
)
def test_verdicts_are_found_in_prose(text: str) -> None:
    with JudgeServer(lambda asked, number: text) as server:
        (found,), _ = judged(rubric(server.url), ["42"])
    assert found.value == pytest.approx(0.9)


@pytest.mark.parametrize(
    "text, why",
    [
        ("It is fine.", "no JSON object"),
        ('{"right": 10}', "'short' is missing"),
        ('{"right": 11, "short": 1}', "'right' is no whole number from 0 to 10"),
        ('{"right": true, "short": 1}', "'right' is no whole number"),
        ('{"right": 0.5, "short": 1}', "'right' is no whole number"),
        ('{"right": NaN, "short": 1}', "'right' is no whole number"),
        ('{"right": "ten", "short": 1}', "'right' is no whole number"),
        (points(10, 8) + points(0, 0), "2 verdicts that differ"),
        ("{" * 5000, "no JSON object"),
        ("", "no JSON object"),
    ],
)
def test_what_is_no_verdict_is_a_failed_reward_and_never_0(text: str, why: str) -> None:
    with JudgeServer(lambda asked, number: text) as server:
        (found,), pool = judged(rubric(server.url), ["42"])
    assert isinstance(found, RewardError) and "'task-7'" in str(found) and why in str(found)
    assert len(server.asked) == 2 and why in server.asked[1].rest  # it is told, once
    assert pool.failures == 1 and pool.spent()["judge_misread"] == 2


def test_an_answer_that_is_cut_off_says_so() -> None:
    with JudgeServer(lambda asked, number: Said('{"right": 1', finish_reason="length")) as server:
        (found,), _ = judged(rubric(server.url, about={"misreadings": 0}), ["42"])
    assert "cut off after 1024 tokens" in str(found) and "model.max_tokens" in str(found)


def test_a_failure_is_scored_where_that_is_asked_for() -> None:
    with JudgeServer(lambda asked, number: "?") as server:
        (found,), _ = judged(rubric(server.url), ["42"], RewardOptions(on_failure=-1.0))
    assert found.value == -1.0 and "no JSON object" in found.failed


def test_a_server_without_structured_output_is_asked_without() -> None:
    def plain(asked: Asked, number: int) -> Said | str:
        return Said("response_format: not known", 400) if "response_format" in asked.body else points(10, 10)

    with JudgeServer(plain) as server:
        (found,), _ = judged(rubric(server.url), ["42"])
        assert found.value == 1.0 and len(server.asked) == 2
        (refused,), _ = judged(rubric(server.url, about={"structured": "json_schema"}), ["42"])
    assert "status 400" in str(refused) and "response_format: not known" in str(refused)


def test_a_wrong_key_is_not_tried_again() -> None:
    with JudgeServer(lambda asked, number: Said("who are you", 401)) as server:
        (found,), _ = judged(rubric(server.url), ["42"])
    assert len(server.asked) == 1
    assert "status 401" in str(found) and "who are you" in str(found) and "$OPENAI_API_KEY" in str(found)


def test_repeats_are_averaged_and_their_disagreement_is_a_part() -> None:
    with JudgeServer(lambda asked, number: points(10 * (number % 2), 0)) as server:
        judge = rubric(server.url, about={"temperature": 1.0, "max_concurrent": 1}, repeats=4)
        (found,), _ = judged(judge, ["42"])
    assert found.value == 0.25 and found.parts["right"] == 0.5
    assert found.parts["disagreement"] == pytest.approx((4 * 0.25**2 / 3) ** 0.5)


def test_a_verifier_beside_the_judge_shows_its_drift() -> None:
    with JudgeServer(lambda asked, number: points(10, 10)) as server:
        judge = rubric(server.url, verifier=exact_match)
        found, _ = judged(judge, ["42", "a very nice answer"])
    assert [one.value for one in found] == [1.0, 1.0]
    assert [one.parts["verifier"] for one in found] == [1.0, 0.0]
    assert [one.parts["drift"] for one in found] == [0.0, 1.0]


def test_verdicts_are_kept_on_disk_by_content(tmp_path: Path) -> None:
    about = {"cache": str(tmp_path / "deep" / "verdicts.sqlite")}
    with JudgeServer(by_length) as server:
        first, _ = judged(rubric(server.url, about=about), ["42", "41"])
        again, pool = judged(rubric(server.url, about=about), ["42", "41"])
        assert [one.value for one in first] == [one.value for one in again] and len(server.asked) == 2
        assert pool.spent()["judge_cached"] == 2 and pool.spent()["judge_calls"] == 0
        judged(rubric(server.url, about={**about, "temperature": 0.5}), ["42"])
        judged(RubricJudge(model(server.url, **about), {**CRITERIA, "right": "other words"}), ["42"])
        judged(rubric(server.url, about=about), ["42"], prompt=Prompt(id="other", text="another task"))
        assert len(server.asked) == 5


def test_what_cannot_be_read_is_not_kept(tmp_path: Path) -> None:
    about = {"cache": str(tmp_path / "verdicts.sqlite")}
    with JudgeServer(lambda asked, number: points(1, 1) if number > 1 else "?") as server:
        (refused,), _ = judged(rubric(server.url, about=about), ["42"])
        (found,), _ = judged(rubric(server.url, about=about), ["42"])
    assert isinstance(refused, RewardError) and found.value == pytest.approx(0.1)


def test_instructions_are_a_file(tmp_path: Path) -> None:
    mine = tmp_path / "mine.md"
    mine.write_text('Grade {criteria} up to {scale}; material is fenced by {fence}. Say {form}, or {"a": 1}.')
    with JudgeServer(by_length) as server:
        judged(rubric(server.url, prompt=str(mine)), ["42"])
    assert server.asked[0].body["messages"][0]["content"].startswith("Grade - right: the answer is right")
    mine.write_text("no fence: {criteria} {scale} {form} {colour}")
    with pytest.raises(ValueError, match=r"RubricJudge.prompt: .*\{colour\} is unknown"):
        rubric("http://x", prompt=str(mine))
    mine.write_text("{criteria} {scale} {form}")
    with pytest.raises(ValueError, match=r"\{fence\} is missing"):
        rubric("http://x", prompt=str(mine))


@pytest.mark.parametrize(
    "options, message",
    [
        ({"weights": {"long": 1.0}}, "RubricJudge.weights: 'long'"),
        ({"weights": {"right": 0.0}}, "RubricJudge.weights.right"),
        ({"repeats": 2}, "model.temperature: 0"),
        ({"scale": 0}, "RubricJudge.scale"),
        ({"about": {"url": "host:80"}}, "model.url"),
        ({"about": {"request": {"messages": []}}}, "model.request.messages"),
    ],
)
def test_options_are_refused_by_name(options: dict[str, Any], message: str) -> None:
    about = options.pop("about", {})
    with pytest.raises(ValueError, match=message):
        RubricJudge(model(**{"url": "http://x", **about}), CRITERIA, **options)


def test_a_cost_needs_prices() -> None:
    with pytest.raises(ValueError, match="max_cost needs"):
        Budget(max_cost=1.0)
    with pytest.raises(ValueError, match="only on_failure has an effect"):
        judged(rubric("http://x"), [], RewardOptions(workers=2))
