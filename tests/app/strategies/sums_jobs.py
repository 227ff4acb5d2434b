"""What ranks run in the tests of early sums (importable, hence not in a test file)."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedModel

from app.strategies import DTAStrategy
from app.strategies.ranks.collectives import Communicator, Started
from app.strategies.zero1 import ShardedOptimizer
from app.tree import PrefixTree, TreeEngine
from app.tree.heads.outputs import FlatOutputs
from modules import ActorCriticModule, PolicyModule, build_model
from tests.app.strategies.ranks.late import late_group
from tests.helpers.tiny_policy import CONFIG, Batches, make_batch, parameters, source, trainer

BUCKET = 600  # elements: an embedding has one of its own, a layer a few
CHUNK, LIVE = 8, 24  # tokens: a tree takes several backwards


class Recorded(Communicator):
    """Knows the order in which it began collectives of gradients and weights."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.order: list[str] = []

    def _start(self, what: str, *arguments: Any, **options: Any) -> Started:
        self.order.append(what)
        return super()._start(what, *arguments, **options)


class Model(nn.Module):
    """A policy, and a parameter that nothing uses."""

    def __init__(self, tied: bool, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.policy: PreTrainedModel = build_model(source(**{**CONFIG, "tie_word_embeddings": tied})).to(dtype)
        self.unused = nn.Parameter(torch.ones(3, dtype=dtype))


def communicator(late: bool) -> Recorded:
    if not late:
        return Recorded(dist.group.WORLD, torch.device("cpu"))
    control = dist.new_group(backend="gloo")
    return Recorded(late_group(timeout=60.0, prompt=True), torch.device("cpu"), control)


def train(
    early: bool,
    tied: bool = True,
    dtype: torch.dtype = torch.float32,
    late: bool = False,
    passes: int = 1,
    idle: tuple[int, ...] = (),
    poison: tuple[int, int] | None = None,
) -> dict[str, Any]:
    """Four steps of AdamW on trees of different sizes, clipped.

    Args:
        early: sums may begin in a step's last backward. late: over a group like NCCL's.
        passes: passes over trees in a step; gradients accumulate. idle: ranks without sequences.
        poison: rank and step whose gradient is not finite.

    Returns:
        parameters, gradient norms, skipped steps, how many sums began early in each step, the order of collectives.
    """
    ranks, model = communicator(late), Model(tied, dtype)
    groups = [{"params": [p for p in model.parameters() if (p.dim() > 1) == matrices]} for matrices in (False, True)]
    optimizer = torch.optim.AdamW(groups, lr=0.05)
    sharded = ShardedOptimizer(optimizer, model, ranks, BUCKET)
    engine = TreeEngine(model.policy, chunk_tokens=CHUNK, live_tokens=LIVE, self_check=False)
    norms, skipped, begun = [], [], []
    for step in range(4):
        optimizer.zero_grad()
        for number in range(passes):
            last = early and number == passes - 1
            engine.completing = (lambda roots: sharded.sums.completing(model.parameters(), roots)) if last else None
            factor = float("nan") if poison == (ranks.rank, step) else 1.0
            batch = make_batch(10 * step + number)
            mine = [i for i in range(len(batch)) if i % 7 % ranks.size == ranks.rank and ranks.rank not in idle]
            tree = PrefixTree.build([batch.sequences()[i] for i in mine])

            def loss(out: FlatOutputs, indices: Tensor, factor: float = factor) -> Tensor:
                assert out.logprobs is not None
                return (out.logprobs**2).sum() * (0.01 * factor)

            engine.backward(tree, loss, batched=True)
            if mine:
                assert engine.last_plan is not None and len(engine.last_plan.chunks) > 2
        if not sharded.reduce():
            skipped.append(step)
        begun.append(sharded.sums.early)
        norms.append(sharded.grad_norm)
        sharded.clip_grad_norm_(0.05)
        optimizer.step()
        sharded.gather_parameters()
    found = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    return {"parameters": found, "norms": norms, "skipped": skipped, "early": begun, "order": ranks.order}


class Reads(L.Callback):
    """Looks at gradients where Lightning offers them."""

    def __init__(self) -> None:
        self.missing: set[str] = set()

    def on_after_backward(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self.missing |= {name for name, p in module.named_parameters() if p.requires_grad and p.grad is None}


def fit(early: bool, devices: int, critic: bool = False) -> tuple[dict[str, Tensor], int, set[str]]:
    """Parameters after two batches of two steps, sums that began early in the last one, and gradients that a callback
    which looks for them (where not `early`) did not find."""
    torch.manual_seed(0)
    options = {"critic": "initial", "critic_warmup": 1} if critic else {}
    make: Any = ActorCriticModule if critic else PolicyModule
    module = make(
        source(),
        optimizer=lambda params: torch.optim.AdamW(params, lr=0.02),
        minibatches=2,
        chunk_tokens=CHUNK,
        live_tokens=LIVE,
        **options,
    )
    reads, strategy = Reads(), DTAStrategy(calibrate=False)
    strategy._bucket_elements = BUCKET
    run = trainer(*([] if early else [reads]), devices=devices, strategy=strategy, gradient_clip_val=0.5)
    run.fit(module, Batches([make_batch(), make_batch(1)]))
    assert strategy._sharded is not None
    return parameters(module), strategy._sharded.sums.early, reads.missing


def misuse(how: str) -> str:
    """What is said of a gradient that is added to, or of a collective, after sums began."""
    ranks, model = communicator(late=False), Model(True, torch.float32)
    # With one bucket for all the rank has begun all its sums, which others need not have.
    params = model.policy.parameters() if how == "last" else model.parameters()
    sharded = ShardedOptimizer(torch.optim.SGD(params, lr=0.1), model, ranks, 10**9 if how == "last" else BUCKET)
    engine = TreeEngine(model.policy, self_check=False)
    engine.completing = lambda roots: sharded.sums.completing(model.policy.parameters(), roots)
    tree = PrefixTree.build([make_batch().sequences()[0]])
    engine.backward(tree, lambda out, i: out.logprobs.sum())
    said = ""
    try:
        if how in ("collective", "last"):
            ranks.sum(torch.ones(1))
        else:
            engine.completing = None
            engine.backward(tree, lambda out, i: out.logprobs.sum())
            sharded.reduce()
    except RuntimeError as error:
        said = str(error)
    for bucket in sharded.sums._buckets[: sharded.sums._begun]:
        for param in bucket.params:
            param.grad = None
    sharded.sums.finish()  # the ranks part in order
    return said
