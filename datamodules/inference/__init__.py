"""Inference engines that roll out episodes: `EmbeddedEngine` (in this process); `InferenceEngine` is their base,
`ServerEngine` what those with servers add."""

from datamodules.inference.embedded import EmbeddedEngine
from datamodules.inference.protocol import (
    GenerationError,
    GenerationRequest,
    GenerationResponse,
    InferenceEngine,
    ServerEngine,
    WeightUpdate,
)

__all__ = [
    "EmbeddedEngine",
    "GenerationError",
    "GenerationRequest",
    "GenerationResponse",
    "InferenceEngine",
    "ServerEngine",
    "WeightUpdate",
]
