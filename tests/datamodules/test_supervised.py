"""The supervised datamodule: the answer and the end are trained, the stream goes on, mistakes are named."""

from __future__ import annotations

from pathlib import Path

import pytest

from datamodules.prompts import ArithmeticPrompts
from datamodules.prompts.base import Prompt
from datamodules.supervised import SupervisedDataModule
from tests.datamodules.test_rollout import CHAR, Recorder, flat, trainer
from tests.datamodules.workflows.chat_families import FAMILIES


def test_supervised_batches_train_the_answer_and_the_end(tmp_path: Path) -> None:
    data = SupervisedDataModule(ArithmeticPrompts(digits=2), CHAR, batch_size=8, batches_per_epoch=2)
    module = Recorder(steps_per_batch=2)
    trainer(tmp_path, max_epochs=2, callbacks=[]).fit(module, datamodule=data)
    assert [(index, count) for _, index, count in module.handles] == [(0, 2), (1, 2)] * 4
    batches = [batch for batch, index, _ in module.handles if index == 0]
    for k, batch in enumerate(batches):
        for i, tokens in enumerate(batch.sequences()):
            prompt = data.prompts.deal(8 * k + i)
            mask = batch.split(batch.loss_mask)[i]
            assert data.tokenizer.decode(tokens[~mask]) == prompt.text
            assert data.tokenizer.decode(tokens[mask]) == f"{prompt.answer}<eos>"
    assert data.state_dict()["position"] == 4
    again = SupervisedDataModule(ArithmeticPrompts(digits=2), CHAR, batch_size=8)
    again.setup("fit")
    assert flat(again.batch(3)) == flat(batches[3])


@pytest.mark.parametrize("name", ["Gemma 2", "Qwen2.5 base", "Llama 3.1"])
def test_chats_end_as_their_template_ends_them(name: str, tmp_path: Path) -> None:
    family = FAMILIES[name]
    family.tokenizer().save_pretrained(tmp_path)
    data = SupervisedDataModule(ArithmeticPrompts(), str(tmp_path))
    data.setup("fit")
    chat = Prompt(id="c", messages=({"role": "user", "content": "1+1?"},))
    for prompt, end in ((chat, family.end), (Prompt(id="t", text="1+1="), family.eos)):
        made = data.imitation(prompt, "2", group=0, episode=0)
        assert data.tokenizer.decode(made.tokens[made.loss_mask]) == f"2{end}"


def test_supervised_refuses_by_name() -> None:
    for options, said in (({"batch_size": 0}, "batch_size: 0"), ({"prompts": 3}, "prompts: int is no PromptSource")):
        with pytest.raises(ValueError, match=said):
            SupervisedDataModule(**{"prompts": ArithmeticPrompts(), "tokenizer": CHAR, **options})
    data = SupervisedDataModule(ArithmeticPrompts(), CHAR, max_tokens=3)
    data.setup("fit")
    with pytest.raises(ValueError, match=r"have \d+ tokens, more than max_tokens 3"):
        data.batch(0)
