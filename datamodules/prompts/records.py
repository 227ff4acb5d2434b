"""From a record of a file or data set (a mapping from field names to values) to a prompt.

Promises: the same options mean the same for every kind of file; a record that does not fit them is an error that names
the record and the field, never a prompt with a hole in it, nor a reply that lost its calls, thoughts or earlier turns.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from app import checks
from app.text import printable
from datamodules.files.expressions import Pattern, Template
from datamodules.prompts.base import Prompt, PromptSource
from datamodules.prompts.order import DealingOrder

DATA_URL = "data:image/"
"""What a picture in a text begins with (RFC 2397, base64)."""
_OF_TEMPLATE = ("tools", "chat_template_kwargs")
_UNSAID = ("tool_calls", "function_call", "reasoning_content", "reasoning", "thinking")
"""What a message of the assistant may hold beside its content."""


class RecordFormat:
    """How records are read.

    Args:
        owner: class that was configured, for messages.
        question_field: field with the question: text, or a list of chat messages (`role`, `content`). Dots lead into
            nested records: "extra_info.question".
        answer_field: field with the answer: text, a number, true or false, or a list of chat messages whose last is the
            answer, those before it being the question's; None for data without answers. The question's own field, where
            that holds a whole conversation: its last message is the answer, those before it are the question.
        template: text of the prompt, with the record's fields in braces (names alone; dots lead into nested records).
        answer_pattern: regular expression whose first group, found in the answer, is the reference answer.
        chat: makes the text a user message.
        system: system message before it; or before the question's messages.
        image_field: field with what the question shows: one picture or a list of them, as bytes, as a path below
            `folder`, as a data URL, or in a record with `bytes` or `path` (see `pixels_of`). The text becomes a user
            message; `<image>` in it says where each of them is, which are before the text otherwise.
        folder: of the records' file, which relative paths of pictures begin at.

    Raises:
        ValueError: an option without effect, no regular expression with a group, or more than names in the template.
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
        image_field: str | None = None,
        folder: Path | None = None,
    ) -> None:
        if answer_pattern is not None and answer_field is None:
            raise ValueError(f"{owner}.answer_pattern has no effect without answer_field; remove one of them")
        self.owner = owner
        self.question_field = question_field
        self.answer_field = answer_field
        self.template = None if template is None else Template(template, f"{owner}.template")
        self.answer_pattern = None if answer_pattern is None else Pattern(answer_pattern, f"{owner}.answer_pattern")
        self.chat = chat or image_field is not None
        self.system = system
        self.image_field = image_field
        self.folder = folder

    def check_chat(self, is_messages: bool) -> None:
        """Raises ValueError for chat options that have no effect on such questions."""
        if is_messages:
            for key, given in (("chat", self.chat and not self.image_field), ("template", self.template is not None)):
                if given:
                    raise ValueError(
                        f"{self.owner}.{key} has no effect, field '{self.question_field}' holds messages; remove it"
                    )
        elif self.system is not None and not self.chat:
            raise ValueError(f"{self.owner}.system has no effect without chat; set chat: true")

    def prompt(self, record: Mapping[str, Any], name: str, where: str) -> Prompt:
        """The prompt of one record.

        Args:
            record: its fields. All but question, answer and pictures land in the prompt's metadata; of a nested one its
                record without it, and `tools` and `chat_template_kwargs` beside a nested question as if of the record.
            name: id of the prompt. where: the record's place, for messages.

        Raises:
            ValueError: fields that are not there, a template or pattern that does not fit.
        """
        question = self._field(record, self.question_field, where)
        answer = None if self.answer_field is None else self._field(record, self.answer_field, where)
        if self.answer_field == self.question_field:
            if not isinstance(question, list) or len(question) < 2:
                raise ValueError(
                    f"{where}: question_field and answer_field both name '{self.answer_field}', which then has to hold"
                    " a conversation of two messages or more; name two fields, or remove the record"
                )
            question = question[:-1]
        messages: tuple[dict[str, Any], ...] = ()
        text = ""
        if isinstance(question, list):
            messages = tuple(_message(one) for one in question)
            if not any(str(message.get("content") or "").strip() for message in messages):
                raise ValueError(f"{where}: the prompt is empty; remove the record")
        else:
            text = self._text(_as_text(question), record, where)
            if self.chat:
                messages, text = ({"role": "user", "content": text},), ""
        self.check_chat(isinstance(question, list))
        self._check_speakers(messages, where)
        pictures = () if self.image_field is None else self._pictures(record, where)
        if pictures:
            messages = with_images(messages, len(pictures), where)
        if self.system is not None:
            messages = ({"role": "system", "content": self.system}, *messages)
        told = messages or ({"role": "user", "content": text},)
        solution = "" if answer is None else reply_text(answer, where, told)
        metadata: Mapping[str, Any] = record
        for path in (self.question_field, self.answer_field, self.image_field):
            metadata = metadata if path is None else _without(metadata, _steps(record, path))
        beside = _lookup(record, ".".join(_steps(record, self.question_field)[:-1]))
        if isinstance(beside, Mapping):  # nested messages have theirs (OpenAI's `input`)
            metadata = {key: beside[key] for key in _OF_TEMPLATE if key in beside} | dict(metadata)
        return Prompt(
            id=name,
            text=text,
            messages=messages,
            answer=self._answer(solution, where),
            solution=solution,
            metadata=dict(metadata),
            pictures=pictures,
        )

    def _check_speakers(self, messages: Sequence[Mapping[str, Any]], where: str) -> None:
        """Raises ValueError for a question that is answered already, and for a second system message."""
        if messages and messages[-1]["role"] == "assistant":
            raise ValueError(
                f"{where}: the last message in field '{self.question_field}' is of the assistant, and a reply would"
                " follow it; remove it, or name the field in answer_field too, which makes that message the answer"
            )
        if self.system is not None and messages and messages[0]["role"] == "system":
            raise ValueError(
                f"{where}: field '{self.question_field}' begins with a system message, and {self.owner}.system is"
                " another; remove one of them"
            )

    def _pictures(self, record: Mapping[str, Any], where: str) -> tuple[Any, ...]:
        assert self.image_field is not None
        value = _lookup(record, self.image_field)
        found = tuple(value) if isinstance(value, list | tuple) else (value,)
        if not found or any(one is None for one in found):
            raise ValueError(
                f"{where}: no picture in field '{self.image_field}' (the record has {_names(record)}); set image_field"
                " to your name, or remove the record"
            )
        return tuple(self._located(one) for one in found)

    def _located(self, picture: Any) -> Any:
        """The picture, its path below the folder of the records."""
        if isinstance(picture, Mapping) and not picture.get("bytes") and isinstance(picture.get("path"), str):
            picture = picture["path"]
        if self.folder is None or not isinstance(picture, str) or picture.startswith(DATA_URL):
            return picture
        return str(self.folder / picture)

    def _field(self, record: Mapping[str, Any], path: str, where: str) -> Any:
        value = _lookup(record, path)
        if _is_text(value) or (value and _is_messages(value)):
            return value
        if value is not None or path in record:
            raise ValueError(
                f"{where}: field '{path}' holds {_kind(value)}; it must be text, a number, or a list of chat messages"
                " with role and content: correct or remove the record, or name another field by question_field and"
                " answer_field"
            )
        raise ValueError(
            f"{where}: no text in field '{path}' (the record has {_names(record)}); set question_field and answer_field"
            " to your names"
        )

    def _text(self, question: str, record: Mapping[str, Any], where: str) -> str:
        def value(name: str) -> str:
            found = _lookup(record, name)
            if found is None:
                raise ValueError(
                    f"{where}: nothing in field '{name}' for template {self.template.text!r:.200} (the record has"  # type: ignore[union-attr]
                    f" {_names(record)}); correct the name, or remove the record"
                )
            return _as_text(found)

        text = question if self.template is None else self.template.fill(value)
        if not text.strip():
            raise ValueError(f"{where}: the prompt is empty; remove the record")
        return text

    def _answer(self, solution: str, where: str) -> str:
        if self.answer_pattern is None:
            return solution
        try:
            found = next(self.answer_pattern.find(solution), None)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None
        if found is None:
            raise ValueError(
                f"{where}: answer_pattern {self.answer_pattern.pattern!r:.200}, or its first group, is nowhere in field"
                f" '{self.answer_field}'"
            )
        return found.strip()


