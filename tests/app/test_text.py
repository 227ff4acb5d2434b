"""Text from outside, on its way to files and terminals."""

from __future__ import annotations

import io
import logging
import sys
from typing import cast

import pytest
from torch import Tensor

from app.cli import main
from app.strategies.ranks.collectives import Communicator
from app.strategies.ranks.sharing import RankTraffic
from app.text import print_exception, printable, printable_output, well_formed


def test_ordinary_text_is_left_alone() -> None:
    text = "two\nlines\tof text, é, 漢字, 😀 and \\ud83d"
    assert printable(text) == text == well_formed(text)


def test_what_terminals_act_on_is_written_out() -> None:
    hostile = "\x1b]0;owned\x07\x1b[2Jcleared\r\x08\x7f\x9b31m\u202egnp.exe \ud83d"
    shown = printable(hostile)
    assert shown == r"\x1b]0;owned\x07\x1b[2Jcleared\r\x08\x7f\x9b31m\u202egnp.exe \ud83d"
    assert printable("x" * 2_000_000, 10) == "xxxxxxxxxx... (2,000,000 characters)"
    assert well_formed("a\ud83d\x1b") == "a\\ud83d\x1b"


def test_log_lines_and_prints_are_cleaned(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
    lines = io.StringIO()
    handler = logging.StreamHandler(lines)
    log = logging.getLogger("tests.text")
    log.addHandler(handler)
    try:
        with printable_output():
            log.warning("prompt %r failed: %s", "a", "\x1b[31mred")
            try:
                raise ValueError("\x1b[2Jcleared")
            except ValueError as error:
                log.exception("and")
                print_exception(type(error), error, error.__traceback__)
            print("prompt é \ud83d", flush=True)
        log.warning("%s", "\x1b")
    finally:
        log.removeHandler(handler)
    said = lines.getvalue()
    assert said.startswith("prompt 'a' failed: \\x1b[31mred\nand\nTraceback")
    assert said.endswith("ValueError: \\x1b[2Jcleared\n\x1b\n")
    assert capsys.readouterr().err.endswith("ValueError: \\x1b[2Jcleared\n")
    assert raw.getvalue() == b"prompt \\xe9 \\ud83d\n"


def test_errors_of_the_command_line_are_cleaned(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["data", "import-tau", "no\x1b[31mwhere"])
    assert "error: CHECKOUT: 'no\\x1b[31mwhere' is not a folder" in capsys.readouterr().err


def test_an_error_of_a_rank_reaches_the_others_whatever_it_says() -> None:
    class TwoRanks:
        size = 2

        def collect(self, message: Tensor, what: str) -> list[Tensor]:
            return [message]

    traffic = RankTraffic(cast(Communicator, TwoRanks()))
    assert traffic._answer(ValueError("half \ud83d")) == ["ValueError: half \\ud83d"]
