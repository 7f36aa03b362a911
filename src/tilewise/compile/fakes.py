"""Stand-ins for tensors at compile time: element type, rank and alignment, with sizes and strides left open."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass.cute.runtime import make_fake_tensor

DTYPES = {
    "float16": cutlass.Float16,
    "bfloat16": cutlass.BFloat16,
    "float32": cutlass.Float32,
    "int32": cutlass.Int32,
}


def tensor(dtype: str, sizes: tuple[Any, ...], align: int) -> Any:
    """Return a fake of `dtype` whose last dimension has stride 1; a size of None is open.

    Base and other strides are multiples of `align` bytes. Strides are 64-bit: products with 32-bit ones overflow
    beyond 2^31 elements.
    """
    kind = DTYPES[dtype]
    every = max(align * 8 // kind.width, 1)
    shape = tuple(cute.sym_int() if n is None else n for n in sizes)
    strides = (*(cute.sym_int64(divisibility=every) for _ in sizes[:-1]), 1)
    return make_fake_tensor(kind, shape, strides, assumed_align=align)
