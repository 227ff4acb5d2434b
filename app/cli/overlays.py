"""What a class has of another one's options, where a later `--config` names it in the other's place.

Promise: a line for each such class, with every option that the parser lets it keep, and the file it is from: a held-out
set of 256 prompts that the quickstart asks for would be one of 256 of a user's own data without a word. (But a seed.)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from app.cli.configuration import read_yaml
from app.cli.errors import imported, options_of


def kept_options(files: Sequence[Path], config: Mapping[str, Any]) -> list[str]:
    """Of the options of earlier `files` those that are no default of the class that a later one names instead.

    Args:
        config: what is used in the end.
    """
    lines: list[str] = []
    before: dict[str, Any] = {}
    for file in filter(Path.is_file, files):  # a pipe has been read, and is empty now
        now = read_yaml(file.read_text("utf-8"))
        lines += [f"{line}; if that is not meant, say so in {file}" for line in _kept(before, now, config, "")]
        before = _laid_over(before, now)
    return lines


def _kept(before: Any, now: Any, config: Any, key: str) -> list[str]:
    if not (isinstance(before, Mapping) and isinstance(config, Mapping)):
        return []
    if isinstance(now, str) and "class_path" in before:  # a class without options
        now = {"class_path": now}
    if not isinstance(now, Mapping):
        return []
    old, new = before.get("class_path"), now.get("class_path")
    lines: list[str] = []
    if old and new and imported(old) is not imported(new):
        given, used = (part.get("init_args") or {} for part in (now, config))
        kept = [name for name in before.get("init_args") or {} if name not in given and name in used]
        kept = [name for name in kept if name != "seed" and used[name] != _default(new, name)]
        if kept:
            named = ", ".join(f"{name}: {_shown(used[name])}" for name in kept)
            lines.append(f"{key}: {new} takes over {named} from {old} of an earlier file")
    for name in now.keys() & before.keys():
        inner = key if name == "init_args" else f"{key}.{name}".strip(".")
        lines += _kept(before[name], now[name], config.get(name), inner)
    return lines


def _default(class_path: str, name: str) -> Any:
    try:
        return options_of(imported(class_path))[name].default
    except (KeyError, NameError, TypeError, ValueError):
        return None


def _shown(value: Any) -> str:
    return str(value["class_path"]) if isinstance(value, Mapping) and "class_path" in value else f"{value!s:.60}"


def _laid_over(before: Any, now: Any) -> Any:
    if not (isinstance(before, Mapping) and isinstance(now, Mapping)):
        return now
    return {**before, **{name: _laid_over(before.get(name), value) for name, value in now.items()}}
