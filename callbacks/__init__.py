"""Lightning callbacks; name them in YAML as `class_path: callbacks.WeightSync` and so on."""

from callbacks.base import StepMetrics, run_dir
from callbacks.coach import Coach
from callbacks.hang_dump import HangDump
from callbacks.interruption import Interruption
from callbacks.opening import Opening
from callbacks.pictures import Pictures
from callbacks.progress import Progress
from callbacks.report import Report
from callbacks.reward_logger import RewardLogger
from callbacks.save_last import SaveLast
from callbacks.save_pretrained import SavePretrained
from callbacks.summary import Summary
from callbacks.throughput import Throughput
from callbacks.validate_ends import ValidateEnds
from callbacks.weight_sync import WeightSync

__all__ = [
    "Coach",
    "HangDump",
    "Interruption",
    "Opening",
    "Pictures",
    "Progress",
    "Report",
    "RewardLogger",
    "SaveLast",
    "SavePretrained",
    "StepMetrics",
    "Summary",
    "Throughput",
    "ValidateEnds",
    "WeightSync",
    "run_dir",
]
