"""Episodes in real grid worlds of minigrid, and the shortest ways that a warm start imitates."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

pytest.importorskip("minigrid")

from app.batch import Trajectory
from datamodules.conversations.image_processor import ImageProcessor
from datamodules.pipeline.player import EpisodePlayer
from datamodules.prompts import Prompt
from datamodules.prompts.dealer import encoded
from datamodules.prompts.tokenizers import encode_prompt
from datamodules.workflows.adapters.minigrid_prompts import GridWorld, MiniGridPrompts
from datamodules.workflows.adapters.minigrid_workflow import MiniGridWorkflow
from examples.vision.make_model import write
from tests.datamodules.workflows.scripted_engine import ScriptedEngine
from tests.helpers.selection import SEES, skip_without

SMALL: dict[str, Any] = {"view": 5, "tile": 7, "task": "{mission}"}
ROOMS = ("MiniGrid-Empty-Random-5x5-v0", "BabyAI-GoToLocalS5N2-v0")


class SeeingEngine(ScriptedEngine):
    """Is shown pictures, which it does not look at."""

    def use_images(self, processor: Any) -> None: ...


class Seeing:
    """A tokenizer and an image processor of a small model that sees."""

    def __init__(self, directory: Path) -> None:
        skip_without(SEES)
        write(directory, hidden=48, tower=16)
        self.tokenizer = AutoTokenizer.from_pretrained(directory)
        found = ImageProcessor.beside(str(directory), self.tokenizer)
        assert found is not None
        self.images = found

    def encoded(self, prompt: Prompt) -> Prompt:
        return encoded(prompt, lambda one: encode_prompt(self.tokenizer, one), self.images)

    def play(self, prompt: Prompt, replies: list[str], **options: Any) -> tuple[SeeingEngine, list[Trajectory]]:
        workflow, engine = MiniGridWorkflow(**options), SeeingEngine(self.tokenizer, replies)
        workflow.prepare(self.tokenizer)
        player = EpisodePlayer(workflow, engine, self.tokenizer, None, 60.0, image_processor=self.images)
        return engine, asyncio.run(player.play(self.encoded(prompt), name="e", seed="s", sample=0))


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Seeing:
    return Seeing(tmp_path_factory.mktemp("sees"))


@pytest.mark.parametrize("room", ROOMS)
def test_the_shortest_way_is_a_success_and_no_shorter_one_is(room: str) -> None:
    for seed in range(4):
        options: dict[str, Any] = {"environment": room, "seed": seed, "view": 5, "tile": 7, "actions": ["l", "r", "f"]}
        world = GridWorld(**options)
        before, way = world.picture(), world.way()
        assert np.array_equal(world.picture(), before) and not world.done  # looking for it changes nothing
        for k, word in enumerate(way):
            assert not world.success and world.act(word), (seed, k)
        assert world.done and world.success and not world.act("f")


def test_a_step_is_imitated_behind_the_conversation_before_it(seeing: Seeing) -> None:
    source = MiniGridPrompts(ROOMS[0], first=3, steps=8, **SMALL)
    prompts = [source.deal(k) for k in range(8)]
    way = GridWorld.of(prompts[0]).way()
    assert [one.solution for one in prompts] == [way[k % len(way)] for k in range(8)]
    assert [len(one.pictures) for one in prompts] == [k % len(way) + 1 for k in range(8)]
    told = [seeing.encoded(one).tokens for one in prompts[: len(way)]]
    for k, (one, after) in enumerate(pairwise(told)):  # what trees share
        said = seeing.tokenizer.encode(way[k], add_special_tokens=False)
        assert after[: len(one) + len(said)] == (*one, *said)


def test_an_episode_is_a_conversation_of_views(seeing: Seeing) -> None:
    prompt = MiniGridPrompts(ROOMS[0], first=3, **SMALL).deal(0)
    world = GridWorld.of(prompt)
    way = world.way()
    engine, (one,) = seeing.play(prompt, list(way))
    assert one.reward == 1.0 and one.finish_reason == "stop"
    assert one.metadata["steps"] == len(way) and one.metadata["done"] and "malformed_actions" not in one.metadata
    views = []
    for word in way:
        views.append(seeing.images.picture(world.picture(), "here").key)
        world.act(word)
    last = engine.seen[-1]
    assert last.images is not None and len(engine.seen) == len(way)
    rows = [last.pictures[k].key for k in last.images if k >= 0]
    assert rows[::25] == views and {picture.key for picture in one.pictures} == {*views}
    assert one.images is not None and int((one.images >= 0).sum()) == 25 * len(way)
    # What was served is what the imitation of the same way shows.
    steps = MiniGridPrompts(ROOMS[0], first=3, steps=len(way), **SMALL)
    assert tuple(engine.seen[-1].tokens) == seeing.encoded(steps.deal(len(way) - 1)).tokens
    _, turns = seeing.play(prompt, list(way), sequences="turns")
    assert len(turns) == len(way) and {turn.reward for turn in turns} == {1.0}


def test_replies_that_are_no_action_are_told_so_and_counted(seeing: Seeing) -> None:
    prompt = MiniGridPrompts(ROOMS[0], first=3, actions=["l", "r", "f"], **SMALL).deal(0)
    engine, (one,) = seeing.play(prompt, ["jump", "left", "l"], max_turns=3)
    assert one.reward == 0.0 and one.finish_reason == "max_turns" and not one.metadata["done"]
    assert (one.metadata["steps"], one.metadata["malformed_actions"], one.metadata["turns"]) == (1, 2, 3)
    assert "Answer with one of these words: l, r, f." in seeing.tokenizer.decode(engine.seen[1].tokens)
    _, (cut,) = seeing.play(prompt, ["forward"], max_new_tokens=3)
    assert cut.finish_reason == "length" and cut.reward == 0.0


def test_a_world_that_ends_without_success_earns_nothing(seeing: Seeing) -> None:
    """After the most steps of the environment: 100 of this one, which `max_turns` has to allow."""
    prompt = MiniGridPrompts(ROOMS[0], first=3, actions=["l", "r", "f"], **SMALL).deal(0)
    world = GridWorld.of(prompt)
    while not world.done:
        world.act("l")
    assert not world.success


def test_seeds_are_apart_and_streams_start_over() -> None:
    source = MiniGridPrompts(ROOMS[1], first=5, size=2)
    assert [source.deal(k).metadata["seed"] for k in range(4)] == [5, 6, 5, 6]
    prompt = source.deal(0)
    assert "go to" in prompt.messages[0]["content"][0]["text"] and prompt.pictures[0].shape == (56, 56, 3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"environment": "MiniGrid-Nowhere-v0"}, "MiniGridPrompts.environment: there is no 'MiniGrid-Nowhere-v0'"),
        ({"environment": "CartPole-v1"}, "'CartPole-v1' is none of minigrid's"),
        ({"view": 4}, "MiniGridPrompts.view: 4, must be an odd number"),
        ({"tile": 0}, "MiniGridPrompts.tile: 0"),
        ({"actions": ["a", "a", "b"]}, "must be 3 to 7 different words"),
        ({"task": "{where}"}, r"MiniGridPrompts.task: \{where\} is none of"),
    ],
)
def test_what_does_not_fit_is_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MiniGridPrompts(**options)


def test_a_mission_that_walking_cannot_accomplish_is_named() -> None:
    with pytest.raises(ValueError, match="'MiniGrid-DoorKey-5x5-v0' is not to be done by left, right, forward alone"):
        MiniGridPrompts("MiniGrid-DoorKey-5x5-v0", steps=4).deal(0)


def test_prompts_of_another_source_are_named(seeing: Seeing) -> None:
    with pytest.raises(ValueError, match="prompt 'p': its metadata has no 'environment'"):
        GridWorld.of(Prompt(id="p", text="Go."))
