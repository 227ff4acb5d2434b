"""Calls as families write them, read by transformers with the response templates that trl keeps: every family that it
has one for either is read, in a workflow and by a gateway, or is refused and the reason named."""

from __future__ import annotations

import asyncio
import copy
import json
import logging
from collections.abc import Callable
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from datamodules.conversations.chat_template import Chat
from datamodules.prompts.base import Prompt
from datamodules.workflows import ResponseTemplate, ToolCall, ToolWorkflow
from datamodules.workflows.base import EpisodeEngine
from datamodules.workflows.gateway import Budget, Session
from datamodules.workflows.gateway.protocols.base import Asked
from datamodules.workflows.gateway.protocols.servable import Sampling
from datamodules.workflows.tool_calls import begin_of_calls
from tests.datamodules.workflows.scripted_engine import WITH_CALLS, ScriptedEngine, play
from tests.datamodules.workflows.toolboxes import Sums
from tests.helpers.recorded_samples import byte_tokenizer
from tests.helpers.selection import needs_transformers

trl = pytest.importorskip("trl.chat_template_utils", reason="pip install -e '.[dev]' brings it")

FAMILIES = {k.removesuffix("_template"): v for k, v in vars(trl).items() if k.endswith("_template") and type(v) is dict}
CHATS = {k.removesuffix("_chat_template"): v for k, v in vars(trl).items() if k.endswith("_chat_template")}
CHATS = {name: text for name, text in CHATS.items() if isinstance(text, str)}
Writer = Callable[[str, dict[str, Any]], str]


def hermes(name: str, given: dict[str, Any]) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': given})}\n</tool_call>"


def xml(name: str, given: dict[str, Any]) -> str:
    parts = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in given.items())
    return f"<tool_call>\n<function={name}>\n{parts}</function>\n</tool_call>"


