"""Preference pairs: what a batch holds, what is refused, and that DPO learns from them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from app.tree import PrefixTree
from datamodules import PairsDataModule
from datamodules.prompts import JsonlPrompts
from modules import ModelSource, PolicyModule
from tests.helpers.tiny_policy import CONFIG, Metrics
from tests.helpers.tiny_policy import trainer as tiny_trainer

CHAR = "char:0123456789+="


def pairs(path: Path, records: list[dict[str, Any]] | None = None, **options: Any) -> PairsDataModule:
    records = records or [
        {"prompt": f"{i}+{i}=", "chosen": str(2 * i), "rejected": str(2 * i + 1)} for i in range(1, 9)
    ]
    file = path / "pairs.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    source = JsonlPrompts(str(file), question_field="prompt", answer_field="chosen", shuffle=False)
    return PairsDataModule(source, **{"tokenizer": CHAR, "batch_size": 4, **options})


def test_a_pair_is_a_group_of_two_episodes(tmp_path: Path) -> None:
    data = pairs(tmp_path)
    data.setup("fit")
    batch = data.batch(1)
    assert batch.group_ids.tolist() == [4, 4, 5, 5, 6, 6, 7, 7] and batch.episode_ids.unique().numel() == 8
    assert batch.rewards.tolist() == [1.0, 0.0] * 4
    for i, tokens in enumerate(batch.sequences()):
        mask, number = batch.split(batch.loss_mask)[i], 5 + i // 2
        assert data.tokenizer.decode(tokens[~mask]) == f"{number}+{number}="
        assert data.tokenizer.decode(tokens[mask]) == f"{2 * number + i % 2}<eos>"
    tree = PrefixTree.build(batch.sequences())
    assert tree.num_tokens < tree.num_dense_tokens  # prompts and first digits are shared
    assert data.batch(3).prompt_ids == batch.prompt_ids  # the file again


def test_answers_may_be_messages(tmp_path: Path) -> None:
    question = {"role": "user", "content": "1+1="}
    answers = {
        name: [question, {"role": "assistant", "content": text}] for name, text in (("chosen", "2"), ("rejected", "3"))
    }
    data = pairs(tmp_path, [{"prompt": "1+1=", **answers}], batch_size=1)
    data.setup("fit")
    sequences = data.batch(0).sequences()
    assert [data.tokenizer.decode(tokens) for tokens in sequences] == ["1+1=2<eos>", "1+1=3<eos>"]


def test_pairs_that_say_nothing_are_refused_before_the_first_step(tmp_path: Path) -> None:
    good = {"prompt": "1+1=", "chosen": "2", "rejected": "3"}
    data = pairs(tmp_path, [good, {**good, "rejected": "2"}, good, {**good, "rejected": ""}, {**good, "chosen": ""}])
    with pytest.raises(ValueError, match=r"prompts: 3 pairs say nothing, .* \(such as '.*:2', '.*:4', '.*:5'\); leave"):
        data.setup("fit")


def test_dpo_comes_to_prefer_the_chosen_answers(tmp_path: Path) -> None:
    model = ModelSource(config={**CONFIG, "vocab_size": 16})
    module = PolicyModule(
        model,
        optimizer=lambda params: torch.optim.AdamW(params, lr=0.01),
        objective="dpo",
        objective_options={"beta": 1.0},
        reference="initial",
        minibatches=2,
    )
    torch.manual_seed(0)
    metrics = Metrics()
    tiny_trainer(metrics).fit(module, pairs(tmp_path, batch_size=8, batches_per_epoch=6))
    assert len(metrics.steps) == 12
    assert metrics.steps[0]["margin"] == pytest.approx(0.0, abs=1e-5)
    assert metrics.steps[0]["loss"] == pytest.approx(0.6931, abs=1e-3)
    last = metrics.steps[-1]
    assert last["preferred"] == 1.0 and last["margin"] > 0.5 and last["loss"] < 0.4


@pytest.mark.parametrize(
    ("record", "options", "said"),
    [
        ({"other": "2"}, {}, r"has no field 'rejected' \(but other\).*data.rejected_field"),
        ({"rejected": None}, {}, "expected a reply as text or messages, got NoneType"),
        ({"rejected": [{"role": "user", "content": "3"}]}, {}, "the last message is of the user"),
        (
            {"rejected": [{"role": "user", "content": "2+1="}, {"role": "assistant", "content": "3"}]},
            {},
            "before the answer are not those of the prompt",
        ),
        ({"rejected": "3"}, {"max_tokens": 3}, "more than max_tokens 3"),
    ],
)
def test_broken_pairs_are_named(tmp_path: Path, record: dict[str, Any], options: dict[str, Any], said: str) -> None:
    data = pairs(tmp_path, [{"prompt": "1+1=", "chosen": "2", **record}], batch_size=1, **options)
    with pytest.raises(ValueError, match=rf"prompt '.*pairs:1'.*{said}"):
        data.setup("fit")
        data.batch(0)  # its length is known with its tokens
