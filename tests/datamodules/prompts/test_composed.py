"""Sources made of other sources: proportions, stages, and that position alone decides what is dealt."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from jsonargparse import ArgumentParser

from datamodules.prompts import (
    ArithmeticPrompts,
    CurriculumPrompts,
    JsonlPrompts,
    MixedPrompts,
    PromptSource,
    StagedPrompts,
)
from datamodules.prompts.dealer import PromptDealer
from datamodules.prompts.tokenizers import load_tokenizer
from tests.datamodules.prompts.test_prompts import ALPHABET, Listed


def levels(tmp_path: Path, count: int = 40, last: float = 1, **options: Any) -> JsonlPrompts:
    """Problems whose difficulty falls along the file, to `last`."""
    path = tmp_path / "levels.jsonl"
    numbers = [*range(count, 1, -1), last]
    records = ({"question": f"q{i}", "answer": i, "about": {"level": level}} for i, level in enumerate(numbers))
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return JsonlPrompts(str(path), **options)


def mixed(weights: dict[str, float] | None = None, **sizes: int) -> MixedPrompts:
    sources: dict[str, PromptSource] = {
        name: Listed(*(f"{name}{i}" for i in range(size))) for name, size in sizes.items()
    }
    return MixedPrompts(sources, weights)


# ---- mixing


@pytest.mark.parametrize(
    ("weights", "period", "counts"),
    [
        ({}, 3, {"a": 1, "b": 1, "c": 1}),
        ({"a": 2.0}, 4, {"a": 2, "b": 1, "c": 1}),
        ({"a": 0.5, "b": 0.3, "c": 0.2}, 10, {"a": 5, "b": 3, "c": 2}),
        ({"a": 98, "b": 1, "c": 1}, 100, {"a": 98, "b": 1, "c": 1}),
        ({"a": 1 / 3, "b": 2 / 3, "c": 1e-2}, 1000, {"a": 330, "b": 660, "c": 10}),
    ],
)
def test_mixing_keeps_proportions_on_every_stretch(
    weights: dict[str, float], period: int, counts: dict[str, int]
) -> None:
    source = mixed(weights, a=7, b=5, c=3)
    names = [source.deal(i).metadata["source"] for i in range(3 * period)]
    assert names[:period] == names[period : 2 * period]
    for start in (0, 1, period // 2, period):
        assert Counter(names[start : start + period]) == counts
    for name, count in counts.items():  # never ahead or behind by more than one place in another's turn
        for n in range(period):
            assert abs(names[:n].count(name) - n * count / period) <= len(counts) - 1


def test_a_mixed_source_is_dealt_in_its_own_order_without_gaps() -> None:
    source = mixed({"a": 3.0}, a=7, b=5)
    dealt = [source.deal(i) for i in range(200)]
    for name, size in (("a", 7), ("b", 5)):
        texts = [prompt.text for prompt in dealt if prompt.metadata["source"] == name]
        assert texts == [f"{name}{i % size}" for i in range(len(texts))]
    assert [source.deal(i) for i in (150, 3, 77)] == [dealt[i] for i in (150, 3, 77)]  # in any order: resume by index
    assert {prompt.id for prompt in source.samples()} == {f"a/p{i}" for i in range(7)} | {f"b/p{i}" for i in range(5)}
    assert source.size is None and source.name == "a+b"


def test_every_prompt_of_a_mixed_source_is_checked_before_training() -> None:
    """The one that is too long comes later in the stream than an endless source's samples reach."""
    short = Listed(*(["1+2="] * 400), "1234567890123=")
    source = MixedPrompts({"short": short, "sums": ArithmeticPrompts()}, {"short": 0.1})
    tokenizer = load_tokenizer(f"char:{ALPHABET}")
    dealer = PromptDealer(source, tokenizer, vocab_size=16, max_context=12, reply_tokens=4)
    with pytest.raises(ValueError, match=r"1 of 657 prompts of 'short\+sums'.*'short/p400'"):
        dealer.check()


# ---- curricula


