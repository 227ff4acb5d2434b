"""Forward and backward of a causal language model over a prefix tree: the public face of `app.tree`.

Promises: for any loss that is a sum over sequences of a differentiable function of that sequence's token
log-probabilities, entropies and values, `backward` accumulates the gradient of running every sequence alone, and for
any differentiable function of all of them `backward_coupled` does, in two passes; memory is bounded by the plan's
budgets; the model is left as it was found (except for `.grad`, and for `grad_dtype` of low-precision parameters, which
makes their gradients accumulate in float32).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from app.tree.attention import BACKENDS, choose_backend, tree_attention_on
from app.tree.checkpointing import checkpointable
from app.tree.cost import ModelShape
from app.tree.dense import DenseExecutor, dense_plan
from app.tree.executor import Executor, check_scalar
from app.tree.heads import Heads
from app.tree.memory import auto_budgets
from app.tree.outputs import OUTPUT_NAMES, FlatOutputs, TreeOutputs
from app.tree.plan import ExecutionPlan
from app.tree.planner import plan
from app.tree.prefix_tree import PrefixTree
from app.tree.refusals import refuse_dropout, refuse_unsupported, transformers_model
from app.tree.self_check import CheckReport, SelfCheckError, compare
from app.tree.timing import CPU_RATES, GPU_RATES, Rates, TimeModel

LossFn = Callable[[Any, Any], Tensor]


class TreeEngine:
    """Runs a model over prefix trees.

    Args:
        model: a transformers causal language model whose layers all attend through transformers' attention interface;
            PEFT adapters inside its layers (LoRA and the like) are trained as they are.
        chunk_tokens: most tokens in one forward; "auto" chooses by device.
        live_tokens: most tokens whose activations are kept at once; "auto" takes what free memory allows.
        attention: attention backend, "auto" or a name in `app.tree.attention.BACKENDS`.
        temperature: > 0; log-probabilities are of softmax(logits / temperature), as the sampler's.
        value_head: maps hidden states [n, H] to values [n] or [n, 1]; default `model.value_head` or `model.score`.
        head_tokens: rows of logits held at a time; "auto" aims at 128 MiB a block.
        checkpointing: whether the planner may choose chunks whose layers run again in backward.
        rates: what the planner predicts times with, from `app.tree.calibrate.measure_rates`; default the device's kind.
        self_check: whether the first backward also runs a small part of its batch densely and compares; see
            `app.tree.self_check`.
        on_mismatch: what happens when they differ: "error", or "fallback" to dense-leaf execution from then on.

    Attributes:
        dense: whether every leaf sequence runs alone, through the model's own attention (after such a fallback).

    Raises:
        ValueError: an argument out of range, or a model this engine would compute wrongly, naming the layer or setting.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        chunk_tokens: int | str = "auto",
        live_tokens: int | str = "auto",
        attention: str = "auto",
        temperature: float = 1.0,
        value_head: nn.Module | None = None,
        head_tokens: int | str = "auto",
        checkpointing: bool = True,
        rates: Rates | None = None,
        self_check: bool = True,
        on_mismatch: Literal["error", "fallback"] = "error",
    ) -> None:
        for name, budget in (("chunk_tokens", chunk_tokens), ("live_tokens", live_tokens)):
            if budget != "auto" and (isinstance(budget, str) or budget < 1):
                raise ValueError(f"{name} must be 'auto' or at least 1 token, got {budget!r}")
        if attention != "auto" and attention not in BACKENDS:
            raise ValueError(f"attention must be 'auto' or one of {sorted(BACKENDS)}, got {attention!r}")
        if not temperature > 0:
            raise ValueError(f"temperature must be above 0, got {temperature}")
        if on_mismatch not in ("error", "fallback"):
            raise ValueError(f"on_mismatch must be 'error' or 'fallback', got {on_mismatch!r}")
        if on_mismatch != "error" and not self_check:
            raise ValueError(f"on_mismatch={on_mismatch!r} has no effect without self_check; set self_check=True")
        self.self_check, self.on_mismatch, self.dense = self_check, on_mismatch, False
        self.model = transformers_model(model)
        refuse_unsupported(self.model)
        self.chunk_tokens, self.live_tokens = chunk_tokens, live_tokens
        self.temperature = temperature
        self.attention = attention
        self.checkpointing, self.rates = checkpointing, rates
        self.value_head = value_head or getattr(self.model, "value_head", None) or getattr(self.model, "score", None)
        self.heads = Heads(self.model, self.value_head, head_tokens)

    def plan(self, tree: PrefixTree) -> ExecutionPlan:
        """The plan that `forward` and `backward` execute for `tree`: of a few candidates within the budgets, the one
        of least predicted time."""
        shape, parameter = ModelShape.of(self.model.config), next(self.model.parameters())
        rates = self.rates or (GPU_RATES if parameter.device.type == "cuda" else CPU_RATES)
        chunk, live = auto_budgets(self.model, self.chunk_tokens, self.live_tokens, tree, self.heads.head_tokens)
        share = shape.checkpoint_share() if self.checkpointing and checkpointable(self.model) else 1.0
        return plan(tree, chunk, live, TimeModel(shape, rates, parameter.element_size()), share)

    def forward(
        self, tree: PrefixTree, want: Sequence[str] = ("logprobs",), temperatures: Any | None = None
    ) -> TreeOutputs:
        """Outputs of every sequence, without gradient.

        Args:
            tree: what to run.
            want: any of "logprobs", "entropy", "values".
            temperatures: float [N], one a sequence, instead of the engine's; sequences that share tokens need
                equal ones (build the tree with `keys`).
        """
        executor = self._executor(tree, want, temperatures)
        with torch.no_grad(), self._pass():
            executor.forward()
        return TreeOutputs(executor.outputs(range(tree.num_sequences)))

    def backward(
        self,
        tree: PrefixTree,
        loss_fn: LossFn,
        want: Sequence[str] = ("logprobs",),
        batched: bool = False,
        temperatures: Any | None = None,
    ) -> float:
        """Accumulates the gradient of the summed loss into `.grad` and returns that sum.

        Args:
            tree, want, temperatures: as in `forward`.
            loss_fn: `loss_fn(out: SequenceOutputs, i: int) -> scalar` for sequence i; with `batched`,
                `loss_fn(out: FlatOutputs, indices: int64 [n]) -> scalar`, the sum over these sequences.
                Every sequence is passed exactly once.

        Raises:
            SelfCheckError: the first time, when the self-check fails; gradients are as before then.
        """
        self._first_use(tree, want)
        executor = self._executor(tree, want, temperatures)
        _accumulate_in_float32(self.model, self.value_head)
        with torch.enable_grad(), self._pass():
            total = executor.backward(loss_fn if batched else _one_by_one(loss_fn))
        return float(total)

    def backward_coupled(
        self,
        tree: PrefixTree,
        loss_fn: Callable[[FlatOutputs], Tensor],
        want: Sequence[str] = ("logprobs",),
        temperatures: Any | None = None,
    ) -> float:
        """Accumulates the gradient of a loss that couples sequences (a statistic of the batch in it, say) into `.grad`
        and returns the loss. Two passes: a forward for all outputs, then `backward_from` their gradients.

        Args:
            tree, want, temperatures: as in `forward`.
            loss_fn: `loss_fn(out: FlatOutputs) -> scalar` of all sequences at once, in the tree's order.
        """
        out = self.forward(tree, want, temperatures).with_gradient()
        with torch.enable_grad():
            loss = loss_fn(out)
            check_scalar(loss, "")
            if loss.requires_grad:
                loss.backward()
        grads = {name: getattr(out, name).grad for name in want}
        used = {name: grad for name, grad in grads.items() if grad is not None}
        if used:
            self.backward_from(tree, used, temperatures)
        return float(loss.detach())

    def backward_from(
        self, tree: PrefixTree, grads: Mapping[str, Tensor | Sequence[Tensor]], temperatures: Any | None = None
    ) -> None:
        """Accumulates the gradient of any loss into `.grad`, given its gradients by the outputs of `forward`.

        Args:
            tree, temperatures: those of the forward whose outputs the loss was made of.
            grads: by name of the output: one tensor [sum of L_i], or one [L_i] a sequence.

        Raises:
            ValueError: naming the output whose gradient has the wrong shape.
        """
        flat: dict[str, Tensor] = {}
        for name, given in grads.items():
            grad = given if isinstance(given, Tensor) else torch.cat(list(given)) if len(given) else torch.zeros(0)
            if grad.shape != (tree.num_dense_tokens,):
                raise ValueError(
                    f"grads['{name}']: expected one gradient a token, {tree.num_dense_tokens} in all, got shape"
                    f" {tuple(grad.shape)}; concatenate those of all sequences in the tree's order"
                )
            flat[name] = grad.detach()
        self._first_use(tree, tuple(flat))
        executor = self._executor(tree, tuple(flat), temperatures)
        executor.set_grads(flat)
        _accumulate_in_float32(self.model, self.value_head)
        with torch.enable_grad(), self._pass():
            executor.backward(None)

    def check(self, tree: PrefixTree, want: Sequence[str] = ("logprobs",)) -> CheckReport | None:
        """Runs the self-check on a small part of `tree`, whatever `self_check` says, and changes nothing. None when
        there is nothing to compare: no sequences, or no trainable parameter."""
        self._check(tree)
        return compare(self, tree, frozenset(want))

    def _first_use(self, tree: PrefixTree, want: Sequence[str]) -> None:
        if not self.self_check or isinstance(want, str) or not set(want) or set(want) - set(OUTPUT_NAMES):
            return  # what `want` lacks is said by the pass itself
        report = self.check(tree, want)
        if report is None:
            return
        self.self_check = False
        if report.passed:
            return
        if self.on_mismatch == "error":
            raise SelfCheckError(
                f"{type(self.model).__name__}: {report}. Some layer mixes tokens past the attention the engine"
                " controls; train it with on_mismatch='fallback' (every sequence alone), or set self_check=False if"
                " you know better"
            )
        self.fall_back(str(report))

    def fall_back(self, findings: str) -> None:
        """From now on every leaf sequence runs alone, through the model's own attention; warns why."""
        warnings.warn(f"{type(self.model).__name__}: {findings}. Falling back to dense-leaf execution", stacklevel=3)
        self.dense = True

    @contextmanager
    def _pass(self) -> Iterator[None]:
        """The model attends over trees inside; scratch memory goes back afterwards."""
        try:
            with nullcontext() if self.dense else tree_attention_on(self.model):
                yield
        finally:
            self.heads.release()

    def _executor(self, tree: PrefixTree, want: Sequence[str], temperatures: Any | None) -> Executor:
        names = frozenset(want)
        if isinstance(want, str) or not names or names - set(OUTPUT_NAMES):
            raise ValueError(f"want: expected a non-empty tuple out of {OUTPUT_NAMES}, got {want!r}")
        if "values" in names and self.value_head is None:
            raise ValueError("want: 'values' needs a value head; pass value_head=... to TreeEngine")
        if names & {"logprobs", "entropy"} and self.heads.projection is None:
            raise ValueError(f"want: {type(self.model).__name__} has no output projection; use a ...ForCausalLM model")
        self._check(tree)
        per_sequence = None if temperatures is None else _temperatures(tree, temperatures)
        backend = choose_backend(self.attention, self.model)
        if self.dense:
            own = dense_plan(tree)
            return DenseExecutor(self.model, self.heads, own, names, self.temperature, per_sequence, backend)
        return Executor(self.model, self.heads, self.plan(tree), names, self.temperature, per_sequence, backend)

    def _check(self, tree: PrefixTree) -> None:
        """Refuses input the model cannot compute, naming the sequence."""
        vocabulary = self.model.get_input_embeddings().weight.shape[0]
        if tree.num_tokens and int(tree.tokens.max()) >= vocabulary:
            i, position, token = _find_token(tree, int(np.argmax(tree.tokens >= vocabulary)))
            raise ValueError(
                f"sequences[{i}]: token id {token} at position {position} is outside the model's vocabulary of"
                f" {vocabulary}; use the tokenizer that belongs to the model"
            )
        longest = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        if longest is not None and tree.num_sequences and int(tree.sequence_length.max()) > longest:
            i = int(tree.sequence_length.argmax())
            raise ValueError(
                f"sequences[{i}] has {int(tree.sequence_length[i])} tokens, more than the model's"
                f" max_position_embeddings of {longest}; shorten it or raise the model's limit"
            )
        for module in (self.model, self.value_head):
            if module is not None:
                refuse_dropout(module)


