"""Where training data comes from: `RolloutDataModule`, `ReplayDataModule`, `RecordedDataModule`,
`SupervisedDataModule`, `PairsDataModule`.

Imported when first asked for: reward workers import this package too, and need neither Lightning nor torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from datamodules.recorded import RecordedDataModule
    from datamodules.replay import ReplayDataModule
    from datamodules.rollout import RolloutDataModule
    from datamodules.supervised import PairsDataModule, SupervisedDataModule

__all__ = ["PairsDataModule", "RecordedDataModule", "ReplayDataModule", "RolloutDataModule", "SupervisedDataModule"]

_HOMES = {
    "PairsDataModule": "supervised",
    "RecordedDataModule": "recorded",
    "ReplayDataModule": "replay",
    "RolloutDataModule": "rollout",
    "SupervisedDataModule": "supervised",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
