"""Layers that carry a state from token to token (convolutions over time, linear attention), over trees of pieces."""
