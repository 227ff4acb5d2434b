"""`arborist inspect`: the same figures from every kind of file, checked against counting by hand; errors name the
field; nothing but the report is written."""

from __future__ import annotations

import gzip
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from app.batch import Trajectory
from app.cli import main
from app.tree import PrefixTree
from datamodules.conversations.sequence_files import load_sequences
from datamodules.conversations.tokens import Conversation, save_npz
from datamodules.files.recording import RolloutRecorder
from datamodules.groups import Group
from examples.vision.make_model import write
from tests.app.tree import brute
from tests.helpers.pictured import picture, pictured

SYSTEM = list(range(100, 140))
ROLLOUTS = [[*SYSTEM, *turn] for turn in ([1, 2, 3], [1, 2, 3, 4, 5], [1, 9, 9], [7] * 30, [7] * 30)]
MASKS = [[0] * 40 + [1] * (len(tokens) - 40) for tokens in ROLLOUTS]
CONFIG = {
    "model_type": "qwen3",
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}


def rows() -> list[dict[str, Any]]:
    return [{"tokens": tokens, "loss_mask": mask, "reward": 1.0} for tokens, mask in zip(ROLLOUTS, MASKS)]


def as_jsonl(folder: Path) -> Path:
    path = folder / "rollouts.jsonl"
    path.write_text("\n\n".join(json.dumps(row) for row in rows()) + "\n")
    return path


def as_gzip(folder: Path) -> Path:
    path = folder / "rollouts.jsonl.gz"
    with gzip.open(path, "wt") as file:
        file.writelines(
            json.dumps({"input_ids": row["tokens"], "loss_mask": row["loss_mask"]}) + "\n" for row in rows()
        )
    return path


def as_parquet(folder: Path) -> Path:
    arrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    path = folder / "rollouts.parquet"
    parquet.write_table(arrow.Table.from_pylist(rows()), path, row_group_size=2)
    return path


def as_npz(folder: Path) -> Path:
    """Each rollout as a conversation with one generated turn."""
    path = folder / "rollouts.npz"
    save_npz(
        path,
        [
            Conversation("0", k, "m", 1.0, "test", np.array(t), *(np.array([x]) for x in (40, len(t), 0)))
            for k, t in enumerate(ROLLOUTS)
        ],
    )
    return path


def as_recording(folder: Path) -> Path:
    """Two batches that a run recorded."""
    recorder, groups = RolloutRecorder(folder / "recorded"), []
    for k, (tokens, mask) in enumerate(zip(ROLLOUTS, MASKS)):
        generated = torch.tensor(mask, dtype=torch.bool)
        trajectory = Trajectory(
            tokens=torch.tensor(tokens),
            loss_mask=generated,
            behavior_logprobs=-generated.float(),
            versions=torch.where(generated, 0, -1),
            reward=1.0,
            group_id=k,
            episode_id=k,
            prompt_id=str(k),
        )
        groups.append(Group(k, str(k), 0, [trajectory]))
    recorder.write(0, groups[:2])
    recorder.write(1, groups[2:])
    return folder / "recorded"


def inspect(path: Path, out: Path, *options: str) -> dict[str, Any]:
    main(["inspect", str(path), "--out", str(out), *options])
    return json.loads((out / "inspect.json").read_text())


