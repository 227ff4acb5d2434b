"""What every test may rely on: nothing left over from a run in this process.

Lightning leaves a seed, a launcher's variables (LOCAL_RANK, MASTER_PORT) and a process group behind. A later run
would take another seed from them, or believe that somebody else starts its ranks and wait for them.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest
import torch.distributed as dist

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # in the background of a script; the ranks of tests inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def _a_clean_process() -> Iterator[None]:
    before = dict(os.environ)
    had_group = dist.is_initialized()
    yield
    if dist.is_initialized() and not had_group:
        dist.destroy_process_group()
    os.environ.clear()
    os.environ.update(before)
