"""Judges: rewards that a language model gives, behind any URL that speaks the OpenAI API."""

from datamodules.rewards.judges.base import Judge
from datamodules.rewards.judges.model import Budget, JudgeModel
from datamodules.rewards.judges.ranking import RankingJudge
from datamodules.rewards.judges.rubric import RubricJudge

__all__ = ["Budget", "Judge", "JudgeModel", "RankingJudge", "RubricJudge"]
