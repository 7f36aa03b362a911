"""Warpgroup matrix multiplies: register views of accumulators, issue order, and packing of P.

A warpgroup's accumulator has the layout ((2, 2, N/8), M, N'): column pair, row + 8, block of eight columns. Thread
`lane` of warp `w` holds row 16 w + lane // 4 (and + 8) and columns 8 j + 2 (lane % 4) + {0, 1}
(PTX ISA, "Register fragments for wgmma.mma_async.m64nNk16").
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as sm90
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup


def rows_and_columns(acc: cute.Tensor) -> cute.Tensor:
    """View an accumulator as (rows, columns) of this thread; no data moves."""
    (s0, s1, s2), sm, sn = acc.layout.shape
    (d0, d1, d2), dm, dn = acc.layout.stride
    return cute.make_tensor(
        acc.iterator, cute.make_layout(((s1, sm), (s0, s2, sn)), stride=((d1, dm), (d0, d2, dn)))
    )


def as_operand_a(t: cute.Tensor) -> cute.Tensor:
    """View a 16-bit tensor of accumulator layout as the register operand A of the next multiply."""
    (s0, s1, s2), sm, sn = t.layout.shape
    (d0, d1, d2), dm, dn = t.layout.stride
    return cute.make_tensor(
        t.iterator,
        cute.make_layout(((s0, s1, 2), sm, (s2 // 2, sn)), stride=((d0, d1, d2), dm, (2 * d2, dn))),
    )


@cute.jit
def pack(dst: cute.Tensor, src: cute.Tensor):
    """Round fp32 `src` into 16-bit `dst`, here and not later.

    Volatile PTX: a plain conversion is sunk past the loop's back edge to its use, which keeps fp32 P alive beside the
    next S and spills.
    """
    kind = "f16x2" if const_expr(dst.element_type is cutlass.Float16) else "bf16x2"
    pairs = cute.recast_tensor(dst, Int32)
    for i in cutlass.range_constexpr(cute.size(src) // 2):
        pairs[i] = cute.arch.inline_ptx(
            "cvt.rn." + kind + ".f32 {$w0}, {$r0}, {$r1};",
            write_only_types=[Int32],
            read_only_args=[src[2 * i + 1], src[2 * i]],
        )


def tiled_mmas(dtype, n: int, b_major: OperandMajorMode, a_source: warpgroup.OperandSource):
    """Return (overwriting, accumulating) 64 x n multiplies. The flag is set once: one flag holds for all k-steps."""
    pair = [
        sm90.make_trivial_tiled_mma(dtype, dtype, OperandMajorMode.K, b_major, Float32, (1, 1, 1), (64, n), a_source)
        for _ in range(2)
    ]
    pair[0].set(warpgroup.Field.ACCUMULATE, False)
    pair[1].set(warpgroup.Field.ACCUMULATE, True)
    return pair


@cute.jit
def issue(mma_zero, mma_add, acc: cute.Tensor, a: cute.Tensor, b: cute.Tensor, zero: cutlass.Constexpr[bool]):
    """Issue acc (+)= a b and commit it as one group. The fence comes first: `a` or `acc` may be new registers."""
    warpgroup.fence()
    for k in cutlass.range_constexpr(cute.size(a, mode=[2])):
        mma = mma_zero if const_expr(zero and k == 0) else mma_add
        cute.gemm(mma, acc, a[None, None, k], b[None, None, k], acc)
    warpgroup.commit_group()
