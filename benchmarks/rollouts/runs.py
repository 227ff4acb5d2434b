"""Whole runs on replayed airline conversations: where the trainer's time goes, asynchronous or not, on a tree or not.

Promises: all settings play and train the same conversations, prompt after prompt, with as many tokens as recorded, for
as many optimizer steps, on servers that are warm; they take turns, in an order that rotates.
"""

from __future__ import annotations

import gc
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch.distributed as dist
from lightning.pytorch import Trainer, seed_everything
from lightning.pytorch.loggers import CSVLogger

from app.strategies import DTAStrategy
from benchmarks.common.measure import spread
from benchmarks.common.servers import Servers
from callbacks import Throughput, WeightSync
from callbacks.pictures import read_metrics
from callbacks.throughput import PARTS
from datamodules import RolloutDataModule
from datamodules.inference.sglang import SGLangEngine
from datamodules.prompts import TauPrompts
from datamodules.workflows import TauReplayWorkflow
from modules import ModelSource, PolicyModule


@dataclass(frozen=True)
class Setting:
    """One way to run."""

    name: str
    max_staleness: int
    mode: str


SETTINGS = (
    Setting("synchronous, dense-leaf", 0, "disabled"),
    Setting("synchronous, tree", 0, "dta"),
    Setting("asynchronous, tree", 2, "dta"),
)
TASKS: list[str | int] = [1, 5, 21, 37, 39, 41, 44, 47]  # some trials succeed and some fail


@dataclass(frozen=True)
class Work:
    """How much: `turns` of each conversation with replies of at most `new_tokens`, `steps` optimizer steps."""

    data: str
    model: dict[str, Any]
    turns: int
    new_tokens: int
    steps: int
    group_size: int
    latency_s: float = 0.2


def run_once(setting: Setting, work: Work, directory: Path, servers: Servers) -> dict[str, Any]:
    """Seconds of one run by part, from the first request to the end of the last step; and CPU seconds of all."""
    seed_everything(0, verbose=False)
    module = PolicyModule(ModelSource(config=work.model), tree_training_mode=setting.mode)  # type: ignore[arg-type]
    data = RolloutDataModule(
        prompts=TauPrompts(work.data, vocab_size=work.model["vocab_size"], tasks=TASKS),
        workflow=TauReplayWorkflow(max_turns=work.turns, max_new_tokens=work.new_tokens, tool_latency_s=work.latency_s),
        # All prompts begin with the same 3,800 tokens, which must not keep them on one server.
        engine=SGLangEngine(servers.urls, start_timeout_s=60.0, load_tokens=4096),
        tokenizer="char:0123456789",
        batch_size=1,
        group_size=work.group_size,
        max_staleness=setting.max_staleness,
        batches_per_epoch=work.steps,
    )
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        strategy=DTAStrategy(),
        callbacks=[WeightSync(), Throughput()],
        logger=CSVLogger(str(directory.parent), name="", version=directory.name, flush_logs_every_n_steps=1),
        log_every_n_steps=1,
        default_root_dir=str(directory),
        max_steps=work.steps,
        check_val_every_n_epoch=None,
        use_distributed_sampler=False,
        num_sanity_val_steps=0,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
    )
    own, other = time.process_time(), _cpu_seconds(servers)
    try:
        trainer.fit(module, datamodule=data)
    finally:
        data.close()
        del trainer, module
        data.trainer = None
        gc.collect()
        if dist.is_initialized():
            dist.destroy_process_group()
    series = {name: values for name, (_, values) in read_metrics(directory / "metrics.csv").items()}
    assert len(series["time/step"]) == work.steps, f"{len(series['time/step'])} of {work.steps} steps were logged"
    parts = {part: sum(series[f"time/{part}"]) for part in PARTS}
    wall = sum(series["time/step"])
    return {
        "wall": wall,
        **parts,
        "other": max(0.0, wall - sum(parts.values())),
        "wait_after_first": sum(series["time/wait"][1:]),
        "cpu_trainer": time.process_time() - own,
        "cpu_server": _cpu_seconds(servers) - other,
        "tokens_dense": sum(series["tokens/dense"]),
        "tokens_leaf": sum(series["tokens/leaf"]),
        "tokens_tree": sum(series["tokens/tree"]),
        "failed": series["rollouts/failed"][-1],
    }


def compare_runs(work: Work, repeats: int, directory: Path, servers: Servers) -> dict[str, Any]:
    """Every setting `repeats` times, after one short run that warms server and libraries up."""
    from dataclasses import replace

    run_once(SETTINGS[-1], replace(work, steps=1), directory / "warm", servers)
    runs: dict[str, list[dict[str, Any]]] = {setting.name: [] for setting in SETTINGS}
    for repeat in range(repeats):
        for number in range(len(SETTINGS)):
            setting = SETTINGS[(number + repeat) % len(SETTINGS)]
            here = directory / f"{repeat}_{setting.max_staleness}_{setting.mode}"
            runs[setting.name].append(run_once(setting, work, here, servers))
            print(f"{setting.name}: {runs[setting.name][-1]['wall']:.1f} s", flush=True)
    dense, tree, both = (runs[setting.name] for setting in SETTINGS)
    return {
        "steps": work.steps,
        "turns": work.turns,
        "new_tokens": work.new_tokens,
        "group_size": work.group_size,
        "latency_s": work.latency_s,
        "model": work.model,
        "servers": len(servers.urls),
        "settings": {
            name: {key: spread([one[key] for one in all_of]) for key in all_of[0]} for name, all_of in runs.items()
        },
        "idle_ratio": spread([a["wait"] / s["wait"] for a, s in zip(both, tree, strict=True)]),
        "idle_wanted": 0.5,
        "speedup": spread([d["wall"] / a["wall"] for a, d in zip(both, dense, strict=True)]),
        "speedup_of_asynchrony": spread([s["wall"] / a["wall"] for a, s in zip(both, tree, strict=True)]),
        "speedup_of_tree": spread([d["wall"] / s["wall"] for s, d in zip(tree, dense, strict=True)]),
    }


def draw(result: dict[str, Any], path: Path) -> None:
    """Stacked bars: where each setting's time goes."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    parts = [*PARTS, "other"]
    names = list(result["settings"])
    figure, axes = pyplot.subplots(figsize=(9, 3.2))
    left = [0.0] * len(names)
    for part in parts:
        widths = [result["settings"][name][part]["median"] for name in names]
        axes.barh(names, widths, left=left, label=part)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    axes.invert_yaxis()
    axes.set_xlabel(f"seconds for {result['steps']} optimizer steps")
    axes.legend(ncols=len(parts), loc="lower center", bbox_to_anchor=(0.4, 1.0), frameon=False)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _cpu_seconds(servers: Servers) -> float:
    """Of all servers and their children, user and system."""
    total = 0.0
    for server in servers.processes:
        main = psutil.Process(server.pid)
        times = [process.cpu_times() for process in (main, *main.children(recursive=True))]
        total += sum(one.user + one.system for one in times)
    return total
