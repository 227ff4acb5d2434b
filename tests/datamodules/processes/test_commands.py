"""Commands: their answer is the last line that they printed themselves, whole, or an error."""

from __future__ import annotations

import sys

import pytest

from datamodules.processes.commands import run_command
from datamodules.processes.worker import NotAnAnswer

UTF8 = "import sys; sys.stdout.reconfigure(encoding='utf-8'); "


def answer(code: str) -> str:
    return run_command({}, [sys.executable, "-c", code], "")


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("print('first'); print('last')", "last"),
        ("print('last', end='\\n \\n\\n')", "last"),
        ("print('ok 50%\\rok 100%\\r')", "ok 100%"),
        ("sys.stdout.write('42\\r\\n')", "42"),
        (r"print('half\u2028half')", "half\u2028half"),
        (r"print('a\x85b\x0cc\x1cd')", "a\x85b\x0cc\x1cd"),
        ("print('a' * 100_000 + 'b')", "a" * 100_000 + "b"),
        ("print('a' * 5_000_000); print('b' * 100_000)", "b" * 100_000),
        ("import os; print('closed', flush=True); os.close(1)", "closed"),
        ("pass", ""),
    ],
)
def test_an_answer_is_what_was_printed(code: str, said: str) -> None:
    assert answer(UTF8 + code) == said


@pytest.mark.parametrize("end", ["", "\\n", "\\n\\n\\n"])
def test_an_answer_that_is_too_long_is_none(end: str) -> None:
    with pytest.raises(NotAnAnswer, match=r"^printed a last line of more than 1 MB, its answer; print a shorter one"):
        answer(f"print('answer'); print('a' * 3_000_000, end='{end}')")


def test_what_is_printed_after_its_end_is_no_answer() -> None:
    speaks = "import time; time.sleep(0.7); print('the server ends', flush=True); time.sleep(60)"
    leaves = f"subprocess.Popen([sys.executable, '-c', {speaks!r}], start_new_session=True)"
    assert answer(f"import subprocess, sys; print('the answer', flush=True); {leaves}") == "the answer"
