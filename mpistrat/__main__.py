"""`python -m mpistrat` is the command `mpistrat`."""

from .cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())
