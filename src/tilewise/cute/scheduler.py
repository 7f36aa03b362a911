"""From a tile number to (query tile, head, sequence): dense by division, packed by a search of cu_seqlens.

Order: long tiles first within a head, heads that share K and V next to each other, so that they meet in L2.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr


def packed_slots(total: Int32, batch: Int32, tile_m: int) -> Int32:
    """Return the number of tile slots of packed queries, an upper bound on the tiles that needs no cu_seqlens.

    Sequence b owns the slots [cu[b] // tile_m + b, cu[b + 1] // tile_m + b + 1), at least as many as it has tiles;
    the rows after the last sequence count as one more.
    """
    return total // tile_m + batch + 1


@cute.jit
def sequence_of_slot(cu: cute.Tensor, slot: Int32, batch: Int32, group: cutlass.Constexpr[int], tile_m: cutlass.Constexpr[int]):
    """Return (b, first slot of b) by a 32-way search over the first slots; all lanes of the warp take part."""
    lane = cute.arch.lane_idx()
    low, span = Int32(0), batch + 1  # the answer lies in [low, low + span)
    while span > 1:
        step = cute.ceil_div(span, 32)
        probe = low + lane * step
        at_most = cutlass.Boolean(False)
        if (probe < low + span) & (probe <= batch):
            at_most = cu[probe] * group // tile_m + probe <= slot
        hits = cute.arch.popc(cute.arch.vote_ballot_sync(at_most))
        low = low + (hits - 1) * step
        span = cutlass.min(step, batch + 1 - low)
    return low, cu[low] * group // tile_m + low
