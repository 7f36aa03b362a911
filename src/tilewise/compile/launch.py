"""From a key to a callable, once per process: remembered, precompiled, from the disk cache, or compiled here."""

from __future__ import annotations

import os
import shlex
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ..errors import MissingKernelError
from ..settings import log
from . import native
from .cache import DiskCache, disk_cache
from .folder import kernel_folder
from .key import CompileKey

#: Kernel name -> (module, class). A class is made from exactly (problem, config), and its `fake_arguments(problem,
#: config)` are what its `__call__` is compiled with.
KERNELS = {"sm90.forward": ("tilewise.backends.sm90.forward", "ForwardKernel")}

Kernel = Callable[..., Any]

_compiled: dict[CompileKey, Kernel] = {}
_locks: dict[CompileKey, threading.Lock] = {}
_guard = threading.Lock()
#: The DSL traces into state of its own: one kernel at a time. Loading others goes on meanwhile.
_building = threading.Lock()


def _after_fork() -> None:
    """Give a forked child locks that no thread of its parent holds; what is compiled stays."""
    global _guard, _building
    _guard, _building = threading.Lock(), threading.Lock()
    _locks.clear()
    native.after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def can_compile() -> bool:
    """Say whether the DSL is installed."""
    return find_spec("cutlass") is not None


def build(key: CompileKey, options: str = "") -> Any:
    """Compile `key` afresh, with extra compiler `options` appended, e.g. "--keep-cubin". Needs no GPU."""
    import cutlass.cute as cute

    module, name = KERNELS[key.kernel]
    cls = getattr(import_module(module), name)
    kernel = cls(key.problem, key.config)
    options = f"--enable-tvm-ffi --gpu-arch {key.target.arch} {options}".strip()
    return cute.compile(kernel, *cls.fake_arguments(key.problem, key.config), options=options)


def export(compiled: Any, target: Path) -> None:
    """Write what `build` returned as the shared object `target`. RuntimeError: it cannot be linked here."""
    source = target.with_suffix(".o")
    compiled.export_to_c(object_file_path=str(source), function_name=native.SYMBOL)
    native.link(source, target)
    source.unlink()


def compile_kernel(key: CompileKey) -> Kernel:
    """Return the callable for `key`: built at most once per process, and per machine while the disk cache lasts.

    Raises:
        MissingKernelError: it was not precompiled and the DSL is not installed.
    """
    if (found := _compiled.get(key)) is not None:
        return found
    with _guard:
        lock = _locks.setdefault(key, threading.Lock())
    with lock:
        if key not in _compiled:
            start = time.perf_counter()
            kernel, source = _obtain(key)
            milliseconds = (time.perf_counter() - start) * 1e3
            log("compile", key, lambda: f"{key.kernel} {key.problem} {key.config}: {source}, {milliseconds:.0f} ms")
            _compiled[key] = kernel
        return _compiled[key]


def _obtain(key: CompileKey) -> tuple[Kernel, str]:
    """Return the callable and where it came from."""
    folder = kernel_folder()
    if folder is not None and (path := folder.find(key)) is not None:
        return native.load(path, folder.runtime), f"precompiled in {folder.path}"
    if not can_compile():
        raise MissingKernelError(missing(key))
    disk = disk_cache()
    if disk is None:
        return _build_without_disk(key), "compiled"
    if (kernel := _from_disk(disk, key)) is not None:
        return kernel, f"from {disk.folder}"
    with ExitStack() as stack:
        if not stack.enter_context(disk.lock(key.digest)):
            return _build_without_disk(key), "compiled, not cached"
        if (kernel := _from_disk(disk, key)) is not None:
            return kernel, f"from {disk.folder}, compiled by another process"
        disk.count("misses")
        compiled = _build(key)
        try:
            path = disk.publish(key.digest, lambda target: export(compiled, target))
            return (compiled if path is None else native.load(path)), "compiled"
        except RuntimeError as error:  # no linker, or a kernel evicted at once
            disk.warn(str(error))
            return compiled, "compiled, not cached"


def _from_disk(disk: DiskCache, key: CompileKey) -> Kernel | None:
    path = disk.find(key.digest)
    if path is None:
        return None
    try:
        kernel = native.load(path)
    except RuntimeError as error:
        disk.warn(str(error))
        return None
    disk.count("hits")
    return kernel


def _build(key: CompileKey) -> Any:
    with _building:
        return build(key)


def _build_without_disk(key: CompileKey) -> Kernel:
    """Compile, and call through a shared object all the same where one can be linked: its calls cost less."""
    compiled = _build(key)
    if native.linker() is None:
        return compiled  # type: ignore[no-any-return]
    try:
        with tempfile.TemporaryDirectory(prefix="tilewise-") as folder:
            export(compiled, Path(folder, "kernel.so"))
            return native.load(Path(folder, "kernel.so"))
    except (OSError, RuntimeError):
        return compiled  # type: ignore[no-any-return]


def missing(key: CompileKey) -> str:
    """Return the text of the error for a kernel that cannot be had, with the command that adds it."""
    from ..settings import settings
    from .folder import locate
    from .keytext import to_text

    folder = locate(settings().kernels)
    command = f"python -m tilewise precompile --key {shlex.quote(to_text(key))} -o {shlex.quote(str(folder or 'DIR'))}"
    where = f"not in {folder}" if folder else "no folder of precompiled kernels is set (TILEWISE_KERNELS)"
    return (
        f"{key.kernel}: the kernel for this call is not precompiled ({where}) and nvidia-cutlass-dsl is not installed "
        f"to compile it: {key.problem}\n  on a machine with tilewise[cuda], this adds it:\n  {command}"
    )
