"""The experts that servers say they sent tokens to, as rows of a table of routes.

A server answers with one array, base64 of int32 [tokens, layers, k], in the last report of a request: of all tokens
from the one that was asked for to the one before the last, those it had cached included, and of all layers of the
model, with zeros for those without experts (SGLang 0.5.21, `--enable-return-routed-experts`).

Promises: an array of another size, or with experts that the model has not, or that a token cannot have been sent to, is
an error and never training data.
"""

from __future__ import annotations

import base64
import binascii
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from app.tree import Routers
from datamodules.inference.export import base_model
from datamodules.inference.protocol import GenerationError

FLAG = "--enable-return-routed-experts"


@dataclass(frozen=True)
class ExpertLayout:
    """What is read of an array: `layers` of `total`, `chosen` of `experts` each, as `dtype`."""

    layers: tuple[int, ...]
    total: int
    chosen: int
    experts: int
    dtype: torch.dtype

    @classmethod
    def of(cls, model: PreTrainedModel) -> ExpertLayout:
        """Raises GenerationError: a model whose choice of experts cannot be replayed."""
        base = base_model(model)
        try:
            found = Routers.of(base)
        except ValueError as error:
            raise GenerationError(f"SGLangEngine.record_experts: {error}") from error
        layers = tuple(one.layer for one in found.all)
        total: int = base.config.get_text_config().num_hidden_layers
        return cls(layers, total, found.shape[1], found.experts, found.dtype)

    def read(self, said: str, tokens: int) -> Tensor:
        """Rows [tokens, layers, k] of what a server said, which may go on behind these tokens. Raises ValueError."""
        try:
            array = np.frombuffer(base64.b64decode(said, validate=True), np.int32)
        except (binascii.Error, ValueError) as error:
            raise ValueError(f"routed_experts is no base64 of int32: {error}") from error
        width = self.total * self.chosen
        if array.size % width or array.size < tokens * width:
            raise ValueError(
                f"routed_experts has {array.size} numbers, where {tokens} tokens of {self.total} layers have"
                f" {self.chosen} experts each"
            )
        rows = array.reshape(-1, self.total, self.chosen)[:tokens, list(self.layers)]
        if rows.size and not 0 <= int(rows.min()) <= int(rows.max()) < self.experts:
            raise ValueError(
                f"routed_experts has experts {rows.min()} to {rows.max()}, where a layer has {self.experts}"
            )
        if bool((np.diff(np.sort(rows), axis=-1) == 0).any()):  # what it never noted is zeros
            raise ValueError(
                "routed_experts has a token that was sent to one expert twice, so it is no record; start the server"
                " with --moe-runner-backend triton, or set SGLangEngine.record_experts to false"
            )
        return torch.from_numpy(np.ascontiguousarray(rows)).to(self.dtype)
