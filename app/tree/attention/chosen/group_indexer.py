"""Indexers that choose groups of tokens (Qwen 4): so many in a row of a query's own sequence, counted from its first.

transformers' own code goes from query to query and pools the keys of all groups anew for each. Over a tree a group is
known by its last token, whose ancestors are the others: it is pooled once, and seen by the queries that see that token.

Promises: projections and norms are the module's own; scores and choice are the model's formula (relu of each head's
product, summed), a block of queries at a time; nothing waits for the device.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from app.tree.prefix_tree import Ints
from app.tree.transfer import on_device

_SCORE_BYTES = 64 * 2**20
"""Of scores [queries, heads, keys or groups] in float32."""


class IndexKeys(Protocol):
    """In the place of a model's cache."""

    def update_indexer(self, keys: Tensor, layer: int) -> Tensor:
        """Keys [B, n, D] of the next rows -> those of all tokens so far, [B, keys, D]."""
        ...


@dataclass(frozen=True, eq=False)
class Groups:
    """The whole groups of all sequences there are, and what each query sees of them. Places are those of keys.

    Attributes:
        members: int64 [G, size], places of each group's tokens in their order.
        behind: int64 [G], the place behind the last query that sees a group; its last token is the first that does.
        queries: int64 [B or 1, n, size], the place of each query and those of the tokens before it, last first;
            anything where there is none.
        depths: int64 [B or 1, n], how many tokens are before each query.
    """

    members: Tensor
    behind: Tensor
    queries: Tensor
    depths: Tensor

    @classmethod
    def of_tree(cls, depths: Ints, ends: Ints, path: int, size: int, device: torch.device) -> Groups:
        """Of rows behind a path of so many tokens: [path | rows], rows in depth-first order. Of each row int64 [n]:
        `depths`, how many tokens are before it, and `ends`, the row behind its last descendant."""
        count = path + len(ends)
        depths, at = np.concatenate([np.arange(path), depths]), np.arange(count)
        # A token's parent is the last one before it that is less deep by one.
        by_depth = np.sort(depths * count + at)
        before = by_depth[np.searchsorted(by_depth, (depths - 1) * count + at) - 1] % count
        before[depths == 0] = -1
        chain = [at]
        for _ in range(size - 1):
            chain.append(np.where(chain[-1] >= 0, before[chain[-1]], -1))
        tokens = np.stack(chain, 1)
        last = np.flatnonzero((depths + 1) % size == 0)
        behind = np.concatenate([np.full(path, count), path + ends])[last]
        own = on_device(np.ascontiguousarray(tokens[None, path:]), device)
        members = on_device(np.ascontiguousarray(tokens[last, ::-1]), device)
        return cls(members, on_device(behind, device), own, on_device(depths[None, path:], device))

    @classmethod
    def of_sequences(cls, places: Tensor, keys: int, size: int) -> Groups:
        """Of sequences side by side, each with its own keys in order; `places`: int64 [B or 1, n], of the queries."""
        members = torch.arange(keys // size * size, device=places.device).view(-1, size)
        before = torch.arange(size, device=places.device)
        return cls(members, torch.full_like(members[:, 0], keys), places[..., None] - before, places)


def query_blocks(rows: int, scores: int) -> Iterator[slice]:
    """Of so many rows, each of which has `scores`."""
    size = max(1, _SCORE_BYTES // (4 * max(1, scores)))
    for start in range(0, rows, size):
        yield slice(start, min(start + size, rows))


def chooses_groups(indexer: nn.Module) -> bool:
    """Whether an indexer chooses groups of `compress_ratio` tokens, and those behind a query's last whole group: it
    wants the angles of all keys, and gives a mask of its choice."""
    return all(isinstance(getattr(indexer, name, None), int) for name in ("token_budget", "compress_ratio"))


def most_chosen(indexer: Any) -> int:
    """Tokens that one chooses at most: groups, and all but one of another's."""
    most: int = indexer.block_topk * indexer.compress_ratio + indexer.compress_ratio - 1
    return most


@torch.no_grad()
def run_group_indexer(module: Any, arguments: Mapping[str, Any], groups: Groups, total: int, keys: IndexKeys) -> Tensor:
    """What an indexer chooses for queries `hidden_states` [B, n, H], at angles `position_embeddings` ([B or 1, n, r],
    [B or 1, n, r]); `total`: most keys that there will be.

    Returns:
        int32 [B, n, k]: places of keys, -1 where there were fewer; a row may not see all. k is `total` where every row
        chose all that it sees, and only there.
    """
    hidden, angles = arguments["hidden_states"], arguments["position_embeddings"]
    count, rows = hidden.shape[:2]
    projected = module.index_qk_proj(hidden).view(count, rows, -1, module.index_head_dim)
    raw, angles = projected[:, :, -1], tuple(angle.expand(count, -1, -1) for angle in angles)
    parts = (raw, *angles)  # the angles of keys are asked for as well: they lie beside them
    known = keys.update_indexer(torch.cat(parts, -1), module.layer_idx)
    if total <= most_chosen(module):
        return torch.arange(total, dtype=torch.int32, device=hidden.device).expand(count, rows, -1)
    raw, *of_keys = (x.to(y.dtype) for x, y in zip(known.split([y.shape[-1] for y in parts], -1), parts, strict=True))
    rotated = sys.modules[type(module).__module__].apply_rotary_pos_emb
    query = rotated(module.q_layernorm(projected[:, :, :-1]), cos=angles[0], sin=angles[1], unsqueeze_dim=2)
    exact = torch.promote_types(torch.float32, raw.dtype)
    pooled = module.k_layernorm(raw[:, groups.members].to(exact).mean(2).to(raw.dtype))
    cos, sin = (angle[:, groups.members[:, 0]] for angle in of_keys)
    pooled = rotated(pooled.unsqueeze(2), cos=cos, sin=sin, unsqueeze_dim=2).squeeze(2).to(exact)
    first, size = groups.members[:, -1], module.compress_ratio
    best = min(module.block_topk, len(groups.members))
    missing = (module.block_topk - best) * size  # columns, where there are too few groups
    found = list[Tensor]()
    for block in query_blocks(rows, count * query.shape[2] * len(first)):
        scores = torch.einsum("bnhd,bgd->bnhg", query[:, block].to(exact), pooled).relu_().sum(2)
        scores /= module.index_head_dim**0.5
        own = groups.queries[:, block, :1]
        scores.masked_fill_((own < first) | (own >= groups.behind), float("-inf"))
        values, at = scores.topk(best, -1)
        chosen = groups.members[at].masked_fill_(values.isneginf().unsqueeze(-1), -1)
        found.append(nn.functional.pad(chosen.flatten(2), (0, missing), value=-1).int())
    more = torch.arange(size - 1, device=hidden.device) < ((groups.depths + 1) % size).unsqueeze(-1)
    tail = groups.queries[..., : size - 1].masked_fill(~more, -1).int().expand(count, -1, -1)
    return torch.cat([torch.cat(found, 1), tail], -1)
