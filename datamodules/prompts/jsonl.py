"""Prompts from a JSONL file on disk (`.jsonl` or `.jsonl.gz`): one JSON object a line, any field names.

Promises: the whole file is checked when the source is made, and a broken line is an error with file and line number
(see `json_lines`); nothing but blank lines is skipped. GSM8K, for example:

    class_path: datamodules.prompts.JsonlPrompts
    init_args: {path: "${ARBORIST_DATA}/gsm8k/train.jsonl", answer_pattern: '#### (.+)'}
"""

from __future__ import annotations

from typing import Any

from datamodules.files.data_files import resolve
from datamodules.files.json_lines import read_json_lines
from datamodules.prompts.records import FilePrompts

_TABLES = {
    ".parquet": "datamodules.prompts.DatasetPrompts reads it, with the same options",
    ".csv": "make JSONL of it, or Parquet for datamodules.prompts.DatasetPrompts",
}


class JsonlPrompts(FilePrompts):
    """Questions and answers of a JSONL file.

    Args:
        path: the file; may contain `${ARBORIST_DATA}` or any other environment variable. (`cat` joins several into one,
            `MixedPrompts` deals from several in proportions.)
        record_options: see `RecordPrompts`: question_field, answer_field, template, answer_pattern, chat, system,
            shuffle, seed, offset, size, image_field (paths of pictures begin at the file's folder).

    Raises:
        ValueError: a broken line (file and line number), a field that is not there, an answer without a match, an
            argument out of range or without effect.
        DataFileError: no such file, or an environment variable that is not set.
    """

    def __init__(self, path: str, **record_options: Any) -> None:
        super().__init__(**record_options)
        self.path = resolve(path, "JsonlPrompts.path")
        if remedy := _TABLES.get(self.path.suffix):
            raise ValueError(f"JsonlPrompts.path: {self.path} is no JSONL; {remedy}")
        self.format.folder = self.path.parent
        self._prompts = [
            self.format.prompt(record, f"{self.name}:{number}", f"{self.path}:{number}")
            for number, record in read_json_lines(self.path)
        ]
        if not self._prompts:
            raise ValueError(f"JsonlPrompts.path: {self.path} holds no prompts, only blank lines; name another file")
        self.use(len(self._prompts), f"{self.path} has {len(self._prompts)} prompts")
