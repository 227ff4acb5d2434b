"""Prompts from easy to hard, on a schedule.

Promises: what is at a stream index depends on the arguments alone, so that a run resumes in the stage it was in and
two machines deal the same. Stages are counted in prompts; with `batch_size` groups a policy version, a stage of v
versions is v * batch_size prompts (a few less where groups are dropped: their prompts are used up too).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import accumulate, chain, pairwise
from typing import Any

from datamodules.prompts.base import Prompt, PromptSource
from datamodules.prompts.order import DealingOrder

STAGE = "stage"
"""Key of a prompt's metadata with the number of its stage, from 0."""


class _Staged(PromptSource):
    """Stages one after the other; the last one goes on for ever."""

    def __init__(self, owner: str, stages: int, stage_prompts: int | list[int]) -> None:
        lengths = [stage_prompts] * (stages - 1) if isinstance(stage_prompts, int) else list(stage_prompts)
        if len(lengths) != stages - 1 or any(length < 1 for length in lengths):
            raise ValueError(
                f"{owner}.stage_prompts: {stage_prompts}, give the prompts (at least 1) of all {stages} stages but the"
                " last, which has no end; or one number for all of these"
            )
        self._starts = [0, *accumulate(lengths)]

    @property
    def size(self) -> int | None:
        return None

    def _stage(self, index: int) -> tuple[int, int]:
        """The stage at a stream index, and the position in it."""
        stage = max(k for k, start in enumerate(self._starts) if start <= index)
        return stage, index - self._starts[stage]


class CurriculumPrompts(_Staged):
    """The prompts of one source by their difficulty: stage k deals the easiest `shares[k]` of them, shuffled.

    Args:
        prompts: the source, with an end.
        difficulty: key of its prompts' metadata with a number, larger for harder; dots lead into nested records.
        shares: of each stage, rising, the last 1.0 (or less, to leave the hardest out).
        stage_prompts: prompts dealt in each stage but the last; one number for all, or one for each.
        seed: of the order within a stage.

    Raises:
        ValueError: an argument out of range, a prompt without difficulty.
    """

    def __init__(
        self,
        prompts: PromptSource,
        difficulty: str,
        stage_prompts: int | list[int],
        shares: tuple[float, ...] = (0.25, 0.5, 0.75, 1.0),
        seed: int = 0,
    ) -> None:
        if prompts.size is None:
            raise ValueError(
                f"CurriculumPrompts.prompts: '{prompts.name}' has no end, so there is no easiest part of it; give it a"
                " size, or use StagedPrompts with a source a stage"
            )
        rising = all(a < b for a, b in pairwise(shares))
        if len(shares) < 2 or not rising or not 0 < shares[0] <= shares[-1] <= 1:
            raise ValueError(f"CurriculumPrompts.shares: {list(shares)}, must be two or more that rise, in (0, 1]")
        super().__init__("CurriculumPrompts", len(shares), stage_prompts)
        self.prompts = prompts
        order = sorted((_difficulty(one, difficulty), k) for k, one in enumerate(prompts.first(prompts.size)))
        self._easiest_first = [k for _, k in order]
        pools = [max(1, round(share * len(order))) for share in shares]
        self._orders = [DealingOrder(pool, True, f"{seed}/{k}") for k, pool in enumerate(pools)]

    @property
    def name(self) -> str:
        return self.prompts.name

    def deal(self, index: int) -> Prompt:
        stage, at = self._stage(index)
        return _in_stage(self.prompts.deal(self._easiest_first[self._orders[stage].at(at)]), stage)

    def samples(self) -> Iterator[Prompt]:
        return self.prompts.samples()


class StagedPrompts(_Staged):
    """A source a stage, each dealt from its beginning: procedural tasks that grow harder, say.

    Args:
        sources: of the stages, two or more.
        stage_prompts: prompts dealt in each stage but the last; one number for all, or one for each.

    Raises:
        ValueError: an argument out of range.
    """

    def __init__(self, sources: list[PromptSource], stage_prompts: int | list[int]) -> None:
        if len(sources) < 2:
            raise ValueError("StagedPrompts.sources: give at least two, or use the one as it is")
        super().__init__("StagedPrompts", len(sources), stage_prompts)
        self.sources = sources

    @property
    def name(self) -> str:
        return ">".join(dict.fromkeys(source.name for source in self.sources))

    def deal(self, index: int) -> Prompt:
        stage, at = self._stage(index)
        return _in_stage(self.sources[stage].deal(at), stage)

    def samples(self) -> Iterator[Prompt]:
        return chain.from_iterable(source.samples() for source in self.sources)


def _in_stage(prompt: Prompt, stage: int) -> Prompt:
    return replace(prompt, metadata={**prompt.metadata, STAGE: stage})


def _difficulty(prompt: Prompt, path: str) -> float:
    value: Any = prompt.metadata
    for part in [path] if path in prompt.metadata else path.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    try:
        number = float(value)
        if not math.isfinite(number):  # which has no place in an order
            raise ValueError
        return number
    except (TypeError, ValueError, OverflowError):
        raise ValueError(
            f"CurriculumPrompts.difficulty: prompt '{prompt.id}' has {value!r} at '{path}' in its metadata, which has"
            f" {', '.join(prompt.metadata) or 'nothing'}; name a field with a number"
        ) from None
