"""Rollouts from SGLang servers over HTTP (`SGLangEngine`), which live in processes and environments of their own."""

from datamodules.inference.sglang.engine import SGLangEngine
from datamodules.inference.sglang.roster import Launch

__all__ = ["Launch", "SGLangEngine"]
