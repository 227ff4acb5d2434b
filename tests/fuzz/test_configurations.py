"""Hostile values in every option: a configuration trains two sane steps, or is refused in lines that name the key.

One option at a time gets one value, through the command line, in this process. What may be accepted is said beside the
option; everything else must be refused with exit code 2, before a step is made, without a traceback, and within a
deadline. `ARBORIST_FUZZ=500` draws so many cases instead of the few that fit in `make test` (all of them: a large
number).
"""

from __future__ import annotations

import csv
import math
import os
import random
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import yaml

from app.cli import main
from tests.helpers.doubles import conversations
from tests.helpers.tiny_model import TINY_WITH_ENDS

CASES = int(os.environ.get("ARBORIST_FUZZ", "15"))
DEADLINE_S = 60.0  # for one case: a machine may be busy
MOST_LINES = 12

_TRAINER = {"accelerator": "cpu", "max_steps": 2, "enable_progress_bar": False, "enable_checkpointing": False}
_OPTIMIZER = {"class_path": "torch.optim.AdamW", "init_args": {"lr": 1e-3}}
_POLICY = {"model": {"config": TINY_WITH_ENDS}, "optimizer": _OPTIMIZER}
RECORDED = {"class_path": "datamodules.RecordedDataModule", "init_args": {"path": "made.npz"}}
ROLLED_OUT = {
    "class_path": "datamodules.RolloutDataModule",
    "init_args": {
        "prompts": {"class_path": "datamodules.prompts.ArithmeticPrompts", "init_args": {"digits": 1, "seed": 2}},
        "workflow": {"class_path": "tests.datamodules.pipeline.producers.Flow"},
        "engine": {"class_path": "datamodules.inference.EmbeddedEngine", "init_args": {"kv_cache_tokens": 512}},
        "tokenizer": "char:0123456789+-*=",
        "batch_size": 2,
        "group_size": 2,
    },
}

HOSTILE: tuple[Any, ...] = (
    -1,
    0,
    0.5,
    10**9,
    99999999999999999999,
    1e30,
    1e-30,
    math.nan,
    math.inf,
    -math.inf,
    None,
    True,
    "",
    "x",
    "/etc",
    "a\0b",
    "\ud83d",
    [],
    [1],
    {},
    {"a": 1},
    "${HOME}",
    "!!python/object:os.system",
    "x" * 5000,
)


def nothing(value: Any) -> bool:
    return False


def anything(value: Any) -> bool:
    return True


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def count(least: int, most: float, none: bool = False) -> Callable[[Any], bool]:
    """A whole number, as YAML's 1e30 is not."""
    return lambda v: (none and v is None) or (_number(v) and isinstance(v, int) and least <= v <= most)


def real(least: float, most: float, none: bool = False, open_: bool = False) -> Callable[[Any], bool]:
    """A finite number, above `least` when `open_`."""
    return lambda v: (none and v is None) or (_number(v) and (least < v if open_ else least <= v) and v <= most)


def flag(value: Any) -> bool:
    return isinstance(value, bool)


MILLIONS = 10**7
_C, _M, _D, _T = "model.init_args.model.config.", "model.init_args.", "data.init_args.", "trainer."

