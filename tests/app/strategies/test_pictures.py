"""Groups of ranks train models that see as one process does, and each picture goes through one tower of a group."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from transformers import AutoModelForImageTextToText

from app.strategies.pieces import load_whole
from app.strategies.shards import shard_models
from examples.vision.make_model import write
from tests.app.strategies import picture_jobs as jobs
from tests.app.strategies.picture_jobs import Layout
from tests.app.strategies.ranks.group_jobs import summed
from tests.app.tree import oracle
from tests.app.tree.engine.pictures import vision
from tests.app.tree.engine.pictures.test_parity import FROZEN, TEXTS, WORDS
from tests.app.tree.losses import SequenceLoss
from tests.helpers.rank_pool import RankPool
from tests.helpers.selection import SEES, needs_transformers

pytestmark = needs_transformers(SEES)

START = 170.0
ALONE: Layout = (1, 1, False)
FLOAT64, FLOAT32 = (torch.float64, 1e-9, 1e-7), (torch.float32, 2e-6, 2e-6)
"""Dtype, and tolerances of the language model and of the tower, whose rotary embedding rounds to float32."""

few = settings(
    max_examples=6,
    derandomize=True,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)


def check(
    pool: RankPool,
    size: int,
    sharded: bool,
    plan: tuple[int, int],
    precision: tuple[torch.dtype, float, float] = FLOAT64,
    texts: list[list[vision.Part]] = TEXTS,
    frozen: str = "",
    again: bool = False,
) -> None:
    dtype, *tolerances = precision
    found = pool.run(
        jobs.run_pass, size=size, dtype=dtype, texts=texts, plan=plan, sharded=sharded, frozen=frozen, again=again
    )
    with jobs.exact() if dtype == torch.float64 else torch.enable_grad():
        model = vision.make("Qwen3-VL", dtype)
        jobs.freeze(model, frozen)
        sequences = model.sequences(texts)
        loss = SequenceLoss("tanh_of_sums", sequences.lengths, 0, ("logprobs",))
        total, expected = sequences.dense_backward(loss)
        outputs = torch.cat(sequences.dense_logprobs())
    language = {name: grad for name, grad in expected.items() if "language_model" in name or "lm_head" in name}
    tower = {name: grad for name, grad in expected.items() if name not in language}
    for first in range(0, pool.size, size):
        group = found[first : first + size]
        for rank in group:
            assert rank["collectives"] == group[0]["collectives"]
            assert torch.equal(rank["outputs"], group[0]["outputs"])
            assert (rank["outputs"] - outputs).abs().max() <= 10 * tolerances[0]
            assert rank["total"] == group[0]["total"] == pytest.approx(total, rel=1e3 * tolerances[0])
        got = summed(group, "grads")
        for part, tolerance in zip((language, tower), tolerances, strict=True):
            if part:
                error, where = oracle.relative_error(got, part)
                assert error <= tolerance, f"{error:.2e} in {where}"


@pytest.mark.parametrize("sharded", [False, True])
def test_two_ranks(two_ranks: RankPool, sharded: bool) -> None:
    """Of 14 sequences on four pictures, in chunks that cut inside of these; some chunks run twice."""
    check(two_ranks, 2, sharded, (7, 14))


@pytest.mark.slow
@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("precision", [FLOAT64, FLOAT32], ids=["float64", "float32"])
@pytest.mark.parametrize(
    ("pool", "size", "plan"),
    [(2, 2, (10_000, 10_000)), (2, 2, (1, 1)), (4, 2, (17, 34)), (4, 4, (7, 14))],
    indirect=["pool"],
)
def test_every_layout(
    pool: RankPool, size: int, plan: tuple[int, int], precision: tuple[torch.dtype, float, float], sharded: bool
) -> None:
    check(pool, size, sharded, plan, precision)


@pytest.mark.slow
@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("frozen", FROZEN)
def test_parts_that_are_frozen(two_ranks: RankPool, frozen: str, sharded: bool) -> None:
    check(two_ranks, 2, sharded, (7, 14), frozen=frozen)


@pytest.mark.slow
@pytest.mark.parametrize("sharded", [False, True])
def test_towers_that_run_again_for_their_backward(two_ranks: RankPool, sharded: bool) -> None:
    check(two_ranks, 2, sharded, (7, 14), again=True)


@pytest.mark.slow
@pytest.mark.parametrize("sharded", [False, True])
def test_one_picture_for_four_ranks(four_ranks: RankPool, sharded: bool) -> None:
    """Three of which have none, and more ranks than rows in some chunks; text alone in one tree of the model."""
    check(four_ranks, 4, sharded, (3, 9), texts=[["D", 1, 2], ["D", 1, 3], [1, 2]])
    check(four_ranks, 4, sharded, (3, 9), texts=[[1, 2, 5], [1, 2, 6]])


@pytest.mark.slow
@pytest.mark.parametrize("sharded", [False, True])
@few
@given(words=WORDS, chunk=st.integers(1, 40), live=st.integers(1, 60))
def test_random_trees(
    two_ranks: RankPool, sharded: bool, words: list[list[vision.Part]], chunk: int, live: int
) -> None:
    check(two_ranks, 2, sharded, (chunk, live), texts=words)


@pytest.mark.parametrize("sharded", [False, True])
def test_a_picture_goes_through_one_tower_of_a_group(two_ranks: RankPool, sharded: bool) -> None:
    """A trained one in every pass, a frozen one as long as its weights stay."""
    runs = two_ranks.run(jobs.tower_runs, size=2, sharded=sharded)
    assert [sum(ranks) for ranks in zip(*runs, strict=True)] == [4, 8, 12, 12]
    assert all(own[0] == 2 for own in runs)


@pytest.mark.slow
@pytest.mark.parametrize("sharded", [False, True])
def test_families_and_ways_to_train(two_ranks: RankPool, sharded: bool) -> None:
    """Every family, and of one all ways; inputs of each layer's own are refused in shards."""
    refused = ["Gemma 4, shared keys"] if sharded else []
    seen = [(name, "float32") for name in vision.FAMILIES if name not in refused]
    ways = [("Qwen3-VL", column) for column in ("bf16", "autocast", "checkpointing", "LoRA", "frozen tower")]
    for cells in (seen, ways):  # two jobs, each with a deadline of its own
        two_ranks.run(jobs.run_cells, size=2, cells=cells, sharded=sharded)


