"""Attention to keys that were chosen for each query, or made of many tokens."""
