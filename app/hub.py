"""Whether a hub can be reached, asked once, before libraries ask for a model's files again and again.

Promises: nothing is fetched; what is a directory here, came from the hub before, or is a path and no name of a hub, is
not asked about; a hub that is not reached is asked once for a name, whoever wants to know. One that answers anything,
late or with an error, is left to the libraries, which ask again. Imports nothing of the project.
"""

from __future__ import annotations

from pathlib import Path

from huggingface_hub import constants, file_exists
from huggingface_hub.file_download import repo_folder_name

_NOT_REACHED = ("ConnectError", "ConnectTimeout", "ProxyError")
"""Of the hub's HTTP client, whose package changes with its release (httpx, httpx2)."""


_silent: dict[tuple[str, str], str] = {}
"""Names that were asked for in vain, with their hub, and why: each caller's waiting would be the same again."""


class NoDirectoryError(FileNotFoundError):
    """What is looked for can only be a directory, and there is none."""


def check_reachable(path: str, file: str) -> None:
    """Where nobody answers, transformers asks for half a minute for every file.

    Args:
        path: a directory, or a name on the hub.
        file: of those that it has there, that which is read first.

    Raises:
        NoDirectoryError: it is not here, and no hub has such names.
        ConnectionError: it is not here, and there is no connection to a hub.
    """
    if Path(path).is_dir():
        return
    if path.startswith((".", "/", "~")) or path.count("/") > 1:
        raise NoDirectoryError(f"there is no directory '{path}'")
    if constants.HF_HUB_OFFLINE or _came_before(path):
        return
    asked = (constants.ENDPOINT, path)
    if asked not in _silent:
        try:
            file_exists(path, file)  # one request
        except Exception as error:  # else it has answered, or will; or no hub has such a name, as transformers says
            if type(error).__name__ in _NOT_REACHED:
                _silent[asked] = str(error) or type(error).__name__
    if asked in _silent:
        raise ConnectionError(f"{constants.ENDPOINT} does not answer ({_silent[asked]})")


def may_be_meant_here(path: str) -> bool:
    """Whether a name that a hub may have looks like a directory's too: the one it would be in is here."""
    return "/" in path and Path(path).parent.is_dir()


def _came_before(path: str) -> bool:
    try:
        kept = Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=path, repo_type="model") / "snapshots"
        return any(kept.glob("*/*"))
    except (OSError, ValueError):  # no name of a folder either
        return False
