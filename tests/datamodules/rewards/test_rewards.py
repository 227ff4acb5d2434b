"""Rewards in real worker processes: right when they behave, contained when they do not."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from datamodules.answers import math_answer
from datamodules.prompts.base import Prompt
from datamodules.rewards import BySource, RewardOptions, RewardPool, WeightedSum, exact_match, functions, math_verify
from tests.datamodules.rewards.reward_functions import FailsToLoad, Scaled, SlowToPrepare, misbehave

PROMPT = Prompt(id="task-7", answer="42")
ABOUT_A = Prompt(id="a", metadata={"source": "a"})


def with_pool(body: Callable[[RewardPool], Awaitable[Any]], reward: Any = misbehave, **options: Any) -> Any:
    pool = RewardPool(reward, RewardOptions(**{"deadline_s": 60.0, **options}))

    async def run() -> Any:
        await pool.open()
        return await body(pool)

    try:
        return asyncio.run(run())
    finally:
        pool.close()


def test_results_belong_to_their_calls() -> None:
    async def body(pool: RewardPool) -> list[float]:
        return await asyncio.gather(*(pool.score(PROMPT, "x" * n) for n in range(200)))

    assert with_pool(body, workers=2) == [float(n) for n in range(200)]


def test_two_workers_share_slow_rewards() -> None:
    async def body(pool: RewardPool) -> set[float]:
        return set(await asyncio.gather(*(pool.score(PROMPT, "slow pid") for _ in range(12))))

    assert len(with_pool(body, workers=2)) == 2


def test_close_ends_the_workers_even_a_hung_one() -> None:
    pids: list[int] = []

    async def body(pool: RewardPool) -> None:
        pids.append(int(await pool.score(PROMPT, "pid")))
        hung = asyncio.create_task(pool.score(PROMPT, "hang"))
        await asyncio.sleep(0.1)
        hung.cancel()

    with_pool(body, deadline_s=100.0)
    assert _ends(pids[0])


def test_a_cancelled_call_is_not_computed() -> None:
    async def body(pool: RewardPool) -> list[float]:
        first = asyncio.create_task(pool.score(PROMPT, "sleep"))
        hang = asyncio.create_task(pool.score(PROMPT, "hang"))
        await asyncio.sleep(0)
        hang.cancel()
        return [await first, await pool.score(PROMPT, "xyz"), pool.restarts]

    assert with_pool(body) == [5.0, 3.0, 0]


def test_a_pool_opens_again_after_close() -> None:
    pool = RewardPool(exact_match)

    async def run() -> float:
        await pool.open()
        return await pool.score(PROMPT, " 42\n")

    for _ in range(2):
        assert asyncio.run(run()) == 1.0
        pool.close()
        pool.close()


def test_rewards_that_cannot_be_sent_are_refused() -> None:
    with pytest.raises(ValueError, match=r"reward: .* cannot be sent to a worker process"):
        RewardPool(lambda prompt, completion: 1.0)
    with pytest.raises(ValueError, match=r"reward_options\.workers: 0"):
        RewardOptions(workers=0)
    with pytest.raises(ValueError, match="could not be started: ImportError: licence server unreachable"):
        with_pool(lambda pool: asyncio.sleep(0), reward=FailsToLoad())


def test_callable_objects_and_math_verify_run_in_workers() -> None:
    async def body(pool: RewardPool) -> list[float]:
        unreadable = await pool.judge(PROMPT, "1" * 200_000)
        assert unreadable.value == 0.0
        assert unreadable.metadata() == ({"reward_unreadable": True} if unreadable.unreadable else {})
        seen.append(unreadable.unreadable)
        return [await pool.score(PROMPT, text) for text in ("42", "so it is $42.0$", "41", "no idea")]

    seen: list[bool] = []
    assert with_pool(body, reward=Scaled(3.0)) == [3.0, 0.0, 0.0, 0.0]
    assert with_pool(body, reward=math_verify) == [1.0, 1.0, 0.0, 0.0]
    assert seen == [False, True]


def test_what_a_reward_prepares_counts_for_no_call(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Each of its workers prepares for longer than a call may take; one that only starved may have other tries."""
    monkeypatch.setenv("ARBORIST_TEST_TOKEN", "not-to-be-seen")
    options: dict[str, Any] = {"deadline_s": 0.7, "retries": 5, "retry_on": ["timeout"]}
    both = BySource({"a": WeightedSum({"slow": SlowToPrepare()}), "b": exact_match})
    with caplog.at_level(logging.INFO):
        assert with_pool(lambda pool: pool.score(ABOUT_A, ""), reward=both, **options) == 1.0
    assert "ARBORIST_TEST_TOKEN" in caplog.text and "not-to-be-seen" not in caplog.text


