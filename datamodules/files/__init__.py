"""Data files: where they are found, how far what stands in them is believed, and the recordings of rollouts."""
