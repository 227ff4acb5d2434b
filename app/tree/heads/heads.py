"""From hidden states to token log-probabilities, entropies and values, and back.

Promises: only the rows asked for reach the vocabulary, `head_tokens` rows at a time, so [tokens x vocabulary] never
exists; backward computes logits again, except those of the last block where it follows at once; softmax statistics in
float32 (float64 for float64 models); log-probabilities are of softmax(logits / temperature); the logit transform of the
model's own forward (scaling, soft-capping) is applied; entropy costs nothing unless wanted, nor do columns beside the
targets (`app.tree.heads.soft`). Where the projection is in parts over a group of ranks, each has its columns of the
logits of all ranks' rows.

A projection that is a bare matrix product has its weight's gradient accumulated in place, in the accumulation dtype, by
one product a block: in low precision autograd would make a rounded [V, H], a float32 copy of it and a sum. On CUDA
devices with Triton, softmax and gradient are one pass each over a block of logits (`app.tree.heads.fused`). Hooks,
biases and transforms go through autograd.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from app.tree.attention.kernels import AMPERE, triton_lacks
from app.tree.heads.scaling import logits_scaling
from app.tree.heads.soft import Likeliest, Soft, SoftTargets
from app.tree.model.projections import add_product
from app.tree.model.vocabulary import CutVocabulary

Way = Literal["fused", "plain", "autograd"]
_FROM_LOGITS = frozenset({"logprobs", "entropy", "soft"})

_DOT_ELEMENTS = (2**18, 2**24)  # on a CPU and on a GPU, where launches count
_CPU_BLOCK, _GPU_BLOCK, _GPU_PART = 128 * 2**20, 1280 * 2**20, 64
_LEAST_ROWS = 16


@dataclass(frozen=True, eq=False)
class Kept:
    """The last block of a forward, for the backward that follows at once: logits [n, V] where the gradient is made of
    them in one pass, else their log-softmax."""

    rows: slice
    block: Tensor


class Heads:
    """Output projection and optional value head of one model.

    Args:
        model: a causal language model.
        value_head: maps hidden states [n, H] to values [n] or [n, 1], or None.
        head_tokens: rows of logits held at a time, at least 1; "auto": on CPUs 128 MiB of float32 logits (the caches
            count, and fresh memory is slow), on GPUs what fits 1.25 GiB or a 64th of the memory with all copies of a
            logit, thousands of rows, because every block reads the whole weight and its whole gradient. As many times
            more where each has few columns here.
        device: where it will run; default where the projection is.

    Attributes:
        vocabulary: the ranks that have the projection in parts, and run these heads together on the same rows; None
            where it is whole. Log-probabilities and entropies are then this rank's terms, as is what `backward`
            returns: they count when summed over the ranks.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        value_head: nn.Module | None,
        head_tokens: int | str,
        device: torch.device | None = None,
    ) -> None:
        self.projection: Any = model.get_output_embeddings()
        self.value_head = value_head
        config = model.config.get_text_config()
        vocabulary = CutVocabulary.of(model)
        self.vocabulary = vocabulary if vocabulary is not None and vocabulary.projects else None
        self.vocab_size = config.vocab_size
        self._columns = config.vocab_size if self.vocabulary is None else self.vocabulary.count
        self._divide, self._multiply, self._softcap = logits_scaling(model)
        if head_tokens != "auto" and (isinstance(head_tokens, str) or head_tokens < 1):
            raise ValueError(f"head_tokens must be 'auto' or an integer of at least 1, got {head_tokens!r}")
        self._given = None if isinstance(head_tokens, str) else head_tokens
        self._device = device
        self._scratch: dict[str, Tensor] = {}

    @property
    def head_tokens(self) -> int:
        """Rows of logits held at a time."""
        if self._given is not None:
            return self._given
        device = self._where()
        room, each = (_gpu_block(device), self._logit_bytes()) if device.type == "cuda" else (_CPU_BLOCK, 4)
        return max(_LEAST_ROWS, room // (each * self.vocab_size))

    def block_bytes(self, rows: int) -> int:
        """Bytes that a block of `rows` rows takes at most, forward or backward, with what autograd makes of the
        weight's gradient where that is not accumulated in place."""
        if self.projection is None:
            return 0
        weight = getattr(self.projection, "weight", None)
        weight, passing = None if weight is None else _own(weight), 0
        if self.way() == "autograd" and weight is not None and weight.requires_grad:
            passing = weight.numel() * (weight.element_size() + (4 if weight.element_size() < 4 else 0))
        elif weight is not None and self._computes_in() != weight.dtype:
            passing = weight.numel() * self._computes_in().itemsize  # the weight, rounded once a pass
        return rows * self.vocab_size * self._logit_bytes() + passing

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
        soft: Soft | None = None,
    ) -> tuple[dict[str, Tensor], Kept | None]:
        """Outputs of rows `hidden` [n, H] for `targets` int64 [n]: {name: [n]} in the accumulation dtype.

        Args:
            temperature: a number or [n].
            keep: whether `backward` for the same rows is the next call, which then gets the second result.
            soft: of these rows; `backward` is given the same.
        """
        dtype = torch.promote_types(torch.float32, hidden.dtype)
        outputs = {name: torch.empty(len(hidden), dtype=dtype, device=hidden.device) for name in want}
        kept: Kept | None = None
        if want & _FROM_LOGITS:
            for rows in self._blocks(len(hidden), soft):
                beside = None if soft is None else soft[rows]
                found, block = self._outputs_block(hidden[rows], targets[rows], _of(temperature, rows), want, beside)
                for name, values in found.items():
                    outputs[name][rows] = values
                kept = Kept(rows, block) if keep else None
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
        soft: Soft | None = None,
    ) -> Tensor:
        """Accumulates the heads' parameter gradients and returns the gradient of `hidden` [n, H].

        Args:
            grads: gradients [n] of the outputs of `forward`, by name, in the accumulation dtype.
            kept: what `forward` kept of these rows, when nothing was called in between.
        """
        hidden = hidden.detach()
        grad_hidden = torch.zeros_like(hidden)
        if grads.keys() & _FROM_LOGITS:
            for rows in reversed(list(self._blocks(len(hidden), soft))):  # the kept block is the last
                block = kept.block if kept is not None and kept.rows == rows else None
                kept, beside = None, None if soft is None else soft[rows]
                by_name = {name: grad[rows] for name, grad in grads.items()}
                grad_hidden[rows] = self._backward_block(
                    hidden[rows], targets[rows], _of(temperature, rows), by_name, block, beside
                )
        if "values" in grads:
            assert self.value_head is not None, "checked when the pass starts"
            leaf = hidden.requires_grad_()
            with torch.enable_grad():
                values = self.value_head(leaf).reshape(-1)
            torch.autograd.backward(values, grads["values"].to(values.dtype))
            grad_hidden += leaf.grad if leaf.grad is not None else 0
        return grad_hidden

    def _outputs_block(
        self, hidden: Tensor, targets: Tensor, temperature: Tensor | float, want: frozenset[str], soft: Soft | None
    ) -> tuple[dict[str, Tensor], Tensor]:
        """Outputs of one block of rows, and what `Kept` keeps of it."""
        way, rounded = self.way(hidden, soft), hidden.to(self._computes_in(hidden))
        if way == "fused":
            operators, logits = _fused_operators(), self._logits_block(rounded)
            logprobs, entropy = operators.softmax_outputs(
                logits, targets, _a_row(temperature, targets), "entropy" in want
            )
            return {name: x for name, x in (("logprobs", logprobs), ("entropy", entropy)) if name in want}, logits
        logp, found = self._log_softmax(rounded, temperature, self.logits(hidden) if way == "autograd" else None), {}
        if "logprobs" in want:
            found["logprobs"] = self._pick(logp, targets)
        if "entropy" in want:
            found["entropy"] = -_row_dot(self._exp(logp), logp)
        if "soft" in want:
            assert isinstance(soft, SoftTargets), "checked when the pass starts"
            columns = zip(soft.ids.unbind(-1), soft.weights.unbind(-1), strict=True)
            found["soft"] = torch.stack([weights * self._pick(logp, ids) for ids, weights in columns]).sum(0)
        if isinstance(soft, Likeliest):
            soft.keep(logp)
        return found, logp

    def _backward_block(
        self,
        hidden: Tensor,
        targets: Tensor,
        temperature: Tensor | float,
        grads: dict[str, Tensor],
        block: Tensor | None,
        soft: Soft | None,
    ) -> Tensor:
        """Gradient of the hidden states of one block of rows; that of the weight is accumulated. `block`: what was kept
        of it."""
        way = self.way(hidden, soft)
        if way == "autograd":
            leaf = hidden.detach().requires_grad_()
            with torch.enable_grad():
                logits = self.logits(leaf)
            with torch.no_grad():
                grad = self._logit_gradient(hidden, targets, temperature, grads, block, soft, logits)
            torch.autograd.backward(logits, grad.to(logits.dtype))
            assert leaf.grad is not None, "logits depend on the hidden states"
            return leaf.grad
        rounded = hidden.to(self._computes_in(hidden))
        with torch.no_grad(), torch.autocast(hidden.device.type, enabled=False):
            if way == "fused":
                grad = self._logits_block(rounded) if block is None else block
                by_logprob, by_entropy = grads.get("logprobs"), grads.get("entropy")
                _fused_operators().softmax_gradient_(
                    grad, targets, _a_row(temperature, targets), by_logprob, by_entropy
                )
                low = grad
            else:
                grad = low = self._logit_gradient(rounded, targets, temperature, grads, block, soft)
                if grad.dtype != rounded.dtype:
                    low = self._block("logits", rounded).copy_(grad)
            weight = self.projection.weight
            if weight.requires_grad:
                if weight.grad is None:
                    weight.grad = torch.zeros_like(weight, dtype=torch.promote_types(torch.float32, weight.dtype))
                _add_product(_own(weight.grad), grad, low, rounded)
            return torch.mm(low, self._weight(low.dtype)).to(hidden.dtype)

    def _logit_gradient(
        self,
        hidden: Tensor,
        targets: Tensor,
        temperature: Tensor | float,
        grads: dict[str, Tensor],
        logp: Tensor | None,
        soft: Soft | None,
        logits: Tensor | None = None,
    ) -> Tensor:
        """Gradient [n, V] of a block's logits, in the accumulation dtype; with p = softmax(logits / temperature):
        d logprob = 1[target] - p, d entropy = -p (log p + entropy), d soft = weights at their columns - sum(weights) p.
        """
        if logp is None:
            logp = self._log_softmax(hidden, temperature, logits)
        picks = [(targets, grads["logprobs"])] if "logprobs" in grads else []
        if "soft" in grads:
            assert isinstance(soft, SoftTargets), "checked when the pass starts"
            picks += list(zip(soft.ids.unbind(-1), (grads["soft"].unsqueeze(-1) * soft.weights).unbind(-1)))
        if "entropy" in grads:
            probs = self._exp(logp)
            logp += -self._total(_row_dot(probs, logp)).unsqueeze(-1)
            logp *= grads["entropy"].unsqueeze(-1)
            if picks:
                logp += torch.stack([values for _, values in picks]).sum(0).unsqueeze(-1)
            grad = probs.mul_(logp).neg_()
        else:
            grad = logp.exp_().mul_(-torch.stack([values for _, values in picks]).sum(0).unsqueeze(-1))
        for columns, values in picks:
            self._add(grad, columns, values)
        return _divided(grad, temperature)

    def _log_softmax(self, hidden: Tensor, temperature: Tensor | float, logits: Tensor | None) -> Tensor:
        """log softmax(logits / temperature) of a block, [n, V] in the accumulation dtype, free to be overwritten; of
        all columns, also where this rank has some. `logits`: those of a projection that is not bare."""
        dtype, out = torch.promote_types(torch.float32, hidden.dtype), None
        if logits is not None:
            scaled = logits.detach().to(dtype, copy=True)
        else:
            scaled = self._logits_block(hidden)
            if scaled.dtype != dtype:
                scaled = self._block("scaled", scaled, dtype).copy_(scaled)
            out = self._block("softmax", scaled)
        scaled = _divided(scaled, temperature)
        if self.vocabulary is not None:
            return torch.sub(scaled, self.vocabulary.log_of_sum(scaled.logsumexp(-1)).unsqueeze(-1), out=out)
        if out is None:
            return scaled.log_softmax(-1)
        result: Tensor = torch.ops.aten._log_softmax.out(scaled, -1, False, out=out)
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

    def _logits_block(self, hidden: Tensor) -> Tensor:
        """Logits [n, V] of a bare projection, in scratch and in the dtype of `hidden`."""
        return torch.mm(hidden, self._weight(hidden.dtype).t(), out=self._block("logits", hidden))

    def _weight(self, dtype: torch.dtype) -> Tensor:
        """The projection's weight [V, H], what this rank has of it; rounded once a pass where it is kept in more."""
        weight = _own(self.projection.weight).detach()
        if weight.dtype == dtype:
            return weight
        if "weight" not in self._scratch:
            self._scratch["weight"] = weight.to(dtype)
        return self._scratch["weight"]

    def _exp(self, logp: Tensor) -> Tensor:
        """exp of a block, in the scratch block that its logits have left where there is one."""
        name = "scaled" if "scaled" in self._scratch else "logits"
        return torch.exp(logp, out=self._block(name, logp)) if name in self._scratch else torch.exp(logp)

    def _block(self, name: str, like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Scratch [n, V]. Fresh memory for every block costs a CPU a page fault for each 4 KiB of it, about as long as
        the softmax itself."""
        scratch, dtype = self._scratch.get(name), dtype or like.dtype
        if scratch is None or len(scratch) < len(like) or scratch.dtype != dtype:
            scratch = self._scratch[name] = like.new_empty(len(like), self._columns, dtype=dtype)
        return scratch[: len(like)]

    def way(self, hidden: Tensor | None = None, soft: Soft | None = None) -> Way:
        """How blocks are computed, of these hidden states, or of any that the model itself would make. Kernels know one
        column a row."""
        dtype = self._computes_in(hidden)
        if not self._is_bare(dtype):
            return "autograd"
        whole = self.vocabulary is None and soft is None  # a softmax over ranks asks them in the middle
        return "fused" if whole and dtype != torch.float64 and _has_kernels(self._where()) else "plain"

    def _is_bare(self, dtype: torch.dtype) -> bool:
        """Whether the projection is nothing but a matrix product in this dtype, with a gradient that sums may be added
        to: then logits are written to scratch, and the weight's gradient is accumulated in place."""
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
            and isinstance(head.weight.data, DTensor) == (self.vocabulary is not None)
            and head.weight.shape[0] == self.vocab_size
            and (head.weight.dtype == dtype or self._rounds_weight())
            and head.weight.is_floating_point()
            and (
                head.weight.grad is None
                or head.weight.grad.dtype == torch.promote_types(torch.float32, head.weight.dtype)
            )
        )

    def _computes_in(self, hidden: Tensor | None = None) -> torch.dtype:
        """The dtype of the projection's product."""
        device = self._where().type
        if torch.is_autocast_enabled(device):
            return torch.get_autocast_dtype(device)
        if hidden is None and self.vocabulary is not None:
            return self.vocabulary.dtype
        return next(self.projection.parameters()).dtype if hidden is None else hidden.dtype

    def _where(self) -> torch.device:
        if self._device is None and self.projection is not None:
            return next(self.projection.parameters()).device
        return self._device or torch.device("cpu")

    def _logit_bytes(self, soft: Soft | None = None) -> int:
        """Bytes of all copies of one logit that exist at a time: as the projection computes it, and in the accumulation
        dtype, scaled and as a softmax; autograd makes a gradient of its own."""
        element = self._computes_in().itemsize
        kept = max(4, element)
        copies = {"fused": element, "plain": 2 * kept + (element if element < kept else 0)}
        passing = 0 if self.vocabulary is None else kept  # a sum of exponentials, taken by itself
        return copies.get(self.way(soft=soft), 2 * element + 3 * kept) + passing

    def _rounds_weight(self) -> bool:
        """Whether the weight is kept in a higher precision than it computes in."""
        return self.vocabulary is not None or torch.is_autocast_enabled(self._where().type)

    def _blocks(self, count: int, soft: Soft | None) -> Iterator[slice]:
        step = self.head_tokens * (1 if self.vocabulary is None else self.vocabulary.group.size)
        if soft is not None:  # where kernels would have kept fewer copies of a logit
            step = max(1, step * self._logit_bytes() // self._logit_bytes(soft))
        for start in range(0, count, step):
            yield slice(start, min(start + step, count))


def _own(weight: Any) -> Tensor:
    """The rows of a weight, or of its gradient, that this rank has."""
    rows: Tensor = weight.to_local() if isinstance(weight, DTensor) else weight
    return rows


def _of(temperature: Tensor | float, rows: slice) -> Tensor | float:
    return temperature[rows] if isinstance(temperature, Tensor) else temperature


def _a_row(temperature: Tensor | float, like: Tensor) -> Tensor:
    """One temperature a row, float32 [n]."""
    if isinstance(temperature, Tensor):
        return temperature.float()
    return torch.full(like.shape, temperature, dtype=torch.float32, device=like.device)


def _divided(block: Tensor, temperature: Tensor | float) -> Tensor:
    """`block` [n, V] divided in place by the rows' temperatures."""
    if isinstance(temperature, Tensor):
        return block.div_(temperature.unsqueeze(-1))
    return block if temperature == 1.0 else block.div_(temperature)


def _add_product(total: Tensor, exact: Tensor, low: Tensor, hidden: Tensor) -> None:
    """Adds grad.T @ hidden to `total` [V, H] without a temporary of its size. The gradient [n, V] of the logits is
    given as computed (`exact`) and in the dtype of `hidden` (`low`): CUDA devices multiply the latter with sums in
    float32, others have no such product and multiply the former."""
    if low.dtype == total.dtype or total.device.type == "cuda":
        add_product(total, low, hidden)
    else:
        total.addmm_(exact.t().to(total.dtype), hidden.to(total.dtype))


def _has_kernels(device: torch.device) -> bool:
    """Whether softmax and gradient run as fused kernels there: where Triton compiles for the device."""
    if device.type != "cuda" or triton_lacks() is not None:
        return False
    gpu = _properties(device)
    return gpu is None or (gpu.major, gpu.minor) >= AMPERE


def _fused_operators() -> Any:
    from app.tree.heads import fused  # needs Triton, which CPUs do without

    return fused


def _gpu_block(device: torch.device) -> int:
    """Bytes for a block on a GPU."""
    gpu = _properties(device)
    return _GPU_BLOCK if gpu is None else min(_GPU_BLOCK, gpu.total_memory // _GPU_PART)


def _properties(device: torch.device) -> Any:
    """Of a GPU; None for one of another machine, for which a plan is made."""
    try:
        return torch.cuda.get_device_properties(device)
    except (AssertionError, RuntimeError):  # a build without CUDA; no device
        return None


def _row_dot(a: Tensor, b: Tensor) -> Tensor:
    """Sum over the last dimension of a * b, both [n, V], a few rows at a time (what caches hold). Not a matrix product:
    those may be told to round to TF32 or bf16 (`torch.set_float32_matmul_precision`), an error of 1e-3 here."""
    rows = max(1, _DOT_ELEMENTS[a.is_cuda] // max(1, a.shape[-1]))
    product = a.new_empty(min(rows, len(a)), a.shape[-1])
    pieces = zip(a.split(rows), b.split(rows), strict=True)
    return torch.cat([torch.mul(x, y, out=product[: len(x)]).sum(-1) for x, y in pieces])
