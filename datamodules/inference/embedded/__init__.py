"""Rollouts from a model in this process (`EmbeddedEngine`)."""

from datamodules.inference.embedded.engine import EmbeddedEngine

__all__ = ["EmbeddedEngine"]
