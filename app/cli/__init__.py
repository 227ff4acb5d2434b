"""The command line: `main`. May import everything; nothing imports it."""

from app.cli.fit import main

__all__ = ["main"]
