"""Several prompt sources as one, in fixed proportions.

Promises: what is at a stream index depends on the sources and their weights alone; the proportions hold on every
stretch of the stream, not just in the long run, so that batches are alike; each source is dealt in its own order
without gaps, and starts over on its own.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from math import gcd

from app import checks
from datamodules.prompts.base import Prompt, PromptSource

SOURCE = "source"
"""Key of a prompt's metadata with the name of the mixed source it is from."""

_log = logging.getLogger(__name__)
_MOST = 1000  # prompts in which the proportions come round


class MixedPrompts(PromptSource):
    """Prompts of all `sources`, each with `metadata["source"]`, its source's name (which `rewards.BySource` reads).

    Args:
        sources: name -> source, at least two.
        weights: name -> share of the prompts, in any unit, rounded to 1/1000 of the whole; 1.0 for those not named.

    Raises:
        ValueError: fewer than two sources, a weight of none of them or not above 0, or one that rounds to nothing.
    """

    def __init__(self, sources: dict[str, PromptSource], weights: dict[str, float] | None = None) -> None:
        if len(sources) < 2:
            raise ValueError(f"MixedPrompts.sources: {list(sources)}; name at least two, or use the one as it is")
        for name, source in sources.items():
            if not isinstance(source, PromptSource):
                raise ValueError(f"MixedPrompts.sources.{name}: {type(source).__name__} is no PromptSource")
        stray = [name for name in weights or {} if name not in sources]
        if stray:
            raise ValueError(f"MixedPrompts.weights: '{stray[0]}' is none of the sources {list(sources)}")
        self.sources = sources
        self._told = False
        shares = [(weights or {}).get(name, 1.0) for name in sources]
        weighed = {f"MixedPrompts.weights.{name}": share for name, share in zip(sources, shares)}
        checks.positive(weighed, "; leave the source out instead")
        self._counts = _rounded(shares)
        if 0 in self._counts:
            name = list(sources)[self._counts.index(0)]
            raise ValueError(f"MixedPrompts.weights.{name}: below 1/{_MOST} of the whole; raise it or leave it out")
        self._period = _spread(self._counts)
        seen = [0] * len(sources)
        self._rank = []  # how many of its source come before it in the period
        for which in self._period:
            self._rank.append(seen[which])
            seen[which] += 1

    @property
    def name(self) -> str:
        return "+".join(self.sources)

    @property
    def size(self) -> int | None:
        return None  # the sources start over at different times

    def deal(self, index: int) -> Prompt:
        lap, at = divmod(index, len(self._period))
        which = self._period[at]
        name = list(self.sources)[which]
        return self._named(name, self.sources[name].deal(lap * self._counts[which] + self._rank[at]))

    def samples(self) -> Iterator[Prompt]:
        for name, source in self.sources.items():
            for prompt in source.samples():
                yield self._named(name, prompt)

    def _named(self, name: str, prompt: Prompt) -> Prompt:
        if not self._told and prompt.metadata.get(SOURCE, name) != name:
            self._told = True
            _log.warning(
                "MixedPrompts: metadata['%s'] is the name of a prompt's source ('%s'), and takes the place of what %s"
                " holds in a field of that name (%.100r); rename the field if the reward is to see it",
                *(SOURCE, name, prompt.id, prompt.metadata[SOURCE]),
            )
        return replace(prompt, id=f"{name}/{prompt.id}", metadata={**prompt.metadata, SOURCE: name})


def _rounded(shares: list[float]) -> list[int]:
    """Whole numbers in the proportions of `shares`, as small as they can be and at most 1000 together."""
    exact = [share / sum(shares) * _MOST for share in shares]
    counts = [int(value) for value in exact]
    rest = sorted(range(len(exact)), key=lambda k: counts[k] - exact[k])[: _MOST - sum(counts)]
    for k in rest:
        counts[k] += 1
    common = gcd(*counts)
    return [count // common for count in counts]


def _spread(counts: list[int]) -> list[int]:
    """Each k `counts[k]` times, as evenly as can be: whoever is furthest behind its share is next."""
    total = sum(counts)
    credit = [0] * len(counts)
    order = []
    for _ in range(total):
        credit = [have + count for have, count in zip(credit, counts)]
        which = credit.index(max(credit))
        credit[which] -= total
        order.append(which)
    return order
