"""Where prompts come from: made on the fly (`ArithmeticPrompts`, `ReasoningGymPrompts`; with pictures
`SquaresPrompts`), files (`JsonlPrompts`, `DialoguePairs`), data sets and Parquet (`DatasetPrompts`; with pictures
of its own `EasyVqaPrompts`), recorded conversations (`TauPrompts`), others (`MixedPrompts`, `CurriculumPrompts`,
`StagedPrompts`), your own `PromptSource`."""

from datamodules.prompts.arithmetic import ArithmeticPrompts
from datamodules.prompts.base import Prompt, PromptSource
from datamodules.prompts.curriculum import CurriculumPrompts, StagedPrompts
from datamodules.prompts.dialogues import DialoguePairs
from datamodules.prompts.easy_vqa import EasyVqaPrompts
from datamodules.prompts.jsonl import JsonlPrompts
from datamodules.prompts.mixed import MixedPrompts
from datamodules.prompts.reasoning_gym import ReasoningGymPrompts
from datamodules.prompts.squares import SquaresPrompts
from datamodules.prompts.tables import DatasetPrompts
from datamodules.prompts.tau import TauPrompts

__all__ = [
    "ArithmeticPrompts",
    "CurriculumPrompts",
    "DatasetPrompts",
    "DialoguePairs",
    "EasyVqaPrompts",
    "JsonlPrompts",
    "MixedPrompts",
    "Prompt",
    "PromptSource",
    "ReasoningGymPrompts",
    "SquaresPrompts",
    "StagedPrompts",
    "TauPrompts",
]
