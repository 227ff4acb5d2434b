"""Regularisers: one short file each; costs of tokens that are added to the loss or taken from the reward.

    model:
      regularisers:
        - {name: kl, coef: 0.05}                                          # in the loss, k3
        - {name: kl, coef: 0.05, where: reward, options: {estimator: k1}}
        - {name: forward_kl, coef: 1.0, options: {k: 20}}                 # of the reference's 20 likeliest tokens
        - {name: entropy, coef: 0.01}
        - {name: overlong, coef: 1.0, where: reward, options: {max_tokens: 512, buffer_tokens: 128}}

A coefficient may change in a run: `coefficients.py`.

A function (or the import path of your own) is called with what its parameters are named after, as an objective is, and
returns the cost of each token [T], in nats or units of its own. Into the reward go costs that need no gradient; there
`logprobs` are the sampler's (of tokens of version -1, which have none, those of the policy at the start of the batch),
and `episodes` and `turns` are int64 [n], of each sequence.
"""

from modules.regularisers.coefficients import Coef, Coefs, CoefState, LinearCoef, ProportionalCoef, SteppedCoef
from modules.regularisers.entropy import entropy
from modules.regularisers.forward_kl import LIKELIEST, forward_kl
from modules.regularisers.kl import k1, k2, k3, kl, kl_weighted
from modules.regularisers.overlong import overlong

REGULARISERS = {f.__name__: f for f in (kl, kl_weighted, forward_kl, entropy, overlong)}
"""Regularisers by the names they have in YAML."""

__all__ = [
    "LIKELIEST",
    "REGULARISERS",
    "Coef",
    "CoefState",
    "Coefs",
    "LinearCoef",
    "ProportionalCoef",
    "SteppedCoef",
    "k1",
    "k2",
    "k3",
]
