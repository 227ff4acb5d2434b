"""From hidden states to outputs and back: the output projection in blocks of rows, and the value head."""

from app.tree.heads.heads import Heads, Kept
from app.tree.heads.soft import Likeliest, Soft, SoftTargets, refuse_soft

__all__ = ["Heads", "Kept", "Likeliest", "Soft", "SoftTargets", "refuse_soft"]
