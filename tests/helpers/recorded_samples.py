"""Tiny recorded data for tests: a byte-level chat tokenizer, conversations as text, and where the real files are."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

SPECIALS = ["<|end|>", "<|begin|>", "<tool>", "</tool>"]

# Every message is "<|begin|>ROLE\n...<|end|>\n"; tools are listed after the system prompt.
TEMPLATE = """
{%- for m in messages -%}
<|begin|>{{ m.role }}
{{ m.content }}
{%- if loop.first and tools %}
{% for t in tools %}{{ t | tojson }}
{% endfor %}{% endif -%}
{%- for c in m.tool_calls or [] -%}
<tool>{{ {"name": c.function.name, "arguments": c.function.arguments} | tojson }}</tool>
{%- endfor -%}
<|end|>
{% endfor -%}
{%- if add_generation_prompt -%}
<|begin|>assistant
{% endif -%}
""".strip()
# The last assistant message alone gets an empty think block, as in Qwen3's template.
THINK_TEMPLATE = TEMPLATE.replace(
    "\n{{ m.content }}",
    "\n{{ '<think></think>' if m.role == 'assistant' and loop.last else '' }}{{ m.content }}",
)
# The role line of the whole conversation depends on how long it is: no prompt is a beginning of the rest.
REWRITING_TEMPLATE = TEMPLATE.replace("{{ m.role }}", "{{ m.role }} {{ messages | length }}")


def byte_tokenizer(template: str = TEMPLATE) -> PreTrainedTokenizerFast:
    """One token a byte, plus the special tokens of the template."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {symbol: i for i, symbol in enumerate([*SPECIALS, *alphabet])}
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token=SPECIALS[0], additional_special_tokens=SPECIALS[1:]
    )
    tokenizer.chat_template = template
    return tokenizer


def fallback_tokenizer(template: str = TEMPLATE) -> PreTrainedTokenizerFast:
    """As SentencePiece's: "\u2581" for a space, bytes for what no token spells, and texts lose their first space."""
    letters = ["\u2581", *"abcdefghijklmnopqrstuvwxyz", "\u2581a"]
    names = [*SPECIALS, "<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *letters]
    vocabulary = {symbol: i for i, symbol in enumerate(names)}
    core = Tokenizer(
        models.BPE(vocab=vocabulary, merges=[("\u2581", "a")], byte_fallback=True, unk_token="<unk>", fuse_unk=True)
    )
    core.normalizer = normalizers.Replace(" ", "\u2581")
    core.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token=SPECIALS[0], additional_special_tokens=SPECIALS[1:]
    )
    tokenizer.chat_template = template
    return tokenizer


def messages(answer: str = "Done.") -> list[dict[str, Any]]:
    """A conversation of three assistant turns, one of them a tool call."""
    return [
        {"role": "user", "content": "Cancel my order."},
        {"role": "assistant", "content": "Which one?"},
        {"role": "user", "content": "#7"},
        {"role": "assistant", "content": "", "tool_calls": [{"id": "c1", "name": "cancel", "arguments": {"order": 7}}]},
        {"role": "tool", "content": '{"ok": true}', "id": "c1"},
        {"role": "assistant", "content": answer},
        {"role": "user", "content": "Thanks ###STOP###"},
    ]


def line(task: str = "0", trial: int = 0, reward: float = 1.0, answer: str = "Done.") -> dict[str, Any]:
    return {
        "task_id": task,
        "trial": trial,
        "domain": "shop",
        "model": "m",
        "reward": reward,
        "messages": messages(answer),
    }


def write_jsonl(path: Path, lines: list[Any]) -> Path:
    path.write_text("".join((one if isinstance(one, str) else json.dumps(one)) + "\n" for one in lines))
    return path


def real_file(name: str) -> Path:
    """A file of the real data; skips the test, naming the file, when it is not there."""
    root = os.environ.get("ARBORIST_DATA")
    if not root or not (Path(root) / name).is_file():
        pytest.skip(f"needs {name} in the folder ARBORIST_DATA names")
    return Path(root) / name
