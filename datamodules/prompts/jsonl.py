"""Prompts from a JSONL file on disk (`.jsonl` or `.jsonl.gz`): one JSON object a line, any field names.

Promises: the whole file is checked when the source is made, and a broken line is an error with file and line number
(see `json_lines`); nothing but blank lines is skipped. GSM8K, for example:

    class_path: datamodules.prompts.JsonlPrompts
    init_args: {path: "${ARBORIST_DATA}/gsm8k/train.jsonl", answer_pattern: '#### (.+)'}
"""

from __future__ import annotations

from datamodules.files.data_files import resolve
from datamodules.files.json_lines import read_json_lines
from datamodules.prompts.base import Prompt, PromptSource
from datamodules.prompts.laps import Laps
from datamodules.prompts.records import RecordFormat


class JsonlPrompts(PromptSource):
    """Questions and answers of a JSONL file. All fields but these two land in the prompt's metadata, for rewards.

    Args:
        path: the file; may contain `${ARBORIST_DATA}` or any other environment variable.
        question_field: field with the question, as text or as chat messages; dots lead into nested objects.
        answer_field: field with the answer, likewise; None for data without answers.
        template: text of the prompt, with the line's fields in braces, such as "Q: {question}\\nA:"; dots lead into
            nested objects.
        answer_pattern: regular expression whose first group, found in the answer field, is the reference answer (the
            whole field stays the solution supervised training imitates), such as '#### (.+)'; 5 s a search.
        chat: makes the text a user message, rendered with the tokenizer's chat template.
        system: system message before it (needs messages).
        shuffle: deals a new order every time through the file; False keeps the file's.
        seed: of the order.
        offset: lines to leave out at the beginning (for validation on a slice of the same file).
        size: lines to use; None for all.

    Raises:
        ValueError: a broken line (file and line number), a field that is not there, an answer without a match, an
            argument out of range or without effect.
        DataFileError: no such file, or an environment variable that is not set.
    """

    def __init__(
        self,
        path: str,
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
    ) -> None:
        self.format = RecordFormat("JsonlPrompts", question_field, answer_field, template, answer_pattern, chat, system)
        if offset < 0 or (size is not None and size < 1):
            raise ValueError(f"JsonlPrompts.offset {offset} and size {size}: offset must be >= 0, size >= 1")
        self.path = resolve(path, "JsonlPrompts.path")
        self._prompts = self._load(offset, size)
        self._laps = Laps(len(self._prompts), shuffle, seed)

    @property
    def name(self) -> str:
        folder = self.path.parent.name
        stem = self.path.name.split(".")[0]
        return f"{folder}/{stem}" if folder else stem

    @property
    def size(self) -> int:
        return len(self._prompts)

    def deal(self, index: int) -> Prompt:
        return self._prompts[self._laps.at(index)]

    def _load(self, offset: int, size: int | None) -> list[Prompt]:
        prompts = [
            self.format.prompt(record, f"{self.name}:{number}", f"{self.path}:{number}")
            for number, record in read_json_lines(self.path)
        ]
        if not prompts:
            raise ValueError(f"JsonlPrompts.path: {self.path} holds no prompts, only blank lines; name another file")
        chosen = prompts[offset : None if size is None else offset + size]
        if not chosen or (size is not None and len(chosen) < size):
            raise ValueError(
                f"JsonlPrompts: {self.path} has {len(prompts)} prompts; offset {offset} and size {size} ask for more"
            )
        return chosen
