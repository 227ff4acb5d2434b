"""What a record has beside its texts (tools, earlier calls, template options, weights) is in what is trained."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from datamodules.prompts import JsonlPrompts, Prompt
from datamodules.supervised import PairsDataModule, SupervisedDataModule
from datamodules.workflows import MultiTurnWorkflow, RLVRWorkflow, ToolWorkflow, hermes_calls
from tests.datamodules.workflows.scripted_engine import ScriptedEngine, play
from tests.datamodules.workflows.test_tools import Sums
from tests.helpers.recorded_samples import TEMPLATE, byte_tokenizer

TOOLS = [{"type": "function", "function": {"name": "cancel", "parameters": {"type": "object"}}}]
ASKED = {"role": "user", "content": "Cancel #7."}
DONE = {"role": "assistant", "content": "Done."}
PREFIXED = TEMPLATE.replace("{{ m.content }}", "{{ prefix }}{{ m.content }}")


def trained(
    folder: Path, record: dict[str, Any], template: str = PREFIXED, kind: Any = SupervisedDataModule, **fields: str
) -> list[tuple[str, str]]:
    """The prompt and the trained text of each sequence of a record."""
    byte_tokenizer(template).save_pretrained(folder)
    (folder / "r.jsonl").write_text(json.dumps(record) + "\n")
    source = JsonlPrompts(
        str(folder / "r.jsonl"), **{"question_field": "prompt", "answer_field": "completion"} | fields
    )
    data = kind(source, str(folder), batch_size=1, template_options={"prefix": "-"})
    data.setup("fit")
    tokenizer = data.tokenizer
    parts = ((one.tokens[~one.loss_mask], one.tokens[one.loss_mask]) for one in data.trajectories(0))
    return [(tokenizer.decode(told), tokenizer.decode(said)) for told, said in parts]


def rendered(chat: list[dict[str, Any]], **options: Any) -> str:
    """By transformers alone, up to where the reply begins."""
    return str(
        byte_tokenizer(PREFIXED).apply_chat_template(chat, tokenize=False, add_generation_prompt=True, **options)
    )


@pytest.mark.parametrize("tools", [TOOLS, json.dumps(TOOLS)])
def test_tools_and_template_options_of_a_record_are_shown(tmp_path: Path, tools: Any) -> None:
    own = {"tools": tools, "chat_template_kwargs": {"prefix": "+"}}
    told = rendered([ASKED], tools=TOOLS, prefix="+")
    assert '"cancel"' in told
    record = {"prompt": [ASKED], "completion": [DONE], **own}
    assert trained(tmp_path, record) == [(told, "Done.<|end|>")]
    pair = {"prompt": [ASKED], "completion": "Done.", "rejected": "No.", **own}
    assert trained(tmp_path, pair, kind=PairsDataModule) == [(told, "Done.<|end|>"), (told, "No.<|end|>")]
    del record["tools"], record["chat_template_kwargs"]
    assert trained(tmp_path, record) == [(rendered([ASKED], prefix="-"), "Done.<|end|>")]


def test_tools_beside_nested_messages_are_shown(tmp_path: Path) -> None:
    """OpenAI's form of preferences, as it is."""
    record = {
        "input": {"messages": [ASKED], "tools": TOOLS, "parallel_tool_calls": True},
        "preferred_output": [DONE],
        "non_preferred_output": [{**DONE, "content": "No."}],
    }

    def pairs(*args: Any, **options: Any) -> PairsDataModule:
        return PairsDataModule(*args, rejected_field="non_preferred_output", **options)

    fields = {"question_field": "input.messages", "answer_field": "preferred_output"}
    told = rendered([ASKED], tools=TOOLS, prefix="-")
    assert trained(tmp_path, record, kind=pairs, **fields) == [(told, "Done.<|end|>"), (told, "No.<|end|>")]


def test_tools_that_the_template_hides_and_no_tools_are_refused(tmp_path: Path) -> None:
    record = {"prompt": [ASKED], "completion": [DONE], "tools": TOOLS}
    with pytest.raises(ValueError, match=r"r:1' .* template does not show tools .* record has 1; use another"):
        trained(tmp_path, record, PREFIXED.replace("and tools", "and false"))
    with pytest.raises(ValueError, match=r"r:1' .*'tools' must be a list of JSON schemas"):
        trained(tmp_path, {**record, "tools": "a hammer"})
    record = {"prompt": [ASKED], "completion": [DONE], "chat_template_kwargs": '{"prefix": "+"}'}
    with pytest.raises(ValueError, match=r"r:1' .*'chat_template_kwargs' must be an object"):
        trained(tmp_path, record)


