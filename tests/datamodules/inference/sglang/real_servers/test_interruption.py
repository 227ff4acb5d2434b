"""The SGLang engine through a series of updates, broadcast and from disk by turns, checked token by token."""

from __future__ import annotations

import pytest

from datamodules.inference.export import checkpoint_weights
from datamodules.inference.sglang import SGLangEngine
from tests.datamodules.inference.adapters import with_lora
from tests.datamodules.inference.engine_suite import tiny_policy
from tests.datamodules.inference.weight_updates import (
    assert_interrupted,
    generate_through_updates,
    requests_of,
    update_of,
    worst_difference,
)


@pytest.fixture
def engine(server):
    engine = SGLangEngine(urls=[server.url])
    engine.start(tiny_policy(), version=0, seed=1)
    yield engine
    engine.close()


@pytest.mark.slow
def test_every_token_is_of_the_weights_of_its_version(engine, tmp_path) -> None:
    """500 requests, six updates, one of them of a policy with adapters."""
    models = {version: tiny_policy(seed=version) for version in range(6)} | {6: with_lora(tiny_policy(seed=6))}
    updates = [
        lambda v=version: update_of(models[v], v, tmp_path if v % 2 else None, checkpoint_weights)  # type: ignore[misc]
        for version in range(7)
    ]
    assert engine.version == -1  # a server given by its address has other weights
    engine.update_weights(updates[0]())
    requests = requests_of(500)
    responses, seconds = generate_through_updates(engine, requests, updates[1:], every=True)
    assert all(second > 0 for second in seconds)
    assert_interrupted(responses, versions=7, at_least=50)
    assert worst_difference(models, requests, responses) < 1e-4
