"""Every workflow keeps the sampler's log-probabilities as they are, whatever torch's default dtype is meanwhile, which
anything in the process may change while episodes are played."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from datamodules.prompts import Prompt, TauPrompts
from datamodules.prompts.tokenizers import load_tokenizer
from datamodules.workflows import MultiTurnWorkflow, RLVRWorkflow, TauReplayWorkflow, ToolWorkflow
from tests.datamodules.workflows.scripted_engine import CHATML, ScriptedEngine, play
from tests.datamodules.workflows.toolboxes import Sums
from tests.helpers.doubles import conversations
from tests.helpers.recorded_samples import byte_tokenizer

CHARACTERS = load_tokenizer("char:0123456789+=? ")
CHAT = byte_tokenizer(CHATML)
SUM = Prompt(id="p", text="17+25=", answer="42")
ASKED = Prompt(id="q", messages=({"role": "user", "content": "2+3?"},), answer="5")
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>'


def rlvr(tmp_path: Path) -> tuple[Any, ...]:
    return RLVRWorkflow(max_new_tokens=8), CHARACTERS, ["1234567"], SUM


def multi_turn(tmp_path: Path) -> tuple[Any, ...]:
    return MultiTurnWorkflow(max_new_tokens=8, retry_message="?"), CHARACTERS, ["1234567", "7654321", "42"], SUM


def tools(tmp_path: Path) -> tuple[Any, ...]:
    return ToolWorkflow(Sums(), max_new_tokens=200, sequences="rendered"), CHAT, [CALL, "5"], ASKED


def replay(tmp_path: Path) -> tuple[Any, ...]:
    prompt = TauPrompts(str(conversations(tmp_path / "made.npz")), shuffle=False).deal(1)
    return TauReplayWorkflow(), byte_tokenizer(), lambda request: [5] * request.max_new_tokens, prompt


@pytest.mark.parametrize("case", [rlvr, multi_turn, tools, replay])
def test_log_probabilities_are_those_of_the_engine(case: Any, tmp_path: Path) -> None:
    workflow, tokenizer, replies, prompt = case(tmp_path)
    engine = ScriptedEngine(tokenizer, replies)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        played = play(workflow, engine, tokenizer, prompt, lambda prompt, reply: float(reply == prompt.answer))
    finally:
        torch.set_default_dtype(before)
    trained = torch.cat([one.behavior_logprobs[one.loss_mask] for one in played])
    said = torch.tensor([value for one in engine.responses for value in one.logprobs], dtype=torch.float32)
    assert torch.equal(trained, said)
    assert not torch.equal(said, said.bfloat16().float())  # or nothing could have been lost
