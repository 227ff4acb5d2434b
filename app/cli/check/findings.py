"""What `arborist check` looks at, and what it finds: records that its parts share."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

Level = Literal["no-go", "change", "slow", "note"]


@dataclass(frozen=True)
class Episode:
    """Attributes: reward; tokens, generated; cut: by the limit of tokens, None where the recording does not say."""

    reward: float
    tokens: int
    cut: bool | None = None


@dataclass(frozen=True)
class Rollouts:
    """What was rolled out.

    Attributes:
        groups: episodes of a prompt, a list each. batch: training sequences of one batch (`sequence_files.Sequences`).
        groups_a_batch: groups that `batch` is made of. seconds: of rolling out a batch, where it was measured.
        settings: of the run, as its config.yaml has them; {} where there is none. recorded: the directory of its
            batches, where they are in one. filtered: groups are missing that the run's `data.filter` left out.
    """

    groups: list[list[Episode]]
    batch: Any
    groups_a_batch: int
    seconds: float | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    recorded: Path | None = None
    filtered: bool = False


@dataclass(frozen=True)
class Reason:
    """A part of the verdict. Attributes: finding, with its number; remedy; overlay, options that carry it out."""

    level: Level
    finding: str
    remedy: str
    overlay: dict[str, Any] = field(default_factory=dict)


Part = tuple[list[str], dict[str, Any], list[Reason]]
"""What a part of the check says: lines, figures by name, reasons."""


def model_config(rollouts: Rollouts, arguments: argparse.Namespace) -> Any:
    """The transformers configuration of the model that is asked about, or None."""
    from transformers import AutoConfig

    from app.tree import read_config

    if arguments.model is not None:
        return read_config(arguments.model)
    source = (rollouts.settings.get("model", {}).get("init_args") or {}).get("model") or {}
    if source.get("path") and Path(source["path"]).exists():
        return read_config(Path(source["path"]))
    fields = source.get("config")
    return AutoConfig.for_model(**fields) if isinstance(fields, dict) and "model_type" in fields else None
