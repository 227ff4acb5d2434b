"""LightningModules: what is trained, how. `PolicyModule` (RL), `ActorCriticModule` (with a critic), `SFTModule`
(imitation), `TreeModule` (their base)."""

from modules.actor_critic import ActorCriticModule
from modules.algorithm import Regulariser
from modules.models import ModelSource, Refresh, build_model
from modules.policy import PolicyModule
from modules.sft import SFTModule
from modules.tree_module import TreeModule

__all__ = [
    "ActorCriticModule",
    "ModelSource",
    "PolicyModule",
    "Refresh",
    "Regulariser",
    "SFTModule",
    "TreeModule",
    "build_model",
]
