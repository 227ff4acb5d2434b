"""Corrections for a sampler whose log-probabilities are not the trainer's (other kernels, other precision, older
weights): one short file each; weights of tokens, computed from exp(old - behavior).

    model:
      correction: truncated                # or the import path of your own function
      correction_options: {level: token, cap: 2.0}   # with gspo the default level is geometric

A function is called with what its parameters are named after, as an objective is: `old` [T], the trainer's policy at
the start of the batch; `behavior` [T], the sampler; `mask`, `cu_seqlens`. It returns weights [T] that multiply the
objective's losses, without gradient; or these and a dict of [T] tensors to log. Denominators count all trained tokens.
"""

from modules.corrections.masked import masked
from modules.corrections.truncated import truncated

CORRECTIONS = {f.__name__: f for f in (truncated, masked)}
"""Corrections by the names they have in YAML."""

__all__ = ["CORRECTIONS"]
