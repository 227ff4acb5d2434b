"""A run that goes on in MLflow: nothing is refused, and what stays as it was is told."""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any

import pytest

from app.cli.runs.loggers import go_on_in_mlflow


class Store:
    """A run of MLflow, which the tests' environment has not: it takes no other value of a parameter."""

    run_id = "r"

    def __init__(self, **known: str) -> None:
        self.known = known
        self.experiment = self

    def get_run(self, run_id: str) -> Any:
        return SimpleNamespace(data=SimpleNamespace(params=dict(self.known)))

    def log_hyperparams(self, params: dict[str, Any]) -> None:
        assert not self.known.keys() & params.keys(), "changing param values is not allowed"
        self.known |= {name: str(value)[:250] for name, value in params.items()}


def test_parameters_of_a_run_that_goes_on_are_added_and_never_changed() -> None:
    logger: Any = Store(**{"trainer/max_steps": "2", "trainer/logger/0/run_id": "None", "long": "x" * 250, "lr": "0.1"})
    go_on_in_mlflow(logger)
    given = {"trainer": {"max_steps": 4, "logger": [{"run_id": "r"}], "min_steps": None}, "long": "x" * 300, "lr": 0.1}
    with pytest.warns(UserWarning, match=r"so r keeps its earlier trainer/max_steps; config\.yaml"):
        logger.log_hyperparams(given)
    assert logger.known["trainer/max_steps"] == "2" and logger.known["trainer/min_steps"] == "None"


def test_a_new_run_is_told_everything() -> None:
    logger: Any = Store()
    go_on_in_mlflow(logger)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        logger.log_hyperparams({"model": {"lr": 0.1}})
    assert logger.known == {"model/lr": "0.1"}