SEVERAL = [
    "(1, 2)",
    "(1,2)",
    "[1, 2)",
    "(1; 2)",
    "1, 2",
    "(1, 2) apples",
    "1 or 2",
    "x = 1, y = 2",
    "1/2",
    "1:2",
    "1 of 2",
]


@pytest.mark.parametrize(
    ("answer", "completion", "reward"),
    [
        ("1,000", "that makes $1000$ dollars", 1.0),
        ("1000", "\\boxed{1000.0}", 1.0),
        ("72", "48 + 24 = 72\n#### 72", 1.0),
        ("40", "She answered 200 calls in 5 days.\n#### 40\n", 1.0),
        ("2\\sqrt{3}", "#### 2\\sqrt{3}", 1.0),
        ("2", "#### 2\\sqrt{3}", 0.0),
        ("(1,2)", "#### (1, 2)", 1.0),
        ("x+1", "#### x+1", 1.0),
        ("7", "#### 7 apples", 1.0),
        ("\\frac{3}{4}", "#### 3/4 cups", 1.0),
        ("\\frac{1}{2}", "#### The probability is 0.5", 1.0),
        ("\\frac{1}{2}", "#### 0.5 (one half)", 1.0),
        ("\\frac{1}{2}", "#### 1/3 of the pie", 0.0),
        *((one, f"#### {several}", 0.0) for several in SEVERAL for one in ("1", "2", "12")),
        ("2", "#### (2)", 1.0),
        ("1/2", "#### 1:2", 1.0),
        ("\\{1, 2\\}", "#### 1 or 2", 1.0),
        ("1,234", "#### $1,234", 1.0),
        ("7", "#### the sum of 5 and 2 is 7", 1.0),
        ("3/2", "#### 1 1/2", 1.0),
        ("-3/2", "#### -1 1/2 cups", 1.0),
        ("1 1/2", "#### 1.5", 1.0),
        ("1/2", "#### 1 1/2", 0.0),
        ("1 1/2", "#### 1", 0.0),
        ("5", "#### first step\nThe answer is 5.", 1.0),
        ("\\frac{1}{2}", "0.5", 1.0),
        ("(1, 2)", "Since $x > 0$, the point is (1, 2), no other.", 1.0),
        ("7", "Of (5, 2) the sum is 7.", 1.0),
        ("5", "-5", 0.0),
        ("5", "", 0.0),
    ],
)
def test_math_verify(answer: str, completion: str, reward: float) -> None:
    assert math_verify(Prompt(id="p", answer=answer), completion) == reward


@pytest.mark.parametrize(
    "said",
    [
        "I think \\boxed{\\frac{1}{2}}. Wait, that is wrong. So \\boxed{42}.",
        "<think>Maybe \\boxed{\\frac{1}{2}}.</think> It is \\boxed{42}",
        "First \\boxed{\\frac{1}{2}}, then \\boxed{42}",
        "$\\boxed{\\frac{1}{2}}$ at first. No: $\\boxed{42}$.",
    ],
)
def test_of_several_boxes_the_last_is_the_answer(said: str) -> None:
    assert math_verify(Prompt(id="p", answer="42"), said) == 1.0
    assert math_verify(Prompt(id="p", answer="1/2"), said) == 0.0
    assert math_answer(said) == "42"


@pytest.mark.parametrize(
    "between",
    [
        *(" and ", ", ", " or x = ", "$, $", "\n", "\n- ", "\n(b) ", "** and **", "\\\\ "),
        *(", x_2 = ", "$, $x_{2} = ", ",\\, ", " \\quad \\text{or}\\quad x = ", " \\quad \\text{ and } \\quad "),
    ],
)
def test_boxes_in_a_row_are_one_answer(between: str) -> None:
    said = f"Not \\boxed{{3}}, so x = \\boxed{{1}}{between}\\boxed{{2}}"
    assert math_verify(Prompt(id="p", answer="1, 2"), said) == 1.0
    assert [math_verify(Prompt(id="p", answer=one), said) for one in "123"] == [0.0] * 3
    assert math_verify(Prompt(id="p", answer="2"), "\\boxed{\\boxed{2}}") == 1.0


def test_several_answers_may_have_words_between_their_boxes() -> None:
    said = "The smaller root is \\boxed{1}, and the larger one is \\boxed{2}."
    assert math_verify(Prompt(id="p", answer="1, 2"), said) == 1.0
    assert [math_verify(Prompt(id="p", answer=one), said) for one in ("1", "1, 3", "1,000")] == [0.0] * 3


AS_MATHEMATICS = [
    "\\boxed{%s}",
    "$%s$",
    "The answer is $%s$.",
    "The final answer is $\\boxed{%s}$.",
    "2 + 2 = 4, so\n#### %s",
    "#### $%s$",
    "#### \\boxed{%s}",
]
AS_TEXT = ["%s", "The answer is %s.", "The answer is **%s**.", "Half of it is 1/2.\n\nSo x = %s"]


