"""Results as JSON that one can look through and git can compare: a line for each record of a list."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_WIDTH = 120


def write_json(path: Path, result: dict[str, Any]) -> None:
    path.write_text(_text(result, "") + "\n")


def _text(value: Any, margin: str) -> str:
    inner = margin + " "
    if isinstance(value, dict) and len(json.dumps(value)) > _WIDTH:
        parts = [f"{inner}{json.dumps(key)}: {_text(one, inner)}" for key, one in value.items()]
        return "{\n" + ",\n".join(parts) + f"\n{margin}}}"
    if isinstance(value, list) and any(isinstance(one, dict) for one in value):
        return "[\n" + ",\n".join(inner + json.dumps(one) for one in value) + f"\n{margin}]"
    return json.dumps(value)
