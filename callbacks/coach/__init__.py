"""The coach: one sentence about what holds a run back, with the number it is judged by and what to change."""

from callbacks.coach.callback import Coach

__all__ = ["Coach"]
