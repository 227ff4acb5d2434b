"""Damage for files, and the judge of what reading them says.

A damaged file may be refused, in one short line that is written for users, or be read as sound data. Everything else
is a failure: a traceback, a message with binary in it, data that changed.
"""

from __future__ import annotations

import gzip
import math
import os
import traceback
from collections.abc import Callable
from typing import Any, NamedTuple

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from app.cli.errors import users_mistake
from app.text import printable


class Refused(NamedTuple):
    """What a user reads."""

    message: str


def outcome(call: Callable[[], Any]) -> Any:
    """What `call` returns, or `Refused`. Fails for an error that users would see as a traceback or could not read."""
    try:
        return call()
    except Exception as error:
        mistake = users_mistake(error)
        assert mistake is not None, "".join(traceback.format_exception(error))
        message = str(mistake)
        assert message and len(message) < 1_200, message[:2_000]
        assert message == printable(message) and "\n" not in message, repr(message)
        return Refused(message)


def examples(count: int) -> Callable[[Any], Any]:
    """The same `count` examples in every run of `make test-all`, a third of them in `make test`; none is timed."""
    count = count if "HYPOTHESIS_PROFILE" in os.environ else count // 3
    checks = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture, HealthCheck.data_too_large]
    return settings(max_examples=count, derandomize=True, database=None, deadline=None, suppress_health_check=checks)


_KINDS = ("flip", "set", "cut", "insert", "remove", "repeat")
edits = st.lists(st.tuples(st.sampled_from(_KINDS), st.integers(0, 2**20), st.integers(1, 255)), min_size=1, max_size=3)


def damaged(data: bytes, changes: list[tuple[str, int, int]]) -> bytes:
    """`data` after each of `edits`; positions wrap around."""
    for kind, at, value in changes:
        at %= max(1, len(data))
        before, here, after = data[:at], data[at : at + 1], data[at + 1 :]
        middle = {
            "flip": bytes(byte ^ (1 << value % 8) for byte in here),
            "set": bytes([value]),
            "cut": b"",
            "insert": here + bytes([value]) * (value % 9 + 1),
            "remove": b"",
            "repeat": here + data[at : at + value],
        }[kind]
        data = before + middle + (b"" if kind == "cut" else after)
    return data


DEEP = "[" * 100_000 + "]" * 100_000
# JSON as text: what may stand where a field's value is expected.
VALUES = [
    "null", "true", '""', '" "', '"x"', "-1", "0", "0.5", "7", "4294967296", "4611686018427387904", "1" + "0" * 400,
    "1" * 5_000, "1e308", "3e38", "NaN", "Infinity", "[]", "{}", "[null]", "[[1, 2]]", "[0.5, 1]", "[-1, 1]",
    '["1", 2]',
    '{"role": 1}', '[{"role": "user"}]', '[{"role": "user", "content": 5}]', '[{"role": ["user"], "content": "x"}]',
    '"\\ud83d"', '["\\udc00"]', '{"\\ud83d": 1}', '"\\u0000\\u001b[31mred"', DEEP, '{"a":' * 300 + "1" + "}" * 300,
]  # fmt: skip


def gzipped(data: bytes) -> bytes:
    return gzip.compress(data, mtime=0)


def is_sound_text(value: Any) -> bool:
    """Text that every file and every process takes."""
    try:
        return isinstance(value, str) and bool(value.encode("utf-8") or True)
    except UnicodeEncodeError:
        return False


def is_sound_number(value: float, largest: float) -> bool:
    return math.isfinite(value) and abs(value) <= largest
