"""Reward functions: `(prompt, completion) -> Reward`, run in worker processes by `RewardPool`.

Promises: a reference answer that cannot be judged by raises (its group is dropped and counted) instead of scoring 0 in
silence; a completion without an answer is wrong, 0.0, and so is one that cannot be read within bounds, which is
counted: no completion makes its own group vanish.
"""

from __future__ import annotations

import logging
import math
import re
import signal
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from decimal import Decimal
from types import CoroutineType
from typing import Any, TypeAlias

from app.text import well_formed
from datamodules.processes.foreign import described
from datamodules.processes.worker import NotAnAnswer
from datamodules.prompts.base import Prompt
from datamodules.rewards.options import FEEDBACK

_MATH_S = 3.0
_RINGS_AGAIN_S = 0.1
_MOST_SAID = 20_000
_UNREADABLE: list[bool] = []  # a worker judges one completion at a time

Reward: TypeAlias = float | tuple[float, dict[str, float | str]]
"""A number; or a number and what it is made of, by name, which is logged as `reward/<name>`. Text under the name
"feedback" is what there is to say of the completion in words (a failed test, say): it is kept with the episode, and a
teacher may be shown it (`RLVRWorkflow.hint`)."""


def exact_match(prompt: Prompt, completion: str) -> float:
    """1.0 when the completion is the prompt's answer, white space around both aside; else 0.0.

    Raises:
        ValueError: the prompt has no answer, which an empty completion would be.
    """
    return float(completion.strip() == _reference(prompt))


def _reference(prompt: Prompt) -> str:
    if not (answer := prompt.answer.strip()):
        raise ValueError(f"prompt '{prompt.id}' has no answer to compare with; set answer_field, or another reward")
    return answer


def math_verify(prompt: Prompt, completion: str) -> float:
    """1.0 when the completion's answer equals the prompt's, as mathematics (library math-verify).

    Its answer is a last line "#### ..." (GSM8K's mark), whole: "(1, 2)", "1/2" and "1 or 2" are no 2. Else it is what
    the library takes for one: boxed, announced ("the answer is ..."), or the last expression, where "(1, 2)" is no 2
    either. Of several boxes the last counts, or those in a row with it: "\\boxed{1} and \\boxed{2}" are two answers,
    what was boxed on the way is none; all of them where the prompt's answer is several ("1, 2"). "1,000", "1000.0" and
    "$\\boxed{1000}$" are equal; so are "1 1/2", "3/2" and "1.5"; so are "23 + 75" and "98": where the question is an
    expression itself, repeating it is right, and a model learns to. An answer that the library cannot read or compare
    within 3 s of processor time (a tower of powers, say) is wrong and counted (`note_unreadable`). That limit is a
    signal: it needs the main thread, where the pool runs its rewards.

    Raises:
        ValueError: the prompt's answer is no mathematical expression, or cannot be compared with itself.
    """
    import math_verify as library

    reference: Any = []
    try:
        with _processor_time(_MATH_S):
            answer = _plain(prompt.answer)
            reference = library.parse(_mathematical(answer), parsing_timeout=None, raise_on_error=True)
    except (Exception, _OutOfTime) as error:
        raise _no_reference(prompt, described(error)) from error
    if not reference:
        raise _no_reference(prompt, "it holds no expression")
    try:
        with _processor_time(_MATH_S):
            for said in readings(completion, answer):
                found = library.parse(said, parsing_timeout=None, raise_on_error=True)
                if found and _equal(reference, found):
                    return 1.0
            return 0.0
    except (Exception, _OutOfTime):
        try:
            with _processor_time(_MATH_S):
                _equal(reference, reference)
        except (Exception, _OutOfTime) as error:
            raise _no_reference(prompt, described(error)) from error
        note_unreadable()
        return 0.0


def _prepare_math_verify() -> None:
    """Seconds of imports, which other rewards need not pay and which are no call's fault."""
    import math_verify as library

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that it has no limits of its own
    library.parse("$1$", parsing_timeout=None)


math_verify.prepare = _prepare_math_verify  # type: ignore[attr-defined]


