"""Coding agents and JavaScript's AI SDK: requests in the shapes they send, and the programs themselves where they are
installed. What `docs/agents.md` says of them was seen with the versions it names."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from datamodules.workflows.gateway.protocols.servable import Sampling
from tests.datamodules.workflows.gateway.clients.door import CALL, Door, door

OVERRIDE = Sampling(200, override=True)
SCHEMA = {"type": "object", "properties": {"fruit": {"type": "string"}}}
KEPT = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}
IN_NAMESPACE = '<tool_call>\n{"name": "shop.look_up", "arguments": {"fruit": "apple"}}\n</tool_call>'


def post(there: Door, path: str, body: dict[str, Any]) -> dict[str, Any]:
    headers = {"Authorization": f"Bearer {there.key}", "anthropic-version": "2023-06-01"}
    answer: dict[str, Any] = httpx.post(f"{there.address}/{path}", json=body, headers=headers, timeout=20).json()
    return answer


def of_claude_code(messages: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    marked = {"cache_control": {"type": "ephemeral"}}
    return {
        "model": "any",
        "max_tokens": 32000,
        "system": [{"type": "text", "text": "You are an agent.", **marked}],
        "messages": messages,
        "tools": [{"name": "look_up", "description": "price", "input_schema": SCHEMA}],
        "metadata": {"user_id": "{}"},
        "thinking": {"type": "adaptive"},
        "context_management": KEPT,
        "output_config": {"effort": "high"},
        **more,
    }


STARTED: list[dict[str, Any]] = [
    {
        "role": "user",
        "content": [
            {"type": "text", "text": "<system-reminder>Today is a day.</system-reminder>"},
            {"type": "text", "text": "What are two apples?", "cache_control": {"type": "ephemeral"}},
        ],
    },
    {"role": "system", "content": "There are skills."},
]


def test_claude_code_is_one_path_with_messages_of_the_system_among_the_others() -> None:
    with door(sampling=OVERRIDE) as there:
        said = post(there, "v1/messages?beta=true", of_claude_code(STARTED))["content"]
        told = [{"type": "tool_result", "tool_use_id": said[-1]["id"], "content": "3"}]
        history = [*STARTED, {"role": "assistant", "content": said}, {"role": "user", "content": told}]
        assert post(there, "v1/messages?beta=true", of_claude_code(history))["content"][0]["text"] == "It is 6."
        there.check_one_path()
        shown = there.prompts()[0]
        assert "What are two apples?<|end|>\n<|begin|>system\nThere are skills.<|end|>" in shown
        assert there.session.counts["overridden_calls"] == 2


@pytest.mark.parametrize(
    ("more", "field"),
    [({}, "thinking"), ({"thinking": None, "context_management": {"edits": [{"type": "x"}]}}, "context_management")],
)
def test_what_would_change_claude_codes_replies_or_history_is_refused_by_name(more: dict[str, Any], field: str) -> None:
    with door([]) as there:
        problem = post(there, "v1/messages", of_claude_code(STARTED, **more))["error"]
        assert problem["message"].startswith(f"{field}: ") and not there.engine.seen


def of_codex(items: list[dict[str, Any]], *tools: dict[str, Any]) -> dict[str, Any]:
    inner = {"type": "function", "name": "look_up", "description": "price", "strict": False, "parameters": SCHEMA}
    space = {"type": "namespace", "name": "shop", "description": "All of a shop.", "tools": [inner]}
    return {
        "model": "any",
        "input": items,
        "tools": [space, *tools],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "store": False,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "k",
        "client_metadata": {"thread_id": "t"},
    }


ASKED: list[dict[str, Any]] = [
    {"type": "message", "id": "m1", "role": "developer", "content": [{"type": "input_text", "text": "Be short."}]},
    {"type": "message", "id": "m2", "role": "user", "content": [{"type": "input_text", "text": "Two apples?"}]},
]


def test_codex_calls_a_tool_of_a_namespace() -> None:
    with door([IN_NAMESPACE, "It is 6."]) as there:
        (called,) = post(there, "v1/responses", of_codex(ASKED))["output"]
        assert (called["namespace"], called["name"]) == ("shop", "look_up")
        told = {"type": "function_call_output", "id": "fco", "call_id": called["call_id"], "output": "3"}
        post(there, "v1/responses", of_codex([*ASKED, called, told]))
        there.check_one_path()
        shown = there.prompts()[0]
        assert '"name": "shop.look_up"' in shown and "All of a shop.\\n\\nprice" in shown


@pytest.mark.parametrize("name", ["look_up", "shop.look_up"])
def test_a_tool_of_a_namespace_is_forced_by_its_clients_name(name: str) -> None:
    with door([IN_NAMESPACE], sampling=OVERRIDE) as there:
        body = {**of_codex(ASKED), "tool_choice": {"type": "function", "name": name}}
        (called,) = post(there, "v1/responses", body)["output"]
        assert (called["namespace"], called["name"]) == ("shop", "look_up")
        assert "Your reply must be a call of the tool shop.look_up." in there.prompts()[0]


def test_a_name_of_two_namespaces_is_refused_with_both() -> None:
    with door([], sampling=OVERRIDE) as there:
        body = of_codex(ASKED)
        body["tools"] += [{**body["tools"][0], "name": "bank"}]
        body["tool_choice"] = {"type": "function", "name": "look_up"}
        problem = post(there, "v1/responses", body)["error"]["message"]
        assert "tool_choice.name" in problem and "shop.look_up" in problem and "bank.look_up" in problem


def test_a_refusal_that_the_agent_goes_on_without_is_none_of_the_episode() -> None:
    """Claude Code asks for a search of the provider's in a call of its own; `on_failure` goes by what comes of it."""
    search = {"tools": [{"type": "web_search_20250305", "name": "web_search"}]}
    with door(sampling=OVERRIDE) as there:
        assert (
            "runs at the provider" in post(there, "v1/messages", of_claude_code(STARTED, **search))["error"]["message"]
        )
        assert "runs at the provider" in there.session.refused
        post(there, "v1/messages", of_claude_code(STARTED))
        assert there.session.refused == ""


