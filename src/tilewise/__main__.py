"""Entry point of `python -m tilewise`."""

from .cli import main

# Worker processes of precompile import this module again.
if __name__ == "__main__":
    raise SystemExit(main())
