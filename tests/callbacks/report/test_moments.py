"""What is kept of a batch: its tree, credit by box, the transcripts worth reading; and all of it small."""

from __future__ import annotations

import base64
import io
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from PIL import Image

from app.batch import CALL_REWARD, RolloutBatch, Trajectory
from callbacks.report import moments
from callbacks.report.recorded import _numbers, read_recorded
from datamodules.files.recording import RolloutRecorder
from datamodules.groups import Group
from tests.helpers.pictured import picture, pictured
from tests.helpers.recorded_samples import byte_tokenizer


def episode(
    tokens: list[int], reward: float, group: int, number: int, logprob: float = -1.0, turn: int = 0
) -> Trajectory:
    """The first two tokens are the prompt."""
    trained = torch.arange(len(tokens)) >= 2
    return Trajectory(
        tokens=tokens,
        loss_mask=trained,
        behavior_logprobs=torch.where(trained, logprob, 0.0),
        versions=torch.where(trained, 4, -1),
        reward=reward,
        group_id=group,
        episode_id=number,
        turn_index=turn,
        prompt_id=f"p{group}",
    )


def batch() -> RolloutBatch:
    return RolloutBatch.from_trajectories(
        [
            episode([1, 2, 3, 4], 1.0, 0, 0),
            episode([1, 2, 3, 5], 0.0, 0, 1),
            episode([1, 2, 6], 0.0, 0, 2),
            episode([9, 8, 7], 2.0, 1, 3),
            episode([9, 8, 7, 7], 2.0, 1, 4, -3.0),
        ]
    )


def test_boxes_carry_the_mean_credit_of_what_is_trained_in_them() -> None:
    one = batch()
    one.add_column("advantages", torch.tensor([0, 0, 6, 6, 0, 0, -3, -3, 0, 0, -3, 0, 0, 1, 0, 0, 5, 5]))
    found = moments.batch_moment(one, None)
    tree = found["tree"]
    by_text = {text: i for i, text in enumerate(tree["text"])}
    assert set(by_text) == {"1 2", "3", "4", "5", "6", "9 8 7 7"}  # one that is a prefix ends inside a box
    want = {"1 2": None, "3": 1.5, "4": 6.0, "5": -3.0, "6": -3.0, "9 8 7 7": 11 / 3}
    assert {text: tree["credit"][i] for text, i in by_text.items()} == pytest.approx(want, abs=1e-5)
    assert [tree["sequences"][by_text[text]] for text in ("1 2", "3", "6", "9 8 7 7")] == [3, 2, 1, 2]
    assert [tree["rows"][by_text[text]] for text in ("1 2", "3", "9 8 7 7")] == [3, 2, 1]
    assert tree["text"][tree["parent"][by_text["5"]]] == "3" and tree["start"][by_text["5"]] == 3
    assert tree["reward"][by_text["3"]] == 0.5 and found["credit"] == "advantage" and found["version"] == 4
    assert (found["groups"], found["groups_shown"], found["sequences"]) == (2, 2, 5)


def test_without_advantages_the_group_is_compared() -> None:
    found = moments.batch_moment(batch(), None)
    by_text = dict(zip(found["tree"]["text"], found["tree"]["credit"], strict=True))
    assert by_text["4"] == pytest.approx(2 / 3, abs=1e-5) and by_text["9 8 7 7"] == 0.0
    assert found["credit"] == "reward less its group's mean"


def test_best_worst_and_the_one_its_group_foretold_least() -> None:
    told = moments.batch_moment(batch(), byte_tokenizer())["transcripts"]
    assert (told["best"]["reward"], told["worst"]["reward"]) == (2.0, 0.0)
    assert told["surprising"]["prompt_id"] == "p0" and told["surprising"]["reward"] == 1.0  # the only one of three
    assert told["surprising"]["above"] == pytest.approx(2 / 3) and told["surprising"]["surprise"] == 1.0
    assert [said for _, said in told["best"]["runs"]] == [False, True]


def test_of_equal_rewards_the_least_likely_reply_is_surprising() -> None:
    alike = RolloutBatch.from_trajectories([episode([1, 2, 3 + i], 1.0, 0, i, -float(i)) for i in range(3)])
    assert moments.batch_moment(alike, None)["transcripts"]["surprising"]["surprise"] == 2.0


def test_an_episode_is_told_by_its_last_turn() -> None:
    turns = [
        episode([1, 2, 3], 1.0, 0, 0, turn=0),
        episode([1, 2, 3, 4, 5], 1.0, 0, 0, turn=1),
        episode([1, 2], 0, 0, 1),
    ]
    best = moments.batch_moment(RolloutBatch.from_trajectories(turns), None)["transcripts"]["best"]
    assert best["turns"] == 2 and best["runs"] == [("1 2", False), ("3 4 5", True)]


def test_rewards_of_single_calls_are_told(tmp_path: Path) -> None:
    given = [(0, 0, 0.25), (0, 1, 0.5), (1, 0, -1.0), (2, 0, 0.0)]  # episode, turn, reward of the call
    calls = [
        replace(episode([1, 2, *range(3, 4 + turn), 10 + one], 0.0, 0, one, turn=turn), metadata={CALL_REWARD: value})
        for one, turn, value in given
    ]
    found = moments.batch_moment(RolloutBatch.from_trajectories(calls), None)
    told = found["transcripts"]
    assert (told["best"]["reward"], told["worst"]["reward"]) == (0.75, -1.0)
    assert told["best"]["above"] == pytest.approx(0.75 + 0.25 / 3)
    rewards = dict(zip(found["tree"]["text"], found["tree"]["reward"], strict=True))
    assert (rewards["10"], rewards["11"]) == (0.75, -1.0)
    RolloutRecorder(tmp_path).write(0, [Group(0, "p0", 0, calls)])
    series = read_recorded(tmp_path).series
    assert series["reward"] == ([1], [pytest.approx(-0.25 / 3)]) and series["rollouts/flat"] == ([1], [0.0])