@pytest.mark.parametrize("shuffle", [True, False])
def test_a_curriculum_deals_the_easiest_first(tmp_path: Path, shuffle: bool) -> None:
    source = CurriculumPrompts(
        levels(tmp_path, shuffle=shuffle, seed=4), "about.level", stage_prompts=[30, 20], shares=(0.25, 0.5, 1.0)
    )
    dealt = [source.deal(i) for i in range(30 + 20 + 80)]
    stages = [dealt[:30], dealt[30:50], dealt[50:]]
    for stage, (prompts, most) in enumerate(zip(stages, (10, 20, 40))):
        assert {prompt.metadata["stage"] for prompt in prompts} == {stage}
        assert max(prompt.metadata["about"]["level"] for prompt in prompts) == most
    assert set(Counter(prompt.text for prompt in stages[0]).values()) == {3}  # each as often, lap after lap
    assert set(Counter(prompt.text for prompt in stages[2]).values()) == {2}
    assert [source.deal(i) for i in (129, 2, 49)] == [dealt[i] for i in (129, 2, 49)]
    assert stages[0][:10] != stages[0][10:20]  # shuffled anew
    assert len(list(source.samples())) == 40 and source.size is None


def test_stages_follow_one_another() -> None:
    source = StagedPrompts([Listed("a", "b"), Listed("c"), ArithmeticPrompts(digits=1)], stage_prompts=3)
    assert [source.deal(i).text for i in range(6)] == ["a", "b", "a", "c", "c", "c"]
    assert [source.deal(i).metadata["stage"] for i in (0, 5, 6, 1000)] == [0, 1, 2, 2]
    assert source.deal(8).text == ArithmeticPrompts(digits=1).deal(2).text
    assert len(list(source.samples())) == 2 + 1 + 256


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda path: mixed(a=3), "MixedPrompts.sources: .*at least two"),
        (lambda path: mixed({"c": 1.0}, a=3, b=3), "MixedPrompts.weights: 'c' is none of"),
        (lambda path: mixed({"b": 0.0}, a=3, b=3), "MixedPrompts.weights.b: (0.0|nan), must be above 0"),
        (lambda path: mixed({"b": float("nan")}, a=3, b=3), "MixedPrompts.weights.b: (0.0|nan), must be above 0"),
        (lambda path: mixed({"b": 1e-4}, a=3, b=3), "MixedPrompts.weights.b: below 1/1000"),
        (lambda path: CurriculumPrompts(ArithmeticPrompts(), "level", 3), "prompts: 'arithmetic' has no end"),
        (lambda path: CurriculumPrompts(levels(path), "level", 3), "difficulty: prompt '.*levels:.*' has None at 'lev"),
        (
            lambda path: CurriculumPrompts(levels(path, last=float("nan")), "about.level", 3),
            "has nan at 'about.level' .* name a field with a number",
        ),
        (lambda path: CurriculumPrompts(levels(path), "about.level", 3, (0.5, 0.5)), "CurriculumPrompts.shares"),
        (lambda path: CurriculumPrompts(levels(path), "about.level", [1, 2]), "stage_prompts: .*all 4 stages"),
        (lambda path: CurriculumPrompts(levels(path), "about.level", 0), "CurriculumPrompts.stage_prompts"),
        (lambda path: StagedPrompts([Listed("a")], 3), "StagedPrompts.sources: give at least two"),
    ],
)
def test_arguments_that_cannot_work_are_refused_by_name(tmp_path: Path, make: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        make(tmp_path)


def test_yaml_nests_sources() -> None:
    parser = ArgumentParser()
    parser.add_argument("--prompts", type=PromptSource)
    sums = {"class_path": "datamodules.prompts.ArithmeticPrompts"}
    hard = {"class_path": "datamodules.prompts.ArithmeticPrompts", "init_args": {"digits": 4}}
    staged = {"class_path": "datamodules.prompts.StagedPrompts", "init_args": {"sources": [sums, hard]}}
    staged["init_args"]["stage_prompts"] = 10  # type: ignore[index]
    init_args = {"sources": {"easy": sums, "grows": staged}, "weights": {"easy": 0.25, "grows": 0.75}}
    chosen = {"class_path": "datamodules.prompts.MixedPrompts", "init_args": init_args}
    source = parser.instantiate_classes(parser.parse_object({"prompts": chosen})).prompts
    assert Counter(source.deal(i).metadata["source"] for i in range(40)) == {"easy": 10, "grows": 30}
    assert source.deal(10_000).metadata["source"] in ("easy", "grows")


def test_a_field_that_the_name_of_the_source_displaces_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "web.jsonl").write_text('{"question": "1+1", "answer": "2", "source": "a page"}\n')
    source = MixedPrompts({"web": JsonlPrompts(str(tmp_path / "web.jsonl")), "sums": ArithmeticPrompts()})
    dealt = [source.deal(index) for index in range(6)]
    assert {prompt.metadata["source"] for prompt in dealt} == {"web", "sums"}
    assert caplog.text.count("takes the place of what") == 1 and "('a page')" in caplog.text
