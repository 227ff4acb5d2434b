"""Recorded users and tools, played again: token by token as recorded, whatever the model says."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from datamodules.conversations.tokens import RecordedDataError, load_npz
from datamodules.prompts import Prompt, TauPrompts
from datamodules.workflows import TauReplayWorkflow
from tests.datamodules.workflows.scripted_engine import Pool, ScriptedEngine, generated, play
from tests.helpers.doubles import conversations
from tests.helpers.recorded_samples import byte_tokenizer, line, real_file, write_jsonl

TOKENIZER = byte_tokenizer()  # 260 tokens


def ones(request: Any) -> list[int]:
    """A model that only ever says token 5."""
    return [5] * request.max_new_tokens


def prompts(tmp_path: Path, **options: Any) -> TauPrompts:
    return TauPrompts(str(conversations(tmp_path / "made.npz")), shuffle=False, **options)


def test_everything_but_the_replies_is_as_recorded(tmp_path: Path) -> None:
    source = prompts(tmp_path)
    recorded = load_npz(tmp_path / "made.npz")
    assert (source.size, source.name, source.deal(1).id) == (4, "made", "made:1 (m)")
    for sample, trial in ((0, 0), (3, 3), (6, 2)):  # samples beyond the recorded trials start over
        engine = ScriptedEngine(TOKENIZER, ones)
        (whole,) = play(TauReplayWorkflow(), engine, TOKENIZER, source.deal(1), sample=sample)
        conversation = recorded[4 + trial]
        mask = conversation.loss_mask()
        assert whole.loss_mask.tolist() == mask.tolist()
        assert whole.tokens[~mask].tolist() == conversation.tokens[~mask].tolist()
        assert set(generated(whole)) == {5}
        assert [len(one.tokens) for one in engine.seen] == conversation.starts.tolist()
        assert whole.reward == conversation.reward and whole.finish_reason == "stop"
        assert whole.metadata == {"trial": trial, "tool_calls": 0, "turns": 3}


def test_one_sequence_a_turn_and_a_configured_reward(tmp_path: Path) -> None:
    pool = Pool(lambda prompt, text: 7.0)
    engine = ScriptedEngine(TOKENIZER, ones)
    workflow = TauReplayWorkflow(sequences="turns", max_new_tokens=4)
    turns = play(workflow, engine, TOKENIZER, prompts(tmp_path).deal(0), pool)
    assert [one.tokens.tolist() for one in turns] == [
        request.tokens + response.tokens for request, response in zip(engine.seen, engine.responses, strict=True)
    ]
    assert [len(generated(one)) for one in turns] == [4, 4, 4]
    assert {one.reward for one in turns} == {7.0}
    assert {one.finish_reason for one in turns} == {"stop"}  # as long as they were to be
    assert pool.asked == ["\n".join([TOKENIZER.decode([5] * 4)] * 3)]


def test_the_model_may_end_its_replies_itself(tmp_path: Path) -> None:
    source = prompts(tmp_path, trials=1)
    recorded = load_npz(tmp_path / "made.npz")[0]
    eos = TOKENIZER.eos_token_id
    engine = ScriptedEngine(TOKENIZER, [[7, 8, 9, 9, 9], [6, eos], [6, eos]])
    (whole,) = play(TauReplayWorkflow(lengths="model", max_new_tokens=3), engine, TOKENIZER, source.deal(0))
    first, second = recorded.tokens[: recorded.starts[0]].tolist(), recorded.tokens[14:18].tolist()
    # The first reply was cut off: the recorded end of turn follows it, without a loss.
    assert whole.tokens.tolist() == [
        *first, 7, 8, 9, int(recorded.tokens[13]), *second, 6, eos, *recorded.tokens[25:30].tolist(), 6, eos
    ]  # fmt: skip
    assert generated(whole) == [7, 8, 9, 6, eos, 6, eos]


def test_turns_and_context_are_bounded(tmp_path: Path) -> None:
    source = prompts(tmp_path)
    (capped,) = play(TauReplayWorkflow(max_turns=2), ScriptedEngine(TOKENIZER, ones), TOKENIZER, source.deal(0))
    assert capped.finish_reason == "max_turns" and capped.metadata["turns"] == 2
    engine = ScriptedEngine(TOKENIZER, ones, max_context=20)
    (full,) = play(TauReplayWorkflow(), engine, TOKENIZER, source.deal(0))
    assert full.finish_reason == "length" and full.tokens.numel() == 20


def test_ids_fit_a_smaller_vocabulary(tmp_path: Path) -> None:
    whole, small = prompts(tmp_path).deal(0), prompts(tmp_path, vocab_size=32).deal(0)
    for before, after in zip(whole.metadata["trials"], small.metadata["trials"], strict=True):
        assert [token % 32 for token in before["prompt"]] == after["prompt"]
        assert [turn["tokens"] for turn in before["turns"]] == [turn["tokens"] for turn in after["turns"]]
        for one, other in zip(before["turns"], after["turns"], strict=True):
            assert [token % 32 for token in one["after"]] == other["after"]


def test_text_goes_through_the_chat_template_and_tools_take_their_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    TOKENIZER.save_pretrained(tmp_path / "bytes")
    told = write_jsonl(tmp_path / "told.jsonl", [line(), line(trial=1, reward=0.0)])
    source = TauPrompts(str(told), tokenizer=str(tmp_path / "bytes"))
    slept: list[float] = []
    sleep = asyncio.sleep

    async def remember(seconds: float) -> None:
        if seconds:
            slept.append(seconds)
        await sleep(0)

    monkeypatch.setattr(asyncio, "sleep", remember)
    engine = ScriptedEngine(TOKENIZER, ones)
    workflow = TauReplayWorkflow(tool_latency_s=0.2)
    (whole,) = play(workflow, engine, TOKENIZER, source.deal(0), sample=1)
    text = TOKENIZER.decode(whole.tokens)
    assert "<|begin|>user\nCancel my order.<|end|>\n" in text and '<|begin|>tool\n{"ok": true}<|end|>\n' in text
    assert whole.metadata["tool_calls"] == 1 and slept == [0.2] and whole.reward == 0.0


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"path": "x.jsonl"}, "TauPrompts.tokenizer: 'x.jsonl' holds text"),
        ({"path": "x.jsonl", "tokenizer": "t", "tool_response_id": 3}, "TauPrompts.tool_response_id has no effect"),
        ({"path": "x.npz", "tokenizer": "t"}, "TauPrompts.tokenizer has no effect"),
        ({"path": "x.npz", "system": "s"}, "TauPrompts.system has no effect"),
        ({"path": "x.npz", "trials": 0}, "TauPrompts.trials: 0"),
        ({"path": "x.npz", "vocab_size": 0}, "TauPrompts.vocab_size: 0"),
    ],
)
def test_sources_without_sense_are_refused_by_name(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        TauPrompts(**options)


def test_tasks_and_trials_that_are_not_there_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RecordedDataError, match="tasks: '9' is not in"):
        prompts(tmp_path, tasks=[9])
    with pytest.raises(RecordedDataError, match="trials: 5, but task '0' has only 4"):
        prompts(tmp_path, trials=5)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"max_turns": 0}, "max_turns: 0"),
        ({"lengths": "any"}, "lengths: 'any'"),
        ({"tool_latency_s": -1.0}, "tool_latency_s: -1"),
        ({"sequences": "rendered"}, "sequences: 'rendered'"),
        ({"max_new_tokens": 0}, "max_new_tokens: 0"),
    ],
)
def test_arguments_without_sense_are_refused_by_name(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=f"TauReplayWorkflow.{said}"):
        TauReplayWorkflow(**options)


def test_other_prompts_are_refused() -> None:
    with pytest.raises(ValueError, match="prompt 'p' is no recorded conversation"):
        TauReplayWorkflow().encode(Prompt(id="p", text="1+1="))


def test_the_order_is_a_new_one_every_lap_and_the_same_again(tmp_path: Path) -> None:
    path = str(conversations(tmp_path / "made.npz", tasks=8))
    dealt = [TauPrompts(path, seed=3).deal(i).id for i in range(16)]
    assert dealt == [TauPrompts(path, seed=3).deal(i).id for i in range(16)]
    assert len(set(dealt[:8])) == len(set(dealt[8:])) == 8 and dealt[:8] != dealt[8:]


def test_real_conversations_have_their_real_sizes() -> None:
    path = real_file("tau/airline_tokens.npz")
    source = TauPrompts(str(path), shuffle=False)
    recorded = load_npz(path)
    trials = [trial for i in range(source.size) for trial in source.deal(i).metadata["trials"]]
    assert source.size == 50 and len(trials) == 200
    assert sum(turn["results"] for trial in trials for turn in trial["turns"]) == 1113  # those an agent answered
    sizes = [len(t["prompt"]) + sum(turn["tokens"] + len(turn["after"]) for turn in t["turns"]) for t in trials]
    assert sorted(sizes) == sorted(len(one.tokens) for one in recorded)
    longest = int(np.argmax([len(one.tokens) for one in recorded]))
    task = next(i for i in range(50) if source.deal(i).id.startswith(f"airline_tokens:{recorded[longest].task} ("))
    engine = ScriptedEngine(TOKENIZER, lambda request: [5] * request.max_new_tokens, max_context=16_384)
    engine.vocab_size = 151_936
    workflow = TauReplayWorkflow(max_new_tokens=1024)
    (whole,) = play(workflow, engine, TOKENIZER, source.deal(task), sample=recorded[longest].trial)
    assert whole.tokens.numel() == len(recorded[longest].tokens) == 13_894
    assert whole.loss_mask.tolist() == recorded[longest].loss_mask().tolist()
