"""Tree passes that a group of ranks runs together (importable, hence not in a test file)."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry
from transformers import PreTrainedModel

from app.strategies.ranks.collectives import Communicator
from app.strategies.ranks.groups import GroupRanks
from app.strategies.shards import is_sharded, shard_models
from app.tree import Likeliest, PrefixTree, SoftTargets, TreeEngine, memory, routed
from app.tree.executor import Executor
from benchmarks.common.memory import peak_bytes
from tests.app.tree import models, oracle
from tests.app.tree.cases import Case
from tests.app.tree.engine import families
from tests.app.tree.losses import SequenceLoss
from tests.app.tree.parity import as_tensor, build, masked_block, take_grads
from tests.app.tree.states import hybrids

TIMEOUT = timedelta(seconds=60)


class CountedGroup(GroupRanks):
    """Notes its collectives: what each is, and how many elements where every rank has as many."""

    def __init__(self, size: int) -> None:
        super().__init__(Communicator(dist.group.WORLD, torch.device("cpu")), size, TIMEOUT)
        self.seen: list[tuple[str, int]] = []
        self.sent = 0  # elements, to other ranks by exchanges
        # Gloo's threads let go of a collective's tensors a moment after it is done, and a profiler sees no memory that
        # they free: this keeps that to the thread that is measured.
        self._recent: deque[tuple[Any, ...]] = deque(maxlen=2)

    def _run(self, what: str, operation: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        equal = operation is not dist.all_to_all_single
        if not equal:
            self.sent += sum(arguments[-1]) - arguments[-1][self.rank]
        self.seen.append((what, arguments[-1].numel() if equal else 0))
        self._recent.append(arguments)
        return super()._run(what, operation, *arguments, **options)


def receive(tensor: Tensor, name: str) -> None:
    """Every rank built the same model."""


def whole(name: str, dtype: torch.dtype) -> tuple[PreTrainedModel, nn.Linear]:
    """A model that its tests leave as they found it, and a value head; hybrids in float64 throughout."""
    return hybrids.shared_exact(name) if name in hybrids.OPTIONS else models.shared(name, dtype)


def sharded_over(group: CountedGroup, name: str, dtype: torch.dtype) -> tuple[PreTrainedModel, nn.Linear]:
    model = hybrids.make_exact(name) if name in hybrids.OPTIONS else models.make(name, dtype)
    head = models.value_head(dtype)
    shard_models(model, group, receive)
    return model, head


def mine(grads: dict[str, Tensor | None]) -> dict[str, Tensor]:
    """What a rank adds to the sum over its group."""
    found = {name: grad for name, grad in grads.items() if grad is not None}
    return {
        name: grad.full_tensor() / grad.device_mesh.size() if isinstance(grad, DTensor) else grad
        for name, grad in found.items()
    }


def take_sums(group: CountedGroup, model: nn.Module, head: nn.Module | None = None) -> dict[str, Tensor | None]:
    """Collective: the gradients, summed over the group, which are None afterwards."""
    grads = take_grads(model, head)
    for name, parameter in oracle.parameters(model, head).items():
        mine = grads[name]
        if isinstance(mine, DTensor):
            grads[name] = mine.full_tensor()
            continue
        if isinstance(parameter, DTensor):
            continue  # an indexer's, on no rank
        if mine is None:
            mine = grads[name] = torch.zeros_like(parameter, dtype=torch.promote_types(torch.float32, parameter.dtype))
        group.sum_(mine)
    return grads


def run_pass(
    size: int,
    name: str,
    dtype: torch.dtype,
    case: Case,
    kind: str,
    want: tuple[str, ...],
    block: int,
    sharded: bool = False,
    **engine: Any,
) -> dict[str, Any]:
    """One rank's forward, backward and coupled backward over a case, in groups of `size`; parameters `sharded` or whole
    on every rank."""
    group = CountedGroup(size)
    model, head = sharded_over(group, name, dtype) if sharded else whole(name, dtype)
    tree, temperatures = build(case), as_tensor(case.temperatures)
    loss = SequenceLoss(kind, case.lengths, case.seed, want)
    budgets = {"chunk_tokens": case.chunk_tokens, "live_tokens": case.live_tokens}
    engine = {"value_head": head, "self_check": False, **budgets, **engine}
    take_grads(model, head)
    with masked_block(block):
        ours = TreeEngine(model, group=group, **engine)
        outputs = ours.forward(tree, want, temperatures)
        total = ours.backward(tree, loss, want, temperatures=temperatures)
        grads = mine(take_grads(model, head))
        ours.backward_from(tree, {name: torch.ones(tree.num_dense_tokens) for name in want}, temperatures)
    given = mine(take_grads(model, head))
    return {
        "outputs": {name: outputs.flat(name) for name in want},
        "total": total,
        "calls": loss.calls,
        "grads": grads,
        "given": given,
        "collectives": list(group.seen),
    }


def run_routed(size: int, case: Case, rows: np.ndarray, table: np.ndarray, sharded: bool) -> dict[str, Any]:
    """One rank's backward over recorded experts."""
    group, model = CountedGroup(size), families.build(families.SUPPORTED["Qwen3-MoE"])
    if sharded:
        shard_models(model, group, receive)
    engine = TreeEngine(model, case.chunk_tokens, case.live_tokens, group=group, self_check=False)
    loss = SequenceLoss("clipped_ratio", case.lengths, case.seed, ("logprobs",))
    total = engine.backward(routed(build(case), rows, table), loss)
    return {"total": total, "grads": mine(take_grads(model))}


