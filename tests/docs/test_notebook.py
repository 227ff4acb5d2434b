"""A fit in a notebook: one process, and functions that are written in a cell, of which there is no file."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "configuration.md").read_text()
(CELL,) = (one for one in re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL) if "pl.Trainer" in one)
BEGIN = 'import sys\nsys.ps1 = ">>> "\n'  # by which Lightning knows one
END = 'print("reward", float(trainer.callback_metrics["reward"]), "steps", trainer.global_step)\n'
MODEL = """config={
    "model_type": "qwen3", "num_hidden_layers": 1, "hidden_size": 16, "intermediate_size": 16,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8,
}"""


@pytest.mark.parametrize("devices", [1, 2])
def test_a_fit(devices: int, tmp_path: Path) -> None:
    given = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    cell = CELL.replace('path="my_model"', MODEL).replace('tokenizer="my_model"', 'tokenizer="char:0123456789+-*="')
    cell = cell.replace("devices=1", f'accelerator="cpu", devices={devices}')
    cell = re.sub(r"return float\(.*\)", "return 0.625", cell)
    done = subprocess.run(
        [sys.executable, "-"],
        input=BEGIN + cell + END,
        env=given,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
    )
    if devices == 1:
        assert "reward 0.625 steps 2" in done.stdout, done.stderr[-3000:]
    else:
        assert "make 2 ranks, and a notebook has one process" in done.stderr, done.stderr[-3000:]