@pytest.mark.parametrize("tool", [{"type": "web_search"}, {"type": "image_generation"}])
def test_a_tool_that_only_a_provider_has_is_refused_with_the_remedy(tool: dict[str, Any]) -> None:
    with door([]) as there:
        problem = post(there, "v1/responses", of_codex(ASKED, tool))["error"]["message"]
        assert problem.startswith(f'tools[1].type: "{tool["type"]}"') and 'web_search = "disabled"' in problem


@pytest.mark.parametrize(("space", "name", "plain"), [("shop", "look_up", True), ("shop.look_up", "b.c", False)])
def test_tools_of_two_places_that_the_model_would_know_by_one_name_are_refused(
    space: str, name: str, plain: bool
) -> None:
    """A call of the second would be handed to the first."""
    inner = {"type": "function", "name": name, "parameters": SCHEMA}
    more = [{**inner, "name": f"{space}.{name}"}] if plain else []
    outer = {"type": "namespace", "name": space, "tools": [inner]}
    clash = [] if plain else [outer, {**outer, "name": f"{space}.b", "tools": [{**inner, "name": "c"}]}]
    with door([]) as there:
        problem = post(there, "v1/responses", of_codex(ASKED, *more, *clash))["error"]
        assert problem["param"] == ("tools[1].name" if plain else "tools[2].tools[0].name")
        assert "rename one of them" in problem["message"] and not there.engine.seen


PATCH = '*** Begin Patch\n+"é"\n*** End Patch'
GRAMMAR = {"type": "grammar", "syntax": "lark", "definition": 'start: "*** Begin Patch"'}


def of_text(given: dict[str, str]) -> str:
    called = json.dumps({"name": "apply_patch", "arguments": given}, ensure_ascii=False)
    return f"I edit.\n<tool_call>\n{called}\n</tool_call>"