# Option -> which of the hostile values may be accepted. An option that takes text or lists of any kind is not here.
OPTIONS: dict[str, Callable[[Any], bool]] = {
    "seed_everything": lambda v: v is None or count(0, 2**32 - 1)(v) or isinstance(v, bool),
    "run_dir": lambda v: v is None or (isinstance(v, str) and v not in ("", "/etc", "a\0b") and len(v) < 256),
    "ckpt_path": lambda v: v is None,
    "trainer": nothing,
    "model": nothing,
    "data": nothing,
    "modle": lambda v: v == {},  # which says nothing
    _T + "max_steps": count(-1, math.inf),
    _T + "max_epochs": lambda v: count(-1, math.inf, none=True)(v),
    _T + "precision": lambda v: v is None,
    _T + "strategy": lambda v: v == {},
    _T + "accelerator": nothing,
    _T + "devices": nothing,
    _T + "num_nodes": nothing,
    _T + "gradient_clip_val": real(0, math.inf, none=True),
    _T + "accumulate_grad_batches": count(1, 1),
    _T + "log_every_n_steps": count(0, math.inf, none=True),
    _T + "check_val_every_n_epoch": count(1, math.inf, none=True),
    _T + "callbacks": lambda v: v in (None, []),
    _T + "max_stepz": nothing,
    "without_callbacks": lambda v: v in (None, []),
    _C + "vocab_size": nothing,
    _C + "hidden_size": nothing,
    _C + "intermediate_size": nothing,
    _C + "num_hidden_layers": nothing,
    _C + "num_attention_heads": nothing,
    _C + "num_key_value_heads": nothing,
    _C + "head_dim": nothing,
    _C + "max_position_embeddings": count(64, MILLIONS * 1000),
    _C + "rms_norm_eps": real(0, 0.5, open_=True),
    _C + "rope_theta": real(1, 1e30, open_=True),
    _C + "tie_word_embeddings": flag,
    _C + "pad_token_id": anything,
    _C + "model_type": nothing,
    _C + "hiden_size": nothing,
    _M + "model.dtype": nothing,
    _M + "model.path": nothing,
    _M + "optimizer.init_args.lr": real(0, 10, open_=True),
    _M + "optimizer.init_args.eps": real(0, 1),
    _M + "optimizer.init_args.weight_decay": real(0, 1000),
    _M + "optimizer.init_args.betas": nothing,
    _M + "optimizer.class_path": nothing,
    _M + "minibatches": nothing,
    _M + "epochs": nothing,
    _M + "seed": count(-(10**30), 10**30, none=True),
    _M + "advantage": lambda v: v is None,
    _M + "objective": nothing,
    _M + "objective_options": lambda v: v in (None, {}),
    _M + "regularisers": lambda v: v in (None, []),
    _M + "correction": lambda v: v is None,
    _M + "aggregation": lambda v: v is None,
    _M + "aggregation_constant": lambda v: v is None,
    _M + "reference": lambda v: v is None,
    _M + "chunk_tokens": count(1, math.inf),
    _M + "live_tokens": count(1, math.inf),
    _M + "attention": nothing,
    _M + "self_check": nothing,
    _M + "tree_training_mode": nothing,
    _D + "path": nothing,
    _D + "tasks_per_batch": count(1, MILLIONS),
    _D + "trials": lambda v: v is None,
    _D + "batches_per_epoch": count(1, math.inf, none=True),
    _D + "min_reward": real(-1e30, 1.0, none=True),
    _D + "shuffle": flag,
    _D + "workload": nothing,
}

# The same for rollouts; a stand-in plays them, so that a case is as quick as one on recorded data.
ROLLOUT_OPTIONS: dict[str, Callable[[Any], bool]] = {
    _D + "batch_size": nothing,
    _D + "group_size": nothing,
    _D + "max_staleness": count(0, 1000),
    _D + "limits": lambda v: v == {},
    _D + "limits.max_concurrent": count(1, MILLIONS, none=True),
    _D + "over_sampling": nothing,
    _D + "batches_per_epoch": count(1, math.inf),
    _D + "validation": lambda v: v == {},
    _D + "validation.temperature": real(0, 0),
    _D + "validation.batch_size": nothing,
    _D + "validation.prompts": lambda v: v is None,
    _D + "reward_options": lambda v: v == {},
    _D + "reward_options.workers": nothing,
    _D + "limits.episode_deadline_s": real(1, MILLIONS),
    _D + "limits.collect_deadline_s": real(1, MILLIONS),
    _D + "stall": lambda v: v == {},
    _D + "stall.after_s": real(0, 450, none=True, open_=True),
    _D + "limits.max_failures": count(1, math.inf),
    _D + "limits.max_filtered": lambda v: v is None,
    _D + "seed": count(-(10**30), 10**30, none=True),
    _D + "tokenizer": nothing,
    _D + "stall.action": nothing,
    _D + "limits.long_prompts": nothing,
    _D + "prompts": nothing,
    _D + "workflow": nothing,
    _D + "engine": nothing,
    _D + "reward": lambda v: v is None,
}


