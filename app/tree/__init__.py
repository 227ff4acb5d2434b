"""Dynamic Tree Attention as a library: train on sequences that share prefixes, computing each prefix once.

Needs torch and transformers only; knows no RL and no Lightning. See `PrefixTree`, `TreeEngine`, `partition`.
"""

from app.tree.engine import TreeEngine
from app.tree.outputs import FlatOutputs, SequenceOutputs, TreeOutputs
from app.tree.partition import partition
from app.tree.prefix_tree import PrefixTree
from app.tree.self_check import SelfCheckError

__all__ = ["FlatOutputs", "PrefixTree", "SelfCheckError", "SequenceOutputs", "TreeEngine", "TreeOutputs", "partition"]
