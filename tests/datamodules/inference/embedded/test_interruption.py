"""The embedded engine through a series of updates, in memory and from disk by turns."""

from __future__ import annotations

import pytest

from datamodules.inference.embedded import EmbeddedEngine
from datamodules.inference.export import merged_weights
from tests.datamodules.inference.adapters import with_lora
from tests.datamodules.inference.engine_suite import tiny_policy
from tests.datamodules.inference.weight_updates import (
    assert_interrupted,
    generate_through_updates,
    requests_of,
    update_of,
    worst_difference,
)


def test_every_token_is_of_the_weights_of_its_version(tmp_path) -> None:
    """500 requests, six updates, one of them of a policy with adapters."""
    models = {version: tiny_policy(seed=version) for version in range(6)} | {6: with_lora(tiny_policy(seed=6))}
    engine = EmbeddedEngine(control_timeout_s=60.0)
    engine.start(models[0], version=0, seed=3)
    try:
        requests = requests_of(500)
        updates = [
            lambda v=version: update_of(models[v], v, tmp_path if v % 2 else None, merged_weights)  # type: ignore[misc]
            for version in range(1, 7)
        ]
        responses, seconds = generate_through_updates(engine, requests, updates, every=True)
    finally:
        engine.close()
    assert all(second > 0 for second in seconds)
    assert_interrupted(responses, versions=7, at_least=50)
    assert worst_difference(models, requests, responses) < 1e-4


@pytest.mark.parametrize("method", EmbeddedEngine.update_methods)
def test_log_probabilities_are_the_trainers_before_and_after(method, tmp_path) -> None:
    """To 1e-5 in float32, from a start with adapters to their next values."""
    before, after = with_lora(tiny_policy()), with_lora(tiny_policy(), seed=8)
    engine = EmbeddedEngine()
    engine.start(before, version=4, seed=3)
    try:
        requests = requests_of(24)
        first, _ = generate_through_updates(engine, requests, [])
        engine.update_weights(update_of(after, 5, tmp_path if method == "disk" else None, merged_weights))
        second, _ = generate_through_updates(engine, requests, [])
    finally:
        engine.close()
    assert {v for r in first for v in r.versions} == {4} and {v for r in second for v in r.versions} == {5}
    assert worst_difference({4: before}, requests, first) < 1e-5
    assert worst_difference({5: after}, requests, second) < 1e-5
    assert worst_difference({4: after}, requests, first) > 0.1  # the comparison can tell them apart
