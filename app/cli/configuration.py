"""Reads the YAML of a configuration: as jsonargparse does, after a look at what it would take.

Promises: a file or value that repeats a key, that is nested or large beyond reason, or whose aliases multiply into more
than it shows, is refused in one line with the place, before anything is built from it. Objects are never made from tags
(the loader is PyYAML's safe one); what a configuration names by `class_path` is imported and run, though: a
configuration is a program.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import jsonargparse
import yaml
from jsonargparse import get_loader

_MOST_NODES = 200_000  # values and keys, every use of an alias counted as what it stands for
_MOST_DEPTH = 100

_load = get_loader("yaml")
_Parser = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class ConfigurationError(yaml.YAMLError):
    """YAML that is not taken; the message names the place and the remedy."""


def install() -> None:
    """Makes jsonargparse read YAML through this file."""
    jsonargparse.set_loader("yaml", load, exceptions=(yaml.YAMLError,))


def load(text: str) -> Any:
    """The value of `text`. Raises yaml.YAMLError for what is no YAML, and ConfigurationError (see above)."""
    if any(sign in text for sign in "\n{[&"):  # a plain word or number has neither keys nor aliases
        _check(text)
    return _load(text)


@dataclass
class _Open:
    """A collection that is being read: whose keys, and how many nodes so far."""

    anchor: str | None
    is_mapping: bool
    keys: set[str] = field(default_factory=set)
    children: int = 0
    nodes: int = 1


def _check(text: str) -> None:
    sizes: dict[str, int] = {}
    opened: list[_Open] = []
    for event in yaml.parse(text, Loader=_Parser):
        nodes = 0
        if isinstance(event, yaml.MappingStartEvent | yaml.SequenceStartEvent):
            opened.append(_Open(event.anchor, isinstance(event, yaml.MappingStartEvent)))
            if len(opened) > _MOST_DEPTH:
                raise ConfigurationError(
                    f"nested more than {_MOST_DEPTH} deep, {_place(event)}; a configuration is flat"
                )
            continue
        if isinstance(event, yaml.MappingEndEvent | yaml.SequenceEndEvent):
            done = opened.pop()
            nodes = done.nodes
            if done.anchor is not None:
                sizes[done.anchor] = nodes
        elif isinstance(event, yaml.AliasEvent):
            nodes = sizes.get(event.anchor, 1)
        elif isinstance(event, yaml.ScalarEvent):
            nodes = 1
            if event.anchor is not None:
                sizes[event.anchor] = 1
            if opened and opened[-1].is_mapping and opened[-1].children % 2 == 0:
                _note_key(opened[-1], event)
        if opened and nodes:
            opened[-1].children += 1
            opened[-1].nodes += nodes
            if opened[-1].nodes > _MOST_NODES:
                raise ConfigurationError(
                    f"more than {_MOST_NODES:,} values with aliases (*name) written out, {_place(event)}; write less"
                )


def _note_key(mapping: _Open, event: yaml.ScalarEvent) -> None:
    if event.value in mapping.keys and event.value != "<<":
        raise ConfigurationError(f"the key '{event.value}' is there twice, again {_place(event)}; remove one of them")
    mapping.keys.add(event.value)


def _place(event: yaml.Event) -> str:
    return f"in line {event.start_mark.line + 1}"
