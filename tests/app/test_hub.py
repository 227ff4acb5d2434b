"""A hub that is not reached is asked once."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from huggingface_hub import constants, hf_api

from app.hub import NoDirectoryError, check_reachable, may_be_meant_here


@contextmanager
def hub(status: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Answers everything with `status`; gives what it is asked for."""
    asked: list[str] = []

    class Hub(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            asked.append(self.path)
            self.send_response(status)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    address = f"http://127.0.0.1:{server.server_address[1]}"
    # Where HF_ENDPOINT has gone.
    monkeypatch.setattr(constants, "ENDPOINT", address)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", address + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(hf_api.api, "endpoint", address)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield asked
    finally:
        server.shutdown()
        server.server_close()


def test_one_that_is_not_there_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with hub(503, monkeypatch):
        pass  # its address stays, and nobody listens there any more
    with pytest.raises(ConnectionError, match=r"http://127\.0\.0\.1:\d+ does not answer \(.*refused"):
        check_reachable("nobody/none", "config.json")


def test_who_wants_to_know_again_does_not_ask_again(monkeypatch: pytest.MonkeyPatch) -> None:
    with hub(503, monkeypatch):
        pass
    with pytest.raises(ConnectionError) as first:
        check_reachable("nobody/none", "config.json")
    monkeypatch.setattr("app.hub.file_exists", lambda *_: pytest.fail("asked again"))
    with pytest.raises(ConnectionError) as second:
        check_reachable("nobody/none", "tokenizer_config.json")
    assert str(first.value) == str(second.value)


@pytest.mark.parametrize("path", ["runs/x/y/model", "./model", "../model", "/nowhere/model", "~/nowhere"])
def test_what_no_hub_has_is_a_directory_that_is_missing(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with hub(404, monkeypatch) as asked, pytest.raises(NoDirectoryError, match=f"there is no directory '{path}'"):
        check_reachable(path, "config.json")
    assert asked == []


def test_a_name_beside_what_is_here_may_be_meant_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    assert may_be_meant_here("runs/modle")
    assert not may_be_meant_here("nobody/none") and not may_be_meant_here("gpt2")


@pytest.mark.parametrize("status", [404, 401, 503, 429])
def test_what_it_answers_is_for_others_to_tell(status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who asks again may hear more."""
    with hub(status, monkeypatch) as asked:
        check_reachable("nobody/none", "config.json")
        assert asked == ["/nobody/none/resolve/main/config.json"]


def test_what_came_before_is_not_asked_about(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever of its files that is."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    with hub(404, monkeypatch) as asked:
        check_reachable("some/model", "tokenizer_config.json")
        kept = tmp_path / "models--some--model" / "snapshots" / "0"
        kept.mkdir(parents=True)
        (kept / "config.json").write_text("{}")
        check_reachable("some/model", "tokenizer_config.json")
    assert len(asked) == 1


def test_what_is_here_is_not_asked_about(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with hub(503, monkeypatch) as asked:
        check_reachable(str(tmp_path), "config.json")
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
        check_reachable("nobody/none", "config.json")
    assert asked == []
