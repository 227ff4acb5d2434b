"""Optimizers that look at whole parameters: dealt to ranks they compute what they do alone, and go on on any number."""

from __future__ import annotations

import math
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from app.strategies.buckets import Bucket
from app.strategies.muon import Muon, is_matrix, orthogonalised
from app.strategies.zero1 import ShardedOptimizer
from tests.app.strategies import shard_jobs
from tests.app.strategies import toy_model as toy
from tests.app.strategies import zero1_jobs as jobs
from tests.app.strategies.checkpoint import checkpoint_jobs
from tests.app.tree.engine import families
from tests.helpers.rank_pool import RankPool
from tests.helpers.selection import some

START = 170.0  # seconds: ranks import everything
EIGHT_BIT = pytest.param(
    toy.adamw_8bit, marks=pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="needs bitsandbytes")
)
CLOSE = 1e-2 * toy.LEARNING_RATE  # sums over ranks round otherwise, and bfloat16 may round that up


def _largest_difference(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    assert got.keys() == expected.keys()
    return max(float((got[name].double() - expected[name].double()).abs().max()) for name in expected)


def _mean_difference(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    assert got.keys() == expected.keys()
    every = torch.cat([(got[name].double() - expected[name].double()).flatten() for name in expected])
    return float(every.square().mean().sqrt())


@pytest.mark.parametrize("make_optimizer", [toy.muon, toy.adafactor])
@pytest.mark.parametrize("bucket_elements", [1 << 20, 40])
def test_ranks_compute_what_plain_torch_does(two_ranks: RankPool, make_optimizer: Any, bucket_elements: int) -> None:
    arguments = dict(make_optimizer=make_optimizer, make_scheduler=toy.one_cycle_of_rates, steps=4)
    expected = toy.train_plainly(**arguments)
    assert _largest_difference(expected, toy.values(toy.Toy())) > 1e-3
    alone = jobs.train(bucket_elements=bucket_elements, **arguments)["parameters"]
    assert all(torch.equal(alone[name], expected[name]) for name in expected)
    expected = toy.train_plainly(clip=0.05, **arguments)
    results = two_ranks.run(jobs.train, bucket_elements=bucket_elements, clip=0.05, **arguments)
    for result in results:
        assert _largest_difference(result["parameters"], expected) < CLOSE
    assert _largest_difference(results[0]["parameters"], results[1]["parameters"]) == 0.0


def test_a_step_that_is_skipped_and_a_rank_without_work(two_ranks: RankPool) -> None:
    expected = toy.train_plainly(toy.muon, skip=[1])
    for result in two_ranks.run(jobs.train, make_optimizer=toy.muon, poison=(1, 1), idle_rank=0):
        assert result["skipped"] == [1]
        assert _largest_difference(result["parameters"], expected) < CLOSE


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_offloaded_masters_have_the_same_bits(two_ranks: RankPool, dtype: torch.dtype) -> None:
    arguments = dict(make_optimizer=toy.muon, steps=4, dtype=dtype)
    expected = two_ranks.run(jobs.train, **arguments)[0]["parameters"]
    for result in two_ranks.run(jobs.train, offload=True, **arguments):
        assert _largest_difference(result["parameters"], expected) == 0.0


@pytest.mark.parametrize("make_optimizer", [toy.muon, toy.adafactor, EIGHT_BIT])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_checkpoint_goes_on_on_any_number_of_ranks(
    one_rank: RankPool, two_ranks: RankPool, tmp_path: Path, make_optimizer: Any, dtype: torch.dtype
) -> None:
    arguments = {"path": tmp_path / "two.ckpt", "dtype": dtype, "make_optimizer": make_optimizer}
    whole = two_ranks.run(checkpoint_jobs.train_and_save, steps=3, **arguments)[0]  # took a fourth step
    for pool in (one_rank, two_ranks):
        for result in pool.run(checkpoint_jobs.load_and_train, first=3, steps=1, **arguments):
            difference = _largest_difference(result, whole)
            assert difference <= (CLOSE if dtype == torch.float32 else 3e-2)
            if pool is two_ranks:
                assert difference == 0.0


@pytest.mark.parametrize("make_optimizer", [toy.muon, toy.adafactor])
def test_state_is_what_torch_itself_saves(two_ranks: RankPool, make_optimizer: Any) -> None:
    model = toy.Toy()
    optimizer = make_optimizer(model)
    for step in range(3):
        optimizer.zero_grad()
        model.backward(range(toy.SAMPLES), step)
        optimizer.step()
    expected = optimizer.state_dict()
    got = two_ranks.run(jobs.train, make_optimizer=make_optimizer)[0]["state"]
    assert got["state"].keys() == expected["state"].keys()
    for index, entry in expected["state"].items():
        assert got["state"][index].keys() == entry.keys()
        for key, value in entry.items():
            torch.testing.assert_close(got["state"][index][key], value, atol=1e-5, rtol=1e-3)
    continued = jobs.train(make_optimizer, steps=2, first_step=3, state=expected, weights=model.state_dict())
    assert _largest_difference(continued["parameters"], toy.train_plainly(make_optimizer, steps=5)) == 0.0


@pytest.mark.parametrize("make_optimizer", [EIGHT_BIT])
def test_quantised_state_is_of_whole_parameters(make_optimizer: Any) -> None:
    """Alone it computes what it does under no strategy; nobody has to say that it looks at them."""
    expected = toy.train_plainly(make_optimizer, steps=4)
    alone = jobs.train(make_optimizer, steps=4)["parameters"]
    assert all(torch.equal(alone[name], expected[name]) for name in expected)


def adamw_8bit_but_of_the_embedding(model: nn.Module) -> torch.optim.Optimizer:
    """As bitsandbytes' own embeddings ask for it, and its documentation for those of others."""
    from bitsandbytes.optim import GlobalOptimManager

    manager = GlobalOptimManager.get_instance()
    manager.initialize()  # it is one for all optimizers of a process
    manager.register_parameters(model.parameters())
    manager.override_config(model.hidden.weight, "optim_bits", 32)
    manager.register_module_override(model.embedding, "weight", {"optim_bits": 32})
    return toy.adamw_8bit(model)


def test_options_of_single_parameters_stay_theirs(one_rank: RankPool) -> None:
    """The strategy has the optimizer step other objects, at other places; nobody said that these were forgotten."""
    pytest.importorskip("bitsandbytes")
    make_optimizer = adamw_8bit_but_of_the_embedding
    arguments = {"make_optimizer": make_optimizer, "steps": 4}
    expected = one_rank.run(toy.train_plainly, **arguments)[0]
    found = one_rank.run(jobs.train, **arguments)[0]["parameters"]
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    one_rank.run(forget_overrides)


def forget_overrides() -> None:
    from bitsandbytes.optim import GlobalOptimManager

    GlobalOptimManager.get_instance().initialize()


class RowsOfState(torch.optim.SGD):
    """Keeps something of a shape of its own, and says nothing of it."""

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        for tensor in (tensor for group in self.param_groups for tensor in group["params"]):
            self.state[tensor]["rows"] = torch.zeros(3)


def test_state_that_cannot_be_cut_is_told_in_the_first_step() -> None:
    """Not when it is saved, after hours."""
    with pytest.raises(ValueError, match=r"state 'rows' of .*\(3,\).* name a subclass .*looks_at_whole"):
        jobs.train(lambda model: RowsOfState(model.parameters(), lr=0.1), steps=1)


def layers(count: int) -> dict[str, Any]:
    """Elements of this rank's state after a step of Muon on `count` layers, and which buckets have an owner."""
    module = nn.Sequential(*(nn.Linear(40, 60, bias=False) for _ in range(count)))
    optimizer = Muon(module.named_parameters())
    sharded = ShardedOptimizer(optimizer, module, jobs.communicator())
    module[0](torch.ones(1, 40)).sum().backward()
    sharded.reduce()
    optimizer.step()
    sharded.gather_parameters()
    kept = sum(tensor.numel() for state in optimizer.state.values() for tensor in state.values())
    return {"kept": kept, "owners": [bucket.owner for bucket in sharded.buckets if isinstance(bucket, Bucket)]}


def test_matrices_are_dealt_evenly(two_ranks: RankPool) -> None:
    found = two_ranks.run(layers, count=8)
    assert [one["kept"] for one in found] == [4 * 40 * 60] * 2
    assert found[0]["owners"] == found[1]["owners"] and sorted(found[0]["owners"]) == [0] * 4 + [1] * 4


@pytest.mark.parametrize("kind", ["grpo", pytest.param("critic", marks=pytest.mark.slow)])
def test_a_fit_goes_on_on_any_number_of_ranks(
    one_rank: RankPool, two_ranks: RankPool, tmp_path: Path, kind: str
) -> None:
    """Of a policy, and of a critic that has a learning rate of its own. In float64, which the optimizer rounds to
    bfloat16: what rounds the other way, by 2^-8 of an update, is what differs."""
    options: dict[str, Any] = {"optimizer": shard_jobs.muon, "kind": kind, "precision": "64-true"}
    [expected] = one_rank.run(shard_jobs.fit, START, layout=(1, 1, False), steps=4, **options)
    for got in two_ranks.run(shard_jobs.fit, START, layout=(2, 1, False), steps=3, directory=tmp_path, **options):
        assert got["grad_norm"] == pytest.approx(expected["grad_norm"][:3], rel=1e-6)
    for pool, layout in ((one_rank, (1, 1, False)), (two_ranks, (2, 2, False)), (two_ranks, (2, 2, True))):
        for got in pool.run(shard_jobs.fit, START, layout=layout, steps=4, start=tmp_path / "step=3.ckpt", **options):
            assert _largest_difference(got["parameters"], expected["parameters"]) < 0.02 * shard_jobs.RATE


@pytest.mark.slow
@pytest.mark.parametrize("layout", [(2, 2, True), (4, 2, True), (4, 4, True)])
@pytest.mark.parametrize("kind", ["untied", "experts"])
def test_parameters_in_shards_are_put_together(
    one_rank: RankPool, two_ranks: RankPool, four_ranks: RankPool, tmp_path: Path, layout: shard_jobs.Layout, kind: str
) -> None:
    """For the step, once a group; the checkpoint goes on in another layout."""
    pools = {1: one_rank, 2: two_ranks, 4: four_ranks}
    precision = "64-true" if kind == "untied" else "32-true"  # products of experts know no float64
    options: dict[str, Any] = {"optimizer": shard_jobs.muon, "kind": kind, "precision": precision}
    [expected] = one_rank.run(shard_jobs.fit, START, layout=(1, 1, False), steps=4, **options)
    close = 0.02 * shard_jobs.RATE  # root mean square; of an update it is 0.2 of the rate
    for got in pools[layout[0]].run(shard_jobs.fit, START, layout=layout, steps=4, **options):
        assert _mean_difference(got["parameters"], expected["parameters"]) < close
    pools[layout[0]].run(shard_jobs.fit, START, layout=layout, steps=3, directory=tmp_path, **options)
    for other in ((1, 1, False), (2, 2, True), (4, 2, True)):
        start = tmp_path / "step=3.ckpt"
        for got in pools[other[0]].run(shard_jobs.fit, START, layout=other, steps=4, start=start, **options):
            assert _mean_difference(got["parameters"], expected["parameters"]) < close


@pytest.mark.slow
def test_masters_of_shards_that_are_put_together(two_ranks: RankPool, tmp_path: Path) -> None:
    """bfloat16: a checkpoint goes on to the bit, by masters that ranks hold in parts."""
    options: dict[str, Any] = {"optimizer": shard_jobs.muon, "precision": "bf16-true", "layout": (2, 2, True)}
    whole = two_ranks.run(shard_jobs.fit, START, steps=4, **options)
    two_ranks.run(shard_jobs.fit, START, steps=3, directory=tmp_path, **options)
    rest = two_ranks.run(shard_jobs.fit, START, steps=4, start=tmp_path / "step=3.ckpt", **options)
    for got, expected in zip(rest, whole):
        assert _largest_difference(got["parameters"], expected["parameters"]) == 0.0


class TestMuon:
    """The optimizer itself."""

    @pytest.mark.parametrize("shape", [(24, 10), (10, 24), (16, 16)])
    def test_one_matrix_is_stepped_as_torch_does(self, shape: tuple[int, int]) -> None:
        generator = torch.Generator().manual_seed(0)
        start = torch.randn(shape, generator=generator)
        found = []
        for make in (
            lambda p: Muon([("layer.weight", p)], lr=0.1, weight_decay=0.2),
            lambda p: torch.optim.Muon([p], lr=0.1, weight_decay=0.2, adjust_lr_fn="match_rms_adamw"),
        ):
            param = nn.Parameter(start.clone())
            optimizer, own = make(param), torch.Generator().manual_seed(1)
            for _ in range(3):
                param.grad = torch.randn(shape, generator=own)
                optimizer.step()
            found.append(param.detach() - start)
        assert float((found[0] - found[1]).norm()) < 0.01 * float(
            found[1].norm()
        )  # both round to bfloat16, on their ways

    def test_an_update_is_orthogonal_and_of_the_size_of_adamw_s(self) -> None:
        matrices = torch.randn(3, 40, 24, generator=torch.Generator().manual_seed(0))
        values = torch.linalg.svdvals(orthogonalised(matrices, 5).float())
        assert values.min() > 0.5 and values.max() < 1.3
        param = nn.Parameter(torch.zeros(3, 40, 24))
        param.grad = matrices
        Muon([("experts.down_proj", param)], lr=0.1).step()
        sizes = param.detach().square().mean(dim=(1, 2)).sqrt() / 0.1
        assert torch.all((sizes > 0.1) & (sizes < 0.3))  # 0.2, and as orthogonal as five iterations make it

    def test_experts_are_stepped_each_for_itself(self) -> None:
        gradients = torch.randn(4, 12, 20, generator=torch.Generator().manual_seed(0))
        together = nn.Parameter(torch.zeros(4, 12, 20))
        together.grad = gradients.clone()
        Muon([("experts.up_proj", together)], lr=0.1).step()
        for expert, gradient in enumerate(gradients):
            alone = nn.Parameter(torch.zeros(12, 20))
            alone.grad = gradient.clone()
            Muon([("expert.up_proj", alone)], lr=0.1).step()
            torch.testing.assert_close(together[expert].detach(), alone.detach(), rtol=0.02, atol=1e-3)

    def test_the_rest_is_stepped_as_adamw_does(self) -> None:
        options: dict[str, Any] = {"lr": 0.1, "betas": (0.8, 0.9), "eps": 1e-6, "weight_decay": 0.3}
        names = ["embed_tokens.weight", "layer.bias", "norm.weight", "router.weight"]
        found = []
        for make in (lambda pairs: Muon(pairs, adamw=["router"], **options), lambda p: torch.optim.AdamW(p, **options)):
            params = [nn.Parameter(torch.ones(shape)) for shape in ((9, 4), (4,), (4,), (6, 4))]
            optimizer = make(list(zip(names, params)))
            for _ in range(3):
                for number, param in enumerate(params):
                    param.grad = torch.full_like(param, 1.0 + number)
                optimizer.step()
            found.append(params)
        assert all(torch.equal(*pair) for pair in zip(*found))

    @pytest.mark.parametrize("row", some(families.SUPPORTED, families.KINDS))
    def test_what_it_takes_for_matrices(self, row: str) -> None:
        """No table of tokens or places, no output layer, no convolution: but the layers' projections, all of them."""
        model = families.build(families.SUPPORTED[row])
        left = {
            id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding | nn.Conv1d | nn.Conv2d | nn.Conv3d)
        }
        left.add(id(model.get_output_embeddings().weight))
        linear = [m for name, m in model.named_modules() if isinstance(m, nn.Linear) and ".layers." in name]
        projections = {id(m.weight) for m in linear if m.out_features > 1}
        taken = {id(param) for name, param in model.named_parameters() if is_matrix(name, param)}
        named = {id(param): name for name, param in model.named_parameters()}
        assert not [named[one] for one in left & taken]
        assert not [named[one] for one in projections - taken - left]

    def test_parameters_without_names(self) -> None:
        optimizer = Muon([nn.Parameter(torch.ones(2, 2))])
        with pytest.raises(ValueError, match=r"by name: give it \(name, parameter\) pairs"):
            optimizer.step()

    def test_a_part_of_a_name_that_none_has(self) -> None:
        optimizer = Muon([("layer.weight", nn.Parameter(torch.ones(2, 2)))], adamw=["ruoter"])
        with pytest.raises(ValueError, match=r"adamw: no parameter's name has 'ruoter' in it; .*layer\.weight"):
            optimizer.step()

    @pytest.mark.parametrize("options", [{"momentum": 1.0}, {"ns_steps": 0}, {"lr": -1.0}, {"betas": (1.0, 0.9)}])
    def test_options_out_of_range(self, options: Any) -> None:
        with pytest.raises(
            ValueError, match=f"Invalid {'learning rate' if 'lr' in options else next(iter(options))[:4]}"
        ):
            Muon([("layer.weight", nn.Parameter(torch.ones(2, 2)))], **options)


def test_the_size_of_an_update_does_not_depend_on_the_matrix() -> None:
    """0.2 times the learning rate, root mean square: 0.2 sqrt(max(m, n)) over sqrt(m n) entries of min(m, n) ones."""
    for rows, columns in ((8, 128), (128, 8), (64, 64)):
        param = nn.Parameter(torch.zeros(rows, columns))
        param.grad = torch.randn(rows, columns, generator=torch.Generator().manual_seed(0))
        Muon([("layer.weight", param)], lr=1.0).step()
        assert math.isclose(float(param.detach().square().mean().sqrt()), 0.2, rel_tol=0.3)


@pytest.mark.parametrize(("before", "now"), [([], ["1."]), (["1."], [])])
def test_state_of_other_matrices_is_refused(before: list[str], now: list[str]) -> None:
    module = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))
    optimizer = Muon(module.named_parameters(), adamw=before)
    module(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    other = Muon(module.named_parameters(), adamw=now)
    with pytest.raises(ValueError, match=r"adamw: what has the shape \(4, 8\) here was stepped by"):
        other.load_state_dict(optimizer.state_dict())
