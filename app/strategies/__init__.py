"""Lightning strategies: how the ranks of a training run share work and memory.

Importing this room registers them by name: `strategy: dta` in YAML, `Trainer(strategy="dta")`; `dta_offload` keeps the
optimizer's state in CPU memory.
"""

from lightning.pytorch.strategies import StrategyRegistry

from app.strategies.dta import DTAStrategy
from app.strategies.ranks.sharing import RankZeroError

StrategyRegistry.register("dta", DTAStrategy, description="trees dealt over ranks, ZeRO-1", override=True)
StrategyRegistry.register(
    "dta_offload",
    DTAStrategy,
    description="the same, with the optimizer's state in CPU memory",
    override=True,
    offload_optimizer=True,
)

__all__ = ["DTAStrategy", "RankZeroError"]
