"""Recorded data that is damaged, cut, fake, hostile or out of form: refused in one line, or read as sound data; where a
file holds checksums (npz, gzip, recorded batches), as the same data."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given
from pyarrow import parquet
from safetensors.torch import load_file, save_file

from app.batch import RolloutBatch
from datamodules.conversations.chat import load_system, load_transcripts
from datamodules.conversations.importers import import_gsm8k, import_tau
from datamodules.conversations.sequence_files import Sequences, load_sequences
from datamodules.conversations.tau import read_checkout
from datamodules.conversations.tokens import Conversation, load_npz, save_npz
from datamodules.files import recording
from datamodules.files.recording import RolloutRecorder, read_batch
from datamodules.groups import to_batch
from datamodules.recorded import RecordedDataModule
from tests.datamodules.conversations.test_importers import TOOLS, airline, tau_checkout
from tests.datamodules.files.test_recording import in_the_format_before, some_groups
from tests.fuzz.damage import DEEP, VALUES, Refused, damaged, edits, examples, gzipped, is_sound_text, outcome
from tests.helpers.recorded_samples import byte_tokenizer, line

SEQUENCES: list[dict[str, Any]] = [
    {"tokens": [5, 6, 7], "loss_mask": [0, 1, 1], "temperature": 0.7},
    {"input_ids": [1, 2], "text": "é"},
]
TRANSCRIPTS = [line(str(task), trial, float(trial)) for task in range(2) for trial in range(2)]


def written(records: list[Any]) -> bytes:
    return "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records).encode()


def refused(found: Any, said: str) -> None:
    assert isinstance(found, Refused), found
    with pytest.raises(AssertionError, match=said):
        raise AssertionError(found.message)


# ---- a sequence a line


def sequences(path: Path) -> Sequences | Refused:
    found: Sequences | Refused = outcome(lambda: load_sequences(path))
    if isinstance(found, Sequences):
        assert len(found.tokens) == len(found.trained) == len(found.temperatures) >= 1
        for tokens, trained, temperature in zip(found.tokens, found.trained, found.temperatures):
            assert (
                tokens.dtype == np.int64 and trained.dtype == bool and tokens.shape == trained.shape == (len(tokens),)
            )
            assert len(tokens) >= 1 and tokens.min() >= 0 and tokens.max() < 2**32 and 1e-3 <= temperature <= 1e3
        assert any(trained.any() for trained in found.trained)
    return found


@examples(150)
@given(edits)
def test_damaged_sequences(tmp_path: Path, changes: list[Any]) -> None:
    path, packed = tmp_path / "a.jsonl", tmp_path / "b.jsonl.gz"
    path.write_bytes(damaged(written(SEQUENCES), changes))
    sequences(path)
    packed.write_bytes(damaged(gzipped(written(SEQUENCES)), changes))
    found = sequences(packed)
    if isinstance(found, Sequences):
        assert [one.tolist() for one in found.tokens] == [[5, 6, 7], [1, 2]]


@pytest.mark.parametrize("field", ["tokens", "loss_mask", "temperature", "input_ids", "text"])
def test_edited_sequences(tmp_path: Path, field: str) -> None:
    path = tmp_path / "a.jsonl"
    for value in VALUES:
        record = json.dumps({**SEQUENCES[0], field: "HERE"}).replace('"HERE"', value)
        path.write_text(f"{record}\n")
        found = sequences(path)
        if isinstance(found, Sequences) and field == "loss_mask":
            assert found.trained[0].tolist() == [False, True, True]


@examples(80)
@given(edits)
def test_damaged_parquet(tmp_path: Path, changes: list[Any]) -> None:
    whole, path = tmp_path / "whole", tmp_path / "a.parquet"
    if not whole.exists():
        columns = {"tokens": [[5, 6, 7], [1, 2]], "loss_mask": [[0, 1, 1], [0, 1]], "temperature": [0.7, 1.0]}
        parquet.write_table(pa.table(columns), whole)
    path.write_bytes(damaged(whole.read_bytes(), changes))
    sequences(path)


def test_a_file_that_trains_nothing_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(written([{"tokens": [1, 2], "loss_mask": [0, 0]}]))
    refused(sequences(path), r"a\.jsonl: no token in it is trained")
    path.write_bytes(written([{"tokens": [1, 2], "loss_mask": [0, 0]}, {"tokens": [1, 2]}]))
    assert isinstance(sequences(path), Sequences)


# ---- conversations as text


def texts(path: Path) -> Any:
    found = outcome(lambda: load_transcripts(path))
    if not isinstance(found, Refused):
        assert found
        for one in found:
            assert np.isfinite(one.reward) and abs(one.reward) <= 1e9 and one.trial >= 0
            assert is_sound_text(json.dumps([one.task, one.model, one.messages], ensure_ascii=False))
    return found


@examples(150)
@given(edits)
def test_damaged_conversations(tmp_path: Path, changes: list[Any]) -> None:
    path, packed, system = tmp_path / "a.jsonl", tmp_path / "b.jsonl.gz", tmp_path / "s.json"
    path.write_bytes(damaged(written(TRANSCRIPTS[:2]), changes))
    texts(path)
    packed.write_bytes(damaged(gzipped(written(TRANSCRIPTS)), changes))
    found = texts(packed)
    if not isinstance(found, Refused):
        assert [one.messages for one in found] == [one["messages"] for one in TRANSCRIPTS]
    system.write_bytes(damaged(json.dumps({"system_prompt": "Be kind.", "tools": TOOLS}).encode(), changes))
    prompt = outcome(lambda: load_system(system))
    assert isinstance(prompt, Refused) or is_sound_text(prompt.text + json.dumps(prompt.tools, ensure_ascii=False))


@pytest.mark.parametrize("field", ["task_id", "trial", "reward", "model", "messages"])
def test_edited_conversations(tmp_path: Path, field: str) -> None:
    path = tmp_path / "a.jsonl"
    for value in VALUES:
        path.write_text(json.dumps({**line(), field: "HERE"}).replace('"HERE"', value) + "\n")
        texts(path)


@pytest.mark.parametrize("field", ["role", "content", "tool_calls", "id"])
def test_edited_messages(tmp_path: Path, field: str) -> None:
    byte_tokenizer().save_pretrained(tmp_path / "tokenizer")
    path = tmp_path / "a.jsonl"
    for value in VALUES:
        record = line()
        record["messages"][3] = {**record["messages"][3], field: "HERE"}
        path.write_text(json.dumps(record).replace('"HERE"', value) + "\n")
        if not isinstance(texts(path), Refused):
            batch_of(path, tokenizer=str(tmp_path / "tokenizer"))


# ---- token arrays


def conversations() -> list[Conversation]:
    def turns(*numbers: int) -> Any:
        return np.array(numbers, np.int64)

    return [
        Conversation(f"task {k}", 0, "m", k / 2, "here", turns(1, 2, 3, 4, 5, 6), turns(2, 4), turns(3, 6), turns(1, 3))
        for k in range(3)
    ]


def batch_of(path: Path, **options: Any) -> RolloutBatch | Refused:
    """The first batch of a file, which must be one that is trained on."""

    def call() -> RolloutBatch:
        data = RecordedDataModule(path=str(path), shuffle=False, **options)
        data.setup()
        return data.batch(0)

    found: RolloutBatch | Refused = outcome(call)
    if isinstance(found, RolloutBatch):
        assert bool(found.loss_mask.any()) and int(found.tokens.max()) < 2**32
        assert all(map(is_sound_text, found.prompt_ids))
        assert is_sound_text(json.dumps(found.metadata, ensure_ascii=False))
    return found


def same(one: Conversation, other: Conversation) -> bool:
    named = ("task", "trial", "model", "reward")
    arrays = ("tokens", "starts", "ends", "steps")
    return all(getattr(one, name) == getattr(other, name) for name in named) and all(
        np.array_equal(getattr(one, name), getattr(other, name)) for name in arrays
    )


@pytest.fixture(scope="module")
def arrays(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("arrays") / "whole.npz"
    save_npz(path, conversations())
    return path


@examples(250)
@given(edits)
def test_damaged_arrays_are_refused_or_the_same(tmp_path: Path, arrays: Path, changes: list[Any]) -> None:
    path = tmp_path / "a.npz"
    path.write_bytes(damaged(arrays.read_bytes(), changes))
    found = outcome(lambda: load_npz(path))
    assert isinstance(found, Refused) or all(map(same, found, conversations()))


ARRAY_EDITS: dict[str, Callable[[Any], Any]] = {
    "negative": lambda a: a - 1,
    "large": lambda a: a.astype(np.int64) + 2**62,
    "largest": lambda a: np.full(a.shape, 2**64 - 1, np.uint64),
    "float": lambda a: a.astype(np.float64) + 0.5,
    "nan": lambda a: a * np.float64("nan"),
    "huge": lambda a: a + 3e38,
    "complex": lambda a: a.astype(np.complex128) + 1j,
    "text": lambda a: a.astype(str),
    "bytes": lambda a: a.astype("S8"),
    "bool": lambda a: a.astype(bool),
    "dates": lambda a: np.zeros(a.shape, "M8[s]"),
    "unsigned": lambda a: a.astype(np.uint64),
    "half": lambda a: np.array(["\ud83d"] * len(a)),
    "record": lambda a: np.zeros(a.shape, [("x", "i4")]),
    "point": lambda a: np.array(a[0]),
    "square": lambda a: np.stack([a, a]),
    "short": lambda a: a[:-1],
    "empty": lambda a: a[:0],
    "reversed": lambda a: a[::-1],
    "twos": lambda a: np.full(a.shape, 2),
}


def test_edited_arrays(tmp_path: Path, arrays: Path) -> None:
    """Every array in every wrong way: those that hold names, too."""
    whole = dict(np.load(arrays))
    path = tmp_path / "a.npz"
    taken = set()
    for name, array in whole.items():
        for edit, change in ARRAY_EDITS.items():
            try:
                edited = change(array)
            except (TypeError, ValueError):  # names have no numbers
                continue
            np.savez(path, **{**whole, name: edited})
            if isinstance(batch_of(path), RolloutBatch):
                taken.add((name, edit))
    harmless = {
        "reward": {"negative", "float", "unsigned", "reversed", "twos"},
        "system_ids": {"negative", "twos", "empty"},
        "ids": {"negative", "twos"},
        "trial": {"twos"},
        "turn_step": {"negative", "twos"},
        "task_names": {"text", "reversed"},
        "model_names": {"text"},
    }
    allowed = {(name, edit) for name in whole for edit in harmless.get(name, set()) | {"unsigned", "reversed"}}
    assert taken <= allowed, taken - allowed


def test_files_that_are_no_archives(tmp_path: Path, arrays: Path) -> None:
    path = tmp_path / "a.npz"
    with path.open("wb") as file:
        np.save(file, np.arange(3))
    refused(outcome(lambda: load_npz(path)), "not a readable npz file .File is not a zip file")
    with zipfile.ZipFile(arrays) as source, zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as target:
        for name in source.namelist():
            target.writestr(name, source.read(name) + b"\x00" * (name == "ids.npy"))
    refused(outcome(lambda: load_npz(path)), r"ids\.npy goes on behind its array")
    data = bytearray(arrays.read_bytes())
    data[data.rindex(b"turn_end.npy") - 14] = 132  # a comment, which swallows the names after it
    path.write_bytes(data)
    refused(outcome(lambda: load_npz(path)), "its directory does not list every array")
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as target:
        target.writestr(
            "ids.npy", b"\x93NUMPY\x01\x00\x46\x00{'descr': '<i8', 'fortran_order': False, 'shape': (10**15,)}"
        )
    refused(outcome(lambda: load_npz(path)), "not a readable npz file")


def test_a_bomb_is_refused_before_it_is_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.npz"
    np.savez_compressed(path, ids=np.zeros(4_000_000, np.int64))
    monkeypatch.setattr("datamodules.files.data_files._UNSUSPICIOUS_BYTES", 2**22)
    refused(outcome(lambda: load_npz(path)), r"a\.npz: its .* bytes unpack to more than")


# ---- recorded batches


def as_data(batch: RolloutBatch) -> Any:
    return batch.tensors(), batch.prompt_ids, batch.finish_reasons, batch.metadata


def equal(one: RolloutBatch, other: RolloutBatch) -> bool:
    mine, theirs = as_data(one), as_data(other)
    return mine[1:] == theirs[1:] and all(torch.equal(value, theirs[0][name]) for name, value in mine[0].items())


@pytest.fixture(scope="module")
def whole_batch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return RolloutRecorder(tmp_path_factory.mktemp("batch")).write(1, some_groups())


@examples(300)
@given(edits)
def test_damaged_batches_are_refused_or_the_same(tmp_path: Path, whole_batch: Path, changes: list[Any]) -> None:
    path = tmp_path / "batch_00000001.safetensors"
    path.write_bytes(damaged(whole_batch.read_bytes(), changes))
    found = outcome(lambda: to_batch(read_batch(tmp_path, 1)))
    assert isinstance(found, Refused) or equal(found, to_batch(some_groups()))


TENSOR_EDITS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "negative": lambda t: (t.to(torch.float64) - 5).to(t.dtype if t.dtype != torch.bool else torch.int8),
    "nan": lambda t: t.float() * float("nan"),
    "huge": lambda t: t.float() + 3e38,
    "double": lambda t: t.double(),
    "half": lambda t: t.bfloat16(),
    "complex": lambda t: t.to(torch.complex64),
    "point": lambda t: t[0],
    "square": lambda t: torch.stack([t, t]),
    "short": lambda t: t[:-1],
    "empty": lambda t: t[:0],
    "large": lambda t: t.long() + 2**62,
}


@pytest.mark.parametrize("is_old", [True, False])
def test_edited_batches(tmp_path: Path, whole_batch: Path, is_old: bool) -> None:
    """By somebody who writes the right hash over it, too."""
    path = tmp_path / "batch_00000001.safetensors"
    if is_old:
        save_file(**in_the_format_before(), filename=path)
    tensors = load_file(path if is_old else whole_batch)
    texts: list[Any] = [json.loads(value) for value in VALUES if not value.startswith(("[[[", '{"a":{', "11111"))]
    edited = [{**tensors, name: change(t)} for name, t in tensors.items() for change in TENSOR_EDITS.values()]
    edited += [{k: t for k, t in tensors.items() if k != name} for name in tensors]
    edited += [{**tensors, "more": torch.zeros(3)}, {**tensors, "columns.more": torch.zeros(3)}]
    for changed in edited:
        changed = {name: t.contiguous() for name, t in changed.items()}
        found = outcome(lambda changed=changed: store(path, changed, is_old))
        assert isinstance(found, Refused) or as_data(found)
    for key in ("groups", "prompt_ids", "finish_reasons", "metadata"):
        for value in [*texts, *(json.dumps(text) for text in texts), "[" * 100_000]:
            outcome(lambda key=key, value=value: store(path, tensors, is_old, **{key: value}))


def store(path: Path, tensors: dict[str, torch.Tensor], is_old: bool, **changes: Any) -> RolloutBatch:
    header = in_the_format_before(**changes)["metadata"]
    if not is_old:
        if changes:
            tensors = {**tensors, "json": torch.frombuffer(bytearray(header["batch"].encode()), dtype=torch.uint8)}
        header = {"format": recording.FORMAT, "version": "1", "sha256": recording._hash(1, tensors)}
    save_file(tensors, path, metadata=header)
    return to_batch(read_batch(path.parent, 1))


# ---- checkouts


@examples(60)
@given(edits)
def test_damaged_checkouts(tmp_path_factory: pytest.TempPathFactory, changes: list[Any]) -> None:
    root = tmp_path_factory.mktemp("clone")
    tau_checkout(root, [airline(0, 0), airline(1, 0)], "Be kind.", TOOLS)
    results = root / "historical_trajectories" / "gpt-4o-airline.json"
    source = root / "tau_bench" / "envs" / "airline" / "tools" / "cancel.py"
    before = results.read_bytes()
    results.write_bytes(damaged(before, changes))
    found = outcome(lambda: read_checkout(root))
    assert isinstance(found, Refused) or all(is_sound_text(one) for one in found.refused)
    results.write_bytes(before)
    source.write_bytes(damaged(source.read_bytes(), changes))
    outcome(lambda: read_checkout(root))
    problems = root / "grade_school_math" / "data"
    problems.mkdir(parents=True)
    for name in ("train.jsonl", "test.jsonl"):
        (problems / name).write_bytes(damaged(written([{"question": "q", "answer": "#### 1"}] * 2), changes))
    outcome(lambda: import_gsm8k(root, root / "out"))


@pytest.mark.parametrize("value", VALUES)
def test_edited_checkouts(tmp_path: Path, value: str) -> None:
    root = tau_checkout(tmp_path / "clone", [airline(0, 0), airline(1, 0)], "Be kind.", TOOLS)
    results = root / "historical_trajectories" / "gpt-4o-airline.json"
    entries = json.loads(results.read_text())
    for field in ("task_id", "reward", "trial", "traj"):
        changed = [{**entries[0], field: "HERE"}, entries[1]]
        results.write_text(json.dumps(changed).replace('"HERE"', value))
        outcome(lambda: read_checkout(root))
    calls = next(message for message in entries[0]["traj"] if message.get("tool_calls"))["tool_calls"]
    calls[0]["function"]["arguments"] = value
    results.write_text(json.dumps(entries))
    found = outcome(lambda: read_checkout(root))
    assert isinstance(found, Refused) or len(found.files[0].transcripts) + len(found.refused) == 2


def test_hostile_checkouts(tmp_path: Path) -> None:
    root = tau_checkout(tmp_path / "clone", [airline(0, 0)], "Be kind.", TOOLS)
    tools = root / "tau_bench" / "envs" / "airline" / "tools" / "cancel.py"
    head = "class T:\n    def get_info():\n        return "
    for text in (
        "\x00",
        head + DEEP,
        head + "-" * 50_000 + "1",
        head + "{[]: 1}",
        head + "[1]",
        head + "{**{}}",
        "\ufeff(",
    ):
        tools.write_text(text, encoding="utf-8")
        refused(outcome(lambda: read_checkout(root)), "cancel.py")
    refused(outcome(lambda: read_checkout(root, "/etc/*")), "--results: '/etc/.' is no pattern")


def test_a_checkout_names_no_file_outside_the_data_folder(tmp_path: Path) -> None:
    root = tmp_path / "clone"
    results = root / "data" / "tau2" / "results" / "final"
    results.mkdir(parents=True)
    info = {"environment_info": {"domain_name": "../../../stray", "policy": "p"}, "agent_info": {"llm": "m"}}
    (results / "a.json").write_text(json.dumps({"info": info, "simulations": []}))
    refused(outcome(lambda: import_tau(root, tmp_path / "out")), r"domain_name '\.\./\.\./\.\./stray' is no plain name")