@pytest.mark.parametrize("sharded", [False, True])
def test_the_self_check_looks_at_every_share(two_ranks: RankPool, sharded: bool) -> None:
    """One decision for the ranks of a group: the one that is given something else says what."""
    for rank, (right, wrong) in enumerate(two_ranks.run(jobs.check_itself, size=2, sharded=sharded)):
        assert right == ""
        told = "'inputs_embeds' differs from the model's own" if rank else "what another rank of the group was given"
        assert told in wrong and "gives the model its pictures otherwise than the model itself does" in wrong


def test_inputs_of_each_layers_own_are_refused_in_shards() -> None:
    model: Any = vision.make("Gemma 4, shared keys").model
    nobody: Any = None
    with pytest.raises(MisconfigurationException, match=r"Gemma4ForCond.* set shard_parameters=False, or"):
        shard_models(model, nobody, nobody)


def test_a_tower_in_shards_is_refused(two_ranks: RankPool) -> None:
    for said in two_ranks.run(jobs.shard_all, size=2):
        assert "tower of Qwen3VLForConditionalGeneration are sharded" in said and "model.get_decoder()" in said


LAYOUTS: list[Layout] = [(2, 1, False), (2, 2, False), (2, 2, True), (4, 2, False), (4, 2, True)]


TINY: dict[str, Any] = {"hidden": 32, "tower": 16, "patch": 4, "merge": 2, "spread": 0.2}


@pytest.fixture
def pools(one_rank: RankPool, two_ranks: RankPool, four_ranks: RankPool) -> dict[int, RankPool]:
    return {pool.size: pool for pool in (one_rank, two_ranks, four_ranks)}


