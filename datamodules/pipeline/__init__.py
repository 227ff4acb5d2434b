"""The engine room of `RolloutDataModule`: prompts are admitted, played, kept in books and handed to Lightning.

What all datamodules share of it: `steps` (one item an optimizer step) and `fingerprint` (a stream that goes on).
"""
