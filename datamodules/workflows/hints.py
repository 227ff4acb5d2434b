"""What a teacher reads in place of the prompt: hints of a configuration, filled with what is known of the prompt, or,
once a group has been played, of its episodes.

Promises: a hint says nothing that is not there: of several the first counts whose places are all known and that leaves
room for the reply; an episode with none is marked as not taught (`app.batch.TEACHER_PROMPT`), never taught by half.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from app import checks
from app.batch import TEACHER_PROMPT, Trajectory
from app.statistics import ROUNDING
from app.text import well_formed
from datamodules.files.expressions import Template
from datamodules.prompts.base import Prompt
from datamodules.rewards.options import FEEDBACK
from datamodules.workflows.base import Misfit
from datamodules.workflows.tool_calls import said_aloud

_OF_PROMPT = ("text", "answer", "solution")
_OF_GROUP = ("solved", FEEDBACK)
_log = logging.getLogger(__name__)


class Hints:
    """Hints of a workflow.

    Args:
        given: one or several templates; the first that can be filled counts. Places: {text}, the prompt's text or its
            last user message; {answer}; {solution}; {solved}, what another episode of the group that earned `solved_at`
            said aloud, in its last reply; {feedback}, what the reward said of this one.
        owner: name of the workflow, for errors.
        solved_at: least reward of a reply that is shown as {solved}; None for 1.0.
        encode: token ids of a prompt, as the policy's own are made.
        quoted: a text that was written in the run, so that it cannot end the message of this prompt that holds it.

    Attributes:
        of_group: whether they can be filled only once a group has been played.

    Raises:
        ValueError: no template, an unknown place, a template behind one that can always be filled, or a `solved_at`
            without effect.
    """

    def __init__(
        self,
        given: str | Sequence[str],
        owner: str,
        solved_at: float | None,
        encode: Callable[[Prompt], Sequence[int]],
        quoted: Callable[[Prompt, str], str],
    ) -> None:
        self._name = f"{owner}.hint"
        # By their texts: an object in a list would be taken for a setting of its own (`pipeline.fingerprint`).
        texts = [given] if isinstance(given, str) else given
        self._templates = {text: Template(text, self._name) for text in texts}
        if not self._templates:
            raise ValueError(f"{self._name}: no template; give one, or null for none")
        places = set().union(*(one.names for one in self._templates.values()))
        if unknown := sorted(places - {*_OF_PROMPT, *_OF_GROUP}):
            known = ", ".join(f"{{{one}}}" for one in (*_OF_PROMPT, *_OF_GROUP))
            raise ValueError(f"{self._name}: {{{unknown[0]}}} is none of {known}")
        if "solved" not in places:
            checks.no_effect(
                "without the place {solved} in the hint", {f"{owner}.hint_solved_at": solved_at}, "remove it"
            )
        self.of_group = bool(places & {*_OF_GROUP})
        always = next(
            (k for k, one in enumerate(self._templates.values()) if not one.names & {*_OF_GROUP}), len(self._templates)
        )
        if always + 1 < len(self._templates):
            which = "the first" if always == 0 else f"number {always + 1}"
            raise ValueError(
                f"{self._name}: {which} of several can always be filled, so that those behind it are never shown; put"
                " it last, or remove them"
            )
        self._least = (1.0 if solved_at is None else solved_at) - ROUNDING
        # By other names than the arguments': else they would count as settings of the workflow, as the texts do.
        self._encoded, self._quotes = encode, quoted
        self._told = False

    @classmethod
    def of_turns(
        cls,
        given: str | Sequence[str] | None,
        owner: str,
        solved_at: float | None,
        encode: Callable[[Prompt], Sequence[int]],
        quoted: Callable[[Prompt, str], str],
        sequences: str,
    ) -> Hints | None:
        """Those of a workflow whose episodes have several replies; None without any. They stand in the prompt that the
        episode begins with, so that all of it has to be one sequence.

        Raises:
            ValueError: as the class; other `sequences` than "whole", or a `solved_at` without hints.
        """
        if given is None:
            checks.no_effect("without hint", {f"{owner}.hint_solved_at": solved_at}, "remove it or set hint")
            return None
        if sequences != "whole":
            raise ValueError(
                f"{owner}.hint: stands in the prompt of an episode, and with sequences: {sequences} later replies are"
                " sequences with prompts of their own; set sequences: whole, or leave hint out"
            )
        return cls(given, owner, solved_at, encode, quoted)

    def of_prompt(self, prompt: Prompt, max_new_tokens: int, max_context: int) -> list[int]:
        """Token ids of what the teacher is shown, where that does not depend on the group.

        Raises:
            ValueError: no room behind them for the longest reply, which is asked before there is one, lest long replies
                alone be dropped; pictures, or no user message that the hint belongs into.
        """
        tokens = list(self._encoded(self._hinted(prompt, next(iter(self._templates.values())), {})))
        if len(tokens) + max_new_tokens > max_context:
            raise ValueError(
                f"{self._name}: prompt '{prompt.id}' has {len(tokens)} tokens with its hint, which leaves no room for"
                f" {max_new_tokens} new ones in the context of {max_context}; shorten the hint"
            )
        return tokens

    def of_episodes(self, prompt: Prompt, episodes: Sequence[Trajectory], max_context: int) -> None:
        """Marks each of a group's episodes with what its teacher is shown; with an empty list where that is nothing.

        Args:
            episodes: one sequence each, which begins with the prompt, with the text of its last reply as "completion"
                and the reward's words in its metadata.
            max_context: tokens of the prompt that is shown and what follows it together.

        Raises:
            Misfit: every hint shows another episode, and there is none.
            ValueError: as `of_prompt`.
        """
        if len(episodes) == 1 and all("solved" in one.names for one in self._templates.values()):
            raise Misfit(
                f"{self._name}: {{solved}} is what another episode of the group said, and groups have one; raise"
                " data.group_size, or add a hint without it"
            )
        for number, one in enumerate(episodes):
            others = (*episodes[number + 1 :], *episodes[:number])  # so that not all are shown the same
            found = {FEEDBACK: str(one.metadata.get(FEEDBACK, "")).strip(), "solved": self._solved(others)}
            begun = int(one.loss_mask.int().argmax())  # the first trained token, before which all is replaced
            room = max_context - (len(one.tokens) - begun)
            one.metadata[TEACHER_PROMPT] = self._first(prompt, found, room)

    def _solved(self, others: Sequence[Trajectory]) -> str:
        """What the first of these said that was right."""
        right = (one for one in others if one.reward >= self._least)
        said = (said_aloud(str(one.metadata["completion"])).strip() for one in right)
        return next((text for text in said if text), "")

    def _first(self, prompt: Prompt, found: Mapping[str, str], room: int) -> list[int]:
        known = {name for name, text in found.items() if text}
        found = {name: self._quotes(prompt, well_formed(text)) for name, text in found.items()}
        for template in self._templates.values():
            if not template.names & {*_OF_GROUP} <= known:
                continue
            tokens = list(self._encoded(self._hinted(prompt, template, found)))
            if len(tokens) <= room:
                return tokens
            if not self._told:
                self._told = True
                _log.warning(
                    "%s: prompt '%s' has %d tokens with a hint, and %d leave room for its reply: the next hint is"
                    " tried, and without one a reply is not taught (metric taught)",
                    *(self._name, prompt.id, len(tokens), room),
                )
        return []

    def _hinted(self, prompt: Prompt, template: Template, found: Mapping[str, str]) -> Prompt:
        """What the teacher is shown."""
        if prompt.pictures:
            raise ValueError(f"{self._name}: prompt '{prompt.id}' has pictures, which a hint cannot hold; leave it out")
        values = {"text": prompt.text, "answer": prompt.answer, "solution": prompt.solution, **found}
        if not prompt.messages:
            return replace(prompt, text=template.fill(values.__getitem__))
        at = max((k for k, one in enumerate(prompt.messages) if one.get("role") == "user"), default=-1)
        if at < 0 or not isinstance(prompt.messages[at].get("content"), str):
            raise ValueError(f"{self._name}: prompt '{prompt.id}' has no user message of text; leave hint out")
        values["text"] = prompt.messages[at]["content"]
        told = {**prompt.messages[at], "content": template.fill(values.__getitem__)}
        return replace(prompt, messages=(*prompt.messages[:at], told, *prompt.messages[at + 1 :]))
