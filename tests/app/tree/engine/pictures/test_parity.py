"""Trees with pictures against the untouched model, which runs every sequence alone from its pixels."""

from __future__ import annotations

import pytest
import torch
from transformers.models.qwen3_vl import modeling_qwen3_vl

from app.tree import PrefixTree, TreeEngine
from tests.app.tree import oracle
from tests.app.tree.engine.pictures import vision
from tests.app.tree.losses import SequenceLoss
from tests.app.tree.parity import assert_unchanged, snapshot, take_grads

TEXTS: list[list[vision.Part]] = [
    # a group on one picture, with late forks
    [1, 2, "A", 5, 6, 7, 8, 9],
    [1, 2, "A", 5, 6, 7, 8, 10],
    [1, 2, "A", 5, 6, 7, 11],
    [1, 2, "A", 12],
    # the same text on a picture of an equal grid: equal ids
    [1, 2, "B", 5, 6, 7, 8, 9],
    # two turns, the second with a picture of another grid; the first also alone
    [1, 3, "A", 5, 6, 14, "C", 15, 16],
    [1, 3, "A", 5, 6, 14, "D", 15, 17],
    [1, 3, "A", 5, 6, 14],
    # order swapped; twice the same
    [1, 4, "A", 20, "B", 21, 22],
    [1, 4, "B", 20, "A", 21, 22],
    [1, 4, "A", 20, "A", 21, 22],
    # text alone; a picture first; a duplicate
    [1, 2, 5, 6, 7],
    ["C", 23, 24],
    [1, 2, "A", 12],
]
PLANS = [(10_000, 10_000), (40, 10_000), (40, 60), (17, 34), (7, 14), (1, 1)]


def build(sequences: vision.Sequences) -> PrefixTree:
    return PrefixTree.build(sequences.tokens, images=sequences.images, pictures=sequences.pictures)


def compare(
    model: vision.Vision,
    texts: list[list[vision.Part]],
    plan: tuple[int, int],
    tolerance: float,
    tower_tolerance: float | None = None,
    **engine: object,
) -> TreeEngine:
    sequences = model.sequences(texts)
    loss = SequenceLoss("tanh_of_sums", sequences.lengths, 0, ("logprobs",))
    total, expected = sequences.dense_backward(loss)
    over = TreeEngine(model.model, *plan, image_processor=model.processor, **engine)  # type: ignore[arg-type]
    tree = build(sequences)
    out = over.forward(tree)
    for got, want in zip(out.logprobs, sequences.dense_logprobs()):
        assert (got - want).abs().max() <= tolerance * max(1.0, float(want.abs().max()))
    assert over.backward(tree, loss) == pytest.approx(total, rel=1e-5)
    got_grads = take_grads(model.model)
    text = {name: grad for name, grad in expected.items() if "language_model" in name or "lm_head" in name}
    tower = {name: grad for name, grad in expected.items() if name not in text}
    for part, allowed in ((text, tolerance), (tower, tower_tolerance or tolerance)):
        if part:
            error, where = oracle.relative_error(got_grads, part)
            assert error <= allowed, f"{error:.2e} in {where}"
    return over


@pytest.mark.parametrize("plan", [*PLANS[:-1], pytest.param(PLANS[-1], marks=pytest.mark.slow)], ids=str)
def test_every_plan(plan: tuple[int, int]) -> None:
    model = vision.make("Qwen3-VL")
    compare(model, TEXTS, plan, 2e-6)


@pytest.mark.parametrize("plan", [PLANS[0], PLANS[4]], ids=str)
def test_in_float64(plan: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """With norms that do not round to float32 on their way; the tower's rotary embedding does."""
    monkeypatch.setattr(modeling_qwen3_vl.Qwen3VLTextRMSNorm, "forward", exact_norm)
    compare(vision.make("Qwen3-VL", torch.float64), TEXTS, plan, 1e-9, 1e-7)


def exact_norm(self: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    return self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.variance_epsilon)


FROZEN = {
    "tower": lambda name: "visual" in name,
    "all but the projector": lambda name: "visual.merger" not in name,
    "language model": lambda name: "visual" not in name,
    "first layers and embeddings": lambda name: "layers.2." not in name and "visual" not in name,
    "all but deepstack": lambda name: "deepstack" not in name,
}


@pytest.mark.parametrize("frozen", FROZEN)
def test_parts_that_are_frozen(frozen: str) -> None:
    """Gradients of pictures on the path reach the tower through layers of which nothing is trained, too."""
    model = vision.make("Qwen3-VL")
    for name, parameter in model.model.named_parameters():
        parameter.requires_grad_(not FROZEN[frozen](name))
    compare(model, TEXTS, (7, 14), 2e-6)


def test_a_tower_runs_once_a_picture() -> None:
    """A pass of a trained one; of a frozen one as long as its weights are what they were."""
    model = vision.make("Qwen3-VL")
    tree = build(model.sequences(TEXTS))
    engine = TreeEngine(model.model, 7, 14, image_processor=model.processor)
    for runs in (4, 8):
        engine.backward(tree, lambda out, i: out.logprobs.sum())
        assert engine.tower.runs == runs
    frozen = [p for name, p in model.model.named_parameters() if "visual" in name]
    for parameter in frozen:
        parameter.requires_grad_(False)
    for _ in range(2):
        engine.forward(tree)
        engine.backward(tree, lambda out, i: out.logprobs.sum())
        assert engine.tower.runs == 12
    before = engine.forward(tree).logprobs[0]
    with torch.no_grad():
        frozen[0] *= 2
    assert not torch.equal(engine.forward(tree).logprobs[0], before)
    assert engine.tower.runs == 16


def test_the_model_is_as_found() -> None:
    model = vision.make("Qwen3-VL")
    found = model.model.config
    parts = (found, found.text_config, found.vision_config)
    model.model.model.rope_deltas = noted = torch.zeros(1, 1)
    before = [part._attn_implementation for part in parts], snapshot(model.model)
    tree = build(model.sequences(TEXTS))
    engine = TreeEngine(model.model, 7, 14, image_processor=model.processor)
    engine.backward(tree, lambda out, i: out.logprobs.sum())
    engine.dense = True
    engine.forward(tree)
    assert [part._attn_implementation for part in parts] == before[0] == ["sdpa"] * 3
    assert_unchanged(model.model, before[1])
    assert model.model.model.rope_deltas is noted


def test_text_alone_needs_no_image_processor() -> None:
    model = vision.make("Qwen3-VL")
    texts: list[list[vision.Part]] = [[1, 2, 3, 4, 5], [1, 2, 3, 6], [1, 2, 3, 6, 7, 8], [9, 1]]
    sequences = model.sequences(texts)
    loss = SequenceLoss("tanh_of_sums", sequences.lengths, 0, ("logprobs",))
    _, expected = oracle.dense_backward(model.model, sequences.tokens, loss)
    TreeEngine(model.model, 3, 6).backward(PrefixTree.build(sequences.tokens), loss)
    error, where = oracle.relative_error(take_grads(model.model), expected)
    assert error <= 2e-6, where


def test_every_sequence_alone() -> None:
    """What the engine falls back to."""
    model = vision.make("Qwen3-VL")
    sequences = model.sequences(TEXTS)
    loss = SequenceLoss("tanh_of_sums", sequences.lengths, 0, ("logprobs",))
    _, expected = sequences.dense_backward(loss)
    engine = TreeEngine(model.model, image_processor=model.processor)
    engine.dense = True
    engine.backward(build(sequences), loss)
    error, where = oracle.relative_error(take_grads(model.model), expected)
    assert error <= 2e-6, where
