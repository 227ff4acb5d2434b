"""Layers of experts: which of them tokens went to when they were sampled, and how a pass sends them there again."""