@pytest.mark.parametrize("form", [{}, {"format": {"type": "text"}}, {"format": GRAMMAR}])
@pytest.mark.parametrize("streamed", [False, True])
def test_a_tool_that_takes_a_text_is_one_of_an_argument_to_the_model(form: dict[str, Any], streamed: bool) -> None:
    tool: Any = {"type": "custom", "name": "apply_patch", "description": "edits", **form}
    with door(
        [of_text({"input": PATCH}), "It is 6."], sampling=OVERRIDE if "format" in form else Sampling(200)
    ) as there:
        client = openai.OpenAI(base_url=there.v1, api_key=there.key, max_retries=0)
        asked: list[Any] = [{"role": "user", "content": "Edit."}]
        if streamed:
            *_, last = events = list(client.responses.create(model="any", input=asked, tools=[tool], stream=True))
            deltas = [one.delta for one in events if one.type == "response.custom_tool_call_input.delta"]
            assert last.type == "response.completed" and "".join(deltas) == PATCH
            said = last.response.output
        else:
            said = client.responses.create(model="any", input=asked, tools=[tool]).output
        text, called = said
        assert called.type == "custom_tool_call" and (called.name, called.input) == ("apply_patch", PATCH)
        told = {"type": "custom_tool_call_output", "call_id": called.call_id, "output": "3"}
        client.responses.create(
            model="any", input=[*asked, text.model_dump(), called.model_dump(exclude_none=True), told], tools=[tool]
        )
        before = [*there.engine.seen[0].tokens, *there.engine.responses[0].tokens]
        assert there.engine.seen[1].tokens[: len(before)] == before and not there.session.transcript.drift
        shown = there.prompts()[0]
        assert '"parameters": {"type": "object", "properties": {"input": {"type": "string"}}' in shown
        words = 'The input of the tool apply_patch must follow this grammar (lark):\nstart: "*** Begin Patch"'
        assert (words in shown) == (form == {"format": GRAMMAR})


def test_a_grammar_is_refused_unless_the_model_is_told_and_other_arguments_are_the_clients_to_refuse() -> None:
    tool = {"type": "custom", "name": "apply_patch", "format": GRAMMAR}
    with door([]) as there:
        problem = post(there, "v1/responses", of_codex(ASKED, tool))["error"]
        assert problem["param"] == "tools[1].format" and "override_sampling" in problem["message"]
        odd = {**tool, "format": {**GRAMMAR, "syntax": "ebnf"}}
        assert post(there, "v1/responses", of_codex(ASKED, odd))["error"]["param"] == "tools[1].format.syntax"
    space = {"type": "namespace", "name": "files", "tools": [tool]}
    with door([of_text({"patch": "x"}).replace("apply_patch", "files.apply_patch")], sampling=OVERRIDE) as there:
        *_, called = post(there, "v1/responses", of_codex(ASKED, space))["output"]
        assert (called["namespace"], called["name"], called["input"]) == ("files", "apply_patch", '{"patch": "x"}')
        assert "The input of the tool files.apply_patch must" in there.prompts()[0]


def test_tools_that_no_call_may_use_are_not_shown() -> None:
    with door(["It is 6."]) as there:
        said = post(there, "v1/responses", {**of_codex(ASKED), "tool_choice": "none"})
        assert said["output"][0]["content"][0]["text"] == "It is 6." and said["tool_choice"] == "none"
        assert "look_up" not in there.prompts()[0]


def test_items_that_the_ai_sdk_only_names_are_those_of_the_session() -> None:
    tool = {"type": "function", "name": "look_up", "description": "price", "parameters": SCHEMA}
    with door() as there:
        body = {"model": "any", "input": ASKED, "tools": [tool]}
        said = post(there, "v1/responses", body)["output"]
        kinds: list[dict[str, Any]] = [{}, {"type": "item_reference"}]  # which OpenAI's API lets out
        named = [{**kind, "id": one["id"]} for kind, one in zip(kinds, said, strict=True)]
        told = {"type": "function_call_output", "call_id": said[-1]["call_id"], "output": "3"}
        assert [one["type"] for one in said] == ["message", "function_call"]
        post(there, "v1/responses", {**body, "input": [*ASKED, *named, told]})
        there.check_one_path()
        lost = {"type": "item_reference", "id": "msg_of_another"}
        problem = post(there, "v1/responses", {**body, "input": [*ASKED, lost]})["error"]["message"]
        assert problem.startswith("input[2].id: no answer of this session has it; send the item itself")


def test_codex_is_told_by_its_status_that_there_are_no_websockets() -> None:
    """At 426 it posts at once; at others it tries six times before, at OpenAI's provider as it is."""
    with door() as there:
        headers = {"Authorization": f"Bearer {there.key}", "Connection": "Upgrade", "Upgrade": "websocket"}
        answer = httpx.get(f"{there.v1}/responses", headers=headers, timeout=20)
        assert answer.status_code == 426
        assert answer.json()["error"]["message"] == "/v1/responses: WebSockets are not served; POST it"
        headers = {"Authorization": f"Bearer {there.key}"}
        assert httpx.get(f"{there.v1}/responses", headers=headers, timeout=20).status_code == 405


