"""Verdicts on disk, by content: one table of SQLite, which several runs may share.

Promises: what was asked before in exactly these words, of this model with these settings, is not asked again; a file
that cannot be used is an error that names it.
"""

from __future__ import annotations

import sqlite3
from pathlib import Path

_WAIT_S = 10.0


class VerdictCache:
    """Args: path of the file, made where there is none. Raises ValueError: it cannot be used."""

    def __init__(self, path: str) -> None:
        self._path = path
        try:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            self._base = sqlite3.connect(path, timeout=_WAIT_S, isolation_level=None, check_same_thread=False)
            self._base.execute("PRAGMA journal_mode=WAL")
            self._base.execute("PRAGMA synchronous=NORMAL")
            self._base.execute("CREATE TABLE IF NOT EXISTS verdicts (key BLOB PRIMARY KEY, answer TEXT NOT NULL)")
        except (sqlite3.Error, OSError) as error:
            raise ValueError(f"model.cache: {path} cannot be used: {error}; name another file") from None

    def get(self, key: bytes) -> str | None:
        """The answer kept under `key`. Raises ValueError as `put`."""
        try:
            row = self._base.execute("SELECT answer FROM verdicts WHERE key = ?", (key,)).fetchone()
        except sqlite3.Error as error:
            raise self._broken(error) from error
        return None if row is None else str(row[0])

    def put(self, key: bytes, answer: str) -> None:
        """Keeps it. Raises ValueError: the file cannot be read or written any more."""
        try:
            self._base.execute("INSERT OR REPLACE INTO verdicts VALUES (?, ?)", (key, answer))
        except sqlite3.Error as error:
            raise self._broken(error) from error

    def close(self) -> None:
        self._base.close()

    def _broken(self, error: sqlite3.Error) -> ValueError:
        return ValueError(f"model.cache: {self._path}: {error}; free space there, or name another file")
