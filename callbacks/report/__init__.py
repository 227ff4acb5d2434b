"""The report of a run: what is kept for it on the way (`Report`), and `arborist look`'s page."""

from callbacks.report.callback import Report

__all__ = ["Report"]
