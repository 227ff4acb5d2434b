"""Calls as families write them, read by transformers with the response templates that trl keeps."""

from __future__ import annotations

from typing import Any

import pytest

from datamodules.workflows import ResponseTemplate, ToolCall
from datamodules.workflows.tool_calls import begin_of_calls
from tests.datamodules.workflows.scripted_engine import WITH_CALLS
from tests.helpers.recorded_samples import byte_tokenizer

families = pytest.importorskip("trl.chat_template_utils", reason="pip install 'arborist[dev]' brings it")

SCHEMA = {"type": "object", "properties": {"zip": {"type": "string"}, "count": {"type": "integer"}}}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": SCHEMA}}]
WANTED = [ToolCall("f", {"zip": "075", "count": 75})]
XML = "<parameter=zip>\n075\n</parameter>\n<parameter=count>\n75\n</parameter>"
KEYS = "<arg_key>zip</arg_key>\n<arg_value>075</arg_value>\n<arg_key>count</arg_key>\n<arg_value>75</arg_value>"
SAID = {
    "qwen3": '<tool_call>\n{"name": "f", "arguments": {"zip": "075", "count": 75}}\n</tool_call>',
    "qwen3_5": f"<tool_call>\n<function=f>\n{XML}\n</function>\n</tool_call>",
    "glm4moe": f"<tool_call>f\n{KEYS}\n</tool_call>",
}


def parser(family: str, **marks: Any) -> ResponseTemplate:
    made = ResponseTemplate(getattr(families, f"{family}_template"))
    tokenizer = byte_tokenizer(WITH_CALLS)
    made.prepare(tokenizer)
    return made


@pytest.mark.parametrize("family", list(SAID))
def test_calls_of_families_are_read_with_their_types(family: str) -> None:
    read, said = parser(family), SAID[family]
    assert read(said, TOOLS) == WANTED
    assert read(f"I look.\n{said}\n{said}", TOOLS) == 2 * WANTED
    assert begin_of_calls(read, f"I look.\n{said}") == len("I look.")
    assert read("I look.", TOOLS) == [] and begin_of_calls(read, "I look.") == len("I look.")
    assert read(f"<think>{said}</think>no", TOOLS) == []
    thought = f"<think>{said}</think>yes"
    assert read(thought + said, TOOLS) == WANTED and begin_of_calls(read, thought + said) == len(thought)


@pytest.mark.parametrize("family", ["qwen3", "qwen3_5"])
def test_what_cannot_be_read_is_an_error_or_text(family: str) -> None:
    read, said = parser(family), SAID[family]
    for broken in (said.replace('"arguments"', "arguments"), said[: len(said) // 2], said.replace('"f"', "1")):
        if broken != said:
            assert all(one.error for one in read(broken, TOOLS)), broken


def test_the_tokenizers_own_template_counts_and_is_left_as_it_is() -> None:
    tokenizer = byte_tokenizer(families.qwen3_5_think_chat_template)
    read = ResponseTemplate()
    read.prepare(tokenizer)  # by trl
    assert read(SAID["qwen3_5"], TOOLS) == WANTED and getattr(tokenizer, "response_template", None) is None
    tokenizer.response_template = families.glm4moe_template
    read = ResponseTemplate()
    read.prepare(tokenizer)
    assert read(SAID["glm4moe"], TOOLS) == WANTED


def test_a_model_without_a_template_is_told_so() -> None:
    with pytest.raises(ValueError, match="has no response_template"):
        ResponseTemplate().prepare(byte_tokenizer(WITH_CALLS))
    with pytest.raises(ValueError, match="nothing of tool_calls"):
        ResponseTemplate({"fields": {"content": {}}}).prepare(byte_tokenizer(WITH_CALLS))
