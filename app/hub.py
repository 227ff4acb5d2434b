"""Whether a hub can be reached, asked once, before libraries ask for a model's files again and again.

Promises: nothing is fetched; what is a directory here, or came from the hub before, is not asked about; a hub that
answers anything, late or with an error, is left to the libraries, which ask again. Imports nothing of the project.
"""

from __future__ import annotations

from pathlib import Path

from huggingface_hub import constants, file_exists
from huggingface_hub.file_download import repo_folder_name

_NOT_REACHED = ("ConnectError", "ConnectTimeout", "ProxyError")
"""Of the hub's HTTP client, whose package changes with its release (httpx, httpx2)."""


def check_reachable(path: str, file: str) -> None:
    """Where nobody answers, transformers asks for half a minute for every file.

    Args:
        path: a directory, or a name on the hub.
        file: of those that it has there, that which is read first.

    Raises:
        ConnectionError: it is not here, and there is no connection to a hub.
    """
    if Path(path).is_dir() or constants.HF_HUB_OFFLINE or _came_before(path):
        return
    try:
        file_exists(path, file)  # one request
    except Exception as error:  # else it has answered, or is about to; or no hub has such a name, as transformers says
        if type(error).__name__ in _NOT_REACHED:
            why = str(error) or type(error).__name__
            raise ConnectionError(f"{constants.ENDPOINT} does not answer ({why})") from error


def _came_before(path: str) -> bool:
    try:
        kept = Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=path, repo_type="model") / "snapshots"
        return any(kept.glob("*/*"))
    except (OSError, ValueError):  # no name of a folder either
        return False
