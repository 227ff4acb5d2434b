"""From hidden states to token log-probabilities, entropies and values, and back.

Promises: only the rows asked for reach the vocabulary, `head_tokens` rows at a time, so [tokens x vocabulary] never
exists; backward computes logits again, except those of the last block where it follows at once; softmax statistics in
float32 (float64 for float64 models); log-probabilities are of softmax(logits / temperature); the logit transform of the
model's own forward (scaling, soft-capping) is applied; entropy costs nothing unless wanted. Where the projection is in
parts over a group of ranks, each has its columns of the logits of all ranks' rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from app.tree.model.vocabulary import CutVocabulary

_aten = torch.ops.aten

_DOT_ELEMENTS = (2**18, 2**24)  # on a CPU and on a GPU, where launches count
BLOCK_BYTES = 128 * 2**20
"""Size of one block of logits that `head_tokens="auto"` aims at; a pass holds two blocks (logits and softmax)."""


@dataclass(frozen=True, eq=False)
class Kept:
    """Log-softmax [n, V] of the last block of a forward, for the backward that follows at once."""

    rows: slice
    log_softmax: Tensor


class Heads:
    """Output projection and optional value head of one model.

    Args:
        model: a causal language model.
        value_head: maps hidden states [n, H] to values [n] or [n, 1], or None.
        head_tokens: rows of logits held at a time, at least 1; as many times more where each has few columns here.

    Attributes:
        vocabulary: the ranks that have the projection in parts, and run these heads together on the same rows; None
            where it is whole. Log-probabilities and entropies are then this rank's terms, as is what `backward`
            returns: they count when summed over the ranks.
    """

    def __init__(self, model: PreTrainedModel, value_head: nn.Module | None, head_tokens: int | str) -> None:
        self.projection: Any = model.get_output_embeddings()
        self.value_head = value_head
        config = model.config.get_text_config()
        vocabulary = CutVocabulary.of(model)
        self.vocabulary = vocabulary if vocabulary is not None and vocabulary.projects else None
        self.vocab_size = config.vocab_size
        self._columns = config.vocab_size if self.vocabulary is None else self.vocabulary.count
        self._divide = getattr(config, "logits_scaling", None)  # Granite
        self._multiply = getattr(config, "logit_scale", None)  # Cohere
        self._softcap = getattr(config, "final_logit_softcapping", None)  # Gemma 2
        if head_tokens != "auto" and (isinstance(head_tokens, str) or head_tokens < 1):
            raise ValueError(f"head_tokens must be 'auto' or an integer of at least 1, got {head_tokens!r}")
        automatic = max(16, BLOCK_BYTES // (4 * self.vocab_size))
        self.head_tokens = automatic if isinstance(head_tokens, str) else head_tokens
        self._scratch: dict[int, Tensor] = {}

    def release(self) -> None:
        """Gives the scratch blocks back; the end of a pass."""
        self._scratch.clear()

    def logits(self, hidden: Tensor) -> Tensor:
        """The model's own logits of hidden states [n, H]: [n, V], or this rank's columns of them."""
        with nullcontext() if self.vocabulary is None else self.vocabulary.logits_in_parts():
            logits: Tensor = self.projection(hidden)
        if self._divide is not None:
            logits = logits / self._divide
        if self._multiply is not None:
            logits = logits * self._multiply
        if self._softcap is not None:
            logits = torch.tanh(logits / self._softcap) * self._softcap
        return logits

    @torch.no_grad()
    def forward(
        self,
        hidden: Tensor,
        targets: Tensor,
        temperature: Tensor | float,
        want: frozenset[str],
        keep: bool = False,
    ) -> tuple[dict[str, Tensor], Kept | None]:
        """Outputs of rows `hidden` [n, H] for `targets` int64 [n]: {name: [n]} in the accumulation dtype.

        Args:
            temperature: a number or [n].
            keep: whether `backward` for the same rows is the next call, which then gets the second result.
        """
        dtype = torch.promote_types(torch.float32, hidden.dtype)
        outputs = {name: torch.empty(len(hidden), dtype=dtype, device=hidden.device) for name in want}
        kept: Kept | None = None
        if want & {"logprobs", "entropy"}:
            for rows in self._blocks(len(hidden)):
                logp = self._log_softmax(hidden[rows], temperature, rows)
                if "logprobs" in want:
                    outputs["logprobs"][rows] = self._pick(logp, targets[rows])
                if "entropy" in want:
                    outputs["entropy"][rows] = -_row_dot(self._exp(logp), logp)
                kept = Kept(rows, logp) if keep else None
        if "values" in want:
            assert self.value_head is not None, "checked when the pass starts"
            outputs["values"] = self.value_head(hidden).reshape(-1).to(dtype)
        return outputs, kept

    def backward(
        self,
        hidden: Tensor,
        targets: Tensor,
        temperature: Tensor | float,
        grads: dict[str, Tensor],
        kept: Kept | None = None,
    ) -> Tensor:
        """Accumulates the heads' parameter gradients and returns the gradient of `hidden` [n, H].

        Args:
            grads: gradients [n] of the outputs of `forward`, by name, in the accumulation dtype.
            kept: what `forward` kept of these rows, when nothing was called in between.
        """
        hidden = hidden.detach()
        grad_hidden = torch.zeros_like(hidden)
        if grads.keys() & {"logprobs", "entropy"}:
            for rows in reversed(list(self._blocks(len(hidden)))):  # the kept block is the last
                logp = kept.log_softmax if kept is not None and kept.rows == rows else None
                kept = None
                grad_hidden[rows] = self._backward_block(
                    hidden[rows], targets[rows], temperature, rows, {n: g[rows] for n, g in grads.items()}, logp
                )
        if "values" in grads:
            assert self.value_head is not None, "checked when the pass starts"
            leaf = hidden.requires_grad_()
            with torch.enable_grad():
                values = self.value_head(leaf).reshape(-1)
            torch.autograd.backward(values, grads["values"].to(values.dtype))
            grad_hidden += leaf.grad if leaf.grad is not None else 0
        return grad_hidden

    def _backward_block(
        self,
        hidden: Tensor,
        targets: Tensor,
        temperature: Tensor | float,
        rows: slice,
        grads: dict[str, Tensor],
        logp: Tensor | None,
    ) -> Tensor:
        """Gradient of one block of rows; with p = softmax(scaled): d logprob = 1[target] - p and
        d entropy = -p (log p + entropy)."""
        in_place = self._in_place(hidden)
        leaf, logits = hidden.detach(), None
        if not in_place:  # hooks, bias, transforms and mixed precision go through autograd
            leaf.requires_grad_()
            with torch.enable_grad():
                logits = self.logits(leaf)
        with torch.no_grad():
            if logp is None:
                logp = self._log_softmax(hidden, temperature, rows, logits)
            if "entropy" in grads:
                probs = self._exp(logp)
                logp += -self._total(_row_dot(probs, logp)).unsqueeze(-1)
                logp *= grads["entropy"].unsqueeze(-1)
                if "logprobs" in grads:
                    logp += grads["logprobs"].unsqueeze(-1)
                grad = probs.mul_(logp).neg_()
            else:
                grad = logp.exp_().mul_(-grads["logprobs"].unsqueeze(-1))
            if "logprobs" in grads:
                self._add(grad, targets, grads["logprobs"])
            grad = _divide(grad, temperature, rows)
            if in_place:
                weight = self.projection.weight
                if weight.requires_grad:
                    if weight.grad is None:
                        weight.grad = torch.zeros_like(weight)
                    _own(weight.grad).addmm_(grad.t(), leaf)
                return grad @ _own(weight)
        assert logits is not None
        torch.autograd.backward(logits, grad.to(logits.dtype))
        assert leaf.grad is not None, "logits depend on the hidden states"
        return leaf.grad

    def _log_softmax(
        self, hidden: Tensor, temperature: Tensor | float, rows: slice, logits: Tensor | None = None
    ) -> Tensor:
        """log softmax(logits / temperature) of a block, [n, V] in the accumulation dtype, free to be overwritten; of
        all columns, also where this rank has some."""
        out: Tensor | None = None
        if logits is None and self._in_place(hidden):
            scaled = torch.mm(hidden, _own(self.projection.weight).t(), out=self._block(0, hidden))
            out = self._block(1, hidden)
        else:
            scaled = (self.logits(hidden) if logits is None else logits.detach()).to(
                torch.promote_types(torch.float32, hidden.dtype), copy=True
            )
        scaled = _divide(scaled, temperature, rows)
        if self.vocabulary is not None:
            return torch.sub(scaled, self.vocabulary.log_of_sum(scaled.logsumexp(-1)).unsqueeze(-1), out=out)
        result: Tensor = scaled.log_softmax(-1) if out is None else _aten._log_softmax.out(scaled, -1, False, out=out)
        return result

    def _pick(self, columns: Tensor, targets: Tensor) -> Tensor:
        """Of each row of a block [n, V] that of its target."""
        if self.vocabulary is not None:
            return self.vocabulary.pick(columns, targets)
        return columns.gather(-1, targets.unsqueeze(-1)).squeeze(-1)

    def _add(self, columns: Tensor, targets: Tensor, values: Tensor) -> None:
        """Adds `values` [n] to a block [n, V] at the rows' targets."""
        if self.vocabulary is not None:
            return self.vocabulary.add_(columns, targets, values)
        columns.scatter_add_(-1, targets.unsqueeze(-1), values.unsqueeze(-1))

    def _total(self, part: Tensor) -> Tensor:
        """Of sums over the columns here [n], those over all columns."""
        return part if self.vocabulary is None else self.vocabulary.sum(part)

    def _exp(self, logp: Tensor) -> Tensor:
        """exp of a block, in the other scratch block where there is one (its logits are used up by then)."""
        scratch = self._scratch.get(0)
        return torch.exp(logp) if scratch is None else torch.exp(logp, out=self._block(0, logp))

    def _block(self, which: int, like: Tensor) -> Tensor:
        """Scratch [n, V]. Fresh memory for every block costs a CPU a page fault for each 4 KiB of it, about as long as
        the softmax itself."""
        scratch = self._scratch.get(which)
        if scratch is None or len(scratch) < len(like) or scratch.dtype != like.dtype:
            scratch = self._scratch[which] = like.new_empty(len(like), self._columns)
        return scratch[: len(like)]

    def _in_place(self, hidden: Tensor) -> bool:
        """Whether the projection is a bare matrix product in the accumulation dtype: then logits are written to
        scratch, and the weight's gradient is accumulated in place, which spares a [V, H] temporary a block."""
        head = self.projection
        return bool(
            type(head) is nn.Linear
            and getattr(head, "bias", None) is None
            and self._divide is None
            and self._multiply is None
            and self._softcap is None
            and not head._forward_hooks
            and not head._forward_pre_hooks
            and not head._backward_hooks
            and not head._backward_pre_hooks
            and not head.weight._backward_hooks
            and not getattr(head.weight, "_post_accumulate_grad_hooks", None)
            and head.weight.dtype == hidden.dtype
            and head.weight.shape[0] == self.vocab_size
            and not torch.is_autocast_enabled(hidden.device.type)
            and (head.weight.grad is None or head.weight.grad.dtype == hidden.dtype)
            and hidden.dtype in (torch.float32, torch.float64)
        )

    def _blocks(self, count: int) -> Iterator[slice]:
        step = self.head_tokens * (1 if self.vocabulary is None else self.vocabulary.group.size)
        for start in range(0, count, step):
            yield slice(start, min(start + step, count))


def _own(weight: Any) -> Tensor:
    """The rows of a weight, or of its gradient, that this rank has."""
    rows: Tensor = weight.to_local() if isinstance(weight, DTensor) else weight
    return rows


def _divide(block: Tensor, temperature: Tensor | float, rows: slice) -> Tensor:
    """`block` [n, V] divided in place by the rows' temperatures."""
    if isinstance(temperature, Tensor):
        return block.div_(temperature[rows].unsqueeze(-1))
    return block if temperature == 1.0 else block.div_(temperature)


def _row_dot(a: Tensor, b: Tensor) -> Tensor:
    """Sum over the last dimension of a * b, both [n, V], a few rows at a time (what caches hold). Not a matrix product:
    those may be told to round to TF32 or bf16 (`torch.set_float32_matmul_precision`), an error of 1e-3 here."""
    rows = max(1, _DOT_ELEMENTS[a.is_cuda] // max(1, a.shape[-1]))
    product = a.new_empty(min(rows, len(a)), a.shape[-1])
    pieces = zip(a.split(rows), b.split(rows), strict=True)
    return torch.cat([torch.mul(x, y, out=product[: len(x)]).sum(-1) for x, y in pieces])
