"""The first-use self-check: models broken on purpose are caught, right ones pass, and nothing is left behind."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from app.tree import PrefixTree, SelfCheckError, TreeEngine, self_check
from app.tree.self_check import EXTENT, EXTENT_LARGE, LARGE, Subject, sample
from tests.app.tree import models, oracle
from tests.app.tree.cases import VOCABULARY
from tests.app.tree.engine import families
from tests.app.tree.losses import SequenceLoss
from tests.app.tree.parity import assert_unchanged, snapshot, take_grads
from tests.app.tree.states import hybrids

DTYPES = [torch.float32, torch.bfloat16]


def conversation(seed: int = 0, stem: int = 24) -> list[np.ndarray]:
    random = np.random.default_rng(seed)
    base = random.integers(0, VOCABULARY, stem)
    arms = [np.concatenate([base[:cut], random.integers(0, VOCABULARY, 25)]) for cut in (stem, stem, stem - 15)]
    return [np.concatenate([arm, random.integers(0, VOCABULARY, n)]) for arm in arms for n in (4, 12)]


TREE = PrefixTree.build(conversation())


class OverTime(nn.Module):
    """A causal convolution over the tokens of whatever is packed together, before a layer's MLP."""

    def __init__(self, mlp: nn.Module, strength: float) -> None:
        super().__init__()
        self.mlp = mlp
        self.conv = nn.Conv1d(models.HIDDEN, models.HIDDEN, 3, padding=2, bias=False)
        nn.init.normal_(self.conv.weight, 0.0, strength, torch.Generator().manual_seed(0))

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(x + self.conv(x.transpose(1, 2))[..., : x.shape[1]].transpose(1, 2))


class TokenShift(nn.Module):
    """The MLP works on the token before."""

    def __init__(self, mlp: nn.Module) -> None:
        super().__init__()
        self.mlp = mlp

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(nn.functional.pad(x, (0, 0, 1, 0))[:, :-1])


def convolved(model, strength: float = 0.3) -> None:
    layer = model.model.layers[1]
    layer.mlp = OverTime(layer.mlp, strength).to(model.dtype)


def shifted(model) -> None:
    layer = model.model.layers[0]
    layer.mlp = TokenShift(layer.mlp)


def own_positions(model) -> None:
    """Adds an embedding of the place in the batch, not of `position_ids`."""
    table = torch.randn(4096, models.HIDDEN, generator=torch.Generator().manual_seed(0)).to(model.dtype)

    def add(module: nn.Module, arguments, output: Tensor) -> Tensor:
        return output + table[: output.shape[1]]

    model.model.embed_tokens.register_forward_hook(add)


def ignores_the_mask(model) -> None:
    """Attends through the interface, then adds the mean over everything packed so far."""
    attention = model.model.layers[0].self_attn

    def add(module: nn.Module, arguments, output):
        hidden = output[0]
        count = torch.arange(1, hidden.shape[1] + 1, dtype=hidden.dtype)[:, None]
        return (hidden + hidden.cumsum(1) / count, *output[1:])

    attention.register_forward_hook(add)


def scaled_logits(model) -> None:
    """The model's own forward changes logits after the projection."""
    forward = model.forward

    def scaled(*args, **kwargs):
        out = forward(*args, **kwargs)
        out.logits = out.logits / 3
        return out

    model.forward = scaled


