"""A judge that dies, hangs, is overloaded or spends its budget: exact counts, and the words one needs."""

from __future__ import annotations

import json
import re
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from datamodules.processes import deadline as deadline_module
from datamodules.prompts.base import Prompt
from datamodules.rewards import RewardError, RewardOptions
from datamodules.rewards.judges import Budget, Judge, RubricJudge
from datamodules.rewards.judges import client as asking
from datamodules.rewards.judges.base import Verdict
from datamodules.rewards.judges.pool import JudgePool
from tests.datamodules.rewards.judges.judging import CRITERIA, judged, model, points, rubric
from tests.helpers.judge_server import Asked, JudgeServer, Said
from tests.helpers.ports import free_port

SOON, NEVER = 0.02, 600.0


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Sets the seconds before a second attempt: `SOON`, or `NEVER` within any deadline of these tests."""
    return lambda seconds: monkeypatch.setattr(asking, "_FIRST_WAIT_S", seconds)


def test_a_judge_that_is_not_there(waits: Callable[[float], None]) -> None:
    waits(SOON)
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # and nobody listens
        url = f"http://127.0.0.1:{closed.getsockname()[1]}/v1"
        (found,), pool = judged(rubric(url, about={"deadline_s": 1.5}), ["42"])
    assert isinstance(found, RewardError) and "cannot be reached" in str(found)
    assert "model.deadline_s" in str(found) and pool.spent()["judge_retries"] >= 1


def test_a_judge_that_hangs_costs_its_deadline(waits: Callable[[float], None]) -> None:
    waits(NEVER)
    with JudgeServer(lambda asked, number: Said(points(1, 1), after_s=3.0)) as server:
        (found,), pool = judged(rubric(server.url, about={"deadline_s": 60.0, "attempt_s": 0.3}), ["42"])
    assert pool.spent()["judge_calls"] == 1 and pool.spent()["judge_seconds"] > 0, "it was waited for"
    assert "1 attempt; at last it did not answer within 0.3 s (model.attempt_s)" in str(found)


def test_a_deadline_that_ends_the_only_attempt_is_named() -> None:
    with JudgeServer(lambda asked, number: Said(points(1, 1), after_s=3.0)) as server:
        (found,), _ = judged(rubric(server.url, about={"deadline_s": 0.5, "attempt_s": 2.0}), ["42"])
    told = r"1 attempt; at last it did not answer within 0\.[1-5]\d? s \(model\.deadline_s\)"  # of what was left of it
    assert re.search(told, str(found)), found


def test_no_verdict_is_late_for_a_process_that_was_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    """All the time that passes here was one in which it was."""
    monkeypatch.setattr(deadline_module, "stopped_s", time.monotonic)
    monkeypatch.setattr(asking, "awake", lambda: 0.0)
    with JudgeServer(lambda asked, number: Said(points(1, 1), after_s=1.0)) as server:
        (found,), pool = judged(rubric(server.url, about={"deadline_s": 0.3, "attempt_s": 0.3}), ["42"])
    assert not isinstance(found, RewardError) and pool.spent()["judge_retries"] == 0


def test_what_is_imported_late_costs_no_question(monkeypatch: pytest.MonkeyPatch) -> None:
    """The package openai imports what asks with its first use."""
    client = rubric("http://127.0.0.1:9/v1").client()
    monkeypatch.delitem(sys.modules, "openai.resources.chat", raising=False)
    client.open()
    assert "openai.resources.chat" in sys.modules


@pytest.mark.parametrize("fault", [Said("busy", 503), Said(drop=True), Said("slow", 408)])
def test_what_passes_is_tried_again(fault: Said, waits: Callable[[float], None]) -> None:
    waits(SOON)
    with JudgeServer(lambda asked, number: points(10, 10) if number else fault) as server:
        (found,), pool = judged(rubric(server.url), ["42"])
    assert found.value == 1.0 and pool.spent()["judge_calls"] == len(server.asked) == 2


@pytest.mark.parametrize(
    "fault",
    [
        Said(body="<html>Bad gateway</html>", headers={"content-type": "text/html"}),
        Said(body="<html>Bad gateway</html>"),
        Said(body=""),
        Said(body='{"choices": ['),
        Said(body="[" * 100_000),
        Said(body="null"),
        Said(body="[1]"),
        Said(body='{"error": {"message": "busy"}}'),
        Said(body='{"choices": null}'),
    ],
    ids=["html", "html as json", "empty", "cut", "deep", "null", "list", "error", "no choices"],
)
def test_what_is_no_completion_is_tried_again_and_refused_in_the_end(
    fault: Said, waits: Callable[[float], None]
) -> None:
    waits(SOON)
    with JudgeServer(lambda asked, number: points(10, 10) if number else fault) as server:
        (found,), pool = judged(rubric(server.url), ["42"])
    spent = pool.spent()
    assert found.value == 1.0 and pool.failures == 0 and len(server.asked) == 2
    assert (spent["judge_retries"], spent["judge_refused"], spent["judge_misread"]) == (1, 0, 0)

    waits(NEVER)
    with JudgeServer(lambda asked, number: fault) as server:
        (scored,), pool = judged(rubric(server.url), ["42"], RewardOptions(on_failure=-1.0))
    spent = pool.spent()
    assert scored.value == -1.0 and pool.failures == 1 and spent["judge_refused"] == 1 and spent["judge_misread"] == 0
    assert "at last it answered what is no Chat Completion (" in scored.failed and "see model.url" in scored.failed
    assert ("busy" in scored.failed) == ("busy" in str(fault.body))


def chosen(**choice: Any) -> Said:
    """A Chat Completion as other servers may give one."""
    return Said(body=json.dumps({"choices": [{"index": 0, "finish_reason": "stop", **choice}]}))


@pytest.mark.parametrize(
    "fault",
    [
        chosen(),
        chosen(message=None),
        chosen(message={"role": "assistant"}),
        chosen(message={"role": "assistant", "content": None}),
        chosen(message={"role": "assistant", "content": [{"type": "image_url"}, 7, {"type": "text", "text": None}]}),
        Said(body='{"choices": []}'),
        Said(body='{"choices": [null]}'),
    ],
    ids=["no message", "null message", "no content", "null content", "no text", "no choice", "null choice"],
)
def test_a_completion_without_text_is_misread(fault: Said) -> None:
    with JudgeServer(lambda asked, number: points(10, 10) if number else fault) as server:
        (found,), pool = judged(rubric(server.url), ["42"])
    assert found.value == 1.0 and pool.failures == 0 and pool.spent()["judge_misread"] == 1
    assert "Your last answer could not be read: no JSON object." in server.asked[1].rest

    with JudgeServer(lambda asked, number: fault) as server:
        (scored,), pool = judged(rubric(server.url), ["42"], RewardOptions(on_failure=-1.0))
    assert scored.value == -1.0 and "answered 2 times what cannot be read" in scored.failed
    assert pool.failures == 1 and pool.spent()["judge_refused"] == 1 and pool.spent()["judge_misread"] == 2


def test_parts_of_a_text_are_one() -> None:
    text = points(10, 5)
    parts = [{"type": "text", "text": text[:9]}, {"type": "other"}, {"type": "text", "text": text[9:]}]
    with JudgeServer(lambda asked, number: chosen(message={"role": "assistant", "content": parts})) as server:
        (found,), pool = judged(rubric(server.url), ["42"])
    assert found.value == 0.75 and pool.spent()["judge_calls"] == 1


def test_all_hold_while_an_overloaded_judge_asks_for_it() -> None:
    def overloaded(asked: Asked, number: int) -> Said | str:
        return Said("later", 429, {"retry-after": "1"}) if number == 0 else points(10, 10)

    with JudgeServer(overloaded) as server:
        found, pool = judged(rubric(server.url, about={"max_concurrent": 1}), ["1", "2", "3"])
    assert [one.value for one in found] == [1.0] * 3
    assert len(server.asked) == 4 and pool.spent()["judge_retries"] == 1 and pool.failures == 0


def test_a_judge_that_is_busy_for_long_is_waited_for_and_every_request_is_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Status 429 to whoever asks, ten times for each question, without a word of when to come again."""
    monkeypatch.setattr(asking, "_FIRST_WAIT_S", 0.05)
    monkeypatch.setattr(asking, "_LONGEST_WAIT_S", 0.2)

    def busy(asked: Asked, number: int) -> Said | str:
        return Said("slow down", 429) if number < 60 else points(10, 10)

    with JudgeServer(busy) as server:
        found, pool = judged(rubric(server.url, about={"deadline_s": 50.0}), [str(k) for k in range(6)])
    spent = pool.spent()
    assert [one.value for one in found] == [1.0] * 6 and pool.failures == 0
    assert spent["judge_calls"] == len(server.asked) == 6 + spent["judge_retries"] and spent["judge_retries"] == 60
    assert spent["judge_refused"] == 0 and spent["judge_input_tokens"] == 600  # those that were answered


