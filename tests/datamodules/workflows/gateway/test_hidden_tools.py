"""Models whose chat templates show no tools, or no earlier calls: agents that rely on them are told so, and none is
trained without what it was sent."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from app.batch import Trajectory
from datamodules.conversations.chat_template import Chat
from datamodules.prompts.base import Prompt
from datamodules.workflows.base import EpisodeEngine, Misfit
from datamodules.workflows.gateway import AgentWorkflow, Budget, Session
from datamodules.workflows.gateway.errors import RequestError
from datamodules.workflows.gateway.protocols.base import Asked
from datamodules.workflows.gateway.protocols.servable import Sampling
from datamodules.workflows.tool_calls import hermes_calls
from tests.datamodules.workflows.chat_families import FAMILIES
from tests.datamodules.workflows.gateway import agents
from tests.datamodules.workflows.gateway.test_agent_workflow import CALL, TASK, check_as_sampled, right
from tests.datamodules.workflows.gateway.test_server import bearer, on_a_loop, serving
from tests.datamodules.workflows.scripted_engine import CHATML, WITH_CALLS, ScriptedEngine, play
from tests.helpers.recorded_samples import byte_tokenizer
from tests.helpers.selection import some

PLAIN = """{%- for m in messages -%}<|begin|>{{ m.role }}
{{ m.content }}<|end|>
{% endfor -%}{%- if add_generation_prompt -%}<|begin|>assistant
{% endif -%}"""  # as SmolLM2's: no tools, no calls
SHOW_TOOLS = r"set AgentWorkflow\.show_tools: false \(arborist gateway: --hide_tools\)"
HISTORY: list[dict[str, Any]] = [
    {"role": "user", "content": "hello"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "look_up", "arguments": "{}"}}],
    },
    {"role": "tool", "tool_call_id": "c1", "content": "3"},
]


def run(template: str, agent: Any, replies: list[str], **options: Any) -> tuple[ScriptedEngine, list[Trajectory]]:
    tokenizer = byte_tokenizer(template)
    engine = ScriptedEngine(tokenizer, replies)
    workflow = AgentWorkflow(agent, **{"max_new_tokens": 200, "workers": 1, **options})
    return engine, play(workflow, engine, tokenizer, TASK, right)


def falls_back(prompt: Prompt) -> str:
    """Asks again without its tools."""
    try:
        return agents.shopper(prompt)
    except agents.BadRequestError:
        return agents.twice(prompt)


SAYS: list[dict[str, Any]] = [{"role": role, "content": "x"} for role in ("system", "user", "assistant")]
MORE, BLANK = {"role": "system", "content": "y"}, {"role": "system", "content": " "}
LAST = "messages | selectattr('role', 'equalto', 'system') | map(attribute='content') | list | last != m.content"
"""As distilled DeepSeek R1 keeps it, wherever it is."""


@pytest.mark.parametrize(
    ("hidden", "messages", "which"),
    [
        ("true", SAYS[:2], "messages of the system to"),
        ("true", [BLANK, *SAYS[1:2]], ""),
        ("messages | length == 1", SAYS[:1], "messages of the system alone to"),
        ("not loop.first and loop.previtem.role == 'system'", [MORE, *SAYS[:2]], "several messages of the system to"),
        (
            "not loop.first and loop.previtem.role == 'user'",
            [*SAYS[:2], MORE],
            "messages of the system behind the user's",
        ),
        (LAST, [MORE, *SAYS[:2]], "several messages of the system to"),
        (LAST, [*SAYS[:2], MORE], "several messages of the system to"),
        (LAST, [SAYS[1], MORE], ""),
    ],
)
def test_messages_of_the_system_that_the_template_leaves_out_are_refused(
    hidden: str, messages: list[dict[str, Any]], which: str
) -> None:
    """Claude Code sends some behind the user's, Codex several."""
    begin = "<|begin|>{{ m.role }}"
    template = PLAIN.replace(begin, f"{{% if not (m.role == 'system' and {hidden}) %}}{begin}")
    template = template.replace("{% endfor", "{% endif %}{% endfor")

    async def ask(there: str, messages: list[dict[str, Any]]) -> None:
        tokenizer = byte_tokenizer(there)
        engine = EpisodeEngine(ScriptedEngine(tokenizer, ["6"]), tokenizer, None, name="e", seed="s")  # type: ignore[arg-type]
        session = Session(engine, Chat(tokenizer), Sampling(9), Budget(), hermes_calls)
        try:
            await session.reply(Asked("m", messages))
        finally:
            assert bool(session.misfit) == (
                len(session.exchanges) == 0
            )  # which ends a run: every episode would meet it

    if which:
        with pytest.raises(RequestError, match=f"does not show {which}"):
            asyncio.run(ask(template, messages))
    else:
        asyncio.run(ask(template, messages))
    asyncio.run(ask(template, SAYS[1:2]))
    asyncio.run(ask(PLAIN, [SAYS[0], *SAYS, SAYS[0]]))


