"""The tree engine's self-check on several ranks: every rank checks its own part, and all come to the same decision.

Promises: one collective, which a rank without sequences joins too; when any rank's check fails, all ranks stop, or all
fall back to dense-leaf execution.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor

from app.tree import PrefixTree, SelfCheckError, TreeEngine

SelfCheck = Literal["error", "fallback", "skip"]
SELF_CHECKS: tuple[str, ...] = ("error", "fallback", "skip")


def check_together(
    engine: TreeEngine,
    tree: PrefixTree,
    want: Sequence[str],
    fall_back: bool,
    sum_over_ranks: Callable[[Tensor], Tensor],
) -> bool:
    """Collective: runs the self-check on a part of this rank's `tree`. False when no rank had anything to compare.

    Raises:
        SelfCheckError: some rank's tree and dense execution differ, and `fall_back` is False.
    """
    report = engine.verify(tree, want)
    failed = report is not None and not report.passed
    device = next(engine.model.parameters()).device
    compared, mismatches = sum_over_ranks(
        torch.tensor([float(report is not None), float(failed)], device=device)
    ).tolist()
    if not compared:
        return False
    if mismatches:
        findings = str(report) if failed else f"tree and dense execution differ on {mismatches:.0f} other rank(s)"
        if not fall_back:
            raise SelfCheckError(
                f"{type(engine.model).__name__}: {findings}. Some layer mixes tokens past the attention the engine"
                " controls: set model.self_check to 'fallback' (every sequence alone, slower), or to 'skip' if you know"
                " better"
            )
        engine.fall_back(findings)
    return True
