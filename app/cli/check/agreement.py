"""Whether model, tokenizer and chat template agree: what ends a reply, and which thoughts later turns still see."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from app.cli.check.findings import Part, Reason, Rollouts, model_config


def of_text(rollouts: Rollouts, arguments: argparse.Namespace) -> Part:
    from datamodules.prompts.tokenizers import load_tokenizer
    from datamodules.workflows.turn_ends import template_end

    data = rollouts.settings.get("data", {}).get("init_args") or {}
    spec = arguments.tokenizer or data.get("tokenizer")
    if not spec or not Path(spec).is_dir():
        return ["no directory of a tokenizer: nothing is said about the chat template"], {}, []
    tokenizer: Any = load_tokenizer(spec)
    config = model_config(rollouts, arguments)
    lines, reasons = [], []
    end = template_end(tokenizer)
    named = {"the tokenizer": tokenizer.eos_token_id, "the chat template": end}
    if config is not None:
        named["the model's configuration"] = getattr(config.get_text_config(), "eos_token_id", None)
    ends = {who: what for who, what in named.items() if what is not None}
    lines.append("a reply ends: " + ", ".join(f"{who} {_spelled(tokenizer, what)}" for who, what in ends.items()))
    if config is not None and len(tokenizer) > config.get_text_config().vocab_size:
        finding = f"the tokenizer has {len(tokenizer):,} ids, the model {config.get_text_config().vocab_size:,}"
        reasons.append(Reason("no-go", finding, "take the tokenizer that came with the model"))
    if tokenizer.chat_template:
        drops = _drops_thoughts(tokenizer)
        after = ", so every turn is a branch: the tree shares what comes before it" if drops else ""
        lines.append(f"the chat template {'drops' if drops else 'keeps'} thoughts of earlier turns{after}")
    return lines, {"reply_ends": {who: what for who, what in ends.items()}}, reasons


def _spelled(tokenizer: Any, ids: Any) -> str:
    ids = ids if isinstance(ids, list | tuple) else [ids]
    return " or ".join(f"{tokenizer.convert_ids_to_tokens(int(one))!r} ({one})" for one in ids)


def _drops_thoughts(tokenizer: Any) -> bool:
    """Whether a thought of the turn before is gone from the prompt of the next."""
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "<think>\nzebra\n</think>\n\nb"},
                {"role": "user", "content": "c"}]  # fmt: skip
    return "zebra" not in tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
