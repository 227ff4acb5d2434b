"""Run by a test as a user's script: `python launch_script.py DIRECTORY`; Lightning starts the second process itself."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from tests.app.strategies.toy_module import fit

if __name__ == "__main__":
    result = fit(Path(sys.argv[1]), devices=2, steps=3)
    rank = torch.distributed.get_rank()
    torch.save(
        {**result["parameters"], "listening": result["seen"][-1]["listening"]}, Path(sys.argv[1]) / f"rank{rank}.pt"
    )
