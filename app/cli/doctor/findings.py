"""What a check found, and how findings are printed.

Promises: one line a finding, what is wrong with its remedy; a count at the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

_MARKS = {"ok": "ok  ", "note": "note", "bad": "BAD "}


@dataclass(frozen=True)
class Finding:
    """One line: `level` "ok", "note" (works, with a limit or without an optional part) or "bad"; what was looked at;
    the finding, with the remedy where there is one."""

    level: Literal["ok", "note", "bad"]
    what: str
    text: str


def print_findings(findings: Sequence[Finding]) -> int:
    """Prints them; returns the exit code: 1 if one is bad."""
    width = max(len(finding.what) for finding in findings)
    for finding in findings:
        print(f"{_MARKS[finding.level]}  {finding.what:<{width}}  {finding.text}")
    bad = sum(finding.level == "bad" for finding in findings)
    print(f"\n{bad} of {len(findings)} checks failed" if bad else f"\nall {len(findings)} checks passed", flush=True)
    return 1 if bad else 0
