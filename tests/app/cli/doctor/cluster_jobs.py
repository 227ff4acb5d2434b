"""Processes that are examined as tasks of SLURM (importable, hence not in a test file)."""

from __future__ import annotations

import io
import os
from contextlib import redirect_stderr, redirect_stdout
from unittest.mock import patch

import torch.distributed as dist

from app.cli import main

HIDDEN = ("LOCAL_RANK", "RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "SLURM_NTASKS")


def as_slurm_tasks(port: int, options: list[list[str] | None]) -> tuple[object, str]:
    """What a task of two, each with its `options` (None: it does not come), ends with and prints; as srun starts it."""
    rank = dist.get_rank()
    mine = options[rank]
    dist.barrier()
    dist.destroy_process_group()  # it makes its own
    if mine is None:
        return None, ""
    variables = {"NTASKS": 2, "NTASKS_PER_NODE": 2, "JOB_NAME": "doctor", "JOB_ID": 4711, "NODELIST": "127.0.0.1"}
    variables |= {"PROCID": rank, "LOCALID": rank, "NODEID": 0}
    printed, code = io.StringIO(), None
    with patch.dict(os.environ), redirect_stdout(printed), redirect_stderr(printed):
        for name in (*HIDDEN, "TORCHELASTIC_RUN_ID"):
            os.environ.pop(name, None)
        os.environ.update({f"SLURM_{name}": str(value) for name, value in variables.items()}, MASTER_PORT=str(port))
        try:
            code = main(["doctor", "--cluster", *mine])
        except SystemExit as error:
            code = error.code
    return code, printed.getvalue()
