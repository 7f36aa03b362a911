"""Which key blocks a tile of queries visits, and which of them need no mask."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr


@cute.jit
def key_blocks(
    first: Int32,
    last: Int32,
    sk: Int32,
    left,
    right,
    tile_n: cutlass.Constexpr[int],
):
    """Return (begin, free_begin, free_end, end) for keys-aligned query positions `first`..`last`, both inclusive.

    A position is i + sk - sq. Blocks [begin, end) are visited from the end; the last, end - 1, is always masked (it
    may hold the end of the sequence), [free_end, end - 1) may cross the right bound, [free_begin, free_end) need no
    mask, [begin, free_begin) may cross the left bound. At least one block is visited: a tile that sees no key gets a
    block that is masked away.
    """
    blocks = cutlass.max(cute.ceil_div(sk, tile_n), 1)
    begin, end = Int32(0), blocks
    free_begin, free_end = Int32(0), blocks - 1
    if const_expr(left is not None):
        begin = cutlass.min(cutlass.max(first - left, 0) // tile_n, blocks - 1)
    if const_expr(right is not None):
        end = cutlass.min(end, cute.ceil_div(cutlass.max(last + 1 + right, 0), tile_n))
        end = cutlass.max(end, begin + 1)
        free_end = cutlass.min(cutlass.max(first + right + 1, 0) // tile_n, end - 1)
        free_end = cutlass.max(free_end, begin)
    if const_expr(left is not None):
        free_begin = cutlass.min(cutlass.max(cute.ceil_div(cutlass.max(last - left, 0), tile_n), begin), free_end)
    return begin, free_begin, free_end, end
