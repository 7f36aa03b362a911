"""`python -m tilewise`: precompile and doctor."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path


def parser() -> argparse.ArgumentParser:
    """Return the command line's parser."""
    top = argparse.ArgumentParser(prog="python -m tilewise", description="Exact attention for PyTorch.")
    commands = top.add_subparsers(dest="command", required=True)
    commands.add_parser("doctor", help="say what is installed, what runs here, and what is wrong")
    ahead = commands.add_parser("precompile", help="compile kernels into a folder; needs no GPU")
    ahead.add_argument("-o", "--output", type=Path, required=True, metavar="DIR", help="folder, added to if it exists")
    ahead.add_argument("--arch", default="sm_90a", help="architectures, separated by commas (default: sm_90a)")
    ahead.add_argument("--preset", default="", help="model families, separated by commas: llama, deepseek, ...")
    ahead.add_argument("--spec", type=Path, action="append", default=[], metavar="FILE", help="calls, in JSON")
    ahead.add_argument("--key", action="append", default=[], metavar="JSON", help="a kernel, as an error printed it")
    ahead.add_argument("-j", "--jobs", type=int, default=os.cpu_count() or 1, help="processes (default: one a core)")
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status: 0 good, 1 something is wrong, 2 wrong usage."""
    given = parser().parse_args(arguments)
    if given.command == "doctor":
        from .doctor import report

        return report()
    from .precompile import run

    try:
        return run(given)
    except (ValueError, RuntimeError, OSError) as error:
        print(f"tilewise precompile: {error}", file=sys.stderr)
        return 2