def keys(name: str, given: dict[str, Any]) -> str:
    parts = "".join(f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n" for key, value in given.items())
    return f"<tool_call>{name}\n{parts}</tool_call>"


def bare(name: str, given: dict[str, Any]) -> str:
    return json.dumps({"name": name, "parameters": given})


def quoted(name: str, given: dict[str, Any]) -> str:
    parts = (f'{key}:<|"|>{value}<|"|>' if isinstance(value, str) else f"{key}:{value}" for key, value in given.items())
    return f"<|tool_call>call:{name}{{{','.join(parts)}}}<tool_call|>"


# How models of the family write a call, a thought, and what ends their replies.
READ: dict[str, tuple[Writer, str, list[str]]] = {
    "qwen3": (hermes, "<think>{}</think>", ["<|im_end|>"]),
    "qwen3_5": (xml, "<think>{}</think>", ["<|im_end|>"]),
    "nemotron_3": (xml, "<think>{}</think>", ["<|im_end|>", "</s>"]),
    "glm4moe": (keys, "<think>{}</think>", ["<|user|>", "<|observation|>", "<|endoftext|>"]),
    "llama3": (bare, "", ["<|eot_id|>", "<|eom_id|>", "<|end_of_text|>"]),
    "gemma4": (quoted, "<|channel>thought\n{}<channel|>", ["<turn|>", "<eos>"]),
}
REFUSED = {
    "gptoss": "answers stand in a channel of their own, as GPT-OSS' do",
    "lfm2_2_5": "otherwise than the chat template writes them",
    "deepseek_r1_distill": "nothing of tool_calls",
}
SCHEMA = {"type": "object", "properties": {"zip": {"type": "string"}, "count": {"type": "integer"}}}
TOOLS = [{"type": "function", "function": {"name": "f", "description": "F.", "parameters": SCHEMA}}]
GIVEN = {"zip": "075", "count": 75}
WANTED = [ToolCall("f", GIVEN)]
ONE_CALL_A_REPLY = {"llama3"}
every_family = pytest.mark.parametrize("family", list(READ))


def tokenizer_of(chat: str, family: str, end: str | None = None) -> PreTrainedTokenizerFast:
    """With the chat template of that name and the family's ends of replies, the first or `end` as end of sequence."""
    made = byte_tokenizer(CHATS[chat])
    ends = READ[family][2] if family in READ else []
    if ends:
        made.add_special_tokens({"additional_special_tokens": ends}, replace_extra_special_tokens=False)
        made.eos_token = end or ends[0]
    return made


def family_of(chat: str) -> str:
    """That of a chat template, as trl has it; "" for none."""
    try:
        found = trl.add_response_schema(byte_tokenizer(CHATS[chat])).response_template
    except ValueError:
        return ""
    return next(name for name, template in FAMILIES.items() if template is found)


CHATS_OF = {family: [chat for chat in CHATS if family_of(chat) == family] for family in ["", *FAMILIES]}


def parser(family: str, end: str | None = None) -> ResponseTemplate:
    made = ResponseTemplate()
    made.prepare(tokenizer_of(CHATS_OF[family][0], family, end))
    return made


def said(family: str, name: str = "f", given: dict[str, Any] = GIVEN) -> str:
    return READ[family][0](name, given)


def test_every_family_of_trl_is_here() -> None:
    assert {*FAMILIES} == {*READ, *REFUSED}
    assert all(CHATS_OF.values())


@pytest.mark.parametrize("chat", [chat for family in READ for chat in CHATS_OF[family]])
def test_calls_are_read_as_the_familys_chat_template_writes_them(chat: str) -> None:
    tokenizer = tokenizer_of(chat, family_of(chat))
    read = ResponseTemplate()
    read.prepare(tokenizer)
    assert getattr(tokenizer, "response_template", None) is None  # it is saved with the model, as it came
    calls = [{"id": "call00001", "type": "function", "function": {"name": "f", "arguments": GIVEN}}]
    messages = [{"role": "user", "content": "."}, {"role": "assistant", "content": "", "tool_calls": calls}]
    shown = tokenizer.apply_chat_template(messages, tokenize=False)
    assert read(shown, TOOLS, end="") == WANTED


@every_family
@pytest.mark.parametrize("name", ["shop.look", "look-up", "mcp__a-b__c.d"])
def test_names_are_read_to_their_end(family: str, name: str) -> None:
    """Those of a namespace have a dot, many of MCP's servers a hyphen."""
    tools = [{"type": "function", "function": {**TOOLS[0]["function"], "name": name}}]  # type: ignore[dict-item]
    assert parser(family)(said(family, name), tools) == [ToolCall(name, GIVEN)]


@pytest.mark.parametrize(("family", "why"), list(REFUSED.items()))
def test_families_that_cannot_be_done_are_refused_by_name(family: str, why: str) -> None:
    for chat in CHATS_OF[family]:
        with pytest.raises(ValueError, match=why):
            ResponseTemplate().prepare(tokenizer_of(chat, family))


@every_family
def test_calls_of_families_are_read_with_their_types(family: str) -> None:
    read, call, thought = parser(family), said(family), READ[family][1]
    assert read(call, TOOLS) == WANTED
    assert read(f"I look, as f(x) does.\n{call}", TOOLS) == WANTED
    assert begin_of_calls(read, f"I look.\n{call}") == len("I look.")
    two = read(f"{call}\n{call}", TOOLS)
    assert two == 2 * WANTED if family not in ONE_CALL_A_REPLY else [bool(one.error) for one in two] == [True]
    for text in ("I look.", "", "Well, f(x) is <b>3</b>, as {x} says.", "[1, 2]"):
        assert read(text, TOOLS) == [] and begin_of_calls(read, text) == len(text)
    if thought:
        assert read(f"{thought.format(call)}no", TOOLS) == []
        before = f"{thought.format(call)}yes"
        assert read(before + call, TOOLS) == WANTED and begin_of_calls(read, before + call) == len(before)
        never_ended = thought.format(call).partition(call)[0] + call
        assert read(never_ended, TOOLS) == [] and begin_of_calls(read, never_ended) == len(never_ended)


@every_family
def test_what_cannot_be_read_is_an_error(family: str) -> None:
    read, call = parser(family), said(family)
    broken = [call[: len(call) * 3 // 4]]
    if family in ("qwen3", "llama3", "gemma4"):
        broken += [call.replace("75", "seventy-five").replace("0seventy-five", "075"), call.replace("75}", "75")]
    if family == "qwen3":
        broken += [call.replace('"arguments"', "arguments"), call.replace('"f"', "1")]
    if family in ("qwen3_5", "nemotron_3", "gemma4"):
        broken += [call.replace("<function=f>", "f").replace("call:f", "f")]
    for one in broken:
        found = read(one, TOOLS)
        assert found and all(call.error for call in found), one


@every_family
@pytest.mark.parametrize("value", ["    return x", "x = 1\n", "\n", " ", "", "\n\na\n\n", "a</think>b<think>"])
def test_arguments_keep_what_was_written(family: str, value: str) -> None:
    tokenizer = tokenizer_of(CHATS_OF[family][0], family)
    given = {"zip": value, "count": 7}
    calls = [{"id": "call00001", "type": "function", "function": {"name": "f", "arguments": given}}]
    messages = [{"role": "user", "content": "."}, {"role": "assistant", "content": "", "tool_calls": calls}]
    shown = tokenizer.apply_chat_template(messages, tokenize=False)
    assert parser(family)(shown, TOOLS, end="") == [ToolCall("f", given)]


@pytest.mark.parametrize(
    ("family", "call"),
    [
        ("qwen3_5", "<tool_call>\n<function=f>\n<parameter=zip>\nabc\n</function>\n</tool_call>"),
        ("qwen3_5", '<tool_call>\n<function=f>\n{"zip": "abc"}\n</function>\n</tool_call>'),
        ("qwen3_5", "<tool_call><function=f><parameter=zip>abc</parameter><n>7</n></function></tool_call>"),
        ("qwen3_5", xml("f", {"zip": "a</parameter>b"})),
        ("nemotron_3", xml("f", {"zip": "a</tool_call>b"})),
        ("glm4moe", "<tool_call>f\n<arg_key>zip</arg_key>\n<arg_value>abc\n</tool_call>"),
        ("glm4moe", "<tool_call>f<arg_key>zip</arg_key>\n<arg_value>abc</arg_value>\n</tool_call>"),
        ("glm4moe", '<tool_call>{"name": "f", "arguments": {"zip": "abc"}}</tool_call>'),
    ],
)
def test_no_call_is_carried_out_without_what_is_no_argument(family: str, call: str) -> None:
    read = parser(family)
    (found,) = read(call, TOOLS)
    assert "this is no argument" in found.error
    assert [bool(one.error) for one in read(f"{said(family)}{call}", TOOLS)] == [False, True]


@pytest.mark.parametrize("family", ["qwen3", "llama3", "gemma4"])
def test_types_that_the_model_wrote_are_kept(family: str) -> None:
    schema = {"zip": {"oneOf": [{"type": "string"}, {"type": "integer"}]}, "count": {"type": ["string", "null"]}}
    parameters = {"type": "object", "properties": schema}
    tools = [{"type": "function", "function": {"name": "f", "description": "F.", "parameters": parameters}}]
    given = {"zip": "7", "count": "null"}
    assert parser(family)(said(family, given=given), tools) == [ToolCall("f", given)]


def of_calls(**given: Any) -> ResponseTemplate:
    """Prepared, for a family whose calls are written like that."""
    function = {"name": "{name}", "arguments": given.pop("arguments", "{arguments}")}
    calls = {**given, "transform": {"type": "function", "function": function}}
    content = {"close_pattern": r"<\|im_end\|>\s*", "content": "text"}
    made = ResponseTemplate(
        {
            "defaults": {"role": "assistant"},
            "start_anchor": "<|im_start|>assistant\n",
            "fields": {"tool_calls": calls, "content": content},
        }
    )
    made.prepare(tokenizer_of("qwen2_5", "qwen3"))
    return made


TWO = [ToolCall("f", {"zip": "1"}), ToolCall("f", {"count": 2})]


@needs_transformers("5.24")
def test_all_calls_of_a_list_in_python_are_read() -> None:
    listed = {"open": "<|calls|>", "close": "<|over|>", "content": "python-call-list", "transform_each": True}
    for more in ({}, {"repeats": True}):
        read = of_calls(**listed, **more)
        assert read("So: <|calls|>[f(zip='1'), f(count=2)]<|over|>", TOOLS) == TWO
        assert "no call is in it" in read("<|calls|>[]<|over|>", TOOLS)[0].error


def test_all_calls_of_a_list_in_json_are_read() -> None:
    read = of_calls(open="[TOOL_CALLS]", close_pattern=r"<\|im_end\|>", content="json", transform_each=True)
    written = [{"name": one.name, "arguments": one.arguments} for one in TWO]
    assert read(f"[TOOL_CALLS]{json.dumps(written)}", TOOLS) == TWO


def test_calls_without_types_get_those_of_the_schemas() -> None:
    lines = {"open_pattern": r"<call (?P<name>\w+)>\n", "close": "</call>", "repeats": True, "content": "kv-lines"}
    read = of_calls(**lines, arguments="{content}")
    assert read("<call f>\nzip: 075\ncount: 75\n</call>", TOOLS) == WANTED


LOOSE = {
    "no JSON": {"value_parser": {"name": "json", "args": {"allow_non_json": True}}},
    "any": {"tag_pattern": r"<parameter=(?P<key>[^>\n]+)>\s*(?P<value>[\s\S]*?)\s*</parameter>"},
}
TRIMMED = {"tag_pattern": r"<parameter=(?P<key>[^>\n]+)>\s*(?P<value>(?:.|\n)*?)\s*</parameter>"}


@pytest.mark.parametrize("given", LOOSE.values(), ids=LOOSE)
def test_templates_of_ones_own_keep_white_space_too(given: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    template = copy.deepcopy(trl.qwen3_5_template)
    template["fields"]["tool_calls"]["content_args"] |= given
    read = ResponseTemplate(template)
    with caplog.at_level(logging.WARNING):
        read.prepare(tokenizer_of("qwen3_5_nothink", "qwen3_5"))
    assert not caplog.records
    assert read(xml("f", {"zip": "  075\n", "count": 75}), TOOLS) == [ToolCall("f", {"zip": "  075\n", "count": 75})]


def test_a_template_that_leaves_out_white_space_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    template = copy.deepcopy(trl.qwen3_5_template)
    template["fields"]["tool_calls"]["content_args"] |= TRIMMED
    read = ResponseTemplate(template)
    with caplog.at_level(logging.WARNING):
        read.prepare(tokenizer_of("qwen3_5_nothink", "qwen3_5"))
    assert "lose the white space" in caplog.text and "tag_pattern" in caplog.text
    assert read(said("qwen3_5"), TOOLS) == WANTED


@every_family
def test_a_thought_behind_a_call_undoes_none(family: str) -> None:
    thought = READ[family][1].format("wait")
    if thought:
        assert parser(family)(f"{said(family)}\n{thought}\n{said(family)}\nDone.", TOOLS) == 2 * WANTED


@every_family
def test_a_call_is_closed_whatever_ended_the_reply_and_not_where_it_was_cut_off(family: str) -> None:
    call, ends = said(family), READ[family][2]
    for eos in ends:
        read = parser(family, eos)
        for end in ends:
            assert read.of_tools(TOOLS).ended_by(end)(call) == WANTED, (eos, end)
        cut = read.of_tools(TOOLS).ended_by("")(call)
        assert cut == WANTED if family != "llama3" else [one.error for one in cut] == ["a call is not closed"]


@every_family
def test_a_gateway_shows_text_and_calls_streamed_as_whole(family: str) -> None:
    tokenizer = tokenizer_of(CHATS_OF[family][0], family)
    thought = READ[family][1].format("Hm.")
    apart = {"reasoning_content": "Hm."} if "</think>" in thought else {}
    whole, wanted = f"{thought}I look.\n{said(family)}", "I look." if apart else f"{thought}I look."
    broken = whole[: -len(said(family)) // 3]
    server = ScriptedEngine(tokenizer, [whole, whole, broken, "No."])
    engine = EpisodeEngine(server, tokenizer, None, name="e", seed="s")  # type: ignore[arg-type]
    read = ResponseTemplate()
    read.prepare(tokenizer)
    session = Session(engine, Chat(tokenizer), Sampling(400), Budget(), read)
    pieces: list[str] = []

    async def reply(**more: Any) -> Any:
        (call,) = await session.reply(Asked("", [{"role": "user", "content": "look"}], TOOLS), **more)
        return call.message

    async def run() -> None:
        first = await reply()
        again = await reply(on_text=lambda k, piece: pieces.append(piece.text))
        assert first["content"] == again["content"] == "".join(pieces) == wanted
        for message in (first, again):
            (call,) = message["tool_calls"]
            assert call["function"]["name"] == "f" and json.loads(call["function"]["arguments"]) == GIVEN
        left = broken.removeprefix(thought) if apart else broken
        assert await reply() == {"role": "assistant", "content": left, **apart}
        assert await reply() == {"role": "assistant", "content": "No."}
        assert session.counts == {"tool_calls": 2, "malformed_calls": 1}

    asyncio.run(run())


@every_family
def test_an_agent_with_tools_of_the_family(family: str) -> None:
    """Its call is carried out with typed arguments, what is wrong with the next is told, and then it answers."""
    tokenizer = tokenizer_of(CHATS_OF[family][0], family)
    chat = Chat(tokenizer)
    over = "</think>" if chat.opened(chat.prompt([{"role": "user", "content": "."}])) else ""
    good = over + said(family, "add", {"a": 2, "b": 3})
    role: Any = "user" if family in ("gemma4",) else "tool"
    workflow = ToolWorkflow(Sums(), parser=ResponseTemplate(), tool_role=role, max_new_tokens=400)
    engine = ScriptedEngine(tokenizer, [good, good[: len(good) * 3 // 4], over + "5"], max_context=8192)
    prompt = Prompt(id="p", messages=({"role": "user", "content": "2+3?"},))
    (found,) = play(workflow, engine, tokenizer, prompt, lambda prompt, reply: float(reply.endswith("5")))
    assert found.reward == 1.0 and (found.metadata["tool_calls"], found.metadata["malformed_calls"]) == (2, 1)
    told = [tokenizer.decode(one.tokens[len(engine.seen[0].tokens) :]) for one in engine.seen]
    assert "5" in told[1] and "cannot be read" not in told[1] and "cannot be read" in told[2]


def test_the_tokenizers_own_template_counts() -> None:
    tokenizer = byte_tokenizer(trl.glm4moe_chat_template + "{# which trl does not know #}")
    tokenizer.response_template = trl.glm4moe_template
    read = ResponseTemplate()
    read.prepare(tokenizer)
    assert read(said("glm4moe"), TOOLS) == WANTED and tokenizer.response_template is trl.glm4moe_template
    tokenizer.response_template = trl.qwen3_5_template
    with pytest.raises(ValueError, match="otherwise than the chat template writes them"):
        ResponseTemplate().prepare(tokenizer)


def test_a_model_without_a_template_is_told_so() -> None:
    for chat in CHATS_OF[""]:
        with pytest.raises(ValueError, match="has no response_template"):
            ResponseTemplate().prepare(byte_tokenizer(CHATS[chat]))
    with pytest.raises(ValueError, match="nothing of tool_calls"):
        ResponseTemplate({"fields": {"content": {}}}).prepare(byte_tokenizer(WITH_CALLS))
