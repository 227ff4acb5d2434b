"""Judges: rewards that a model gives: a language model behind any URL that speaks the OpenAI API, or a reward model."""

from datamodules.rewards.judges.base import Judge
from datamodules.rewards.judges.model import Budget, JudgeModel
from datamodules.rewards.judges.policy import PolicyModel
from datamodules.rewards.judges.ranking import RankingJudge
from datamodules.rewards.judges.reward_model import RewardModel
from datamodules.rewards.judges.rubric import RubricJudge

__all__ = ["Budget", "Judge", "JudgeModel", "PolicyModel", "RankingJudge", "RewardModel", "RubricJudge"]
