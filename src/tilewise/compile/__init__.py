"""The one door to the compiler: `compile_kernel(key)`, remembered per process."""

from .key import CompileKey
from .launch import compile_kernel

__all__ = ["CompileKey", "compile_kernel"]
