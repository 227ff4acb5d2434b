"""What follows a reply is what the chat template puts there, whatever the template looks like."""

from __future__ import annotations

import pytest

from datamodules.conversations.chat_template import Chat
from datamodules.prompts.tokenizers import load_tokenizer
from tests.datamodules.workflows.scripted_engine import CHATML
from tests.helpers.recorded_samples import TEMPLATE, byte_tokenizer

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
OPENING = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+3, 4+5?"}]
REPLY = "<think>easy</think>\nI call two tools."
RESULTS = [{"role": "tool", "content": "5"}, {"role": "tool", "content": "nine: é"}]
ASKED = [{"role": "user", "content": "And 6+7?"}]


@pytest.mark.parametrize("template", [TEMPLATE, CHATML])
@pytest.mark.parametrize("told", [RESULTS, RESULTS[:1], ASKED])
def test_ids_that_follow_a_reply_are_those_of_the_whole_conversation(template: str, told: list[dict[str, str]]) -> None:
    tokenizer = byte_tokenizer(template)
    chat = Chat(tokenizer, TOOLS)
    # A thought that the template would drop is kept where it was served: only without one the two are equal.
    reply = REPLY if told is not ASKED else REPLY.split("\n")[-1]
    served = [*chat.prompt(OPENING), *tokenizer.encode(reply), tokenizer.eos_token_id]
    whole = chat.prompt([*OPENING, {"role": "assistant", "content": reply}, *told])
    assert served + chat.after_reply(told, tokenizer.eos_token_id) == whole
    # A reply that was cut off is ended first.
    assert served[:-1] + chat.after_reply(told) == whole


def test_a_template_without_an_end_of_turn() -> None:
    tokenizer = load_tokenizer("char:0123456789+=?\n ")
    chat = Chat(tokenizer)
    assert tokenizer.decode(chat.prompt([{"role": "user", "content": "1+1="}])) == "1+1=\n"
    assert chat.end is None and chat.closing is None
    for last in (None, tokenizer.eos_token_id):
        after = chat.after_reply([{"role": "user", "content": "?"}], last, [tokenizer.eos_token_id])
        assert tokenizer.decode(after) == "\n?\n"
    # A stop of the user's own that is what the template puts there is not said twice.
    after = chat.after_reply([{"role": "user", "content": "?"}], tokenizer.encode("\n")[0], [tokenizer.eos_token_id])
    assert tokenizer.decode(after) == "?\n"


def test_templates_that_cannot_do_it_are_refused() -> None:
    tokenizer = byte_tokenizer("{% for m in messages %}{{ m.content }}{% endfor %}")
    with pytest.raises(ValueError, match="does not show tools to the model"):
        Chat(tokenizer, TOOLS)
    silent = byte_tokenizer("{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}")
    with pytest.raises(ValueError, match="does not show what the assistant said"):
        Chat(silent).after_reply(ASKED)
    strict = byte_tokenizer("{% for m in messages %}{{ raise_exception('no ' + m.role) }}{% endfor %}")
    with pytest.raises(ValueError, match="cannot render messages of the roles user, assistant, tool: no user"):
        Chat(strict).after_reply(RESULTS)
    strict.chat_template = None
    with pytest.raises(ValueError, match="no chat template"):
        Chat(strict)
    with pytest.raises(ValueError, match="cannot encode 'what"):
        Chat(load_tokenizer("char:0123")).prompt([{"role": "user", "content": "what?"}])


def test_options_reach_the_template() -> None:
    tokenizer = byte_tokenizer(CHATML + "{% if enable_thinking is defined %}<think></think>{% endif %}")
    plain, with_option = (
        Chat(tokenizer).prompt(ASKED),
        Chat(tokenizer, options={"enable_thinking": False}).prompt(ASKED),
    )
    assert tokenizer.decode(with_option) == tokenizer.decode(plain) + "<think></think>"