def run_soft(size: int, name: str, case: Case, soft: SoftTargets, sharded: bool) -> dict[str, Any]:
    """One rank's backward over columns beside tokens, and what it collects as likeliest; in shards, why it does not."""
    group = CountedGroup(size)
    model, head = sharded_over(group, name, torch.float64) if sharded else models.shared(name, torch.float64)
    engine = TreeEngine(model, case.chunk_tokens, case.live_tokens, value_head=head, group=group, self_check=False)
    tree, likeliest, want = build(case), Likeliest(3), ("logprobs", "soft")
    take_grads(model, head)
    total = engine.backward(tree, SequenceLoss("clipped_ratio", case.lengths, case.seed, want), want, soft=soft)
    try:
        engine.forward(tree, soft=likeliest)
        found: Any = likeliest.found()
    except ValueError as error:
        found = str(error)
    return {"total": total, "grads": mine(take_grads(model, head)), "likeliest": found}


def run_cells(size: int, cells: list[tuple[str, str]], sharded: bool) -> None:
    """Cells of the support matrix (family, column), as they are, by an engine of which this rank is a part, and that
    has parameters whole or sharded. Of two models each in low precision."""
    group = CountedGroup(size)
    check_parity, within = families.check_parity, families.within

    def engine_over(model: Any, *arguments: Any, **options: Any) -> TreeEngine:
        if sharded and not is_sharded(model):
            shard_models(model, group, receive)
        return TreeEngine(model, *arguments, group=group, **options)

    def check(family: families.Family, model: Any, dense: Any = None) -> None:
        try:
            check_parity(family, model, dense or copy.deepcopy(model))  # the oracle's own stays whole
        except AssertionError as error:
            raise AssertionError(f"{family.type}: {error}") from error

    def within_after_sums(found: tuple[float, float], tolerances: tuple[float, float]) -> None:
        within(found, (tolerances[0], 2 * tolerances[1]))  # every gradient is a sum over ranks, rounded once more

    with (
        patch.object(families, "TreeEngine", engine_over),
        patch.object(families, "check_parity", check),
        patch.object(families, "within", within_after_sums),
        patch.object(families, "take_grads", lambda model, head=None: take_sums(group, model, head)),
    ):
        for family, column in cells:
            families.COLUMNS[column](replace(families.SUPPORTED[family], models=2))


def check_themselves(size: int, names: list[str]) -> list[str]:
    """What the self-checks of these families say; "" where they pass."""
    said, tree = [], PrefixTree.build(families.SEQUENCES)
    for name in names:
        report = TreeEngine(families.build(families.SUPPORTED[name]), group=CountedGroup(size)).verify(tree)
        said.append("" if report is not None and report.passed else f"{name}: {report}")
    return said


