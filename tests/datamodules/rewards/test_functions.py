"""Rewards made of others, and by form: what they give, and that YAML makes them and workers run them."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from jsonargparse import ArgumentParser

from datamodules.processes.worker import NotAnAnswer
from datamodules.prompts.base import Prompt
from datamodules.rewards import BySource, Judgement, RegexMatch, RewardPool, WeightedSum, exact_match
from datamodules.rewards.functions import Reward
from tests.datamodules.rewards.test_rewards import with_pool

PROMPT = Prompt(id="p", answer="42")
THOUGHT = r"<think>.+</think>\s*(?P<answer>\S+)"


@pytest.mark.parametrize(
    ("pattern", "whole", "completion", "reward"),
    [
        (r"<think>.*</think>.*", True, "<think>a\nb</think>\n42", 1.0),
        (r"<think>.*</think>.*", True, "well, <think>a</think>42", 0.0),
        (r"<think>.*</think>", False, "well, <think>a</think>42", 1.0),
        (THOUGHT, True, "<think>6 * 7</think> 42", 1.0),
        (THOUGHT, True, "<think>6 * 7</think> 41", 0.0),
        (r"#### (?P<answer>\d+)", False, "#### 41\nno, wait\n#### 42", 1.0),
        (r"#### (?P<answer>\d+)", False, "#### 42\nno, wait\n#### 41", 0.0),
        (r"(?P<answer>\d+)?", True, "", 0.0),
    ],
)
def test_regex_match(pattern: str, whole: bool, completion: str, reward: float) -> None:
    assert RegexMatch(pattern, whole)(PROMPT, completion) == reward


@pytest.mark.parametrize(
    "reward", [exact_match, RegexMatch(THOUGHT), RegexMatch(THOUGHT, whole=False)], ids=["exact", "whole", "anywhere"]
)
@pytest.mark.parametrize("completion", ["", "42", "<think>6 * 7</think> 42"])
def test_a_prompt_without_answer_is_refused(reward: Any, completion: str) -> None:
    """Else saying nothing would be right, and everything else wrong."""
    with pytest.raises(ValueError, match="prompt 'q' has no answer to compare with; set answer_field"):
        reward(Prompt(id="q", answer=" "), completion)
    assert RegexMatch("[0-9]+")(Prompt(id="q"), "42") == 1.0, "a form needs no answer"


def test_sums_are_weighted_and_their_parts_are_not() -> None:
    inner = WeightedSum({"exact": exact_match}, {"exact": 4.0})
    outer = WeightedSum({"inner": inner, "form": RegexMatch(r"\d+")}, {"inner": 0.5})  # type: ignore[dict-item]
    assert outer(PROMPT, "42") == (3.0, {"inner": 4.0, "form": 1.0})
    assert outer(PROMPT, "7") == (1.0, {"inner": 0.0, "form": 1.0})


def says(prompt: Prompt, completion: str) -> Reward:
    return 0.0, {"feedback": f"{completion} is wrong", "near": 1.0}


def test_sums_say_what_their_parts_say() -> None:
    summed = WeightedSum({"one": says, "form": RegexMatch(r"\d+"), "two": says})  # type: ignore[dict-item]
    parts = {"one": 0.0, "form": 1.0, "two": 0.0}
    assert summed(PROMPT, "7") == (1.0, {**parts, "feedback": "7 is wrong\n7 is wrong"})
    numbered = WeightedSum({"feedback": RegexMatch(r"\d+")})
    assert numbered(PROMPT, "7") == (1.0, {"feedback": 1.0}), "a number of that name is a part"


async def asks(prompt: Prompt, completion: str) -> tuple[float, dict[str, float]]:
    await asyncio.sleep(0.001)
    return float(len(completion)), {"waited": 1.0}


def test_asynchronous_rewards_are_awaited() -> None:
    async def body(pool: RewardPool) -> Judgement:
        return await pool.judge(PROMPT, "42")

    assert with_pool(body, reward=asks) == Judgement(2.0, {"waited": 1.0})
    summed = WeightedSum({"asked": asks, "form": RegexMatch(r"\d+")}, {"asked": 0.5})  # type: ignore[dict-item]
    assert summed(PROMPT, "42") == (2.0, {"asked": 2.0, "form": 1.0})
    assert BySource({"sums": asks})(Prompt("q", metadata={"source": "sums"}), "7") == (1.0, {"waited": 1.0})  # type: ignore[dict-item]


@pytest.mark.parametrize("value", ["0.75", ("0.75", {}), None, float("nan")])
def test_a_part_that_is_no_number_is_none_in_a_sum(value: Any) -> None:
    summed = WeightedSum({"form": RegexMatch(r"\d+"), "right": lambda prompt, completion: value})
    with pytest.raises(NotAnAnswer, match=r"returned .* for its part 'right'"):
        summed(PROMPT, "42")


def of_sums(prompt: Prompt, completion: str) -> float | None:
    return float("+" in prompt.text) if prompt.text else None


def test_a_part_may_be_optional() -> None:
    parts = {"sums": of_sums, "form": RegexMatch(r"\d+")}
    summed = WeightedSum(parts, {"sums": 2.0}, optional=["sums"])  # type: ignore[arg-type]
    assert summed(Prompt("q", text="1+2="), "3") == (3.0, {"sums": 1.0, "form": 1.0})
    assert summed(Prompt("q"), "3") == (1.0, {"form": 1.0})
    lone = WeightedSum({"sums": of_sums}, optional=["sums"])
    with pytest.raises(NotAnAnswer, match="returned None for all of its parts, sums: no reward"):
        lone(Prompt("q"), "3")


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: WeightedSum({"a": exact_match}, optional=["b"]), "WeightedSum.optional: 'b' is none of"),
        (lambda: WeightedSum({}), "WeightedSum.rewards: empty"),
        (lambda: WeightedSum({"a": exact_match}, {"b": 1.0}), "WeightedSum.weights: 'b' is none of"),
        (lambda: RegexMatch("("), "RegexMatch.pattern"),
    ],
)
def test_arguments_without_sense_are_refused_by_name(make: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        make()


def test_yaml_makes_a_sum_that_workers_run() -> None:
    parser = ArgumentParser()
    parser.add_argument("--reward", type=WeightedSum)
    form = {"class_path": "datamodules.rewards.RegexMatch", "init_args": {"pattern": "[0-9]+"}}
    rewards = {"correct": "datamodules.rewards.exact_match", "form": form}
    chosen = {"rewards": rewards, "weights": {"form": 0.1}}
    config = parser.parse_object({"reward": {"class_path": "datamodules.rewards.WeightedSum", "init_args": chosen}})
    reward = parser.instantiate_classes(config).reward

    async def body(pool: RewardPool) -> list[Judgement]:
        return [await pool.judge(PROMPT, text) for text in ("42", "41", "no idea")]

    assert with_pool(body, reward=reward) == [
        Judgement(1.1, {"correct": 1.0, "form": 1.0}),
        Judgement(0.1, {"correct": 0.0, "form": 1.0}),
        Judgement(0.0, {"correct": 0.0, "form": 0.0}),
    ]
