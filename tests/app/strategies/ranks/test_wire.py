"""Packed batches come back bit for bit, and are small where prefixes are shared."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from app.batch import RolloutBatch, Trajectory
from app.strategies.ranks.wire import PackedBatch, pack, pack_values, unpack, unpack_values
from tests.helpers.pictured import pictured_batch

FLOATS = st.sampled_from([0.0, -0.0, -1.5, 1e-38, -3.25e7])
LOGPROBS = st.sampled_from([0.0, -0.0, -1.5, 1e-38, -3.25e2])


@st.composite
def batches(draw: st.DrawFn) -> RolloutBatch:
    trajectories = []
    for i in range(draw(st.integers(1, 6))):
        length = draw(st.integers(1, 12))
        trajectories.append(
            Trajectory(
                tokens=torch.tensor(
                    draw(st.lists(st.sampled_from([0, 1, 2**32 - 1]), min_size=length, max_size=length))
                ),
                loss_mask=torch.tensor(draw(st.lists(st.booleans(), min_size=length, max_size=length))),
                behavior_logprobs=torch.tensor(draw(st.lists(LOGPROBS, min_size=length, max_size=length))),
                versions=torch.tensor(draw(st.lists(st.integers(-1, 2), min_size=length, max_size=length))),
                reward=0.1 * i,
                group_id=i // 2,
                episode_id=i,
                metadata={"step": i},
            )
        )
    batch = RolloutBatch.from_trajectories(trajectories)
    if draw(st.booleans()):
        values = st.lists(FLOATS, min_size=batch.num_tokens, max_size=batch.num_tokens)
        batch.add_column("advantages", torch.tensor(draw(values)))
    return batch


def _bits(tensor: torch.Tensor) -> bytes:
    return tensor.numpy().tobytes()


@given(batches())
def test_round_trip(batch: RolloutBatch) -> None:
    got = unpack(*pack(batch))
    expected = batch.tensors()
    assert got.tensors().keys() == expected.keys()
    for name, tensor in got.tensors().items():
        assert tensor.dtype == expected[name].dtype and _bits(tensor) == _bits(expected[name]), name
    assert (got.prompt_ids, got.metadata) == (batch.prompt_ids, batch.metadata)


@given(batches(), st.data())
def test_some_sequences_are_those_of_the_batch(batch: RolloutBatch, data: st.DataObject) -> None:
    chosen = sorted(data.draw(st.sets(st.integers(0, len(batch) - 1), min_size=1)))
    got, expected = PackedBatch(*pack(batch)).select(chosen), batch.select(chosen)
    for name, tensor in expected.tensors().items():
        assert tensor.dtype == got.tensors()[name].dtype and _bits(tensor) == _bits(got.tensors()[name]), name
    assert (got.prompt_ids, got.metadata) == (expected.prompt_ids, expected.metadata)


@pytest.mark.parametrize("chosen", [[0, 1, 2, 3, 4], [0, 3], [2], [1, 2, 4]])
def test_pictures_are_those_of_the_sequences(chosen: list[int]) -> None:
    batch = pictured_batch()
    header, payload = pack(batch)
    for picture in batch.pictures:
        assert payload.numpy().tobytes().count(picture.pixels.tobytes()) == 1
    got, expected = PackedBatch(header, payload).select(chosen), batch.select(chosen)
    assert got.tensors().keys() == expected.tensors().keys()
    assert all(tensor.equal(got.tensors()[name]) for name, tensor in expected.tensors().items())
    assert [(one.key, one.tokens, one.pixels.tobytes(), one.pixels.shape) for one in got.pictures] == [
        (one.key, one.tokens, one.pixels.tobytes(), one.pixels.shape) for one in expected.pictures
    ]


@given(st.dictionaries(st.sampled_from("abc"), st.lists(FLOATS, max_size=20)))
def test_values_round_trip(lists: dict[str, list[float]]) -> None:
    values = {name: torch.tensor(numbers) for name, numbers in lists.items()}
    got = unpack_values(*pack_values(values))
    assert {name: _bits(tensor) for name, tensor in got.items()} == {name: _bits(t) for name, t in values.items()}


@pytest.mark.skipif("ARBORIST_DATA" not in os.environ, reason="needs ARBORIST_DATA (recorded airline episodes)")
def test_airline_turns_shrink_fiftyfold() -> None:
    data = np.load(Path(os.environ["ARBORIST_DATA"]) / "tau" / "airline_tokens.npz")
    generator = torch.Generator().manual_seed(0)
    trajectories = []
    for row in np.flatnonzero(data["task"][data["turn_traj"]] < 8):
        episode, start, end = (int(data[name][row]) for name in ("turn_traj", "turn_start", "turn_end"))
        first = int(data["offsets"][episode])
        tokens = np.concatenate([data["system_ids"], data["ids"][first : int(data["offsets"][episode + 1])]])[:end]
        generated = torch.arange(end) >= start
        trajectories.append(
            Trajectory(
                tokens=torch.from_numpy(tokens.astype(np.int64)),
                loss_mask=generated,
                behavior_logprobs=torch.where(generated, -torch.rand(end, generator=generator), 0.0),
                versions=torch.where(generated, 3, -1),
                reward=float(data["reward"][episode]),
                group_id=int(data["task"][episode]),
                episode_id=episode,
            )
        )
    batch = RolloutBatch.from_trajectories(trajectories)
    header, payload = pack(batch)
    flat = sum(tensor.nbytes for tensor in batch.tensors().values())
    assert len(header) + payload.numel() < flat / 50
    got = unpack(header, payload)
    assert all(torch.equal(tensor, batch.tensors()[name]) for name, tensor in got.tensors().items())
