"""Dense reference for recorded experts: the untouched model, whose routers' answers are made anew for given experts
from the router's own logits, by each family's formula as it is written down here. Nothing of `app.tree` is used."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tests.app.tree.engine.families import SUPPORTED, build

Weigh = Callable[[Any, Tensor, Tensor], Tensor]
Table = npt.NDArray[Any]


def _softmax(router: Any, logits: Tensor, experts: Tensor) -> Tensor:
    return logits.softmax(-1).gather(1, experts)


def _softmax_normed(router: Any, logits: Tensor, experts: Tensor) -> Tensor:
    return logits.gather(1, experts).softmax(-1)  # the same as dividing softmax by its sum over these


def _sigmoid(router: Any, logits: Tensor, experts: Tensor) -> Tensor:
    scores = logits.sigmoid().gather(1, experts)
    if router.norm_topk_prob:
        scores = scores / (scores.sum(-1, keepdim=True) + 1e-20)
    return scores * router.routed_scaling_factor


def _sigmoid_alone(router: Any, logits: Tensor, experts: Tensor) -> Tensor:
    return logits.gather(1, experts).sigmoid()


def _sigmoid_normed(router: Any, logits: Tensor, experts: Tensor) -> Tensor:
    scores = logits.sigmoid().gather(1, experts)
    return scores / scores.sum(-1, keepdim=True)


def _sqrt_softplus(router: Any, logits: Tensor, experts: Tensor) -> Tensor:
    scores = nn.functional.softplus(logits).sqrt().gather(1, experts)
    return scores / (scores.sum(-1, keepdim=True) + 1e-20) * router.routed_scaling_factor


FAMILIES: dict[str, Weigh] = {
    "Qwen3-MoE": _softmax,
    "Mixtral": _softmax_normed,
    "GPT-OSS": _softmax_normed,
    "Llama 4": _sigmoid_alone,
    "DeepSeek-V3": _sigmoid,
    "DeepSeek-V3.2": _sigmoid,
    "DeepSeek-V4": _sqrt_softplus,
    "GLM-5": _sigmoid,
    "GLM-5.3": _sigmoid,
    "MiniMax-M3": _sigmoid_normed,
    "Qwen3.5-MoE": _softmax_normed,
    "Qwen3-Next": _softmax_normed,
    "Qwen 4 (experimental)": _softmax_normed,
    "Nemotron-H": _sigmoid,
    "Granite 4": _softmax_normed,
    "Kimi Linear": _sigmoid,
    "Ling 3": _sigmoid,
}
"""All families of the support matrix with experts."""


def model_of(row: str, dtype: torch.dtype = torch.float32, seed: int = 0) -> PreTrainedModel:
    """One with eight experts in every layer that has any, so that random ones are other ones."""
    more = {name: 8 for name in ("num_experts", "num_local_experts", "n_routed_experts")}
    options = SUPPORTED[row].options
    return build(SUPPORTED[row], dtype, seed, **{k: v for k, v in more.items() if k in options})


def routers(model: nn.Module) -> list[Any]:
    """By what they are called."""
    return [m for m in model.modules() if type(m).__name__.lower().endswith(("topkrouter", "llama4router"))]


def random_table(model: nn.Module, rows: int, seed: int = 0) -> Table:
    """[rows, layers, k]: distinct experts for each token and layer."""
    random, found = np.random.default_rng(seed), routers(model)
    drawn = [random.random((rows, one.num_experts)).argsort(1)[:, : one.top_k] for one in found]
    return np.stack(drawn, 1)


@contextmanager
def forced(model: nn.Module, row: str, experts: Tensor, known: Tensor) -> Iterator[None]:
    """Inside, the next forward's tokens [n] go to `experts` [n, layers, k] where they are `known` [n]."""
    handles = []
    for place, router in enumerate(routers(model)):

        def answer(module: Any, args: Any, out: Any, place: int = place) -> Any:
            there = experts[:, place]
            if len(out) == 2:  # a weight of every expert, 0 of most
                weights, logits = out
                weighed = torch.zeros_like(weights).scatter(1, there, FAMILIES[row](module, logits, there))
                return torch.where(known[:, None], weighed, weights), logits
            logits, weights, own = out
            made = FAMILIES[row](module, logits.to(torch.promote_types(torch.float32, logits.dtype)), there)
            chosen = torch.where(known[:, None], there, own)
            return logits, torch.where(known[:, None], made.to(weights.dtype), weights), chosen

        handles.append(router.register_forward_hook(answer))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def own_choice(model: PreTrainedModel, sequences: list[Any]) -> Table:
    """[sum of L_i, layers, k]: what the model's routers choose themselves, run densely, in their own order."""
    found: list[list[Tensor]] = [[] for _ in routers(model)]
    handles = [
        router.register_forward_hook(
            lambda module, args, out, seen=seen: seen.append(
                out[1].topk(module.top_k, -1)[1] if len(out) == 2 else out[2]
            )
        )
        for router, seen in zip(routers(model), found)
    ]
    with torch.no_grad():
        for tokens in sequences:
            model(input_ids=torch.as_tensor(tokens)[None], use_cache=False)
    for handle in handles:
        handle.remove()
    return torch.stack([torch.cat(seen) for seen in found], 1).numpy()