def differences(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> dict[bool, float]:
    """Largest difference of parameters, by whether they are of the tower."""
    assert got.keys() == expected.keys()
    found = {False: 0.0, True: 0.0}
    for name, value in expected.items():
        visual = "visual" in name
        found[visual] = max(found[visual], float((got[name] - value).abs().max()))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("train_tower", [False, True])
def test_steps_are_those_of_one_process(pools: dict[int, RankPool], tmp_path: Path, train_tower: bool) -> None:
    """Clipped by the norm of all parameters, each counted once, as plain ranks' are."""
    write(tmp_path, **TINY)
    options = {"base": tmp_path, "train_tower": train_tower, "follows": not train_tower}
    [expected] = pools[1].run(jobs.fit, START, layout=ALONE, **options)
    assert all(norm > jobs.CLIP for norm in expected["grad_norm"]), expected["grad_norm"]
    for layout in LAYOUTS:
        for got in pools[layout[0]].run(jobs.fit, START, layout=layout, **options):
            apart = differences(got["parameters"], expected["parameters"])
            assert apart[False] < 1e-8 and apart[True] < 1e-7, (layout, apart)
            assert got["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-7)
            assert bool(got["cut"]) == layout[2] and not any("visual" in name for name in got["cut"])


@pytest.mark.parametrize(("size", "train_tower"), [(1, False), (1, True), (2, True)])
def test_sums_that_begin_in_the_last_backward_have_the_same_bits(
    pools: dict[int, RankPool], tmp_path: Path, size: int, train_tower: bool
) -> None:
    """The tower's too, whose backward comes after that of the layers."""
    write(tmp_path, **TINY)
    options = {"layout": (2, size, False), "base": tmp_path, "train_tower": train_tower, "steps": 2, "bucket": 300}
    early = pools[2].run(jobs.fit, START, **options)
    late = pools[2].run(jobs.fit, START, looks=True, **options)
    for got, expected in zip(early, late, strict=True):
        assert max(differences(got["parameters"], expected["parameters"]).values()) == 0.0
        assert got["grad_norm"] == expected["grad_norm"]
        assert got["early"] > 0 and expected["early"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("sharded", [False, True])
def test_adapters_on_tower_and_layers(pools: dict[int, RankPool], tmp_path: Path, sharded: bool) -> None:
    write(tmp_path, **TINY)
    adapter = {"r": 2, "target_modules": ["q_proj", "v_proj", "qkv", "linear_fc1"]}
    options = {"base": tmp_path, "train_tower": True, "adapter": adapter}
    [expected] = pools[1].run(jobs.fit, START, layout=ALONE, **options)
    for got in pools[2].run(jobs.fit, START, layout=(2, 2, sharded), **options):
        apart = differences(got["parameters"], expected["parameters"])
        assert apart[False] < 1e-8 and apart[True] < 1e-7, apart
        assert got["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-7)


@pytest.mark.slow
def test_bfloat16_goes_on_from_a_checkpoint_to_the_bit(pools: dict[int, RankPool], tmp_path: Path) -> None:
    """The tower's masters are over all ranks, the layers' in the shards of a group. The directory has both."""
    write(tmp_path / "base", **TINY)
    options = {"layout": (2, 2, True), "base": tmp_path / "base", "precision": "bf16-true", "train_tower": True}
    straight = pools[2].run(jobs.fit, START, steps=4, **options)[0]
    pools[2].run(jobs.fit, START, steps=2, directory=tmp_path / "run", **options)
    rest = pools[2].run(jobs.fit, START, steps=4, start=tmp_path / "run" / "step=2.ckpt", **options)[0]
    assert max(differences(rest["parameters"], straight["parameters"]).values()) == 0.0
    exported = AutoModelForImageTextToText.from_pretrained(tmp_path / "run" / "model", dtype="auto").state_dict()
    saved = load_whole(tmp_path / "run" / "step=2.ckpt", lambda name: name.startswith("model/policy."))
    for name, value in saved.items():
        assert torch.equal(exported[name.removeprefix("model/policy.")], value), name
    assert any("visual" in name for name in saved) and any("language_model" in name for name in saved)
