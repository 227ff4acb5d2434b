"""What the engine asks of a transformers model before it runs it, and how it checkpoints single forwards of it."""
