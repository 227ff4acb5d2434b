"""Ranks that run one plan together compute what one process does, whatever the tree, the budgets and the rows a rank
gets."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from app.tree import Likeliest, SoftTargets, TreeEngine, routed
from tests.app.strategies.ranks import group_jobs
from tests.app.tree import models, oracle
from tests.app.tree.cases import VOCABULARY, Case, cases
from tests.app.tree.engine import families
from tests.app.tree.losses import KINDS, SequenceLoss
from tests.app.tree.parity import build, take_grads
from tests.app.tree.states import hybrids
from tests.helpers.rank_pool import RankError, RankPool

WANT = ("logprobs", "entropy", "values")
EXAMPLES = 4  # in each of eight cells; with four ranks on two cores a pass takes seconds
few = settings(
    max_examples=EXAMPLES,
    derandomize=True,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)


SCANS = ("qwen3_5_text", "kimi_linear", "nemotron_h", "lfm2", "deepseek_v4")
"""Delta rules, with a decay a channel too, a state space, convolutions alone, and keys made of many tokens. Of 4 ranks
two have the same head of keys, or all."""


def check(
    pool: RankPool,
    size: int,
    name: str,
    dtype: torch.dtype,
    tolerance: float,
    case: Case,
    kind: str,
    sharded: bool = False,
) -> set[str]:
    """Returns which collectives there were."""
    options = {"size": size, "name": name, "dtype": dtype, "sharded": sharded}
    found = pool.run(group_jobs.run_pass, case=case, kind=kind, want=WANT, block=3, **options)
    model, head = group_jobs.whole(name, dtype)
    dense = oracle.dense_forward(model, case.sequences, case.scored, case.temperatures, head)
    loss = SequenceLoss(kind, case.lengths, case.seed, WANT)
    total, expected = oracle.dense_backward(model, case.sequences, loss, case.scored, case.temperatures, head)
    plain = SequenceLoss("plain_sum", case.lengths, case.seed, WANT)
    plain.weights = [torch.ones_like(weight) for weight in plain.weights]
    _, expected_given = oracle.dense_backward(model, case.sequences, plain, case.scored, case.temperatures, head)
    for first in range(0, pool.size, size):
        group = found[first : first + size]
        assert group[0]["collectives"]
        for rank in group:
            assert rank["collectives"] == group[0]["collectives"]
            assert sorted(rank["calls"]) == list(range(len(case.sequences)))
            assert rank["total"] == group[0]["total"] == pytest.approx(total, rel=1e3 * tolerance, abs=1e3 * tolerance)
            for output in WANT:
                assert torch.equal(rank["outputs"][output], group[0]["outputs"][output])
                reference = torch.cat([getattr(one, output).detach() for one in dense])
                assert (rank["outputs"][output] - reference).abs().max() <= tolerance * 10
        for got, want in (("grads", expected), ("given", expected_given)):
            error, where = oracle.relative_error(group_jobs.summed(group, got), want, floor=0.05)
            assert error <= tolerance, f"{got}: {error:.2e} in {where}"
    return {what for what, _ in found[0]["collectives"]}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("pool", "size", "name", "sharded"),
    [
        *[(2, 2, name, sharded) for name in ("starcoder2", "phi", *SCANS) for sharded in (False, True)],
        *[(4, 4, name, True) for name in SCANS if name != "kimi_linear"],  # which has two heads
        (4, 2, "starcoder2", True),
        (4, 2, "phi", False),
        (4, 4, "starcoder2", False),
        (4, 4, "phi", True),
    ],
    indirect=["pool"],
)
@few
@given(case=cases(), kind=st.sampled_from(sorted(KINDS)))
def test_float64(pool: RankPool, size: int, name: str, sharded: bool, case: Case, kind: str) -> None:
    check(pool, size, name, torch.float64, 1e-9, case, kind, sharded)


REFUSED = {"qwen4_exp_text", "zaya", "glm5_next", "minimax_m3_vl_text"}
ATTENTION = [name for name, family in families.SUPPORTED.items() if family.type not in REFUSED]
DEALT = [
    "Mistral, sliding window",
    "Phi-3",
    "Gemma 2",
    "GPT-OSS",
    "Llama 4",
    "DeepSeek-V3",
    "GLM-5",
    "Qwen3.5",
    "Granite 4",
    "LFM2",
]
IN_SHARDS = [name for name in ATTENTION if not name.endswith("sliding window")]  # a window has no parameters


@pytest.mark.slow
@pytest.mark.parametrize(
    ("pool", "size", "sharded", "names"),
    [(2, 2, False, ATTENTION), (2, 2, True, IN_SHARDS), (4, 4, False, DEALT)],
    indirect=["pool"],
)
def test_every_family(pool: RankPool, size: int, sharded: bool, names: list[str]) -> None:
    """Windows, sinks, soft-capping, latent attention, experts, and of those one each where, of 4 ranks, two have the
    same key-value head."""
    cells = [(name, "float32") for name in names]
    pool.run(group_jobs.run_cells, size=size, cells=cells, sharded=sharded)


@pytest.mark.slow
def test_right_families_pass_the_self_check(four_ranks: RankPool) -> None:
    for said in four_ranks.run(group_jobs.check_themselves, size=4, names=DEALT):
        assert not any(said), said


@pytest.mark.parametrize("sharded", [False, True])
def test_a_lost_state_is_found_by_the_self_check(two_ranks: RankPool, sharded: bool) -> None:
    """In bfloat16 through the first layers in float32, of which there are none in shards."""
    for right, wrong in two_ranks.run(group_jobs.check_states, size=2, sharded=sharded):
        assert right == ""
        assert "through its first 2 layers in float32" in wrong or sharded, wrong


@pytest.mark.slow
def test_channels_that_ranks_do_not_divide(four_ranks: RankPool) -> None:
    for channels, said in four_ranks.run(group_jobs.check_odd_channels, size=4):
        assert channels % 4 and not said


WAYS = [
    ("Gemma 2", ["bf16", "LoRA", "tied and untied"], ["autocast", "checkpointing"]),
    ("DeepSeek-V3", ["autocast", "checkpointing"], ["bf16", "LoRA", "tied and untied"]),
    ("Qwen3.5", ["bf16", "LoRA"], ["autocast", "checkpointing", "tied and untied"]),
]
"""With soft-capping and windows, with latent attention and experts, with scans: what is trained whole, and what in
shards."""


@pytest.mark.slow
@pytest.mark.parametrize("sharded", [False, True])
def test_every_way_to_train(two_ranks: RankPool, sharded: bool) -> None:
    """But in float32 (above), and in 4 bit, which no shards hold (`tests/modules/ranks/test_quantised.py`)."""
    cells = [(name, column) for name, *ways in WAYS for column in ways[sharded]]
    assert {"float32", "4 bit", *(column for _, column in cells)} == set(families.COLUMNS)
    two_ranks.run(group_jobs.run_cells, size=2, cells=cells, sharded=sharded)


@pytest.mark.parametrize(
    ("name", "sharded"),
    [("starcoder2", False), ("starcoder2", True), ("phi", True), ("qwen3_5_text", True), ("nemotron_h", False)],
)
def test_a_quick_look(two_ranks: RankPool, name: str, sharded: bool) -> None:
    """For `make test`: a prefix of another sequence, a sequence twice, chunks of fewer rows than ranks. StarCoder 2 has
    one matrix for both ends, Phi two, and a bias."""
    stem = [3, 10, 17, 24, 3]
    sequences = [np.array([*stem, *more]) for more in ([1, 2, 3], [1, 2, 3], [1], [])]
    case = Case(sequences, None, None, "tree", chunk_tokens=1, live_tokens=3, seed=0)
    seen = check(two_ranks, 2, name, torch.float64, 1e-9, case, "clipped_ratio", sharded)
    assert any("the parameters of 'layers.1'" in what for what in seen) == sharded


@pytest.mark.parametrize("sharded", [False, True])
def test_recorded_experts(two_ranks: RankPool, sharded: bool) -> None:
    """Two ranks, each with a share of a run's rows, replay what one process does, which an oracle vouches for."""
    stem = [3, 10, 17, 24, 3]
    case = Case([np.array([*stem, *more]) for more in ([1, 2, 3], [4], [])], None, None, "tree", 3, 6, seed=0)
    random = np.random.default_rng(0)
    table = random.random((sum(case.lengths), 2, 4)).argsort(-1)[..., :2].astype(np.uint8)
    rows = np.where(random.random(len(table)) < 0.2, -1, np.arange(len(table)))
    found = two_ranks.run(group_jobs.run_routed, size=2, case=case, rows=rows, table=table, sharded=sharded)
    model = families.build(families.SUPPORTED["Qwen3-MoE"])
    engine = TreeEngine(model, 3, 6, self_check=False)
    loss = SequenceLoss("clipped_ratio", case.lengths, case.seed, ("logprobs",))
    total = engine.backward(routed(build(case), rows, table), loss)
    expected = {key: grad for key, grad in take_grads(model).items() if grad is not None}
    error, where = oracle.relative_error(group_jobs.summed(found, "grads"), expected)
    assert error <= 2e-6, where
    assert [rank["total"] for rank in found] == [pytest.approx(total, rel=1e-5)] * 2