class RecordPrompts(PromptSource):
    """Prompts of the records of a file or data set: the options that all such sources share.

    Args:
        question_field: field with the question, as text or as chat messages; dots lead into nested records.
        answer_field: field with the answer, likewise, the last message being the answer; the same field for both, where
            it holds whole conversations; None for data without answers. All fields but these two land in the prompt's
            metadata, for rewards.
        template: text of the prompt, with the record's fields in braces, such as "Q: {question}\\nA:"; dots lead into
            nested records.
        answer_pattern: regular expression whose first group, found in the answer field, is the reference answer (the
            whole field stays the solution supervised training imitates), such as '#### (.+)'; 5 s a search.
        chat: makes the text a user message, rendered with the tokenizer's chat template.
        system: system message before it (needs messages).
        image_field: field with one picture or a list of them, which the question shows (`RecordFormat`).
        shuffle: deals a new order every time through the records; False keeps their own.
        seed: of the order.
        offset: records to leave out at the beginning (for validation on a slice of the same data).
        size: records to use; None for all.

    Raises:
        ValueError: an argument out of range or without effect.
    """

    def __init__(
        self,
        question_field: str = "question",
        answer_field: str | None = "answer",
        template: str | None = None,
        answer_pattern: str | None = None,
        chat: bool = False,
        system: str | None = None,
        shuffle: bool = True,
        seed: int = 0,
        offset: int = 0,
        size: int | None = None,
        image_field: str | None = None,
    ) -> None:
        owner = type(self).__name__
        checks.at_least(0, {f"{owner}.offset": offset})
        checks.at_least(1, {f"{owner}.size": size})
        self.format = RecordFormat(
            owner, question_field, answer_field, template, answer_pattern, chat, system, image_field
        )
        self._shuffle, self._seed, self._offset, self._size = shuffle, seed, offset, size

    @property
    def size(self) -> int:
        return self._order.count

    def record_at(self, index: int) -> int:
        """The number, in its file, of the record at stream position `index`."""
        return self._offset + self._order.at(index)

    def use(self, count: int, what: str) -> None:
        """Deals from now on, out of `count` records. Raises ValueError, naming `what`, where offset and size ask for
        more than there are."""
        rest = count - self._offset
        if rest < (self._size or 1):
            raise ValueError(f"{type(self).__name__}: {what}; offset {self._offset} and size {self._size} ask for more")
        self._order = DealingOrder(self._size or rest, self._shuffle, self._seed)


