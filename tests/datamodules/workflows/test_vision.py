"""Prompts with pictures through workflows: what is trained, and what becomes of replies that sample a placeholder."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from app.batch import Trajectory
from datamodules.inference.protocol import GenerationError, GenerationRequest, GenerationResponse
from datamodules.pipeline.gate import StalenessGate
from datamodules.pipeline.stream import Stream
from datamodules.prompts import Prompt, SquaresPrompts
from datamodules.workflows import EpisodeEngine, MultiTurnWorkflow, Turns, VisionRLVRWorkflow
from datamodules.workflows.base import PlaceholderSampled
from datamodules.workflows.turns import ReplyOptions
from tests.helpers.tiny_vision import TinyVision, noise


class Said:
    """Says what it was given to say, a reply a request."""

    update_methods = ("memory",)
    vocab_size, max_context, version = 300, 500, 0

    def __init__(self, *replies: list[int]) -> None:
        self.replies, self.seen = list(replies), list[GenerationRequest]()

    def use_images(self, processor: Any) -> None: ...

    async def generate(self, request: GenerationRequest) -> GenerationResponse:
        self.seen.append(request)
        tokens = self.replies.pop(0)
        return GenerationResponse(tokens, [-1.0] * len(tokens), [0] * len(tokens), "stop")


@pytest.fixture(scope="module")
def vision(tmp_path_factory: pytest.TempPathFactory) -> TinyVision:
    return TinyVision(tmp_path_factory.mktemp("vision"))


def episode(vision: TinyVision, engine: Said, images: Any = "own") -> EpisodeEngine:
    async def score(prompt: Prompt, completion: Any) -> Any:
        class Worth:
            value = 1.0

        return Worth()

    processor = vision.images if images == "own" else images
    return EpisodeEngine(engine, vision.tokenizer, score, name="e", seed="s", image_processor=processor)  # type: ignore[arg-type]


def play(vision: TinyVision, engine: Said, prompt: Prompt) -> list[Trajectory]:
    workflow = VisionRLVRWorkflow(max_new_tokens=4)
    workflow.prepare(vision.tokenizer)
    return asyncio.run(workflow.run(episode(vision, engine), prompt))


def test_a_reply_is_trained_with_the_pictures_of_its_prompt(vision: TinyVision) -> None:
    prompt = vision.prompt(["a", noise(1), "b", noise(2), "c"])
    engine = Said([5, vision.tokenizer.eos_token_id])
    (one,) = play(vision, engine, prompt)
    assert one.images is not None and one.images.tolist() == [*prompt.images, -1, -1]
    assert one.pictures == prompt.pictures and one.loss_mask.tolist() == [False] * len(prompt.tokens) + [True] * 2
    assert engine.seen[0].pictures == prompt.pictures and set(vision.images.placeholders) <= {
        *engine.seen[0].stop_token_ids
    }
    with pytest.raises(ValueError, match="prompt 'p' has no picture; use RLVRWorkflow"):
        play(vision, Said(), vision.prompt(["text"]))


def test_a_reply_that_samples_a_placeholder_drops_its_group_and_is_counted(vision: TinyVision) -> None:
    prompt = vision.prompt([noise(1), "?"])
    for placeholder in vision.images.placeholders:
        with pytest.raises(PlaceholderSampled, match="reply 'e/0' has a placeholder of a picture that is not there"):
            play(vision, Said([5, placeholder]), prompt)
    stream = Stream(StalenessGate(4, 1, None, 1.0), 2)
    stream.restore(0, {})
    for placeholder in (True, False, True):
        pending = stream.admit()
        assert pending is not None and stream.fail(pending, placeholder)
        assert not stream.fail(pending, placeholder)  # it was given up before
    stream.check()
    assert stream.gate.counters()["failed"] == 3
    assert stream.worth()["placeholder_sampled"] == 2.0 and "placeholder_sampled" not in stream.worth()


def test_placeholders_and_pictures_that_do_not_belong_together_never_reach_an_engine(vision: TinyVision) -> None:
    prompt, engine = vision.prompt([noise(1), "?"]), Said([5])
    bare = GenerationRequest(list(prompt.tokens), 4)
    with pytest.raises(GenerationError, match=r"token \d+ at position 1 is a placeholder of no picture"):
        asyncio.run(episode(vision, engine).generate(bare))
    moved = GenerationRequest([0, *prompt.tokens[:-1]], 4, images=list(prompt.images), pictures=prompt.pictures)
    with pytest.raises(GenerationError, match=r"token \d+ at position 1 of a picture is no placeholder"):
        asyncio.run(episode(vision, engine).generate(moved))
    shown = GenerationRequest(list(prompt.tokens), 4, images=list(prompt.images), pictures=prompt.pictures)
    with pytest.raises(GenerationError, match=r"request.pictures: Said shows no pictures to this model"):
        asyncio.run(episode(vision, engine, None).generate(shown))
    assert engine.seen == []


def test_a_conversation_is_shown_another_picture_in_a_later_turn(vision: TinyVision) -> None:
    prompt = vision.prompt(["a", noise(1), "b"])
    later = vision.prompt(["c", noise(2), "d", noise(1), "e"])
    options = ReplyOptions("Test", 4, 1.0)
    options.prepare(vision.tokenizer)
    turns, engine = Turns(prompt, options), Said([5], [6])
    made = episode(vision, engine)
    asyncio.run(turns.generate(made))  # type: ignore[arg-type]
    turns.extend(later.tokens, later.images, later.pictures)
    asyncio.run(turns.generate(made))  # type: ignore[arg-type]
    assert [len(one.pictures) for one in engine.seen] == [1, 2]
    first, second = turns.trajectories("turns", 1.0, {})
    (whole,) = turns.trajectories("whole", 1.0, {})
    assert len(first.pictures) == 1 and len(second.pictures) == len(whole.pictures) == 2
    assert whole.images is not None
    keys = [None if k < 0 else whole.pictures[k].key for k in whole.images.tolist()]
    mine = [None if k < 0 else prompt.pictures[k].key for k in prompt.images]
    theirs = [None if k < 0 else later.pictures[k].key for k in later.images]
    assert keys == [*mine, None, *theirs, None]


def test_a_conversation_that_is_rendered_anew_shows_its_pictures_again(vision: TinyVision) -> None:
    async def again(prompt: Prompt, replies: list[str]) -> str:
        return "again"

    workflow = MultiTurnWorkflow(max_turns=3, max_new_tokens=4, feedback=again, sequences="rendered")
    workflow.prepare(vision.tokenizer)
    prompt = vision.prompt(["a", noise(1), "b", noise(2), "c", noise(1), "d"])
    engine = Said(*([k, vision.tokenizer.eos_token_id] for k in (5, 6, 7)))
    found = asyncio.run(workflow.run(episode(vision, engine), prompt))
    for one in [*engine.seen, *found]:
        assert one.images is not None and [picture.key for picture in one.pictures] == [p.key for p in prompt.pictures]
        assert [k for k in list(one.images) if k >= 0] == [k for k in prompt.images if k >= 0]
    assert [one.loss_mask.tolist()[-2:] for one in found] == [[True, True]] * 3


def test_squares_are_counted_right_and_splits_share_no_picture(vision: TinyVision) -> None:
    train, held_out = SquaresPrompts(seed=1), SquaresPrompts(split="validation", size=9, seed=1)
    dealt = [vision.images.picture(train.deal(k).pictures[0], "here") for k in range(30)]
    assert all(dealt[k].key == dealt[k - k % 3].key for k in range(30)) and len({one.key for one in dealt}) == 10
    assert not {one.key for one in dealt} & {vision.images.picture(p.pictures[0], "h").key for p in held_out.samples()}
    assert [held_out.deal(k).id for k in (0, 9)] == ["validation 0 r"] * 2
    for k in range(30):
        prompt = train.deal(k)
        assert train.deal(k).answer == prompt.answer
        dominant = prompt.pictures[0].argmax(2)[prompt.pictures[0].max(2) > 140]
        assert (int(prompt.answer) == 0) == (not (dominant == "rgb".index(prompt.id[-1])).any())


def test_a_split_without_pictures_of_one_square_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"SquaresPrompts.holdout: 18 leaves no picture of one square.*lower it"):
        SquaresPrompts(split="validation", holdout=18)


def test_both_splits_of_squares_ask_alike() -> None:
    train = [SquaresPrompts(seed=1).deal(k).answer for k in range(900)]
    held_out = [one.answer for one in SquaresPrompts(split="validation", size=900, seed=3).samples()]
    for answer in "012345":
        assert abs(train.count(answer) - held_out.count(answer)) < 90  # a tenth of the questions
    assert len({*train[::3]}) > 4 and len({*held_out[::3]}) > 4
