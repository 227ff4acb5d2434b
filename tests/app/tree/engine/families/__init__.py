"""Model families and what each is checked for: the rows and columns of the support matrix.

Every cell is computed: `cell(row, column)` runs the model through the engine and densely, in small chunks with
recomputation, and returns "yes" or raises; a refusal is the engine's own words. `docs/support_matrix.md` is made of
them (`python -m tests.app.tree.engine.support_matrix`), and tests check both.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cache, partial
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import PreTrainedModel

from app.tree import (
    PrefixTree,
    TreeEngine,
    auto_class,
    quantised_layers,
    quantised_loading,
    settle_quantised,
    whole_weights,
)
from tests.app.tree import models, oracle
from tests.app.tree.engine.families.table import (
    BACKWARD,
    BLOCKS,
    DELTA_RULE,
    EXPERTS,
    FORWARD,
    INDEXED,
    LATENT,
    OTHERS,
    POOLED,
    REFUSED,
    SECTIONS,
    SUPPORTED,
    UNSCALED,
    Family,
    other,
)
from tests.app.tree.losses import SequenceLoss
from tests.app.tree.parity import take_grads

__all__ = ["BLOCKS", "DELTA_RULE", "EXPERTS", "INDEXED", "LATENT", "OTHERS", "POOLED", "SECTIONS", "UNSCALED", "other"]
"""Of the tables, what nothing here reads."""

STEM = [3, 10, 17, 24, 3, 0, 9, 9, 4, 5, 6, 7]
SEQUENCES = [np.array(s) for s in (STEM, [*STEM[:5], 1, 2, 3], [*STEM[:5], 1, 4], STEM[:3], [7], [*STEM[:9], 2, 2, 8])]
LENGTHS = [len(s) for s in SEQUENCES]
_APART = 2.5
"""Where the dense model is 1 from the truth and the engine may be 1.5, on the other side."""
LOW_PRECISION = 1.5
"""bf16 gradients: error against the float64 truth over that of the dense bf16 model, on one small batch."""
KINDS = ("Qwen3", "Gemma 4, shared keys", "GPT-OSS", "DeepSeek-V3", "DeepSeek-V4", "Qwen3.5", "Nemotron-H", "ZAYA")
"""A row for each way in which layers are unlike the first's: what is tested of the others is slow."""


def build(family: Family, dtype: torch.dtype = torch.float32, seed: int = 0, **options: Any) -> PreTrainedModel:
    return models.make(family.type, dtype, seed, **{**family.options, **options}).eval()


def errors(model: Any, dense: Any = None) -> tuple[float, float]:
    """Largest error of log-probabilities, and relative error of gradients; `dense` runs the reference (default: the
    model itself)."""
    loss = SequenceLoss("plain_sum", LENGTHS, 0, ("logprobs",))
    engine, tree = TreeEngine(model, 4, 8, self_check=False), PrefixTree.build(SEQUENCES)
    reference = oracle.dense_forward(dense or model, SEQUENCES)
    _, expected = oracle.dense_backward(dense or model, SEQUENCES, loss)
    out = engine.forward(tree)
    forward = max(float((got - want.logprobs.detach()).abs().max()) for got, want in zip(out.logprobs, reference))
    engine.backward(tree, loss)
    return forward, oracle.relative_error(take_grads(model), expected)[0]


def check_parity(family: Family, model: Any, dense: Any = None) -> None:
    """Raises AssertionError where the model is not to its family's tolerances what `dense` (default: itself) is, or to
    what `dense` is off itself (as delta rules are, or softmaxes of scores that are not scaled)."""
    found, allowed = errors(model, dense), family.tolerances
    if found[0] >= allowed[0] or found[1] >= allowed[1]:
        own = _rounding(dense or model)
        allowed = max(allowed[0], _APART * own[0]), max(allowed[1], _APART * own[1])
    within(found, allowed)


def within(found: tuple[float, float], tolerances: tuple[float, float] = (FORWARD, BACKWARD)) -> None:
    (forward, backward), (allowed_forward, allowed_backward) = found, tolerances
    assert forward < allowed_forward, f"log-probabilities off by {forward:.1e}"
    assert backward < allowed_backward, f"gradients off by {backward:.1e}"


def _rounding(dense: Any) -> tuple[float, float]:
    """What `errors` are between the dense model and itself in float64."""
    exact = copy.deepcopy(dense).double()
    exact.config._experts_implementation = "eager"  # grouped products take no float64
    loss = SequenceLoss("plain_sum", LENGTHS, 0, ("logprobs",))
    pairs = zip(oracle.dense_forward(dense, SEQUENCES), oracle.dense_forward(exact, SEQUENCES))
    forward = max(float((got.logprobs.detach() - want.logprobs.detach()).abs().max()) for got, want in pairs)
    _, truth = oracle.dense_backward(exact, SEQUENCES, loss)
    _, rounded = oracle.dense_backward(dense, SEQUENCES, loss)
    return forward, oracle.relative_error({name: one.double() for name, one in rounded.items()}, truth)[0]


def check_float32(family: Family) -> None:
    check_parity(family, build(family))


def check_tied(family: Family) -> None:
    """Input and output embeddings share their weight, and, once more, do not."""
    for tied in (True, False):
        model = build(family, tie_word_embeddings=tied)
        if tied and not model._tied_weights_keys:
            continue  # a class that never ties
        assert (model.get_input_embeddings().weight is model.get_output_embeddings().weight) == tied
        check_parity(family, model)