def _equal(reference: Any, found: Any) -> bool:
    import math_verify as library

    return bool(library.verify(reference, found, timeout_seconds=None, raise_on_error=True))


def _no_reference(prompt: Prompt, why: str) -> ValueError:
    return ValueError(
        f"the answer of prompt '{prompt.id}', {prompt.answer[:200]!r}, is no mathematical expression: {why}"
    )


class _OutOfTime(BaseException):
    """No Exception: libraries catch those in the middle of their work."""


@contextmanager
def _processor_time(seconds: float) -> Iterator[None]:
    """Raises _OutOfTime inside once this process has computed for so long. Waiting, for a busy machine say, is free.

    It rings again: what is raised inside of a weak reference's callback or a `__del__` is printed and forgotten.
    """
    over = False

    def ring(number: int, frame: object) -> None:
        if not over:
            raise _OutOfTime(f"not done after {seconds:g} s of processor time")

    before = signal.signal(signal.SIGPROF, ring)
    signal.setitimer(signal.ITIMER_PROF, seconds, _RINGS_AGAIN_S)
    try:
        try:
            yield
        finally:
            over = True
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def note_unreadable() -> None:
    """Called by a reward: nobody could read this completion, which counts as wrong. Logged as `reward/unreadable`."""
    _UNREADABLE.append(True)


def was_unreadable() -> bool:
    """Whether `note_unreadable` was called since the last time this was asked."""
    found = bool(_UNREADABLE)
    _UNREADABLE.clear()
    return found


class RegexMatch:
    """1.0 when the completion has the asked-for form, else 0.0.

    Args:
        pattern: regular expression ("." matches line ends too). If it has a group named "answer", what that finds must
            be the prompt's answer too, white space around both aside.
        whole: the whole completion must match; False looks for the last place where it does.

    Raises:
        ValueError: no regular expression; (when called) a group "answer" and a prompt without one.
    """

    def __init__(self, pattern: str, whole: bool = True) -> None:
        try:
            self.pattern = re.compile(pattern, re.DOTALL)
        except re.error as error:
            raise ValueError(f"RegexMatch.pattern: {pattern!r} is no regular expression: {error}") from None
        self.whole = whole

    def __call__(self, prompt: Prompt, completion: str) -> float:
        matches = [self.pattern.fullmatch(completion)] if self.whole else [None, *self.pattern.finditer(completion)]
        found = matches[-1]
        if "answer" not in self.pattern.groupindex:
            return float(found is not None)
        reference = _reference(prompt)
        return float(found is not None and (found["answer"] or "").strip() == reference)


class WeightedSum:
    """A sum of rewards, each part of it logged under its name (before weighting).

    Args:
        rewards: name -> reward: an import path, or class_path and init_args. At least one. One that is itself made of
            parts contributes its total.
        weights: name -> factor; 1.0 for those not named.
        optional: names of those that may return None for a prompt to which they do not apply: that adds nothing, and
            is not in the logged mean. Of all others None is a mistake, as a forgotten `return` is.

    Raises:
        ValueError: no rewards, or a weight or an option of none of them.
        NotAnAnswer: (when called) a part that is no finite number, or none that applies.
    """

    def __init__(
        self,
        rewards: dict[str, Callable[[Prompt, str], float | None]],
        weights: dict[str, float] | None = None,
        optional: Sequence[str] = (),
    ) -> None:
        if not rewards:
            raise ValueError("WeightedSum.rewards: empty; name at least one reward")
        for option, names in (("weights", weights or {}), ("optional", optional)):
            if stray := [name for name in names if name not in rewards]:
                raise ValueError(f"WeightedSum.{option}: '{stray[0]}' is none of the rewards {list(rewards)}")
        self.rewards = rewards
        self.weights = {name: (weights or {}).get(name, 1.0) for name in rewards}
        self.optional = frozenset(optional)

    def prepare(self) -> None:
        prepare(self.rewards.values())

    def __call__(self, prompt: Prompt, completion: str) -> Reward:
        parts: dict[str, float] = {}
        said = []
        for name, reward in self.rewards.items():
            value: Reward | None = asked(reward, prompt, completion)
            if value is None and name in self.optional:
                continue
            worth, more = value if isinstance(value, tuple) and len(value) == 2 else (value, {})
            parts[name] = number(worth, f" for its part '{name}'")
            said.append(in_words(more))
        if not parts:
            raise NotAnAnswer(f"returned None for all of its parts, {', '.join(self.rewards)}: no reward", "exception")
        total = sum(self.weights[name] * part for name, part in parts.items())
        words = "\n".join(filter(None, said))
        return total, {**parts, **({FEEDBACK: words} if words and FEEDBACK not in parts else {})}


