"""Episodes that could not be credited with what they earned cost their group, where the trainer would end the run."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from app.batch import CALL_REWARD, BatchError, Trajectory
from datamodules.prompts.base import Prompt
from datamodules.workflows import RLVRWorkflow
from datamodules.workflows.base import EpisodeEngine
from tests.datamodules.workflows.scripted_engine import CHATML, ScriptedEngine, play
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


def played(**fields: Any) -> list[Trajectory]:
    prompt, engine = Prompt("p", text="1+1?", answer="2"), ScriptedEngine(TOKENIZER, ["2"])
    return play(Changed(**fields), engine, TOKENIZER, prompt, lambda prompt, text: 0.3)


def test_an_episode_has_one_reward() -> None:
    assert len(played(reward=0.1 + 0.2)) == 2  # the same in float32
    with pytest.raises(BatchError, match=r"Trajectory\.reward: an episode has one, not 0\.3 and 0\.5"):
        played(reward=0.5)


def test_nothing_precedes_a_first_token() -> None:
    (one, _) = played()
    with pytest.raises(BatchError, match=r"Trajectory\.loss_mask of .*: True at position 0"):
        played(loss_mask=one.loss_mask | True)


def test_a_reward_of_a_call_needs_a_trained_token() -> None:
    (one, _) = played()

    class Rewarded(Changed):
        async def run(self, engine: EpisodeEngine, prompt: Prompt) -> list[Trajectory]:
            found = await super().run(engine, prompt)
            found[1].metadata[CALL_REWARD] = 0.5
            return found

    prompt, engine = Prompt("p", text="1+1?", answer="2"), ScriptedEngine(TOKENIZER, ["2"])
    with pytest.raises(BatchError, match=rf"Trajectory\.metadata of .*: {CALL_REWARD}, and none of its tokens is"):
        play(Rewarded(loss_mask=one.loss_mask & False), engine, TOKENIZER, prompt, lambda prompt, text: 1.0)
