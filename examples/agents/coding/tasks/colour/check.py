"""Ends with 0 where the colour was changed, and nothing else."""

from pathlib import Path

assert Path("notes.txt").read_text().split() == ["colour:", "blue", "size:", "3"]
