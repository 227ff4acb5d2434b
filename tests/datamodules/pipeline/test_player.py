"""Episodes that could not be credited with what they earned cost their group, where the trainer would end the run."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from app.batch import CALL_REWARD, UNTRAINABLE_CALLS, BatchError, Trajectory
from datamodules.groups import earned
from datamodules.pipeline.player import EpisodeError, EpisodePlayer
from datamodules.prompts.base import Prompt
from datamodules.workflows import RLVRWorkflow
from datamodules.workflows.base import EpisodeEngine
from datamodules.workflows.gateway import AgentWorkflow
from tests.datamodules.workflows.gateway import agents
from tests.datamodules.workflows.scripted_engine import CHATML, Pool, ScriptedEngine, play
from tests.helpers.recorded_samples import byte_tokenizer

TOKENIZER = byte_tokenizer(CHATML)


class Changed(RLVRWorkflow):
    """Two sequences an episode, the second with other fields."""

    def __init__(self, **fields: Any) -> None:
        super().__init__(max_new_tokens=8)
        self.fields = fields

    async def run(self, engine: EpisodeEngine, prompt: Prompt) -> list[Trajectory]:
        (one,) = await super().run(engine, prompt)
        return [one, replace(one, turn_index=1, metadata={}, **self.fields)]


def test_validation_samples_at_its_temperature_what_an_agent_asks_for_at_another() -> None:
    engine = ScriptedEngine(TOKENIZER, lambda request: "2")
    workflow = AgentWorkflow(agents.at_its_own_temperature, max_new_tokens=8, workers=1)
    workflow.prepare(TOKENIZER)
    player = EpisodePlayer(workflow, engine, TOKENIZER, Pool(lambda prompt, text: 1.0), deadline_s=60.0)  # type: ignore[arg-type]
    task = Prompt("p", text="1+1?", answer="2")
    task = replace(task, tokens=workflow.encode(task))
    try:
        for temperature in (None, 0.0, 0.4):
            asyncio.run(player.play(task, name="e", seed="s", temperature=temperature))
    finally:
        workflow.close()
    assert [one.temperature for one in engine.seen] == [0.7, 0.0, 0.4]


def played(**fields: Any) -> list[Trajectory]:
    prompt, engine = Prompt("p", text="1+1?", answer="2"), ScriptedEngine(TOKENIZER, ["2"])
    return play(Changed(**fields), engine, TOKENIZER, prompt, lambda prompt, text: 0.3)


def test_an_episode_has_one_reward() -> None:
    assert len(played(reward=0.1 + 0.2)) == 2  # the same in float32
    with pytest.raises(BatchError, match=r"Trajectory\.reward: an episode has one, not 0\.3 and 0\.5"):
        played(reward=0.5)


@pytest.mark.parametrize(("shift", "refused"), [(0, False), (-1, True), (2, True)])
def test_a_mask_that_has_slipped_is_refused(shift: int, refused: bool) -> None:
    """It trained tokens of the prompt, in silence."""

    class Slips(RLVRWorkflow):
        async def run(self, engine: EpisodeEngine, prompt: Prompt) -> list[Trajectory]:
            (one,) = await super().run(engine, prompt)
            return [replace(one, loss_mask=one.loss_mask.roll(shift))]

    prompt, engine = Prompt("p", text="1+1? It is", answer="2"), ScriptedEngine(TOKENIZER, ["two"])
    if not refused:
        assert len(play(Slips(max_new_tokens=8), engine, TOKENIZER, prompt, lambda prompt, text: 0.3)) == 1
        return
    with pytest.raises(EpisodeError, match=r"Slips\.run .* loss_mask trains \d+ tokens that the engine did not sample"):
        play(Slips(max_new_tokens=8), engine, TOKENIZER, prompt, lambda prompt, text: 0.3)


@pytest.mark.parametrize("trained", ["everything", "half of the reply"])
def test_masks_that_train_more_or_less_are_meant(trained: str) -> None:
    class Chooses(RLVRWorkflow):
        async def run(self, engine: EpisodeEngine, prompt: Prompt) -> list[Trajectory]:
            (one,) = await super().run(engine, prompt)
            mask = one.loss_mask.clone()
            mask[1:] = True
            if trained != "everything":
                mask = one.loss_mask & (torch.arange(len(mask)) % 2 == 0)
            return [replace(one, loss_mask=mask)]

    prompt, engine = Prompt("p", text="1+1? It is", answer="2"), ScriptedEngine(TOKENIZER, ["two"])
    assert len(play(Chooses(max_new_tokens=8), engine, TOKENIZER, prompt, lambda prompt, text: 0.3)) == 1


def test_what_an_episode_writes_into_its_prompt_is_its_own() -> None:
    """Samples of a group, and later episodes of the prompt, read what others had written."""

    class Counts(RLVRWorkflow):
        async def run(self, engine: EpisodeEngine, prompt: Prompt) -> list[Trajectory]:
            prompt.metadata["tries"].append(1)
            prompt.messages[0]["content"] += "!"
            found = await super().run(engine, prompt)
            found[0].metadata["seen"] = (len(prompt.metadata["tries"]), prompt.messages[0]["content"])
            return found

    prompt = Prompt("p", messages=({"role": "user", "content": "1+1?"},), metadata={"tries": []})
    engine = ScriptedEngine(TOKENIZER, ["2", "2"])
    for _ in range(2):
        [one] = play(Counts(max_new_tokens=8), engine, TOKENIZER, prompt, lambda prompt, text: 0.3)
        assert one.metadata["seen"] == [1, "1+1?!"]
    assert prompt.metadata == {"tries": []} and prompt.messages[0]["content"] == "1+1?"


class Late(RLVRWorkflow):
    """Sets what it likes as the reward, as workflows may: a trajectory is checked when it is made."""

    async def run(self, engine: EpisodeEngine, prompt: Prompt) -> list[Trajectory]:
        found = await super().run(engine, prompt)
        found[0].reward = None  # type: ignore[assignment]
        return found


def test_a_reward_that_is_no_number_is_told_by_its_field() -> None:
    prompt, engine = Prompt("p", text="1+1?", answer="2"), ScriptedEngine(TOKENIZER, ["2"])
    with pytest.raises(BatchError, match=r"Trajectory\.reward of .*: expected a number, got 'None'"):
        play(Late(max_new_tokens=8), engine, TOKENIZER, prompt, lambda prompt, text: 0.3)


def test_nothing_precedes_a_first_token() -> None:
    (one, _) = played()
    with pytest.raises(BatchError, match=r"Trajectory\.loss_mask of .*: True at position 0"):
        played(loss_mask=one.loss_mask | True)


class Noted(Changed):
    """With metadata of ours."""

    def __init__(self, key: str, value: Any, **fields: Any) -> None:
        super().__init__(**fields)
        self.key, self.value = key, value

    async def run(self, engine: EpisodeEngine, prompt: Prompt) -> list[Trajectory]:
        found = await super().run(engine, prompt)
        found[1].metadata[self.key] = self.value
        return found


def noted(key: str, value: Any, **fields: Any) -> list[Trajectory]:
    prompt, engine = Prompt("p", text="1+1?", answer="2"), ScriptedEngine(TOKENIZER, ["2"])
    return play(Noted(key, value, **fields), engine, TOKENIZER, prompt, lambda prompt, text: 0.3)


@pytest.mark.parametrize("made", [float, np.float64, np.float32, torch.tensor])
def test_rewards_of_calls_are_numbers_of_any_library(made: Any) -> None:
    """As an episode's; and plain ones from then on, which files know."""
    found = noted(CALL_REWARD, made(0.5))
    assert type(found[1].metadata[CALL_REWARD]) is float and earned(found) == pytest.approx(0.8)


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        (CALL_REWARD, "much", "expected a number, got 'much'"),
        (CALL_REWARD, np.float32("nan"), "is nan; it must be a finite number within"),
        (UNTRAINABLE_CALLS, "none", "expected an integer, got 'none'"),
        (UNTRAINABLE_CALLS, 10**400, r"is 10+; it must be a finite number within"),
    ],
    ids=["text", "nan", "no number of calls", "huge"],
)
def test_what_is_no_number_under_a_key_of_ours_is_refused(key: str, value: Any, said: str) -> None:
    with pytest.raises(BatchError, match=rf"Trajectory\.metadata of .*: {key}:? {said}"):
        noted(key, value)


def test_a_reward_of_a_call_needs_a_trained_token() -> None:
    (one, _) = played()
    with pytest.raises(BatchError, match=rf"Trajectory\.metadata of .*: {CALL_REWARD}, and none of its tokens is"):
        noted(CALL_REWARD, 0.5, loss_mask=one.loss_mask & False)
