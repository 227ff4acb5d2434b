"""Names that are taken once, by whole files, on file systems without hard links."""

from __future__ import annotations

import errno
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from datamodules.files.publish import aside_of, publish
from tests.helpers.links import without_links


@pytest.fixture(autouse=True)
def no_links(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "link", without_links)


def written(path: Path, text: str) -> Path:
    aside = aside_of(path)
    aside.write_text(text)
    return aside


def test_a_disk_that_refuses_leaves_the_name_free(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "file"
    aside = written(path, "whole")

    def full(*_: Path) -> None:
        assert not path.exists()
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full)
        with pytest.raises(OSError, match="No space left"):
            publish(aside, path)
    assert list(tmp_path.iterdir()) == [aside]
    publish(aside, path)
    assert list(tmp_path.iterdir()) == [path] and path.read_text() == "whole"


def test_one_of_many_takes_a_name(tmp_path: Path) -> None:
    path = tmp_path / "file"

    def publishes(text: str) -> str:
        try:
            publish(written(path, text), path)
        except FileExistsError:
            return ""
        return text

    with ThreadPoolExecutor(8) as threads:
        succeeded = [text for text in threads.map(publishes, "abcdefgh") if text]
    assert succeeded == [path.read_text()] and not (tmp_path / "file.lock").exists()


def test_a_lock_that_was_left_is_told_by_name(tmp_path: Path) -> None:
    path, lock = tmp_path / "file", tmp_path / "file.lock"
    lock.touch()
    with pytest.raises(OSError, match=r"file\.lock is there; delete it if no other process writes there"):
        publish(written(path, "mine"), path, held_s=0.0)
    assert lock.exists() and not path.exists()
    path.write_text("of one that was killed once it had the name")
    with pytest.raises(FileExistsError):
        publish(written(path, "mine"), path)