class FilePrompts(RecordPrompts):
    """Prompts that are read from one file, all of them when the source is made."""

    path: Path
    _prompts: list[Prompt]

    @property
    def name(self) -> str:
        folder = self.path.parent.name
        stem = self.path.name.split(".")[0]
        return f"{folder}/{stem}" if folder else stem

    def deal(self, index: int) -> Prompt:
        return self._prompts[self.record_at(index)]


def with_images(messages: tuple[dict[str, Any], ...], count: int, where: str) -> tuple[dict[str, Any], ...]:
    """The messages, with parts for `count` pictures: where they say so by such parts or by `<image>` in their texts, or
    before the first text of the user.

    Raises ValueError, naming `where`, for another number of places.
    """
    shown = [{**message, "content": _parts(message.get("content"))} for message in messages]
    places = sum(part.get("type") == "image" for message in shown for part in message["content"])
    if not places:
        first = next((message for message in shown if message["role"] == "user"), None)
        if first is None:
            raise ValueError(f"{where}: no message of a user shows its {count} pictures; say where by <image>")
        first["content"] = [{"type": "image"}] * count + first["content"]
    elif places != count:
        raise ValueError(
            f"{where}: {count} pictures, but its messages have {places} places for one; correct the record"
        )
    whole = zip(shown, messages)
    return tuple(message if _has_image(message["content"]) else dict(as_it_was) for message, as_it_was in whole)


def _parts(content: Any) -> list[Any]:
    """Content as parts, `<image>` in texts being parts of their own."""
    if isinstance(content, list):
        return [part for one in content for part in (_parts(one["text"]) if _is_text_part(one) else [one])]
    texts = str(content or "").split("<image>")
    parts: list[Any] = []
    for k, text in enumerate(texts):
        parts += [{"type": "image"}] if k else []
        parts += [{"type": "text", "text": text}] if text else []
    return parts


def _is_text_part(part: Any) -> bool:
    return isinstance(part, Mapping) and isinstance(part.get("text"), str)


