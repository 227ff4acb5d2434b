"""`python -m app ...`: the same as the console script `arborist ...`."""

import sys


def main() -> None:
    """As `app.cli.main`, and Ctrl-C ends without a traceback while the imports still run (seconds)."""
    try:
        from app.cli import main as run
    except KeyboardInterrupt:
        sys.exit(130)
    run()


if __name__ == "__main__":
    main()
