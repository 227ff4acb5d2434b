"""Named sets of held-out prompts: options, final answers, and that a fit rolls them out and counts them."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from jsonargparse import ArgumentParser

from app.batch import FINAL_ANSWER, Trajectory
from callbacks import RewardLogger, WeightSync
from datamodules.answers import RegexAnswer, math_answer, whole_text
from datamodules.groups import Group
from datamodules.pipeline.limits import Limits
from datamodules.pipeline.validation import Validation, with_answers
from datamodules.prompts import ArithmeticPrompts, JsonlPrompts
from datamodules.prompts.tokenizers import load_tokenizer
from datamodules.rollout import RolloutDataModule
from modules import ModelSource, PolicyModule
from tests.datamodules.test_rollout import rollouts, trainer
from tests.helpers.tiny_policy import CONFIG

SUMS = ArithmeticPrompts(digits=1, split="validation", size=5)
PRODUCTS = ArithmeticPrompts(digits=1, operators="*", split="validation", size=3)


@pytest.mark.parametrize(
    ("completion", "answer"),
    [
        ("so \\boxed{1/2}.", "1/2"),
        ("5 apples\n#### 0.50", "1/2"),
        ("The answer is $\\frac{2}{4}$.", "1/2"),
        ("#### 1,000", "1000"),
        ("#### 2\\sqrt{3}", "2*sqrt(3)"),
        ("$1.5^{99999999}$", "1.5**99999999"),  # as a fraction it would take minutes, which nothing can interrupt
        ("I do not know", ""),
    ],
)
def test_answers_of_equal_value_are_equal(completion: str, answer: str) -> None:
    assert math_answer(completion) == answer


def test_answers_by_form() -> None:
    tagged = RegexAnswer("<answer>(.*?)</answer>")
    assert tagged("<answer>4</answer> no, <answer> 5\n</answer>") == "5" and tagged("5") == ""
    assert whole_text(" 5\n") == "5"
    with pytest.raises(ValueError, match=r"RegexAnswer\.pattern: 'x' has no group"):
        RegexAnswer("x")
    with pytest.raises(ValueError, match=r"RegexAnswer\.pattern: .* is no regular expression"):
        RegexAnswer("(")


@pytest.mark.parametrize(
    ("prompts", "samples", "options", "ks"),
    [
        (SUMS, 1, {}, {"": ()}),  # nothing but val/accuracy
        (SUMS, 1, {"solved_at": 0.5}, {"": (1,)}),
        (SUMS, 6, {}, {"": (1, 2, 4, 6)}),
        ({"a": SUMS, "b": PRODUCTS}, 1, {}, {"a/": (1,), "b/": (1,)}),
        ({"a": SUMS, "b": PRODUCTS}, {"a": 8, "b": 2}, {}, {"a/": (1, 2, 4, 8), "b/": (1, 2)}),
        ({"a": SUMS}, 8, {"ks": [8, 1]}, {"a/": (1, 8)}),
    ],
)
def test_what_is_counted_of_which_set(prompts: Any, samples: Any, options: Any, ks: dict[str, tuple[int, ...]]) -> None:
    assert {one.prefix: one.ks for one in Validation(prompts, samples, 1.0, **options).sets()} == ks


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"temperature": 0, "ks": [1]}, "ks has no effect without validation.prompts"),
        ({"samples": 2}, "samples has no effect without validation.prompts"),
        ({}, "temperature has no effect without validation.prompts"),
        ({"prompts": {}}, "prompts: empty"),
        ({"prompts": {"": SUMS}}, "prompts: '' is no name"),
        ({"prompts": {"a": ArithmeticPrompts()}}, r"prompts\.a: the source has no end"),
        ({"prompts": ArithmeticPrompts()}, "prompts: the source has no end"),
        ({"prompts": {"a": 3}}, r"prompts\.a: int is no PromptSource"),
        ({"prompts": SUMS, "samples": {"a": 2}}, "samples: numbers by name need validation.prompts by name"),
        ({"prompts": {"a": SUMS}, "samples": {"b": 2}}, r"samples: names \['b'\], validation.prompts has \['a'\]"),
        ({"prompts": SUMS, "samples": 0}, "samples: 0"),
        ({"prompts": SUMS, "samples": 4, "temperature": 0}, "samples: 4 greedy"),
        ({"prompts": SUMS, "temperature": -1}, "temperature: -1"),
        ({"prompts": SUMS, "batch_size": 0}, "batch_size: 0"),
        ({"prompts": SUMS, "samples": 2, "ks": [4]}, r"ks: \[4\]"),
        ({"prompts": SUMS, "answer": whole_text}, "answer has no effect on set 'arith"),
    ],
)
def test_options_that_cannot_work_are_refused_by_name(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=rf"validation\.{said}"):
        Validation(**{"temperature": 1.0, **options})


def test_a_fit_counts_several_sets(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    module = PolicyModule(ModelSource(config={**CONFIG, "vocab_size": 16, "max_position_embeddings": 32}))
    data = rollouts(
        prompts=ArithmeticPrompts(digits=1),
        max_staleness=0,
        batches_per_epoch=1,
        validation=Validation(
            {"sums": SUMS, "products": PRODUCTS}, {"sums": 3, "products": 2}, 1.0, batch_size=2, answer=first_digit
        ),
    )
    seen = []
    original = data.evaluate

    def watched(*args: Any) -> Any:
        groups, asked = original(*args)
        seen.extend(groups)
        return groups, asked

    data.evaluate = watched  # type: ignore[method-assign]
    run = trainer(tmp_path, max_epochs=1, callbacks=[WeightSync(), RewardLogger()])
    with caplog.at_level(logging.WARNING):
        run.fit(module, datamodule=data)
    logged = {name: float(value) for name, value in run.callback_metrics.items() if name.startswith("val/")}
    names = {"sums": (1, 2, 3), "products": (1, 2)}
    expected = {f"val/{name}/pass@{k}" for name, ks in names.items() for k in ks}
    expected |= {f"val/{name}/{what}@{ks[-1]}" for name, ks in names.items() for what in ("mean", "maj")}
    expected |= {f"val/{name}/accuracy" for name in names} | {"val/accuracy"}
    assert set(logged) == expected | {"val/mismatch_kl", "val/logprob_diff_max", "val/failed"}
    assert logged["val/failed"] == 0.0
    assert logged["val/logprob_diff_max"] < 1e-4  # the same weights on both sides
    assert len(seen) == 8
    for group in seen:
        for one in group.trajectories:
            text = data.tokenizer.decode(one.tokens[one.loss_mask], skip_special_tokens=True)
            assert one.metadata[FINAL_ANSWER] == (text[:1] if text[:1].isdigit() else "")
    solved = [one.reward for group in seen for one in group.trajectories]
    assert logged["val/accuracy"] == pytest.approx(sum(solved) / len(solved))
    samples = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    assert {one["set"] for one in samples} == {"train", "sums", "products"}
    assert "validation.answer failed on" in caplog.text  # a random model does not always begin with a digit


@pytest.mark.parametrize("batch_size", [2, 3, 5])
def test_prompts_that_are_skipped_have_not_failed(batch_size: int, tmp_path: Path) -> None:
    """They are left out as told, whatever batch they come in: alone or beside others."""
    held_out = tmp_path / "held_out.jsonl"
    questions = ["1+1=", "1+2=", *["1+" * 14 + "1="] * 3]
    held_out.write_text("".join(json.dumps({"question": one, "answer": "2"}) + "\n" for one in questions))
    data = rollouts(
        limits=Limits(collect_deadline_s=60.0, long_prompts="skip"),
        validation=Validation(JsonlPrompts(str(held_out), shuffle=False, size=5), batch_size=batch_size),
    )
    module = PolicyModule(ModelSource(config={**CONFIG, "vocab_size": 16, "max_position_embeddings": 32}))
    [logged] = trainer(tmp_path).validate(module, datamodule=data, verbose=False)
    assert logged["val/failed"] == 0.0 and "val/accuracy" in logged


def test_a_vote_does_not_hold_what_ended_the_reply() -> None:
    tokenizer = load_tokenizer("char:0123456789|")
    groups = []
    for text in ("42|", "42"):  # one ended with '|', which is no special token here, one was cut off
        tokens = torch.tensor(tokenizer.encode(f"1{text}"))
        made = torch.arange(len(tokens)) > 0
        one = Trajectory(
            tokens=tokens,
            loss_mask=made,
            behavior_logprobs=-0.5 * made.float(),
            versions=torch.where(made, 0, -1),
            reward=0.0,
            group_id=0,
            episode_id=0,
        )
        groups.append(Group(0, "p", 0, [one]))
    found = with_answers(groups, tokenizer, whole_text, tokenizer.encode("|"))
    assert [group.trajectories[0].metadata[FINAL_ANSWER] for group in found] == ["42", "42"]


def first_digit(completion: str) -> str:
    return str(int(completion[:1]))


def test_yaml_configures_sets() -> None:
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(RolloutDataModule, "data")
    sums = {"class_path": "datamodules.prompts.ArithmeticPrompts", "init_args": {"split": "validation", "size": 5}}
    data: dict[str, Any] = {
        "prompts": {"class_path": "datamodules.prompts.ArithmeticPrompts"},
        "workflow": {"class_path": "datamodules.workflows.RLVRWorkflow"},
        "engine": {"class_path": "datamodules.inference.EmbeddedEngine"},
        "tokenizer": "char:0123456789+=",
        "validation": {
            "prompts": {"easy": sums, "hard": {**sums, "init_args": {**sums["init_args"], "digits": 3}}},  # type: ignore[dict-item]
            "samples": {"easy": 4, "hard": 2},
            "temperature": 0.7,
            "answer": "datamodules.answers.math_answer",
            "solved_at": 0.9,
        },
    }
    config = parser.parse_object({"data": data})
    made = parser.instantiate_classes(config).data
    assert [(one.name, one.samples, one.solved_at) for one in made.val_sets] == [("easy", 4, 0.9), ("hard", 2, 0.9)]
    assert made.val_sets[0].answer is math_answer and made.val_sets[1].source.digits == 3
    assert "math_answer" in parser.dump(config)
    regex = {"class_path": "datamodules.answers.RegexAnswer", "init_args": {"pattern": "#### (.+)"}}
    data["validation"]["answer"] = regex
    made = parser.instantiate_classes(parser.parse_object({"data": data})).data
    assert made.val_sets[0].answer("#### 4") == "4"
