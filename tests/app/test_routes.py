"""Rows of experts keep to their tokens: through batches, selections, ranks, checkpoints and recordings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from app.batch import BatchError, RolloutBatch, Trajectory
from app.routes import BatchRoutes, Routes, RouteTable
from app.strategies.ranks.wire import PackedBatch, pack
from datamodules import groups
from datamodules.files.recording import RolloutRecorder, read_batch
from modules.ranks import build_tree, settle_routes

Rows = list[tuple[int, ...] | None]


@st.composite
def episodes(draw: st.DrawFn, dtype: torch.dtype = torch.uint8) -> tuple[list[Trajectory], list[Rows]]:
    """Sequences with and without records, which share tables and rows; what each token's row says."""
    tables = []
    for _ in range(draw(st.integers(1, 2))):
        table = RouteTable()
        for _ in range(draw(st.integers(1, 2))):
            table.add(torch.tensor(draw(_ROWS), dtype=dtype).view(-1, 2, 2))
        tables.append(table)
    found, said = [], list[Rows]()
    for i in range(draw(st.integers(1, 5))):
        length = draw(st.integers(1, 6))
        tokens = draw(st.lists(st.sampled_from([1, 2]), min_size=length, max_size=length))
        routes = None
        rows: Rows = [None] * length
        if draw(st.booleans()):
            table = draw(st.sampled_from(tables))
            index = draw(st.lists(st.integers(-1, len(table) - 1), min_size=length, max_size=length))
            routes = Routes(torch.tensor(index, dtype=torch.int32), table)
            rows = [None if k < 0 else tuple(table.rows()[k].flatten().tolist()) for k in index]
        found.append(trajectory(tokens, i, routes))
        said.append(rows)
    return found, said


_ROWS = st.lists(st.lists(st.integers(0, 9), min_size=4, max_size=4), min_size=1, max_size=4)


def trajectory(tokens: list[int], i: int = 0, routes: Routes | None = None, temperature: float = 1.0) -> Trajectory:
    zeros = torch.zeros(len(tokens))
    return Trajectory(
        torch.tensor(tokens),
        zeros.bool(),
        zeros,
        zeros.long() - 1,
        0.0,
        i // 2,
        i,
        routes=routes,
        temperature=temperature,
    )


def said_by(batch: RolloutBatch) -> list[Rows]:
    """What each token's row says."""
    if batch.routes is None:
        return [[None] * int(length) for length in batch.lengths()]
    table = [tuple(row) for row in batch.routes.table.flatten(1).tolist()]
    return [[None if k < 0 else table[k] for k in one.tolist()] for one in batch.split(batch.routes.index)]


def assert_compact(batch: RolloutBatch) -> None:
    """No row without a token."""
    if batch.routes is not None:
        used = batch.routes.index[batch.routes.index >= 0].unique()
        assert used.tolist() == list(range(len(batch.routes.table))) and len(used)


@given(episodes(), st.randoms())
def test_batches_selections_and_ranks(case: tuple[list[Trajectory], list[Rows]], random: Any) -> None:
    trajectories, said = case
    batch = RolloutBatch.from_trajectories(trajectories)
    assert said_by(batch) == said
    assert_compact(batch)
    picks = [random.randrange(len(said)) for _ in range(3)]
    chosen = batch.select(picks)
    assert said_by(chosen) == [said[i] for i in picks]
    assert_compact(chosen)
    sent, mine = PackedBatch(*pack(batch)), sorted(set(picks))
    assert said_by(sent.select(mine)) == [said[i] for i in mine]
    assert_compact(sent.select(mine))
    held = [groups.Group(0, "p", 0, trajectories)]
    (again,) = groups.unpack(groups.pack(held))
    assert said_by(RolloutBatch.from_trajectories(again.trajectories)) == said


def test_recordings_keep_them(tmp_path: Path) -> None:
    table = RouteTable()
    table.add(torch.arange(300, dtype=torch.int16).view(-1, 3, 2))
    routes = Routes(torch.tensor([4, -1, 2], dtype=torch.int32), table)
    held = [groups.Group(0, "p", 0, [trajectory([1, 2, 3], 0, routes), trajectory([1, 2], 1)])]
    RolloutRecorder(tmp_path).write(3, held)
    (again,) = read_batch(tmp_path, 3)
    batch = RolloutBatch.from_trajectories(again.trajectories)
    assert batch.routes is not None and batch.routes.table.dtype == torch.int16
    assert said_by(batch) == [[tuple(range(24, 30)), None, tuple(range(12, 18))], [None, None]]