def check_states(size: int, sharded: bool) -> list[str]:
    """What the self-check of a model that carries states says in bfloat16: of the right engine, and of one that drops
    the gradient of what chunks start from."""
    said, tree = [], PrefixTree.build(families.SEQUENCES)
    for owe in (Executor._owe_to_starts, lambda *unused: None):
        group, model = CountedGroup(size), hybrids.make("qwen3_5_text", torch.bfloat16)
        if sharded:
            shard_models(model, group, receive)
        with patch.object(Executor, "_owe_to_starts", owe):
            report = TreeEngine(model, group=group).verify(tree)
        said.append("" if report is not None and report.passed else str(report))
    return said


def check_odd_channels(size: int) -> tuple[int, str]:
    """Channels of a convolution that are no multiple of the ranks, and what the self-check says."""
    model = hybrids.make("granitemoehybrid", mamba_d_state=5)
    report = TreeEngine(model, group=CountedGroup(size)).verify(PrefixTree.build(families.SEQUENCES))
    return model.model.layers[0].mamba.conv1d.out_channels, "" if report is not None and report.passed else str(report)


def run_odd_heads(size: int) -> None:
    model = models.make("qwen3", num_attention_heads=3, num_key_value_heads=1)
    TreeEngine(model, group=CountedGroup(size)).forward(PrefixTree.build(families.SEQUENCES))


def call_plainly(size: int) -> tuple[Tensor, Tensor, list[str]]:
    """Logits of a whole model and of the same in shards, called as it is, and what is said where that cannot be."""
    group = CountedGroup(size)
    model = models.make("phi", torch.float64, pad_token_id=3)
    ids = torch.from_numpy(families.SEQUENCES[0])[None]
    with torch.no_grad():
        whole = model(input_ids=ids).logits
        shard_models(model, group, receive)
        logits = model(input_ids=ids).logits
    said = []
    for attempt in (lambda: model(input_ids=ids + group.rank), lambda: model(input_ids=ids)):
        try:
            attempt()
        except RuntimeError as error:
            said.append(str(error))
    return whole, logits, said


def summed(found: list[dict[str, Any]], key: str) -> dict[str, Tensor | None]:
    """The gradients of the ranks of a group, added up."""
    names = {name for rank in found for name in rank[key]}
    return {name: sum(rank[key][name] for rank in found if name in rank[key]) for name in names}  # type: ignore[misc]


def traffic(size: int, chunk_tokens: int, live_tokens: int) -> dict[str, float]:
    """Elements that a sharded backward pass gathers, sums and exchanges, beside what its plan says."""
    model = models.make("starcoder2", torch.float64, num_hidden_layers=3)
    group = CountedGroup(size)
    sent, tree = [], PrefixTree.build(families.SEQUENCES)
    for sharded in (False, True):
        if sharded:
            shard_models(model, group, receive)
        engine = TreeEngine(model, chunk_tokens, live_tokens, self_check=False, group=group)
        plan = engine.plan(tree)
        actions = [step.action for step in plan.steps]
        before = group.sent
        engine.backward(tree, lambda out, _: out.logprobs.sum())
        sent.append(group.sent - before)
    config = model.config
    values = 2 * (config.num_attention_heads + config.num_key_value_heads) * models.HIDDEN // config.num_attention_heads
    runs = 2 * sum(chunk.tokens for chunk in plan.chunks) + plan.extra_forward_tokens  # forward, and backward
    return {
        "exchanged": sent[0],
        "heads' rows": config.num_hidden_layers * values * runs * (size - 1) / size,
        "more exchanged": sent[1] - sent[0],
        "scored": len(tree.scored_tokens),
        "rows": tree.num_tokens,
        "cut up": sum(p.numel() for layer in model.base_model.layers for p in layer.parameters()),
        "forwards": actions.count("forward") + actions.count("anchor"),
        "backwards": actions.count("backward"),
        "gathered": size * sum(count for what, count in group.seen if "the parameters of" in what),
        "summed": sum(count for what, count in group.seen if "the gradients of" in what),
    }


_FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_FLASH_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class Arithmetic(TorchDispatchMode):
    """Multiplications and additions of all matrix products and of attention, as each is computed."""

    def __init__(self) -> None:
        super().__init__()
        self.flops: dict[str, int] = {}

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found, packet = operator(*args, **(kwargs or {})), operator.overloadpacket
        if packet in (_FLASH, _FLASH_BACKWARD):  # torch counts those of GPUs alone; two products, and five
            products, (query, key) = (2, args[:2]) if packet is _FLASH else (5, args[1:3])
            count = 2 * products * query.numel() * key.shape[-2]
        elif packet in flop_registry:
            count = flop_registry[packet](*args, **(kwargs or {}), out_val=found)
        else:
            return found
        self.flops[str(packet)] = self.flops.get(str(packet), 0) + count
        return found


def arithmetic(size: int, sharded: bool, chunk_tokens: int, live_tokens: int) -> tuple[dict[str, int], dict[str, int]]:
    """FLOPs by operator of a backward pass: of the whole tree alone, and of this rank's part in groups of `size`."""
    counted = []
    random = np.random.default_rng(0)
    stem = random.integers(0, 31, 40)
    tree = PrefixTree.build([np.concatenate([stem, [number], random.integers(0, 31, 30)]) for number in range(6)])
    for group in (None, CountedGroup(size)):
        model = models.make("llama", hidden_size=32, intermediate_size=96, vocab_size=131, max_position_embeddings=128)
        if group is not None and sharded:
            shard_models(model, group, receive)
        engine = TreeEngine(model, chunk_tokens, live_tokens, self_check=False, group=group)
        with Arithmetic() as counter:
            engine.backward(tree, lambda out, _: (out.logprobs + 0.1 * out.entropy).sum(), ("logprobs", "entropy"))
        counted.append(counter.flops)
    return counted[0], counted[1]


DEEP: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_hidden_layers": 12,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 512,
}


def most_held(size: int, sharded: bool, branches: int) -> tuple[int, int, int]:
    """Most bytes of tensors that this rank has during a backward pass beyond those from before (its parameters and
    their gradients), what was estimated, and the number of chunks. The least of three passes: gloo sums copies that its
    threads free, which a profiler does not see, and the more of them the less else runs."""
    group = CountedGroup(size)
    model = models.make("qwen3", **DEEP)
    if sharded:
        shard_models(model, group, receive)
    random = np.random.default_rng(0)
    stem = random.integers(0, 256, 64)
    sequences = [np.concatenate([stem, [number], random.integers(0, 256, 31)]) for number in range(branches)]
    engine = TreeEngine(model, 128, 512, head_tokens=64, self_check=False, group=group)
    run = lambda tree: engine.backward(tree, lambda out, _: out.logprobs.sum())  # noqa: E731
    run(PrefixTree.build(sequences[:2]))  # from now on there are gradients
    tree = PrefixTree.build(sequences)
    plan = engine.plan(tree)
    budgets = plan.chunk_tokens, plan.peak_live_tokens
    estimate = memory.pass_memory(model, *budgets, tree, 64, plan.chunks, ranks=size)
    held = min(peak_bytes(lambda: run(tree), torch.device("cpu")) for _ in range(3))
    return held, estimate.total, len(plan.chunks)


def fits(size: int, free: int) -> list[str]:
    """What a deep model's pass says with so many bytes free: whole on every rank, and in shards."""
    said = []
    for sharded in (False, True):
        group = CountedGroup(size)
        model = models.make("starcoder2", num_hidden_layers=24, hidden_size=128, intermediate_size=512)
        if sharded:
            shard_models(model, group, receive)
        engine = TreeEngine(model, group=group, self_check=False)
        try:
            with patch.object(memory, "free_bytes", lambda device: free):
                engine.backward(PrefixTree.build(families.SEQUENCES), lambda out, _: out.logprobs.sum())
            said.append("")
        except ValueError as error:
            said.append(str(error))
    return said
