"""The sharded optimizer against plain torch: same parameters on 1 and 2 ranks, re-shardable state, nothing lost in"
" silence."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from app.strategies.checkpoint.optimizer_state import load_sharded, save_sharded
from app.strategies.pieces import Piece
from tests.app.strategies import toy_model as toy
from tests.app.strategies import zero1_jobs as jobs
from tests.datamodules.inference.adapters import with_lora
from tests.datamodules.inference.engine_suite import tiny_policy
from tests.helpers.rank_pool import RankError, RankPool


def _largest_difference(got: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    assert got.keys() == expected.keys()
    return max(float((got[name].double() - expected[name].double()).abs().max()) for name in expected)


@pytest.mark.parametrize("make_optimizer", [toy.sgd, toy.adamw, toy.adadelta_named, toy.adagrad])
def test_one_process_has_the_bits_of_plain_torch(make_optimizer: Any) -> None:
    expected = toy.train_plainly(make_optimizer, steps=4)
    got = jobs.train(make_optimizer, steps=4)["parameters"]
    assert all(torch.equal(got[name], expected[name]) for name in expected)
    assert _largest_difference(expected, toy.values(toy.Toy())) > 1e-3  # the training does something


@pytest.mark.parametrize("bucket_elements", [1 << 20, 40])
def test_two_ranks_equal_one_after_three_sgd_steps(two_ranks: RankPool, bucket_elements: int) -> None:
    expected = toy.train_plainly(toy.sgd)
    for result in two_ranks.run(jobs.train, bucket_elements=bucket_elements):
        assert _largest_difference(result["parameters"], expected) < 1e-6


def test_parameter_groups_and_scheduler_with_adamw(two_ranks: RankPool) -> None:
    arguments = dict(make_optimizer=toy.adamw, make_scheduler=toy.one_cycle, steps=5)
    expected = toy.train_plainly(**arguments)
    for result in two_ranks.run(jobs.train, **arguments):
        assert _largest_difference(result["parameters"], expected) < 1e-2 * toy.LEARNING_RATE
    without_groups = toy.train_plainly(lambda m: torch.optim.AdamW(m.parameters(), lr=0.05), steps=5)
    assert _largest_difference(without_groups, expected) > 1e-2 * toy.LEARNING_RATE  # groups and schedule matter here


def test_state_that_is_there_before_the_first_step(two_ranks: RankPool) -> None:
    expected = toy.train_plainly(toy.adagrad, steps=5)
    half = two_ranks.run(jobs.train, make_optimizer=toy.adagrad, steps=3)
    rest = {"steps": 2, "first_step": 3, "state": half[0]["state"], "weights": half[0]["parameters"]}
    for result in two_ranks.run(jobs.train, make_optimizer=toy.adagrad, **rest):
        assert _largest_difference(result["parameters"], expected) < 1e-2 * toy.LEARNING_RATE
        assert result["state_elements"] == result["master_elements"]  # of its own shard alone


def test_clipping_equals_clip_grad_norm(two_ranks: RankPool) -> None:
    expected = toy.train_plainly(toy.sgd, clip=0.05)
    for result in two_ranks.run(jobs.train, clip=0.05):
        assert min(result["norms"]) > 0.05
        assert _largest_difference(result["parameters"], expected) < 1e-6
    model = toy.Toy()
    model.backward(range(toy.SAMPLES), 0)
    norm = float(nn.utils.clip_grad_norm_(model.parameters(), 1.0))
    assert result["norms"][0] == pytest.approx(norm, rel=1e-6)


@pytest.mark.parametrize("idle_rank", [0, 1])
def test_rank_without_work(two_ranks: RankPool, idle_rank: int) -> None:
    expected = toy.train_plainly(toy.sgd)
    for result in two_ranks.run(jobs.train, idle_rank=idle_rank):
        assert _largest_difference(result["parameters"], expected) < 1e-6


def test_nonfinite_gradient_skips_the_step_on_all_ranks(two_ranks: RankPool) -> None:
    expected = toy.train_plainly(toy.adamw, skip=[1])
    results = two_ranks.run(jobs.train, make_optimizer=toy.adamw, poison=(1, 1), clip=1e6)
    for result in results:
        assert result["skipped"] == [1]
        assert _largest_difference(result["parameters"], expected) < 1e-2 * toy.LEARNING_RATE
    assert results[0]["state"]["state"][0]["step"] == 2


def test_state_is_sharded(one_rank: RankPool, two_ranks: RankPool) -> None:
    [alone] = one_rank.run(jobs.train, make_optimizer=toy.adamw)
    pair = two_ranks.run(jobs.train, make_optimizer=toy.adamw)
    trained = sum(p.numel() for p in toy.Toy().parameters() if p.requires_grad)
    padding = 32 * (4 + 2)  # at most 32 elements a parameter and 32 a shard of each of the two groups
    assert trained <= alone["master_elements"] <= trained + padding
    for result in pair:
        assert trained <= 2 * result["master_elements"] <= trained + padding
        assert result["state_elements"] == 2 * result["master_elements"]  # exp_avg and exp_avg_sq


@pytest.mark.slow  # four processes import everything
def test_bytes_per_parameter(one_rank: RankPool, two_ranks: RankPool, four_ranks: RankPool) -> None:
    for pool in (one_rank, two_ranks, four_ranks):
        for measured in pool.run(jobs.bytes_per_parameter, dtype=torch.bfloat16):
            assert measured == pytest.approx(2 + 4 + 12 / pool.size, rel=0.02)
        for measured in pool.run(jobs.bytes_per_parameter, dtype=torch.float32):  # the master is the parameter
            assert measured == pytest.approx(4 + 4 + 8 / pool.size, rel=0.02)


def test_training_one_parameter_costs_one_parameter(two_ranks: RankPool) -> None:
    """As adapters do: the rest is frozen, and neither kept nor moved."""
    start = toy.values(toy.Toy())
    expected = toy.train_plainly(toy.adamw, only="back.weight")
    assert [name for name in start if not torch.equal(expected[name], start[name])] == ["back.weight"]
    for result in two_ranks.run(jobs.train, make_optimizer=toy.adamw, only="back.weight"):
        assert _largest_difference(result["parameters"], expected) < 1e-2 * toy.LEARNING_RATE
        assert result["master_elements"] == 32  # 35 elements and padding, over two ranks


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_offloaded_shards_have_the_same_bits(two_ranks: RankPool, dtype: torch.dtype) -> None:
    arguments = dict(make_optimizer=toy.adamw, steps=4, clip=0.05, dtype=dtype)
    expected = two_ranks.run(jobs.train, **arguments)[0]
    for result in two_ranks.run(jobs.train, offload=True, **arguments):
        assert _largest_difference(result["parameters"], expected["parameters"]) == 0.0
    arguments |= {"steps": 2, "first_step": 4, "weights": expected["parameters"], "state": expected["state"]}
    continued = two_ranks.run(jobs.train, **arguments)[0]["parameters"]
    for result in two_ranks.run(jobs.train, offload=True, **arguments):  # from a checkpoint without offloading
        assert _largest_difference(result["parameters"], continued) == 0.0


@pytest.mark.parametrize(
    ("sizes", "dtype"),
    [((2, 1), torch.bfloat16), ((1, 2), torch.float32), ((2, 2), torch.float32), ((2, 2), torch.bfloat16)],
)
def test_state_saved_on_some_ranks_continues_on_others(
    one_rank: RankPool, two_ranks: RankPool, sizes: tuple[int, int], dtype: torch.dtype
) -> None:
    pools = {1: one_rank, 2: two_ranks}
    arguments = dict(make_optimizer=toy.adamw, make_scheduler=None, dtype=dtype)
    whole = pools[sizes[1]].run(jobs.train, steps=5, **arguments)[0]
    half = pools[sizes[0]].run(jobs.train, steps=3, bucket_elements=60, **arguments)
    rest = pools[sizes[1]].run(
        jobs.train, steps=2, first_step=3, state=half[0]["state"], weights=half[0]["parameters"], **arguments
    )
    for result in rest:
        difference = _largest_difference(result["parameters"], whole["parameters"])
        if sizes == (2, 2):
            assert difference == 0.0
        # Ranks add bfloat16 gradients in another order: masters agree to rounding, weights to their own last bit.
        assert difference < (1e-2 * toy.LEARNING_RATE if dtype == torch.float32 else 2e-2)


def test_state_is_what_torch_itself_saves(two_ranks: RankPool) -> None:
    model = toy.Toy()
    optimizer = toy.adamw(model)
    for step in range(3):
        optimizer.zero_grad()
        model.backward(range(toy.SAMPLES), step)
        optimizer.step()
    expected = optimizer.state_dict()
    got = two_ranks.run(jobs.train, make_optimizer=toy.adamw)[0]["state"]
    assert [group["params"] for group in got["param_groups"]] == [g["params"] for g in expected["param_groups"]]
    assert got["state"].keys() == expected["state"].keys()  # the frozen parameter has none
    for index, entry in expected["state"].items():
        assert got["state"][index].keys() == entry.keys()
        for key, value in entry.items():
            torch.testing.assert_close(got["state"][index][key], value, atol=1e-5, rtol=1e-4)
    fresh = toy.adamw(toy.Toy())
    fresh.load_state_dict(got)  # and a plain optimizer can continue from it
    # The sharded one continues from torch's own, too.
    continued = jobs.train(toy.adamw, steps=2, first_step=3, state=expected, weights=model.state_dict())["parameters"]
    assert _largest_difference(continued, toy.train_plainly(toy.adamw, steps=5)) == 0.0


def test_bfloat16_parameters_have_float32_gradients_and_masters(two_ranks: RankPool) -> None:
    """Updates far below a bfloat16 weight's last bit add up, because the masters are kept and saved in float32."""

    make_optimizer = partial(torch_sgd, lr=1e-4)
    start = toy.values(toy.Toy(dtype=torch.bfloat16))
    results = two_ranks.run(jobs.train, make_optimizer=make_optimizer, steps=2, dtype=torch.bfloat16)
    saved = results[0]["state"]["state"]
    assert results[0]["gradient_dtypes"] == {torch.float32}
    assert saved[0]["master"].dtype == torch.float32
    assert _largest_difference(results[0]["parameters"], results[1]["parameters"]) == 0.0
    model = toy.Toy(dtype=torch.bfloat16)
    trained = [(i, name, p) for i, (name, p) in enumerate(model.named_parameters()) if p.requires_grad]
    moved = 0
    for index, name, _ in trained:
        master = saved[index]["master"]
        assert results[0]["parameters"][name].dtype == torch.bfloat16
        assert torch.equal(master.bfloat16(), results[0]["parameters"][name])
        moved += int(((master != start[name].float()) & (results[0]["parameters"][name] == start[name])).sum())
    assert moved > 20  # masters that moved while their rounded weights did not
    again = two_ranks.run(
        jobs.train,
        make_optimizer=make_optimizer,
        steps=0,
        dtype=torch.bfloat16,
        state=results[0]["state"],
        weights=results[0]["parameters"],
    )
    assert all(torch.equal(again[0]["state"]["state"][i]["master"], saved[i]["master"]) for i, _, _ in trained)


