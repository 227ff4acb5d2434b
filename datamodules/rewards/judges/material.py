"""What a judge is shown: the task, the reference and the replies, as material that cannot pass for its instructions.

Every block stands between two lines with a word that stands in the instructions, too, a hash of all blocks together:

    BEGIN REPLY 9f2c...
    ...
    END REPLY 9f2c...

Promises: the same material is shown in the same words; nothing in a block closes it, for no reply can hold a hash of
itself (the next hash is taken if a block holds the word); what a chat template would take
for its own marks (`<|im_end|>`, `[INST]`, `</s>`, ...) is broken up by a space, since servers read such marks in the
text of a message, too; what is too long is cut by the rule of `cut`, and says so.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from typing import Any

from app.text import well_formed
from datamodules.prompts.base import Prompt

Block = tuple[str, str]
"""Title and text."""

# Control tokens of chat templates: <|...|> (with full-width bars too), <start_of_turn>, <s>, [INST], <<SYS>>.
_MARKS = re.compile(
    r"<(?=[|\uff5c])|[|\uff5c](?=>)"
    r"|<(?=/?(?:s|bos|eos|pad|unk|start_of_turn|end_of_turn|think|tool_call|tool_response)>)"
    r"|\[(?=/?(?:INST|SYSTEM_PROMPT|AVAILABLE_TOOLS|TOOL_CALLS|TOOL_RESULTS)\])|<(?=</?SYS>>)",
    re.IGNORECASE,
)


def harmless(text: str) -> str:
    """`text` without what a chat template could take for a mark of its own."""
    return _MARKS.sub(lambda match: match[0] + " ", well_formed(text))


def fenced(blocks: Sequence[Block]) -> tuple[str, str]:
    """The word of these blocks, and the blocks between their lines."""
    texts = [(title, harmless(text)) for title, text in blocks]
    word = _hash(json.dumps(texts))
    while any(word in text for _, text in texts):
        word = _hash(word)
    return word, "\n\n".join(f"BEGIN {title} {word}\n{text}\nEND {title} {word}" for title, text in texts)


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def task(prompt: Prompt) -> str:
    """What the model was asked: the prompt's text, or its messages."""
    return readable(list(prompt.messages)) if prompt.messages else prompt.text


def readable(reply: Any) -> str:
    """A reply as a judge reads it: a text as it is; a transcript, message by message, with calls of tools and what they
    gave. Of a transcript of calls (`judged: transcript` of agents) what an earlier call showed is not repeated.

    Raises:
        TypeError: neither.
    """
    if isinstance(reply, str):
        return reply
    if not isinstance(reply, list | tuple) or not all(isinstance(one, dict) for one in reply):
        raise TypeError(f"a judge reads a text or a list of messages or calls, not a {type(reply).__name__}")
    if not all("reply" in one and "messages" in one for one in reply):
        return "\n\n".join(map(_message, reply))
    lines: list[str] = []
    shown: list[str] = []
    for call in reply:
        messages = [_message(one) for one in call["messages"]]
        known = messages[: len(shown)] == shown
        if shown and not known:
            lines.append("[another conversation of the same agent]")
        answer = _message(call["reply"])
        lines += [*messages[len(shown) if known else 0 :], answer]
        shown = [*messages, answer]
    return "\n\n".join(lines)


def cut(text: str, most: int) -> tuple[str, bool]:
    """At most about `most` characters: of longer ones the first quarter and the last three quarters of that, since a
    transcript's end shows what came of it. The place says how much is missing. Also whether anything is."""
    if len(text) <= most:
        return text, False
    head = most // 4
    missing = len(text) - most
    return f"{text[:head]}\n[... {missing:,} characters left out ...]\n{text[len(text) - (most - head) :]}", True


def _message(message: dict[str, Any]) -> str:
    parts = [_content(message.get("content"))]
    for call in message.get("tool_calls") or ():
        function = call.get("function", call)
        arguments = function.get("arguments", "")
        said = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        parts.append(f"[calls {function.get('name', '?')} with {said}]")
    who = str(message.get("role", "assistant"))
    name = f" {message['name']}" if message.get("name") else ""
    return f"[{who}{name}]\n" + "\n".join(part for part in parts if part)


def _content(content: Any) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        texts = (one.get("text") if isinstance(one, dict) else None for one in content)
        return "\n".join(text if isinstance(text, str) else "[not a text]" for text in texts)
    return json.dumps(content, ensure_ascii=False, default=str)
