"""`python -m app ...`: the same as the console script `arborist ...`."""

from app.cli import main

if __name__ == "__main__":
    main()