@pytest.fixture(params=["small", "large"])
def size(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The models as they are, and taken for ones so large that as little as possible is compared."""
    if request.param == "large":
        monkeypatch.setattr(self_check, "LARGE", 0)


BROKEN: dict[str, Callable[[nn.Module], None]] = {
    f.__name__: f for f in (convolved, shifted, own_positions, ignores_the_mask, scaled_logits)
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_model_is_caught(kind: str, dtype: torch.dtype, size: None) -> None:
    model = models.make("qwen3", dtype)
    BROKEN[kind](model)
    with pytest.raises(SelfCheckError, match=r"Qwen3ForCausalLM: .* differ by .*(on_mismatch|use another model)"):
        TreeEngine(model, self_check=True).backward(TREE, lambda out, i: out.logprobs.sum())
    assert all(p.grad is None for p in model.parameters())
    TreeEngine(model, self_check=False).backward(TREE, lambda out, i: out.logprobs.sum())  # switched off


def test_the_report_names_numbers_and_layer() -> None:
    model = models.make("qwen3")
    convolved(model)
    report = TreeEngine(model).verify(TREE)
    assert report is not None and not report.passed
    owner = model.get_submodule(report.parameter.rpartition(".")[0])
    assert report.layer == type(owner).__name__ and report.parameter in str(report) and report.layer in str(report)
    assert report.outputs[0] > 1e-2 > 1e-4 > report.outputs[1] > 0
    assert report.gradients[0] > 1e-2 > 1e-4 > report.gradients[1] > 0
    for number in (*report.outputs, *report.gradients):
        assert f"{number:.1e}" in str(report)


def test_a_weak_mistake_is_caught_in_float32(size: None) -> None:
    model = models.make("qwen3")
    convolved(model, strength=1e-4)
    report = TreeEngine(model).verify(TREE)
    assert report is not None and not report.passed


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "row", ["Qwen3", "Qwen3-MoE", "Gemma 2", "GPT-OSS", "Granite", "OLMo-2", "Mistral, sliding window"]
)
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))])
def test_right_models_pass(row: str, dtype: torch.dtype, size: None, seed: int) -> None:
    """With room: they stay well below what is allowed."""
    report = TreeEngine(families.build(families.SUPPORTED[row], dtype, seed)).verify(TREE)
    assert report is not None and report.passed
    room = {torch.float32: 5, torch.bfloat16: 2}[dtype]
    assert report.gradients[0] < room * report.gradients[1], str(report)
    assert report.outputs[0] < room * report.outputs[1], str(report)


def test_right_models_pass_under_autocast_and_with_a_value_head() -> None:
    model, head = models.make("llama"), models.value_head(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        report = TreeEngine(model, value_head=head, temperature=0.7).verify(TREE, ("logprobs", "entropy", "values"))
    assert report is not None and report.passed and report.outputs[1] > 1e-4


def test_a_broken_value_head_is_caught() -> None:
    class Drifting(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + 0.1 * len(x)

    head = Drifting(models.HIDDEN, 1)
    report = TreeEngine(models.make("llama"), value_head=head).verify(TREE, ("values",))
    assert report is not None and not report.passed


@pytest.mark.parametrize("dtype", DTYPES)
def test_nothing_is_left_behind(dtype: torch.dtype) -> None:
    """Model, gradients (the same tensors), hooks and random state; also when the check fails."""
    model = models.make("qwen3", dtype)
    for p in list(model.parameters())[::2]:
        p.grad = torch.ones_like(p)
    grads = [(p.grad, None if p.grad is None else p.grad.clone()) for p in model.parameters()]
    before, state = snapshot(model), torch.get_rng_state()
    for breaking in (lambda model: None, own_positions):
        breaking(model)
        before["hooks"] = snapshot(model)["hooks"]
        TreeEngine(model).verify(TREE, ("logprobs", "entropy"))
        assert_unchanged(model, dict(before))
        assert torch.equal(torch.get_rng_state(), state)
        for p, (grad, value) in zip(model.parameters(), grads, strict=True):
            assert p.grad is grad and (grad is None or torch.equal(grad, value))
            assert not p._post_accumulate_grad_hooks


def test_only_the_first_backward_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    verify = TreeEngine.verify
    monkeypatch.setattr(TreeEngine, "verify", lambda self, *args: seen.append(args) or verify(self, *args))
    engine = TreeEngine(models.make("llama"), self_check=True)
    engine.backward(PrefixTree.build([]), lambda out, i: out.logprobs.sum())  # nothing to compare yet
    for _ in range(2):
        engine.backward(TREE, lambda out, i: out.logprobs.sum())
    assert len(seen) == 2
    TreeEngine(models.make("llama"), self_check=False).backward(TREE, lambda out, i: out.logprobs.sum())
    assert len(seen) == 2


def test_gradients_after_a_passed_check_are_those_without_one() -> None:
    model = models.make("starcoder2", torch.float64)
    loss = SequenceLoss("plain_sum", [int(n) for n in TREE.sequence_length], 0, ("logprobs",))
    grads = []
    for checked in (True, False):
        TreeEngine(model, 20, 40, self_check=checked).backward(TREE, loss)
        grads.append(take_grads(model))
    assert all(torch.equal(grads[0][name], grads[1][name]) for name in grads[0])


@pytest.mark.parametrize("share", ["tree", "leaf"])
@pytest.mark.parametrize("kind", ["convolved", "shifted", "own_positions", "ignores_the_mask"])
def test_fallback_is_exact(kind: str, share: str) -> None:
    """Dense-leaf execution of a model that no tree pass can compute, to float64."""
    model, head = models.make("starcoder2", torch.float64), models.value_head(torch.float64)
    BROKEN[kind](model)
    sequences = [*conversation(), conversation()[0][:30], conversation()[1]]
    scored = [np.random.default_rng(i).random(len(s)) < 0.5 for i, s in enumerate(sequences)]
    loss = SequenceLoss("tanh_of_sums", [len(s) for s in sequences], 3, ("logprobs", "entropy", "values"))
    total, expected = oracle.dense_backward(model, sequences, loss, scored, head=head)
    engine = TreeEngine(model, 20, 40, value_head=head, self_check=True, on_mismatch="fallback")
    tree = PrefixTree.build(sequences, scored=scored, share=share)
    with pytest.warns(UserWarning, match=r"differ by more than rounding.*dense-leaf"):
        got = engine.backward(tree, loss, want=("logprobs", "entropy", "values"))
    assert engine.dense and got == pytest.approx(total, rel=1e-9)
    assert oracle.relative_error(take_grads(model, head), expected)[0] < 1e-9
    dense = oracle.dense_forward(model, sequences, scored, head=head)
    out = engine.forward(tree, want=("logprobs",))
    assert all((a - b.logprobs.detach()).abs().max() < 1e-9 for a, b in zip(out.logprobs, dense, strict=True))


def test_fallback_keeps_temperatures_apart() -> None:
    model = models.make("starcoder2", torch.float64)
    shifted(model)
    sequences, keys = conversation() * 2, [0] * 6 + [1] * 6
    temperatures = [0.7] * 6 + [1.3] * 6
    loss = SequenceLoss("plain_sum", [len(s) for s in sequences], 3, ("logprobs",))
    _, expected = oracle.dense_backward(model, sequences, loss, None, temperatures)
    engine = TreeEngine(model, self_check=True, on_mismatch="fallback")
    with pytest.warns(UserWarning, match="dense-leaf"):
        engine.backward(
            PrefixTree.build(sequences, keys=keys), loss, temperatures=torch.tensor(temperatures, dtype=torch.float64)
        )
    assert oracle.relative_error(take_grads(model), expected)[0] < 1e-9


def test_options_without_effect_are_refused() -> None:
    with pytest.raises(ValueError, match=r"on_mismatch must be 'error' or 'fallback', got 'warn'"):
        TreeEngine(models.make("llama"), on_mismatch="warn")
    with pytest.raises(ValueError, match=r"on_mismatch='fallback' has no effect without self_check"):
        TreeEngine(models.make("llama"), self_check=False, on_mismatch="fallback")


def test_the_sample_is_small_and_has_forks() -> None:
    """From any tree: bounded, real runs of its tokens, and where the batch forks the sample does."""
    long = conversation(stem=3000)
    tree = PrefixTree.build(long)
    found, fork = sample(tree)
    branches, context = EXTENT
    assert 2 <= len(found) <= branches and all(len(s) <= 2 * context for s in found)
    assert all(any(s.tobytes() in whole.tobytes() for whole in long) for s in found)
    assert PrefixTree.build(found).num_segments > 1 and fork == context
    assert len({tuple(s[: fork + 1]) for s in found}) > 1 == len({tuple(s[:fork]) for s in found})
    assert sample(PrefixTree.build([])) == ([], 0)
    ((only,), _) = sample(PrefixTree.build([np.arange(20)]))
    assert (only == np.arange(20)).all()
    apart, _ = sample(PrefixTree.build([np.arange(200), np.arange(5, 300)]))
    assert [len(s) for s in apart] == [2 * context] * 2


@pytest.mark.parametrize(("parameters", "extent"), [(10**5, EXTENT), (LARGE, EXTENT), (LARGE + 1, EXTENT_LARGE)])
def test_the_sample_is_smaller_where_the_model_is_large(parameters: int, extent: tuple[int, int]) -> None:
    model = nn.Linear(1, parameters, bias=False, device="meta")
    subject = Subject(model, None, 1.0, None, lambda *of_a_pass: None)  # type: ignore[arg-type]
    found, fork = sample(PrefixTree.build(conversation(stem=3000)), *subject.extent)
    assert subject.extent == extent and len(found) <= extent[0] and fork == extent[1]
    assert all(len(s) <= 2 * fork for s in found)


def test_logits_that_the_engine_would_make_otherwise_are_no_case_for_falling_back() -> None:
    """Every sequence alone has the same heads."""
    model = models.make("falcon_h1", **{**hybrids.OPTIONS["falcon_h1"], "lm_head_multiplier": 0.25})
    engine = TreeEngine(model)
    assert engine.verify(TREE).passed, "Falcon-H1 multiplies its logits, which the engine knows"
    del model.config.lm_head_multiplier
    engine = TreeEngine(model, self_check=True, on_mismatch="fallback")
    with pytest.raises(SelfCheckError, match=r"makes other logits .*use another model"):
        engine.backward(TREE, lambda out, i: out.logprobs.sum())
    assert not engine.dense and all(p.grad is None for p in model.parameters())


def test_logits_are_compared_whatever_the_first_loss_wants() -> None:
    model = models.make("cohere", logit_scale=0.25)
    engine = TreeEngine(model, self_check=True)
    engine.heads._multiply = None
    with pytest.raises(SelfCheckError, match="makes other logits"):
        engine.backward(TREE, lambda out, i: out.entropy.sum(), want=("entropy",))


class Noisy(nn.Module):
    """Dropout that no configuration speaks of."""

    def __init__(self, mlp: nn.Module) -> None:
        super().__init__()
        self.mlp = mlp

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(x) * (1 + 0.1 * torch.rand_like(x))


def test_a_model_whose_forward_depends_on_random_numbers_is_refused() -> None:
    model = models.make("qwen3")
    model.model.layers[0].mlp = Noisy(model.model.layers[0].mlp)
    with pytest.raises(ValueError, match="draws random numbers in its forward"):
        TreeEngine(model, self_check=True).backward(TREE, lambda out, i: out.logprobs.sum())
    assert all(p.grad is None for p in model.parameters())


def test_others_may_draw_random_numbers_meanwhile() -> None:
    """Workflows and prompts do, on threads of their own; and so may a layer whose output does not depend on it."""
    over = threading.Event()

    def draws() -> None:
        while not over.is_set():
            torch.rand(1)

    class ForNothing(Noisy):
        def forward(self, x: Tensor) -> Tensor:
            torch.rand(1)
            return self.mlp(x)

    model = models.make("qwen3")
    model.model.layers[0].mlp = ForNothing(model.model.layers[0].mlp)
    other = threading.Thread(target=draws)
    other.start()
    try:
        TreeEngine(model, self_check=True).backward(TREE, lambda out, i: out.logprobs.sum())
    finally:
        over.set()
        other.join()
