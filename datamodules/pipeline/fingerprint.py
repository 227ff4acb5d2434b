"""What a stream of training data is made of, in a few words of its state, compared by a run that goes on.

Promises: another tokenizer is refused, since a checkpoint's policy and finished rollouts know the old one's ids; other
differences are told in one warning that names the keys. What cannot be told from a few words (the hundredth prompt, the
middle of a file) is not noticed. States without fingerprints, of older versions, are taken as they are.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from transformers import PreTrainedTokenizerBase

from datamodules.prompts.base import PromptSource

KEY = "made_with"
"""Key of the fingerprints in a datamodule's state."""
_TOKENIZER = "tokenizer"
_RULES = ("model", "normalizer", "pre_tokenizer", "post_processor")  # padding and truncation change with every call
_PROMPTS = 16  # that are looked at
_FILE_BYTES = 1 << 20  # at the beginning of a file
_LONGEST = 200  # characters


def of_tokenizer(tokenizer: PreTrainedTokenizerBase) -> dict[str, str]:
    """Number of tokens and a hash of what decides about ids; a hash of the chat template."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    rules = json.loads(backend.to_str()) if backend is not None else {"model": tokenizer.get_vocab()}
    rules = {key: rules.get(key) for key in _RULES}
    special = [tokenizer.eos_token_id, tokenizer.bos_token_id]
    return {
        _TOKENIZER: f"{len(tokenizer)} tokens, {of_values(rules, special)}",
        "tokenizer's chat template": of_values(tokenizer.chat_template),
    }


def of_prompts(source: PromptSource) -> str:
    """Name, size, and a hash of the first prompts."""
    first = [[p.id, p.text, list(p.messages), p.answer] for p in source.first(_PROMPTS)]
    return f"{source.name}, {'no end' if source.size is None else f'{source.size} prompts'}, {of_values(first)}"


def of_file(path: Path) -> str:
    """Name, size, and a hash of the beginning."""
    with path.open("rb") as file:
        start = file.read(_FILE_BYTES)
    return f"{path.name}, {path.stat().st_size} bytes, {hashlib.sha256(start).hexdigest()[:12]}"


def of_object(value: object) -> str:
    """Class and public attributes; of those that are objects themselves the class."""
    settings = ", ".join(
        f"{name}={_plain(setting)}"
        for name, setting in sorted(getattr(value, "__dict__", {}).items())
        if not name.startswith("_")
    )
    return f"{type(value).__name__}({settings})"[:_LONGEST]


def of_values(*values: object) -> str:
    """A hash of what JSON can say."""
    return hashlib.sha256(json.dumps(values, sort_keys=True, default=str).encode()).hexdigest()[:12]


def compare(saved: Mapping[str, Any], now: Mapping[str, str]) -> None:
    """Compares the fingerprints in the state `saved` of a datamodule with those of this run, by key.

    Raises:
        ValueError: another tokenizer.
    """
    before: Mapping[str, str] = saved.get(KEY, {})
    changed = [key for key in now if before.get(key, now[key]) != now[key]]
    if _TOKENIZER in changed:
        raise ValueError(
            f"data.{_TOKENIZER}: the checkpoint was trained with another tokenizer ({before[_TOKENIZER]}) than this one"
            f" ({now[_TOKENIZER]}): its policy, and its finished rollouts, know the old ids. Give the old tokenizer, or"
            " begin a new run from the weights alone (arborist export, then model.model.path)"
        )
    if changed:
        told = "; ".join(f"data.{key} was {before[key]} and is {now[key]}" for key in changed)
        rank_zero_warn(
            f"ckpt_path: the stream of training data goes on at its old position, with other settings: {told}. Rollouts"
            " finished before are trained on, groups of another size played again; begin a new run for a new stream"
        )


def _plain(value: object) -> str:
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_plain, value))}]"
    return repr(value) if value is None or isinstance(value, bool | int | float | str) else type(value).__name__
