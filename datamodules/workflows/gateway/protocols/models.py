"""The list of models, as OpenAI and Anthropic tell it.

Promises: it holds the policy alone; requests for replies may name any model, and the policy answers.
"""

from __future__ import annotations

from typing import Any

_SINCE = 1_735_689_600  # 2025-01-01: clients want a date, and weights that are trained have none
_SINCE_TEXT = "2025-01-01T00:00:00Z"


def openai_model(name: str) -> dict[str, Any]:
    """One of OpenAI's list."""
    return {"id": name, "object": "model", "created": _SINCE, "owned_by": "arborist"}


def openai_models(name: str) -> dict[str, Any]:
    """OpenAI's list."""
    return {"object": "list", "data": [openai_model(name)]}


def anthropic_model(name: str) -> dict[str, Any]:
    """One of Anthropic's list."""
    return {"type": "model", "id": name, "display_name": name, "created_at": _SINCE_TEXT}


def anthropic_models(name: str) -> dict[str, Any]:
    """Anthropic's list."""
    return {"data": [anthropic_model(name)], "has_more": False, "first_id": name, "last_id": name}
