"""Checkpoint directories: what is in them, and how they appear whole or not at all."""