def check_checkpointing(family: Family) -> None:
    """Hugging Face's own gradient checkpointing, enabled by the user, in training mode."""
    model = build(family).train()
    dense = copy.deepcopy(model)
    models.checkpoint(model, use_reentrant=False)
    check_parity(family, model, dense)


def quantised(family: Family, dtype: torch.dtype = torch.float32, **options: Any) -> PreTrainedModel:
    """The same model with its linear layers in 4 bit, as transformers loads it."""
    model = build(family, dtype, **options)
    with TemporaryDirectory() as directory:
        model.save_pretrained(directory)
        kept = quantised_loading("nf4", dtype, torch.device("cpu"))
        kind = auto_class(model.config)
        loaded = kind.from_pretrained(
            directory, dtype=dtype, attn_implementation=model.config._attn_implementation, **kept
        )
    settle_quantised(loaded)
    return loaded.eval()


def whole(family: Family, model: PreTrainedModel, **options: Any) -> PreTrainedModel:
    """A plain model with the numbers that `model`, in 4 bit, stands for."""
    plain, layers = build(family, model.dtype, **options), quantised_layers(model)
    assert layers
    fetched = whole_weights(model)(f"{name}.weight" for name in layers)
    plain.load_state_dict(fetched, strict=False)
    return plain


def check_quantised(family: Family) -> None:
    """LoRA beside layers in 4 bit, against the plain model with the numbers that these stand for."""
    model = quantised(family)
    plain = with_lora(family, whole(family, model))
    adapted = with_lora(family, model)
    plain.load_state_dict({n: p for n, p in adapted.named_parameters() if p.requires_grad}, strict=False)
    check_parity(family, adapted, plain)


def check_lora(family: Family) -> None:
    """LoRA on every linear layer but the head: gradients of the adapters, and of nothing else."""
    check_parity(family, with_lora(family, build(family)))


def with_lora(family: Family, model: PreTrainedModel) -> Any:
    torch.manual_seed(0)
    model = get_peft_model(model, LoraConfig(r=2, target_modules=family.adapted, lora_dropout=0.0))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:  # zero at the start, which would hide the gradient of A
            torch.nn.init.normal_(parameter, 0.0, 0.1)
    assert all(("lora_" in name) == p.requires_grad for name, p in model.named_parameters())
    return model


@contextmanager
def short_blocks(model: PreTrainedModel) -> Iterator[None]:
    """Within it delta rules with a decay a channel, the model's own, pad to 16 tokens. By themselves they pad to 64 and
    go through all of these one by one, half of what a dense model takes on sequences of 12; the same numbers, to the
    bit."""
    assert max(LENGTHS) <= 16
    name = "chunk_kimi_delta_attention"
    with pytest.MonkeyPatch.context() as patch:
        for module in {sys.modules[type(part).__module__] for part in model.modules()}:
            if hasattr(module, name):
                patch.setattr(module, name, partial(getattr(module, name), chunk_size=16))
        yield


def _low_precision(family: Family, autocast: bool) -> None:
    loss = SequenceLoss("plain_sum", LENGTHS, 0, ("logprobs",))
    ours, theirs = [], []
    for seed in range(family.models):
        model = build(family, torch.float32 if autocast else torch.bfloat16, seed)
        exact = copy.deepcopy(model).float()  # stands for the truth: 1e-6 beside errors of 1e-2
        with short_blocks(model):
            _, truth = oracle.dense_backward(exact, SEQUENCES, loss)
        with torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext():
            with short_blocks(model):
                _, dense = oracle.dense_backward(model, SEQUENCES, loss)
            TreeEngine(model, 4, 8, self_check=False).backward(PrefixTree.build(SEQUENCES), loss)
        got = take_grads(model)
        assert all(grad.dtype == torch.float32 for grad in got.values() if grad is not None)
        ours.append(distance(got, truth))
        theirs.append(distance(dense, truth))
    # Medians: now and then rounding sends a token to another expert, here or there, which is five times the error.
    ratio = np.median(ours) / np.median(theirs)
    assert ratio < LOW_PRECISION, f"{ratio:.2f} times the error of dense: {ours} and {theirs}"


def distance(got: dict[str, Any], truth: dict[str, torch.Tensor]) -> float:
    error = sum(float((t if got.get(n) is None else got[n].float() - t).square().sum()) for n, t in truth.items())
    return (error / sum(float(t.square().sum()) for t in truth.values())) ** 0.5


COLUMNS: dict[str, Callable[[Family], None]] = {
    "float32": check_float32,
    "bf16": lambda family: _low_precision(family, autocast=False),
    "autocast": lambda family: _low_precision(family, autocast=True),
    "checkpointing": check_checkpointing,
    "LoRA": check_lora,
    "4 bit": check_quantised,
    "tied and untied": check_tied,
}


@cache
def cell(row: str, column: str) -> str:
    """ "yes", or "refused" as the row has it; raises AssertionError when the engine and the dense model differ."""
    family = SUPPORTED[row]
    try:
        COLUMNS[column](family)
    except ValueError as error:
        if column not in family.refused or column not in str(error):
            raise
        return "refused"
    assert column not in family.refused, f"{row} is not refused in {column}"
    return "yes"


@cache
def refusal(row: str) -> str:
    """The engine's words. Raises AssertionError when it computes the model instead."""
    model = build(REFUSED[row])
    try:
        found = errors(model)
    except ValueError as error:
        return str(error)
    raise AssertionError(f"{row} is not refused; errors {found}")
