"""What a pass over a model in shards (torch's `fully_shard`) has to heed.

Promise: a model whose parameters are whole is left alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule


@contextmanager
def casts_are_made_anew(model: nn.Module) -> Iterator[None]:
    """Inside, autocast keeps no copies of the weights of a sharded model.

    A layer's gradients are summed over ranks when backward leaves it. Through a copy that the forward of an earlier
    chunk made they would arrive later than that: autograd takes the youngest operations first.
    """
    before = torch.is_autocast_cache_enabled()
    if not before or not any(isinstance(module, FSDPModule) for module in model.modules()):
        yield
        return
    torch.clear_autocast_cache()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)
