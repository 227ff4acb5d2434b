"""Reward functions, and the worker processes that run them."""

from datamodules.rewards.functions import BySource, RegexMatch, Reward, WeightedSum, exact_match, math_verify
from datamodules.rewards.options import Judgement, RewardOptions
from datamodules.rewards.pool import RewardError, RewardPool
from datamodules.rewards.reasoning_gym import ReasoningGym

__all__ = [
    "BySource",
    "Judgement",
    "ReasoningGym",
    "RegexMatch",
    "Reward",
    "RewardError",
    "RewardOptions",
    "RewardPool",
    "WeightedSum",
    "exact_match",
    "math_verify",
]