def returning(judge: Judge, port: int, monkeypatch: pytest.MonkeyPatch) -> tuple[list[Any], JudgePool, JudgeServer]:
    """Two questions to a judge that is there again only once both have failed."""
    servers: list[JudgeServer] = []
    failed, cause, both = list[str](), asking._cause, threading.Event()

    def noted(error: BaseException) -> str:
        failed.append(cause(error))
        if len(failed) == 2:
            both.set()
        return failed[-1]

    def come_back() -> None:
        both.wait(60.0)
        servers.append(JudgeServer(lambda asked, number: points(5, 5), port).__enter__())

    monkeypatch.setattr(asking, "_cause", noted)
    later = threading.Thread(target=come_back)
    later.start()
    try:
        found, pool = judged(judge, ["1", "2"])
    finally:
        later.join()
        servers[0].__exit__(None, None, None)
    return found, pool, servers[0]


def test_a_judge_that_dies_and_comes_back_costs_time_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    with JudgeServer(lambda asked, number: points(10, 10), free_port()) as first:
        url, port = first.url, first.port
        judge = rubric(url, about={"deadline_s": 50.0})
        (found,), _ = judged(judge, ["42"])
        assert found.value == 1.0
    found, pool, server = returning(judge, port, monkeypatch)
    assert [one.value for one in found] == [0.5, 0.5] and pool.failures == 0
    assert len(server.asked) == 2 and pool.spent()["judge_calls"] == 2 + pool.spent()["judge_retries"]
    assert pool.spent()["judge_retries"] >= 2


