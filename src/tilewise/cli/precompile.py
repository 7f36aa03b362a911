"""`python -m tilewise precompile`: specs and presets to keys, keys to a folder, with a progress bar."""

from __future__ import annotations

import argparse
import sys
import time


def run(given: argparse.Namespace) -> int:
    """Compile what the command line asks for; return 0, or 1 if a kernel failed.

    Raises:
        ValueError: wrong usage. RuntimeError: something is not installed. OSError: the folder cannot be written.
    """
    from ..compile import aot
    from ..compile.keytext import from_text

    presets = [name for name in given.preset.split(",") if name]
    entries = [entry for name in presets for entry in aot.preset_entries(name)]
    entries += [entry for path in given.spec for entry in aot.read_spec(path)]
    if not entries and not given.key:
        raise ValueError(f"nothing to compile: give --preset ({', '.join(aot.PRESETS)}), --spec or --key")
    if given.jobs < 1:
        raise ValueError(f"--jobs: expected at least 1, got {given.jobs}")
    wanted = [from_text(text) for text in given.key]
    for arch in given.arch.split(",") if entries else []:
        found, refused = aot.keys(entries, arch)
        wanted += found
        for text in refused:
            print(f"left out on {arch}: {text}", file=sys.stderr)
    unique = list({key.digest: key for key in wanted}.values())
    if not unique:
        raise ValueError("no call of the specs is supported; see above")
    start = time.perf_counter()
    failed = _with_bar(unique, given)
    for text, reason in failed.items():
        print(f"failed: {text}\n  {reason}", file=sys.stderr)
    good = len(unique) - len(failed)
    print(f"{good} of {len(unique)} kernels in {given.output}, {time.perf_counter() - start:.1f} s")
    print(f"use them with TILEWISE_KERNELS={given.output.resolve()}")
    return 1 if failed else 0


def _with_bar(keys: list, given: argparse.Namespace) -> dict[str, str]:  # type: ignore[type-arg]
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from ..compile import aot

    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("compiling", total=len(keys))
        return aot.precompile(
            keys, given.output, given.jobs, lambda words: bar.update(task, advance=1, description=words)
        )