def test_large_batches_show_whole_groups_and_long_texts_their_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moments, "MOST_TOKENS", 6)
    monkeypatch.setattr(moments, "MOST_TEXT", 30)
    found = moments.batch_moment(batch(), None)
    assert (found["groups"], found["groups_shown"]) == (2, 1) and "9 8 7 7" not in found["tree"]["text"]
    long = RolloutBatch.from_trajectories([episode([1, 2, *range(100, 140)], 0, 0, 0)])
    (text,) = moments.batch_moment(long, None)["tree"]["text"]
    assert text.startswith("1 2 100") and text.endswith("138 139") and "characters left out" in text and len(text) < 80


def test_pictures_under_equal_ids_are_boxes_of_their_own() -> None:
    """As the tree that is trained has them. A picture is named in the text, and shown."""
    shown = [pictured([1, picture(k // 2), 2], group_id=k // 2, episode_id=k) for k in range(4)]
    found = moments.batch_moment(RolloutBatch.from_trajectories(shown), None)
    tree = found["tree"]
    boxes = dict(zip(tree["text"], zip(tree["sequences"], tree["pictures"], tree["parent"])))
    assert boxes == {
        "1": (4, [], -1),
        "[picture 1] 2 20 21 22": (2, [[0, 0, 4]], tree["text"].index("1")),
        "[picture 2] 2 20 21 22": (2, [[1, 0, 4]], tree["text"].index("1")),
    }
    assert found["pictures"] == 2 and found["thumbnails"] == [moments.thumbnail(picture(k)) for k in range(2)]


def test_a_picture_in_tiles_is_one_picture() -> None:
    """With what its family puts between them, and without what stands around."""
    images = [-1, 0, 0, -1, 0, 0, -1, -1]
    tiled = pictured(
        [1], 0, tokens=[1, 7, 7, 9, 7, 7, 2, 20], loss_mask=[0] * 7 + [1], behavior_logprobs=[0.0] * 7 + [-1.5],
        versions=[-1] * 7 + [0], images=images, pictures=(picture(0),),
    )  # fmt: skip
    batch = RolloutBatch.from_trajectories([tiled])
    uri = moments.thumbnail(picture(0))
    assert moments.transcript(batch, 0, None) == [("1", False), (uri, None), ("2", False), ("20", True)]
    tree = moments.batch_moment(batch, None)["tree"]
    assert tree["text"] == ["1 [picture 1] 2 20"] and tree["pictures"] == [[[0, 1, 5]]]


def test_pictures_stand_between_the_runs_of_a_transcript(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = picture(0), picture(1, height=400, width=200)
    batch = RolloutBatch.from_trajectories([pictured([first, 1, second, 2, first, 3])])
    uris = [moments.thumbnail(one) for one in (first, second)]
    small = Image.open(io.BytesIO(base64.b64decode(uris[1].partition(",")[2])))
    assert small.size == (48, 96) and max(map(len, uris)) < 8000
    told: list[moments.Run] = [
        (uris[0], None),
        ("1", False),
        (uris[1], None),
        ("2", False),
        (uris[0], None),
        ("3", False),
    ]
    assert moments.transcript(batch, 0, None) == [*told, ("20 21 22", True)]
    monkeypatch.setattr(moments, "MOST_PICTURES", 1)
    runs = moments.transcript(batch, 0, None)
    assert runs[:3] == [*told[:2], ("[picture 2]", False)] and runs[-1] == ("20 21 22", True)
    found = moments.batch_moment(batch, None)
    assert found["pictures"] == 2 and found["thumbnails"] == uris[:1]
    assert found["tree"]["pictures"] == [[[0, 0, 4], [1, 5, 4], [0, 10, 4]]]


def test_tokens_of_a_recording_are_of_the_tree_that_is_trained() -> None:
    """Neither another picture behind the same placeholders nor another temperature shares a token."""
    shown = [pictured([1, picture(seed), 2], episode_id=seed) for seed in (0, 1)]
    found = _numbers(RolloutBatch.from_trajectories(shown))
    assert (found["tokens/dense"], found["tokens/leaf"], found["tokens/tree"]) == (18, 18, 17)
    apart = [pictured([1, 2], episode_id=one, temperature=0.5 + one) for one in (0, 1)]
    found = _numbers(RolloutBatch.from_trajectories(apart))
    assert (found["tokens/dense"], found["tokens/leaf"], found["tokens/tree"]) == (10, 10, 10)


def test_rewards_that_differ_by_rounding_surprise_nobody() -> None:
    """0.3 for the episode, and 0.1 for it with 0.2 for a call, are one reward: of that group nothing stands out."""
    flat = [episode([1, 2, 3, i], 0.3, 0, i) for i in range(3)]
    of_call = replace(episode([1, 2, 3, 9], 0.1, 0, 3), metadata={CALL_REWARD: 0.2})
    mixed = [episode([1, 2, 3, 4 + i], float(i % 2), 1, 4 + i) for i in range(4)]
    found = moments.batch_moment(RolloutBatch.from_trajectories([*flat, of_call, *mixed]), None)["transcripts"]
    assert abs(found["surprising"]["above"]) == 0.5
