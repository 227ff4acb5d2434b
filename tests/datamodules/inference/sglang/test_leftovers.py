"""What servers leave behind them in shared memory."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from datamodules.inference.sglang.server import leftovers


def test_shared_memory_of_a_group_is_found_and_nobody_elses() -> None:
    name = f"/dev/shm/sglang_test_{os.getpid()}"
    code = f"import sys; f = open('{name}', 'w'); g = open('{name}_other', 'w'); print(flush=True); sys.stdin.read()"
    child = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
    )
    try:
        assert child.stdout is not None
        child.stdout.readline()
        found = leftovers.shared_memory(child.pid)
        assert found == {Path(name), Path(f"{name}_other")}
        assert Path(name) not in leftovers.shared_memory(os.getpgrp())
        leftovers.kill(child.pid)
        assert child.wait(10) == -9
        leftovers.remove(found)
        assert not Path(name).exists()
    finally:
        child.kill()
        leftovers.remove({Path(name), Path(f"{name}_other")})