def test_swe_agent_marks_its_last_messages_for_a_cache() -> None:
    tool = {"type": "function", "function": {"name": "look_up", "description": "price", "parameters": SCHEMA}}
    marked = {"cache_control": {"type": "ephemeral"}}
    with door() as there:
        parts = [{"type": "text", "text": "What are two apples?", **marked}]
        asked = [{"role": "user", "content": parts, **marked}]
        body = {"model": "any", "tools": [tool], "temperature": 1.0}
        said = post(there, "v1/chat/completions", {**body, "messages": asked})["choices"][0]["message"]
        told = {"role": "tool", "tool_call_id": said["tool_calls"][0]["id"], "name": "look_up"}
        told["content"] = [{"type": "text", "text": "3", **marked}]
        post(there, "v1/chat/completions", {**body, "messages": [*asked, said, {**told, **marked}]})
        there.check_one_path()


def test_copilot_goes_on_with_a_conversation_of_an_earlier_process() -> None:
    """It reads its messages from disk then, with a note of its own in each result."""
    tool = {"type": "function", "function": {"name": "look_up", "description": "price", "parameters": SCHEMA}}
    with door(sampling=OVERRIDE) as there:
        asked = [{"role": "user", "content": "What are two apples?"}]
        body = {"model": "any", "tools": [tool], "temperature": 0, "top_p": 0.95, "frequency_penalty": 0}
        said = post(there, "v1/chat/completions", {**body, "messages": asked})["choices"][0]["message"]
        note = {"kind": "tool", "name": "look_up", "summary": "list"}
        told = {
            "role": "tool",
            "tool_call_id": said["tool_calls"][0]["id"],
            "content": "3",
            "__copilotMessageSource": note,
        }
        post(there, "v1/chat/completions", {**body, "messages": [*asked, said, told]})
        there.check_one_path()


def test_the_ai_sdk_finds_messages_behind_the_address_in_the_environment() -> None:
    with door([CALL]) as there:
        said = post(there, "messages", of_claude_code(STARTED, thinking=None, output_config=None))
        assert [one["type"] for one in said["content"]] == ["text", "tool_use"]
        assert post(there, "messages", {"messages": []})["type"] == "error"


@pytest.mark.slow
@pytest.mark.parametrize("program", ["claude", "codex"])
def test_the_program_itself(program: str, tmp_path: Path) -> None:
    """It lists the folder, and answers: one path."""
    if shutil.which(program) is None:
        package = {"claude": "@anthropic-ai/claude-code", "codex": "@openai/codex"}[program]
        pytest.skip(f"npm install -g {package} brings {program}")
    name, arguments = {
        "claude": ("Bash", '{"command": "ls", "description": "list"}'),
        "codex": ("exec_command", '{"cmd": "ls"}'),
    }[program]
    listed = f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'
    (tmp_path / "pear.txt").write_text("x")
    with door([listed, "There is a pear."], sampling=Sampling(4096, override=True)) as there:
        there.engine.max_context = 1 << 20
        environment = {
            "PATH": os.environ["PATH"],
            "HOME": str(tmp_path / "home"),
            "ANTHROPIC_BASE_URL": there.address,
            "ANTHROPIC_AUTH_TOKEN": there.key,
            "ANTHROPIC_MODEL": "policy",
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "OPENAI_API_KEY": there.key,
        }
        (tmp_path / "home").mkdir()
        provider = f'{{name="a", base_url="{there.v1}", env_key="OPENAI_API_KEY", wire_api="responses"}}'
        options = ["model=policy", "model_provider=a", f"model_providers.a={provider}", 'web_search="disabled"']
        settings = [word for option in options for word in ("-c", option)]
        words = {
            "claude": ["claude", "-p", "What is here?", "--tools", "Bash", "--allowedTools", "Bash"],
            "codex": ["codex", "exec", "--skip-git-repo-check", "-s", "danger-full-access", *settings, "What is here?"],
        }[program]
        ran = subprocess.run(
            words, cwd=tmp_path, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120
        )
        assert ran.returncode == 0 and "There is a pear." in ran.stdout, ran.stderr
        asked, answered = there.engine.seen
        before = [*asked.tokens, *there.engine.responses[0].tokens]
        assert answered.tokens[: len(before)] == before and "pear.txt" in there.prompts()[1]
