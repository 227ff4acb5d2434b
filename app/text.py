"""Text that models, tools, data files or other processes wrote, made fit for a file or a terminal.

Promises: what is returned can be encoded as UTF-8; `printable` leaves no character in it that moves a cursor, changes
colours or reverses a line; ordinary text comes back as it is. Imports nothing of the project.
"""

from __future__ import annotations

import logging
import os
import re
import select
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any

_SURROGATES = re.compile("[\ud800-\udfff]")
# C0 but for tabs and line feeds, DEL, C1, lone surrogates, line separators, and what reorders text.
_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\u2028\u2029\u202a-\u202e\u2066-\u2069]")


def well_formed(text: str) -> str:
    """`text` with lone surrogates (JSON and Python allow them, UTF-8 does not) written as their escapes, `\\ud83d`."""
    return text.encode("utf-8", "backslashreplace").decode() if has_surrogate(text) else text


def has_surrogate(text: str) -> bool:
    """True for text that UTF-8 cannot express."""
    return not text.isascii() and _SURROGATES.search(text) is not None


def printable(text: str, most: int | None = None) -> str:
    """`text` for a terminal or a message: control characters as their escapes, in at most about `most` characters."""
    if most is not None and len(text) > most:
        text = f"{text[:most]}... ({len(text):,} characters)"
    return _CONTROLS.sub(lambda found: repr(found[0])[1:-1], text)


def reason(error: BaseException, most: int = 200) -> str:
    """What another library's error says, for a message of ours: one `printable` line of at most about `most`
    characters."""
    return printable(" ".join(str(error).split()) or type(error).__name__, most)


def why_not(error: BaseException, most: int = 300) -> str:
    """What a library's error about a model or tokenizer says, for a message: `reason`, but of one whose class is code
    that lies beside it, which no run executes (`trust_remote_code`), so much."""
    if "trust_remote_code" in str(error):
        return (
            "its class is code that lies beside it, and such code is not run; name a model of a family that"
            " transformers has (docs/support_matrix.md)"
        )
    return reason(error, most)


class _PrintableRecord(logging.LogRecord):
    """A log line whose message, and whose exception's, are `printable`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.exc_info and self.exc_info[0] is not None:
            self.exc_text = printable(logging.Formatter().formatException(self.exc_info))

    def getMessage(self) -> str:
        return printable(super().getMessage())


def print_exception(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """`sys.excepthook` for errors that quote text from elsewhere: what Python prints, `printable`."""
    sys.stderr.write(printable("".join(traceback.format_exception(kind, error, trace))))


def nobody_reads() -> bool:
    """Whether whoever read the standard output has gone, as `head` does that has its lines. Then nothing of it is
    written any more, at the interpreter's end neither."""
    try:
        output = sys.stdout.fileno()
        events = select.poll()
        events.register(output, 0)
        gone = any(event & select.POLLERR for _, event in events.poll(0))
    except (AttributeError, OSError, ValueError):  # no file
        return False
    if gone:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, output)
        os.close(nowhere)
    return gone


@contextmanager
def printable_output() -> Iterator[None]:
    """Inside: log messages are `printable`, and no character stops `print`, whatever the terminal's encoding."""
    before = logging.getLogRecordFactory()
    logging.setLogRecordFactory(_PrintableRecord)
    for stream in (sys.stdout, sys.stderr):
        reconfigure: Any = getattr(stream, "reconfigure", None)  # tests and notebooks put other objects there
        if reconfigure is not None:
            reconfigure(errors="backslashreplace")
    try:
        yield
    finally:
        logging.setLogRecordFactory(before)