def test_rows_that_follow_one_another_travel_as_runs() -> None:
    """Four bytes a dense token would be more than the rows of a conversation's many turns."""
    table = RouteTable()
    table.add(torch.zeros(4000, 2, 2, dtype=torch.uint8))
    tokens = list(range(1, 4001))
    turns = [
        trajectory(tokens[:n], n, Routes(torch.arange(n, dtype=torch.int32), table)) for n in range(200, 4001, 200)
    ]
    with_rows = pack(RolloutBatch.from_trajectories(turns))[1].numel()
    without = pack(RolloutBatch.from_trajectories(trajectory(tokens[:n], n) for n in range(200, 4001, 200)))[1].numel()
    assert with_rows - without < 4000 * 4 + 2000


@given(episodes())
def test_a_shared_token_has_one_row_whatever_part_of_a_batch_it_is_in(
    case: tuple[list[Trajectory], list[Rows]],
) -> None:
    trajectories, said = case
    batch = RolloutBatch.from_trajectories(trajectories)
    first: dict[tuple[int, ...], Any] = {}
    for one, rows in zip(trajectories, said, strict=True):
        for t, row in enumerate(rows):
            if row is not None:
                first.setdefault(tuple(one.tokens[: t + 1].tolist()), row)
    expected = [[first.get(tuple(t.tokens[: k + 1].tolist())) for k in range(len(t.tokens))] for t in trajectories]
    for _ in range(2):
        settle_routes(batch)
        assert said_by(batch) == expected
        assert_compact(batch)
    for i in range(len(batch)):
        tree = build_tree(batch, "tree", [i])
        rows = [None] * len(expected[i])
        if tree.routes is not None:
            own = tree.routes.rows[tree.sequence_tokens([0])]
            rows = [None if k < 0 else tuple(tree.routes.table[k].flatten().tolist()) for k in own]
        assert rows == expected[i]


def test_temperatures_keep_rows_apart() -> None:
    table = RouteTable()
    table.add(torch.arange(8, dtype=torch.uint8).view(2, 2, 2))
    one, other = (Routes(torch.tensor([k, -1], dtype=torch.int32), table) for k in range(2))
    batch = RolloutBatch.from_trajectories([trajectory([1, 2], 0, one), trajectory([1, 2], 1, other, 0.5)])
    settle_routes(batch)
    assert said_by(batch) == [[(0, 1, 2, 3), None], [(4, 5, 6, 7), None]]


def test_nonsense_is_refused_by_name() -> None:
    table = RouteTable()
    table.add(torch.zeros(2, 2, 2, dtype=torch.uint8))
    for wrong in (torch.zeros(2, 2, 2, dtype=torch.int16), torch.zeros(2, 3, 2, dtype=torch.uint8)):
        with pytest.raises(BatchError, match="of one model"):
            table.add(wrong)
    with pytest.raises(BatchError, match=r"Trajectory.routes of episode 0 has 1 entries but tokens has 2"):
        trajectory([1, 2], 0, Routes(torch.zeros(1, dtype=torch.int32), table))
    for index, rows, said in (
        (np.array([0, 2], np.int32), table.rows(), "rows 0 to 2 of a table of 2"),
        (np.array([0], np.int32), table.rows(), r"expected torch.int32 of shape \(2,\)"),
        (np.array([0, 0], np.int32), table.rows().float(), "expected a table of uint8 or int16"),
    ):
        tensors = RolloutBatch.from_trajectories([trajectory([1, 2])]).tensors()
        tensors |= {"routes": torch.from_numpy(index), "route_table": rows}
        with pytest.raises(BatchError, match=f"RolloutBatch.routes: {said}"):
            RolloutBatch.from_tensors(tensors, ["p"], ["stop"])
    assert BatchRoutes(torch.tensor([-1, -1], dtype=torch.int32), table.rows()).fault(2) is None
