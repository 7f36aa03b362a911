"""What compiled code depends on beside its key: the package's sources, the compiler's packages, the environment."""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import sys
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent.parent

#: Sources that generated code or the calls into it can depend on. The CPU backend and the command line are not.
SOURCES = ("backends/sm*/*.py", "compile/*.py", "cute/*.py", "mods/*.py", "canonical.py", "problem.py", "target.py")

#: Variables of the compiler that change only what it prints and where it leaves files.
HARMLESS = ("_LOG_", "_DUMP_DIR", "_CACHE_DIR", "_SHOW_STACKTRACE", "_PRINT_", "_NO_CACHE", "_DISABLE_FILE_CACHING")


@functools.cache
def sources() -> str:
    """Return the SHA-256 of the sources, by relative name and content."""
    found = hashlib.sha256()
    for path in sorted(p for pattern in SOURCES for p in PACKAGE.glob(pattern)):
        body = path.read_bytes()
        found.update(f"{path.relative_to(PACKAGE).as_posix()}\0{len(body)}\0".encode())
        found.update(body)
    return found.hexdigest()


@functools.cache
def packages() -> tuple[str, ...]:
    """Return "name-version" of every nvidia-cutlass-dsl* distribution and of tvm-ffi, sorted.

    By the names of their metadata folders: reading the metadata of all that is installed takes longer than loading a
    kernel.
    """
    patterns = ("nvidia_cutlass_dsl*.dist-info", "apache_tvm_ffi-*.dist-info")
    found = (path for folder in sys.path for pattern in patterns for path in Path(folder or ".").glob(pattern))
    return tuple(sorted({path.name.removesuffix(".dist-info") for path in found}))


def environment() -> tuple[str, ...]:
    """Return "NAME=value" of the variables that the compiler reads, sorted."""
    return tuple(
        f"{name}={value}"
        for name, value in sorted(os.environ.items())
        if name.startswith(("CUTE_DSL_", "CUTLASS_DSL_")) and not any(part in name for part in HARMLESS)
    )


def fingerprint() -> str:
    """Return 16 hexadecimal digits: another value, and no kernel compiled before is used."""
    parts = ("1", sources(), *packages(), *environment(), platform.machine(), platform.system())
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
