"""Advantages: one short file an estimator, named in YAML; each a pure function of a whole rollout batch.

    model:
      advantage: grpo                      # or the import path of your own function
      advantage_options: {std: none}

`PolicyModule` asks for them once a batch (`_credit`). A function is called with what its parameters are named after,
the rest of them being its options:

- `batch`: the whole `RolloutBatch`, which rank 0 has, so that nothing has to be reduced.
- `values`: float32 [T], the critic's value of the state each trained token was drawn in (needs `ActorCriticModule`).
- `entropy`: [T], nats, of the policy at the start of the batch, which takes a pass.
- `token_rewards`: float32 [T], costs that regularisers put into the reward, and rewards of single calls. Where a
  function does not ask for them they are added to the episodes' rewards.

It returns advantages, float [T], of which those of trained tokens are read; one for a critic returns an `Estimate`.
"""

from modules.advantages.discounted import discounted
from modules.advantages.distill import distill
from modules.advantages.estimate import Estimate
from modules.advantages.gae import gae
from modules.advantages.gae_turn import gae_turn
from modules.advantages.grpo import dr_grpo, grpo
from modules.advantages.high_entropy import high_entropy, is_of_ones_own
from modules.advantages.reinforce_pp import reinforce_pp
from modules.advantages.reward import reward
from modules.advantages.rloo import rloo
from modules.advantages.tree import tree

ADVANTAGES = {
    f.__name__: f
    for f in (grpo, dr_grpo, rloo, reinforce_pp, reward, discounted, distill, tree, high_entropy, gae, gae_turn)
}
"""Estimators by the names they have in YAML."""

__all__ = ["ADVANTAGES", "Estimate", "is_of_ones_own"]
