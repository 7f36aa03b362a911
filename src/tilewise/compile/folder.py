"""A folder of precompiled kernels: what a machine with neither the DSL nor a compiler runs from.

DIR/__init__.py       so that the folder can be shipped as a package
DIR/manifest.json     format, fingerprint of the sources, packages it was compiled with, and each kernel's key
DIR/libcute_dsl_runtime.so
DIR/<digest>.so       sealed as in the disk cache; the digest leaves out the compiler's version
"""

from __future__ import annotations

import functools
import json
import warnings
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ..target import Target
from .cache import is_sealed
from .fingerprint import sources
from .key import CompileKey
from .native import RUNTIME

MANIFEST = "manifest.json"
FORMAT = 1

#: A package of this name is found without TILEWISE_KERNELS.
PACKAGE = "tilewise_kernels"


def portable_digest(key: CompileKey) -> str:
    """Return the digest of `key` whatever compiler is, or is not, installed."""
    return replace(key, target=Target(key.target.arch, "")).digest


def locate(name: str | None) -> Path | None:
    """Return the folder that TILEWISE_KERNELS=`name` means: a path, a package, or by default `tilewise_kernels`."""
    if name is not None and Path(name).expanduser().is_dir():
        return Path(name).expanduser().resolve()
    if name is not None and not all(part.isidentifier() for part in name.split(".")):
        return None
    try:
        spec = find_spec(name or PACKAGE)
    except (ImportError, ValueError):
        return None
    return None if spec is None or spec.origin is None else Path(spec.origin).parent


class KernelFolder:
    """The kernels in `path`; unusable ones are reported once and then as good as absent."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.problem = ""
        self.manifest: dict[str, Any] = {}
        try:
            self.manifest = json.loads((path / MANIFEST).read_text())
        except (OSError, ValueError) as error:
            self.problem = f"{path / MANIFEST} cannot be read ({error})"
            return
        if self.manifest.get("format") != FORMAT:
            self.problem = f"{path} has format {self.manifest.get('format')}, this tilewise reads {FORMAT}"
        elif self.manifest.get("sources") != sources():
            self.problem = f"{path} was compiled from another version of tilewise ({self.manifest.get('version')})"

    @property
    def runtime(self) -> Path | None:
        """The runtime library in the folder, if it is there."""
        path = self.path / RUNTIME
        return path if path.is_file() else None

    def find(self, key: CompileKey) -> Path | None:
        """Return the file of `key`, checked bit by bit; None if it is absent or corrupt."""
        if self.problem:
            return None
        path = self.path / f"{portable_digest(key)}.so"
        try:
            if is_sealed(path.read_bytes()):
                return path
        except OSError:
            return None
        warnings.warn(f"tilewise: {path} is corrupt and not used; precompile it again", stacklevel=2)
        return None


@functools.cache
def _open(name: str | None) -> KernelFolder | None:
    path = locate(name)
    if path is None:
        if name is not None:
            warnings.warn(f"TILEWISE_KERNELS: expected a folder or a package, got {name!r}", stacklevel=2)
        return None
    folder = KernelFolder(path)
    if folder.problem:
        warnings.warn(f"tilewise: precompiled kernels are not used: {folder.problem}; precompile again", stacklevel=2)
    return folder


def kernel_folder() -> KernelFolder | None:
    """Return the folder that the settings name, or the package `tilewise_kernels`; None if there is neither."""
    from ..settings import settings

    return _open(settings().kernels)
