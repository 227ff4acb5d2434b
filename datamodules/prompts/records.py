"""From a record of a file or data set (a mapping from field names to values) to a prompt.

Promises: the same options mean the same for every kind of file; a record that does not fit them is an error that names
the record and the field, never a prompt with a hole in it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from datamodules.prompts.base import Prompt


class RecordFormat:
    """How records are read.

    Args:
        owner: class that was configured, for messages.
        question_field: field with the question: text, or a list of chat messages (`role`, `content`). Dots lead into
            nested records: "extra_info.question".
        answer_field: field with the answer: text, a number, or a list of chat messages whose last is the answer; None
            for data without answers.
        template: text of the prompt, with the record's fields in braces.
        answer_pattern: regular expression whose first group, found in the answer, is the reference answer.
        chat: makes the text a user message.
        system: system message before it; or before the question's messages.

    Raises:
        ValueError: an option without effect, or no regular expression with a group.
    """

    def __init__(
        self,
        owner: str,
        question_field: str = "question",
        answer_field: str | None = "answer",
        template: str | None = None,
        answer_pattern: str | None = None,
        chat: bool = False,
        system: str | None = None,
    ) -> None:
        if answer_pattern is not None and answer_field is None:
            raise ValueError(f"{owner}.answer_pattern has no effect without answer_field; remove one of them")
        if answer_pattern is not None and _compiled(answer_pattern, owner).groups < 1:
            raise ValueError(f"{owner}.answer_pattern: {answer_pattern!r} has no group; put the answer in (...)")
        self.owner = owner
        self.question_field = question_field
        self.answer_field = answer_field
        self.template = template
        self.answer_pattern = None if answer_pattern is None else _compiled(answer_pattern, owner)
        self.chat = chat
        self.system = system

    def check_chat(self, is_messages: bool) -> None:
        """Raises ValueError for chat options that have no effect on such questions."""
        if is_messages:
            for key, given in (("chat", self.chat), ("template", self.template is not None)):
                if given:
                    raise ValueError(
                        f"{self.owner}.{key} has no effect, field '{self.question_field}' holds messages; remove it"
                    )
        elif self.system is not None and not self.chat:
            raise ValueError(f"{self.owner}.system has no effect without chat; set chat: true")

    def prompt(self, record: Mapping[str, Any], name: str, where: str) -> Prompt:
        """The prompt of one record.

        Args:
            record: its fields. All but question and answer land in the prompt's metadata.
            name: id of the prompt. where: the record's place, for messages.

        Raises:
            ValueError: fields that are not there, a template or pattern that does not fit.
        """
        question = self._field(record, self.question_field, where)
        solution = "" if self.answer_field is None else reply_text(self._field(record, self.answer_field, where), where)
        messages: tuple[dict[str, Any], ...] = ()
        text = ""
        if isinstance(question, list):
            messages = tuple(dict(message) for message in question)
        else:
            text = self._text(str(question), record, where)
            if self.chat:
                messages, text = ({"role": "user", "content": text},), ""
        self.check_chat(isinstance(question, list))
        if self.system is not None:
            messages = ({"role": "system", "content": self.system}, *messages)
        used = (self.question_field, self.answer_field)
        return Prompt(
            id=name,
            text=text,
            messages=messages,
            answer=self._answer(solution, where),
            solution=solution,
            metadata={key: value for key, value in record.items() if key not in used},
        )

    def _field(self, record: Mapping[str, Any], path: str, where: str) -> Any:
        value: Any = record
        for part in [path] if path in record else path.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        if isinstance(value, str | int | float) or (value and _is_messages(value)):
            return value
        raise ValueError(
            f"{where}: no text in field '{path}' (the record has {', '.join(record) or 'no fields'});"
            " set question_field and answer_field to your names"
        )

    def _text(self, question: str, record: Mapping[str, Any], where: str) -> str:
        if self.template is None:
            return question
        try:
            return self.template.format_map(record)
        except (KeyError, IndexError, ValueError) as error:
            raise ValueError(f"{where}: template {self.template!r} does not fit: {error!r}") from None

    def _answer(self, solution: str, where: str) -> str:
        if self.answer_pattern is None:
            return solution
        match = self.answer_pattern.search(solution)
        if match is None:
            raise ValueError(
                f"{where}: answer_pattern {self.answer_pattern.pattern!r} is nowhere in field '{self.answer_field}'"
            )
        return match[1].strip()


def reply_text(value: Any, where: str) -> str:
    """The text of a reply given as text, as a number, or as messages, of which the last is the reply.

    Raises ValueError, naming `where`, for messages that do not end with text of the assistant, and for anything else.
    """
    if isinstance(value, str | int | float):
        return str(value)
    if not (isinstance(value, list) and value and _is_messages(value)):
        raise ValueError(f"{where}: expected a reply as text or messages, got {type(value).__name__}")
    last = value[-1]
    if last["role"] != "assistant" or not isinstance(last.get("content"), str):
        raise ValueError(f"{where}: the last message is of the {last['role']}, not an answer of the assistant")
    return last["content"]


def _is_messages(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(one, Mapping) and "role" in one for one in value)


def _compiled(pattern: str, owner: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except re.error as error:
        raise ValueError(f"{owner}.answer_pattern: {pattern!r} is no regular expression: {error}") from None