def _one_by_one(loss_fn: LossFn) -> LossFn:
    """A batched loss from one for single sequences."""

    def batched(out: FlatOutputs, indices: Tensor) -> Tensor:
        losses = [torch.as_tensor(loss_fn(out.sequence(k), i)) for k, i in enumerate(indices.tolist())]
        for i, loss in zip(indices.tolist(), losses):
            check_scalar(loss, f" for sequence {i}")
        return torch.stack(losses).sum()

    return batched


def _temperatures(tree: PrefixTree, temperatures: Any) -> np.ndarray[Any, np.dtype[np.float64]]:
    values = np.asarray(temperatures.detach().cpu() if isinstance(temperatures, Tensor) else temperatures, np.float64)
    if values.shape != (tree.num_sequences,):
        raise ValueError(
            f"temperatures: expected {tree.num_sequences} numbers, one a sequence, got shape {values.shape}"
        )
    if not (values > 0).all():
        raise ValueError(f"temperatures[{int(np.argmin(values > 0))}] must be above 0")
    return values


def _find_token(tree: PrefixTree, token: int) -> tuple[int, int, int]:
    """A sequence that holds a tree token, with the position and the id."""
    for i in range(tree.num_sequences):
        found = np.flatnonzero(tree.sequence_tokens([i]) == token)
        if len(found):
            return i, int(found[0]), int(tree.tokens[token])
    raise AssertionError("every tree token belongs to a sequence")


def _accumulate_in_float32(*modules: nn.Module | None) -> None:
    """Low-precision parameters accumulate their gradients in float32 (bf16 sums over chunks lose whole percents)."""
    for module in modules:
        for parameter in module.parameters() if module is not None else ():
            wanted = torch.promote_types(torch.float32, parameter.dtype)
            if parameter.requires_grad and parameter.grad is None and parameter.dtype != wanted:
                parameter.grad_dtype = wanted
