"""What a run directory says, read for the report: metrics, what `Report` kept, what the coach said, configuration.

Promises: a run that is still going on is read as far as it is (a last line that is cut short is left for the next
time); of steps that were made again after a restart the later ones count; lines that cannot be read are counted in
`notes`, never passed over in silence.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import yaml

from callbacks.pictures import Series, read_launches

MOST_BATCHES = 24
_POWERS = 20  # of these at most, which are the batches 1, 2, 4, 8, ... of a million
_T = TypeVar("_T")


@dataclass
class RunData:
    """A run, or recorded rollouts.

    Attributes:
        name: for titles. series: metric -> (optimizer steps done, values). batches, held_out: what `Report` wrote, by
        step; of a run's batches `MOST_BATCHES` at most. coach: lines of coach.jsonl. config, summary: {} where there is
        none. notes: what the reader should know.
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


def report_bytes(path: Path) -> int:
    """How much `read_run` would read, as far as it grows with the run: the time that it takes goes with this."""
    patterns = ("metrics*.csv", "report.jsonl", "coach.jsonl")
    return sum(file.stat().st_size for pattern in patterns for file in path.glob(pattern))


def read_run(path: Path) -> RunData:
    """The run in the directory `path`."""
    found = RunData(f"{path.absolute().parent.name}/{path.absolute().name}")
    found.series = read_launches(path)
    _read_report(path / "report.jsonl", found)
    found.coach = [line for _, line in _lines(path / "coach.jsonl", found.notes)]
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


def spread(rows: Sequence[_T], most: int) -> list[_T]:
    """At most `most` (two or more) of the rows, evenly, the first and the last among them."""
    if len(rows) <= most:
        return list(rows)
    return [rows[round(k * (len(rows) - 1) / (most - 1))] for k in range(most)]


def _read_report(path: Path, found: RunData) -> None:
    """What `Report` wrote, into `found`."""
    rows: list[dict[str, Any]] = []
    for place, row in _lines(path, found.notes):
        if row.get("kind") == "batch":  # read again if it is chosen
            number = row.get("batch")
            row = {"kind": "batch", "step": row["step"], "batch": number if isinstance(number, int) else 0, "at": place}
        rows.append(row)
    found.held_out, batches = _latest(rows, "held_out"), _latest(rows, "batch")
    chosen = _chosen(batches)
    if len(chosen) < len(batches):
        found.notes.append(
            f"{path.name}: {len(batches) - len(chosen):,} of {len(batches):,} batches are not shown; the last, 1, 2, 4,"
            " 8, ... and some between them are"
        )
    if chosen:
        with path.open("rb") as file:
            for batch in chosen:
                file.seek(batch["at"])
                found.batches.append(json.loads(file.readline().decode("utf-8", errors="replace")))


def _chosen(batches: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """At most `MOST_BATCHES`, in their order: the last, powers of two, and others spread between them."""
    if len(batches) <= MOST_BATCHES:
        return batches
    *before, last = batches
    powers = spread([one for one in before if one["batch"] & (one["batch"] - 1) == 0], _POWERS)
    taken = {one["step"] for one in powers}
    others = spread([one for one in before if one["step"] not in taken], MOST_BATCHES - 1 - len(powers))
    return [*sorted([*powers, *others], key=lambda one: one["step"]), last]


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


def _lines(path: Path, notes: list[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Rows, and the byte at which each begins; behind the last of them a note of those that cannot be read."""
    if not path.exists():
        return
    place, broken = 0, 0
    with path.open("rb") as file:
        for line in file:
            begin, place = place, place + len(line)
            if not line.strip():
                continue
            try:
                value = json.loads(line.decode("utf-8", errors="replace"))
                if isinstance(value, dict) and isinstance(value.get("step"), int):
                    yield begin, value
                else:
                    broken += 1
            except (ValueError, RecursionError):
                broken += line.endswith(b"\n")  # without its line feed: being written
    if broken:
        notes.append(f"{path.name}: {broken} lines cannot be read")
