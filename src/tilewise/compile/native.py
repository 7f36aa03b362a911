"""From an object file to a callable, without the compiler: linking, the runtime library, loading."""

from __future__ import annotations

import ctypes
import functools
import os
import shutil
import subprocess
import threading
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

#: The one function of every shared object.
SYMBOL = "tilewise"
RUNTIME = "libcute_dsl_runtime.so"

#: Programs that link one object file to a shared object, most usual first. `ld` alone suffices.
LINKERS = ("cc", "gcc", "clang", "ld", "ld.lld")

_lock = threading.Lock()

#: Loaded for good: a CUDA graph may replay a kernel after its callable is gone.
_modules: list[Any] = []


def after_fork() -> None:
    """Replace the lock that a thread of the parent may have held."""
    global _lock
    _lock = threading.Lock()


@functools.cache
def linker() -> str | None:
    """Return the program that links: $CC if set, else the first of `LINKERS` on the path; None if there is none."""
    for name in (os.environ.get("CC", ""), *LINKERS):
        if name and (found := shutil.which(name)):
            return found
    return None


def link(source: Path, target: Path) -> None:
    """Link the object file `source` to the shared object `target`.

    Raises:
        RuntimeError: there is no linker, or it failed; with its own words. OSError: it could not be run.
    """
    program = linker()
    if program is None:
        raise RuntimeError(f"no linker found; install one of {', '.join(LINKERS)}")
    done = subprocess.run([program, "-shared", "-o", str(target), str(source)], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{program} failed: {done.stderr.strip()[-500:]}")


@functools.cache
def installed_runtime() -> Path | None:
    """Return the runtime library of the installed DSL, for torch's CUDA major version if there is a choice."""
    spec = find_spec("nvidia_cutlass_dsl")
    if spec is None:
        return None
    import torch

    major = (torch.version.cuda or "13").split(".")[0]
    folders = [Path(p) for p in spec.submodule_search_locations or ()]
    for name in (f"cu{major}", "cu13", "cu12"):
        for folder in folders:
            if (path := folder / name / "lib" / RUNTIME).is_file():
                return path
    return None


@functools.cache
def _load_runtime(path: str) -> ctypes.CDLL:
    # Kernels' shared objects name no library they need: they find the runtime's symbols among the global ones.
    return ctypes.CDLL(path, ctypes.RTLD_GLOBAL)


def load(path: Path, runtime: Path | None = None) -> Callable[..., Any]:
    """Return the kernel in the shared object `path`. Imports neither the DSL nor a compiler.

    Args:
        path: the shared object.
        runtime: the runtime library to use where no DSL is installed.

    Raises:
        RuntimeError: no runtime library, or the object cannot be loaded.
    """
    import tvm_ffi

    library = installed_runtime() or runtime
    if library is None:
        raise RuntimeError(f"{RUNTIME} not found: nvidia-cutlass-dsl and folders of precompiled kernels have it")
    with _lock:
        try:
            _load_runtime(str(library))
            module = tvm_ffi.load_module(str(path))
            _modules.append(module)
            return module[SYMBOL]  # type: ignore[no-any-return]
        except (OSError, AttributeError, RuntimeError) as error:
            raise RuntimeError(f"cannot load {path}: {error}") from error
