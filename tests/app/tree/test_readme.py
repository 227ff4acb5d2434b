"""The example of `app/tree/README.md` runs, learns, and computes what dense training computes; what it names exists."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch

from app.tree.attention import BACKENDS
from tests.app.tree import oracle

README = Path(__file__).parents[3] / "app" / "tree" / "README.md"
TEXT = README.read_text()


def example() -> str:
    *_, code = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)  # the last is the whole one
    return str(code)


def test_the_example_is_exact_and_learns() -> None:
    losses = []
    for steps in (1, 5):
        torch.manual_seed(0)
        names: dict[str, Any] = {}
        exec(compile(example().replace("range(5)", f"range({steps})"), str(README), "exec"), names)
        losses.append(names["loss"])
    assert losses[1] < losses[0] - 1
    model, engine, tree, rewards = (names[n] for n in ("model", "engine", "tree", "rewards"))
    assert tree.num_tokens < tree.num_dense_tokens

    def loss(out: Any, i: int) -> torch.Tensor:
        return -rewards[i] * out.logprobs.sum()

    _, expected = oracle.dense_backward(model, names["sequences"], loss, names["scored"])
    engine.backward(tree, loss)
    assert oracle.relative_error({n: p.grad for n, p in model.named_parameters()}, expected)[0] < 2e-6


def test_the_example_is_short() -> None:
    assert sum(bool(line.strip()) for line in example().splitlines()) <= 20


def test_what_the_page_names_exists() -> None:
    folder = README.parent
    for target in re.findall(r"\]\(([^)#]+)\)", TEXT):
        assert (folder / target).exists(), target
    for name in re.findall(r"`([\w/]+\.py)`", TEXT):
        assert (folder / name).exists(), name
    assert all(re.search(rf"^\|[^|]*`{name}`[^|]*\|", TEXT, re.MULTILINE) for name in BACKENDS)
