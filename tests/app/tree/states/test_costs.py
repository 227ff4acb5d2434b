"""What plans and memory count of layers that carry a state, against what a forward really holds."""

from __future__ import annotations

import pytest

from app.tree import PrefixTree, TreeEngine
from app.tree.executor import Executor
from app.tree.memory import pass_memory
from app.tree.planning.cost import ModelShape
from tests.app.tree import models
from tests.app.tree.states import hybrids

TREE = PrefixTree.build([[1, 2, 3, 4, 5], [1, 2, 6], [1, 2, 3, 4, 7, 8, 9]])


@pytest.mark.parametrize("name", hybrids.OPTIONS)
def test_layers_and_states_are_counted_by_what_they_are(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many values as the states that a chunk hands on hold, and as many layers with keys as attend."""
    model = hybrids.make(name)
    engine, held = TreeEngine(model, 2, 1000), []
    provide = Executor._provide

    def spy(self: Executor, index: int, run, only) -> None:
        provide(self, index, run, only)
        held.extend(sum(end[0].numel() for end in run.states.ends.values()) for _ in self.open[index].ends and [0])

    monkeypatch.setattr(Executor, "_provide", spy)
    engine.forward(TREE)
    shape = ModelShape.of(model.config)
    assert set(held) == {shape.state_values}
    assert shape.attention_layers == len(engine.state_layers.attending)


def test_models_without_states_are_counted_as_before() -> None:
    model = models.make("qwen3")
    shape = ModelShape.of(model.config)
    assert shape.attention_layers == shape.layers and shape.state_values == 0
    assert pass_memory(model, 4, 8, TREE).states == 0


def test_states_of_a_path_are_memory() -> None:
    """One a chunk on the longest path, and its gradient, in float32."""
    model = hybrids.make("qwen3_5_text")
    assert pass_memory(model, 4, 8, TREE).states == 2 * 4 * ModelShape.of(model.config).state_values * 2
