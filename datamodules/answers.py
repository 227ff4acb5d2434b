"""The final answer of a completion, for majority votes: completions with equal answers vote together.

Promises: functions from text to text, "" for no answer (which casts no vote); each is a name for the YAML key
`validation.answer`.
"""

from __future__ import annotations

from collections import deque

from datamodules.files.expressions import Pattern
from datamodules.rewards.functions import readings

_LARGEST_EXPONENT = 1000


def whole_text(completion: str) -> str:
    """The completion, white space around it aside."""
    return completion.strip()


def math_answer(completion: str) -> str:
    """What math-verify takes for the answer (see `datamodules.rewards.math_verify`), written one way: "0.50" and
    "$\\boxed{1/2}$" are both "1/2". To be called in the main thread of a process, as the library's time limits need."""
    import math_verify
    import sympy

    found = math_verify.parse(readings(completion)[0])
    if not found:
        return ""
    value = found[0]
    # A power is taken in one piece, which no signal interrupts: 1.5**99999999 as a fraction takes minutes.
    small = isinstance(value, sympy.Expr) and all(
        power.exp.is_Rational and abs(power.exp) <= _LARGEST_EXPONENT for power in value.atoms(sympy.Pow)
    )
    if small and value.is_number and value.is_finite:
        value = sympy.nsimplify(value, rational=True)
    return str(value).strip()


class RegexAnswer:
    """What the first group of the last match of `pattern` holds ("." matches line ends too), such as
    '<answer>(.*?)</answer>'.

    Raises:
        ValueError: no regular expression with a group.
    """

    def __init__(self, pattern: str) -> None:
        self.pattern = Pattern(pattern, "RegexAnswer.pattern", dotall=True)

    def __call__(self, completion: str) -> str:
        try:
            found = deque(self.pattern.find(completion), maxlen=1)
        except ValueError:  # past the deadline: a completion that defeats the pattern has no vote
            return ""
        return (found[0] or "").strip() if found else ""