def torch_sgd(model: nn.Module, lr: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=lr)


def test_float32_accumulation_of_bfloat16_gradients() -> None:
    """256 additions of 2**-9 to 1.0 would all be lost in a bfloat16 gradient."""
    module = nn.Linear(1, 1, bias=False, dtype=torch.bfloat16)
    jobs.ShardedOptimizer(torch_sgd(module, 0.1), module, jobs.communicator())
    for factor in [1.0] + 256 * [2.0**-9]:
        (module.weight * factor).sum().backward()
    assert module.weight.grad is not None and float(module.weight.grad) == 1.5


def test_different_models_are_refused_by_name_on_all_ranks(two_ranks: RankPool) -> None:
    with pytest.raises(RankError) as error:
        two_ranks.run(jobs.different_models)
    assert set(error.value.messages) == {0, 1}
    assert all("hidden.bias (5,)" in message for message in error.value.messages.values())


def test_weights_written_from_outside_are_not_lost() -> None:
    """In bfloat16 the next step would otherwise bring the old masters back; what was not written keeps its"
    " precision."""
    module = nn.Linear(2, 2, dtype=torch.bfloat16)
    optimizer = torch_sgd(module, lr=1e-4)
    sharded = jobs.ShardedOptimizer(optimizer, module, jobs.communicator())

    def step() -> Tensor:
        optimizer.zero_grad()
        (module.weight.sum() + module.bias.sum()).backward()
        sharded.reduce()
        optimizer.step()
        sharded.gather_parameters()
        return sharded.buckets[0].master.clone()

    before = step()
    with torch.no_grad():
        module.weight[0, 1] = 3.0
    module.bias.data[1] = 5.0  # as WeightAveraging writes; autograd does not count it
    after = step()
    expected = before - 1e-4
    expected[1], expected[33] = 3.0 - 1e-4, 5.0 - 1e-4
    trained = [0, 1, 2, 3, 32, 33]
    torch.testing.assert_close(after[trained], expected[trained], rtol=0, atol=1e-7)
    assert (module.weight[0, 1].item(), module.bias[1].item()) == (3.0, 5.0)