class BySource:
    """Each prompt's reward by the source it is from, for `datamodules.prompts.MixedPrompts`.

    Args:
        rewards: name of the source -> its reward: an import path, or class_path and init_args.

    Raises:
        ValueError: no rewards; (when called) a prompt of none of these sources.
    """

    def __init__(self, rewards: dict[str, Callable[[Prompt, str], float]]) -> None:
        if not rewards:
            raise ValueError("BySource.rewards: empty; give each of the mixed sources its reward")
        self.rewards = rewards

    def prepare(self) -> None:
        prepare(self.rewards.values())

    def __call__(self, prompt: Prompt, completion: str) -> Reward:
        source = prompt.metadata.get("source")
        if source not in self.rewards:
            raise ValueError(
                f"prompt '{prompt.id}' is of the source {source!r}, BySource.rewards has {', '.join(self.rewards)};"
                " name the sources as in MixedPrompts.sources"
            )
        return asked(self.rewards[source], prompt, completion)


def asked(reward: Callable[[Prompt, str], Any], prompt: Prompt, completion: str) -> Any:
    """What a reward says, an asynchronous one once it is done."""
    said = reward(prompt, completion)
    if isinstance(said, CoroutineType):
        import asyncio  # which few workers need

        return asyncio.run(said)
    return said


def in_words(parts: Any) -> str:
    """What a reward says in words, among its parts; "" for nothing. Raises NotAnAnswer where that is too much."""
    said = parts.get(FEEDBACK, "") if isinstance(parts, dict) else ""
    if not isinstance(said, str):
        return ""  # a number of that name is a part as any other
    if len(said) > _MOST_SAID:
        raise NotAnAnswer(f"returned {len(said)} characters of feedback, at most {_MOST_SAID} are taken", "exception")
    return well_formed(said)


def number(value: Any, where: str) -> float:
    """What a reward gave as a finite number. Raises NotAnAnswer, which says `where`, for what is none: text too."""
    if isinstance(value, str | bytes | bytearray):  # float() would read them
        raise NotAnAnswer(f"returned a {type(value).__name__}{where}, not a number", "exception")
    try:
        found = float(value)
    except (TypeError, ValueError, OverflowError) as error:
        said = well_formed(str(error))[:200]
        raise NotAnAnswer(f"returned a {type(value).__name__}{where}, not a number: {said}", "exception") from error
    if not math.isfinite(found):
        raise NotAnAnswer(f"returned {found}{where}", "nan")
    return found


def prepare(rewards: Iterable[Callable[..., Any]]) -> None:
    """Calls `prepare()` of those rewards that have one: what they need and no single call is to pay for."""
    for reward in rewards:
        if callable(own := getattr(reward, "prepare", None)):
            own()


def _mathematical(answer: str) -> str:
    """LaTeX outside an environment is not looked at by the library's parser."""
    return answer if "$" in answer or "\\boxed" in answer else f"${answer}$"