def base(data: dict[str, Any]) -> dict[str, Any]:
    """A configuration that trains two steps of a tiny model on `data` (RECORDED or ROLLED_OUT)."""
    return {"trainer": _TRAINER, "model": {"class_path": "modules.PolicyModule", "init_args": _POLICY}, "data": data}


def _cases() -> list[tuple[str, Any, bool]]:
    """(option, value, with rollouts), in an order that is the same every time."""
    whole = [(option, value, False) for option in OPTIONS for value in HOSTILE]
    whole += [(option, value, True) for option in ROLLOUT_OPTIONS for value in HOSTILE]
    random.Random(0).shuffle(whole)
    return whole


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    directory, before, argv = tmp_path_factory.mktemp("configurations"), Path.cwd(), sys.argv
    os.chdir(directory)
    sys.argv = ["arborist"]
    conversations(directory / "made.npz")
    yield directory
    os.chdir(before)
    sys.argv = argv


def _name(number: int, option: str) -> str:
    return f"{number}-{option.rpartition('.init_args.')[2]}"


@pytest.mark.parametrize(
    ("number", "option", "value", "rolls_out"),
    [pytest.param(number, *case, id=_name(number, case[0])) for number, case in enumerate(_cases()[:CASES])],
)
def test_a_hostile_value_is_refused_or_trains(
    workplace: Path, capsys: pytest.CaptureFixture[str], number: int, option: str, value: Any, rolls_out: bool
) -> None:
    fault = _fault(number, option, value, rolls_out, capsys)
    assert fault is None, f"{option} = {value!r:.60}: {fault}"


def _fault(number: int, option: str, value: Any, rolls_out: bool, capsys: pytest.CaptureFixture[str]) -> str | None:
    """What is wrong with how the command line takes `value`; None for nothing."""
    may = (ROLLOUT_OPTIONS if rolls_out else OPTIONS)[option]
    run_dir = Path(f"run{number}")
    config = {"run_dir": str(run_dir), **base(ROLLED_OUT if rolls_out else RECORDED)}
    config = _with(config, option.split("."), value)
    path = Path(f"case{number}.yaml")
    path.write_text(yaml.safe_dump(config, allow_unicode=False))
    try:
        with _deadline():
            main(["fit", "--config", str(path)])
    except SystemExit as end:
        said = capsys.readouterr().err
        if end.code != 2:
            return f"exit code {end.code}\n{said}"
        last = option.split(".")[-1]
        if "Traceback" in said or len(said.splitlines()) > MOST_LINES or len(said) > 4000:
            return f"{len(said.splitlines())} lines\n{said[:3000]}"
        if last not in said and "found invalid Unicode" not in said:  # that one names line and column
            return f"the key is not named\n{said}"
        return None if not may(value) or "metrics.csv" not in said else f"refused after it began\n{said}"
    except BaseException as error:
        capsys.readouterr()
        if isinstance(error, KeyboardInterrupt):
            raise
        return "".join(traceback.format_exception(error)[-8:])[-2500:]
    capsys.readouterr()
    if not may(value):
        return "accepted"
    trains = option != "run_dir" and value != 0
    return None if not trains or _is_sane(run_dir / "metrics.csv") else "accepted, and trained nonsense"


def _with(config: dict[str, Any], keys: list[str], value: Any) -> dict[str, Any]:
    here = config.get(keys[0])
    inner = value if len(keys) == 1 else _with(here if isinstance(here, dict) else {}, keys[1:], value)
    return {**config, keys[0]: inner}


def _is_sane(metrics: Path) -> bool:
    with metrics.open() as file:
        rows = [row for row in csv.DictReader(file) if row.get("loss")]
    return bool(rows) and all(math.isfinite(float(row[name])) for row in rows for name in ("loss", "grad_norm"))


@contextmanager
def _deadline() -> Iterator[None]:
    def ring(signum: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"still going after {DEADLINE_S:g} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, DEADLINE_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
