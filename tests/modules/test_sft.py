"""`SFTModule`: equals a naive dense loop, learns, and reports the loss it trains."""

from __future__ import annotations

import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, LambdaCallback

from app.batch import RolloutBatch
from modules import SFTModule
from tests.helpers.tiny_policy import (
    Batches,
    fit,
    make_batch,
    naive_model,
    naive_outputs,
    naive_training,
    parameters,
    sgd,
    source,
    trainer,
)


def naive_loss(model: torch.nn.Module, batch: RolloutBatch, i: int, chosen: list[int]) -> torch.Tensor:
    logp, _ = naive_outputs(model, batch, i)
    return -logp[batch.split(batch.loss_mask)[i]].sum() / int(batch.loss_mask.sum())


@pytest.mark.parametrize("mode", ["dta", "sparse", "disabled"])
def test_three_steps_equal_a_naive_dense_loop(mode: str) -> None:
    data = [make_batch(k, recorded=False) for k in range(3)]
    module = SFTModule(source(), optimizer=sgd, tree_training_mode=mode)  # type: ignore[arg-type]
    fit(module, data)
    model = naive_model()
    naive_training(model, data, lambda batch, number: [list(range(len(batch)))], naive_loss)
    got, expected = parameters(module.policy), parameters(model)
    for name in expected:
        torch.testing.assert_close(got[name], expected[name], atol=1e-6, rtol=0)


def test_weights_are_averaged_by_lightning() -> None:
    seen: list[dict[str, torch.Tensor]] = []
    each = LambdaCallback(on_train_batch_end=lambda trainer, module, *_: seen.append(parameters(module)))
    module, data = SFTModule(source(), optimizer=sgd), [make_batch(k, recorded=False) for k in range(2)]
    trainer(each, EMAWeightAveraging(decay=0.25)).fit(module, Batches(data, held_out=[data[0]]))
    for name, value in parameters(module).items():
        torch.testing.assert_close(value, 0.25 * seen[0][name] + 0.75 * seen[1][name])


def test_learns_and_validates(capsys: pytest.CaptureFixture[str]) -> None:
    batch = make_batch(groups=2, recorded=False)
    module = SFTModule(source(), optimizer=lambda p: torch.optim.AdamW(p, lr=0.02))
    losses = [step["loss"] for step in fit(module, [batch] * 40)]
    assert losses[0] > 2.5 and losses[-1] < 0.6 * losses[0]
    [line] = [line for line in "".join(capsys.readouterr()).splitlines() if line.startswith("tree engine: ")]
    assert line.startswith("tree engine: attention sdpa, logits plain in blocks of ")
    [metrics] = trainer().validate(module, Batches([], held_out=[batch, make_batch(3)]), verbose=False)
    with torch.no_grad():
        total = count = 0.0
        for held_out in (batch, make_batch(3)):
            tokens = int(held_out.loss_mask.sum())
            total += sum(float(naive_loss(module.policy, held_out, i, [])) for i in range(len(held_out))) * tokens
            count += tokens
    assert metrics == {"val/loss": pytest.approx(total / count, rel=1e-5)}