def _has_image(parts: list[Any]) -> bool:
    return any(part.get("type") == "image" for part in parts)


def reply_text(value: Any, where: str, told: Sequence[Mapping[str, Any]]) -> str:
    """The text of a reply given as text, as a number, or as messages, of which the last is the reply.

    Args:
        value: the reply.
        where: its place, for messages.
        told: the messages that it answers, which those before the reply have to say as well.

    Raises:
        ValueError: naming `where`: messages that do not end with text of the assistant and nothing beside it, or that
            answer something else; and anything else.
    """
    if _is_text(value):
        return _as_text(value)
    if not (isinstance(value, list) and value and _is_messages(value)):
        raise ValueError(f"{where}: expected a reply as text or messages, got {type(value).__name__}")
    *before, last = value
    if last["role"] != "assistant":
        raise ValueError(f"{where}: the last message is of the {last['role']:.40}, not an answer of the assistant")
    if not (isinstance(last.get("content"), str) or last.get("tool_calls")):
        raise ValueError(f"{where}: the answer's content is {_kind(last.get('content'))}; write it as text")
    unsaid = next((key for key in _UNSAID if last.get(key)), None)
    if unsaid is not None:
        raise ValueError(
            f"{where}: the answer has '{unsaid}', which is not in its text and would not be trained; write it into the"
            " content as the model does, or remove it; datamodules.RecordedDataModule takes tool_calls, of whole"
            " conversations"
        )
    if last.get("weight") == 0:
        raise ValueError(
            f"{where}: the answer has weight 0, so nothing is to be trained; leave the record out, or train whole"
            " conversations with datamodules.RecordedDataModule, which goes by weights"
        )
    if before and not _are_told(list(map(_message, before)), told):
        raise ValueError(
            f"{where}: the messages before the answer are not those of the prompt, and would be left out; name a field"
            " with the whole conversation in question_field, or leave all but the last message out of the answer"
        )
    return str(last["content"])


def _are_told(before: Sequence[Mapping[str, Any]], told: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a prompt says what these messages do: templates may say more, and an option the system message."""
    if before[0]["role"] != "system" and told[0]["role"] == "system":
        told = told[1:]
    return len(before) == len(told) and all(
        one["role"] == other["role"] and _text_of(one) in _text_of(other) for one, other in zip(before, told)
    )


def _text_of(message: Mapping[str, Any]) -> str:
    parts = _parts(message.get("content"))
    return "".join(part["text"] for part in parts if _is_text_part(part)).strip()


def _lookup(record: Mapping[str, Any], path: str) -> Any:
    """The value of field `path`, into nested records where there is none of that name; None for no such field."""
    value: Any = record
    for part in _steps(record, path):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def _steps(record: Mapping[str, Any], path: str) -> list[str]:
    return [path] if path in record else path.split(".")


def _without(record: Mapping[str, Any], steps: list[str]) -> Mapping[str, Any]:
    """The record without the field that these lead to; no record is changed."""
    head, *rest = steps
    if not rest:
        return {key: value for key, value in record.items() if key != head}
    nested = record.get(head)
    return {**record, head: _without(nested, rest)} if isinstance(nested, Mapping) else record


def _names(record: Mapping[str, Any]) -> str:
    return printable(", ".join(record) or "no fields", 200)


def _is_text(value: Any) -> bool:
    """Text, or a number or boolean that stands for it; what pandas writes for nothing (NaN) does not."""
    return isinstance(value, str | int) or (isinstance(value, float) and math.isfinite(value))


def _as_text(value: Any) -> str:
    """A boolean as JSON spells it, since that is what the file says."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def _kind(value: Any) -> str:
    if isinstance(value, Mapping):
        return "an object"
    if isinstance(value, list):
        return "a list" if value else "an empty list"
    return "nothing" if value is None or isinstance(value, float) else f"a {type(value).__name__}"


def _message(one: Mapping[str, Any]) -> dict[str, Any]:
    """`developer` is OpenAI's later name of the system, whom most templates know by that alone."""
    return {**one, "role": "system" if one["role"] == "developer" else one["role"]}


def _is_messages(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_message, value))


def _is_message(one: Any) -> bool:
    if not isinstance(one, Mapping) or not isinstance(one.get("role"), str):
        return False
    return isinstance(one.get("content"), str | list) or (one.get("content") is None and bool(one.get("tool_calls")))
