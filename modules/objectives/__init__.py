"""Objectives: one short file each, named in YAML; pure functions that know neither trees nor ranks.

    model:
      objective: gspo                      # or the import path of your own function
      objective_options: {clip_high: 4.0e-4}

A function is called with what its parameters are named after (`modules.algorithm.LossInputs`: `logprobs`, `old`,
`advantages` and so on, for the sequences at hand, concatenated), the rest of them being its options. One that asks for
`groups`, `episodes` or `rewards` couples sequences: it is called with all of the optimizer step at once, as is one with
`@traits(whole_step=True)`.

It returns the loss of each token [T], which is weighted and summed over trained tokens (`token_weights` in
`aggregation.py`; by default gspo and sapo "sequence_mean", dpo and tba "episode_mean", all others "token_mean", as are
your own without `@traits(aggregation=...)`); or that and a dict of [T] tensors, whose means are logged by name: over
trained tokens, or where the objective couples sequences weighted as its losses are, with "episode_mean" over the
episodes of tba and the pairs of dpo. What is logged anyway (`modules.algorithm.LOGGED`) keeps its names.
"""

from modules.objectives.aggregation import AGGREGATIONS, Aggregation, token_weights
from modules.objectives.cispo import cispo
from modules.objectives.dapo import dapo
from modules.objectives.decoupled_ppo import decoupled_ppo
from modules.objectives.dpo import dpo
from modules.objectives.gspo import gspo
from modules.objectives.m2po import m2po
from modules.objectives.ppo_clip import ppo_clip
from modules.objectives.reinforce import reinforce
from modules.objectives.sapo import sapo
from modules.objectives.sft import sft
from modules.objectives.tba import tba
from modules.objectives.traits import Traits, traits, traits_of

OBJECTIVES = {f.__name__: f for f in (ppo_clip, decoupled_ppo, dapo, gspo, cispo, sapo, m2po, tba, reinforce, sft, dpo)}
"""Objectives by the names they have in YAML."""

__all__ = ["AGGREGATIONS", "OBJECTIVES", "Aggregation", "Traits", "token_weights", "traits", "traits_of"]