def test_a_pause_beyond_the_deadline_is_not_waited_for() -> None:
    with JudgeServer(lambda asked, number: Said("later", 429, {"retry-after": "60"})) as server:
        found, pool = judged(rubric(server.url, about={"max_concurrent": 1}), ["1", "2"])
    assert "status 429: " in str(found[0]) and "later" in str(found[0])
    assert "asked for a pause of" in str(found[1]) and len(server.asked) == 1
    assert pool.spent()["judge_refused"] == 2


class LooksForWhatIsNotThere(RubricJudge):
    async def verdicts(self, client: Any, prompt: Prompt, replies: Sequence[Any]) -> list[Verdict]:
        return [{}["weights"]] if "41" in replies else await super().verdicts(client, prompt, replies)


def test_whatever_a_judge_of_ones_own_raises_costs_its_reply_alone() -> None:
    """A KeyError passed `on_failure`, as errors of other types do not."""
    with JudgeServer(lambda asked, number: points(10, 10)) as server:
        judge = LooksForWhatIsNotThere(model(server.url), CRITERIA)
        (fine, scored), pool = judged(judge, ["42", "41"], RewardOptions(on_failure=-1.0))
        (_, dropped), _ = judged(judge, ["42", "41"])
    assert fine.value == 1.0 and scored.value == -1.0 and pool.failures == 1
    said = "reward of prompt 'task-7': the judge failed: KeyError: 'weights'"
    assert scored.failed == said and isinstance(dropped, RewardError) and str(dropped) == said


def test_no_more_at_a_time_than_asked_for() -> None:
    with JudgeServer(lambda asked, number: Said(points(1, 1), after_s=0.05)) as server:
        judged(rubric(server.url, about={"max_concurrent": 3}), [str(i) for i in range(12)])
    assert len(server.asked) == 12 and server.most_at_once == 3


@pytest.mark.parametrize(
    "budget, calls, name",
    [
        (Budget(max_calls=3), 3, "3 of 3 (model.budget.max_calls)"),
        (Budget(max_tokens=300), 3, "330 of 300 (model.budget.max_tokens)"),
        (Budget(max_cost=0.9, input_price=2000, output_price=10_000), 3, "0.9 of 0.9 (model.budget.max_cost)"),
    ],
)
def test_a_budget_is_kept_and_its_end_is_no_score(budget: Budget, calls: int, name: str) -> None:
    with JudgeServer(lambda asked, number: points(10, 10)) as server:
        judge = rubric(server.url, about={"budget": budget, "max_concurrent": 1})
        found, pool = judged(judge, [str(i) for i in range(5)], RewardOptions(on_failure=0.0))
    assert [one.value for one in found[:calls]] == [1.0] * calls and len(server.asked) == calls
    for one in found[calls:]:
        assert isinstance(one, RewardError) and "has spent its budget" in str(one) and name in str(one)
    assert name in pool.exhausted


def test_a_budget_is_of_all_launches() -> None:
    with JudgeServer(lambda asked, number: points(10, 10)) as server:
        judge = rubric(server.url, about={"budget": Budget(max_calls=3), "max_concurrent": 1})
        _, first = judged(judge, ["1", "2"])
        found, pool = judged(judge, ["3", "4"], state=json.loads(json.dumps(first.state_dict())))
    assert len(server.asked) == 3 and pool.spent()["judge_calls"] == 3 and pool.spent()["judge_input_tokens"] == 300
    assert found[0].value == 1.0 and "3 of 3 (model.budget.max_calls)" in str(found[1])


def test_a_budget_that_cannot_be_counted_is_refused() -> None:
    with JudgeServer(lambda asked, number: Said(points(1, 1), usage=False)) as server:
        (found,), _ = judged(rubric(server.url, about={"budget": Budget(max_tokens=10)}), ["42"])
        (fine,), _ = judged(rubric(server.url), ["42"])
    partial = {"choices": [{"message": {"content": points(1, 1)}}], "usage": {"total_tokens": 5}}
    with JudgeServer(lambda asked, number: Said(body=json.dumps(partial))) as server:
        (uncounted,), _ = judged(rubric(server.url, about={"budget": Budget(max_tokens=10)}), ["42"])
    assert "does not say how many tokens" in str(found) and "does not say how many tokens" in str(uncounted)
    assert fine.value == pytest.approx(0.1)
