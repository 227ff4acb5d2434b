"""What each family is checked for with pictures: the second table of the support matrix.

As in `tests.app.tree.engine.families`: a cell runs a tiny model over a tree and the untouched one from pixels, sequence
by sequence, and returns "yes" or raises; a refusal is the engine's own words.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache

import numpy as np
import torch
from peft import LoraConfig, get_peft_model

from app.tree import PrefixTree, TreeEngine
from tests.app.tree import models, oracle
from tests.app.tree.engine import families as text
from tests.app.tree.engine.pictures import vision
from tests.app.tree.losses import SequenceLoss
from tests.app.tree.parity import take_grads

TEXTS: list[list[vision.Part]] = [
    [1, 2, "A", 5, 6, 7],
    [1, 2, "A", 5, 8],
    [1, 2, "B", 5, 6, 7],
    [1, 3, "A", 6, "D", 9, 10],
    ["B", 4],
    [1, 2, 5],
]
PLAN = (14, 30)


def build(sequences: vision.Sequences) -> PrefixTree:
    return PrefixTree.build(sequences.tokens, images=sequences.images, pictures=sequences.pictures)


def loss_of(sequences: vision.Sequences) -> SequenceLoss:
    return SequenceLoss("plain_sum", sequences.lengths, 0, ("logprobs",))


def errors(model: vision.Vision, dense: vision.Vision | None = None) -> tuple[float, float]:
    """Largest error of log-probabilities and relative error of gradients, of the tower too, against `dense` (default:
    the model itself)."""
    sequences, reference = model.sequences(TEXTS), (dense or model).sequences(TEXTS)
    engine = TreeEngine(model.model, *PLAN, image_processor=model.processor, self_check=False)
    tree, loss = build(sequences), loss_of(sequences)
    wanted = reference.dense_logprobs()
    forward = max(float((got - want).abs().max()) for got, want in zip(engine.forward(tree).logprobs, wanted))
    _, expected = reference.dense_backward(loss)
    engine.backward(tree, loss)
    return forward, oracle.relative_error(take_grads(model.model), expected)[0]


def check(name: str, model: vision.Vision, dense: vision.Vision | None = None) -> None:
    found, allowed = errors(model, dense), vision.FAMILIES[name].tolerances
    text.within(found, (5 * allowed[0], allowed[1]))


def check_float32(name: str) -> None:
    check(name, vision.make(name))


def check_checkpointing(name: str) -> None:
    """Hugging Face's own, in training mode, of tower and layers."""
    model = vision.make(name)
    model.model.train()
    dense = vision.Vision(copy.deepcopy(model.model), model.processor, model.pictures, model.tile)
    models.checkpoint(model.model, use_reentrant=False)
    check(name, model, dense)


def check_lora(name: str) -> None:
    """On every linear layer of tower, projector and language model."""
    torch.manual_seed(0)
    model = vision.make(name)
    adapted = get_peft_model(model.model, LoraConfig(r=2, target_modules="all-linear", lora_dropout=0.0))
    for part, parameter in adapted.named_parameters():
        if "lora_B" in part:  # zero at the start, which would hide the gradient of A
            torch.nn.init.normal_(parameter, 0.0, 0.1)
    trained = [part for part, parameter in adapted.named_parameters() if parameter.requires_grad]
    assert all("lora_" in part for part in trained) and any("vis" in part for part in trained)
    check(name, model)


def check_frozen(name: str) -> None:
    """The tower gets no gradient, and runs once for a forward and a backward pass."""
    model = vision.make(name)
    layers = set(map(id, [*model.model.get_decoder().parameters(), *model.model.get_output_embeddings().parameters()]))
    for parameter in model.model.parameters():
        parameter.requires_grad_(id(parameter) in layers)
    check(name, model)


def check_itself(name: str) -> None:
    """The self-check passes."""
    model = vision.make(name)
    report = TreeEngine(model.model, image_processor=model.processor).verify(build(model.sequences(TEXTS)))
    assert report is not None and report.passed, str(report)


def _low_precision(name: str, autocast: bool) -> None:
    ours, theirs = [], []
    for seed in range(4):
        model = vision.make(name, torch.float32 if autocast else torch.bfloat16, seed)
        sequences = model.sequences(TEXTS)
        loss = loss_of(sequences)
        exact = vision.Vision(copy.deepcopy(model.model).float(), model.processor, model.pictures, model.tile)
        _, truth = exact.sequences(TEXTS).dense_backward(loss)
        with torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext():
            _, dense = sequences.dense_backward(loss)
            engine = TreeEngine(model.model, *PLAN, image_processor=model.processor, self_check=False)
            engine.backward(build(sequences), loss)
        ours.append(text.distance(take_grads(model.model), truth))
        theirs.append(text.distance(dense, truth))
    ratio = np.median(ours) / np.median(theirs)
    assert ratio < text.LOW_PRECISION, f"{ratio:.2f} times the error of dense: {ours} and {theirs}"


COLUMNS: dict[str, Callable[[str], None]] = {
    "float32": check_float32,
    "bf16": lambda name: _low_precision(name, autocast=False),
    "autocast": lambda name: _low_precision(name, autocast=True),
    "checkpointing": check_checkpointing,
    "LoRA": check_lora,
    "frozen tower": check_frozen,
    "self-check": check_itself,
}


@cache
def cell(name: str, column: str) -> str:
    """ "yes"; raises AssertionError when the engine and the untouched model differ."""
    COLUMNS[column](name)
    return "yes"


@cache
def refusal(name: str) -> str:
    """The engine's words about pictures. Raises AssertionError when it takes them."""
    model = vision.make(name)
    try:
        engine = TreeEngine(model.model, image_processor=model.processor)
        engine.forward(build(model.sequences([[1, "A", 2]])))
    except ValueError as error:
        return str(error)
    raise AssertionError(f"{name} is not refused")
