"""Where code runs: the GPU generation and the compiler, as far as generated code depends on them."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

import torch


@dataclass(frozen=True)
class Target:
    """A GPU generation and the versions of what compiles for it.

    Attributes:
        arch: as the compiler names it, e.g. "sm_90a".
        compiler: version of nvidia-cutlass-dsl, or "" where it is not installed.
    """

    arch: str
    compiler: str

    @classmethod
    @functools.cache
    def of_arch(cls, arch: str) -> Target:
        """Return the target for `arch` with the compiler installed here; needs no GPU."""
        try:
            compiler = version("nvidia-cutlass-dsl")
        except PackageNotFoundError:
            compiler = ""
        return cls(arch, compiler)


@functools.cache
def capability(index: int) -> tuple[int, int]:
    """Return (major, minor) of CUDA device `index`."""
    return torch.cuda.get_device_capability(index)


@functools.cache
def multiprocessors(index: int) -> int:
    """Return the number of multiprocessors of CUDA device `index`."""
    return int(torch.cuda.get_device_properties(index).multi_processor_count)
