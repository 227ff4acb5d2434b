"""Modules that learn from data made by others: `SFTModule` imitates answers, `RewardModule` learns which is better."""

from modules.supervised.reward_model import RewardModule
from modules.supervised.sft import SFTModule

__all__ = ["RewardModule", "SFTModule"]
