"""Online softmax of score tiles held in registers (Milakov and Gimelshein, 2018), in the log2 domain.

`scale_log2` turns a raw score into an exponent of two. Row sums stay per thread until `finalize`; the four threads of
a quad share a row.
"""

from __future__ import annotations

import math

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, const_expr

LOG2_E = math.log2(math.e)
LN_2 = math.log(2.0)


@cute.jit
def cap(s: cute.Tensor, scale_over_cap: Float32):
    """Replace scores by tanh(s * scale / softcap), as 1 - 2 / (1 + e^2x).

    The hardware's own tanh is good to 2^-11 only: times a softcap of 50 that is 0.02 in the exponent.
    """
    for j in cutlass.range_constexpr(cute.size(s)):
        e = cute.math.exp2(s[j] * (scale_over_cap * Float32(2.0 * LOG2_E)), fastmath=True)
        s[j] = Float32(1.0) - Float32(2.0) * cute.arch.rcp_approx(e + Float32(1.0))


@cute.jit
def step(
    s: cute.Tensor,
    row_max: cute.Tensor,
    row_sum: cute.Tensor,
    rescale: cute.Tensor,
    scale_log2: Float32,
    first: cutlass.Constexpr[bool],
    may_be_empty: cutlass.Constexpr[bool],
    lazy: cutlass.Constexpr[bool] = False,
):
    """Turn scores `s` (rows, columns) into unnormalised probabilities and update the running maximum and sum.

    `rescale[r]` is what earlier sums and outputs are to be multiplied by. `may_be_empty`: a row may have seen no key.
    `lazy`: a maximum that grew by at most 2^8 is not taken up, so that `rescale[r]` is exactly 1.
    """
    columns = cute.size(s, mode=[1])
    for r in cutlass.range_constexpr(cute.size(s, mode=[0])):
        top = row_max[r]
        for j in cutlass.range_constexpr(columns):
            top = cute.arch.fmax(top, s[r, j])
        top = cute.arch.warp_reduction_max(top, threads_in_group=4)
        if const_expr(lazy and not first):
            near = (top - row_max[r]) * scale_log2 <= Float32(8.0)
            top = Float32(cutlass.select_(near, row_max[r], top))
        safe = top
        if const_expr(may_be_empty):
            safe = Float32(cutlass.select_(top == -Float32.inf, Float32(0.0), top))
        shift = -safe * scale_log2
        if const_expr(not first):
            rescale[r] = cute.math.exp2((row_max[r] - safe) * scale_log2, fastmath=True)
        row_max[r] = top
        # Four partial sums: one chain of additions would be the longest path of the tile.
        part = [Float32(0.0)] * 4
        for j in cutlass.range_constexpr(columns):
            p = cute.math.exp2(s[r, j] * scale_log2 + shift, fastmath=True)
            s[r, j] = p
            part[j % 4] = part[j % 4] + p
        total = (part[0] + part[1]) + (part[2] + part[3])
        if const_expr(first):
            row_sum[r] = total
        else:
            row_sum[r] = row_sum[r] * rescale[r] + total


@cute.jit
def rescale_rows(o: cute.Tensor, factor: cute.Tensor):
    """Multiply row r of `o` (rows, columns) by factor[r]."""
    for r in cutlass.range_constexpr(cute.size(o, mode=[0])):
        for j in cutlass.range_constexpr(cute.size(o, mode=[1])):
            o[r, j] = o[r, j] * factor[r]


@cute.jit
def finalize(row_max: Float32, row_sum: Float32, scale_log2: Float32, sink_log2, counts: Boolean):
    """Return (factor, lse, empty) of one row: what to multiply the output by, its natural-log LSE, and if it is zero.

    `sink_log2` is None or the sink times log2 e. Rows that do not count give lse = -inf.
    """
    total = cute.arch.warp_reduction_sum(row_sum, threads_in_group=4)
    empty = total == Float32(0.0)
    top = Float32(cutlass.select_(empty, -Float32.inf, row_max * scale_log2))
    keep = Float32(1.0)
    if const_expr(sink_log2 is not None):
        peak = cute.arch.fmax(top, sink_log2)
        safe = Float32(cutlass.select_(peak == -Float32.inf, Float32(0.0), peak))
        keep = cute.math.exp2(top - safe, fastmath=True)
        total = total * keep + cute.math.exp2(sink_log2 - safe, fastmath=True)
        top = safe
    factor = keep * cute.arch.rcp_approx(total)
    lse = (top + cute.math.log2(total, fastmath=True)) * Float32(LN_2)
    lse = Float32(cutlass.select_((total == Float32(0.0)) | (~counts), -Float32.inf, lse))
    return factor, lse, empty | (~counts)
