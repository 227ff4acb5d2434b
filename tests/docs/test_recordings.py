"""docs/agents.md, "Files of recordings": its examples are read as they stand; "Conversations that you have": what its
script makes of other files is trained; docs/configuration.md, "Recorded batches on disk": what a run wrote is read so.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from app.cli import main
from datamodules import RecordedDataModule
from datamodules.conversations.chat import ChatEncoder, load_transcripts
from datamodules.files.recording import read_batch
from datamodules.prompts.tokenizers import load_tokenizer
from modules import ModelSource, build_model
from tests.docs.test_readme import ROOT
from tests.helpers.recorded_samples import byte_tokenizer
from tests.helpers.tiny_model import TINY_WITH_ENDS

SECTION = (ROOT / "docs" / "agents.md").read_text().partition("\n## Files of recordings\n")[2].partition("\n## ")[0]


HAVE = (
    (ROOT / "docs" / "agents.md").read_text().partition("\n## Conversations that you have\n")[2].partition("\n## ")[0]
)
ASKED = {"role": "user", "content": "Cancel #7."}
CALL = {"name": "cancel", "arguments": {"order": 7}}
NESTED = {"id": "c1", "type": "function", "function": {"name": "cancel", "arguments": '{"order": 7}'}}
CALLS, DONE = {"role": "assistant", "content": None, "tool_calls": [NESTED]}, {"role": "assistant", "content": "Done."}
RESULT = {"role": "tool", "tool_call_id": "c1", "name": "cancel", "content": "ok"}
SCHEMA = {"name": "cancel", "parameters": {"type": "object"}}
TOOLS = [{"type": "function", "function": SCHEMA}]
SAID = ['<tool>{"name": "cancel", "arguments": {"order": 7}}</tool><|end|>', "Done.<|end|>"]


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", SECTION, flags=re.MULTILINE | re.DOTALL)


DISK = (
    (ROOT / "docs" / "configuration.md")
    .read_text()
    .partition("\n### Recorded batches on disk\n")[2]
    .partition("\n## ")[0]
)


@pytest.fixture(autouse=True)
def _in_an_empty_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["arborist"])


def sequences(path: str, tokenizer: str | None = None) -> list[tuple[list[int], list[int], float, str]]:
    """Tokens, trained tokens, reward and task of each sequence, all in one group."""
    data = RecordedDataModule(path, tokenizer=tokenizer, shuffle=False)
    data.setup("fit")
    batch = data.batch(0)
    assert data.num_tasks == 1 and len(batch.group_ids.unique()) == 1
    masks = batch.split(batch.loss_mask)
    return [
        (tokens.tolist(), tokens[mask].tolist(), float(reward), task)
        for tokens, mask, reward, task in zip(batch.sequences(), masks, batch.rewards, batch.prompt_ids, strict=True)
    ]


def test_token_arrays() -> None:
    (script,) = blocks("python")
    exec(script, {})
    assert sequences("mine.npz") == [
        ([5, 6, 1, 2, 3], [3], 1.0, "add"),
        ([5, 6, 1, 2, 4], [4], 0.0, "add"),
        ([5, 6, 1, 2, 4, 7, 8], [8], 0.0, "add"),
    ]
    main(["inspect", "mine.npz"])
    main(["look", "mine.npz"])


def test_conversations_as_text() -> None:
    tokenizer = load_tokenizer("train:300", ["1+2=3 no 4 5"])
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.content }}{{ eos_token if m.role == 'assistant' else '' }}{% endfor %}"
    )
    tokenizer.save_pretrained("tokenizer")
    Path("mine.jsonl").write_text(blocks("jsonl")[0])
    said = [(tokenizer.decode(trained), reward) for _, trained, reward, _ in sequences("mine.jsonl", "tokenizer")]
    assert said == [("3<eos>", 1.0), ("4<eos>", 0.0), ("5<eos>", 0.0)]
    main(["inspect", "mine.jsonl", "--tokenizer", "tokenizer"])


def test_sequences(capsys: pytest.CaptureFixture[str]) -> None:
    Path("mine.jsonl").write_text(blocks("jsonl")[1])
    main(["inspect", "mine.jsonl"])
    assert "1 sequences of 5 to 5 tokens, 1 tokens trained" in capsys.readouterr().out


def test_what_a_run_has_recorded() -> None:
    tokenizer = "char:0123456789+-*="
    size = len(load_tokenizer(tokenizer, []))
    config = {**TINY_WITH_ENDS, "vocab_size": size, "max_position_embeddings": 64}
    build_model(ModelSource(config=config)).save_pretrained("model")
    flags = ["--config", str(ROOT / "configs/quickstart.yaml"), "--config", str(ROOT / "configs/debug/record.yaml")]
    flags += ["--model.model.path=model", "--data.batch_size=2", "--data.group_size=3", "--trainer.accelerator=cpu"]
    main(["predict", *flags, "--trainer.limit_predict_batches=1", "--run_dir=run"])
    Path("rollouts").symlink_to("run/rollouts")
    (script,) = re.findall(r"^```python\n(.*?)^```$", DISK, flags=re.MULTILINE | re.DOTALL)
    read: dict[str, Any] = {}
    exec(script, read)
    arrays, texts, groups = read["arrays"], read["texts"], read_batch(Path("rollouts"), 0)
    sequences = [one for group in groups for one in group.trajectories]
    assert len(sequences) == 6 and read["metadata"] == [one.metadata for one in sequences]
    assert read["sampled"].tolist() == sequences[0].tokens[sequences[0].loss_mask].tolist()
    assert [tuple(one) for one in texts["groups"]] == [(g.index, g.prompt_id, g.admitted_at, 3) for g in groups]
    assert texts["prompt_ids"] == [one.prompt_id for one in sequences]
    prose = DISK.partition("```")[0]
    named = set(re.findall(r"\w+", " ".join(re.findall(r"`([^`]+)`", prose))))
    assert set(arrays) <= named and set(texts) <= named, "all that is there is said"
    assert all(arrays[name].shape[0] == 6 for name in ("rewards", "group_ids", "temperatures"))
    prompts = ~sequences[0].loss_mask
    assert (sequences[0].versions[prompts] == -1).all()


BLOCK = {"type": "tool_use", "id": "c1", "name": "cancel", "input": {"order": 7}}
REQUEST = {
    "model": "m",
    "max_tokens": 9,
    "tools": [{"name": "cancel", "input_schema": {"type": "object"}}],
    "messages": [
        ASKED,
        {"role": "assistant", "content": [BLOCK]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": "ok"}]},
    ],
}
ANSWERS = [
    {"model": "m", "stop_reason": "tool_use", "content": [BLOCK]},
    {"model": "m", "stop_reason": "end_turn", "content": [{"type": "text", "text": "Done."}]},
]
SHAREGPT = [("human", "Cancel #7."), ("function_call", json.dumps(CALL)), ("observation", "ok"), ("gpt", "Done.")]
CHAT = [ASKED, CALLS, RESULT, DONE]
NOTED = [{**one, "extra": {"cost": 1}, "timestamp": 7} for one in CHAT]


@pytest.mark.parametrize(
    ("name", "record", "trained"),
    [
        (
            "sharegpt",
            {"conversations": [{"from": a, "value": b} for a, b in SHAREGPT], "tools": json.dumps(TOOLS)},
            [SAID],
        ),
        (
            "functions",
            {
                "functions": [SCHEMA],
                "messages": [
                    ASKED,
                    {"role": "assistant", "content": None, "function_call": NESTED["function"]},
                    {"role": "function", "content": "ok"},
                    DONE,
                ],
            },
            [SAID],
        ),
        ("pair", {"prompt": [ASKED], "chosen": [CALLS], "rejected": [DONE], "tools": TOOLS}, [SAID[:1], SAID[1:]]),
        (
            "pair",
            {
                "input": {"messages": [ASKED], "tools": TOOLS},
                "preferred_output": [CALLS],
                "non_preferred_output": [DONE],
            },
            [SAID[:1], SAID[1:]],
        ),
        ("tau_bench", {"task_id": 4, "trial": 1, "reward": 1.0, "info": {}, "traj": CHAT}, [SAID]),
        ("trajectory", {"messages": [*NOTED, {"role": "exit", "content": "", "extra": {}}], "info": {}}, [SAID]),
        ("trajectory", {"history": NOTED, "trajectory": []}, [SAID]),
        ("log", [[{**REQUEST, "messages": [ASKED]}, ANSWERS[0]], [REQUEST, ANSWERS[1]]], [SAID]),
    ],
)
def test_other_files_are_trained_as_what_they_say(
    name: str,
    record: Any,
    trained: list[list[str]],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (script,) = re.findall(r"^```python\n(.*?)^```$", HAVE, flags=re.MULTILINE | re.DOTALL)
    Path("theirs.jsonl").write_text(json.dumps(record))
    Path("theirs.json").write_text(json.dumps([record]))
    written = []
    for file in ("theirs.jsonl", "theirs.json"):
        monkeypatch.setattr(sys, "argv", ["convert.py", file])
        exec(script.replace("in from_sharegpt(", f"in from_{name}("), {})
        written.append(capsys.readouterr().out)
    assert written[0] == written[1]
    Path("mine.jsonl").write_text(written[0])
    tokenizer, lines = byte_tokenizer(), load_transcripts("mine.jsonl")
    made = [ChatEncoder(tokenizer).encode(one) for one in lines]
    turns = [zip(one.starts, one.ends, strict=True) for one in made]
    assert [
        [tokenizer.decode(one.tokens[a:b]) for a, b in each] for one, each in zip(made, turns, strict=True)
    ] == trained
    assert len({one.task for one in lines}) == 1
    assert all(("<|begin|>tool\nok<|end|>" in tokenizer.decode(one.tokens)) == (len(made) == 1) for one in made)
    assert all("Cancel #7." in tokenizer.decode(one.tokens) for one in made)
    assert name in ("tau_bench", "trajectory") or all('"parameters"' in tokenizer.decode(one.tokens) for one in made)
