"""One reply, one reward: what an episode begins with."""

from __future__ import annotations

import pytest

from app.batch import TEACHER_PROMPT
from datamodules.prompts import Prompt
from datamodules.workflows import RLVRWorkflow
from tests.datamodules.workflows.scripted_engine import CHATML, ScriptedEngine, play
from tests.helpers.recorded_samples import byte_tokenizer

SILENT = "{%- if enable_thinking is defined and not enable_thinking -%}<think></think>{%- endif -%}"


def test_options_of_the_template_reach_policy_and_teacher() -> None:
    """Such as Qwen3's, which thinks unless it is told otherwise."""
    tokenizer = byte_tokenizer(CHATML + SILENT)
    prompt = Prompt("c", messages=({"role": "user", "content": "6 x 7?"},), answer="42")
    for options, ends in ((None, "assistant\n"), ({"enable_thinking": False}, "assistant\n<think></think>")):
        workflow = RLVRWorkflow(hint="{text} It is {answer}.", template_options=options)
        [one] = play(workflow, ScriptedEngine(tokenizer, ["42"]), tokenizer, prompt, lambda p, c: 1.0)
        assert tokenizer.decode(one.tokens[~one.loss_mask]).endswith(ends)
        assert tokenizer.decode(one.metadata[TEACHER_PROMPT]).endswith(ends)


def test_a_text_is_rendered_by_no_template() -> None:
    tokenizer = byte_tokenizer(CHATML)
    workflow = RLVRWorkflow(template_options={"enable_thinking": False})
    workflow.prepare(tokenizer)
    with pytest.raises(ValueError, match=r"prompt 't' .*no chat template renders; give messages \(chat: true\)"):
        workflow.encode(Prompt("t", text="6 x 7?"))
