"""Preferences between two dialogues, in the form of Anthropic's HH-RLHF: `chosen` and `rejected`, each a whole
conversation as one text, that differ in the last reply.

    class_path: datamodules.prompts.DialoguePairs
    init_args: {path: "${ARBORIST_DATA}/hh-rlhf/helpful-base/train.jsonl.gz"}

Promises: the prompt is the conversation before the last reply, as messages; the solution is the chosen reply, and
`metadata["rejected"]` the other one, as `PairsDataModule` reads them. A pair that says nothing of one reply (the same
twice, dialogues that part earlier, an empty reply) is left out and counted; what is no such dialogue is an error with
file and line.
"""

from __future__ import annotations

import logging
import re
from typing import Any

from datamodules.files.data_files import resolve
from datamodules.files.json_lines import read_json_lines
from datamodules.prompts.base import Prompt
from datamodules.prompts.records import FilePrompts

_log = logging.getLogger(__name__)
_TURN = re.compile(r"(?:\A\n*|\n\n)(Human|Assistant):[ \t]*")
_ROLES = {"Human": "user", "Assistant": "assistant"}
REJECTED = "rejected"


class DialoguePairs(FilePrompts):
    """Prompts with a chosen and a rejected reply.

    Args:
        path: `.jsonl` or `.jsonl.gz`; may contain `${ARBORIST_DATA}` or any other environment variable.
        system: system message before each dialogue.
        shuffle, seed, offset, size: see `RecordPrompts`.

    Raises:
        ValueError: a broken line (file and line number), no pair that can be used, an argument out of range.
        DataFileError: no such file, or an environment variable that is not set.
    """

    def __init__(
        self,
        path: str,
        system: str | None = None,
        shuffle: bool = True,
        seed: int = 0,
        offset: int = 0,
        size: int | None = None,
    ) -> None:
        super().__init__(shuffle=shuffle, seed=seed, offset=offset, size=size)
        self.path = resolve(path, "DialoguePairs.path")
        before = () if system is None else ({"role": "system", "content": system},)
        self._prompts, left_out = [], 0
        for number, record in read_json_lines(self.path):
            where = f"{self.path}:{number}"
            chosen, rejected = (_dialogue(record, name, where) for name in ("chosen", "rejected"))
            good = chosen[:-1] == rejected[:-1] and chosen[-1] != rejected[-1]
            if not good or not chosen[-1]["content"] or not rejected[-1]["content"]:
                left_out += 1
                continue
            self._prompts.append(
                Prompt(
                    id=f"{self.name}:{number}",
                    messages=(*before, *chosen[:-1]),
                    solution=chosen[-1]["content"],
                    metadata={REJECTED: rejected[-1]["content"]},
                )
            )
        if left_out:
            _log.info("%s: %d pairs are left out, they do not differ in the last reply alone", self.path, left_out)
        if not self._prompts:
            raise ValueError(f"DialoguePairs.path: {self.path} holds no pair that can be used; name another file")
        self.use(len(self._prompts), f"{self.path} has {len(self._prompts)} pairs")


def _dialogue(record: dict[str, Any], field: str, where: str) -> list[dict[str, Any]]:
    """The messages of one; the last is the assistant's. Raises ValueError."""
    text = record.get(field)
    if not isinstance(text, str):
        raise ValueError(f"{where}: field '{field}' must be a dialogue as text; use JsonlPrompts for other forms")
    marks = list(_TURN.finditer(text))
    if not marks or text[: marks[0].start()].strip() or len(marks) < 2 or marks[-1][1] != "Assistant":
        raise ValueError(
            f"{where}: field '{field}' is no dialogue that begins with 'Human:' and ends with a reply behind"
            " 'Assistant:'; correct or remove the line"
        )
    ends = [*(mark.start() for mark in marks[1:]), len(text)]
    return [
        {"role": _ROLES[mark[1]], "content": text[mark.end() : end].strip()}
        for mark, end in zip(marks, ends, strict=True)
    ]
