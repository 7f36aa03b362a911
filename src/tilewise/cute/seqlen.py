"""Where a sequence lies and how much of it counts, read on the device."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr


@cute.jit
def locate(cu, used, b: Int32, batch: Int32, size: Int32):
    """Return (offset, rows, counting) of sequence `b`.

    Dense (`cu` None): offset 0 and `size` rows. Packed: rows cu[b] .. cu[b + 1]; sequence number `batch`, one past the
    last, stands for the rows after cu[batch], of which none counts.
    """
    offset, rows = Int32(0), size
    inside = b < batch
    if const_expr(cu is not None):
        offset = cu[cutlass.min(b, batch)]
        end = size
        if inside:
            end = cu[b + 1]
        rows = end - offset
    counting = Int32(0)
    if inside:
        counting = rows
        if const_expr(used is not None):
            counting = cutlass.min(used[b], rows)
    return offset, rows, counting
