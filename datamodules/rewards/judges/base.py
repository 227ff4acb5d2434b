"""What a judge is: a reward that is asked in the trainer's own process, since what it does is to wait.

Promises: it is asked for `verdicts` of one reply, or, where `is_relative`, of all replies of a group together.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple, Protocol

from datamodules.prompts.base import Prompt
from datamodules.rewards.judges.client import JudgeClient, Spent
from datamodules.rewards.judges.model import JudgeModel
from datamodules.rewards.judges.policy import PolicyClient, PolicyModel


class Verdict(NamedTuple):
    """What a reply is worth.

    Attributes:
        value: of the whole.
        parts: what it is made of, by name.
        turns: what each call of a transcript earns on top; see `Judgement`.
    """

    value: float
    parts: dict[str, float]
    turns: tuple[float, ...] = ()


class Client(Protocol):
    """What a judge's questions go through, for one launch. Attributes: spent, what the run used so far."""

    spent: Spent

    def open(self) -> None:
        """Joins the running event loop. Raises ValueError: what it needs cannot be used."""

    def close(self) -> None:
        """Lets go of what it holds. Idempotent."""

    @property
    def exhausted(self) -> str:
        """Why no question will be answered any more; "" while they are."""


class Judge(ABC):
    """Gives rewards by asking a model.

    Attributes:
        model: which one, and how it is asked, of judges that answer in words.
        verifier: a plain reward of the same replies, or None. Where there is one it is asked too: its number is the
            part `verifier`, the judge's less its the part `drift`, and held-out episodes are scored by it alone, so
            that validation is what no reply can talk a judge into.
        is_relative: it compares the replies of a group, and has nothing to say of one alone.
        repeats: how many verdicts of its model make one of a reply; None of judges without that option.
    """

    model: JudgeModel | PolicyModel
    verifier: Callable[[Prompt, str], float] | None
    is_relative: ClassVar[bool] = False
    repeats: int | None = None

    def beside(self, verified: Sequence[float], judged: Sequence[float]) -> list[dict[str, float]]:
        """The parts that say how the judge's numbers stand to the verifier's, of replies judged together."""
        return [{"verifier": true, "drift": own - true} for true, own in zip(verified, judged, strict=True)]

    def client(self) -> Client:
        """A new client of its model. Raises ImportError, ValueError as that."""
        return PolicyClient(self.model) if isinstance(self.model, PolicyModel) else JudgeClient(self.model)

    @abstractmethod
    async def verdicts(self, client: Any, prompt: Prompt, replies: Sequence[Any]) -> list[Verdict]:
        """One for each reply, in their order.

        Args:
            client: what `client` gave, open.
            prompt: the task.
            replies: texts, or transcripts as `material.readable` takes them; one alone unless `is_relative`.

        Raises:
            JudgeError: there is none, and why.
        """