@pytest.mark.parametrize(
    ("reference", "wrong", "forms"),
    [
        ("1 1/2", ["1", "1/2", "2 1/2", "11/2"], [*AS_MATHEMATICS, *AS_TEXT]),
        ("12 1/3", ["12", "13/3", "4"], [*AS_MATHEMATICS, *AS_TEXT]),
        ("-2 3/4", ["2 3/4", "-2", "-5/4"], [*AS_MATHEMATICS, *AS_TEXT]),
        ("1 3/2", ["1", "3/2"], AS_MATHEMATICS),  # no mixed number, whatever it is
        ("(1 1/2, 2)", ["(1, 2)", "2"], AS_MATHEMATICS),
        ("1 1/2%", ["1%", "2 1/2%"], AS_MATHEMATICS),
        ("7/3", ["7", "3", "7/2"], [*AS_MATHEMATICS, *AS_TEXT]),
        ("-3/4", ["3/4", "-3"], [*AS_MATHEMATICS, *AS_TEXT]),
        ("(1, 2)", ["(2, 1)", "2", "1 1/2"], [*AS_MATHEMATICS, *AS_TEXT]),
        ("[1/2, -3.5]", ["-3.5", "[1/2, 3.5]"], [*AS_MATHEMATICS, *AS_TEXT]),
        ("2", ["(1, 2)", "(0, 1; 2)", "[1, 2)"], [*AS_MATHEMATICS, *AS_TEXT]),
        ("1,200", ["(1, 200)", "200"], [*AS_MATHEMATICS, *AS_TEXT]),
        ("2\\sqrt{3}", ["2", "\\sqrt{3}"], AS_MATHEMATICS),
        ("1\\frac{1}{2}", ["1", "1\\frac{1}{3}"], AS_MATHEMATICS),
        ("5 cm", ["6 cm"], [*AS_MATHEMATICS, *AS_TEXT]),
        ("1,234", ["1,235", "234"], [*AS_MATHEMATICS, *AS_TEXT]),
        ("50%", ["51%"], [*AS_MATHEMATICS, *AS_TEXT]),
        ("-0.5", ["0.5", "-5"], [*AS_MATHEMATICS, *AS_TEXT]),
        ("$1 1/2", ["1", "1/2"], ["%s", "#### %s", "The answer is %s."]),  # money
        ("$18", ["19"], ["%s", "#### %s", "The answer is %s."]),
    ],
)
def test_a_reference_repeated_is_right_in_every_form(reference: str, wrong: list[str], forms: list[str]) -> None:
    prompt = Prompt(id="p", answer=reference)
    assert [form for form in forms if math_verify(prompt, form % reference) != 1.0] == []
    assert [form % one for form in forms for one in wrong if math_verify(prompt, form % one) != 0.0] == []


@pytest.mark.parametrize(
    ("answer", "said", "wrong"),
    [
        ("-3", "\u22123", "3"),
        ("2", "5 \u2212 3", "3"),
        ("2\\sqrt{3}", "2\u221a3", "2"),
        ("2\\pi", "2\u03c0", "2"),
        ("9", "3\u00b2", "3"),
        ("5/2", "2\u00bd", "2"),
        ("1/2", "\u00bd", "2"),
        ("12", "3 \u00d7 4", "3"),
        ("3", "6\u00f72", "6"),
        ("1000", "1\u202f000", "0"),
        ("1000", "1\\,000", "0"),
        ("32348", "32,\\!348", "348"),
        ("60", "60~\\text{cm}", "0"),
        ("12", "\\$12", "2"),
        ("2\\sqrt{3}", "2*sqrt(3)", "2"),
        ("100", "1e2", "2"),
        ("0.00015", "1.5E-4", "4"),
    ],
)
def test_signs_that_chat_models_write_are_read(answer: str, said: str, wrong: str) -> None:
    for form in ("#### %s", "\\boxed{%s}"):
        found = [math_verify(Prompt(id="p", answer=one), form % said) for one in (answer, wrong)]
        assert found == [1.0, 0.0], form
    assert math_verify(Prompt(id="p", answer=said), f"\\boxed{{{answer}}}") == 1.0
    assert math_verify(Prompt(id="p", answer="12"), "#### 12 m\u00b2") == 1.0
    assert math_verify(Prompt(id="p", answer="3"), "It is 3\u00d7 larger") == 1.0


