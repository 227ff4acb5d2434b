"""Training sequences of recorded rollouts, whatever file they are in: token ids and which of them are trained.

    .npz                         token arrays of conversations (`arborist data import-tau`), cut by `workload`
    .jsonl, .jsonl.gz            a sequence a line: tokens, loss_mask; or a conversation as text, with a tokenizer
    .parquet                     a sequence a row, columns as in JSONL
    batch_*.safetensors, or      batches that `RolloutDataModule(record=...)` wrote
    a directory of them

A sequence's fields: `tokens` (or `input_ids`), integers; `loss_mask`, 0 or 1 (or booleans) for each of them, default
all but the first; `temperature`, default 1.0. Other fields are ignored. Sequences without a trained token are kept (a
turn may have come to nothing); files without one are not.

Promises: what cannot be used is refused by file, line (or row) and field.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from app.batch import TEMPERATURES, RolloutBatch
from app.pictures import Picture
from app.text import printable, reason
from datamodules.conversations.chat import ChatEncoder, load_chat_tokenizer, load_system, load_transcripts
from datamodules.conversations.sessions import no_batches
from datamodules.conversations.tokens import (
    QWEN3_THINK_IDS,
    Bools,
    Conversation,
    Ints,
    Workload,
    load_npz,
)
from datamodules.files.data_files import RecordedDataError
from datamodules.files.json_lines import read_json_lines
from datamodules.files.recording import read_batch, versions
from datamodules.groups import to_batch

_TOKENS = ("tokens", "input_ids")


@dataclass(frozen=True, eq=False)
class Sequences:
    """N training sequences: token ids int64 [L_i], trained positions bool [L_i], and each one's temperature; of batches
    with pictures also which of `pictures` each token shows, or -1, int32 [L_i]."""

    tokens: list[Ints]
    trained: list[Bools]
    temperatures: list[float]
    images: list[npt.NDArray[np.int32]] | None = None
    pictures: tuple[Picture, ...] = ()


def load_sequences(
    path: Path, workload: Workload = "turns", tokenizer: str | None = None, system: Path | None = None
) -> Sequences:
    """The training sequences in `path`.

    Args:
        path: an existing file or directory.
        workload: how conversations are cut (`Conversation.sequences`); other files hold sequences already.
        tokenizer: directory of a tokenizer with a chat template, for conversations as text.
        system: `*_system.json` that precedes conversations as text.

    Raises:
        RecordedDataError, RecordingError: data that cannot be used, naming the place and the field.
    """
    found = _load(path, workload, tokenizer, system)
    if not any(mask.any() for mask in found.trained):
        raise RecordedDataError(f"{path}: no token in it is trained (loss_mask); name another file")
    return found


def _load(path: Path, workload: Workload, tokenizer: str | None, system: Path | None) -> Sequences:
    if path.is_dir() or path.suffix == ".safetensors":
        return _recorded(path)
    if path.suffix == ".npz":
        return _cut(load_npz(path), workload, QWEN3_THINK_IDS)
    if path.suffix == ".parquet":
        return _rows(_parquet(path))
    if path.name.endswith((".jsonl", ".jsonl.gz")):
        if "messages" not in next(iter(_jsonl(path)))[1]:
            return _rows(_jsonl(path))
        if tokenizer is None:
            raise RecordedDataError(f"{path}: holds conversations as text; name a tokenizer's directory (--tokenizer)")
        encoder = ChatEncoder(load_chat_tokenizer(tokenizer), None if system is None else load_system(system))
        conversations = [encoder.encode(transcript) for transcript in load_transcripts(path)]
        return _cut(conversations, workload, tuple(encoder.think_ids()))
    raise RecordedDataError(
        f"{path}: unknown kind of file; expected .npz, .jsonl, .jsonl.gz, .parquet, a recorded batch_*.safetensors, or"
        " a directory of those"
    )


def _cut(conversations: list[Conversation], workload: Workload, think_ids: tuple[int, ...]) -> Sequences:
    pairs = [pair for conversation in conversations for pair in conversation.sequences(workload, think_ids)]
    return Sequences([t.astype(np.int64) for t, _ in pairs], [m for _, m in pairs], [1.0] * len(pairs))


def _recorded(path: Path) -> Sequences:
    folder, chosen = (path, versions(path)) if path.is_dir() else (path.parent, _version(path))
    if not chosen:
        raise no_batches(path)
    return of_batch(to_batch(group for version in chosen for group in read_batch(folder, version)))


def of_batch(batch: RolloutBatch) -> Sequences:
    """The sequences of a batch."""
    return Sequences(
        [tokens.numpy() for tokens in batch.sequences()],
        [mask.numpy() for mask in batch.split(batch.loss_mask)],
        batch.temperatures.tolist(),
        None if batch.images is None else [images.numpy() for images in batch.split(batch.images)],
        batch.pictures,
    )


def _version(path: Path) -> list[int]:
    found = re.fullmatch(r"batch_(\d{8})\.safetensors", path.name)
    if found is None:
        raise RecordedDataError(f"{path}: a recorded batch is named batch_00000000.safetensors; this is another file")
    return [int(found[1])]


def _jsonl(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """(place, fields) of each line that is not blank; at least one."""
    empty = True
    for number, fields in read_json_lines(path):
        empty = False
        yield f"{path}:{number}", fields
    if empty:
        raise RecordedDataError(f"{path}: no sequence in it; name another file")


def _parquet(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    try:
        from pyarrow import ArrowException, parquet
    except ImportError as error:
        raise RecordedDataError(f"{path}: reading parquet needs pyarrow; pip install -e '.[parquet]'") from error
    try:
        with parquet.ParquetFile(path) as file:
            known = [name for name in (*_TOKENS, "loss_mask", "temperature") if name in file.schema_arrow.names]
            if not set(known) & set(_TOKENS):
                raise RecordedDataError(
                    f"{path}: no column 'tokens' or 'input_ids' among"
                    f" {printable(str(file.schema_arrow.names), 200)}; write one"
                )
            if not file.metadata.num_rows:
                raise RecordedDataError(f"{path}: no sequence in it; name another file")
            row = 0
            for batch in file.iter_batches(batch_size=1024, columns=known):
                columns = {name: batch.column(name) for name in known}
                for k in range(batch.num_rows):
                    values = ((name, column[k]) for name, column in columns.items())
                    yield f"{path} row {row}", {name: _plain(value) for name, value in values if value.is_valid}
                    row += 1
    except RecordedDataError:
        raise
    except (ArrowException, OSError, ValueError, TypeError) as error:  # or damaged columns
        raise RecordedDataError(f"{path}: not a readable parquet file ({reason(error)}); make it again") from error


def _plain(value: Any) -> Any:
    """An Arrow scalar as numpy (lists, without a Python object a token) or Python."""
    inner = getattr(value, "values", None)
    return value.as_py() if inner is None else inner.to_numpy(zero_copy_only=False)


def _rows(rows: Iterator[tuple[str, dict[str, Any]]]) -> Sequences:
    result = Sequences([], [], [])
    for where, fields in rows:
        name = next((name for name in _TOKENS if name in fields), None)
        if name is None:
            raise RecordedDataError(f"{where}: no 'tokens' (or 'input_ids') among {_names(fields)}; add the field")
        tokens = _array(where, name, fields[name])
        if not len(tokens) or tokens.dtype.kind not in "iu" or tokens.min() < 0 or tokens.max() >= 2**32:
            raise RecordedDataError(f"{where}: '{name}' must be a list of token ids, at least one, none below 0")
        if "loss_mask" in fields:
            mask = _array(where, "loss_mask", fields["loss_mask"])
            if mask.shape != tokens.shape or not np.isin(mask, (0, 1)).all():
                raise RecordedDataError(
                    f"{where}: 'loss_mask' must hold 0 or 1 for each of {len(tokens)} tokens, got {len(mask)} values"
                )
        else:
            mask = np.arange(len(tokens)) > 0
        temperature = fields.get("temperature", 1.0)
        coldest, hottest = TEMPERATURES
        if type(temperature) not in (int, float) or not coldest <= temperature <= hottest:
            raise RecordedDataError(
                f"{where}: 'temperature' must be a number from {coldest:g} to {hottest:g}, got {temperature!r:.40}"
            )
        result.tokens.append(tokens.astype(np.int64))
        result.trained.append(mask.astype(bool))
        result.temperatures.append(float(temperature))
    return result


def _names(fields: dict[str, Any]) -> str:
    return printable(str(sorted(fields)), 200)


def _array(where: str, name: str, value: Any) -> Any:
    try:
        array = np.asarray(value)
    except (ValueError, OverflowError):
        array = np.empty(0, object)
    if array.ndim != 1 or array.dtype.kind not in "iubf":
        raise RecordedDataError(f"{where}: '{name}' must be a flat list of numbers, got {printable(str(value), 40)}")
    return array