@pytest.mark.parametrize("write", [as_jsonl, as_gzip, as_parquet, as_npz, as_recording])
def test_counts_of_every_kind_of_file(write: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = inspect(write(tmp_path), tmp_path / "out")
    nodes = brute.trie(ROLLOUTS)
    assert found["sequences"] == 5 and found["trained"] == sum(map(sum, MASKS))
    assert found["dense_tokens"] == sum(map(len, ROLLOUTS))
    assert found["leaf_tokens"] == brute.leaf_tokens(ROLLOUTS)
    assert found["tree_tokens"] == len(nodes)
    assert found["tree_pairs"] == sum(len(word) for _, word in nodes)
    assert found["dense_pairs"] == sum(math.comb(len(r) + 1, 2) for r in ROLLOUTS)
    assert found["depths"] == {"1": 1, "2": 2} and found["fan_outs"] == {"2": 2}
    assert (tmp_path / "out" / "tree.png").read_bytes().startswith(b"\x89PNG")
    text = capsys.readouterr().out
    for value in (found["dense_tokens"], found["leaf_tokens"], found["tree_tokens"], found["tree_pairs"]):
        assert f"{value:,}" in text
    assert f"{found['dense_tokens'] / found['tree_tokens']:.2f} x" in text
    assert "model" not in found


def test_predictions_for_a_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """FLOPs by hand; the plan within its budgets; memory in parts that add up; a directory and a file name a model."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(CONFIG))
    path = as_jsonl(tmp_path)
    found = inspect(path, tmp_path / "a", "--model", str(tmp_path / "model"), "--dtype", "float32")
    model = found["model"]
    linear = 2 * 4 * 64 * ((2 * 4 + 2 * 2) * 16 + 3 * 128)
    flops = 3 * (
        found["dense_tokens"] * linear + 4 * found["dense_pairs"] * 4 * 4 * 16 + 2 * found["trained"] * 64 * 512
    )
    assert model["dense_flops"] == pytest.approx(flops)
    assert model["dense_flops"] > model["leaf_flops"] > model["tree_flops"] > 0
    assert model["speed_up_over_dense"] > model["speed_up_over_leaf"] > 1
    parts = {name: size for name, size in model["memory"].items() if name not in ("total", "parameters")}
    assert sum(parts.values()) == model["memory"]["total"]
    # Attention alone, nothing sharded, text.
    assert parts.pop("states") == parts.pop("gathered") == parts.pop("pictures") == 0
    assert all(size > 0 for size in parts.values())
    assert model["memory"]["parameters"] == 4 * model["parameters"] == model["memory"]["gradients"]
    assert model["plan"]["extra_forward_tokens"] == 0
    text = capsys.readouterr().out
    assert "Plan" in text and "path cache" in text and "chunks of at most" in text

    tight = inspect(
        path, tmp_path / "b", "--model", str(tmp_path / "model" / "config.json"), "--chunk-tokens", "16",
        "--live-tokens", "20",
    )["model"]  # fmt: skip
    assert tight["plan"]["peak_live_tokens"] <= 20 and tight["plan"]["extra_forward_tokens"] > 0
    assert tight["memory"]["gradients"] == 2 * tight["memory"]["parameters"]  # bf16 parameters, float32 gradients
    assert tight["memory"]["live_activations"] < model["memory"]["live_activations"]


def test_a_hybrid_is_counted_by_what_its_layers_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Three layers that scan to one that attends: a quarter of the pairs and of the keys, and states instead."""
    scans = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16}
    fields = CONFIG | {"model_type": "qwen3_5_text", "num_hidden_layers": 4, "linear_value_head_dim": 8, **scans}
    for name, one in (("hybrid", fields), ("attention", CONFIG | {"num_hidden_layers": 4})):
        (tmp_path / f"{name}.json").write_text(json.dumps(one))
    path, options = as_jsonl(tmp_path), ("--dtype", "float32", "--chunk-tokens", "16")
    hybrid, attention = (
        inspect(path, tmp_path / name, "--model", str(tmp_path / f"{name}.json"), *options)
        for name in ("hybrid", "attention")
    )
    found, plain = hybrid["model"]["memory"], attention["model"]["memory"]
    printed = capsys.readouterr().out
    scans = hybrid["model"]["scans"]
    assert "layers: 1 with keys and values, 3 with a state" in printed and attention["model"]["scans"] is None
    words = f"states: 0.00916 MiB at a fork, at most {scans['held']} at a time; forwards of {scans['pieces']} pieces"
    assert f"{words}, scans of {scans['rows']} rows in {scans['levels']} steps" in printed
    assert scans["state_bytes"] == 4 * 3 * (4 * 16 * 8 + 3 * (2 * 2 * 16 + 4 * 8))
    assert found["states"] == 2 * scans["held"] * scans["state_bytes"]
    assert scans["rows"] >= hybrid["needed_tokens"] and 1 < scans["levels"] <= scans["rows"]
    # 40 tokens in chunks of 16 are three; then [1] above [2, 3, 4] and [9], and 29 sevens, two. Last tokens never run.
    assert scans["pieces"] == 3 + 3 + 2
    assert found["states"] % (3 * 2 * 4 * (4 * 16 * 8 + 3 * (2 * 2 * 16 + 4 * 8))) == 0 < found["states"]
    assert found["path_cache"] == pytest.approx(plain["path_cache"] / 4, rel=1e-6) and plain["states"] == 0
    model = hybrid["model"]
    linear = 2 * 64 * ((2 * 4 + 2 * 2) * 16 + 4 * 3 * 128 + 3 * (96 + 2 * 32))
    scan = 2 * 3 * (4 * (2 * 64 * 16 + 64 * 8 + 2 * 16 * 8 + 64 * 24 // 2 + 16 * 8) + 4 * 96)
    pairs, trained = 4 * hybrid["dense_pairs"] * 4 * 16, 2 * hybrid["trained"] * 64 * 512
    assert model["dense_flops"] == pytest.approx(3 * (hybrid["dense_tokens"] * (linear + scan) + pairs + trained))
    assert model["dense_seconds"] > model["leaf_seconds"] > 0


def test_temperatures_do_not_share_and_the_limit_cuts(tmp_path: Path) -> None:
    path = tmp_path / "two.jsonl"
    path.write_text("".join(json.dumps({"tokens": [1, 2, 3], "temperature": t}) + "\n" for t in (1, 0.5, 1.0, 2)))
    assert inspect(path, tmp_path)["tree_tokens"] == 9
    assert inspect(path, tmp_path, "--limit", "1")["sequences"] == 1


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"loss_mask": [1]}', "rollouts.jsonl:2: no 'tokens'"),
        ('{"tokens": [1, -2]}', "rollouts.jsonl:2: 'tokens' must be a list of token ids"),
        ('{"tokens": []}', "rollouts.jsonl:2: 'tokens' must be"),
        ('{"tokens": [[1], [2, 3]]}', "rollouts.jsonl:2: 'tokens' must be a flat list"),
        ('{"tokens": ["a"]}', "rollouts.jsonl:2: 'tokens' must be a flat list"),
        ('{"tokens": [1, 2], "loss_mask": [1]}', "rollouts.jsonl:2: 'loss_mask' must hold 0 or 1 for each of 2"),
        ('{"tokens": [1, 2], "loss_mask": [1, 7]}', "'loss_mask' must hold 0 or 1"),
        ('{"tokens": [1, 2], "temperature": 0}', "'temperature' must be a number from 0.001 to 1000"),
        ("[1, 2]", "rollouts.jsonl:2: expected a JSON object"),
        ("{", "rollouts.jsonl:2: not valid JSON"),
    ],
)
def test_broken_lines_are_named(line: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "rollouts.jsonl"
    path.write_text('{"tokens": [1, 2, 3]}\n' + line + "\n")
    with pytest.raises(SystemExit) as ended:
        inspect(path, tmp_path / "out")
    assert ended.value.code == 2 and words in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_other_mistakes_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = as_jsonl(tmp_path)
    empty, text, odd = tmp_path / "empty.jsonl", tmp_path / "text.jsonl", tmp_path / "odd.csv"
    empty.write_text("\n")
    text.write_text(json.dumps({"task_id": 1, "reward": 1.0, "messages": []}) + "\n")
    odd.write_text("")
    (tmp_path / "nothing").mkdir()
    config = tmp_path / "config.json"
    config.write_text('{"hidden_size": 8}')
    prefix, negative = tmp_path / "prefix.json", tmp_path / "negative.json"
    prefix.write_text('{"model_type": "paligemma"}')
    negative.write_text(json.dumps({**CONFIG, "hidden_size": -64}))
    for path, options, words in [
        (tmp_path / "missing.npz", (), "missing.npz"),
        (empty, (), "no sequence in it"),
        (text, (), "--tokenizer"),
        (odd, (), "unknown kind of file"),
        (tmp_path / "nothing", (), "no recorded batches"),
        (good, ("--limit", "0"), "--limit: must be at least 1"),
        (good, ("--live-tokens", "-1"), "--live-tokens: must be at least 1"),
        (good, ("--model", str(config)), "no field 'model_type'"),
        (good, ("--model", str(odd)), "no readable JSON"),
        (good, ("--model", str(prefix)), "--model: paligemma: every token of its prompt sees all"),
        (good, ("--model", str(negative)), "--model: qwen3 cannot be built from its configuration: "),
    ]:
        with pytest.raises(SystemExit) as ended:
            inspect(path, tmp_path / "out", *options)
        assert ended.value.code == 2 and words in capsys.readouterr().err, words
    assert not (tmp_path / "out").exists()


def test_parquet_without_the_column_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    path = tmp_path / "other.parquet"
    parquet.write_table(arrow.table({"text": ["a"]}), path)
    with pytest.raises(SystemExit):
        inspect(path, tmp_path / "out")
    assert "no column 'tokens' or 'input_ids' among ['text']" in capsys.readouterr().err
    path.write_bytes(b"PAR1 not really")
    with pytest.raises(SystemExit):
        inspect(path, tmp_path / "out")
    assert "not a readable parquet file" in capsys.readouterr().err


def test_pictures_of_recorded_batches_tell_sequences_apart(tmp_path: Path) -> None:
    """Two pictures under equal ids: nothing behind them is shared."""
    shown = [pictured([1, picture(k // 2), 2], episode_id=k) for k in range(4)]
    recorder = RolloutRecorder(tmp_path / "rollouts")
    for version in range(2):
        recorder.write(version, [Group(0, "shown", 0, shown)])
    found = load_sequences(tmp_path / "rollouts")
    assert len(found.pictures) == 2 and found.images is not None and len(found.images) == 8
    tree = PrefixTree.build(found.tokens, found.trained, images=found.images, pictures=found.pictures)
    assert tree.num_tokens == 1 + 2 * (4 + 1 + 3)


def test_a_tower_is_counted_once_a_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """FLOPs by hand: of 16 patches, each of which attends to all."""
    write(tmp_path / "model")
    shown = [pictured([1, picture(k // 2, 16, 28, 28), 2], episode_id=k) for k in range(4)]
    RolloutRecorder(tmp_path / "rollouts").write(0, [Group(0, "shown", 0, shown)])
    found = inspect(tmp_path / "rollouts", tmp_path / "out", "--model", str(tmp_path / "model"), "--dtype", "float32")
    tower = found["model"]["tower"]
    once = 2 * 2 * 16 * (4 * 48**2 + 2 * 48 * 96 + 2 * 16 * 48)
    for system, runs in (("dense", 4), ("leaf", 2), ("tree", 2)):  # every sequence is there twice
        assert (tower[f"{system}_runs"], tower[f"{system}_flops"]) == (runs, runs * once)
    assert tower["feature_bytes"] == 2 * 16 * 96 * 2 * 4 and tower["graph_bytes"] > tower["feature_bytes"]
    text = capsys.readouterr().out
    assert "tower runs" in text and "a trained tower has three times the FLOPs" in text


def test_pictures_of_sequences_that_are_left_out_do_not_run(tmp_path: Path) -> None:
    """Three pictures, each in two sequences; the first two sequences show the third of them."""
    write(tmp_path / "model")
    shown = [pictured([1, picture(2 - k // 2, 16, 28, 28), 2], episode_id=k) for k in range(6)]
    RolloutRecorder(tmp_path / "rollouts").write(0, [Group(0, "shown", 0, shown)])
    given = ("--model", str(tmp_path / "model"), "--dtype", "float32", "--limit", "3")
    tower = inspect(tmp_path / "rollouts", tmp_path / "out", *given)["model"]["tower"]
    assert [tower[f"{system}_runs"] for system in ("dense", "leaf", "tree")] == [3, 2, 2]
    text = [pictured([1, 2], episode_id=k) for k in range(2)]
    RolloutRecorder(tmp_path / "mixed").write(0, [Group(0, "mixed", 0, [*text, *shown[2:]])])
    assert inspect(tmp_path / "mixed", tmp_path / "out", *given[:-1], "2")["model"]["tower"] is None
