"""Whether a hub answers, asked once, before libraries ask for a model's files again and again.

Promises: nothing is fetched; what is a directory here, or came from the hub before, is not asked about. Imports nothing
of the project.
"""

from __future__ import annotations

from pathlib import Path

from huggingface_hub import constants, file_exists, try_to_load_from_cache
from huggingface_hub.errors import HfHubHTTPError, HFValidationError

_OVERLOADED = 429


def check_reachable(path: str, file: str) -> None:
    """Where nobody answers, transformers asks for half a minute for every file.

    Args:
        path: a directory, or a name on the hub.
        file: of those that it has there, that which is read first.

    Raises:
        ConnectionError: it is not here, and no hub answers.
    """
    if Path(path).is_dir() or constants.HF_HUB_OFFLINE:
        return
    try:
        if try_to_load_from_cache(path, file) is None:
            file_exists(path, file)  # one request
    except HFValidationError:  # no name that a hub has; transformers says so without asking
        return
    except Exception as error:  # of the HTTP client's own classes, which differ from release to release
        status = error.response.status_code if isinstance(error, HfHubHTTPError) else _OVERLOADED
        if status < 500 and status != _OVERLOADED:  # it has answered, and refuses
            return
        raise ConnectionError(f"{constants.ENDPOINT} does not answer ({str(error) or type(error).__name__})") from error
