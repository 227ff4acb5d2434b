"""What a stream of training data is made of, in a few words of its state, compared by a run that goes on.

Promises: another tokenizer is refused, since a checkpoint's policy and finished rollouts know the old one's ids; other
differences are told in one warning that names the keys, those of validation in another. What cannot be told from
a few words (the hundredth prompt, the middle of a file, the inside of a function) is not noticed. What states of older
versions do not say is not compared.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import re
import sys
import sysconfig
from collections.abc import Iterable, Mapping
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from transformers import PreTrainedTokenizerBase

from datamodules.pipeline.limits import Limits
from datamodules.pipeline.validation import Validation, ValSet
from datamodules.processes.limits import looks_secret
from datamodules.prompts.base import PromptSource
from datamodules.rewards.options import RewardOptions

KEY = "made_with"
"""Key of the fingerprints in a datamodule's state."""
ROLLOUTS = "Rollouts finished before are trained on, groups of another size played again"
EXAMPLES = "As many examples as were dealt are passed over, and a batch under way stays as it is"
"""What becomes of a stream, of groups that are played and of examples that are read."""
_TOKENIZER = "tokenizer"
_VALIDATION = "validation"  # with which its keys begin
_OF_PLAY = ("episode_deadline_s", "rest", "long_prompts")  # limits that decide what is trained
_RULES = ("model", "normalizer", "pre_tokenizer", "post_processor")  # padding and truncation change with every call
_PROMPTS = 16  # that are looked at
_FILE_BYTES = 1 << 20  # at the beginning of a file
_LONGEST = 200  # characters that are told of a setting; of what is behind them a hash
_DEEPEST = 6  # objects in objects
_MOST, _MOST_VALUES = 100, 10_000  # that are looked at, of a list and in all
_PROJECT = ("app", "callbacks", "datamodules", "modules")
_LIBRARIES = tuple(Path(sysconfig.get_paths()[name]) for name in ("purelib", "platlib"))


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


def of_held_out(sets: Iterable[ValSet]) -> dict[str, str]:
    """As `of_prompts`, by set."""
    return {f"{_VALIDATION}, set {one.name}": of_prompts(one.source) for one in sets}


def of_play(
    numbers: Mapping[str, float], limits: Limits, rewards: RewardOptions | None, validation: Validation
) -> dict[str, str]:
    """What decides which episodes are trained, `numbers` among it, and what those of validation say, by option of
    `RolloutDataModule`. `rewards`: None without a reward."""
    made = {name: str(value) for name, value in numbers.items()}
    made |= {f"limits.{name}": str(getattr(limits, name)) for name in _OF_PLAY}
    if rewards is not None:
        made |= {f"reward_options.{name}": str(getattr(rewards, name)) for name in ("deadline_s", "on_failure")}
    if validation.prompts is not None:
        options = ("samples", "temperature", "solved_at")
        made |= {f"{_VALIDATION}.{name}": str(getattr(validation, name)) for name in options}
        made |= of_object(f"{_VALIDATION}.answer", validation.answer)
    return made


def of_file(path: Path) -> str:
    """Name, size, and a hash of the beginning."""
    with path.open("rb") as file:
        start = file.read(_FILE_BYTES)
    return f"{path.name}, {path.stat().st_size} bytes, {hashlib.sha256(start).hexdigest()[:12]}"


def of_object(key: str, value: object) -> dict[str, str]:
    """What was configured as `data.key`, as far as it can be told: the import path of a function, or of an object's
    class, and what the object keeps of its settings, by name; secrets are left out."""
    settings = {f"{key}.{name}": said for name, said in _Settings().of(value).items()}
    return {f"{key}'s import path": _path(value if _is_named(value) else type(value))} | {
        name: said if len(said) <= _LONGEST else f"{said[:_LONGEST]}..., {of_values(said)}"
        for name, said in settings.items()
    }


def of_values(*values: object) -> str:
    """A hash of what JSON can say."""
    return hashlib.sha256(json.dumps(values, sort_keys=True, default=str).encode()).hexdigest()[:12]


