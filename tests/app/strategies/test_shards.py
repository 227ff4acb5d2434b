"""Parameters sharded over groups train as whole ones do, hold what they say, and save what any layout reads."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from peft import PeftModel
from torch import Tensor
from transformers import AutoModelForCausalLM

from app.strategies import DTAStrategy, refusals
from modules import build_model
from tests.app.strategies import shard_jobs as jobs
from tests.app.strategies.shard_jobs import Layout
from tests.app.tree import models
from tests.helpers.rank_pool import RankError, RankPool
from tests.helpers.selection import EXACT_ROUTERS, needs_transformers
from tests.helpers.tiny_policy import source

START = 170.0
ALONE: Layout = (1, 1, False)
LAYOUTS: list[Layout] = [ALONE, (2, 1, False), (2, 2, False), (2, 2, True), (4, 2, False), (4, 2, True), (4, 4, True)]


@pytest.fixture
def pools(one_rank: RankPool, two_ranks: RankPool, four_ranks: RankPool) -> dict[int, RankPool]:
    return {pool.size: pool for pool in (one_rank, two_ranks, four_ranks)}


def _difference(got: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    assert got.keys() == expected.keys()
    return max(float((got[name].double() - expected[name].double()).abs().max()) for name in got)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "precision", "tolerance"),
    [((2, 2, True), "64-true", 1e-6), ((4, 4, True), "64-true", 1e-6), ((4, 2, True), "32-true", 2e-4)],
)
def test_five_steps_are_those_of_one_process(
    pools: dict[int, RankPool], layout: Layout, precision: str, tolerance: float
) -> None:
    """AdamW divides small gradients by their own size, and the model's norms round in float32."""
    [expected] = pools[1].run(jobs.fit, START, layout=ALONE, steps=5, precision=precision)
    for got in pools[layout[0]].run(jobs.fit, START, layout=layout, steps=5, precision=precision):
        assert _difference(got["parameters"], expected["parameters"]) < tolerance
        assert got["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [kind for kind in jobs.KINDS if kind not in ("grpo", "float32 router")])
def test_everything_that_is_trained(pools: dict[int, RankPool], kind: str) -> None:
    """Policy, critic and reference, after three steps in float64, are those of one process (experts, whose products
    know no float64, in float32; Gemma's norms round, too, and the decays of delta rules)."""
    other = {"experts": ("32-true", 2e-4), "keys of other layers": ("64-true", 1e-5), "states": ("64-true", 1e-5)}
    precision, tolerance = other.get(kind, ("64-true", 1e-6))
    options = {"steps": 3, "precision": precision, "kind": kind}
    [expected] = pools[1].run(jobs.fit, START, layout=ALONE, **options)
    for got in pools[2].run(jobs.fit, START, layout=(2, 2, True), **options):
        assert _difference(got["parameters"], expected["parameters"]) < tolerance
        assert got["grad_norm"] == pytest.approx(expected["grad_norm"], rel=tolerance)


@pytest.mark.slow
def test_mixed_precision(pools: dict[int, RankPool]) -> None:
    """Float32 parameters that autocast rounds in every chunk."""
    options = {"steps": 2, "precision": "bf16-mixed", "kind": "small chunks"}
    [whole] = pools[1].run(jobs.fit, START, layout=ALONE, **options)
    for got in pools[2].run(jobs.fit, START, layout=(2, 2, True), **options):
        assert got["grad_norm"] == pytest.approx(whole["grad_norm"], rel=0.05)
        assert _difference(got["parameters"], whole["parameters"]) < 0.05


@pytest.mark.slow
def test_bfloat16_keeps_float32_masters(pools: dict[int, RankPool], tmp_path: Path) -> None:
    """Interrupted and gone on with, to the bit; and near what whole parameters give."""
    options = {"layout": (2, 2, True), "precision": "bf16-true"}
    straight = pools[2].run(jobs.fit, START, steps=4, **options)[0]
    pools[2].run(jobs.fit, START, steps=2, directory=tmp_path, **options)
    rest = pools[2].run(jobs.fit, START, steps=4, start=tmp_path / "step=2.ckpt", **options)[0]
    assert _difference(rest["parameters"], straight["parameters"]) == 0.0
    whole = pools[2].run(jobs.fit, START, steps=4, layout=(2, 2, False), precision="bf16-true")[0]
    assert straight["grad_norm"] == pytest.approx(whole["grad_norm"], rel=0.05)
    assert _difference(straight["parameters"], whole["parameters"]) < 0.05


@needs_transformers(EXACT_ROUTERS)
def test_a_float32_router_is_not_rounded_with_its_layer(two_ranks: RankPool) -> None:
    for seen in two_ranks.run(jobs.routers_within_layers, START):
        before, within = seen[0]
        assert within.dtype == torch.float32 and torch.equal(within, before)
        assert not torch.equal(before, before.bfloat16().float())


@pytest.mark.slow
def test_a_float32_router_is_trained_beside_rounded_weights(pools: dict[int, RankPool], tmp_path: Path) -> None:
    """Its gradients, too, are of all ranks: what it moved by is what it moves by in whole layers. It is saved so."""
    options = {"precision": "bf16-true", "kind": "float32 router"}
    router = "policy.model.layers.1.mlp.gate.weight"
    start, whole = (pools[2].run(jobs.fit, START, layout=(2, 2, False), steps=n, **options)[0] for n in (0, 3))
    moved = whole["parameters"][router] - start["parameters"][router]
    assert moved.dtype == torch.float32 and float(moved.abs().max()) > 1e-4
    for got in pools[2].run(jobs.fit, START, layout=(2, 2, True), steps=3, directory=tmp_path, **options):
        assert got["grad_norm"] == pytest.approx(whole["grad_norm"], rel=0.05)
        assert _difference(got["parameters"], whole["parameters"]) < 0.05
        apart = got["parameters"][router] - whole["parameters"][router]
        assert float(apart.norm() / moved.norm()) < 0.1
    trained = got["parameters"][router]
    again = pools[2].run(jobs.fit, START, layout=(2, 2, False), steps=3, start=tmp_path / "step=3.ckpt", **options)[0]
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "model").state_dict()
    assert torch.equal(again["parameters"][router], trained)
    assert torch.equal(exported[router.removeprefix("policy.")], trained)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "precision"), [(n, "bf16-true" if n % 2 else "32-true") for n in range(len(LAYOUTS))]
)
def test_a_checkpoint_is_the_same_in_every_layout(
    pools: dict[int, RankPool], tmp_path: Path, before: int, precision: str
) -> None:
    """Loaded and written again, to the bit; and the model directory has the same weights. Of any two layouts one loads
    what the other wrote: of seven in a ring, those 1, 2 and 4 further."""
    layout = LAYOUTS[before]
    pools[layout[0]].run(jobs.fit, START, layout=layout, steps=2, directory=tmp_path, precision=precision)
    expected = jobs.contents(tmp_path / "step=2.ckpt")
    masters = {name: tensor for name, tensor in expected.items() if name.startswith("optimizer/master/")}
    assert bool(masters) == (precision == "bf16-true")
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "model").state_dict()
    for name, tensor in expected.items():
        if name.startswith("model/policy."):
            assert torch.equal(exported[name.removeprefix("model/policy.")], tensor), name
    assert any(name.startswith("optimizer/exp_avg/") for name in expected)
    for further in (1, 2, 4):
        after, target = LAYOUTS[(before + further) % len(LAYOUTS)], tmp_path / str(further)
        options = {"start": tmp_path / "step=2.ckpt", "directory": target, "precision": precision}
        pools[after[0]].run(jobs.again, START, layout=after, **options)
        found = jobs.contents(target / "again.ckpt")
        assert found.keys() == expected.keys()
        for name, tensor in expected.items():
            assert torch.equal(found[name], tensor), (name, after)


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "by_files"), [((2, 2, True), False), ((4, 2, True), True)])
def test_an_engine_beside_the_trainer_serves_whole_weights(
    pools: dict[int, RankPool], tmp_path: Path, layout: Layout, by_files: bool
) -> None:
    directory = tmp_path if by_files else None
    assert pools[layout[0]].run(jobs.serve, START, layout=layout, directory=directory)[0] == [1, 2]


