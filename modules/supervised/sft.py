"""`SFTModule`: supervised training on the same tree engine and strategy; mean negative log-likelihood a trained token.

Promises: the denominator is the number of trained tokens of the whole batch over all ranks; one optimizer step a batch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from app.batch import EvalHandle
from app.tree import FlatOutputs
from modules.metrics import NamedMetrics
from modules.models import ModelSource
from modules.tree_module import TreeModule, objects_among


class SFTModule(TreeModule):
    """Imitates the tokens whose loss mask is set.

    Args:
        model: the policy's weights or configuration.
        tree_options: see `TreeModule`.

    Logs: loss (nats a token), grad_norm, tokens/*; validation: `val/loss`, test: `test/loss`, over all trained tokens.
    """

    evaluates_answers = True

    def __init__(self, model: ModelSource, **tree_options: Any) -> None:
        super().__init__(model, **tree_options)
        self.save_hyperparameters()
        self.save_hyperparameters(ignore=objects_among(self.hparams))
        self.eval_metrics = NamedMetrics(means=("loss",))

    def loss(self, out: FlatOutputs, columns: dict[str, Tensor]) -> Tensor:
        assert out.logprobs is not None
        return -(out.logprobs * columns["weights"]).sum()

    def evaluate(self, handle: EvalHandle) -> None:
        self.ranks.lead(handle, self._score)

    def _score(self, handle: EvalHandle) -> None:
        """Rank 0."""
        batch = self.checked_batch(handle)
        logprobs = self.ranks.outputs(batch, {"policy": ["logprobs"]})["policy"]["logprobs"]
        self.eval_metrics.update({"loss": (-torch.sum(logprobs, dtype=torch.float64), batch.loss_mask.sum())})
