"""What is computed, in which order, and what it costs: pure data, no torch."""