@pytest.mark.slow
def test_an_engine_that_shares_the_gpus_gets_the_parts_in_its_turn(pools: dict[int, RankPool], tmp_path: Path) -> None:
    """A rank that sends its parts waits for rank 0, which must not wait for it elsewhere."""
    turns = {"layout": (2, 2, True), "directory": tmp_path, "in_turns": True}
    assert pools[2].run(jobs.serve, START, **turns)[0] == [1, 2]


@pytest.fixture
def base(tmp_path: Path) -> Path:
    torch.manual_seed(1)
    build_model(source(**jobs.HEADS)).save_pretrained(tmp_path / "base")
    return tmp_path / "base"


def test_an_adapter_is_trained_on_shards_of_its_base(pools: dict[int, RankPool], tmp_path: Path, base: Path) -> None:
    """The base is cut up, the adapter on every rank; a checkpoint goes on in another layout, and its bits are the
    same in each; what is written at the end is PEFT's directory."""
    [whole] = pools[1].run(jobs.fit, START, layout=ALONE, steps=3, base=base)
    options = {"layout": (2, 2, True), "base": base}
    for got in pools[2].run(jobs.fit, START, steps=3, directory=tmp_path, **options):
        assert _difference(got["parameters"], whole["parameters"]) < 2e-5
        assert got["grad_norm"] == pytest.approx(whole["grad_norm"], rel=1e-4)
        kept = sum(p.numel() for name, p in got["parameters"].items() if "lora" in name)
        base_of_it = sum(p.numel() for p in got["parameters"].values()) - kept
        assert (
            got["held"]
            <= base_of_it / 2 + kept + got["parameters"]["policy.base_model.model.model.embed_tokens.weight"].shape[1]
        )
    assert min(float(p.abs().max()) for name, p in got["parameters"].items() if "lora_B" in name) > 0
    trained = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), tmp_path / "model")
    exported = {f"policy.{name}": p for name, p in trained.named_parameters()}
    assert _difference(exported, got["parameters"]) == 0.0
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").state_dict()
    assert _difference(merged, trained.merge_and_unload().state_dict()) == 0.0

    expected = jobs.contents(tmp_path / "step=3.ckpt")
    options = {"start": tmp_path / "step=3.ckpt", "base": base, "precision": "32-true"}
    for ranks, layout in ((1, ALONE), (2, (2, 2, True))):
        pools[ranks].run(jobs.again, START, layout=layout, directory=tmp_path / str(ranks), **options)
        found = jobs.contents(tmp_path / str(ranks) / "again.ckpt")
        assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "precision", "tolerance"), [((4, 2, True), "bf16-true", 0.05), ((4, 4, True), "64-true", 1e-6)]
)
def test_adapters_in_more_layouts(
    pools: dict[int, RankPool], base: Path, layout: Layout, precision: str, tolerance: float
) -> None:
    options = {"steps": 3, "base": base, "precision": precision}
    [whole] = pools[1].run(jobs.fit, START, layout=ALONE, **options)
    for got in pools[4].run(jobs.fit, START, layout=layout, **options):
        assert got["grad_norm"] == pytest.approx(whole["grad_norm"], rel=tolerance)
        assert _difference(got["parameters"], whole["parameters"]) < tolerance


