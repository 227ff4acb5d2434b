"""`arborist bench tree [--model CONFIG] [--data FILE] [--out DIR]`: time and memory of tree training, side by side with
dense, dense-leaf, path-at-a-time and sparse, for any Hugging Face configuration and any recorded rollouts.

Promises: weights are random and nothing is downloaded; progress is printed while it runs; it ends within --minutes,
naming what it left out. `arborist bench tree --help` lists the options.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

_CHECKOUT = Path(__file__).resolve().parents[2]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the verbs of `arborist bench`.

    Raises:
        ValueError: this installation lacks the benchmarks.
    """
    if not (_CHECKOUT / "benchmarks" / "tree" / "__main__.py").is_file():
        raise ValueError(
            f"bench: the benchmarks are part of the checkout, and {_CHECKOUT} has none; clone the repository and"
            " install it with pip install -e"
        )
    if str(_CHECKOUT) not in sys.path:
        sys.path.append(str(_CHECKOUT))
    from benchmarks.tree import __main__ as tree

    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    verb = verbs.add_parser(
        "tree",
        help="time, memory and exactness of the tree engine against its baselines",
        description=tree.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    tree.add_arguments(verb)


def run(arguments: argparse.Namespace) -> None:
    """Measures, prints and writes."""
    from benchmarks.tree import __main__ as tree

    tree.run(arguments)
