"""Visibility within a score tile: one band of keys per row, compared with compile-time column numbers."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, const_expr


@cute.jit
def apply_band(s: cute.Tensor, low, high):
    """Hide columns outside [low[r], high[r]) of `s` (rows, columns).

    `low` and `high` are lists of Int32, one a row, relative to this thread's first column, or None where unbounded.
    """
    for r in cutlass.range_constexpr(cute.size(s, mode=[0])):
        for j in cutlass.range_constexpr(cute.size(s, mode=[1])):
            column = (j // 2) * 8 + j % 2
            if const_expr(low is not None and high is not None):
                seen = (low[r] <= column) & (high[r] > column)
                s[r, j] = Float32(cutlass.select_(seen, s[r, j], -Float32.inf))
            elif const_expr(high is not None):
                s[r, j] = Float32(cutlass.select_(high[r] > column, s[r, j], -Float32.inf))
            elif const_expr(low is not None):
                s[r, j] = Float32(cutlass.select_(low[r] <= column, s[r, j], -Float32.inf))