@pytest.mark.parametrize("by_files", [False, True])
def test_an_engine_serves_the_adapter_on_its_base(
    pools: dict[int, RankPool], tmp_path: Path, base: Path, by_files: bool
) -> None:
    directory = tmp_path / "weights" if by_files else None
    assert pools[2].run(jobs.serve, START, layout=(2, 2, True), base=base, directory=directory)[0] == [1, 2]


def test_a_run_goes_on_with_shards_and_holds_its_part(pools: dict[int, RankPool], tmp_path: Path) -> None:
    """For `make test`: one step on two ranks with whole parameters, the next two with shards."""
    [whole] = pools[1].run(jobs.fit, START, layout=ALONE, steps=3)
    pools[2].run(jobs.fit, START, layout=(2, 1, False), steps=1, directory=tmp_path)
    found = pools[2].run(jobs.fit, START, layout=(2, 2, True), steps=3, start=tmp_path / "step=1.ckpt")
    everything = sum(parameter.numel() for parameter in whole["parameters"].values())
    for got in found:
        assert _difference(got["parameters"], whole["parameters"]) < 2e-4
    row = whole["parameters"]["policy.model.embed_tokens.weight"].shape[1]  # of an odd number
    assert sum(got["held"] for got in found) == everything
    assert max(got["held"] for got in found) <= everything / 2 + row
    assert sum(got["state"] for got in found) == 2 * everything


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="reads memory as Linux gives it")
def test_only_rank_0_ever_has_a_whole_model(tmp_path: Path) -> None:
    """And its layers go as they are cut: beside its half, the other rank holds the largest of them. When it is written,
    in files of 16 MiB, and sent from there, it is whole nowhere. A whole model is 1; what is held for a moment, by gloo
    for one, differs by 0.1 from run to run, so that bounds lie half way."""
    pool = RankPool(2)  # of processes that free memory they had lies about in
    try:
        found = pool.run(jobs.most_memory, START, sharded=True, directory=tmp_path)
    finally:
        pool.close()
    (first, first_writing, size), (second, second_writing, _) = found
    assert first < 1.25 * size
    assert second < 0.8 * size
    assert max(first_writing, second_writing) < 0.5 * size


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads memory as Linux gives it")
def test_weights_that_are_loaded_stay_in_their_file(tmp_path: Path) -> None:
    """Rank 0, too, has no memory of its own for a whole model, where the file has the dtype that is asked for: 0.52 of
    it on rank 0, and 0.56 to 0.67 on rank 1, who is sent its parts by gloo."""
    build_model(source(**jobs.LARGE)).save_pretrained(tmp_path)
    pool = RankPool(2)
    try:
        found = pool.run(jobs.private_memory, START, path=tmp_path)
    finally:
        pool.close()
    for most, size in found:
        assert 0.4 * size < most < 0.8 * size, [most / size for most, size in found]


def test_refused_by_name() -> None:
    with pytest.raises(MisconfigurationException, match=r"=True\) has no effect in groups of one rank: set group_size"):
        DTAStrategy(shard_parameters=True)
    model = models.make("qwen3")
    with pytest.raises(MisconfigurationException, match=r"offload_optimizer=True.*leave one of them out"):
        refusals.check_sharded(model, offload=True)


def test_an_average_that_no_checkpoint_would_hold(two_ranks: RankPool) -> None:
    with pytest.raises(RankError, match=r"reference_refresh.ema=0.5: .*set ema: 0 \(.*, or train in float32"):
        two_ranks.run(jobs.fit, START, layout=(2, 2, True), steps=1, precision="bf16-true", kind="average")


def test_a_module_is_sharded_once(two_ranks: RankPool) -> None:
    with pytest.raises(RankError, match=r"'policy\.\S+' was sharded before, .*build a new"):
        two_ranks.run(jobs.fit_twice, START)
