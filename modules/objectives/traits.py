"""What an objective asks of its surroundings beyond its parameters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from modules.objectives.aggregation import Aggregation

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True)
class Traits:
    """Attributes:
    aggregation: the one its paper uses, when the user names none.
    whole_step: it has to see all sequences of an optimizer step at once (costs a forward pass).
    sequence_ratio: its ratio is one of whole sequences, so corrections are by default, too (`level: geometric`).
    compares_episodes: of a group, so that a batch whose groups all have a single one teaches nothing, and is refused.
    """

    aggregation: Aggregation = "token_mean"
    whole_step: bool = False
    sequence_ratio: bool = False
    compares_episodes: bool = False


def traits(
    aggregation: Aggregation = "token_mean",
    whole_step: bool = False,
    sequence_ratio: bool = False,
    compares_episodes: bool = False,
) -> Callable[[F], F]:
    """Decorates an objective with its `Traits`."""

    def decorate(function: F) -> F:
        function.traits = Traits(aggregation, whole_step, sequence_ratio, compares_episodes)  # type: ignore[attr-defined]
        return function

    return decorate


def traits_of(function: Callable[..., Any]) -> Traits:
    """Those of an objective; the defaults for a function without any."""
    asked: Traits = getattr(function, "traits", Traits())
    return asked