def test_calls_before_the_answer_are_shown_as_the_template_takes_them(tmp_path: Path) -> None:
    """OpenAI's arguments are JSON text, which most templates would write as a text within quotes."""
    function = {"name": "cancel", "arguments": '{"order": 7}'}
    calls = {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": function}]}
    result = {"role": "tool", "content": "ok"}
    record = {"messages": [{"role": "developer", "content": "Be brief."}, ASKED, calls, result, DONE]}
    ((told, said),) = trained(tmp_path, record, question_field="messages", answer_field="messages")
    shown = {"type": "function", "function": {"name": "cancel", "arguments": {"order": 7}}}
    system, called = {"role": "system", "content": "Be brief."}, {**calls, "content": "", "tool_calls": [shown]}
    assert (told, said) == (rendered([system, ASKED, called, result], prefix="-"), "Done.<|end|>")


def test_an_answer_of_weight_0_is_refused(tmp_path: Path) -> None:
    record = {"prompt": [ASKED], "completion": [{**DONE, "weight": 0}]}
    with pytest.raises(ValueError, match=r"r.jsonl:1: the answer has weight 0, .*RecordedDataModule"):
        trained(tmp_path, record)
    record["completion"] = [{**DONE, "weight": 1}]
    assert trained(tmp_path, record)[0][1] == "Done.<|end|>"


def test_rollouts_begin_with_what_imitation_has_seen(tmp_path: Path) -> None:
    told = rendered([ASKED], tools=TOOLS, prefix="+")
    own = {"tools": TOOLS, "chat_template_kwargs": {"prefix": "+"}}
    prompt = Prompt(id="p", messages=(ASKED,), metadata=own)
    workflow = RLVRWorkflow(max_new_tokens=4, template_options={"prefix": "-"})
    tokenizer = byte_tokenizer(PREFIXED)
    workflow.prepare(tokenizer)
    assert tokenizer.decode(workflow.encode(prompt)) == told
    assert tokenizer.decode(workflow.encode(replace(prompt, metadata={}))) == rendered([ASKED], prefix="-")


def test_workflows_of_several_turns_show_the_same(tmp_path: Path) -> None:
    """To their last turn: of tools a workflow has its own."""
    function = {"name": "cancel", "arguments": '{"order": 7}'}
    calls = {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": function}]}
    shown = {"type": "function", "function": {"name": "cancel", "arguments": {"order": 7}}}
    before = [ASKED, {**calls, "content": "", "tool_calls": [shown]}, {"role": "tool", "content": "ok"}]
    prompt = Prompt(
        id="p",
        messages=(ASKED, calls, {"role": "tool", "content": "ok"}),
        metadata={"tools": TOOLS, "chat_template_kwargs": {"prefix": "+"}},
    )
    tokenizer = byte_tokenizer(PREFIXED)
    options: dict[str, Any] = {"max_new_tokens": 200, "template_options": {"prefix": "-"}}
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>'
    flows: list[tuple[Any, Any, str, dict[str, Any]]] = [
        (MultiTurnWorkflow(**options), TOOLS, "No", {"role": "user", "content": "That is not right. Try again."}),
        (
            ToolWorkflow(Sums(), parser=lambda text: hermes_calls(text), **options),
            Sums().tools,
            call,
            {"role": "tool", "name": "add", "content": "5"},
        ),
    ]
    for flow, tools, reply, told in flows:
        engine = ScriptedEngine(tokenizer, [reply, "Done."])
        play(flow, engine, tokenizer, prompt, lambda _, reply: float(reply == "Done."))
        chat = [*before, {"role": "assistant", "content": reply}, told]
        for seen, messages in zip(engine.seen, (before, chat), strict=True):
            assert tokenizer.decode(seen.tokens) == rendered(messages, tools=tools, prefix="+").replace(
                f"+{reply}", reply
            )  # as it was sampled


@pytest.mark.parametrize("kept", ["user", "human"])
def test_a_role_that_the_template_leaves_out_is_refused(tmp_path: Path, kept: str) -> None:
    """Of other templates' or formats'; most show the four roles that they know and nothing of any other."""
    template = PREFIXED.replace("{%- for m in messages -%}", f"{{%- for m in messages if m.role == '{kept}' -%}}")
    record = {"prompt": [{"role": "human", "content": "Cancel #7."}], "completion": [DONE]}
    if kept == "human":
        assert "Cancel #7." in trained(tmp_path, record, template)[0][0]
        return
    with pytest.raises(ValueError, match=r"r:1' .* does not show its message 1, of role 'human'; .* system, user"):
        trained(tmp_path, record, template)


def test_workflows_of_several_turns_refuse_such_a_role() -> None:
    tokenizer = byte_tokenizer(
        PREFIXED.replace("{%- for m in messages -%}", "{%- for m in messages if m.role != 'human' -%}")
    )
    for flow in (MultiTurnWorkflow(), ToolWorkflow(Sums(), show_tools=False)):
        flow.prepare(tokenizer)
        with pytest.raises(ValueError, match=r"'p': the chat template does not show its message 1, of role 'human'"):
            flow.encode(Prompt(id="p", messages=({"role": "human", "content": "Cancel."},)))
