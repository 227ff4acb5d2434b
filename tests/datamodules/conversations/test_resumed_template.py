"""What goes on from an earlier rendering is what the whole template says, whatever it looks at."""

from __future__ import annotations

import random
from importlib import resources
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from datamodules.conversations import resumed_template
from datamodules.conversations.chat_template import Chat, Message
from datamodules.conversations.resumed_template import Renderings
from tests.datamodules.conversations.test_chat_template import MESSAGES, NAMES, TOOLS, WORDS
from tests.helpers.recorded_samples import byte_tokenizer
from tests.helpers.selection import skip_without

EXAMPLES = settings.default.max_examples // 3  # of each template: their loops are alike
OTHER_TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "maxItems": True}}}]
NEARLY = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "maxItems": 1}}}]
SPOKEN = st.tuples(WORDS, WORDS).map(
    lambda said: [{"role": "user", "content": said[0]}, {"role": "assistant", "content": said[1]}]
)
CALLED = WORDS.map(
    lambda said: [
        {
            "role": "assistant",
            "content": said,
            "tool_calls": [{"id": "1", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}],
        },
        {"role": "tool", "content": said, "tool_call_id": "1", "name": "add"},
    ]
)
# What the agent keeps of its conversation, from its end, and what is new.
STEPS = st.lists(
    st.tuples(
        st.one_of(st.just(0), st.integers(0, 7)),
        st.one_of(SPOKEN, SPOKEN, CALLED, MESSAGES),
        st.sampled_from([None, None, TOOLS, OTHER_TOOLS, NEARLY]),
        st.sampled_from([True, True, False]),
    ),
    min_size=2,
    max_size=9,
)


def said(render: Any) -> str:
    """The text, or what was raised."""
    try:
        return "text " + str(render())
    except ValueError as error:
        return str(error)


def template(name: str) -> str:
    return resources.files("trl").joinpath("chat_templates", name).read_text()


