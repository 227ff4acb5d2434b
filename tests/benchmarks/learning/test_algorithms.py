"""The learning benchmark reads its curves right, and its configurations are ones the project accepts."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from pathlib import Path
from typing import Any

import jsonargparse
import pytest
from lightning import LightningDataModule, LightningModule

from benchmarks.learning.__main__ import CASES, curve, markdown, rl_config, steps_to, summary
from benchmarks.learning.branching import StepPrompts, StepsWorkflow
from datamodules.inference.protocol import GenerationResponse
from datamodules.prompts.tokenizers import load_tokenizer


def test_steps_to_a_target() -> None:
    assert steps_to(0.85, [(0, 0.4), (100, 0.8), (200, 0.9)]) == pytest.approx(150)
    assert steps_to(0.4, [(0, 0.4), (100, 0.8)]) == 0
    assert steps_to(0.95, [(0, 0.4), (100, 0.8)]) is None
    assert steps_to(0.8, [(0, 0.4), (100, 0.8), (200, 0.1)]) == 100


def test_a_curve_is_read_from_the_metrics(tmp_path: Path) -> None:
    (tmp_path / "metrics.csv").write_text("step,loss,val/accuracy\n0,,0.25\n0,1.0,\n9,0.5,\n10,,0.75\n")
    assert curve(tmp_path) == [(0, 0.25), (10, 0.75)]


def test_a_case_that_misses_the_target_says_so() -> None:
    results: list[dict[str, Any]] = [
        {"case": "grpo", "target": 0.85, "curve": [(0, 0.4), (10, end)], "steps_to_target": steps, "seconds": 1.0}
        for end, steps in ((0.9, 8.0), (0.5, None))
    ]
    [row] = summary(results)
    assert row["reached"] == "1 of 2" and row["steps"] == 8.0 and row["final"] == [0.9, 0.5]
    assert "| grpo | 0.85 | 1 of 2 | 8 (8 to 8) |" in markdown({"command": "x", "summary": [row]})


@pytest.mark.parametrize("case", CASES)
def test_every_configuration_is_accepted(case: str, tmp_path: Path) -> None:
    config = rl_config(case, 1, tmp_path, steps=50, every=10)
    parser = jsonargparse.ArgumentParser(exit_on_error=False)
    parser.add_subclass_arguments(LightningModule, "model")
    parser.add_subclass_arguments(LightningDataModule, "data")
    made = parser.instantiate(parser.parse_object({"model": config["model"], "data": config["data"]}))
    assert made.model.steps_per_batch == 1 and made.data.batch_size * made.data.group_size in (128, 256, 512)


class Right:
    """An engine that says the right digits, except in the second turn."""

    def __init__(self, answer: str) -> None:
        self.answer, self.tokenizer, self.asked = answer, load_tokenizer("char:0123456789+-*="), list[list[int]]()

    async def generate(self, request: Any) -> GenerationResponse:
        turn = len(self.asked)
        self.asked.append(request.tokens)
        said = self.tokenizer.encode("+" if turn == 1 else self.answer[turn], add_special_tokens=False)
        return GenerationResponse(tokens=said, logprobs=[-1.0], versions=[0], finish_reason="length")


def test_the_branching_task() -> None:
    prompt = next(p for p in StepPrompts(seed=5).first(20) if p.answer[0] == "8")
    engine = Right(prompt.answer)
    object.__setattr__(prompt, "tokens", tuple(engine.tokenizer.encode(prompt.text, add_special_tokens=False)))
    played = asyncio.run(StepsWorkflow().run(engine, prompt))  # type: ignore[arg-type]
    assert [one.reward for one in played] == [0.75] * 4 and [one.turn_index for one in played] == [0, 1, 2, 3]
    said = engine.tokenizer.decode(played[-1].tokens)
    digits = prompt.id + prompt.id[0]
    a, b, c, d, _ = digits
    expected = f"{a}+{b}=8-{b}+{c}=+-{c}+{d}={prompt.answer[2]}-{d}+{a}={prompt.answer[3]}"
    assert said.replace(" ", "") == expected
    assert prompt.text + prompt.solution == expected.replace("=+-", f"={prompt.answer[1]}-")
    assert prompt.answer == "".join(str((int(a) + int(b)) % 10) for a, b in pairwise(digits))
    train = {p.id for p in StepPrompts(seed=1).first(2000)}
    held_out = {p.id for p in StepPrompts(split="validation", size=256, seed=3).first(256)}
    assert not train & held_out
