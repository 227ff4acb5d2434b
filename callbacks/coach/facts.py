"""What a rule of the coach knows besides metrics (`Facts`), and what it says (`Advice`)."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from app.tree import triton_lacks
from datamodules.inference.protocol import RolloutData, ServerEngine
from modules.objectives import decoupled_ppo, ppo_clip


@dataclass(frozen=True)
class Advice:
    """What a rule found.

    Attributes:
        rule: its name.
        finding: what is so, with the number, as the beginning of a sentence.
        remedy: what to change, naming options.
        evidence: metrics by name, as the rule saw them.
    """

    rule: str
    finding: str
    remedy: str
    evidence: dict[str, float]

    def __str__(self) -> str:
        return f"{self.finding}: {self.remedy}"


@dataclass(frozen=True)
class Facts:
    """What the rules know of a run besides its metrics. None: the run has no such thing, or it cannot be told.

    Attributes:
        servers: servers that generate; 0 with an engine in the trainer's process.
        max_staleness, batch_size, group_size: of the datamodule; batch_size in groups.
        filtered: a filter drops groups before training. rests: and prompts of such groups come less often.
        corrected: the module weighs tokens by how the sampler differs, or has an objective that takes no correction.
        clip_high: of `ppo_clip` or `decoupled_ppo`, the upper bound of a token's ratio; other objectives mean something
            else by it, or have none.
        clip_norm: trainer.gradient_clip_val; 0 without. by_value: that bounds each number of the gradient.
        passes: optimizer steps a rollout batch.
        unfused: layers compute in low precision on a GPU where torch.compile has Triton, and `elementwise` is "eager".
        best_checkpoint: the one that a ModelCheckpoint kept for the highest val/accuracy: its path, and that accuracy.
    """

    servers: int | None = None
    max_staleness: int | None = None
    batch_size: int | None = None
    group_size: int | None = None
    filtered: bool = False
    rests: bool = False
    corrected: bool = False
    clip_high: float | None = None
    clip_norm: float = 0.0
    by_value: bool = False
    passes: int = 1
    unfused: bool = False
    best_checkpoint: tuple[str, float] | None = None

    @classmethod
    def of(cls, trainer: Trainer, module: Any) -> Facts:
        """Those of a `fit` that begins."""
        data: Any = trainer.datamodule
        rolls_out = isinstance(data, RolloutData)
        algorithm = getattr(module, "algorithm", None)
        return cls(
            servers=_servers(data.engine) if rolls_out else None,
            max_staleness=getattr(getattr(data, "gate", None), "max_staleness", None),
            batch_size=getattr(data, "batch_size", None) if rolls_out else None,
            group_size=getattr(data, "group_size", None),
            filtered=getattr(data, "filter", None) is not None,
            rests=getattr(getattr(data, "limits", None), "rest", None) is not None,
            corrected=_corrected(algorithm),
            clip_high=_clip_high(algorithm),
            clip_norm=float(trainer.gradient_clip_val or 0.0),
            by_value=trainer.gradient_clip_algorithm == "value",
            passes=int(getattr(module, "steps_per_batch", 1)),
            unfused=_unfused(trainer, module),
        )


def best_checkpoint(trainer: Trainer) -> tuple[str, float] | None:
    """`Facts.best_checkpoint`, at this moment."""
    for one in trainer.checkpoint_callbacks:
        if isinstance(one, ModelCheckpoint) and one.monitor == "val/accuracy" and one.best_model_score is not None:
            return one.best_model_path, float(one.best_model_score)
    return None


def _corrected(algorithm: Any) -> bool:
    """Whether there is a correction, or the objective is refused with one (`Algorithm`)."""
    if algorithm is None or algorithm.correction is not None:
        return algorithm is not None
    return algorithm.advantage is None or {"old", "behavior"} <= algorithm.objective.needs


def _clip_high(algorithm: Any) -> float | None:
    objective = getattr(algorithm, "objective", None)
    if objective is None or objective.function not in (ppo_clip, decoupled_ppo):
        return None
    default = inspect.signature(objective.function).parameters["clip_high"].default
    return float(objective.options.get("clip_high", default))


def _unfused(trainer: Trainer, module: Any) -> bool:
    eager, low = getattr(module, "elementwise", None) == "eager", trainer.precision == "bf16-true"
    return eager and low and trainer.strategy.root_device.type == "cuda" and triton_lacks() is None


def _servers(engine: Any) -> int | None:
    if not isinstance(engine, ServerEngine):
        return 0
    launch = getattr(engine, "launch", None)
    return len(getattr(engine, "urls", ())) or getattr(launch, "replicas", None)
