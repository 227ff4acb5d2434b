"""The supervised datamodule: the answer and the end are trained, the stream goes on, mistakes are named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from datamodules.prompts import ArithmeticPrompts, JsonlPrompts, SquaresPrompts
from datamodules.prompts.base import Prompt
from datamodules.supervised import SupervisedDataModule
from modules import PolicyModule, SFTModule
from tests.datamodules.test_rollout import CHAR, Recorder, flat, trainer
from tests.datamodules.workflows.chat_families import FAMILIES
from tests.helpers.recorded_samples import TEMPLATE, byte_tokenizer
from tests.helpers.tiny_policy import source as tiny
from tests.helpers.tiny_policy import trainer as tiny_trainer
from tests.helpers.tiny_vision import TinyVision


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
    assert data.state_dict()["dealt"] == 32
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


@pytest.mark.parametrize(("size", "batches"), [(10, 3), (8, 2), (None, 100)])
def test_an_epoch_is_a_pass_over_the_prompts(size: int | None, batches: int) -> None:
    data = SupervisedDataModule(ArithmeticPrompts(size=size), CHAR, batch_size=4)
    assert data.batches_per_epoch == batches
    assert (
        SupervisedDataModule(ArithmeticPrompts(size=size), CHAR, batch_size=4, batches_per_epoch=7).batches_per_epoch
        == 7
    )


def test_epochs_are_passes_of_training(tmp_path: Path) -> None:
    module = Recorder()
    trainer(tmp_path, max_epochs=2, callbacks=[]).fit(
        module, datamodule=SupervisedDataModule(ArithmeticPrompts(size=10), CHAR, 4)
    )
    assert len(module.handles) == 6


def test_supervised_refuses_by_name() -> None:
    for options, said in (({"batch_size": 0}, "batch_size: 0"), ({"prompts": 3}, "prompts: int is no PromptSource")):
        with pytest.raises(ValueError, match=said):
            SupervisedDataModule(**{"prompts": ArithmeticPrompts(), "tokenizer": CHAR, **options})
    data = SupervisedDataModule(ArithmeticPrompts(), CHAR, max_tokens=3)
    data.setup("fit")
    with pytest.raises(ValueError, match=r"have \d+ tokens, more than max_tokens 3"):
        data.batch(0)


def sums(path: Path, **options: Any) -> JsonlPrompts:
    path.write_text("".join(json.dumps({"question": f"{k}+{k}=", "answer": 2 * k}) + "\n" for k in range(8)))
    return JsonlPrompts(str(path), **options)


def chats(folder: Path, template: str = TEMPLATE, **options: Any) -> SupervisedDataModule:
    byte_tokenizer(template).save_pretrained(folder)
    data = SupervisedDataModule(ArithmeticPrompts(), str(folder), **options)
    data.setup("fit")
    return data


ASKED = Prompt(id="c", messages=({"role": "user", "content": "1+1?"},))
THOUGHT_BEGUN = TEMPLATE.replace(
    "<|begin|>assistant\n", "<|begin|>assistant\n{{ '<think>\n' if enable_thinking is not false }}"
)


@pytest.mark.parametrize("answer", ["2<|end|>", "2<|end|>\n<|begin|>user\n3?"])
def test_an_answer_is_ended_once(tmp_path: Path, answer: str) -> None:
    data = chats(tmp_path)
    for prompt in (ASKED, Prompt(id="c", text="1+1=")):
        with pytest.raises(ValueError, match=r"prompt 'c': its answer spells '<\|\w+\|>', at which a reply is over"):
            data.imitation(prompt, answer, group=0, episode=0)


def test_an_answer_goes_on_with_the_thought_that_the_template_began(tmp_path: Path) -> None:
    data = chats(tmp_path, THOUGHT_BEGUN)
    for answer in ("<think>\nSo.\n</think>\n\n2", "So.\n</think>\n\n2"):
        made = data.imitation(ASKED, answer, group=0, episode=0)
        assert data.tokenizer.decode(made.tokens).endswith("assistant\n<think>\nSo.\n</think>\n\n2<|end|>")
        assert data.tokenizer.decode(made.tokens[made.loss_mask]) == "So.\n</think>\n\n2<|end|>"
    with pytest.raises(ValueError, match=r"prompt 'c': .* begins a thought, and its answer.*template_options"):
        data.imitation(ASKED, "2", group=0, episode=0)
    made = chats(tmp_path, THOUGHT_BEGUN, template_options={"enable_thinking": False}).imitation(ASKED, "2", 0, 0)
    assert data.tokenizer.decode(made.tokens).endswith("assistant\n2<|end|>")


def test_what_cannot_be_trained_is_refused_before_the_first_step(tmp_path: Path) -> None:
    def fit(**changed: Any) -> None:
        data = SupervisedDataModule(**{"prompts": prompts, "tokenizer": CHAR, "batch_size": 1, **changed})
        tiny_trainer(max_steps=1).fit(SFTModule(tiny(max_position_embeddings=6)), data)

    prompts = sums(tmp_path / "sums.jsonl", shuffle=False, size=5)  # the last ones have an answer of two digits
    fit()
    longer = sums(tmp_path / "longer.jsonl", shuffle=False)
    for option in ("prompts", "validation"):
        with pytest.raises(ValueError, match=rf"{option}: 3 prompts .* max_position_embeddings of 6 \(such as '.*:6'"):
            fit(**{option: longer})
    with (tmp_path / "longer.jsonl").open("a") as file:
        file.write(json.dumps({"question": "9+9=", "answer": ""}) + "\n")
    with pytest.raises(ValueError, match=r"longer:9' has neither solution nor answer to imitate"):
        fit(prompts=JsonlPrompts(str(tmp_path / "longer.jsonl"), shuffle=False, offset=8))


def test_held_out_answers_have_a_loss(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    path = tmp_path / "sums.jsonl"
    train, held_out = sums(path, size=5), sums(path, offset=5, shuffle=False)
    data = SupervisedDataModule(train, CHAR, batch_size=2, validation=held_out)
    module = SFTModule(tiny())
    [metrics] = tiny_trainer().validate(module, data, verbose=False)
    batch = SupervisedDataModule(held_out, CHAR, batch_size=3)
    batch.setup("fit")
    assert module.policy is not None
    total = count = 0.0
    for tokens, trained in zip(batch.batch(0).sequences(), batch.batch(0).split(batch.batch(0).loss_mask), strict=True):
        with torch.no_grad():
            logprobs = module.policy(tokens[None]).logits[0].log_softmax(-1)
        total -= float(logprobs[:-1].gather(1, tokens[1:, None])[:, 0][trained[1:]].sum())
        count += int(trained.sum())
    assert metrics["val/loss"] == pytest.approx(total / count, rel=1e-5)
    assert not [one for one in recwarn if "trained on as well" in str(one.message)]
    data = SupervisedDataModule(train, CHAR, validation=sums(path, offset=3))
    with pytest.warns(UserWarning, match=r"validation: 2 of 5 prompts are trained on as well \(such as '.*sums:"):
        tiny_trainer().validate(module, data, verbose=False)
    with pytest.raises(ValueError, match="validation has no effect on PolicyModule, only SFTModule has a loss of held"):
        tiny_trainer().fit(PolicyModule(tiny()), data)


def test_an_answer_that_spells_a_placeholder_is_not_trained_as_one(tmp_path: Path) -> None:
    data = SupervisedDataModule(SquaresPrompts(), TinyVision(tmp_path).path)
    data.setup("fit")
    assert data.image_processor is not None
    token = str(data.tokenizer.convert_ids_to_tokens(data.image_processor.placeholder))
    made = data.imitation(data.prompts.deal(0), f"3{token}", group=0, episode=0)
    assert data.image_processor.placeholder not in made.tokens[made.loss_mask].tolist()