def compare(saved: Mapping[str, Any], now: Mapping[str, str], stream: str, trainer: Any = None) -> None:
    """Compares the fingerprints in the state `saved` of a datamodule with those of this run, by key; of a
    `trainer` that does not train the tokenizer's alone. `stream`: what becomes of it, to be told with a change.

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
    if trainer is not None and trainer.state.fn not in (None, TrainerFn.FITTING):
        return

    def told(held_out: bool) -> str:
        keys = [key for key in changed if key.startswith(_VALIDATION) == held_out]
        return "; ".join(f"data.{key} was {before[key]} and is {now[key]}" for key in keys)

    if others := told(held_out=True):
        rank_zero_warn(
            f"ckpt_path: the run goes on with another validation: {others}. val/* before and after this step, and"
            " checkpoints that are ranked by them, cannot be compared; give the old options, or begin a new run"
        )
    if others := told(held_out=False):
        rank_zero_warn(
            f"ckpt_path: the stream of training data goes on at its old position, with other settings: {others}."
            f" {stream}; begin a new run for a new stream"
        )


class _Settings:
    """What objects were configured with, in words: one look at one configured object."""

    def __init__(self) -> None:
        self._left = _MOST_VALUES
        self._seen: set[int] = set()

    def of(self, value: object, depth: int = 0) -> dict[str, str]:
        """Attributes of an object by the names of its constructor's parameters, and its public ones; of the objects
        that it made of others, in private ones, the former. No more, lest what changes while a program runs be taken
        for a setting."""
        if isinstance(value, partial):
            given = value.keywords | ({"args": value.args} if value.args else {})
            return {name: self.said(setting, depth + 1) for name, setting in given.items()}
        if depth > _DEEPEST or id(value) in self._seen or _is_named(value) or not _has_settings(value):
            return {}
        self._seen.add(id(value))
        parameters = _parameters(type(value))
        found, besides = dict[str, str](), dict[str, str]()
        for attribute, setting in _attributes(value):
            name = attribute.lstrip("_")
            if looks_secret(name):
                continue
            if name in parameters or (name == attribute and depth == 0):
                found[name] = self.said(setting, depth + 1)
            else:
                for one in setting[:_MOST] if isinstance(setting, list | tuple) else (setting,):
                    besides |= {
                        _by_option(key, name, parameters): said for key, said in self.of(one, depth + 1).items()
                    }
        return besides | found

    def said(self, value: object, depth: int) -> str:
        self._left -= 1
        if isinstance(value, str) and looks_secret("", value):  # a URL with a password
            return of_values(value)
        if value is None or isinstance(value, bool | int | float | str):
            return repr(value)
        if isinstance(value, Path | re.Pattern):
            return repr(str(value) if isinstance(value, Path) else value.pattern)
        if _is_named(value):
            return _path(value)
        if depth > _DEEPEST or self._left < 0:
            return type(value).__name__
        if isinstance(value, list | tuple | set | frozenset):
            if len(value) > _MOST:
                return f"{len(value)} values"
            said = [self.said(one, depth + 1) for one in value]
            return f"[{', '.join(said if isinstance(value, list | tuple) else sorted(said))}]"
        if isinstance(value, Mapping):
            told = {k: one for k, one in islice(value.items(), _MOST) if not looks_secret(str(k))}
            items = sorted(f"{self.said(k, depth + 1)}: {self.said(one, depth + 1)}" for k, one in told.items())
            return f"{{{', '.join(items)}}}"
        settings = ", ".join(f"{name}={one}" for name, one in sorted(self.of(value, depth).items()))
        return f"{self.said(value.func, depth + 1) if isinstance(value, partial) else type(value).__name__}({settings})"


def _is_named(value: object) -> bool:
    """Whether it is a function (wrapped by a library's, too) or class, which is known by its name."""
    return inspect.isroutine(value) or isinstance(value, type) or "__qualname__" in getattr(value, "__dict__", {})


def _path(value: Any) -> str:
    return "None" if value is type(None) else f"{value.__module__}.{value.__qualname__}"


def _has_settings(value: object) -> bool:
    """Of objects of libraries only the class is told: they are full of what changes from run to run."""
    module = type(value).__module__
    top = module.partition(".")[0]
    if top in _PROJECT:
        return True
    file = getattr(sys.modules.get(module), "__file__", None)
    return top not in sys.stdlib_module_names and not any(Path(file or "").is_relative_to(one) for one in _LIBRARIES)


def _by_option(name: str, part: str, options: set[str]) -> str:
    """The option of an object by which a setting of a `part` of it goes, as override_sampling does by `override` of
    its sampling; `name` where there is no such option."""
    named = f"{name}_{part}"
    return named if name not in options and named in options else name


def _parameters(kind: type) -> set[str]:
    try:
        return set(inspect.signature(kind).parameters)
    except (TypeError, ValueError):  # of a class that says none
        return set()


def _attributes(value: object) -> list[tuple[str, object]]:
    slots = [name for kind in type(value).__mro__ for name in kind.__dict__.get("__slots__", ())]
    held = [(name, getattr(value, name)) for name in slots if not name.startswith("__") and hasattr(value, name)]
    return [*held, *getattr(value, "__dict__", {}).items()]
