"""Lightning's `bf16-true` and `64-true` without their global: they set torch's default dtype during every step.

That dtype belongs to the whole process. Rollouts play on other threads meanwhile, and a tensor created there without a
dtype (a sampler's log-probabilities, say) would be rounded to bfloat16 whenever the trainer happened to be busy.

Promises: parameters and inputs are cast as Lightning casts them, but for what transformers leaves in float32 where it
loads a model in half precision: frequencies of rotary embeddings, and tensors that its classes name. What is trained is
so the model that is saved and served. torch's default dtype is never changed. A module that needs tensors of another
dtype than float32 names it.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from lightning.pytorch.plugins.precision import DoublePrecision, HalfPrecision, Precision
from torch.nn import Module

from app.tree import cast_quantised, kept_in_float32


class _KeepsDefaultDtype:
    """Goes before a precision plugin of Lightning's."""

    def forward_context(self) -> AbstractContextManager[None]:
        return nullcontext()

    def tensor_init_context(self) -> AbstractContextManager[None]:
        return nullcontext()

    def module_init_context(self) -> AbstractContextManager[None]:
        return nullcontext()


class _Half(_KeepsDefaultDtype, HalfPrecision):
    def convert_module(self, module: Module) -> Module:
        dtype = self._desired_input_dtype
        kept = {name: tensor.detach().float() for name, tensor in kept_in_float32(module, dtype).items()}
        module = super().convert_module(module)
        for name, tensor in kept_in_float32(module, dtype).items():
            tensor.data = kept[name]
        cast_quantised(module, dtype)
        return module


class _Double(_KeepsDefaultDtype, DoublePrecision):
    pass


def keep_default_dtype(plugin: Precision | None) -> Precision | None:
    """The same precision without the global, for Lightning's own two plugins that have one; others as they are."""
    if plugin is not None and type(plugin) is HalfPrecision:
        return _Half(plugin.precision)
    if type(plugin) is DoublePrecision:
        return _Double()
    return plugin
