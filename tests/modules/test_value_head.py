"""A value head trains through the same tree engine, in the policy's own pass (what a critic module builds on)."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from app.tree import FlatOutputs, TreeEngine
from modules.ranks import build_tree
from tests.helpers.tiny_policy import make_batch, naive_model, naive_outputs, parameters


def test_policy_and_value_loss_in_one_pass_equal_a_naive_loop() -> None:
    batch = make_batch(groups=2)
    count = int(batch.loss_mask.sum())
    returns = batch.rewards.repeat_interleave(batch.lengths())
    models = [naive_model(), naive_model()]
    torch.manual_seed(1)
    heads = [nn.Linear(16, 1)]
    heads.append(copy.deepcopy(heads[0]))
    pairs = [nn.ModuleDict({"model": model, "head": head}) for model, head in zip(models, heads)]
    optimizers = [torch.optim.SGD(pair.parameters(), lr=0.01) for pair in pairs]

    def loss(out: FlatOutputs, indices: Tensor) -> Tensor:
        flat = batch.flat_index(indices)
        errors = (out.values - returns[flat]) ** 2 - 0.1 * out.logprobs
        return (errors * batch.loss_mask[flat]).sum() / count

    engine = TreeEngine(models[0], chunk_tokens=9, live_tokens=20, value_head=heads[0])
    tree = build_tree(batch, "tree")
    losses = []
    for _ in range(3):
        optimizers[0].zero_grad()
        losses.append(engine.backward(tree, loss, want=("logprobs", "values"), batched=True))
        optimizers[0].step()

        optimizers[1].zero_grad()
        for i, mask in enumerate(batch.split(batch.loss_mask)):
            tokens = batch.sequences()[i]
            hidden = models[1].model(tokens[None]).last_hidden_state[0, :-1]
            values = torch.cat([torch.zeros(1), heads[1](hidden)[:, 0]])
            logp, _ = naive_outputs(models[1], batch, i)
            (((values - batch.rewards[i]) ** 2 - 0.1 * logp)[mask].sum() / count).backward()
        optimizers[1].step()
    got, expected = map(parameters, pairs)
    for name in expected:
        torch.testing.assert_close(got[name], expected[name], atol=2e-6, rtol=0)
    assert losses[-1] < losses[0]
