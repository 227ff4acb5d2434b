"""The first-use self-check on models whose layers carry a state: right ones pass, each way to lose a state is refused.

In bf16 a lost gradient hides in rounding, so there the first layers are checked in float32 as well.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch

from app.tree import SelfCheckError, TreeEngine
from app.tree.attention.chosen.compressed import EntriesBackend
from app.tree.attention.part_attention import PartBackend
from app.tree.executor import Executor
from app.tree.model.shallow import first_layers
from app.tree.states.block_scan import BlockIndex
from app.tree.states.piece_states import PieceStates, StateKey
from tests.app.tree import oracle
from tests.app.tree.engine.test_self_check import DTYPES, TREE, size
from tests.app.tree.parity import assert_unchanged, snapshot
from tests.app.tree.states import hybrids

__all__ = ["size"]  # a fixture

Patch = pytest.MonkeyPatch


def forgotten(kind: str) -> Callable[[Patch], None]:
    """A chunk's roots start from zeros."""

    def break_it(patch: Patch) -> None:
        start = PieceStates._start

        def zeros(self: PieceStates, of: StateKey, *rest):
            return start(self, of, *rest) * (of[1] != kind)

        patch.setattr(PieceStates, "_start", zeros)

    return break_it


def dropped(kind: str) -> Callable[[Patch], None]:
    """What children owe to their parent's state is not handed on."""

    def break_it(patch: Patch) -> None:
        owed = Executor._owed_to_ends

        def without(self: Executor, run, state):
            state.end_grads = {key: grad for key, grad in state.end_grads.items() if key[1] != kind}
            return owed(self, run, state)

        patch.setattr(Executor, "_owed_to_ends", without)

    return break_it


def moved_by_padding(patch: Patch) -> None:
    """Places of a block that hold no row repeat another one."""
    patch.setattr(BlockIndex, "only", lambda self, x: x)


MUTATIONS: dict[str, Callable[[Patch], None]] = {
    "tail forgotten": forgotten("convolution"),
    "state forgotten": forgotten("scan"),
    "gradient of the tail dropped": dropped("convolution"),
    "gradient of the state dropped": dropped("scan"),
    "moved by padding": moved_by_padding,
}


# Either dtype and either size is quick.
in_every_way = pytest.mark.parametrize(
    ("dtype", "size"),
    [
        (torch.float32, "small"),
        (torch.bfloat16, "large"),
        pytest.param(torch.float32, "large", marks=pytest.mark.slow),
        pytest.param(torch.bfloat16, "small", marks=pytest.mark.slow),
    ],
    indirect=["size"],
)


def train(model) -> None:
    TreeEngine(model, self_check=True).backward(TREE, lambda out, i: out.logprobs.sum())


@in_every_way
@pytest.mark.parametrize("mutation", MUTATIONS)
def test_a_lost_state_is_refused(mutation: str, dtype: torch.dtype, size: None, monkeypatch: Patch) -> None:
    model = hybrids.make("qwen3_5_text", dtype)
    MUTATIONS[mutation](monkeypatch)
    with pytest.raises(SelfCheckError, match=r"Qwen3_5ForCausalLM: .* differ by more than rounding"):
        train(model)
    assert all(p.grad is None for p in model.parameters())


@in_every_way
@pytest.mark.parametrize("mutation", [name for name in MUTATIONS if "tail" in name])
def test_a_lost_tail_is_refused_without_a_scan(
    mutation: str, dtype: torch.dtype, size: None, monkeypatch: Patch
) -> None:
    MUTATIONS[mutation](monkeypatch)
    with pytest.raises(SelfCheckError, match="Lfm2ForCausalLM"):
        train(hybrids.make("lfm2", dtype))


@in_every_way
@pytest.mark.parametrize(
    "mutation",
    [forgotten("lookback"), forgotten("tokens"), dropped("lookback")],
    ids=["lookback forgotten", "tokens forgotten", "gradient of the lookback dropped"],
)
def test_lost_tokens_that_a_part_looks_back_to_are_refused(
    mutation: Callable[[Patch], None], dtype: torch.dtype, size: None, monkeypatch: Patch
) -> None:
    mutation(monkeypatch)
    with pytest.raises(SelfCheckError, match="Qwen4ExpForCausalLM"):
        train(hybrids.make("qwen4_exp_text", dtype))


def unreturned(patch: Patch) -> None:
    """What chunks below owe the entries of a chunk is lost."""
    patch.setattr(EntriesBackend, "add_returned", PartBackend.add_returned)


@in_every_way
@pytest.mark.parametrize(
    ("name", "mutation"),
    [
        ("deepseek_v4", forgotten("entries")),
        ("deepseek_v4", dropped("entries")),
        ("deepseek_v4", unreturned),
        ("zaya", forgotten("lookback")),
        ("zaya", dropped("lookback")),
    ],
)
def test_lost_tokens_that_keys_are_made_of_are_refused(
    name: str, mutation: Callable[[Patch], None], dtype: torch.dtype, size: None, monkeypatch: Patch
) -> None:
    mutation(monkeypatch)
    with pytest.raises(SelfCheckError, match=r"ForCausalLM: .* differ by more than rounding"):
        train(hybrids.make(name, dtype))


def test_autocast_is_no_hiding_place(size: None, monkeypatch: Patch) -> None:
    MUTATIONS["gradient of the state dropped"](monkeypatch)
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(SelfCheckError, match="first 2 layers"):
        train(hybrids.make("qwen3_5_text"))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", hybrids.QUICK)
def test_right_models_pass(name: str, dtype: torch.dtype, size: None) -> None:
    model = hybrids.make(name, dtype)
    before = snapshot(model)
    train(model)
    assert_unchanged(model, before)


def test_first_layers_compute_what_the_model_does_with_them() -> None:
    model = hybrids.make("qwen3_5_text", torch.bfloat16)
    before = copy.deepcopy(model.state_dict())
    shallow = first_layers(model, 2)
    whole = hybrids.make(
        "qwen3_5_text", torch.bfloat16, num_hidden_layers=2, layer_types=["linear_attention", "full_attention"]
    )
    whole.load_state_dict({k: v for k, v in before.items() if ".layers.2." not in k})
    assert shallow is not None and {p.dtype for p in shallow.parameters()} == {torch.float32}
    ours, theirs = (oracle.dense_sequence(m, list(range(9))).logprobs for m in (shallow, whole.float()))
    assert torch.equal(ours, theirs)
    assert len(model.model.layers) == 3 and model.config.num_hidden_layers == 3
    assert all(torch.equal(model.state_dict()[key], value) for key, value in before.items())