@pytest.mark.parametrize(("name", "sharded"), [("starcoder2", False), ("phi", True)])
def test_columns_beside_tokens(two_ranks: RankPool, name: str, sharded: bool) -> None:
    """Two ranks compute what one process does, which dense autograd vouches for elsewhere."""
    stem = [3, 10, 17, 24, 3]
    case = Case([np.array([*stem, *more]) for more in ([1, 2, 3], [4], [])], None, None, "tree", 2, 4, seed=0)
    random = np.random.default_rng(0)
    ids = np.stack([random.permutation(VOCABULARY)[:3] for _ in range(sum(case.lengths))])
    soft, want = SoftTargets(torch.from_numpy(ids), torch.from_numpy(random.random(ids.shape))), ("logprobs", "soft")
    found = two_ranks.run(group_jobs.run_soft, size=2, name=name, case=case, soft=soft, sharded=sharded)
    model, head = models.shared(name, torch.float64)
    engine, tree = TreeEngine(model, value_head=head, self_check=False), build(case)
    take_grads(model, head)
    total = engine.backward(tree, SequenceLoss("clipped_ratio", case.lengths, case.seed, want), want, soft=soft)
    expected = {key: grad for key, grad in take_grads(model, head).items() if grad is not None}
    error, where = oracle.relative_error(group_jobs.summed(found, "grads"), expected)
    assert error <= 1e-9, where
    likeliest = Likeliest(3)
    engine.forward(tree, soft=likeliest)
    for rank in found:
        assert rank["total"] == pytest.approx(total, rel=1e-9)
        if sharded:
            assert "whose vocabulary ranks share" in rank["likeliest"]
            continue
        for got, alone in zip(rank["likeliest"], likeliest.found(), strict=True):
            torch.testing.assert_close(got, alone, atol=1e-9, rtol=0)


