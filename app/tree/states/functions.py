"""The functions of transformers' hybrid layers that carry states, and how each runs over pieces.

Promises: layers keep their own code: projections, gates and norms run once over all rows, and only these functions are
replaced, while a forward with states runs; an argument that would change the result and is not honoured is an error
naming layer and argument. Without states a call is the original's.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from app.tree.states.piece_states import PieceStates

STATES_ARGUMENT = "piece_states"
"""The keyword that carries `PieceStates` through a model's forward to these functions."""

_IMPLIED = frozenset(
    {
        "position_ids",
        "position_embeddings",
        "cache_position",
        "use_cache",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "tree_chunk",
        "slots",
    }
)
"""Arguments models pass along that say nothing of states, or what the pieces already say."""


def causal_convolution(
    original: Callable[..., Tensor],
    states: PieceStates,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    **others: Any,
) -> Tensor:
    """x [1, C, n], weight [C, K] -> [1, C, n]."""
    _refuse(states, others)
    return states.convolution(original, x, weight, bias, activation)


def gated_delta_rule(
    original: Callable[..., Any],
    states: PieceStates,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    chunk_size: int = 64,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    **others: Any,
) -> tuple[Tensor, None]:
    """query and key [1, n, Hk, dk], value [1, n, H, dv], g [1, n, H] or a channel's own [1, n, H, dk], beta [1, n, H]
    -> [1, n, H, dv]; the block size is the scan's own choice."""
    _refuse(states, others | {"output_final_state": output_final_state or None})
    return states.delta_rule(query, key, value, g, beta, use_qk_l2norm_in_kernel), None


def mamba2_scan(
    original: Callable[..., Any],
    states: PieceStates,
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_final_states: bool = False,
    **others: Any,
) -> Tensor:
    """hidden_states [1, n, H, P], dt [1, n, H], A and D [H], B and C [1, n, groups, N] -> [1, n, H, P]."""
    _refuse(states, others | {"return_final_states": return_final_states or None})
    step = dt.to(torch.promote_types(torch.float32, dt.dtype))
    if dt_bias is not None:
        step = step + dt_bias
    if dt_softplus:
        step = torch.nn.functional.softplus(step)
    # Here and not in the scan: a place of a block without a row has a step of 0, which these would move.
    out = states.state_space(hidden_states, step.clamp(*dt_limit), A, B, C)
    return out if D is None else out + D[:, None] * hidden_states


def no_shortcut(original: Callable[..., Any], states: PieceStates, *args: Any, **kwargs: Any) -> None:
    """What kernels do in one call from zeros: None sends the layer through its convolution and its scan."""


FUNCTIONS: dict[str, tuple[str, Callable[..., Any]]] = {
    "causal_conv1d_fn": ("convolution", causal_convolution),
    "torch_chunk_gated_delta_rule": ("scan", gated_delta_rule),
    "chunk_kimi_delta_attention": ("scan", gated_delta_rule),
    "mamba2_chunk_scan": ("scan", mamba2_scan),
}
"""By the name under which layers look them up: the kind of state, and what runs instead."""


SHORTCUTS = {"mamba2_split_conv1d_scan_combined": no_shortcut}
"""Functions that are called before these and may stand for them; what runs instead."""

REFUSED = {
    "mamba_inner_fn": "a Mamba-1 scan starts from zeros alone",
    "mamba_selective_scan": "a Mamba-1 scan starts from zeros alone",
}
"""Functions that cannot continue a state, whatever they are given, and why."""


def carries_state(function: Any) -> bool:
    """Whether a function of a modeling file takes a state to continue."""
    if not inspect.isfunction(function):
        return False
    return not {"initial_state", "initial_states", "conv_state"}.isdisjoint(inspect.signature(function).parameters)


def unknown(original: Callable[..., Any], states: PieceStates, *args: Any, **kwargs: Any) -> Any:
    """What runs instead of a function that carries a state and that nobody has taught to run over pieces."""
    raise ValueError(
        f"layer {states.layer} ({states.owner}) calls {original.__name__}, whose state tree training does not carry;"
        f" known are {sorted(FUNCTIONS)}"
    )


def over_pieces(original: Callable[..., Any], instead: Callable[..., Any]) -> Callable[..., Any]:
    """`original`, but `instead` when it is called within a forward with states."""

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        states = kwargs.pop(STATES_ARGUMENT, None)
        return original(*args, **kwargs) if states is None else instead(original, states, *args, **kwargs)

    return call


def _refuse(states: PieceStates, others: dict[str, Any]) -> None:
    unknown = sorted(name for name, given in others.items() if given is not None and name not in _IMPLIED)
    if unknown:
        raise ValueError(
            f"layer {states.layer} ({states.owner}): unsupported arguments {unknown} of a function that carries states;"
            " they would be ignored silently"
        )
