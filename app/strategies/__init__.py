"""Lightning strategies: how the ranks of a training run share work and memory."""

from app.strategies.dta import DTAStrategy
from app.strategies.ranks.sharing import RankZeroError

__all__ = ["DTAStrategy", "RankZeroError"]
