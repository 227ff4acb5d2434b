"""LightningModules: what is trained, how. `PolicyModule` (RL), `ActorCriticModule` (with a critic), `SFTModule`
(imitation), `RewardModule` (reward models), `TreeModule` (their base)."""

from modules.actor_critic import ActorCriticModule
from modules.advantages.teacher import TeacherServer
from modules.algorithm import Regulariser
from modules.models import ModelSource, Refresh, build_model
from modules.policy import PolicyModule
from modules.supervised import RewardModule, SFTModule
from modules.tree_module import TreeModule

__all__ = [
    "ActorCriticModule",
    "ModelSource",
    "PolicyModule",
    "Refresh",
    "Regulariser",
    "RewardModule",
    "SFTModule",
    "TeacherServer",
    "TreeModule",
    "build_model",
]
