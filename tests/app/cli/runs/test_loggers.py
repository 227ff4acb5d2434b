"""A run that goes on in MLflow: nothing is refused, and what stays as it was is told. metrics.csv: nothing is lost."""

from __future__ import annotations

import csv
import os
import tracemalloc
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from app.cli.runs.loggers import Metrics, go_on_in_mlflow


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


def logging_to(run: Path) -> Metrics:
    return Metrics(str(run.parent), name="", version=run.name, flush_logs_every_n_steps=1)


def test_a_new_metric_costs_no_rows_when_the_run_is_killed_meanwhile(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    logger, logged = logging_to(tmp_path / "run"), tmp_path / "run" / "metrics.csv"
    logger.log_metrics({"loss": 1.0}, 0)
    before, mode = logged.read_text(), logged.stat().st_mode

    def killed(*_: Any) -> None:
        raise KeyboardInterrupt

    for owner, call in ((csv.DictWriter, "writerows"), (os, "replace")):
        with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
            patched.setattr(owner, call, killed)
            logging_to(tmp_path / "run").experiment._rewrite_with_new_header(["loss", "reward", "step"])
        assert logged.read_text() == before and [one.name for one in logged.parent.iterdir() if "part" in one.name] == []
    logger.log_metrics({"loss": 0.5, "reward": 1.0}, 1)
    with logged.open() as file:
        assert list(csv.reader(file)) == [["loss", "reward", "step"], ["1.0", "", "0"], ["0.5", "1.0", "1"]]
    assert logged.stat().st_mode == mode


def test_a_new_metric_takes_no_memory_for_the_rows_before_it(tmp_path: Path) -> None:
    logger, elsewhere = logging_to(tmp_path / "run"), tmp_path / "elsewhere.csv"
    logger.log_metrics({f"metric_{k}": float(k) for k in range(10)}, 0)
    logged = tmp_path / "run" / "metrics.csv"
    header, row = logged.read_text().splitlines()
    elsewhere.write_text("\n".join([header, *[row] * 5000, ""]))
    logged.unlink()
    logged.symlink_to(elsewhere)
    tracemalloc.start()
    try:
        logger.log_metrics({"new": 1.0}, 1)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 1_000_000
    assert logged.is_symlink() and len(elsewhere.read_text().splitlines()) == 5002
