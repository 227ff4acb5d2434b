"""The models of a run: where one comes from, adapters in place of its weights, and the frozen reference."""

from modules.models.adapters import stacked_experts
from modules.models.reference import ReferencePolicy, Refresh, WithoutAdapters
from modules.models.source import ModelSource, build_model, image_processor_of, inner_model

__all__ = [
    "ModelSource",
    "ReferencePolicy",
    "Refresh",
    "WithoutAdapters",
    "build_model",
    "image_processor_of",
    "inner_model",
    "stacked_experts",
]
