"""What a run directory says, read for the report: metrics, what `Report` kept, what the coach said, configuration.

Promises: a run that is still going on is read as far as it is (a last line that is cut short is left for the next
time); of steps that were made again after a restart the later ones count; lines that cannot be read are counted in
`notes`, never passed over in silence.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from callbacks.pictures import Series, read_launches


@dataclass
class RunData:
    """A run, or recorded rollouts.

    Attributes:
        name: for titles. series: metric -> (optimizer steps done, values). batches, held_out: what `Report` wrote, by
        step. coach: lines of coach.jsonl. config, summary: {} where there is none. notes: what the reader should know.
    """

    name: str
    series: Series = field(default_factory=dict)
    batches: list[dict[str, Any]] = field(default_factory=list)
    held_out: list[dict[str, Any]] = field(default_factory=list)
    coach: list[dict[str, Any]] = field(default_factory=list)
    config: dict[str, Any] = field(default_factory=dict)
    summary: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def is_run(path: Path) -> bool:
    """Whether `path` is a run directory with something to show."""
    return path.is_dir() and (any(path.glob("metrics*.csv")) or (path / "report.jsonl").exists())


def read_run(path: Path) -> RunData:
    """The run in the directory `path`."""
    found = RunData(f"{path.absolute().parent.name}/{path.absolute().name}")
    found.series = read_launches(path)
    rows = _lines(path / "report.jsonl", found.notes)
    found.batches, found.held_out = _latest(rows, "batch"), _latest(rows, "held_out")
    found.coach = _lines(path / "coach.jsonl", found.notes)
    for name, load in (("config.yaml", yaml.safe_load), ("summary.json", json.loads)):
        file = path / name
        if file.exists():
            try:
                value = load(file.read_text("utf-8"))
            except (ValueError, yaml.YAMLError):
                found.notes.append(f"{name} cannot be read")
                continue
            setattr(found, name.split(".")[0], value if isinstance(value, dict) else {})
    if not (path / "report.jsonl").exists():
        found.notes.append("no report.jsonl: neither trees nor transcripts (the Report callback was left out)")
    return found


def _latest(rows: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    """Those of a kind, in order of steps; of several of one step the last, and none behind a later restart from before
    it, which says so as soon as it trains: its own first row of the kind may be long in coming, or further on."""
    kept: list[dict[str, Any]] = []
    for row in rows:
        if row.get("kind") not in (kind, "goes_on"):
            continue
        is_of_kind = row["kind"] == kind
        first = row["step"] if is_of_kind else row["step"] + 1  # the step it goes on from was done before
        while kept and kept[-1]["step"] >= first:
            kept.pop()
        if is_of_kind:
            kept.append(row)
    return kept


def _lines(path: Path, notes: list[str]) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    found, broken = [], 0
    lines = path.read_text("utf-8", errors="replace").split("\n")
    for number, line in enumerate(lines):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
            if isinstance(value, dict) and isinstance(value.get("step"), int):
                found.append(value)
            else:
                broken += 1
        except (ValueError, RecursionError):
            broken += number < len(lines) - 1  # without its line feed: being written
    if broken:
        notes.append(f"{path.name}: {broken} lines cannot be read")
    return found