def test_a_model_in_shards_is_called_by_all_ranks_alike(two_ranks: RankPool) -> None:
    for whole, logits, said in two_ranks.run(group_jobs.call_plainly, size=2):
        assert torch.allclose(logits, whole, rtol=0, atol=1e-12)
        assert "different input: run different sequences by TreeEngine(group=...)" in said[0]
        assert "whole logits come without gradient; compute losses by TreeEngine(group=...)" in said[1]


@pytest.mark.parametrize(("chunk_tokens", "live_tokens"), [(1000, 1000), (6, 30), (6, 6)])
def test_shards_travel_as_documented(two_ranks: RankPool, chunk_tokens: int, live_tokens: int) -> None:
    """Half of a row's heads go to the other rank and back, forward and backward; every layer is gathered for every
    forward and every backward of a chunk, and summed once a backward; of the vocabulary hidden states alone travel."""
    found = two_ranks.run(group_jobs.traffic, size=2, chunk_tokens=chunk_tokens, live_tokens=live_tokens)
    swapped = sum(seen["exchanged"] for seen in found)
    assert swapped == pytest.approx(found[0]["heads' rows"], rel=0.05)
    logits, embedded = (models.HIDDEN * found[0][what] for what in ("scored", "rows"))
    sent = sum(seen["more exchanged"] for seen in found)
    assert 3 * logits < sent < 1.05 * (3 * logits + 3 * embedded)  # chunks that run twice embed their rows again
    for seen in found:
        runs = seen["forwards"] + seen["backwards"]
        assert seen["gathered"] == pytest.approx(seen["cut up"] * runs, rel=0.05)
        assert seen["summed"] == pytest.approx(seen["cut up"] * seen["backwards"], rel=0.05)


