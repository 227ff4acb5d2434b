"""From hidden states to outputs and back: the output projection in blocks of rows, and the value head."""

from app.tree.heads.heads import Heads, Kept

__all__ = ["Heads", "Kept"]
