"""Weights that are published in few bits alone (GPT-OSS in MXFP4, DeepSeek-V3 in FP8), read back as they are loaded.

Promises: what is loaded is what the file's numbers stand for, rounded once, in the dtypes that the model has from whole
weights; nothing of the format stays on the model, so that it is saved, and goes to engines, whole.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import PretrainedConfig, PreTrainedModel
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING

from app.tree import kept_in_float32


def read_whole(config: PretrainedConfig) -> str:
    """Has `from_pretrained` read weights back, and says in what they are kept. "" where they are whole, or transformers
    cannot: such weights are refused once they are there."""
    given = getattr(config, "quantization_config", None)
    method = str(given.get("quant_method")) if isinstance(given, dict) else ""
    kind = AUTO_QUANTIZATION_CONFIG_MAPPING.get(method)
    if kind is None or "dequantize" not in inspect.signature(kind).parameters:
        return ""
    config.quantization_config = dict(given or {}, dequantize=True)
    return method


@contextmanager
def cut_blocks(config: PretrainedConfig) -> Iterator[None]:
    """FP8 matrices whose last blocks are cut (DeepSeek-V3 has one of 576 rows, which are five blocks of 128) are read
    right in here: transformers takes blocks to be as large as the matrix divided by its scales."""
    given = getattr(config, "quantization_config", None)
    size = given.get("weight_block_size") if isinstance(given, dict) else None
    if not size:
        yield
        return
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    kind: Any = Fp8Dequantize
    divided = kind._dequantize_one

    def padded(self: Any, quantized: Tensor, scales: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        packed = not quantized.is_floating_point() or "float4" in str(quantized.dtype)  # other formats in the same file
        if packed or scales.dim() < 2:
            return divided(self, quantized, scales, *args, **kwargs)
        rows, columns = quantized.shape[-2:]
        more = [count * block - n for count, block, n in zip(scales.shape[-2:], size, (rows, columns), strict=True)]
        if not any(more) or not all(0 <= n < block for n, block in zip(more, size, strict=True)):
            return divided(self, quantized, scales, *args, **kwargs)
        whole = pad(quantized.float(), (0, more[1], 0, more[0]))
        read: Tensor = divided(self, whole, scales, *args, **kwargs)
        return read[..., :rows, :columns].contiguous()

    kind._dequantize_one = padded
    try:
        yield
    finally:
        kind._dequantize_one = divided


def settle_whole(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Gives weights the dtypes that they have from a file of whole ones, where transformers left those of this file;
    and forgets how they were kept, which transformers 5.17 would save them by."""
    own = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    kept = kept_in_float32(model, dtype)
    for name in own.keys() & model.state_dict().keys():
        if own[name].is_floating_point():
            own[name].data = own[name].data.to(torch.float32 if name in kept else dtype)
    if hasattr(model, "_weight_conversions"):
        del model._weight_conversions