_MARKED = re.compile(r"^####[ \t]*(\S.*)\s*\Z", re.MULTILINE)  # GSM8K's mark, on a last line
_NUMBER = re.compile(r"[-+$\s\d.,/%]+")
_LATEX = re.compile(r"\\[A-Za-z{(]|/\d+\s*%")  # or what the library reads as LaTeX alone
_WORD = re.compile(r"[A-Za-z]{2,}")
_MIXED = re.compile(r"(?<![\w.,/^])(\d{1,9}+)[ \t]++([1-9]\d{0,8}+)/(\d{1,9}+)(?![.,/]?\d)")
_MONEY = re.compile(r"(?<!\\)\$(?=-?\d+/\d)(?![^$\n]*\$)")  # no other closes it
_END = re.compile(r"(?<=\d)(/\d++)(?:\.|\*\*)++(?!\s*\d)")  # of a sentence, or of what is bold
_ONE_NUMBER = re.compile(r"\d(?:[\d./%]|,(?=\d{3}))*")
_SIGNS = str.maketrans(
    {
        "\u2212": "-",
        **dict.fromkeys("\u00d7\u00b7\u22c5", "*"),
        "\u00f7": "/",
        "\u03c0": "\\pi ",
        **dict.fromkeys("\u00a0\u2009\u202f", " "),
    }
)
_PARTS = {"\u00bd": "1/2", "\u00bc": "1/4", "\u00be": "3/4", "\u2153": "1/3", "\u2154": "2/3"}
_VULGAR = re.compile(rf"(\d?)([{''.join(_PARTS)}])")
_POWER = re.compile(r"(?<=[\d)])[\u00b2\u00b3]")  # not of a unit, of which the library would read the number
_ROOT = re.compile(r"\u221a(\d++(?:\.\d++)?)|(?:\u221a|(?<![A-Za-z\\])sqrt)\((\d++(?:\.\d++)?)\)")
_SQRT = r"\\sqrt\{\d++(?:\.\d++)?\}"
_TERM = rf"(?:\d++(?:\.\d++)?(?:[* ]?+{_SQRT})?|{_SQRT})"
_SUM = rf"[-+]?{_TERM}(?: ?[-+*/] ?{_TERM})*+"
_TO_THE_END = r"(?=(?:[^\d$\\}]|(?<=[ a-z]m\^)[23])*+\Z)"  # no number but of a unit, and no LaTeX
# With a root, the last numbers of a text and outside of LaTeX: of "2\sqrt{3}" there the library reads the 2.
_RADICAL = re.compile(
    r"(?<![\w$\\.{}()^/+\u00b1-])(?<![\w)]\*)(?<![-+*/^\u00b1]\s)(?:"
    rf"\({_SUM}\)(?:/\d++)?|{_SUM}){_TO_THE_END}"
)
_ITEM = rf"(?:[-+]?{_ONE_NUMBER.pattern}+|(?=[^,;()\[\]]*\\sqrt){_SUM})"
# Or an interval, the last numbers of a text and outside of LaTeX.
_TUPLE = re.compile(rf"(?<![\w$\\])[(\[]\s*+{_ITEM}(?:\s*+[,;]\s*+{_ITEM})++\s*+[)\]]{_TO_THE_END}")
_SCIENTIFIC = re.compile(r"(?<![\w.,])(\d{1,15}(?:\.\d{1,15})?)[eE]([-+]?\d{1,2})(?!\w|[.,]\d)")
_FRAMED = re.compile(r"\\(?:fbox|framebox)(?=\{)")
_DOLLAR = re.compile(r"(?<!\\)\\\$")
_THOUSANDS = re.compile(r"(?<=\d)(?:,?\\!|\\[,;: ]|[~\u00a0\u2009\u202f])(?=\d{3}(?!\d))")
_TIE = re.compile(r"(?<=\d)~(?=[A-Za-z\\])")  # before a unit
_BOX = re.compile(r"\\boxed\{")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
_LISTED = re.compile(
    r"(?:[\s$,;&*]|\\(?:q?quad\b|[()\[\],;:! \\])|\b(?:and|or)\b|\\(?:text|mathrm)\{\s*+(?:and|or)\s*+\}"
    r"|\b[A-Za-z](?:_\w|_\{\w+\})?\s*=|\(?\b\w\)|(?<=\n)(?:-|\d\.))*"  # x_1 =, (b), an item
)
_SEVERAL = re.compile(r"[,;]|\\pm\b|\b(?:and|or)\b")
_BETWEEN = re.compile(
    r"[\s$)\]}%]*(?:[,;:\u2013]|\b(?:and|or|to|of|out of)\b)[-+\s$(\[{.]*(?:[A-Za-z]\s*=[-+\s$(\[{.]*)?", re.IGNORECASE
)


