"""Trees with pictures against the untouched model, which runs every sequence alone from its pixels."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.models.qwen3_vl import modeling_qwen3_vl

from app.tree import PrefixTree, TreeEngine, memory, partition, picture_positions
from app.tree.model import pictures
from app.tree.model.positions import PicturePositions
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
Dense = tuple[float, dict[str, torch.Tensor], list[torch.Tensor]]
"""A loss, its gradients by name, and the log-probabilities of each sequence."""
PLANS = [(10_000, 10_000), (40, 10_000), (40, 60), (17, 34), (7, 14), (1, 1)]


def build(sequences: vision.Sequences) -> PrefixTree:
    return PrefixTree.build(sequences.tokens, images=sequences.images, pictures=sequences.pictures)


def loss_of(sequences: vision.Sequences) -> SequenceLoss:
    return SequenceLoss("tanh_of_sums", sequences.lengths, 0, ("logprobs",))


def densely(model: vision.Vision, texts: list[list[vision.Part]]) -> Dense:
    sequences = model.sequences(texts)
    return *sequences.dense_backward(loss_of(sequences)), sequences.dense_logprobs()


def compare(
    model: vision.Vision,
    texts: list[list[vision.Part]],
    plan: tuple[int, int],
    tolerance: float,
    tower_tolerance: float | None = None,
    dense: Dense | None = None,
    **engine: object,
) -> TreeEngine:
    """`dense`: the truth, where it is there already."""
    sequences = model.sequences(texts)
    loss = loss_of(sequences)
    total, expected, logprobs = dense or densely(model, texts)
    engine = {"self_check": False, **engine}
    over = TreeEngine(model.model, *plan, image_processor=model.processor, **engine)  # type: ignore[arg-type]
    tree = build(sequences)
    out = over.forward(tree)
    for got, want in zip(out.logprobs, logprobs, strict=True):
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


def test_pictures_of_one_size_share_a_run_of_the_tower(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as have room for their rows."""
    model = vision.make("Qwen3-VL")
    sequences = model.sequences(TEXTS)
    tree, sizes = build(sequences), {picture.pixels.shape for picture in sequences.pictures}
    calls: list[int] = []
    model.model.model.visual.register_forward_hook(lambda *given: calls.append(1))
    engine = TreeEngine(model.model, image_processor=model.processor)
    for rows, runs in ((pictures.ROWS_AT_ONCE, len(sizes)), (1, len(sequences.pictures))):
        monkeypatch.setattr(pictures, "ROWS_AT_ONCE", rows)
        calls.clear()
        engine.backward(tree, lambda out, i: out.logprobs.sum())
        assert len(calls) == runs
    assert len(sizes) < len(sequences.pictures)


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


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.float64, marks=pytest.mark.slow)])
def test_a_tower_that_runs_again_for_its_backward(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the graphs of all pictures have no room: one picture's at a time."""
    monkeypatch.setattr(memory, "_TOWER_SHARE", 0.0)
    if dtype == torch.float64:
        monkeypatch.setattr(modeling_qwen3_vl.Qwen3VLTextRMSNorm, "forward", exact_norm)
    exact = dtype == torch.float64
    engine = compare(vision.make("Qwen3-VL", dtype), TEXTS, (7, 14), 1e-9 if exact else 2e-6, 1e-7 if exact else 2e-6)
    assert engine.tower.runs == 4 + 8


def test_parts_add_up() -> None:
    """As two ranks run them, which share pictures: summed gradients are those of the whole."""
    model = vision.make("Qwen3-VL")
    sequences = model.sequences(TEXTS)
    loss = SequenceLoss("tanh_of_sums", sequences.lengths, 0, ("logprobs",))
    _, expected = sequences.dense_backward(loss)
    tree = build(sequences)
    for part in partition(tree, 2):
        engine = TreeEngine(model.model, 17, 34, image_processor=model.processor)
        engine.backward(tree.select(part), lambda out, i, part=part: loss(out, part[i]))
        assert part and 0 < engine.tower.runs <= 4
    error, where = oracle.relative_error(take_grads(model.model), expected)
    assert error <= 2e-6, where


def test_by_the_forward_of_another_backend() -> None:
    model = vision.make("Qwen3-VL")
    sequences = model.sequences(TEXTS[4:10])
    out = TreeEngine(model.model, 17, 34, attention="flex", image_processor=model.processor).forward(build(sequences))
    for got, want in zip(out.logprobs, sequences.dense_logprobs()):
        assert (got - want).abs().max() <= 1e-5


LETTERS = st.sampled_from(["A", "B", "C", "D", 1, 2, 3])
WORDS = st.lists(st.lists(LETTERS, min_size=1, max_size=6), min_size=1, max_size=6)


@pytest.mark.slow
@settings(max_examples=25)
@given(words=WORDS, chunk=st.integers(1, 40), live=st.integers(1, 60))
def test_random_trees(words: list[list[vision.Part]], chunk: int, live: int) -> None:
    """Pictures anywhere: equal ids, shared, swapped, twice, first, last, cut by chunks anywhere; in float64."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(modeling_qwen3_vl.Qwen3VLTextRMSNorm, "forward", exact_norm)
        compare(exact_model(), words, (chunk, live), 1e-9, 1e-7)


@pytest.mark.parametrize("seed", range(4))
def test_positions_are_the_models_own(seed: int) -> None:
    """Over a tree and of one sequence, against the model's function of whole sequences."""
    model, random = vision.make("Qwen3-VL"), np.random.default_rng(seed)
    texts = [[(*"ABCD", 1, 2, 3)[k] for k in random.integers(0, 7, random.integers(1, 8))] for _ in range(8)]
    sequences = model.sequences(texts)
    tree = build(sequences)
    counted = PicturePositions(model.model).of_tree(tree)
    for i, tokens in enumerate(sequences.tokens):
        alone = picture_positions(model.model, sequences.images[i], sequences.pictures)
        given = sequences.arguments(i)
        if given:
            known = {name: given[name] for name in ("mm_token_type_ids", "image_grid_thw")}
            own = model.model.model.get_rope_index(torch.from_numpy(tokens)[None], **known)[0][:, 0].numpy()
        else:
            own = np.tile(np.arange(len(tokens)), (3, 1))
        assert alone is not None and (alone == own).all()
        assert (counted[:, tree.sequence_tokens([i])] == own).all()


@functools.cache
def exact_model() -> vision.Vision:
    return vision.make("Qwen3-VL", torch.float64)


def test_parts_cost_what_their_pictures_do() -> None:
    """Ten sequences on one picture cost one tower; as many on pictures of their own are dealt apart."""
    sizes = vision.Pixels(b"0", np.zeros((8, 8, 3), np.uint8), 40)
    pictures = [vision.Pixels(bytes([k]), sizes.pixels, 40) for k in range(4)]
    shown = [0, 0, 0, 0, 1, 2, 3]
    tokens = [np.array([1, *[vision.IMAGE] * 40, 2, 3 + i]) for i in range(len(shown))]
    images = [np.array([-1, *[m] * 40, -1, -1]) for m in shown]
    tree = PrefixTree.build(tokens, images=images, pictures=pictures)
    assert [sorted(part) for part in partition(tree, 4)] == [[0, 1, 2, 3], [4], [5], [6]]


def test_memory_of_tables_and_towers(monkeypatch: pytest.MonkeyPatch) -> None:
    model = vision.make("Qwen3-VL")
    tree = build(model.sequences(TEXTS))
    values = (6 + 6 + 6 + 4) * 16 * (1 + 2)  # rows, width, features and two of deepstack
    trained = memory.pass_memory(model.model, 8, 16, tree).pictures
    for parameter in model.model.model.visual.parameters():
        parameter.requires_grad_(False)
    assert memory.pass_memory(model.model, 8, 16, tree).pictures == values * 4
    of_two = memory.pass_memory(model.model, 8, 16, tree, ranks=2).pictures  # of which one has two pictures of six rows
    assert of_two == values * 4 * 12 // 22
    monkeypatch.setattr(memory, "_TOWER_SHARE", 0.0)
    next(model.model.model.visual.parameters()).requires_grad_(True)
    assert memory.pass_memory(model.model, 8, 16, tree).pictures == values * 8 < trained
    assert memory.pass_memory(model.model, 8, 16, PrefixTree.build([np.arange(5)])).pictures == 0
