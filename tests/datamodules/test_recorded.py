"""RecordedDataModule: sequences, masks, groups, order, resumption and refusals, on tiny data and on the real file."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch.trainer.states import TrainerFn

from app.batch import StepHandle
from datamodules.conversations.chat import ChatEncoder, SystemPrompt, Transcript, load_transcripts
from datamodules.conversations.tokens import Conversation, RecordedDataError, load_npz, save_npz
from datamodules.files.data_files import DataFileError
from datamodules.recorded import RecordedDataModule
from tests.datamodules.test_rollout import count_step
from tests.datamodules.workflows.chat_families import FAMILIES
from tests.helpers.recorded_samples import (
    REWRITING_TEMPLATE,
    THINK_TEMPLATE,
    byte_tokenizer,
    line,
    messages,
    real_file,
    write_jsonl,
)

SYSTEM = np.array([5, 6, 7])


def conversation(task: str = "0", trial: int = 0, reward: float = 0.0, seed: int = 0) -> Conversation:
    """[5 6 7 | a b | T T | c | T T T], T generated."""
    body = np.random.default_rng(seed).integers(10, 99, 8)
    starts, ends = np.array([5, 8]), np.array([7, 11])
    return Conversation(
        task, trial, "m", reward, "made", np.concatenate([SYSTEM, body]), starts, ends, np.array([1, 3])
    )


def npz(path: Path, tasks: int = 5, trials: int = 3) -> Path:
    made = [
        conversation(f"t{i}", j, reward=float((i + j) % 2), seed=10 * i + j)
        for i in range(tasks)
        for j in range(trials)
    ]
    save_npz(path, made)
    return path


def module(path: Path, steps: int = 1, rank: int = 0, **options: Any) -> RecordedDataModule:
    data = RecordedDataModule(path=str(path), **options)
    data.setup()
    model = SimpleNamespace(steps_per_batch=steps, policy_version=0, steps_done=0)
    data.trainer = SimpleNamespace(lightning_module=model, is_global_zero=rank == 0)  # type: ignore[assignment]
    return data


def stepped(data: RecordedDataModule, handles: Iterable[StepHandle]) -> Iterator[StepHandle]:
    """The handles, each with its step done."""
    assert data.trainer is not None
    for handle in handles:
        count_step(data.trainer.lightning_module, handle)
        yield handle


def test_workloads_of_one_conversation() -> None:
    one = conversation()
    t = one.tokens.tolist()
    turns = one.sequences("turns")
    assert [s.tolist() for s, _ in turns] == [t[:7], t[:11]]
    assert [m.tolist() for _, m in turns] == [[False] * 5 + [True] * 2, [False] * 8 + [True] * 3]
    ((whole, mask),) = one.sequences("whole")
    assert whole.tolist() == t and np.flatnonzero(mask).tolist() == [5, 6, 8, 9, 10]
    think = one.sequences("think", [1, 2])
    assert [s.tolist() for s, _ in think] == [[*t[:5], 1, 2, *t[5:7]], [*t[:8], 1, 2, *t[8:11]]]
    assert [np.flatnonzero(m).tolist() for _, m in think] == [[7, 8], [10, 11, 12]]


def test_npz_round_trip(tmp_path: Path) -> None:
    made = [conversation("a", 0, 1.0, 1), conversation("a", 1, 0.0, 2), conversation("b", 0, 0.5, 3)]
    save_npz(tmp_path / "x.npz", made)
    read = load_npz(tmp_path / "x.npz")
    for before, after in zip(made, read, strict=True):
        for key in ("tokens", "starts", "ends", "steps"):
            assert getattr(before, key).tolist() == getattr(after, key).tolist()
        assert (before.task, before.trial, before.model, before.reward) == (
            after.task,
            after.trial,
            after.model,
            after.reward,
        )
    with np.load(tmp_path / "x.npz") as file:
        assert file["system_ids"].tolist() == SYSTEM.tolist()
        assert file["ids"].dtype == np.uint32 and file["loss_mask"].sum() == 15


@pytest.mark.parametrize(
    ("array", "change", "message"),
    [
        ("loss_mask", lambda a: np.roll(a, 1), "loss_mask of trajectory 0"),
        ("offsets", lambda a: a[:-1], "'offsets' must rise"),
        ("turn_traj", lambda a: a + 100, r"turn_traj\[0\] is 100"),
        ("reward", lambda a: a * np.nan, "trajectory 0: reward is nan"),
        ("turn_end", lambda a: a + 50, "trajectory 0: turn_start/turn_end"),
        ("ids", lambda a: a.astype(float), "'ids' must be 1-D integers"),
        ("trial", lambda a: a[1:], "'trial' has shape"),
        ("task", None, "'task' is missing"),
    ],
)
def test_broken_arrays_are_named(tmp_path: Path, array: str, change: Any, message: str) -> None:
    with np.load(npz(tmp_path / "x.npz")) as file:
        data = {name: file[name] for name in file.files}
    if change is None:
        del data[array]
    else:
        data[array] = change(data[array])
    np.savez(tmp_path / "bad.npz", **data)
    with pytest.raises(RecordedDataError, match=message) as caught:
        load_npz(tmp_path / "bad.npz")
    assert "bad.npz" in str(caught.value)


def test_cut_off_npz(tmp_path: Path) -> None:
    whole = npz(tmp_path / "x.npz").read_bytes()
    (tmp_path / "cut.npz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(RecordedDataError, match=r"cut\.npz: not a readable npz"):
        load_npz(tmp_path / "cut.npz")


def test_chat_turns_decode_to_what_the_assistant_said() -> None:
    tokenizer = byte_tokenizer()
    tools = [{"type": "function", "function": {"name": "cancel"}}]
    one = ChatEncoder(tokenizer, SystemPrompt("Be kind.", tools)).encode(
        Transcript("0", 0, "m", 1.0, messages(), "here")
    )
    said = [tokenizer.decode(one.tokens[a:b]) for a, b in zip(one.starts, one.ends, strict=True)]
    assert said == [
        "Which one?<|end|>",
        '<tool>{"name": "cancel", "arguments": {"order": 7}}</tool><|end|>',
        "Done.<|end|>",
    ]
    assert one.steps.tolist() == [1, 3, 5]
    text = tokenizer.decode(one.tokens)
    assert text.startswith("<|begin|>system\nBe kind.") and '"cancel"' in text and text.endswith("Done.<|end|>")
    # The prompt of each turn is what the template gives for the messages before it.
    chat = [{"role": "system", "content": "Be kind."}, *messages()[:1]]
    prompt = tokenizer.apply_chat_template(chat, tools=tools, tokenize=False, add_generation_prompt=True)
    assert tokenizer.decode(one.tokens[: one.starts[0]]) == prompt


def test_think_template_gives_the_same_history() -> None:
    transcript = Transcript("0", 0, "m", 1.0, messages(), "here")
    plain = ChatEncoder(byte_tokenizer()).encode(transcript)
    think = ChatEncoder(byte_tokenizer(THINK_TEMPLATE)).encode(transcript)
    assert plain.tokens.tolist() == think.tokens.tolist()


@pytest.mark.parametrize("name", ["Gemma 2", "Phi 3", "Qwen2.5 base", "Aya", "Llama 3"])
def test_a_turn_ends_as_the_template_ends_it_whatever_eos_token_is(name: str) -> None:
    family = FAMILIES[name]
    tokenizer = family.tokenizer()
    said = ["Which one?", "Done."]
    chat = [{"role": role, "content": text} for text in said for role, text in (("user", "Now?"), ("assistant", text))]
    one = ChatEncoder(tokenizer).encode(Transcript("0", 0, "m", 1.0, chat, "here"))
    turns = [one.tokens[start:end].tolist() for start, end in zip(one.starts, one.ends)]
    end = tokenizer.convert_tokens_to_ids(family.end)
    assert turns == [[*tokenizer.encode(text, add_special_tokens=False), end] for text in said]
    # What is between them is what generation gives: white space that belongs to the end of turn is no token.
    whole = tokenizer.apply_chat_template(chat[:3], tokenize=False, add_generation_prompt=True)
    assert one.tokens[: one.starts[1]].tolist() == tokenizer.encode(whole, add_special_tokens=False)


def test_chat_refusals() -> None:
    transcript = Transcript("0", 0, "m", 1.0, messages(), "FILE:3")
    with pytest.raises(RecordedDataError, match=r"FILE:3: messages\[1\]: the chat template rewrites"):
        ChatEncoder(byte_tokenizer(REWRITING_TEMPLATE)).encode(transcript)
    with pytest.raises(RecordedDataError, match=r"FILE:3: messages\[5\]\.content contains the end-of-turn"):
        ChatEncoder(byte_tokenizer()).encode(Transcript("0", 0, "m", 1.0, messages("x<|end|>y"), "FILE:3"))
    endless = byte_tokenizer("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}")
    with pytest.raises(RecordedDataError, match=r"FILE:3: messages\[1\]: no '<\|end\|>' follows .* no other token"):
        ChatEncoder(endless).encode(Transcript("0", 0, "m", 1.0, messages()[:2], "FILE:3"))
    with pytest.raises(RecordedDataError, match=r"cannot render the conversation up to messages\[7\]: no"):
        ChatEncoder(byte_tokenizer("{{ raise_exception('no') }}")).encode(transcript)


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        ("{nonsense", "not valid JSON"),
        ("[]", "expected a JSON object"),
        ({**line(), "reward": "1"}, "'reward' must be a finite number, got '1'"),
        ({**line(), "reward": float("nan")}, "'reward' must be a finite number"),
        ({"rewarded": True, "messages": messages()}, "'reward' must be a finite number, got nothing"),
        ({**line(), "task_id": []}, "'task_id' must be a string"),
        ({**line(), "trial": "1"}, "'trial' must be an integer"),
        ({**line(), "messages": []}, "messages must be a non-empty list"),
        ({**line(), "messages": [{"role": "boss", "content": ""}]}, r"messages\[0\]\.role"),
        ({**line(), "messages": [{"role": "user", "content": None}]}, r"messages\[0\]\.content"),
        ({**line(), "messages": [{"role": "user", "content": "x"}]}, "no assistant message"),
        ({**line(), "messages": [{"role": "assistant", "content": "", "tool_calls": [{"name": "f"}]}]}, "arguments"),
        ({**line(), "messages": [{"role": "assistant", "content": "", "weight": 0.5}]}, r"weight must be 0 or 1"),
        ({**line(), "messages": [{"role": "user", "content": "", "weight": 1}]}, "on an assistant message"),
        ({**line(), "messages": [{"role": "assistant", "content": "", "weight": 0}]}, "no assistant message"),
        ({**line(), "tools": {}}, "'tools' must be a list of JSON schemas"),
        ({**line(), "tools": "[cancel]"}, "'tools' must be a list of JSON schemas"),
        ({**line(), "functions": [{"name": "cancel"}]}, "'functions', the older form of tools, would be left out"),
        ({"conversations": [{"from": "human", "value": "x"}]}, "no 'messages' in the line, which has conversations"),
        ({"prompt": "x", "completion": messages()}, "'prompt' and 'completion' must be texts, or lists of messages"),
        ({**line(), "chat_template_kwargs": []}, "'chat_template_kwargs' must be an object"),
        ({**line(), "rewarded": 1}, "'rewarded' must be true or false"),
    ],
)
def test_broken_lines_are_named(tmp_path: Path, broken: Any, message: str) -> None:
    path = write_jsonl(tmp_path / "c.jsonl", [line(), broken, line("1")])
    with pytest.raises(RecordedDataError, match=message) as caught:
        load_transcripts(path)
    assert "c.jsonl:2:" in str(caught.value)


def test_jsonl_becomes_batches(tmp_path: Path) -> None:
    byte_tokenizer().save_pretrained(tmp_path / "tokenizer")
    with gzip.open(tmp_path / "c.jsonl.gz", "wt") as file:
        for task in range(2):
            for trial in range(2):
                file.write(
                    json.dumps(
                        line(
                            str(task),
                            trial,
                            reward=float(trial),
                            answer="Done " * task,  # once empty: a turn of the end-of-turn token alone
                        )
                    )
                    + "\n"
                )
    (tmp_path / "system.json").write_text(json.dumps({"system_prompt": "Be kind.", "tools": []}))
    data = module(
        tmp_path / "c.jsonl.gz",
        tokenizer=str(tmp_path / "tokenizer"),
        system=str(tmp_path / "system.json"),
        tasks_per_batch=2,
        shuffle=False,
    )
    batch = data.batch(0)
    assert len(batch) == 12
    assert batch.episode_ids.tolist() == [0] * 3 + [1] * 3 + [2] * 3 + [3] * 3
    assert batch.group_ids.tolist() == [0] * 6 + [1] * 6
    assert batch.turn_indices.tolist() == [0, 1, 2] * 4
    assert batch.rewards.tolist() == [0.0] * 3 + [1.0] * 3 + [0.0] * 3 + [1.0] * 3
    assert batch.prompt_ids == ["0"] * 6 + ["1"] * 6
    assert bool((batch.versions == -1).all()) and not batch.behavior_logprobs.any()
    thinking = module(tmp_path / "c.jsonl.gz", tokenizer=str(tmp_path / "tokenizer"), workload="think", trials=1)
    inserted = (
        thinking.batch(0).num_tokens
        - module(tmp_path / "c.jsonl.gz", tokenizer=str(tmp_path / "tokenizer"), trials=1).batch(0).num_tokens
    )
    assert inserted == 3 * len("<think>\n\n</think>\n\n")


def test_every_task_once_a_pass_in_seeded_order(tmp_path: Path) -> None:
    path = npz(tmp_path / "x.npz", tasks=5)
    data = module(path, tasks_per_batch=2, seed=3)
    assert data.batches_per_epoch == 3
    passes = [[data.batch(3 * turn + slot).prompt_ids[::2] for slot in range(3)] for turn in range(4)]
    for batches in passes:
        names = [name for ids in batches for name in dict.fromkeys(ids)]
        assert sorted(names) == ["t0", "t1", "t2", "t3", "t4"]
        assert [len(dict.fromkeys(ids)) for ids in batches] == [2, 2, 1]
    assert len({str(batches) for batches in passes}) > 1
    again, other = module(path, tasks_per_batch=2, seed=3), module(path, tasks_per_batch=2, seed=4)
    assert torch.equal(again.batch(7).tokens, data.batch(7).tokens)
    assert any(other.batch(i).prompt_ids != data.batch(i).prompt_ids for i in range(6))
    fixed = module(path, shuffle=False, tasks=["t3", "t1"])
    assert [fixed.batch(i).prompt_ids[0] for i in range(4)] == ["t1", "t3", "t1", "t3"]


def test_loader_repeats_a_batch_and_continues_over_epochs_and_resumes(tmp_path: Path) -> None:
    path = npz(tmp_path / "x.npz", tasks=4)
    data = module(path, steps=3, batches_per_epoch=2)
    loader = data.train_dataloader()
    assert len(loader) == 6
    seen = [(h.batch, h.index, h.count) for _ in range(2) for h in stepped(data, loader)]
    assert [(i, n) for _, i, n in seen] == [(0, 3), (1, 3), (2, 3)] * 4
    assert seen[0][0] is seen[2][0] and seen[3][0] is not seen[2][0]
    order = [seen[k][0].prompt_ids[0] for k in (0, 3, 6, 9)]
    assert sorted(order) == ["t0", "t1", "t2", "t3"]

    data = module(path, steps=3, batches_per_epoch=2)
    handles = stepped(data, data.train_dataloader())
    for _ in range(3):
        next(handles)
    for done in range(3):  # after the last step of the first batch, then inside the second
        resumed = module(path, steps=3, batches_per_epoch=2)
        resumed.load_state_dict(data.state_dict())
        vars(resumed.trainer.lightning_module).update(vars(data.trainer.lightning_module))
        handle = next(iter(resumed.train_dataloader()))
        assert (handle.batch.prompt_ids[0], handle.index) == (order[1], done)
        next(handles)


def test_a_module_that_does_not_count_its_batches_is_told(tmp_path: Path) -> None:
    data = module(npz(tmp_path / "x.npz"), steps=2)
    with pytest.raises(RuntimeError, match="policy_version: still 0 after all 2 steps of a batch"):
        list(data.train_dataloader())


def test_other_ranks_hold_no_batch_but_keep_step(tmp_path: Path) -> None:
    path = npz(tmp_path / "x.npz")
    first, second = module(path, steps=2), module(path, steps=2, rank=1)
    assert len(second.train_dataloader()) == len(first.train_dataloader()) == 10
    assert [(h.batch, h.index) for h in stepped(second, second.train_dataloader())] == [(None, 0), (None, 1)] * 5


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"trials": 4}, RecordedDataError, "trials: 4, but task 't0' has only 3"),
        ({"tasks": ["t0", "no"]}, RecordedDataError, "tasks: 'no' is not in"),
        ({"tasks": ["t0", "t0"]}, RecordedDataError, "tasks: 't0' is listed twice"),
        ({"tasks_per_batch": 9}, RecordedDataError, "tasks_per_batch: 9, but 5 tasks"),
        ({"tasks_per_batch": 0}, ValueError, "tasks_per_batch: 0, must be at least 1"),
        ({"tokenizer": "x"}, ValueError, "tokenizer has no effect"),
        ({"system": "x"}, ValueError, "system has no effect"),
    ],
)
def test_options_are_checked(tmp_path: Path, options: dict[str, Any], error: type, message: str) -> None:
    path = npz(tmp_path / "x.npz")
    with pytest.raises(error, match=message):
        module(path, **options)


def test_text_needs_a_tokenizer_with_a_template(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "c.jsonl", [line()])
    with pytest.raises(ValueError, match=r"tokenizer: .* holds text"):
        module(path)
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = None
    tokenizer.save_pretrained(tmp_path / "plain")
    with pytest.raises(RecordedDataError, match="has no chat_template"):
        module(path, tokenizer=str(tmp_path / "plain"))
    with pytest.raises(RecordedDataError, match="no tokenizer could be loaded"):
        module(path, tokenizer=str(tmp_path / "nowhere"))


def test_nothing_to_validate_with(tmp_path: Path) -> None:
    data = RecordedDataModule(path=str(npz(tmp_path / "x.npz")))
    with pytest.raises(ValueError, match="nothing to validate with"):
        data.setup(TrainerFn.VALIDATING)


def test_the_same_trial_twice(tmp_path: Path) -> None:
    save_npz(tmp_path / "x.npz", [conversation(trial=1), conversation(trial=1)])
    with pytest.raises(RecordedDataError, match="trajectory 1: task '0' has trial 1 already"):
        module(tmp_path / "x.npz")


def test_missing_data_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ARBORIST_DATA", raising=False)
    path = Path("${ARBORIST_DATA}/tau/airline_tokens.npz")
    with pytest.raises(DataFileError, match=r"ARBORIST_DATA, which is not set; .*import-tau CHECKOUT"):
        module(path)
    monkeypatch.setenv("ARBORIST_DATA", str(tmp_path))
    with pytest.raises(DataFileError, match=r"there is no file .*import-tau CHECKOUT"):
        module(path)


def test_real_airline_groups() -> None:
    path = real_file("tau/airline_tokens.npz")
    data = module(path, trials=4, shuffle=False)
    assert data.batches_per_epoch == 50
    batch = data.batch(1)
    assert batch.prompt_ids[0] == "1" and set(batch.group_ids.tolist()) == {1}
    with np.load(path) as file:
        rewards = file["reward"][file["task"] == 1].tolist()
        turns = np.bincount(file["turn_traj"][np.isin(file["turn_traj"], np.flatnonzero(file["task"] == 1))])
        trained = sum(
            int((file["turn_end"] - file["turn_start"])[file["turn_traj"] == i].sum())
            for i in np.flatnonzero(file["task"] == 1)
        )
        i = int(np.flatnonzero(file["turn_traj"] == 4)[2])  # third turn of the first trial of task 1
        full = np.concatenate([file["system_ids"], file["ids"][file["offsets"][4] : file["offsets"][5]]])
        expected = full[: file["turn_end"][i]].tolist()
    per_episode = [batch.rewards[batch.episode_ids == e].unique().tolist() for e in batch.episode_ids.unique()]
    assert per_episode == [[r] for r in rewards]
    assert len(batch) == turns.sum() and int(batch.loss_mask.sum()) == trained
    assert batch.sequences()[2].tolist() == expected
    batch.check_vocabulary(151_936)


class _Watcher(L.LightningModule):
    """Notes what it was given."""

    steps_per_batch = 2

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(()))
        self.seen: list[tuple[str, int]] = []
        self.policy_version = self.steps_done = 0

    def training_step(self, handle: StepHandle, index: int) -> torch.Tensor:
        assert handle.batch is not None
        self.seen.append((handle.batch.prompt_ids[0], handle.index))
        count_step(self, handle)
        return self.weight * 1.0

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_a_resumed_fit_sees_what_an_uninterrupted_one_does(tmp_path: Path) -> None:
    path = npz(tmp_path / "x.npz")

    def fit(steps: int, checkpoint: Path | None = None) -> tuple[L.Trainer, list[tuple[str, int]]]:
        watcher = _Watcher()
        quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
        trainer = L.Trainer(
            max_steps=steps, accelerator="cpu", enable_checkpointing=False, use_distributed_sampler=False, **quiet
        )
        trainer.fit(watcher, RecordedDataModule(path=str(path)), ckpt_path=checkpoint, weights_only=False)
        return trainer, watcher.seen

    _, whole = fit(24)  # epochs are 10 steps
    trainer, first = fit(6)
    trainer.save_checkpoint(tmp_path / "middle.ckpt")
    _, second = fit(24, tmp_path / "middle.ckpt")
    assert len(whole) == 24 and first + second == whole