def test_whether_weights_were_written_is_asked_once_a_step() -> None:
    """Whatever the number of buckets: on a GPU each question waits for all work before it."""

    def questions(layers: int) -> int:
        module = nn.Sequential(*(nn.Linear(2, 2, dtype=torch.bfloat16) for _ in range(layers)))
        sharded = jobs.ShardedOptimizer(torch_sgd(module, 0.1), module, jobs.communicator(), bucket_elements=8)
        assert len(sharded.buckets) >= layers
        module(torch.ones(1, 2, dtype=torch.bfloat16)).sum().backward()
        module[-1].weight.data[0, 1] = 3.0
        with Questions() as asked:
            sharded.reduce()
        assert any(3.0 in bucket.master for bucket in sharded.buckets)
        return asked.count

    assert questions(5) == questions(1) > 0


class Questions(TorchFunctionMode):
    """Counts the calls that give Python what a tensor holds."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        asks = (Tensor.tolist, Tensor.item, Tensor.__bool__, Tensor.__float__, torch.equal, Tensor.equal)
        self.count += function in asks
        return function(*args, **(kwargs or {}))


class TestRefusals:
    """Mistakes that would lose gradients or state are errors that name the culprit."""

    def _sharded(self) -> tuple[toy.Toy, jobs.ShardedOptimizer]:
        model = toy.Toy()
        return model, jobs.ShardedOptimizer(toy.adamw(model), model, jobs.communicator())

    def test_detached_gradient(self) -> None:
        model, sharded = self._sharded()
        model.back.zero_grad()
        model.backward([0], 0)
        with pytest.raises(RuntimeError, match=r"back\.weight.*optimizer\.zero_grad"):
            sharded.reduce()

    def test_replaced_parameter_memory(self) -> None:
        model, sharded = self._sharded()
        model.back.weight.data = model.back.weight.data.clone()
        with pytest.raises(RuntimeError, match=r"'back\.weight' got other memory"):
            sharded.reduce()

    def test_second_reduction(self) -> None:
        _, sharded = self._sharded()
        sharded.reduce()
        with pytest.raises(RuntimeError, match="already summed"):
            sharded.reduce()

    def test_unfrozen_after_setup(self) -> None:
        model, sharded = self._sharded()
        model.frozen.requires_grad_(True)
        with pytest.raises(RuntimeError, match="'frozen' was unfrozen"):
            sharded.zero_grad()

    def test_parameter_group_after_setup(self) -> None:
        _, sharded = self._sharded()
        with pytest.raises(RuntimeError, match="configure_optimizers"):
            sharded.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})

    def test_optimizer_that_is_not_elementwise(self) -> None:
        model = toy.Toy()
        with pytest.raises(ValueError, match=r"LBFGS.*AdamW"):
            jobs.ShardedOptimizer(torch.optim.LBFGS(model.parameters()), model, jobs.communicator())

    def test_optimizer_with_other_weights_to_evaluate(self) -> None:
        class ScheduleFree(torch.optim.SGD):
            def train(self) -> None: ...
            def eval(self) -> None: ...

        model = toy.Toy()
        with pytest.raises(ValueError, match=r"ScheduleFree trains other weights than those to evaluate.*AdamW"):
            jobs.ShardedOptimizer(ScheduleFree(model.parameters(), lr=0.1), model, jobs.communicator())

    @pytest.mark.parametrize("make_optimizer", [toy.adamw, toy.adagrad])
    def test_state_of_steps_before(self, make_optimizer: Any) -> None:
        model = toy.Toy()
        optimizer = make_optimizer(model)
        model.backward([0], 0)
        optimizer.step()
        with pytest.raises(
            ValueError, match=r"\(Ada\w+\) that already has state \(step, \w+.*\), .*return a fresh one"
        ):
            jobs.ShardedOptimizer(optimizer, model, jobs.communicator())

    def test_nothing_to_train(self) -> None:
        model = toy.Toy().requires_grad_(False)
        with pytest.raises(ValueError, match="no parameter that requires gradients"):
            jobs.ShardedOptimizer(toy.sgd(model), model, jobs.communicator())

    def test_two_parameters_in_one_memory(self) -> None:
        model = toy.Toy()
        model.head.weight = nn.Parameter(model.embedding.weight.data)
        with pytest.raises(ValueError, match=r"embedding\.weight.*head\.weight.*same torch\.nn\.Parameter"):
            jobs.ShardedOptimizer(toy.sgd(model), model, jobs.communicator())

    def test_adapters_that_peft_ties(self) -> None:
        model = with_lora(tiny_policy(), target_modules=["embed_tokens"], ensure_weight_tying=True)
        with pytest.raises(ValueError, match=r"embed_tokens\.lora_\w+.*lm_head\.lora_.*leave ensure_weight_tying out"):
            jobs.ShardedOptimizer(torch_sgd(model, 0.1), model, jobs.communicator())

    def test_state_of_another_model(self) -> None:
        _, sharded = self._sharded()
        state = jobs.train(toy.adamw)["state"]
        state["param_groups"][1]["param_names"][0] = "other.bias"
        with pytest.raises(ValueError, match=r"^ckpt_path: .* group 1.*other\.bias"):
            jobs.load_whole(sharded, state)
        with pytest.raises(ValueError, match=r"without betas, .*this run's optimizer is torch\.optim\.adamw\.AdamW"):
            jobs.load_whole(sharded, jobs.train(toy.sgd)["state"])
        state = jobs.train(toy.adamw)["state"]
        del state["param_groups"][1]
        with pytest.raises(ValueError, match=r"^ckpt_path: .* 1 parameter groups, this one 2: .*arborist export"):
            jobs.load_whole(sharded, state)

    def test_state_missing_for_one_parameter(self) -> None:
        _, sharded = self._sharded()
        state = jobs.train(toy.adamw)["state"]
        del state["state"][1]
        with pytest.raises(ValueError, match=r"'hidden\.weight' is missing"):
            jobs.load_whole(sharded, state)


class TestGoingOnWithOtherOptions:
    """What a user configures otherwise than before has an effect, or is said to have none."""

    def _go_on(
        self,
        changed: Any,
        make_scheduler: Any = None,
        ends: bool = False,
        whole: bool = False,
        begins: bool = False,
    ) -> list[dict[str, Any]]:
        """`ends`: without the schedule; `begins`: that was without. `whole`: from the state as torch saves it."""
        model = toy.Toy()
        optimizer = toy.adamw(model)
        scheduler = make_scheduler(optimizer) if make_scheduler and not begins else None
        sharded = jobs.ShardedOptimizer(optimizer, model, jobs.communicator())
        sharded.reduce()
        optimizer.step()
        if scheduler:
            scheduler.step()
        description, saved = save_sharded(sharded)

        def read(pieces: dict[str, Piece]) -> None:
            for name, piece in pieces.items():
                piece.local.copy_(saved[name].local)

        model = toy.Toy()
        optimizer = toy.adamw(model)
        for group in optimizer.param_groups:
            group.update(changed)
        if make_scheduler and not ends:
            self.scheduler = make_scheduler(optimizer)
        before, sharded = sharded, jobs.ShardedOptimizer(optimizer, model, jobs.communicator())
        if whole:
            jobs.load_whole(sharded, jobs.whole_state(before))
        else:
            load_sharded(sharded, description, read)
        return optimizer.param_groups

    def test_they_apply(self) -> None:
        with pytest.warns(UserWarning) as caught:
            groups = self._go_on({"lr": 1e-6, "betas": (0.5, 0.6)})
        assert [(group["lr"], group["betas"], group["weight_decay"]) for group in groups] == [
            (1e-6, (0.5, 0.6), 0.1),
            (1e-6, (0.5, 0.6), 0.0),
        ]
        said = [str(warning.message) for warning in caught]
        assert f"optimizer, parameter group 0: lr was {toy.LEARNING_RATE} and is 1e-06 from here on" in said
        assert len(said) == 4

    def test_a_schedule_goes_on_and_this_is_said(self) -> None:
        with pytest.warns(
            UserWarning, match="lr was .* and is 1e-06, which has no effect: the learning rate's schedule"
        ):
            groups = self._go_on({"lr": 1e-6}, partial(torch.optim.lr_scheduler.StepLR, step_size=1, gamma=0.5))
        assert groups[0]["lr"] == toy.LEARNING_RATE / 2

    @pytest.mark.parametrize("changed", [{}, {"lr": 1e-6}])
    @pytest.mark.parametrize("whole", [False, True])
    def test_a_schedule_that_ends_leaves_what_is_configured(self, changed: Any, whole: bool) -> None:
        """And one line a group says so."""
        with pytest.warns(UserWarning) as caught:
            groups = self._go_on(
                changed, partial(torch.optim.lr_scheduler.StepLR, step_size=1, gamma=0.5), ends=True, whole=whole
            )
        own = [toy.LEARNING_RATE, toy.LEARNING_RATE / 2]
        expected = [changed.get("lr", rate) for rate in own]
        assert [group["lr"] for group in groups] == expected
        assert [group.get("initial_lr") for group in groups] == [None, None]
        assert [str(warning.message) for warning in caught] == [
            f"optimizer, parameter group {number}: lr followed a schedule to {rate / 2}; this run has none, and it is"
            f" {now} from here on"
            for number, (rate, now) in enumerate(zip(own, expected))
        ]

    @pytest.mark.parametrize("whole", [False, True])
    @pytest.mark.parametrize("kind", ["warm-up", "cycle"])
    def test_a_schedule_that_begins_does_so_at_its_start(self, whole: bool, kind: str) -> None:
        """As in a run of its own, step for step; and one line a group says so."""
        made = {
            "warm-up": partial(torch.optim.lr_scheduler.LinearLR, start_factor=0.01, total_iters=3),
            "cycle": partial(
                torch.optim.lr_scheduler.OneCycleLR, max_lr=[0.2, 0.1], total_steps=5, cycle_momentum=False
            ),
        }[kind]
        alone = toy.adamw(toy.Toy())
        scheduler = made(alone)
        with pytest.warns(UserWarning) as caught:
            groups = self._go_on({}, made, whole=whole, begins=True)
        assert [str(warning.message) for warning in caught if "optimizer" in str(warning.message)] == [
            f"optimizer, parameter group {number}: lr was {rate} in the checkpoint, which has no schedule of it; this"
            f" run's begins here, at {group['lr']}"
            for number, (rate, group) in enumerate(zip((toy.LEARNING_RATE, toy.LEARNING_RATE / 2), alone.param_groups))
        ]
        for _ in range(4):
            assert [group["lr"] for group in groups] == pytest.approx([group["lr"] for group in alone.param_groups])
            for one in (alone, self.scheduler.optimizer):
                one._opt_called = True
            scheduler.step()
            self.scheduler.step()

    def test_nothing_changed_is_not_mentioned(self) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            self._go_on({})
