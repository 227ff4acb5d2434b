"""Prompts from Hugging Face data sets and from Parquet files.

Promises: rows are read when they are dealt and stay on disk until then; a row that does not fit the options is an error
that names it, found before training where the source is checked; nothing of a data set is executed.

    class_path: datamodules.prompts.DatasetPrompts
    init_args: {path: openai/gsm8k, name: main, split: train, answer_pattern: '#### (.+)'}
"""

from __future__ import annotations

import os
import re
from bisect import bisect_right
from itertools import accumulate
from pathlib import Path
from typing import Any

from app import checks
from app.text import reason
from datamodules.files.data_files import resolve
from datamodules.prompts.base import Prompt
from datamodules.prompts.extras import needs
from datamodules.prompts.records import RecordPrompts

_SHARD = re.compile(r"-\d+-of-\d+(-[0-9a-f]+)?\Z")
_NUMBER = re.compile(r"[-_.]?\d+\Z")
_SPLITS = {"train", "validation", "valid", "val", "dev", "test", "eval"}  # files of other names are parts of one whole


class DatasetPrompts(RecordPrompts):
    """Questions and answers of a table.

    Args:
        path: a Parquet file or a folder of them (read with pyarrow, nothing is cached); a folder written by the library
            datasets' `save_to_disk`, or another one that it can load; or a name on the Hugging Face hub. Environment
            variables are expanded, and what begins with "/", "." or "~" or holds a variable is a path, never a name.
        name: configuration of a data set that has several.
        split: of the data set; of a folder of Parquet files those of that name, parts as `train-00000-of-00002` or
            `train-0` included. Needed where the names of several tell of splits.
        revision: commit, tag or branch on the hub.
        record_options: see `RecordPrompts`: question_field, answer_field, template, answer_pattern, chat, system,
            shuffle, seed, offset, size, image_field (paths of pictures begin at the table's folder). Its fields are
            columns here.

    Raises:
        ImportError: the library is not installed.
        ValueError: no such data set or split, columns that are not there, an argument out of range or without effect.
        DataFileError: no such file, or an environment variable that is not set.
    """

    def __init__(
        self,
        path: str,
        name: str | None = None,
        split: str | None = None,
        revision: str | None = None,
        **record_options: Any,
    ) -> None:
        super().__init__(**record_options)
        self.path = path
        files = _parquet_files(path, split)
        if files:
            unused = {"DatasetPrompts.name": name, "DatasetPrompts.revision": revision}
            checks.no_effect(f"on the Parquet files of '{path}'", unused)
            self._rows: Any = _ParquetRows(files)
            self.format.folder = files[0].parent
        else:
            self._rows = _load(path, name, split, revision)
        self.use(len(self._rows), f"'{path}' has {len(self._rows)} rows")
        self._prompt(self._offset)  # wrong column names are an error now

    @property
    def name(self) -> str:
        return Path(self.path).name.removesuffix(".parquet")

    def deal(self, index: int) -> Prompt:
        return self._prompt(self.record_at(index))

    def _prompt(self, row: int) -> Prompt:
        where = f"{self.path}, row {row}"
        try:
            record = self._rows[row]
        except Exception as error:  # rows are decoded when they are asked for
            why = f"{type(error).__name__}: {reason(error)}"
            raise ValueError(f"{where}: cannot be read ({why}); make the data set again") from error
        return self.format.prompt(record, f"{self.name}:{row}", where)


class _ParquetRows:
    """Rows of Parquet files, one after the other, each row with the columns of its own file: as one table they would
    have those of the first, and what only others hold would be gone."""

    def __init__(self, files: list[Path]) -> None:
        needs("pyarrow", "datasets", "DatasetPrompts")
        import pyarrow.parquet as parquet

        self._tables = []
        for file in files:
            try:
                self._tables.append(parquet.read_table(str(file), memory_map=True))
            except Exception as error:
                why = reason(error, 500)
                raise ValueError(f"DatasetPrompts.path: {file} cannot be read as Parquet: {why}") from error
        self._ends = list(accumulate(table.num_rows for table in self._tables))

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, row: int) -> dict[str, Any]:
        which = bisect_right(self._ends, row)
        table = self._tables[which]
        record: dict[str, Any] = table.slice(row - self._ends[which] + table.num_rows, 1).to_pylist()[0]
        return record


def _parquet_files(path: str, split: str | None) -> list[Path]:
    """The Parquet files that `path` means; none where it is something else. Raises ValueError: of several splits, or
    of none of that name."""
    if path.endswith(".parquet"):
        checks.no_effect(f"on the Parquet file '{path}'", {"DatasetPrompts.split": split})
        return [resolve(path, "DatasetPrompts.path")]
    folder = Path(os.path.expanduser(os.path.expandvars(path)))
    files = sorted(folder.glob("*.parquet")) if folder.is_dir() else []
    beside = [one for pattern in ("*/**/*.parquet", "*.jsonl*", "*.csv") for one in sorted(folder.glob(pattern))]
    if files and beside and split is None:
        raise ValueError(
            f"DatasetPrompts.path: '{path}' holds Parquet files and {beside[0].relative_to(folder)}, which would be"
            " left out; name a folder that holds what is meant alone, or one file"
        )
    splits: dict[str, list[Path]] = {}
    for file in files:
        splits.setdefault(_split_of(file.stem), []).append(file)
    words = {word for name in splits for word in re.split(r"[-_.]", name.lower())}
    if split is None and len(splits) > 1 and words & _SPLITS:
        raise ValueError(f"DatasetPrompts.split: '{path}' has the splits {', '.join(splits)}; name one")
    if split is None or not files:
        return files
    if split not in splits:
        raise ValueError(f"DatasetPrompts.split: '{path}' has the files of {', '.join(splits)}, none of '{split}'")
    return splits[split]


def _split_of(stem: str) -> str:
    whole = _SHARD.sub("", stem)
    return name if (name := _NUMBER.sub("", whole)) in _SPLITS else whole


def _load(path: str, name: str | None, split: str | None, revision: str | None) -> Any:
    needs("datasets", "datasets", "DatasetPrompts")
    import datasets

    folder = Path(os.path.expanduser(os.path.expandvars(path)))
    is_path = path.startswith(("/", ".", "~")) or "$" in path or folder.is_dir()
    if folder.is_file():
        raise ValueError(
            f"DatasetPrompts.path: {path} is no .parquet file; datamodules.prompts.JsonlPrompts reads JSONL, and of"
            " anything else make one of the two"
        )
    where = str(resolve(path, "DatasetPrompts.path", "directory")) if is_path else path
    saved = is_path and any((folder / file).is_file() for file in ("state.json", "dataset_dict.json"))
    if saved and (name is not None or revision is not None):
        key = "name" if name is not None else "revision"
        raise ValueError(f"DatasetPrompts.{key} has no effect on '{path}', written by save_to_disk; remove it")
    try:
        if saved:
            loaded = datasets.load_from_disk(where)
            whole = loaded if not isinstance(loaded, datasets.DatasetDict) or split is None else loaded[split]
            if split is not None and whole is loaded:
                raise ValueError("it has no splits; remove DatasetPrompts.split")
        else:
            whole = datasets.load_dataset(where, name, split=split, revision=revision)
    except Exception as error:
        raise ValueError(
            f"DatasetPrompts.path: the data set '{path}' (name {name}, split {split}) cannot be loaded:"
            f" {type(error).__name__}: {reason(error, 1000)}"
        ) from error
    if isinstance(whole, dict):
        raise ValueError(f"DatasetPrompts.split: '{path}' has the splits {', '.join(whole)}; name one")
    return whole