@pytest.mark.parametrize(
    ("answer", "said", "wrong"),
    [
        ("2\\sqrt{3}", "So it is 2\u221a3.", "2"),
        ("2\\sqrt{3}", "x = **2\u221a3**", "3"),
        ("2\\sqrt{3}", "2\\sqrt{3} cm", "2"),
        ("2\\sqrt{3}+1", "The answer is 2\u221a3 + 1.", "1"),
        ("\\frac{\\sqrt{3}}{2}", "the answer is \u221a3/2", "2"),
        ("\\frac{1+\\sqrt{5}}{2}", "It is (1+\u221a5)/2.", "5/2"),
        ("7", "From 2\u221a3 and so on it follows that it is 7", "2\\sqrt{3}"),
        ("2\\sqrt{3}", "The side is 2 \u221a3.", "\\sqrt{3}"),
        ("2\\sqrt{3}", "The side is 2\u00b7\u221a3.", "\\sqrt{3}"),
        ("2\\sqrt{3}", "The area is 2\u221a3 cm^2.", "2"),
        ("\\sqrt{1.5}", "It is \u221a1.5.", "1"),
        ("(2\\sqrt{3}, 1)", "The point is (2\u221a3, 1).", "1"),
        ("[0, \\sqrt{3})", "It holds in [0, \u221a3).", "\\sqrt{3}"),
        ("100", "The answer is 1e2.", "2"),
        ("5", "\\fbox{5}", "4"),
        ("5", "First \\framebox{4}, no: \\framebox{5}", "4"),
    ],
)
def test_roots_powers_of_ten_and_frames_in_text_are_read(answer: str, said: str, wrong: str) -> None:
    assert [math_verify(Prompt(id="p", answer=one), said) for one in (answer, wrong)] == [1.0, 0.0]


@pytest.mark.parametrize("said", ["x*2\u221a3", "n + 2\u221a3", "\u00b12\u221a3"])
def test_the_end_of_a_longer_expression_is_no_answer(said: str) -> None:
    assert math_verify(Prompt(id="p", answer="2\\sqrt{3}"), said) == 0.0


def test_equal_mixed_numbers_fractions_and_decimals_are_one_answer() -> None:
    equal = ["2 1/2", "5/2", "2.5", "\\boxed{2 1/2}", "$2\\frac{1}{2}$", "#### $2 1/2", "#### $5/2", "It is 2 1/2."]
    found = {(a, b): math_verify(Prompt(id="p", answer=a), b) for a in equal[:3] for b in equal}
    assert set(found.values()) == {1.0}, found
    assert {math_answer(one) for one in equal} == {"5/2"}
    # No mixed numbers: two lines, a power's half, thousands.
    for other in ("2\n1/2", "$x^2 1/2$", "#### 2 000/2"):
        assert math_verify(Prompt(id="p", answer="2 1/2"), other) == 0.0


class Swallows:
    """Its end takes longer than anybody waits, and what is raised in it goes no further."""

    def __del__(self) -> None:
        _compute(2.0)


def _compute(seconds: float) -> None:
    started = time.process_time()
    while time.process_time() - started < seconds:
        pass


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_alarm_that_was_swallowed_rings_again() -> None:
    with pytest.raises(functions._OutOfTime), functions._processor_time(0.1):
        one = Swallows()
        del one
        _compute(2.0)
    _compute(0.3)  # and not once it is over


@pytest.mark.parametrize(
    "hostile",
    [
        r"\boxed{9^{9^9}}",
        "$(99999999)!$",
        "$" + r"\frac{1}{" * 300 + "1" + "}" * 300 + "$",
        r"\boxed{" + "(" * 5000 + "1" + ")" * 5000 + "}",
        "1" * 200_000,
        r"\boxed{0." + "1" * 200_000 + "}",
        r"\boxed{\binom{99999999}{4999999}}",
        "\\boxed{\ud83d}",
    ],
)
def test_no_answer_of_a_model_is_more_than_wrong(hostile: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(functions, "_MATH_S", 0.3)  # of processor time
    functions.was_unreadable()
    assert math_verify(PROMPT, hostile) == 0.0
    assert functions.was_unreadable() == ("ud83d" not in ascii(hostile))
    assert not signal.getitimer(signal.ITIMER_PROF)[0]


@pytest.mark.parametrize("answer", ["", r"\boxed{\binom{99999999}{4999999}}"])
def test_math_verify_refuses_a_reference_it_cannot_read(answer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(functions, "_MATH_S", 0.3)
    with pytest.raises(ValueError, match=r"the answer of prompt 'p', .* is no mathematical expression: "):
        math_verify(Prompt(id="p", answer=answer), "3")


def _ends(pid: int, seconds: float = 60.0) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            with open(f"/proc/{pid}/stat") as file:
                if file.read().rsplit(")", 1)[1].split()[0] == "Z":
                    return True
        except FileNotFoundError:
            return True
        time.sleep(0.02)
    os.kill(pid, 9)
    return False