def test_a_template_may_show_messages_of_the_system_beside_tools_or_without_alone() -> None:
    for words in ("tools", "not tools"):
        template = PLAIN.replace("{{ m.content }}", f"{{% if {words} %}}{{{{ m.content }}}}{{% endif %}}")
        visible = Chat(byte_tokenizer(template)).visible
        assert [visible.systems(1, 0, True, tools) for tools in (True, False)] == [words == "tools", words != "tools"]


@pytest.mark.parametrize("agent", some([agents.shopper, agents.streaming_shopper, falls_back], [agents.shopper]))
def test_tools_that_the_template_does_not_show_end_the_run(agent: Any) -> None:
    with pytest.raises(Misfit, match=rf"refused: tools: .* does not show tools to the model; .* and {SHOW_TOOLS}"):
        run(PLAIN, agent, ["6", "6"])


def test_calls_that_the_template_does_not_show_end_the_run() -> None:
    with pytest.raises(Misfit, match=rf"refused: messages: they hold tool_calls, .* or {SHOW_TOOLS}"):
        run(CHATML, agents.shopper, [CALL, "It is 6."])


@pytest.mark.parametrize("template", [PLAIN, CHATML, WITH_CALLS])
def test_an_agent_may_tell_of_its_tools_itself(template: str) -> None:
    """Its calls are found, and shown to the model as they were sampled, and it is one conversation."""
    engine, found = run(template, agents.shopper, [CALL, "It is 6."], show_tools=False)
    check_as_sampled(engine, found)
    asked, answered = (one.tokens for one in engine.seen)
    assert answered[: len(asked) + len(engine.responses[0].tokens)] == [*asked, *engine.responses[0].tokens]
    assert found[0].reward == 1.0 and found[0].metadata["tool_calls"] == 1
    assert "price of a fruit" not in byte_tokenizer(template).decode(asked)
    assert not [name for name in found[-1].metadata if name.startswith("drift")]


@pytest.mark.parametrize(
    ("template", "shows", "body", "param", "says"),
    [
        (PLAIN, True, {"tools": [agents.LOOK_UP]}, "tools", "does not show tools"),
        (PLAIN, True, {"messages": HISTORY}, "messages", "does not show earlier calls"),
        (PLAIN, False, {"messages": HISTORY}, "messages", "no reply of this session made"),
        (PLAIN.replace("{{ m.content }}", "{{ m.content if m.role != 'tool' }}"), False, {"messages": HISTORY},
         "messages", "does not show messages of the role tool"),
    ],
)  # fmt: skip
@on_a_loop
async def test_a_session_refuses_them_by_name_and_goes_on(
    template: str, shows: bool, body: dict[str, Any], param: str, says: str
) -> None:
    tokenizer = byte_tokenizer(template)
    episode = EpisodeEngine(ScriptedEngine(tokenizer, ["well"]), tokenizer, None, name="e", seed="s")  # type: ignore[arg-type]
    session = Session(episode, Chat(tokenizer), Sampling(64), Budget(), hermes_calls, show_tools=shows)
    async with serving(session) as (client, (address,)):
        for given, status in ((body, 400), ({}, 200)):
            asked = {"model": "any", "messages": HISTORY[:1], **given}
            async with client.post(address + "/v1/chat/completions", json=asked, headers=bearer(session)) as answer:
                told = await answer.json()
                assert answer.status == status, told
            if status == 400:
                assert told["error"]["param"] == param and says in told["error"]["message"]


def test_what_templates_of_models_show() -> None:
    """Of tools, calls and results, with tools beside them."""
    expected = {
        "Qwen2.5": (True, True, True),
        "Qwen3": (True, True, True),
        "Llama 3": (False, False, True),
        "Llama 3.1": (True, True, True),
        "Gemma 3": (False, False, True),
        "Gemma 4": (True, True, True),
        "Phi 3": (False, False, False),
        "GLM 4.5": (True, True, True),
        "GPT-OSS": (True, True, True),
        "LFM2": (True, False, True),
    }
    shown = {name: Chat(FAMILIES[name].tokenizer()).visible for name in expected}
    found = {name: (one.tools(False), one.calls(True), one.results(True)) for name, one in shown.items()}
    assert found == expected
