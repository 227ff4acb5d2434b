"""Which model judges, how it is asked, and what it may cost: the nested `model` of a judge's configuration.

Promises: cheap to import; an option out of range or without effect is refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from app import checks


class JudgeError(RuntimeError):
    """A judge gave no verdict; the message says why, in words that follow "the judge"."""


class BudgetSpent(JudgeError):
    """What the judge may use is used up. No later question will be answered either."""


@dataclass(frozen=True)
class Budget:
    """What a run may use, all its launches together: one that goes on begins with what its checkpoint says (what was
    used after that is not known to it). Verdicts from the cache are free; requests that fail count.

    Attributes:
        max_calls: requests; never exceeded.
        max_tokens: of prompts and answers together, as the server counts them. Looked at before a request, so those in
            flight may exceed it by what they use.
        max_cost: as `max_tokens`, in the currency of the prices.
        input_price, output_price: of 10^6 tokens.

    Raises:
        ValueError: out of range, or a cost without prices.
    """

    max_calls: int | None = None
    max_tokens: int | None = None
    max_cost: float | None = None
    input_price: float | None = None
    output_price: float | None = None

    def __post_init__(self) -> None:
        checks.at_least(1, {"budget.max_calls": self.max_calls, "budget.max_tokens": self.max_tokens})
        checks.positive({"budget.max_cost": self.max_cost})
        checks.at_least(0, {"budget.input_price": self.input_price, "budget.output_price": self.output_price})
        if (self.input_price is None) != (self.output_price is None):
            raise ValueError("budget.input_price and budget.output_price: set both or none")
        if self.max_cost is not None and self.input_price is None:
            raise ValueError("budget.max_cost needs budget.input_price and budget.output_price; set them")


@dataclass(frozen=True)
class JudgeModel:
    """A model behind an OpenAI-compatible URL (a provider, a server of SGLang or vLLM, `arborist serve --chat`).

    Attributes:
        url: with its `/v1`.
        name: of the model there.
        key_variable: environment variable that holds the key; one that is not set means none, as for servers of
            one's own.
        temperature: of its answers; None leaves it to the server, for models that refuse the field.
        max_tokens: most tokens of an answer, its reasoning included.
        structured: "json_schema" asks the server to hold the answer to the verdict's form; "off" relies on the
            instructions alone; "auto" asks, and stops asking where the server refuses the field.
        deadline_s: seconds one verdict may take, all attempts and the waits between them included; waiting for one of
            `max_concurrent` places is not. Keep `limits.episode_deadline_s` above it.
        attempt_s: seconds one request may take.
        misreadings: how many answers in a row may be none before the verdict counts as refused.
        max_concurrent: requests in flight.
        cache: file (SQLite) that keeps verdicts by everything they depend on, across runs; None for none. Not for a
            model whose weights change under one name.
        request: further fields of the request's body, `{reasoning_effort: low}` say.
        budget: what it may use.

    Raises:
        ValueError: an option out of range.
    """

    url: str
    name: str
    key_variable: str = "OPENAI_API_KEY"
    temperature: float | None = 0.0
    max_tokens: int = 1024
    structured: Literal["auto", "json_schema", "off"] = "auto"
    deadline_s: float = 120.0
    attempt_s: float = 60.0
    misreadings: int = 1
    max_concurrent: int = 16
    cache: str | None = None
    request: Mapping[str, Any] = field(default_factory=dict)
    budget: Budget = Budget()

    def __post_init__(self) -> None:
        if not self.url.startswith(("http://", "https://")):
            raise ValueError(f"model.url: {self.url!r} is no URL; give it as http://host:port/v1")
        if not self.name:
            raise ValueError("model.name: empty; name the model as the server does")
        checks.at_least(0, {"model.temperature": self.temperature, "model.misreadings": self.misreadings})
        checks.at_least(1, {"model.max_tokens": self.max_tokens, "model.max_concurrent": self.max_concurrent})
        checks.one_of("model.structured", self.structured, ("auto", "json_schema", "off"))
        checks.deadline({"model.deadline_s": self.deadline_s, "model.attempt_s": self.attempt_s})
        ours = [one for one in ("model", "messages", "response_format", "temperature", "stream") if one in self.request]
        if ours:
            raise ValueError(f"model.request.{ours[0]}: is filled in by the judge; use the option for it, or remove it")
