"""Clients of providers that users' modules make as they are imported.

A module that holds an agent's graph makes its client beside it, as a rule, and clients without a key refuse to be
made. The trainer imports such a module to look at the agent, and reward workers do for a reward that stands there too;
neither asks anything by that client, and workers do not see the user's keys. Cheap to import: worker processes do it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

KEYS = ("OPENAI_API_KEY", "ANTHROPIC_API_KEY", "GEMINI_API_KEY")
"""Variables in which they look for one."""
_NO_KEY = "no-key-was-there-at-the-import"  # a provider quotes its ends where such a client asks after all


@contextmanager
def no_keys_needed() -> Iterator[None]:
    """In the block modules can be imported that make such clients; keys that are there stay, the others are gone after
    it."""
    missing = [name for name in KEYS if name not in os.environ]
    os.environ.update(dict.fromkeys(missing, _NO_KEY))
    try:
        yield
    finally:
        for name in missing:
            os.environ.pop(name, None)