@pytest.mark.parametrize(("pool", "size", "sharded"), [(2, 2, True), (4, 4, False)], indirect=["pool"])
def test_nothing_is_computed_twice(pool: RankPool, size: int, sharded: bool) -> None:
    """The ranks of a group together do at most 5% more arithmetic than one process with the same budgets, where some
    chunks run twice and fewer key-value heads than ranks."""
    found = pool.run(group_jobs.arithmetic, size=size, sharded=sharded, chunk_tokens=40, live_tokens=48)
    alone = found[0][0]
    assert {"aten.mm", "aten._scaled_dot_product_flash_attention_for_cpu_backward"} <= alone.keys()
    assert sum(sum(own.values()) for _, own in found) <= 1.05 * sum(alone.values())


@pytest.mark.slow
@pytest.mark.parametrize("sharded", [False, True])
def test_a_rank_holds_what_was_estimated(two_ranks: RankPool, sharded: bool) -> None:
    """And no more where a tree has three times as many chunks. Within 10%; of shards a fifth more shows where
    nothing else runs (see `most_held`)."""
    few, many = (two_ranks.run(group_jobs.most_held, size=2, sharded=sharded, branches=n) for n in (8, 28))
    for (less, _, chunks), (more, estimate, as_many) in zip(few, many, strict=True):
        assert as_many > 2.5 * chunks
        assert more < 1.5 * less
        assert 0.85 * estimate < min(less, more) and max(less, more) < 1.35 * estimate


def test_a_model_that_fits_in_shards_alone(two_ranks: RankPool) -> None:
    for whole, sharded in two_ranks.run(group_jobs.fits, size=2, free=34 << 20):
        assert "a tree pass does not fit" in whole and not sharded


def test_heads_that_cannot_be_dealt(two_ranks: RankPool) -> None:
    with pytest.raises(RankError, match=r"layer 0 .*: 3 query and 1 key-value heads cannot be dealt over a group of 2"):
        two_ranks.run(group_jobs.run_odd_heads, size=2)


def test_what_groups_cannot_run() -> None:
    """Told when the engine is made."""

    class Two:
        rank, size = 0, 2

    with pytest.raises(ValueError, match=r"layer 0 \(Qwen4ExpTextPLELayer\) looks at tokens in a row.*\(group=None\)"):
        TreeEngine(hybrids.make("qwen4_exp_text"), group=Two())
    with pytest.raises(ValueError, match=r"on_mismatch='fallback'.*set on_mismatch='error'"):
        TreeEngine(models.make("phi"), on_mismatch="fallback", group=Two())
