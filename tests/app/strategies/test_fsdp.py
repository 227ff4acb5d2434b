"""`app.tree` under FSDP2 in a trainer of one's own: ranks that share parameters run the same tree."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from app.tree import PrefixTree, TreeEngine
from tests.app.tree import models
from tests.helpers.rank_pool import RankPool

BUDGETS = [(1000, 1000), (6, 30), (6, 6)]  # one chunk; several whose graphs are kept; several that run twice


def gradients(chunk_tokens: int, live_tokens: int, sharded: bool) -> dict[str, Tensor]:
    """Float64 gradients of a loss that is not linear in its outputs, over a tree with forks of forks."""
    random = np.random.default_rng(0)
    stem = random.integers(0, 31, 9)
    arms = [np.concatenate([stem[:cut], random.integers(0, 31, 6)]) for cut in (9, 9, 5)]
    sequences = [np.concatenate([arm, random.integers(0, 31, length)]) for arm in arms for length in (2, 7)]
    model = models.make("starcoder2", torch.float64)
    if sharded:
        mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
    engine = TreeEngine(model, chunk_tokens, live_tokens, self_check=False)
    tree = PrefixTree.build(sequences)
    engine.backward(
        tree,
        lambda out, _: out.logprobs.square().sum() + out.entropy.tanh().sum(),
        want=("logprobs", "entropy"),
        batched=True,
    )
    found = {}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        grad = parameter.grad
        found[name] = grad.full_tensor() if isinstance(grad, DTensor) else grad
    assert not sharded or any(isinstance(p, DTensor) for p in model.parameters())
    return found


@pytest.mark.parametrize(("chunk_tokens", "live_tokens"), BUDGETS)
def test_gradients_are_those_of_one_process(two_ranks: RankPool, chunk_tokens: int, live_tokens: int) -> None:
    """FSDP2 averages over ranks that all have the same gradient."""
    expected = gradients(chunk_tokens, live_tokens, sharded=False)
    for got in two_ranks.run(gradients, 170.0, chunk_tokens=chunk_tokens, live_tokens=live_tokens, sharded=True):
        assert got.keys() == expected.keys()
        for name, grad in expected.items():
            assert (got[name] - grad).abs().max() <= 1e-12 * max(1.0, float(grad.abs().max())), name
