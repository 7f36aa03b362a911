"""Compile a key into a callable, once per process."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from threading import Lock
from typing import Any

from .key import CompileKey

#: Kernel name -> (module, class). A class is made from exactly (problem, config), and its `fake_arguments(problem,
#: config)` are what its `__call__` is compiled with.
KERNELS = {"sm90.forward": ("tilewise.backends.sm90.forward", "ForwardKernel")}

_compiled: dict[CompileKey, Callable[..., Any]] = {}
_lock = Lock()


def build(key: CompileKey, options: str = "") -> Any:
    """Compile `key` afresh, with extra compiler `options` appended, e.g. "--keep-cubin". Needs no GPU."""
    import cutlass.cute as cute

    module, name = KERNELS[key.kernel]
    cls = getattr(import_module(module), name)
    kernel = cls(key.problem, key.config)
    options = f"--enable-tvm-ffi --gpu-arch {key.target.arch} {options}".strip()
    return cute.compile(kernel, *cls.fake_arguments(key.problem, key.config), options=options)


def compile_kernel(key: CompileKey) -> Callable[..., Any]:
    """Return the callable for `key`, compiled at its first use in this process."""
    if (found := _compiled.get(key)) is not None:
        return found
    with _lock:
        if key not in _compiled:
            _compiled[key] = build(key)
        return _compiled[key]
