"""What the model calls inside `TreeEngine` passes: the attention function, its backends, the cache of the path."""

from app.tree.attention.function import BACKENDS, choose_backend, tree_attention_on

__all__ = ["BACKENDS", "choose_backend", "tree_attention_on"]