def readings(completion: str, reference: str = "0") -> list[str]:
    """What the library is to read of a completion, one after the other: all of it, where no line is marked.

    What stands behind a mark is read as the reference is: `2\\sqrt{3}` is one expression and not a 2; and, where it
    has words and no LaTeX ("7 apples", "3/4 cups"), as text, of which a number is the answer.

    Text's last number is not its answer where the mark is a tuple, an interval, a ratio or a choice, "(1, 2)" or
    "1 or 2": these are read as mathematics alone, so that none of them is the number 2.
    """
    completion = _plain(completion)
    # Without this, "She answered 5 calls a day.\n#### 40" is read as an announced 5.
    if (marked := _MARKED.search(completion)) is None:
        boxes = [_last_boxes(completion)]
        if boxes[0] != completion and _SEVERAL.search(reference) and not _ONE_NUMBER.fullmatch(reference):
            boxes.append(completion)  # each answer in a box of its own, with words between
        # In text the library reads the last number of these.
        return [_RADICAL.sub(_marked_root, _TUPLE.sub(r"$\g<0>$", one)) for one in boxes]
    mark = marked[1]
    words = _WORD.search(mark)
    if _LATEX.search(mark) or ("(" in mark and not words) or _is_several(mark):
        return [_mathematical(mark)]
    if _NUMBER.fullmatch(reference):
        return [mark]
    return [_mathematical(mark), *([mark] if words else [])]


def _marked_root(found: re.Match[str]) -> str:
    return f"${found[0]}$" if "sqrt" in found[0] else found[0]


def _last_boxes(text: str) -> str:
    """`text` without the boxes before its last, and those in a row with it: outside of "$" the library would read all
    boxes of a text, a first try and its correction, as one set."""
    at = [found.start() for found in _BOX.finditer(text)]
    first = len(at) - 1
    while first > 0 and _in_a_row(text[at[first - 1] : at[first]]):
        first -= 1
    return text if first <= 0 else _BOX.sub("{", text[: at[first]]) + text[at[first] :]


def _in_a_row(text: str) -> bool:
    """Whether nothing but a list's signs stands between a box, with which `text` begins, and the next, where it ends:
    so of one inside of another too."""
    depth = 0
    for brace in _BRACE.finditer(text):
        depth += {"{": 1, "}": -1}.get(brace[0], 0)
        if depth == 0 and brace[0] == "}":
            between = text[brace.end() :]
            return len(between) < 60 and _LISTED.fullmatch(between) is not None
    return True


def _plain(text: str) -> str:
    """Numbers as the library reads them, in text and in LaTeX alike: of "2 1/2" it makes (2 + 1)/2, of "$5/2" a 5, of
    "7/3." a number of 15 digits, and of "**5/2**" nothing; of "\\$5" nothing, of "1\\,000" a product, which is 0; of
    the signs that chat models write it knows few, and takes "2\u221a3" for a 2 and "5 \u2212 3" for a 3; of "1e2" it
    makes nothing, and outside of "$" it does not see \\fbox."""

    def fraction(found: re.Match[str]) -> str:
        whole, above, below = map(int, found.groups())
        return f"{whole * below + above}/{below}" if above < below else found[0]

    text = _TIE.sub(r"\\ ", _DOLLAR.sub("", _THOUSANDS.sub("", text)).translate(_SIGNS))
    text = _VULGAR.sub(lambda found: f"{found[1]} {_PARTS[found[2]]}" if found[1] else _PARTS[found[2]], text)
    text = _SCIENTIFIC.sub(lambda found: f"{Decimal(found[0]):f}", _FRAMED.sub(r"\\boxed", text))
    text = _POWER.sub(lambda found: "^2" if found[0] == "\u00b2" else "^3", text)
    text = _ROOT.sub(lambda found: f"\\sqrt{{{found[1] or found[2]}}}", text)
    return _END.sub(r"\1", _MONEY.sub("", _MIXED.sub(fraction, text)))


def _is_several(mark: str) -> bool:
    """Whether the last two numbers of it stand in a list, a range or a ratio."""
    last = deque(_ONE_NUMBER.finditer(mark), maxlen=2)
    return len(last) == 2 and _BETWEEN.fullmatch(mark, last[0].end(), last[1].start()) is not None
