"""`Critic`: what predicts the return of a state; a head on the policy's hidden states, or a model of its own."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import nn
from transformers import PreTrainedModel

from app.tree import TreeEngine
from modules.model_source import ModelSource, build_model

CriticSource = ModelSource | Literal["shared", "initial"]


class Critic(nn.Module):
    """A value head, which starts at 0 everywhere, and its trunk unless that is the policy's.

    Args:
        source: "shared", on the policy's hidden states; "initial", a copy of the policy's trunk as it is now; or the
            trunk of another model.
        policy: the model being trained.

    Attributes:
        trunk: a transformers model without output projection, or None.
        value_head: hidden states [n, H] -> [n, 1].

    Raises:
        ValueError: a source of another kind.
    """

    def __init__(self, source: CriticSource, policy: PreTrainedModel) -> None:
        super().__init__()
        self.trunk: Any = None
        if source == "initial":
            self.trunk = copy.deepcopy(policy.base_model)
        elif isinstance(source, ModelSource):
            self.trunk = build_model(source).base_model
        elif source != "shared":
            raise ValueError(
                f"critic: '{source}' is not one of shared, initial, nor a model: write critic: {{path: DIR}}"
            )
        model = policy if self.trunk is None else self.trunk
        size = model.config.get_text_config().hidden_size
        self.value_head = nn.Linear(size, 1, dtype=next(model.parameters()).dtype)
        # Zeros draw nothing from the random generator, and advantages begin as rewards.
        nn.init.zeros_(self.value_head.weight)
        nn.init.zeros_(self.value_head.bias)
        self._engine: TreeEngine | None = None

    def engine(self, make_engine: Callable[..., TreeEngine]) -> TreeEngine:
        """That of its own trunk, made when first used."""
        if self._engine is None:
            self._engine = make_engine(self.trunk, self.value_head)
        return self._engine


def explained_variance(values: torch.Tensor, returns: torch.Tensor) -> float | None:
    """1 - var(returns - values) / var(returns): 1 is a perfect critic, 0 one that says the mean; None where all returns
    are equal. Both [M]."""
    if len(returns) < 2 or bool((returns == returns[0]).all()):
        return None
    returns, values = returns.double(), values.double()
    return float(1 - (returns - values).var() / returns.var())