@pytest.fixture
def rounds(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Those that were run since it was emptied. Older releases render all of every conversation."""
    skip_without("5.23")
    run: list[int] = []
    step = resumed_template._Run.step

    def counted(self: Any, loop: Any) -> None:
        step(self, loop)
        run.append(loop.index0)

    monkeypatch.setattr(resumed_template._Run, "step", counted)
    return run


@pytest.mark.parametrize("name", NAMES)
def test_every_template_says_what_it_says_as_a_whole(name: str) -> None:
    chat = Chat(byte_tokenizer(template(name)))

    @settings(max_examples=EXAMPLES, deadline=None, derandomize=True, database=None)
    @given(steps=STEPS, system=st.booleans())
    def check(steps: Any, system: bool) -> None:
        past = Renderings()
        talk = [chat.shown({"role": "system", "content": "Be brief."})] if system else []
        for cut, new, tools, goes_on in steps:
            talk = [*talk[: len(talk) - cut], *map(chat.shown, new)]
            wanted = said(lambda: chat.text(talk, tools, goes_on))  # noqa: B023
            assert said(lambda: chat.text(talk, tools, goes_on, past)) == wanted  # noqa: B023

    check()


SHORT = {"<<": "{% for m in messages %}", ">>": "{% endfor %}", "=size": "=messages|length"}
FORGED = [
    # Reads what may differ in the next call, each in its own way.
    "<<{{ m.content }}{{ messages|length }}>>",
    "<<{{ m.content }}{{ loop.length }}{{ loop.revindex }}>>",
    "<<{{ m.content }}{{ loop['length'] }}{{ loop|length }}>>",
    "<<{{ m.content }}{{ messages[-1].content }}>>",
    "<<{{ m.content }}{{ messages[loop.index0 - 1].content }}>>",
    "<<{{ m.content }}{{ messages[loop.index0 + 3].content }}>>",
    "<<{{ m.content }}{{ messages[2 * loop.index0].content }}>>",
    "<<{{ m.content }}{{ messages['length'] }}{{ (messages)[3].content }}>>",
    "{% for m in messages[1:] %}{{ m.content }}{{ messages[loop.index + 2].content }}>>",
    "{% for m in messages[1:-1] %}{{ m.content }}{{ loop.last }}>>",
    "<<{{ m.content }}{{ loop.nextitem.content }}{{ loop.previtem.content }}>>",
    "<<{{ m.content }}{{ loop.changed(m.role) }}{{ loop.cycle(1, 2) }}>>",
    "{% set n = namespace(c=0) %}<<{% set n.c = n.c + 1 %}{{ n.c }}{{ m.content }}>>{{ n.c }}",
    "{% set n = namespace(c=size) %}<<{{ n.c }}{{ m.content }}>>",
    "{% set n = namespace(c=size) %}<<{{ loop.index0 < n.c - 3 }}{{ m.role }}>>",
    "{% set n = namespace(c=size - 3) %}<<{{ loop.index0 >= n.c }}{{ m.role }}>>",
    "{% set n = namespace(c=size - 3) %}<<{{ n.c == loop.index0 }}{{ n.c }}>>",
    "{% set n = namespace(c=size - 3) %}<<{{ n.c > loop.index0 > 1 }}>>",
    "{% set n = namespace(c=size - 3) %}<<{{ loop.index > n.c }}{{ n|string }}>>",
    "{% set n = namespace(c=size - 3) %}<<{% for q in 'ab' %}{{ loop.index0 > n.c }}>>>>",
    "{% set n = namespace(c=size / 2) %}<<{{ loop.index0 > n.c }}>>",
    "{% set n = namespace(c=size) %}{% set o = n %}<<{% set o.c = o.c - 1 %}"
    "{{ loop.index0 > n.c }}{{ m.role }}>>{{ n.c }}",
    "{% set n = namespace(c=size) %}<<{{ n[('c', 'd')[0]] }}{{ loop.index0 > n.c }}>>",
    "{% set n = namespace(c=size) %}{% set o = [n] %}<<{{ o[0].c }}{{ m.role }}>>",
    "{% set n = namespace(c=size) %}<<{{ n['c'] }}{{ (n).c }}{{ m.role }}>>",
    "{% set c = messages|length %}<<{{ c }}{{ m.content }}>>",
    "{% set c = messages %}<<{{ c|length }}{{ m.content }}>>",
    "{% set c = messages %}<<{{ c.count(m) }}{{ m.content }}>>",
    "{% set c = messages %}{% for m in c %}{{ c.count(m) }}>>",
    "<<{% for p in [] %}{% else %}{{ loop.length }}{% endfor %}{{ m.role }}>>",
    "<<{% for p in [1] if loop.length > 5 %}{{ p }}{% endfor %}{{ m.role }}>>",
    "{% macro o(n, x) %}{% macro i() %}{{ n }}{% endmacro %}{% set x.f = i %}{% endmacro %}{% set n = namespace() %}"
    "{{ o(size, n) }}<<{{ n.f() }}{{ m.role }}>>",
    "{% set c = messages[2:] %}<<{{ c[loop.index0].role }}{{ m.content }}>>",
    "{% set c = messages|map(attribute='content') %}<<{{ c|first }}{{ m.role }}>>",
    "{% set c = cycler(1, 2, 3) %}<<{{ c.next() }}{{ m.role }}>>{{ c.next() }}",
    "{% set c = joiner() %}<<{{ c() }}{{ m.role }}>>",
    "{% macro s(x) %}{{ x.role }}{{ messages|length }}{% endmacro %}<<{{ s(m) }}>>",
    "{% set c = messages|length %}{% macro s(x) %}{{ x.role }}{{ c }}{% endmacro %}<<{{ s(m) }}>>",
    "{% if messages|length % 3 %}{% macro s(x) %}{{ x.role }}{% endmacro %}{% else %}{% macro s(x) %}+{% endmacro %}"
    "{% endif %}<<{{ s(m) }}>>",
    "{% set n = namespace(c=0) %}{% macro s(x) %}{% set n.c = n.c + 1 %}{{ n.c }}{% endmacro %}"
    "<<{{ s(m) }}{{ m.role }}>>{{ n.c }}",
    "{% set n = namespace(c=size) %}{% macro s(x) %}{{ x.c }}{% endmacro %}<<{{ s(n) }}{{ m.role }}>>",
    # Rounds that leave something behind, or nothing.
    "{% set x = 'a' %}<<{{ x }}{% set x = x + m.role %}{{ x }}>>{{ x }}",
    "<<{{ add_generation_prompt }}{% set add_generation_prompt = 3 %}>>{{ range is defined }}",
    "<<{{ tools }}{{ range }}{% set tools = 1 %}{% set range = 2 %}>>",
    "{% set n = namespace(k=[]) %}<<{% set n.k = n.k + [m.role] %}{{ n.k }}>>{{ n.k }}",
    "{% set n = namespace(g=[]) %}<<{{ n.g|join }}{% set n.g = m.content|map('upper') %}>>",
    "{% set n = namespace() %}<<{{ n.new is defined }}{% set n.new = m.role %}>>{{ n.new }}",
    "{% set n = namespace(c=1) %}<<{% set n = namespace(c=2) %}{% set n.c = m.role %}{{ n.c }}>>{{ n.c }}",
    "{% set n = namespace(c=true) %}{% if messages|length % 2 %}{% set n.c = 1 %}{% endif %}<<{{ n.c }}>>",
    "{% set n = namespace(c=0.0) %}{% if messages|length % 2 %}{% set n.c = -0.0 %}{% endif %}<<{{ n.c }}>>",
    "{% set n = namespace(last=-1) %}<<{% if m.role == 'user' %}{% set n.last = loop.index0 %}{% endif %}"
    ">><<{{ m.role }}{{ loop.index0 > n.last }}{{ loop.index0 == n.last }}>>",
    "<<{{ m.role }}{% if m.content == 'a' %}{% break %}{% endif %}{{ m.content }}>>.",
    "<<{% if m.role == 'tool' %}{% continue %}{% endif %}{{ m.content }}{{ loop.last }}>>.",
    "{% for m in messages if m.role != 'tool' %}{{ loop.index0 }}{{ m.content }}{% else %}none>>",
    "{% for m in messages recursive %}{{ loop.depth }}{{ m.content }}>>",
    "<<{% if m.role == 'tool' %}{{ raise_exception('no ' + m.content) }}{% endif %}{{ m.role }}>>",
    "{% for k, v in messages %}{{ k }}{{ v }}>>",
    "{% for m in missing %}{{ m }}>><<{{ loop.first }}{{ m.role }}>>",
    "{% set c %}<<{{ m.role }}>>{% endset %}{{ c }}{% for m in c %}{{ m }}>>",
    "{% if messages[0].role == 'system' %}{% set messages = messages[1:] %}{% endif %}"
    "<<{{ m.role }}{{ messages[loop.index0].content }}{{ messages[loop.index0 + 1].content }}>>",
    "{% for t in tools or [] %}{{ t }}>>{% for t in tools %}{{ t|tojson }}>>{{ messages|length }}",
    "{{ _resumed_at is defined }}<<{{ messages[0].role }}>>",
]


@pytest.mark.parametrize("source", FORGED)
def test_a_template_that_looks_elsewhere_says_what_it_says_as_a_whole(source: str) -> None:
    for short, long in SHORT.items():
        source = source.replace(short, long)
    chat = Chat(byte_tokenizer(source))
    draw = random.Random(0)
    for _ in range(12):
        past = Renderings()
        talk: list[Message] = []
        for _ in range(9):
            talk = talk[: len(talk) - draw.choice([0, 0, 0, 1, 2])]
            for _ in range(draw.randint(1, 3)):
                roles = ["user", "assistant", "assistant", "tool"] if talk else ["system", "user"]
                talk.append({"role": draw.choice(roles), "content": draw.choice(["a", "b", "c", "dd"])})
            talk = list(talk)
            tools = draw.choice([None, None, TOOLS, OTHER_TOOLS, NEARLY])
            wanted = said(lambda: chat.text(talk, tools))  # noqa: B023
            assert said(lambda: chat.text(talk, tools, past=past)) == wanted  # noqa: B023


def conversation(turns: int, thinks: str = "", arguments: Any = None) -> list[Message]:
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": arguments}}
    one: list[Message] = [
        {"role": "user", "content": "Go on."},
        {"role": "assistant", "content": f"{thinks}I look.", "tool_calls": [call]},
        {"role": "tool", "content": "5", "tool_call_id": "1", "name": "add"},
        {"role": "assistant", "content": f"{thinks}It is 5."},
    ]
    return [{"role": "system", "content": "Be brief."}, *(dict(one[k % 4]) for k in range(4 * turns))]


WHOLE = ("diffusion_gemma", "gemma4", "gptoss", "muse_glimmer")  # they look at all messages that follow
# Roles that alternate, pictures, a BOS that this tokenizer has not.
OTHERS = (
    "gemma.jinja",
    "gemma3.jinja",
    "llava_next.jinja",
    "idefics3.jinja",
    "smolvlm.jinja",
    "cohere",
    "llama3.jinja",
)


@pytest.mark.parametrize("name", [one for one in NAMES if not one.startswith((*WHOLE, *OTHERS))])
def test_no_round_is_run_twice_of_a_conversation_that_goes_on(name: str, rounds: list[int]) -> None:
    chat = Chat(byte_tokenizer(template(name)))
    arguments = "{}" if name.startswith("deepseek") else {"a": 1}
    talk = [chat.shown(one) for one in conversation(30, "<think>\nhm\n</think>\n\n", arguments)]
    past = Renderings()
    run = []
    for size in range(40, len(talk), 2):
        rounds.clear()
        assert chat.text(talk[:size], TOOLS, past=past) == chat.text(talk[:size], TOOLS)
        run.append(len(rounds))
    assert run[0] > 38 and max(run[1:]) < 20


def test_conversations_in_turns_are_each_gone_on_with(rounds: list[int]) -> None:
    chat = Chat(byte_tokenizer(template("qwen3.jinja")))
    past = Renderings()
    talks = [[chat.shown({**one, "content": f"{k}{one['content']}"}) for one in conversation(20)] for k in range(4)]
    for size in range(41, 81, 4):
        for talk in talks:
            rounds.clear()
            assert chat.text(talk[:size], None, past=past) == chat.text(talk[:size], None)
            assert len(rounds) < 10 or size == 41
