"""Preferences in HH-RLHF's form: what is a prompt, what a reply, what is left out and what is refused."""

from __future__ import annotations

import gzip
import json
import logging
from pathlib import Path

import pytest

from datamodules import PairsDataModule
from datamodules.prompts import DialoguePairs
from modules import ModelSource, RewardModule
from tests.helpers.recorded_samples import TEMPLATE, byte_tokenizer
from tests.helpers.tiny_model import TINY_MODEL
from tests.helpers.tiny_policy import Metrics, sgd, trainer

BEFORE = "\n\nHuman: How do I boil an egg?\n\nAssistant: In water.\n\nHuman: For how long?\n\nNot hard ones."
PAIR = {"chosen": f"{BEFORE}\n\nAssistant: Six minutes.", "rejected": f"{BEFORE}\n\nAssistant: I don't know.\n"}


def written(path: Path, records: list[dict[str, object]]) -> str:
    with gzip.open(path, "wt") as file:
        file.writelines(json.dumps(one) + "\n" for one in records)
    return str(path)


def test_the_last_reply_is_what_is_compared(tmp_path: Path) -> None:
    source = DialoguePairs(written(tmp_path / "train.jsonl.gz", [PAIR]), system="Be brief.")
    prompt = source.deal(0)
    assert [(one["role"], one["content"]) for one in prompt.messages] == [
        ("system", "Be brief."),
        ("user", "How do I boil an egg?"),
        ("assistant", "In water."),
        ("user", "For how long?\n\nNot hard ones."),
    ]
    assert prompt.solution == "Six minutes." and prompt.metadata == {"rejected": "I don't know."} and source.size == 1


def test_no_blank_lines_are_needed_before_the_first_turn(tmp_path: Path) -> None:
    source = DialoguePairs(written(tmp_path / "train.jsonl.gz", [{name: text[2:] for name, text in PAIR.items()}]))
    assert source.deal(0).messages[0]["content"] == "How do I boil an egg?"


def test_pairs_that_compare_no_reply_are_left_out_and_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    same = {**PAIR, "rejected": PAIR["chosen"]}
    apart = {**PAIR, "rejected": PAIR["rejected"].replace("In water.", "In oil.")}
    empty = {**PAIR, "rejected": f"{BEFORE}\n\nAssistant: "}
    with caplog.at_level(logging.INFO):
        source = DialoguePairs(written(tmp_path / "train.jsonl.gz", [same, apart, PAIR, empty]))
    assert source.size == 1 and "3 pairs are left out" in caplog.text
    with pytest.raises(ValueError, match="holds no pair that can be used"):
        DialoguePairs(written(tmp_path / "none.jsonl.gz", [same]))


@pytest.mark.parametrize("text", [7, "", "Human: hello", "\n\nHuman: hello", "x\n\nHuman: a\n\nAssistant: b"])
def test_what_is_no_dialogue_is_an_error_with_its_line(text: object, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"train\.jsonl\.gz:2: field 'rejected'"):
        DialoguePairs(written(tmp_path / "train.jsonl.gz", [PAIR, {**PAIR, "rejected": text}]))


def test_a_reward_model_is_trained_and_validated_on_them(tmp_path: Path) -> None:
    records = [
        {name: f"\n\nHuman: {k}?\n\nAssistant: {word}" for name, word in (("chosen", "yes"), ("rejected", "no"))}
        for k in range(6)
    ]
    tokenizer = byte_tokenizer(TEMPLATE)
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    file = written(tmp_path / "train.jsonl.gz", records)
    data = PairsDataModule(
        DialoguePairs(file, size=4, shuffle=False),
        str(tmp_path / "tokenizer"),
        batch_size=4,
        validation=DialoguePairs(file, offset=4, shuffle=False),
    )
    config = {**TINY_MODEL, "vocab_size": 300, "max_position_embeddings": 128, "pad_token_id": None}
    metrics = Metrics()
    module = RewardModule(ModelSource(config=config), optimizer=sgd)
    run = trainer(metrics, max_steps=2, max_epochs=-1, val_check_interval=2, check_val_every_n_epoch=None)
    run.fit(module, data)
    found = run.callback_metrics
    assert (
        0.0 <= float(found["val/accuracy"]) <= 1.0 and float(found["val/loss"]) > 0 and "val/calibration_error" in found
    )
